/* What the ops that score blocks share: they give every block of every sequence a score for
 * each KV head, joined over the query heads of its group.
 *
 * The work is cut into (sequence, KV head, run of blocks). An op scores blocks by
 * the rows of a summary (score_summary), or scores one block itself (score_max_qk.c). */
#ifndef KVL_CPU_SCORES_H
#define KVL_CPU_SCORES_H

#include "args/select.h"
#include "cpu/dots.h"
#include "cpu/split.h"

/* A run has enough blocks to pay for loading the queries. Their rows are scattered. Each is
 * prefetched SOON blocks before it is scored, which takes longer than memory's latency. */
enum { RUN_BLOCKS = 512, SCORE_TILE = 64, SOON = 32, GROUP_MAX = 256 };

struct score {
  const void *q; /* [seqs, heads, head_dim] */
  const int32_t *tables, *lens;
  float *scores; /* [seqs, kv_heads, max_blocks] */
  int64_t seqs, heads, kv_heads, max_blocks, blocks;
  int32_t head_dim, block_size, join, dtype;
  /* Row of (block, KV head): rows + block * bytes_block + head * bytes_head. */
  const char *rows;
  int64_t bytes_block, bytes_head, high; /* high: see struct dots */
  int32_t rows_dtype;
  const struct kvl_pages *pages; /* whose keys score_max_qk scores */
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

/* Loads the group's queries as f32, padded with rows of zeros as struct dots wants them.
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

/* Joins the scores of blocks, a vector at a time; a head whose score is NaN is ignored in a
 * maximum. */
static inline vf score_start(const struct score *s) {
  return vf_set(s->join == KVL_GROUP_MEAN ? 0 : -INFINITY);
}
static inline vf score_join(const struct score *s, vf joined, vf x) {
  return s->join == KVL_GROUP_MEAN ? joined + x : vf_max(x, joined);
}
static inline vf score_end(const struct score *s, vf joined) {
  return s->join == KVL_GROUP_MEAN ? joined / (float)(s->heads / s->kv_heads) : joined;
}

/* Scores a run by one memory row per block, or by two if `high` says where the second is. */
static inline void score_rows(const struct score *s, const struct run *r, const float *q) {
  const int bound = s->high > 0;
  const int64_t bytes_row = (int64_t)s->head_dim * kvl__float_bytes(s->rows_dtype);
  const char *x[RUN_BLOCKS + VF + SOON];
  float part[GROUP_MAX * SCORE_TILE] __attribute__((aligned(64)));
  float *scores = r->scores + r->begin;
  int n = (int)(r->end - r->begin), missing = 0;
  for (int i = 0; i < n + VF + SOON; i++) { /* any valid row, if there is none */
    const char *row = i < n ? block_row(s, r, r->begin + i) : NULL;
    x[i] = row ? row : s->rows;
    missing += i < n && !row;
  }
  for (int i = 0; i < n && i < SOON; i++) {
    prefetch(x[i], 0, bytes_row);
    if (bound) prefetch(x[i] + s->high, 0, bytes_row);
  }
  for (int i = 0; i < n; i += SCORE_TILE) {
    const int keys = n - i < SCORE_TILE ? n - i : SCORE_TILE;
    const struct dots d = {.q = q,
                           .x = x + i,
                           .soon = x + i + SOON,
                           .out = part,
                           .out_row = SCORE_TILE,
                           .high = s->high,
                           .rows = r->rows,
                           .keys = keys,
                           .dim = s->head_dim,
                           .bound = bound,
                           .dtype = s->rows_dtype};
    KVL_CPU_NAME(dots)(&d);
    for (int k = 0; k < keys; k += VF) {
      vf joined = score_start(s);
      for (int h = 0; h < r->rows; h++)
        joined = score_join(s, joined, vf_load(part, h * SCORE_TILE + k, KVL_DTYPE_F32));
      vf_store_n(scores + i + k, score_end(s, joined), vf_left(k, keys), KVL_DTYPE_F32);
    }
  }
  for (int i = 0; missing > 0 && i < n; i++)
    if (!block_row(s, r, r->begin + i)) scores[i] = -INFINITY;
}

static inline int score_run(const struct score *s, kvl_piece *piece) {
  if (s->head_dim > HEAD_DIM_MAX || s->head_dim % 8 || s->heads / s->kv_heads > GROUP_MAX)
    return KVL_ERR_UNSUPPORTED;
  int64_t run = i64_min(s->max_blocks, RUN_BLOCKS) * s->head_dim;
  return kvl__split(s->seqs * s->kv_heads * score_runs(s), kvl__grain_rows(run), piece, s);
}

static inline int score_summary_piece(const void *args, int64_t begin, int64_t end) {
  const struct score *s = args;
  float q[GROUP_MAX * HEAD_DIM_MAX] __attribute__((aligned(64)));
  for (int64_t item = begin; item < end; item++) {
    struct run r = run_open(s, item);
    load_group(s, &r, q);
    score_rows(s, &r, q);
    for (int64_t b = r.end; b < r.last; b++) r.scores[b] = -INFINITY;
  }
  return 0;
}

/* Scores by a summary [blocks, rows, kv_heads, head_dim]: a mean, or min and max. */
static inline int score_summary(const struct kvl_score_summary *a, int rows) {
  const int64_t row = a->head_dim * kvl__float_bytes(a->summary_dtype);
  const struct score s = {
      .q = a->q,
      .tables = a->tables,
      .lens = a->lens,
      .scores = a->scores,
      .seqs = a->seqs,
      .heads = a->heads,
      .kv_heads = a->kv_heads,
      .max_blocks = a->max_blocks,
      .blocks = a->blocks,
      .head_dim = (int32_t)a->head_dim,
      .block_size = a->block_size,
      .join = a->group,
      .dtype = a->dtype,
      .rows = a->summary,
      .bytes_block = rows * a->kv_heads * row,
      .bytes_head = row,
      .high = (rows - 1) * a->kv_heads * row,
      .rows_dtype = a->summary_dtype,
  };
  return score_run(&s, score_summary_piece);
}

#endif
