/* Dot products of a few query rows with many memory rows, each read once: the inner step
 * of decode attention and of every block score.
 *
 * Lanes run along head_dim, as the memory does. VF dot products are in flight at once,
 * so that their horizontal sums are done together (vf_sum_lanes) and the multiply-adds
 * never wait for each other. */
#ifndef KVL_CPU_DOTS_H
#define KVL_CPU_DOTS_H

#include "cpu/vec.h"

enum { HEAD_DIM_MAX = 256, DOT_ROWS_MAX = 4 };
_Static_assert(VF <= 16, "head_dim, a multiple of 8, leaves no tail or half a vector");

/* Query rows processed together for `rows` of them: 1, 2 or 4 (the rest are zeros). */
static inline int dot_rows(int rows) { return rows > 2 ? 4 : rows; }

static inline KVL_HOT int dim_padded(int dim) { return (dim + VF - 1) / VF * VF; }

/* out = scale * row `row` of q, as f32. */
static inline void load_query(const void *q, int64_t row, int dim, float scale, int dtype,
                              float *out) {
  for (int d = 0; d < dim; d++) out[d] = scale * f32_load(q, row * dim + d, dtype);
}

/* One vector's worth of d: sum[r * n + k] gains the products of its `lanes` lanes. */
static inline KVL_HOT void dots_step(vf *sum, const float *q, int padded,
                                     const char *const *x, int64_t high, int d,
                                     const int lanes, const int rows, const int bound,
                                     const int dtype) {
  const int n = VF / rows;
  vf row[DOT_ROWS_MAX];
  for (int r = 0; r < rows; r++) row[r] = vf_load(q, r * padded + d, KVL_DTYPE_F32);
#pragma GCC unroll 16
  for (int k = 0; k < n; k++) {
    vf low = vf_load_n(at_const(x[k], d, dtype), lanes, dtype), top = low;
    if (bound) top = vf_load_n(at_const(x[k] + high, d, dtype), lanes, dtype);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
      if (bound) sum[r * n + k] += vf_max(row[r] * low, row[r] * top);
      else sum[r * n + k] = vf_fma(row[r], low, sum[r * n + k]);
  }
}

/* out[r * out_row + k] = q[r] . x[k] for `rows` (1, 2, 4) query rows and k < VF / rows.
 * With `bound`, x[k] and the row `high` bytes further on are the elementwise limits of
 * some keys, and the result is sum_d max(q_d * x_d, q_d * high_d): at least q . key. */
static inline KVL_HOT void dots(const float *q, const char *const *x, int64_t high, int dim,
                                float *out, int64_t out_row, const int rows,
                                const int bound, const int dtype) {
  const int n = VF / rows, padded = dim_padded(dim);
  vf sum[VF] = {0};
  int d = 0;
  for (; d + VF <= dim; d += VF)
    dots_step(sum, q, padded, x, high, d, VF, rows, bound, dtype);
  if (d < dim) dots_step(sum, q, padded, x, high, d, VF / 2, rows, bound, dtype);
  vf total = vf_sum_lanes(sum);
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
    memcpy(out + r * out_row, (const float *)&total + r * n, n * sizeof(float));
}

#endif
