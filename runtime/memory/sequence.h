/* The inside of a sequence, for sequence.c and tables.c. */
#ifndef KVL_SEQUENCE_H
#define KVL_SEQUENCE_H

#include "memory/block_pool.h"

struct kvl_sequence {
  kvl_pool *pool;
  int layers, heads, cuts; /* cuts = layers * heads */
  int length, capacity;    /* capacity: entries of each cut's table */
  int floor;               /* the length at the last eviction, 0 before one */
  int lifted;              /* the length at which the caps ended, INT32_MAX while they hold */
  int may_share;           /* pages may have other references */
  int fresh;               /* of what an eviction left: the pages that it took */
  int64_t serial, edits;   /* the number of the sequence; how often its tables changed other
                            * than by growth */
  int32_t *held;           /* [cuts] */
  int32_t *base, *cap;     /* [cuts]: held at `floor`, and at most */
  int32_t *last;           /* [cuts]: the last block, so that a step need not look for it */
  int32_t *blocks;         /* [cuts, capacity] */
};

static inline int kvl__blocks_for(const kvl_pool *p, int64_t tokens) {
  const uint32_t size = (uint32_t)p->block_size; /* tokens < 2^31: 32 bits divide faster */
  return (int)(((uint32_t)tokens + size - 1) / size);
}
static inline int kvl__count(const kvl_sequence *s, int cut) {
  return kvl__blocks_for(s->pool, s->held[cut]);
}
/* How many tokens a cut holds when the text has `length` tokens (at least `floor`). */
static inline int kvl__held_at(const kvl_sequence *s, int cut, int64_t length) {
  const int64_t capped = length < s->lifted ? length : s->lifted;
  const int64_t all = s->base[cut] + capped - s->floor;
  return (int)((all < s->cap[cut] ? all : s->cap[cut]) + length - capped);
}
static inline int32_t *kvl__table(const kvl_sequence *s, int cut) {
  return s->blocks + (int64_t)cut * s->capacity;
}

#endif
