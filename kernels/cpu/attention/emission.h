/* Functions for the kernels that emit in a prefill (lua/kvlab/kernel/print/c.lua). They
 * compute the scores of a tile of queries and a few blocks again from q and K.
 *
 * The lanes of a vector are keys, as the expressions want them, so K is transposed once for
 * all queries that see it. A thread has memory for keys [dim][columns], queries [rows][dim]
 * and scores [rows][columns]. */
#ifndef KVL_CPU_EMISSION_H
#define KVL_CPU_EMISSION_H

#include <stdlib.h>

#include "cpu/expression.h"
#include "cpu/attention/product.h"

struct emission {
  float *keys, *queries, *scores;
  int dim, columns, rows;
};

static inline int64_t emission_floats(int64_t n) { return (n + 2 * VF - 1) / VF * VF; }

/* Takes the memory for tiles of that many rows; returns what has to be freed, or NULL. */
static inline float *emission_open(struct emission *e, int dim, int columns, int rows) {
  const int64_t keys = emission_floats((int64_t)dim * columns);
  const int64_t queries = emission_floats((int64_t)rows * dim);
  const int64_t scores = emission_floats((int64_t)rows * columns);
  const size_t bytes = (size_t)(keys + queries + scores) * sizeof(float);
  float *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) return NULL;
  memset(memory, 0, bytes); /* columns without a key are multiplied, too */
  *e = (struct emission){.keys = memory,
                         .queries = memory + keys,
                         .scores = memory + keys + queries,
                         .dim = dim,
                         .columns = columns,
                         .rows = rows};
  return memory;
}

/* factor * a row of `dim` numbers from element `at` on. It may write VF - 1 more. */
static inline KVL_HOT void emission_row(const void *x, int64_t at, int dim, float factor,
                                        float *out, const int dtype) {
  for (int d = 0; d < dim; d += VF)
    vf_store(out, d, factor * vf_load_n(at_const(x, at + d, dtype), vf_left(d, dim), dtype),
             KVL_DTYPE_F32);
}

/* Brings keys of a strip into columns from `column` on. */
static inline KVL_HOT void emission_keys(const struct emission *e,
                                         const struct kvl_strips *of, const char *strip,
                                         int tokens, int column, const int codec) {
  float x[VF];
  for (int t = 0; t < tokens; t++)
    for (int d = 0; d < e->dim; d += VF) {
      const int left = vf_left(d, e->dim);
      vf_store(x, 0, vf_load_row(of, strip, t, d, left, codec), KVL_DTYPE_F32);
      for (int i = 0; i < left; i++)
        e->keys[(int64_t)(d + i) * e->columns + column + t] = x[i];
    }
}

/* Brings a query into row `row`, times a factor. */
static inline void emission_query(const struct emission *e, const void *q, int64_t at,
                                  int row, float factor, int dtype) {
  float *to = e->queries + (int64_t)row * e->dim;
  if (dtype == KVL_DTYPE_F32) emission_row(q, at, e->dim, factor, to, KVL_DTYPE_F32);
  else if (dtype == KVL_DTYPE_F16) emission_row(q, at, e->dim, factor, to, KVL_DTYPE_F16);
  else emission_row(q, at, e->dim, factor, to, KVL_DTYPE_BF16);
}

/* The scores of the first `rows` queries and all columns. */
static inline void emission_scores(const struct emission *e, int rows, float soft_cap) {
  for (int c = 0; c < e->columns; c += PRODUCT_LANES) {
    const int vecs = (e->columns - c) / VF;
    multiply((struct product){.a = e->queries,
                              .a_row = e->dim,
                              .a_step = 1,
                              .b = e->keys + c,
                              .b_row = e->columns,
                              .c = e->scores + c,
                              .c_row = e->columns,
                              .depth = e->dim},
             rows, vecs < PRODUCT_VECS ? vecs : PRODUCT_VECS);
  }
  if (soft_cap > 0)
    for (int64_t i = 0; i < (int64_t)rows * e->columns; i += VF)
      vf_store(e->scores, i, soft_cap * vf_tanh(vf_load(e->scores, i, KVL_DTYPE_F32)),
               KVL_DTYPE_F32);
}

#endif
