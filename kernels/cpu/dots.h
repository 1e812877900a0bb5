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

/* Rows are taken a pair of vectors at a time (vf_load_pair) while there are pairs, then a
 * vector, then half of one. Where element d of a row goes among its dim_padded lanes: */
static inline int dot_lane(int d, int dim, int dtype) {
  int pair = d / (2 * VF) * (2 * VF);
  return pair + 2 * VF <= dim ? pair + vf_pair_lane(d - pair, dtype) : d;
}

/* out = scale * row `row` of q, as f32 in the lanes for memory rows of row_dtype. */
static inline void load_query(const void *q, int64_t row, int dim, float scale, int dtype,
                              int row_dtype, float *out) {
  for (int d = 0; d < dim; d++)
    out[dot_lane(d, dim, row_dtype)] = scale * f32_load(q, row * dim + d, dtype);
}

/* Prefetch bytes [from, to) of a row into the second level: the first has no room for more
 * than is being worked on. Prefetches go between the arithmetic, a line for each line that
 * is used: in bursts they fill the queue of misses and nothing overlaps any more. */
static inline KVL_HOT void prefetch(const char *row, int64_t from, int64_t to) {
  for (int64_t b = from; b < to; b += 64) __builtin_prefetch(row + b, 0, 2);
}

/* out[r * out_row + k] = q[r] . x[k] for `rows` (1, 2, 4) query rows and k < VF / rows.
 * With `bound`, x[k] and the row `high` bytes further on are the elementwise limits of
 * some keys, and the result is sum_d max(q_d * x_d, q_d * high_d): at least q . key.
 * soon[k] are rows to prefetch. */
static inline KVL_HOT void dots(const float *q, const char *const *x, int64_t high,
                                const char *const *soon, int dim, float *out,
                                int64_t out_row, const int rows, const int bound,
                                const int dtype) {
  const int n = VF / rows, padded = dim_padded(dim), bytes = kvl__float_bytes(dtype);
  vf sum[VF] = {0}, a, b, top_a = {0}, top_b = {0};
  int d = 0;
  for (; d + 2 * VF <= dim; d += 2 * VF)
#pragma GCC unroll 16
    for (int k = 0; k < n; k++) {
      vf_load_pair(x[k] + d * bytes, dtype, &a, &b);
      if (bound) vf_load_pair(x[k] + high + d * bytes, dtype, &top_a, &top_b);
      prefetch(soon[k], d * bytes, (d + 2 * VF) * bytes);
      if (bound) prefetch(soon[k] + high, d * bytes, (d + 2 * VF) * bytes);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        vf row_a = vf_load(q, r * padded + d, KVL_DTYPE_F32);
        vf row_b = vf_load(q, r * padded + d + VF, KVL_DTYPE_F32);
        if (bound) {
          sum[r * n + k] += vf_max(row_a * a, row_a * top_a);
          sum[r * n + k] += vf_max(row_b * b, row_b * top_b);
        } else {
          sum[r * n + k] = vf_fma(row_a, a, sum[r * n + k]);
          sum[r * n + k] = vf_fma(row_b, b, sum[r * n + k]);
        }
      }
    }
  for (int lanes = VF; d < dim; d += VF) {
    if (d + VF > dim) lanes = VF / 2;
#pragma GCC unroll 16
    for (int k = 0; k < n; k++) {
      a = vf_load_n(x[k] + d * bytes, lanes, dtype);
      if (bound) top_a = vf_load_n(x[k] + high + d * bytes, lanes, dtype);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        vf row = vf_load(q, r * padded + d, KVL_DTYPE_F32);
        if (bound) sum[r * n + k] += vf_max(row * a, row * top_a);
        else sum[r * n + k] = vf_fma(row, a, sum[r * n + k]);
      }
    }
  }
  vf total = vf_sum_lanes(sum);
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
    memcpy(out + r * out_row, (const float *)&total + r * n, n * sizeof(float));
}

#endif
