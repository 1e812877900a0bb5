/* Copies a token's keys and values from one place to another. */
#ifndef KVL_CPU_TOKEN_H
#define KVL_CPU_TOKEN_H

#include <string.h>

#include "args/evict.h"

/* Copies a row of a strip, and its scales. */
static inline void copy_row(const struct kvl_pages *src, int64_t from,
                            const struct kvl_pages *dst, int64_t to,
                            const struct kvl_strips *of, int head) {
  const int64_t size = src->block_size;
  const char *x = (const char *)src->memory + kvl__strip_at(src, of, from / size, head);
  char *y = (char *)dst->memory + kvl__strip_at(dst, of, to / size, head);
  memcpy(y + to % size * of->bytes_row, x + from % size * of->bytes_row,
         (size_t)of->bytes_row);
  const int64_t bytes = 2 * of->groups;
  if (bytes)
    memcpy(y + of->scales + to % size * bytes, x + of->scales + from % size * bytes,
           (size_t)bytes);
}

/* Of every KV head. A place that is out of range on either side is skipped. */
static inline void copy_token(const struct kvl_pages *src, int64_t from,
                              const struct kvl_pages *dst, int64_t to) {
  const int64_t size = src->block_size;
  if (from < 0 || from >= src->blocks * size || to < 0 || to >= dst->blocks * size) return;
  for (int head = 0; head < src->kv_heads; head++) {
    copy_row(src, from, dst, to, &src->key, head);
    if (src->value.begin) copy_row(src, from, dst, to, &src->value, head);
  }
}

#endif
