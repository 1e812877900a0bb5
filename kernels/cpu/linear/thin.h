/* A matrix product with few rows: out[r][j] = x[r] . y[j]. There are up to THIN_ROWS rows x,
 * which are f32 and stay in cache, and any number of y, which are read once from memory in
 * their own dtype. This is decode, where y are the weights.
 *
 * Both forms work on tiles of R (1, 2 or 4) rows of x by VF / R vectors, in VF
 * accumulators:
 *   dots     y[j] is contiguous [n, k]: lanes run along k, VF / R columns a tile, and the VF
 *            horizontal sums are taken together
 *   columns  y is [k, n]: lanes run along n, VF / R vectors of columns a tile */
#ifndef KVL_CPU_THIN_H
#define KVL_CPU_THIN_H

#include "cpu/split.h"
#include "cpu/vec.h"

/* With more rows the BLAS is faster, although it needs b widened first. The limit is lower in
 * the plain build, because the BLAS uses vectors there and this code does not. */
enum { THIN_ROWS = VF > 4 ? 48 : 8 };

struct thin {
  const float *x; /* [rows, k]; from one row to the next are x_row numbers */
  const void *y;  /* [n, k], or [k, n] for columns */
  void *out;      /* [rows, n], with out_row; f32 for columns */
  int64_t rows, n, k, x_row, out_row;
  int32_t dtype, out_dtype; /* of y and out */
};

/* ---- dots --------------------------------------------------------------------------- */

static inline KVL_HOT void dots_step(vf *sum, const float *const *x, const void *const *y,
                                     int64_t i, int lanes, const int rows, const int dtype) {
  const int columns = VF / rows;
  vf a[4];
  for (int r = 0; r < rows; r++) a[r] = vf_load_n(x[r] + i, lanes, KVL_DTYPE_F32);
#pragma GCC unroll 16
  for (int c = 0; c < columns; c++) {
    vf b = vf_load_n(at_const(y[c], i, dtype), lanes, dtype);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
      sum[r * columns + c] = vf_fma(a[r], b, sum[r * columns + c]);
  }
}

/* Stores a tile whose lane r * columns + c is that of row r0 + r and column j0 + c. */
static KVL_APART void dots_store(const struct thin *g, int64_t r0, int64_t j0, int64_t stop,
                                 vf tile, int columns) {
  for (int64_t r = r0; r < i64_min(r0 + VF / columns, g->rows); r++)
    for (int64_t j = j0; j < i64_min(j0 + columns, stop); j++)
      f32_store(g->out, r * g->out_row + j, tile[(r - r0) * columns + j - j0], g->out_dtype);
}

/* Computes the tile of rows from r0 on and columns from j0 on. Past the ends the last one is
 * computed again, and not stored. */
static inline KVL_HOT void dots_tile(const struct thin *g, int64_t r0, int64_t j0,
                                     int64_t stop, const int rows, const int dtype) {
  const int columns = VF / rows;
  const float *x[4];
  const void *y[VF];
  vf sum[VF] = {0};
  for (int r = 0; r < rows; r++) x[r] = g->x + i64_min(r0 + r, g->rows - 1) * g->x_row;
  for (int c = 0; c < columns; c++)
    y[c] = at_const(g->y, i64_min(j0 + c, stop - 1) * g->k, dtype);
  int64_t i = 0;
  for (; i + VF <= g->k; i += VF) dots_step(sum, x, y, i, VF, rows, dtype);
  if (i < g->k) dots_step(sum, x, y, i, (int)(g->k - i), rows, dtype);
  dots_store(g, r0, j0, stop, vf_sum_lanes(sum), columns);
}

/* ---- columns ------------------------------------------------------------------------ */

/* Adds terms [k0, k1) of the sums for `vectors` vectors of columns, with `left` lanes each,
 * from j on. The sums are kept in out until the last term. */
static inline KVL_HOT void columns_tile(const struct thin *g, int64_t r0, int64_t j, int left,
                                        int64_t k0, int64_t k1, const int rows,
                                        const int vectors, const int dtype) {
  const float *x[4];
  float *out[4];
  vf sum[VF] = {0};
  for (int r = 0; r < rows; r++) {
    int64_t row = i64_min(r0 + r, g->rows - 1);
    x[r] = g->x + row * g->x_row;
    out[r] = (float *)g->out + row * g->out_row + j;
    for (int v = 0; v < vectors && k0 > 0; v++)
      sum[r * vectors + v] = vf_load_n(out[r] + v * VF, left, KVL_DTYPE_F32);
  }
  for (int64_t i = k0; i < k1; i++) {
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) {
      vf b = vf_load_n(at_const(g->y, i * g->n + j + v * VF, dtype), left, dtype);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++)
        sum[r * vectors + v] = vf_fma(vf_set(x[r][i]), b, sum[r * vectors + v]);
    }
  }
  for (int r = 0; r < rows && r0 + r < g->rows; r++)
    for (int v = 0; v < vectors; v++)
      vf_store_n(out[r] + v * VF, sum[r * vectors + v], left, KVL_DTYPE_F32);
}

static inline KVL_HOT void columns_strip(const struct thin *g, int64_t r, int64_t j,
                                         int64_t stop, int64_t k0, int64_t k1, const int rows,
                                         const int dtype) {
  const int vectors = VF / rows;
  for (; j + vectors * VF <= stop; j += vectors * VF)
    columns_tile(g, r, j, VF, k0, k1, rows, vectors, dtype);
  for (; j < stop; j += VF) columns_tile(g, r, j, vf_left(j, stop), k0, k1, rows, 1, dtype);
}

/* ---- every row for a range of columns ----------------------------------------------- */

/* The part of y that stays in L1 or L2 while the groups of rows go over it: whole columns for
 * dots, and for [k, n] a block that is wide enough for fast reads from memory. The pieces of
 * threads are multiples of these. */
enum { THIN_DOTS = 64, THIN_COLUMNS = 256, THIN_TERMS = 64 };

/* Runs `call` with R bound to 4, 2 or 1 rows from r on, until all are done. */
#define THIN_GROUPS(rows, call)                       \
  for (int64_t r = 0, left; (left = (rows)-r) > 0;) { \
    if (left > 2) {                                   \
      enum { R = 4 };                                 \
      call;                                           \
      r += R;                                         \
    } else if (left == 2) {                           \
      enum { R = 2 };                                 \
      call;                                           \
      r += R;                                         \
    } else {                                          \
      enum { R = 1 };                                 \
      call;                                           \
      r += R;                                         \
    }                                                 \
  }

static inline KVL_HOT void thin_dots(const struct thin *g, int64_t begin, int64_t end,
                                     const int dtype) {
  for (int64_t j = begin; j < end; j += THIN_DOTS) {
    int64_t stop = i64_min(end, j + THIN_DOTS);
    THIN_GROUPS(g->rows, {
      for (int64_t c = j; c < stop; c += VF / R) dots_tile(g, r, c, stop, R, dtype);
    })
  }
}

static inline KVL_HOT void thin_columns(const struct thin *g, int64_t begin, int64_t end,
                                        const int dtype) {
  for (int64_t j = begin; j < end; j += THIN_COLUMNS) {
    int64_t stop = i64_min(end, j + THIN_COLUMNS);
    for (int64_t k0 = 0; k0 < g->k || k0 == 0; k0 += THIN_TERMS) {
      int64_t k1 = i64_min(g->k, k0 + THIN_TERMS);
      THIN_GROUPS(g->rows, columns_strip(g, r, j, stop, k0, k1, R, dtype))
    }
  }
}

#endif
