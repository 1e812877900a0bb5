/* Elementwise min and max of K over the valid tokens of some blocks.
 *   cache    f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   blocks   i32                  [n]   physical; out of range (-1) is skipped
 *   rows     i32                  [n]   rows of summary to write; NULL: those of blocks
 *   tokens   i32                  [n]   valid tokens; 0 gives min +inf, max -inf (f8e4m3 has
 *                                 no infinity: 448 and -448)
 *   summary  like cache, of int8 f32 f16 bf16  [rows, 2, kv_heads, head_dim]   min, then max
 * Exact but for the rounding of a summary of int8. Limit: read bandwidth, every K once.
 * Best   Xeon (Sapphire Rapids), 16 cores, AVX-512, 2026-11-21, group 4, head_dim 128, blocks
 *        of 16 in random order, 16 x 32K tokens, relative to a read loop in the same run:
 *        bf16 0.70, f8e4m3 0.47 */
#include "args/select.h"
#include "cpu/dots.h"
#include "cpu/split.h"
#include "cpu/strip.h"

/* Vectors of a row taken together: as many as there are registers for. */
enum { VECS = VF == 16 ? 8 : 4 };

/* The bounds of numbers d, ... of a strip's rows. Prefetches the same of the strip `soon`,
 * which is needed next. */
static inline KVL_HOT void bounds(const struct kvl_strips *of, const char *k,
                                  const char *soon, int64_t tokens, int d, int lanes,
                                  void *low_out, void *high_out, int out_dtype,
                                  const int vecs, const int codec) {
  vf low[VECS], high[VECS];
  for (int j = 0; j < vecs; j++) low[j] = vf_set(INFINITY), high[j] = vf_set(-INFINITY);
  soon += d * kvl__bits(codec) / 8;
  for (int64_t t = 0; t < tokens; t++, soon += of->bytes_row) {
    prefetch(soon, 0, vecs * VF * kvl__bits(codec) / 8);
#pragma GCC unroll 8
    for (int j = 0; j < vecs; j++) {
      vf x = vf_load_row(of, k, t, d + j * VF, lanes, codec);
      low[j] = vf_min(low[j], x);
      high[j] = vf_max(high[j], x);
    }
  }
  for (int j = 0; j < vecs; j++) {
    vf_store_n(at(low_out, j * VF, out_dtype), low[j], lanes, out_dtype);
    vf_store_n(at(high_out, j * VF, out_dtype), high[j], lanes, out_dtype);
  }
}

/* The keys of an item (entry of the list, KV head); NULL if the entry is skipped. */
static inline const char *item_keys(const struct kvl_block_minmax_args *a, int64_t i) {
  const int64_t heads = a->cache.kv_heads;
  int64_t block = a->blocks[i / heads], to = a->rows ? a->rows[i / heads] : block;
  if (block < 0 || block >= a->cache.blocks || to < 0 || to >= a->summary_rows) return NULL;
  return kvl__keys_of(&a->cache, block, i % heads);
}

static inline KVL_HOT void items(const struct kvl_block_minmax_args *a, int64_t begin,
                                 int64_t end, const int codec) {
  const int out = kvl__packs(codec) ? a->summary_dtype : codec;
  const int64_t heads = a->cache.kv_heads, size = a->cache.block_size;
  const int dim = a->cache.key.dim;
  for (int64_t i = begin; i < end; i++) {
    const char *k = item_keys(a, i), *soon = i + 1 < end ? item_keys(a, i + 1) : NULL;
    if (!k) continue;
    if (!soon) soon = k;
    int64_t to = (a->rows ? a->rows : a->blocks)[i / heads], head = i % heads;
    int64_t tokens = i64_max(0, i64_min(a->tokens[i / heads], size));
    char *low = at(a->summary, (to * 2 * heads + head) * dim, out);
    char *high = at(low, heads * dim, out);
    const struct kvl_strips *of = &a->cache.key;
    int d = 0;
    for (; d + VECS * VF <= dim; d += VECS * VF)
      bounds(of, k, soon, tokens, d, VF, at(low, d, out), at(high, d, out), out, VECS, codec);
    for (; d < dim; d += VF)
      bounds(of, k, soon, tokens, d, vf_left(d, dim), at(low, d, out), at(high, d, out), out,
             1, codec);
  }
}

static int items_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_block_minmax_args *a = args;
  KVL_BY_CODEC(a->cache.codec, items(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(block_minmax) {
  const struct kvl_block_minmax_args *a = args;
  return kvl__split(a->n * a->cache.kv_heads, kvl__grain_rows(a->cache.key.bytes / 2),
                    items_piece, a);
}
