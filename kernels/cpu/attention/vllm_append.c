/* Writes the K and V of new tokens into vLLM's cache layout, converted to its dtype.
 *   k, v         like the caches or f32; f32 f16 bf16 for f8e4m3
 *                                     [tokens, kv_heads, head_dim]
 *   places       i64                  [tokens]   block * block_size + offset; < 0 is skipped
 *   key_cache    f32 f16 bf16 f8e4m3  [blocks, kv_heads, head_dim / x, block_size, x]
 *   value_cache  like key_cache       [blocks, kv_heads, head_dim, block_size]
 * x = 16 / bytes of an element. Limit: single stores, block_size elements apart.
 * Source: reshape_and_cache of vllm-project/vllm. */
#include "args/attention.h"
#include "cpu/split.h"
#include "cpu/vec.h"

/* Pieces are KV heads. Tokens stay in order inside one, so that the last of two with the same
 * place wins. */
static inline KVL_HOT void append(const struct kvl_vllm_append_args *a, int64_t head,
                                  const int dtype) {
  const struct kvl_vllm_view *c = &a->cache;
  const int x = 16 / kvl__float_bytes(dtype), dim = c->head_dim;
  const float k_scale = c->k_scale ? *c->k_scale : 1, v_scale = c->v_scale ? *c->v_scale : 1;
  for (int64_t t = 0; t < a->tokens; t++) {
    int64_t block = a->places[t] / c->block_size, in_block = a->places[t] % c->block_size;
    if (a->places[t] < 0 || block >= c->blocks) continue;
    int64_t slice = (block * c->kv_heads + head) * c->block_size * dim;
    int64_t from = (t * c->kv_heads + head) * dim;
    for (int d = 0; d < dim; d++) {
      int64_t key = slice + (d / x * c->block_size + in_block) * x + d % x;
      int64_t value = slice + d * c->block_size + in_block;
      f32_store(c->keys, key, f32_load(a->k, from + d, a->dtype) / k_scale, dtype);
      f32_store(c->values, value, f32_load(a->v, from + d, a->dtype) / v_scale, dtype);
    }
  }
}

static int append_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_vllm_append_args *a = args;
  for (int64_t head = begin; head < end; head++)
    KVL_BY_STORED(a->cache.dtype, append(a, head, D))
  return 0;
}

KVL_CPU_KERNEL(vllm_append) {
  const struct kvl_vllm_append_args *a = args;
  return kvl__split(a->cache.kv_heads, kvl__grain_rows(a->tokens * a->cache.head_dim),
                    append_piece, a);
}
