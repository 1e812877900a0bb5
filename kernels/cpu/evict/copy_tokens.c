/* Copies tokens within KV memory, or between two memories with pages of one format: token
 * to[i] = token from[i], keys and values of every KV head.
 *   src, dst  [blocks, ...page]
 *   from, to  i64  [n]   places; an entry that is out of range on either side is skipped
 * Limit: read plus write bandwidth. */
#include "cpu/evict/token.h"
#include "cpu/split.h"
#include "cpu/vec.h"

static int tokens_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_copy_tokens_args *a = args;
  for (int64_t i = begin; i < end; i++) copy_token(&a->src, a->from[i], &a->dst, a->to[i]);
  return 0;
}

KVL_CPU_KERNEL(copy_tokens) {
  const struct kvl_copy_tokens_args *a = args;
  const int64_t bytes = a->src.bytes_page / i64_max(1, a->src.block_size);
  return kvl__split(a->n, kvl__grain_rows(bytes / 4), tokens_piece, a);
}
