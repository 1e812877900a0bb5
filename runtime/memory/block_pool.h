/* The inside of the block pool, for sequence.c. */
#ifndef KVL_BLOCK_POOL_H
#define KVL_BLOCK_POOL_H

#include "core/status.h"

struct kvl_pool {
  int blocks, block_size, watermark, free_count;
  int holders;        /* the handle and the sequences */
  int32_t *refs;      /* [blocks] */
  int32_t *free_list; /* [free_count], a stack */
};

/* Takes n blocks with one reference each, or no block if that many cannot be taken. */
int kvl__pool_take(kvl_pool *p, int n, int32_t *out);
void kvl__pool_hold(kvl_pool *p, int32_t block);
void kvl__pool_release(kvl_pool *p, int32_t block);
void kvl__pool_unref(kvl_pool *p);

#endif
