/* Copies tokens within KV memory, or between two memories with pages of one format: token
 * to[i] = token from[i], keys and values of every KV head.
 *   src, dst  [blocks, ...page]
 *   from, to  i64  [n]   places; an entry that is out of range on either side is skipped
 * Limit: read plus write bandwidth. */
#include "args/evict.h"
#include "cpu/split.h"
#include "cpu/vec.h"

/* Copies a row of a strip, and its scales. */
static void copy_row(const struct kvl_copy_tokens_args *a, const struct kvl_strips *of,
                     int64_t from, int64_t to, int head) {
  const int64_t size = a->src.block_size;
  char *dst = (char *)a->dst.memory + kvl__strip_at(&a->dst, of, to / size, head);
  const char *src = (const char *)a->src.memory +
                    kvl__strip_at(&a->src, of, from / size, head);
  memcpy(dst + to % size * of->bytes_row, src + from % size * of->bytes_row,
         (size_t)of->bytes_row);
  const int64_t bytes = 2 * of->groups;
  if (bytes)
    memcpy(dst + of->scales + to % size * bytes, src + of->scales + from % size * bytes,
           (size_t)bytes);
}

static int tokens_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_copy_tokens_args *a = args;
  const int64_t size = a->src.block_size;
  for (int64_t i = begin; i < end; i++) {
    const int64_t from = a->from[i], to = a->to[i];
    if (from < 0 || from >= a->src.blocks * size || to < 0 || to >= a->dst.blocks * size)
      continue;
    for (int head = 0; head < a->src.kv_heads; head++) {
      copy_row(a, &a->src.key, from, to, head);
      if (a->src.value.begin) copy_row(a, &a->src.value, from, to, head);
    }
  }
  return 0;
}

KVL_CPU_KERNEL(copy_tokens) {
  const struct kvl_copy_tokens_args *a = args;
  const int64_t bytes = a->src.bytes_page / i64_max(1, a->src.block_size);
  return kvl__split(a->n, kvl__grain_rows(bytes / 4), tokens_piece, a);
}
