/* What the ops that score blocks share: they give every block of every sequence a score for
 * each KV head, joined over the query heads of its group.
 *
 * The work is cut into (sequence, KV head, run of blocks). An op only says where a block's
 * row lies (score_rows), or scores one block itself (score_max_qk.c). */
#ifndef KVL_CPU_SCORES_H
#define KVL_CPU_SCORES_H

#include "cpu/dots.h"
#include "cpu/split.h"

/* A run has enough blocks to pay for loading the queries. Their rows are scattered. Each is
 * prefetched SOON blocks before it is scored, which takes longer than memory's latency. */
enum { RUN_BLOCKS = 512, SOON = 32, GROUP_MAX = 256 };

struct score {
  const void *q; /* [seqs, heads, head_dim] */
  const int32_t *tables, *lens;
  float *scores; /* [seqs, kv_heads, max_blocks] */
  int64_t seqs, heads, kv_heads, max_blocks, blocks;
  int32_t head_dim, block_size, join, dtype;
  /* Row of (block, KV head): rows + block * bytes_block + head * bytes_head. */
  const char *rows;
  int64_t bytes_block, bytes_head, high; /* high: see dots() */
  int32_t rows_dtype;
};

static inline int64_t score_runs(const struct score *s) {
  return (s->max_blocks + RUN_BLOCKS - 1) / RUN_BLOCKS;
}

/* One run: blocks [begin, end) exist, and blocks [end, last) only get -inf. */
struct run {
  int64_t seq, head, begin, end, last;
  int rows; /* query heads of the group */
  const int32_t *table;
  float *scores; /* of (seq, head) */
};

static inline struct run run_open(const struct score *s, int64_t item) {
  struct run r = {.seq = item / score_runs(s) / s->kv_heads,
                  .head = item / score_runs(s) % s->kv_heads,
                  .begin = item % score_runs(s) * RUN_BLOCKS,
                  .rows = (int)(s->heads / s->kv_heads)};
  int64_t blocks = ((int64_t)s->lens[r.seq] + s->block_size - 1) / s->block_size;
  r.last = i64_min(r.begin + RUN_BLOCKS, s->max_blocks);
  r.end = s->blocks > 0 ? i64_min(r.last, i64_max(r.begin, blocks)) : r.begin;
  r.table = s->tables + r.seq * s->max_blocks;
  r.scores = s->scores + (r.seq * s->kv_heads + r.head) * s->max_blocks;
  return r;
}

/* The row of a logical block; NULL if its entry in the table is out of range. */
static inline const char *block_row(const struct score *s, const struct run *r,
                                    int64_t logical) {
  int64_t block = r->table[logical];
  if (block < 0 || block >= s->blocks) return NULL;
  return s->rows + block * s->bytes_block + r->head * s->bytes_head;
}

/* Loads the group's queries as f32, padded with rows of zeros to whole steps of dots().
 * Returns the number of rows. */
static inline int load_group(const struct score *s, const struct run *r, float *q) {
  int padded = dim_padded(s->head_dim), step = dot_rows(r->rows);
  int rows = (r->rows + step - 1) / step * step;
  memset(q, 0, (size_t)rows * padded * sizeof *q);
  for (int i = 0; i < r->rows; i++)
    load_query(s->q, r->seq * s->heads + r->head * r->rows + i, s->head_dim, 1, s->dtype,
               s->rows_dtype, q + i * padded);
  return rows;
}

static inline float score_join(const struct score *s, float joined, float x) {
  return s->join == KVL_GROUP_MEAN ? joined + x : x > joined ? x : joined;
}
static inline float score_start(const struct score *s) {
  return s->join == KVL_GROUP_MEAN ? 0 : -INFINITY;
}
static inline float score_end(const struct score *s, float joined) {
  return s->join == KVL_GROUP_MEAN ? joined / (float)(s->heads / s->kv_heads) : joined;
}

/* Scores a run by one memory row per block (two with `bound`), for `rows` query heads at a
 * time: 1, 2 or 4. */
static inline KVL_HOT void score_rows(const struct score *s, struct run r, const float *q,
                                      int all, const int rows, const int bound,
                                      const int dtype) {
  const int step = VF / rows, padded = dim_padded(s->head_dim);
  const int64_t bytes_row = (int64_t)s->head_dim * kvl__float_bytes(dtype);
  const char *x[RUN_BLOCKS + VF + SOON];
  int n = (int)(r.end - r.begin);
  for (int i = 0; i < n + VF + SOON; i++) { /* any row where there is none */
    const char *row = i < n ? block_row(s, &r, r.begin + i) : NULL;
    x[i] = row ? row : s->rows;
  }
  for (int i = 0; i < n && i < SOON; i++) {
    prefetch(x[i], 0, bytes_row);
    if (bound) prefetch(x[i] + s->high, 0, bytes_row);
  }
  for (int i = 0; i < n; i += step) {
    float joined[VF], part[VF];
    for (int k = 0; k < step; k++) joined[k] = score_start(s);
    for (int h = 0; h < all; h += rows) {
      dots_store(
          dots(q + h * padded, x + i, s->high, x + i + SOON, s->head_dim, rows, bound, dtype),
          part, step, rows);
      for (int j = 0; j < rows && h + j < r.rows; j++)
        for (int k = 0; k < step; k++)
          joined[k] = score_join(s, joined[k], part[j * step + k]);
    }
    for (int k = 0; k < step && i + k < n; k++)
      r.scores[r.begin + i + k] = block_row(s, &r, r.begin + i + k) ? score_end(s, joined[k])
                                                                    : -INFINITY;
  }
}

static inline KVL_HOT void score_items(const struct score *s, int64_t begin, int64_t end,
                                       const int bound, const int dtype) {
  float q[GROUP_MAX * HEAD_DIM_MAX] __attribute__((aligned(64)));
  for (int64_t item = begin; item < end; item++) {
    struct run r = run_open(s, item);
    int all = load_group(s, &r, q);
    switch (dot_rows(r.rows)) {
      case 1: score_rows(s, r, q, all, 1, bound, dtype); break;
      case 2: score_rows(s, r, q, all, 2, bound, dtype); break;
      default: score_rows(s, r, q, all, 4, bound, dtype); break;
    }
    for (int64_t b = r.end; b < r.last; b++) r.scores[b] = -INFINITY;
  }
}

static inline int score_run(const struct score *s, kvl_piece *piece) {
  if (s->head_dim > HEAD_DIM_MAX || s->head_dim % 8 || s->heads / s->kv_heads > GROUP_MAX)
    return KVL_ERR_UNSUPPORTED;
  int64_t run = i64_min(s->max_blocks, RUN_BLOCKS) * s->head_dim;
  return kvl__split(s->seqs * s->kv_heads * score_runs(s), kvl__grain_rows(run), piece, s);
}

#endif
