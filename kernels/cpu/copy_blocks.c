/* Copies whole blocks of the cache: block dst[i] = block src[i].
 *   src, dst  i32                  [n]   -1 is skipped; no block is in both
 *   cache     f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 * Limit: read plus write bandwidth. The work is divided by the bytes of a block and not by
 * the list, so that the last of two entries with the same dst wins. */
#include "cpu/split.h"
#include "cpu/vec.h"

static int64_t block_bytes(const struct kvl_cache_view *c) {
  return 2LL * c->kv_heads * c->block_size * c->head_dim * kvl__float_bytes(c->dtype);
}

static int copy_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_copy_blocks_args *a = args;
  int64_t bytes = block_bytes(&a->cache);
  for (int64_t i = 0; i < a->n; i++) {
    int64_t src = a->src[i], dst = a->dst[i];
    if (src < 0 || src >= a->cache.blocks || dst < 0 || dst >= a->cache.blocks) continue;
    memcpy((char *)a->cache.kv + dst * bytes + begin,
           (const char *)a->cache.kv + src * bytes + begin, (size_t)(end - begin));
  }
  return 0;
}

KVL_CPU_KERNEL(copy_blocks) {
  const struct kvl_copy_blocks_args *a = args;
  int64_t grain = 4LL * KVL_GRAIN / i64_max(1, a->n);
  return kvl__split(block_bytes(&a->cache), i64_max(4096, grain), copy_piece, a);
}
