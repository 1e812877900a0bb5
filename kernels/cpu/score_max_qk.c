/* The largest q . k of each block's valid tokens, from the keys themselves: the oracle that
 * summaries are measured against.
 *   q       f32 f16 bf16  [seqs, heads, head_dim]
 *   cache   f32 f16 bf16  [blocks, 2, kv_heads, block_size, head_dim]
 *   scores  f32           [seqs, kv_heads, max_blocks]   -inf past the last block
 * Limit: read bandwidth, every K once. */
#include "cpu/scores.h"

/* `rows`: 1, 2 or 4 query heads at a time. */
static inline KVL_HOT float score_block(const struct score *s, const struct run *r,
                                        const char *k, int tokens, const float *q, int all,
                                        const int rows, const int dtype) {
  const int step = VF / rows, padded = dim_padded(s->head_dim);
  const int64_t bytes_token = (int64_t)s->head_dim * kvl__float_bytes(dtype);
  float best[GROUP_MAX], part[VF], joined = score_start(s);
  for (int h = 0; h < all; h++) best[h] = -INFINITY;
  for (int t = 0; t < tokens; t += step) {
    const char *x[VF];
    for (int j = 0; j < step; j++)  /* past the last valid token, that one again */
      x[j] = k + (t + j < tokens ? t + j : tokens - 1) * bytes_token;
    for (int h = 0; h < all; h += rows) {
      dots(q + h * padded, x, 0, x, s->head_dim, part, step, rows, 0, dtype);
      for (int j = 0; j < VF; j++) {
        float *b = best + h + j / step;
        *b = part[j] > *b ? part[j] : *b;
      }
    }
  }
  for (int h = 0; h < r->rows; h++) joined = score_join(s, joined, best[h]);
  return score_end(s, joined);
}

static inline KVL_HOT void max_qk_items(const struct score *s, int64_t begin, int64_t end,
                                        const int dtype) {
  float q[GROUP_MAX * HEAD_DIM_MAX] __attribute__((aligned(64)));
  for (int64_t item = begin; item < end; item++) {
    struct run r = run_open(s, item);
    int all = load_group(s, &r, q);
    for (int64_t b = r.begin; b < r.last; b++) {
      const char *k = b < r.end ? block_row(s, &r, b) : NULL;
      int64_t left = s->lens[r.seq] - b * s->block_size;
      int tokens = (int)i64_min(left, s->block_size);
      if (!k) r.scores[b] = -INFINITY;
      else if (r.rows == 1) r.scores[b] = score_block(s, &r, k, tokens, q, all, 1, dtype);
      else if (r.rows == 2) r.scores[b] = score_block(s, &r, k, tokens, q, all, 2, dtype);
      else r.scores[b] = score_block(s, &r, k, tokens, q, all, 4, dtype);
    }
  }
}

static int max_qk_piece(const void *args, int64_t begin, int64_t end) {
  const struct score *s = args;
  KVL_BY_FLOAT(s->rows_dtype, max_qk_items(s, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(score_max_qk) {
  const struct kvl_score_max_qk_args *a = args;
  const struct kvl_cache_view *c = &a->cache;
  int64_t head = (int64_t)c->block_size * c->head_dim * kvl__float_bytes(c->dtype);
  struct score s = {
    .q = a->q, .tables = a->tables, .lens = a->lens, .scores = a->scores, .seqs = a->seqs,
    .heads = a->heads, .kv_heads = c->kv_heads, .max_blocks = a->max_blocks,
    .blocks = c->blocks, .head_dim = c->head_dim, .block_size = c->block_size,
    .join = a->group, .dtype = a->dtype, .rows = c->kv, .bytes_block = 2 * c->kv_heads * head,
    .bytes_head = head, .rows_dtype = c->dtype,
  };
  return score_run(&s, max_qk_piece);
}
