/* The inside of the block pool, for sequence.c. */
#ifndef KVL_BLOCK_POOL_H
#define KVL_BLOCK_POOL_H

#include "core/status.h"

struct kvl_pool {
  int blocks, block_size, watermark, free_count;
  int held_peak;      /* blocks, since the pool was opened or the peak reset */
  int64_t evicted;    /* blocks that evictions gave back, less those that they took */
  int holders;        /* the handle and the sequences */
  int64_t opened;     /* sequences so far */
  int32_t *refs;      /* [blocks] */
  int32_t *free_list; /* [free_count], a stack */
};

/* Fails unless n blocks can be taken. */
int kvl__pool_expect(const kvl_pool *p, int64_t n);
/* Takes n blocks, which can be taken, with one reference each. */
void kvl__pool_take(kvl_pool *p, int n, int32_t *out);
void kvl__pool_hold(kvl_pool *p, int32_t block);
void kvl__pool_release(kvl_pool *p, int32_t block);
void kvl__pool_unref(kvl_pool *p);

#endif
