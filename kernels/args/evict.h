/* Arguments of the ops that evict tokens. Shapes, dtypes and meanings are those of
 * runtime/kvlab.h; optional pointers may be NULL. */
#ifndef KVL_ARGS_EVICT_H
#define KVL_ARGS_EVICT_H

#include "page.h"

#define KVL__LOWEST (-__builtin_huge_valf())

struct kvl_copy_tokens_args {
  struct kvl_pages src, dst; /* may differ in memory and blocks only */
  const int64_t *from, *to;  /* [n] */
  int64_t n;
};
struct kvl_replace_args {
  const float *scores;                /* optional [rows, n], or with score_firsts [n] */
  const int32_t *score_firsts;        /* optional [rows] */
  float *positions;                   /* [cells] */
  const int32_t *firsts, *now, *lens; /* [rows] */
  const int32_t *tables;              /* [rows, max_blocks] */
  const int64_t *wanted;              /* [rows] */
  int32_t *index, *blocks, *block_tokens;
  float *replaced;
  int64_t *places;
  int64_t rows, n, cells, max_blocks;
  int32_t block_size, sink, recent;
  struct kvl_pages cache, saved; /* optional: saved.memory may be NULL */
};

struct kvl_update_rows_args {
  float *memory;         /* [cells] */
  const int32_t *firsts; /* [rows] */
  const int32_t *fresh;  /* optional [rows] */
  const float *values;   /* [rows, n] */
  float *before;         /* optional [rows, n] */
  int64_t rows, n, cells;
  int32_t is_add;
  float initial;
};

/* Which token is evicted depends on its kind, then its score, then its position. Smaller
 * goes first. */
struct kvl_worth {
  int32_t kind; /* 0: may go, 1: recent, 2: a sink */
  float score, position;
  int32_t index;
};
KVL_INLINE int kvl__goes_before(struct kvl_worth a, struct kvl_worth b) {
  if (a.kind != b.kind) return a.kind < b.kind;
  if (a.score != b.score) return a.score < b.score;
  if (a.position != b.position) return a.position < b.position;
  return a.index < b.index;
}
KVL_INLINE struct kvl_worth kvl__worth(const struct kvl_replace_args *a, int64_t row,
                                       int32_t i) {
  const float position = a->positions[a->firsts[row] + i];
  const int64_t first = a->score_firsts ? a->score_firsts[row] : row * a->n;
  const float score = a->scores ? a->scores[first + i] : position;
  struct kvl_worth w = {position < (float)a->sink                          ? 2
                        : position >= (float)(a->now[row] - a->recent + 1) ? 1
                                                                           : 0,
                        score == score ? score : KVL__LOWEST, position, i};
  return w;
}
/* The tokens of a row that may be compared. */
KVL_INLINE int32_t kvl__row_tokens(const struct kvl_replace_args *a, int64_t row) {
  int64_t most = a->max_blocks * a->block_size;
  const int64_t scores = a->n - (a->score_firsts ? a->score_firsts[row] : 0);
  if (scores < most) most = scores;
  if (a->cells - a->firsts[row] < most) most = a->cells - a->firsts[row];
  return a->lens[row] < most ? a->lens[row] : (int32_t)most;
}
/* Writes that there is no place for the new token of a row. */
KVL_INLINE void kvl__put_nowhere(const struct kvl_replace_args *a, int64_t row) {
  a->index[row] = a->blocks[row] = -1, a->block_tokens[row] = 0;
  a->places[row] = -1, a->replaced[row] = 0;
}
KVL_INLINE int64_t kvl__place(const struct kvl_replace_args *a, int64_t row, int32_t index) {
  const int64_t block = a->tables[row * a->max_blocks + index / a->block_size];
  return block * a->block_size + index % a->block_size;
}
/* Writes where the new token of a row goes: to `index`. */
KVL_INLINE void kvl__put_new(const struct kvl_replace_args *a, int64_t row, int32_t index) {
  const int32_t b = index / a->block_size, left = a->lens[row] - b * a->block_size;
  float *position = a->positions + a->firsts[row] + index;
  a->index[row] = index;
  a->replaced[row] = *position;
  *position = (float)a->now[row];
  a->places[row] = kvl__place(a, row, index);
  a->blocks[row] = a->tables[row * a->max_blocks + b];
  a->block_tokens[row] = left < a->block_size ? left : a->block_size;
}
/* Updates number i of a row. */
KVL_INLINE void kvl__update(const struct kvl_update_rows_args *a, int64_t row, int64_t i) {
  const int64_t cell = a->firsts[row] + i, at = row * a->n + i;
  if (cell < 0 || cell >= a->cells) return;
  const float old = a->memory[cell];
  if (a->before) a->before[at] = old;
  const float from = a->fresh && a->fresh[row] == i ? a->initial : old;
  a->memory[cell] = a->is_add ? from + a->values[at] : a->values[at];
}

#endif
