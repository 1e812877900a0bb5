/* cache[slot] = k, v, converted to the cache's dtype.
 *   k, v   f32, or like cache  [tokens, kv_heads, head_dim]
 *   slots  i64                 [tokens]   block * block_size + offset; < 0 is skipped
 *   cache  f32 f16 bf16        [blocks, 2, kv_heads, block_size, head_dim]
 * Limit: read plus write bandwidth. A piece of work is one half (K or V) of one KV head:
 * tokens stay in order inside it, so that of two with one slot the last one wins. */
#include "cpu/split.h"
#include "cpu/vec.h"

static inline KVL_HOT void convert_row(const void *from, void *to, int dim, const int dtype,
                                       const int cache_dtype) {
  for (int d = 0; d < dim; d += VF) {
    int lanes = vf_left(d, dim);
    vf x = vf_load_n(at_const(from, d, dtype), lanes, dtype);
    vf_store_n(at(to, d, cache_dtype), x, lanes, cache_dtype);
  }
}

/* Pieces are (half, KV head). */
static inline KVL_HOT void append(const struct kvl_append_kv_args *a, int64_t begin,
                                  int64_t end, const int cache_dtype) {
  const int64_t heads = a->cache.kv_heads, size = a->cache.block_size;
  const int dim = a->cache.head_dim;
  for (int64_t piece = begin; piece < end; piece++)
    for (int64_t t = 0; t < a->tokens; t++) {
      int64_t slot = a->slots[t], block = slot / size, head = piece % heads;
      if (slot < 0 || block >= a->cache.blocks) continue;
      const void *from = at_const(piece < heads ? a->k : a->v, (t * heads + head) * dim,
                                  a->dtype);
      void *to = at(a->cache.kv, ((block * 2 * heads + piece) * size + slot % size) * dim,
                    cache_dtype);
      if (a->dtype == cache_dtype) memcpy(to, from, (size_t)dim * kvl__float_bytes(a->dtype));
      else convert_row(from, to, dim, KVL_DTYPE_F32, cache_dtype);
    }
}

static int append_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_append_kv_args *a = args;
  KVL_BY_FLOAT(a->cache.dtype, append(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(append_kv) {
  const struct kvl_append_kv_args *a = args;
  if (a->tokens == 0) return 0;
  return kvl__split(2 * a->cache.kv_heads, kvl__grain_rows(a->tokens * a->cache.head_dim),
                    append_piece, a);
}
