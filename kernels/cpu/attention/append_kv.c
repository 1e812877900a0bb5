/* Writes k and v to their places in the cache, converted to its dtype. An f8e4m3 cache gets
 * k / k_scale and v / v_scale.
 *   k, v    f32, or like cache (to f8e4m3: f32 f16 bf16)  [tokens, kv_heads, head_dim]
 *   places  i64                 [tokens]   block * block_size + offset; < 0 is skipped
 *   cache   f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   k_scale, v_scale  f32       [kv_heads]   optional
 * Limit: read plus write bandwidth. */
#include "args/attention.h"
#include "cpu/attention/append.h"

KVL_CPU_KERNEL(append_kv) {
  const struct kvl_append_kv_args *a = args;
  struct append to_cache = {.to = a->cache,
                            .k = a->k,
                            .v = a->v,
                            .places = a->places,
                            .tokens = a->tokens,
                            .blocks = a->cache.blocks,
                            .dtype = a->dtype};
  return append_run(&to_cache, queue);
}
