/* The largest q . k of each block's valid tokens, from the keys themselves: the oracle that
 * summaries are measured against.
 *   q       f32 f16 bf16         [seqs, heads, head_dim]
 *   cache   f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   scores  f32                  [seqs, kv_heads, max_blocks]   -inf past the last block
 * Limit: read bandwidth, every K once.
 * Best   Xeon (Sapphire Rapids), 16 cores, AVX-512, 2026-11-21, group 4, head_dim 128, blocks
 *        of 16 in random order, 16 x 32K tokens, relative to a read loop in the same run:
 *        bf16 0.79, f8e4m3 0.50 (AVX2 0.74, 0.39) */
#include "args/select.h"
#include "cpu/select/scores.h"
#include "cpu/strip.h"

/* Lane r * (VF / rows) + k of the result is q[r] . x[k], for `rows` (1, 2, 4) query rows and
 * k < VF / rows. soon[k] are rows to prefetch.
 *
 * This is products() of dots.c once more, because a block has so few keys that a call
 * shows: through struct dots, four heads with keys in cache took up to 1.12 of the time. Loops
 * without branches (prefetch_some) are not used here, either: with them most shapes were
 * faster, but f32 with two heads took 1.14 (AVX2) and bf16 with four heads 1.2 (AVX-512). */
static inline KVL_HOT vf dots(const float *q, const char *const *x, const char *const *soon,
                              int dim, const int rows, const int dtype) {
  const int n = VF / rows, padded = dim_padded(dim), bytes = kvl__float_bytes(dtype);
  vf sum[VF] = {0}, a, b;
  int d = 0;
  for (; d + 2 * VF <= dim; d += 2 * VF)
#pragma GCC unroll 16
    for (int k = 0; k < n; k++) {
      vf_load_pair(x[k] + d * bytes, dtype, &a, &b);
      prefetch(soon[k], d * bytes, (d + 2 * VF) * bytes);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        vf row_a = vf_load(q, r * padded + d, KVL_DTYPE_F32);
        vf row_b = vf_load(q, r * padded + d + VF, KVL_DTYPE_F32);
        sum[r * n + k] = vf_fma(row_a, a, sum[r * n + k]);
        sum[r * n + k] = vf_fma(row_b, b, sum[r * n + k]);
      }
    }
  for (int lanes = VF; d < dim; d += VF) {
    if (d + VF > dim) lanes = VF / 2;
#pragma GCC unroll 16
    for (int k = 0; k < n; k++) {
      a = vf_load_n(x[k] + d * bytes, lanes, dtype);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        vf row = vf_load(q, r * padded + d, KVL_DTYPE_F32);
        sum[r * n + k] = vf_fma(row, a, sum[r * n + k]);
      }
    }
  }
  return vf_sum_lanes(sum);
}

/* Scores one block, `rows` (1, 2 or 4) query heads at a time. next: the block after it. */
static inline KVL_HOT float score_block(const struct score *s, const struct run *r,
                                        const char *k, const char *next, int tokens,
                                        const float *q, int all, const int rows,
                                        const int codec) {
  const struct kvl_strips *of = &s->pages->key;
  const int step = VF / rows, padded = dim_padded(s->head_dim);
  float room[VF * HEAD_DIM_MAX] __attribute__((aligned(64))); /* for unpacked keys */
  vf best[GROUP_MAX]; /* best[h]: the lanes of dots() for heads [h, h + rows) */
  for (int h = 0; h < all; h += rows) best[h] = vf_set(-INFINITY);
  for (int t = 0; t < tokens; t += step) {
    const char *x[VF], *soon[VF];
    for (int j = 0; j < step; j++) { /* past the last valid token, repeat it */
      const int64_t token = t + j < tokens ? t + j : tokens - 1;
      x[j] = k + token * of->bytes_row, soon[j] = next + token * of->bytes_row;
      if (!kvl__packs(codec)) continue;
      float *to = room + j * padded;
      unpack_row(x[j], k + of->scales + token * 2 * of->groups, of->dim, codec, to);
      x[j] = (const char *)to, soon[j] = x[j];
    }
    for (int h = 0; h < all; h += rows)
      best[h] = vf_max(dots(q + h * padded, x, soon, s->head_dim, rows, rows_dtype(codec)),
                       best[h]);
  }
  float joined = s->join == KVL_GROUP_MEAN ? 0 : -INFINITY;
  for (int h = 0; h < r->rows; h++) {
    float of_head = -INFINITY;
    for (int j = h % rows * step; j < (h % rows + 1) * step; j++)
      if (best[h - h % rows][j] > of_head) of_head = best[h - h % rows][j];
    joined = s->join == KVL_GROUP_MEAN ? joined + of_head
             : of_head > joined        ? of_head
                                       : joined;
  }
  return s->join == KVL_GROUP_MEAN ? joined / (float)(s->heads / s->kv_heads) : joined;
}

static inline KVL_HOT void max_qk_run(const struct score *s, struct run r, const float *q,
                                      int all, const int rows, const int codec) {
  const char *k = r.begin < r.end ? block_row(s, &r, r.begin) : NULL;
  for (int64_t b = r.begin; b < r.last; b++) {
    const char *next = b + 1 < r.end ? block_row(s, &r, b + 1) : NULL;
    int64_t tokens = i64_min(s->lens[r.seq] - b * s->block_size, s->block_size);
    r.scores[b] = k ? score_block(s, &r, k, next ? next : k, (int)tokens, q, all, rows, codec)
                    : -INFINITY;
    k = next;
  }
}

static inline KVL_HOT void max_qk_items(const struct score *s, int64_t begin, int64_t end,
                                        const int codec) {
  float q[GROUP_MAX * HEAD_DIM_MAX] __attribute__((aligned(64)));
  for (int64_t item = begin; item < end; item++) {
    struct run r = run_open(s, item);
    int all = load_group(s, &r, q);
    switch (dot_rows(r.rows)) {
      case 1: max_qk_run(s, r, q, all, 1, codec); break;
      case 2: max_qk_run(s, r, q, all, 2, codec); break;
      default: max_qk_run(s, r, q, all, 4, codec); break;
    }
  }
}

static int max_qk_piece(const void *args, int64_t begin, int64_t end) {
  const struct score *s = args;
  KVL_BY_CODEC(s->pages->codec, max_qk_items(s, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(score_max_qk) {
  const struct kvl_score_max_qk_args *a = args;
  const struct kvl_pages *c = &a->cache;
  struct score s = {
      .q = a->q,
      .tables = a->tables,
      .lens = a->lens,
      .scores = a->scores,
      .seqs = a->seqs,
      .heads = a->heads,
      .kv_heads = c->kv_heads,
      .max_blocks = a->max_blocks,
      .blocks = c->blocks,
      .head_dim = c->key.dim,
      .block_size = c->block_size,
      .join = a->group,
      .dtype = a->dtype,
      .rows = (const char *)c->memory + c->key.begin,
      .bytes_block = c->bytes_page,
      .bytes_head = c->key.bytes,
      .rows_dtype = rows_dtype(c->codec),
      .pages = c,
  };
  return score_run(&s, max_qk_piece);
}
