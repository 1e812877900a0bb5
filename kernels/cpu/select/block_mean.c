/* Mean of K over the valid tokens of some blocks.
 *   cache    f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   blocks   i32                  [n]   physical; out of range (-1) is skipped
 *   rows     i32                  [n]   rows of summary to write; NULL: those of blocks
 *   tokens   i32                  [n]   valid tokens; 0 gives 0
 *   summary  f32, or like cache (of f8e4m3: f32 f16 bf16)  [rows, kv_heads, head_dim]
 * Summed in token order in fp32. Limit: read bandwidth, every K once.
 * Best   Xeon (Sapphire Rapids), 16 cores, AVX-512, 2026-11-21, group 4, head_dim 128, blocks
 *        of 16 in random order, 16 x 32K tokens, relative to a read loop in the same run:
 *        bf16 0.70, f8e4m3 0.47 */
#include "args/select.h"
#include "cpu/dots.h"
#include "cpu/split.h"
#include "cpu/strip.h"

enum { VECS = 8 }; /* vectors of a row taken together */

/* The mean, over a strip's rows, of the numbers from d on. Prefetches the same part of the
 * next strip, `soon`. */
static inline KVL_HOT void mean(const struct kvl_strips *of, const char *k, const char *soon,
                                int64_t tokens, int d, int lanes, void *out, int out_dtype,
                                const int vecs, const int codec) {
  vf sum[VECS] = {0};
  soon += d * kvl__bits(codec) / 8;
  for (int64_t t = 0; t < tokens; t++, soon += of->bytes_row) {
    prefetch(soon, 0, vecs * VF * kvl__bits(codec) / 8);
#pragma GCC unroll 8
    for (int j = 0; j < vecs; j++) sum[j] += vf_load_row(of, k, t, d + j * VF, lanes, codec);
  }
  for (int j = 0; j < vecs; j++)
    vf_store_n(at(out, j * VF, out_dtype), sum[j] / (float)i64_max(1, tokens), lanes,
               out_dtype);
}

/* The keys of an item (entry of the list, KV head); NULL if the entry is skipped. */
static inline const char *item_keys(const struct kvl_block_mean_args *a, int64_t i) {
  const int64_t heads = a->cache.kv_heads;
  int64_t block = a->blocks[i / heads], to = a->rows ? a->rows[i / heads] : block;
  if (block < 0 || block >= a->cache.blocks || to < 0 || to >= a->summary_rows) return NULL;
  return kvl__keys_of(&a->cache, block, i % heads);
}

static inline KVL_HOT void items(const struct kvl_block_mean_args *a, int64_t begin,
                                 int64_t end, const int codec) {
  const int64_t heads = a->cache.kv_heads, size = a->cache.block_size;
  const int dim = a->cache.key.dim, out_dtype = a->summary_dtype;
  for (int64_t i = begin; i < end; i++) {
    const char *k = item_keys(a, i), *soon = i + 1 < end ? item_keys(a, i + 1) : NULL;
    if (!k) continue;
    if (!soon) soon = k;
    int64_t to = (a->rows ? a->rows : a->blocks)[i / heads], head = i % heads;
    int64_t tokens = i64_max(0, i64_min(a->tokens[i / heads], size));
    char *out = at(a->summary, (to * heads + head) * dim, out_dtype);
    const struct kvl_strips *of = &a->cache.key;
    int d = 0;
    for (; d + VECS * VF <= dim; d += VECS * VF)
      mean(of, k, soon, tokens, d, VF, at(out, d, out_dtype), out_dtype, VECS, codec);
    for (; d < dim; d += VF)
      mean(of, k, soon, tokens, d, vf_left(d, dim), at(out, d, out_dtype), out_dtype, 1,
           codec);
  }
}

static int items_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_block_mean_args *a = args;
  KVL_BY_CODEC(a->cache.codec, items(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(block_mean) {
  const struct kvl_block_mean_args *a = args;
  return kvl__split(a->n * a->cache.kv_heads, kvl__grain_rows(a->cache.key.bytes / 2),
                    items_piece, a);
}
