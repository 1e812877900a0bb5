/* Copies the keys and values of some blocks out of their pages, as the codec gives them,
 * without scales by KV head.
 *   cache   f32 f16 bf16 f8e4m3  pages
 *   blocks  i32                  [n]   out of range (-1): zeros
 *   k, v    like cache, f32, f16 or bf16  [n, kv_heads, block_size, head_dim]   optional
 * Limit: read plus write bandwidth. */
#include "args/attention.h"
#include "cpu/split.h"
#include "cpu/strip.h"

static inline KVL_HOT void read_row(const struct kvl_strips *of, const char *strip,
                                    int64_t token, char *to, int out_dtype, const int codec) {
  if (codec == out_dtype) {
    memcpy(to, strip + token * of->bytes_row, (size_t)of->dim * kvl__float_bytes(codec));
    return;
  }
  for (int d = 0; d < of->dim; d += VF) {
    int lanes = vf_left(d, of->dim);
    vf_store_n(at(to, d, out_dtype), vf_load_row(of, strip, token, d, lanes, codec), lanes,
               out_dtype);
  }
}

/* Items are (entry of the list, KV head). */
static inline KVL_HOT void items(const struct kvl_read_blocks_args *a, int64_t begin,
                                 int64_t end, const int codec) {
  const struct kvl_pages *c = &a->cache;
  for (int64_t i = begin; i < end; i++) {
    const int64_t block = a->blocks[i / c->kv_heads];
    for (int half = 0; half < 2; half++) {
      const struct kvl_strips *strips = half ? &c->value : &c->key;
      const int64_t row = (int64_t)strips->dim * kvl__float_bytes(a->dtype);
      char *to = half ? a->v : a->k;
      if (!to) continue;
      to += i * c->block_size * row;
      if (block < 0 || block >= c->blocks) {
        memset(to, 0, (size_t)(c->block_size * row));
        continue;
      }
      const char *from = (const char *)c->memory +
                         kvl__strip_at(c, strips, block, i % c->kv_heads);
      for (int t = 0; t < c->block_size; t++, to += row)
        read_row(strips, from, t, to, a->dtype, codec);
    }
  }
}

static int items_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_read_blocks_args *a = args;
  KVL_BY_CODEC(a->cache.codec, items(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(read_blocks) {
  const struct kvl_read_blocks_args *a = args;
  const struct kvl_pages *c = &a->cache;
  if (c->pinned) {
    int64_t found = 0;
    for (int64_t i = 0; i < a->n; i++) found += a->blocks[i] >= 0 && a->blocks[i] < c->blocks;
    kvl__link_bytes(
        queue, KVL_LINK_TO_DEVICE,
        found * c->kv_heads * ((a->k ? c->key.bytes : 0) + (a->v ? c->value.bytes : 0)));
  }
  return kvl__split(a->n * c->kv_heads, kvl__grain_rows(2 * c->key.bytes), items_piece, a);
}
