/* Applies rope to q in place, and appends v and the rotated k to the cache, in one pass over
 * the tokens.
 *   q          f32 f16 bf16         [tokens, heads, head_dim]      in place
 *   k, v       like q               [tokens, kv_heads, head_dim]   stay as they are; v is
 *                                   none where values are the first numbers of their keys
 *   positions  i32                  [tokens]
 *   inv_freq   f32                  [pairs]    first + 2 * pairs <= head_dim
 *   places     i64                  [tokens]   < 0 is skipped; no place comes twice
 *   cache      f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   k_scale, v_scale  f32           [kv_heads]   optional
 * Gives the same bits as rope and append_kv, because k is rounded to its own dtype in
 * between.
 * Limit: read plus write bandwidth. */
#include "args/attention.h"
#include "cpu/attention/append.h"
#include "cpu/linear/rope.h"

static inline KVL_HOT void rotate_head(const struct kvl_rope_append_args *a, void *row,
                                       const float *s, const float *c, const int dtype) {
  rotate(at(row, a->first, dtype), at(row, a->first + a->pairs, dtype), (int)a->pairs, s, c,
         dtype);
}

static int write_row(const struct kvl_pages *to, const struct kvl_strips *of, char *strip,
                     int64_t token, const void *from, float scale, int dtype) {
  KVL_BY_CODEC(to->codec, return append_row(from, of, strip, token, scale, dtype, D))
  return 0;
}

/* K and V of one token and KV head to offset `offset` of a block. */
static inline KVL_HOT int append_head(const struct kvl_rope_append_args *a, int64_t token,
                                      int64_t head, int64_t block, int64_t offset,
                                      const float *s, const float *c, const int dtype) {
  const struct kvl_pages *to = &a->cache;
  const struct kvl_strips *key = &to->key, *value = &to->value;
  const int64_t row = token * to->kv_heads + head;
  float k[ROW_MOST];
  memcpy(k, at_const(a->k, row * key->dim, dtype),
         (size_t)key->dim * kvl__float_bytes(dtype));
  rotate_head(a, k, s, c, dtype);
  char *memory = to->memory;
  int status = write_row(to, key, memory + kvl__strip_at(to, key, block, head), offset, k,
                         to->k_scale ? to->k_scale[head] : 1, dtype);
  if (status < 0 || !a->v) return status;
  return write_row(to, value, memory + kvl__strip_at(to, value, block, head), offset,
                   at_const(a->v, row * value->dim, dtype),
                   to->v_scale ? to->v_scale[head] : 1, dtype);
}

static inline KVL_HOT int tokens(const struct kvl_rope_append_args *a, int64_t begin,
                                 int64_t end, const int dtype) {
  const int64_t heads = a->cache.kv_heads, size = a->cache.block_size;
  const int64_t dim = a->cache.key.dim;
  float s[STRIP], c[STRIP];
  for (int64_t t = begin; t < end; t++) {
    sincos_strip((float)a->positions[t], a->inv_freq, (int)a->pairs, s, c);
    for (int64_t h = 0; h < a->heads; h++)
      rotate_head(a, at(a->q, (t * a->heads + h) * dim, dtype), s, c, dtype);
    int64_t place = a->places[t], block = place / size;
    if (place < 0 || block >= a->cache.blocks) continue;
    for (int64_t h = 0; h < heads; h++) {
      int status = append_head(a, t, h, block, place % size, s, c, dtype);
      if (status < 0) return status;
    }
  }
  return 0;
}

static int rope_append_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_rope_append_args *a = args;
  KVL_BY_FLOAT(a->dtype, return tokens(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(rope_append) {
  const struct kvl_rope_append_args *a = args;
  const struct kvl_pages *to = &a->cache;
  int64_t token = a->heads + kvl__strips(to), rows = 0; /* rows of a token */
  for (int64_t t = 0; to->pinned && t < a->tokens; t++)
    rows += a->places[t] >= 0 && a->places[t] / to->block_size < to->blocks;
  kvl__link_bytes(queue, KVL_LINK_TO_HOST,
                  rows * kvl__strips(to) * kvl__bytes_token(&to->key));
  return kvl__split(a->tokens, kvl__grain_rows(token * to->key.dim), rope_append_piece, a);
}
