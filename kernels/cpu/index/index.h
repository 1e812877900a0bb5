/* Finds the key and the scale of a place in index-K memory. */
#ifndef KVL_CPU_INDEX_H
#define KVL_CPU_INDEX_H

#include "args/index.h"
#include "cpu/vec.h"

struct index_place {
  uint8_t *key;
  float *scale;
}; /* key NULL: there is no such place */

/* The scale is aligned, because dim + 4 is a multiple of 4. */
static inline struct index_place index_at(const struct kvl_index_view *view, int64_t block,
                                          int64_t offset) {
  if (block < 0 || block >= view->blocks) return (struct index_place){0};
  const int64_t keys = (int64_t)view->block_size * view->dim;
  uint8_t *memory = view->memory + block * (keys + 4 * (int64_t)view->block_size);
  return (struct index_place){memory + offset * view->dim, (float *)(memory + keys) + offset};
}
static inline struct index_place index_of_place(const struct kvl_index_view *view,
                                                int64_t place) {
  if (place < 0) return (struct index_place){0};
  return index_at(view, place / view->block_size, place % view->block_size);
}

#endif
