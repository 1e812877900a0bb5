/* Dot products and upper bounds of query rows with rows of memory (struct dots in dots.h), for
 * paged_attention, score_mean, score_minmax and score_max_qk. There is one function for each
 * number of query rows, dtype and form, and a call computes many products: inlined into each
 * kernel, they took minutes to compile. */
#include "cpu/dots.h"

/* Adds one vector to a bound: sum += max(q * low, q * high), where low <= high. */
static inline KVL_HOT vf bound_step(vf q, vf low, vf high, vf sum) {
#if defined(KVL_ISA_AVX512)
  __mmask16 negative = _mm512_movepi32_mask((__m512i)q);
  return vf_fma(q, (vf)_mm512_mask_blend_ps(negative, (__m512)high, (__m512)low), sum);
#else
  return sum + vf_max(q * low, q * high);
#endif
}

/* Lane r * (VF / rows) + k of the result is q[r] . x[k], for `rows` (1, 2, 4) query rows and
 * k < VF / rows. struct dots explains the other arguments. */
static inline KVL_HOT vf products(const float *q, const char *const *x, int64_t high,
                                  const char *const *soon, int dim, const int rows,
                                  const int bound, const int dtype) {
  const int n = VF / rows, padded = dim_padded(dim), bytes = kvl__float_bytes(dtype);
  vf sum[VF] = {0}, a, b, top_a = {0}, top_b = {0};
  int d = 0;
  for (; d + 2 * VF <= dim; d += 2 * VF)
#pragma GCC unroll 16
    for (int k = 0; k < n; k++) {
      vf_load_pair(x[k] + d * bytes, dtype, &a, &b);
      if (bound) vf_load_pair(x[k] + high + d * bytes, dtype, &top_a, &top_b);
      prefetch_some(soon[k] + d * bytes, 2 * VF * bytes);
      if (bound) prefetch_some(soon[k] + high + d * bytes, 2 * VF * bytes);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        vf row_a = vf_load(q, r * padded + d, KVL_DTYPE_F32);
        vf row_b = vf_load(q, r * padded + d + VF, KVL_DTYPE_F32);
        if (bound) {
          sum[r * n + k] = bound_step(row_a, a, top_a, sum[r * n + k]);
          sum[r * n + k] = bound_step(row_b, b, top_b, sum[r * n + k]);
        } else {
          sum[r * n + k] = vf_fma(row_a, a, sum[r * n + k]);
          sum[r * n + k] = vf_fma(row_b, b, sum[r * n + k]);
        }
      }
    }
  for (int lanes = VF; TAIL_LANES > 0 && d < dim; d += VF) {
    if (TAIL_LANES < (int)VF && d + VF > dim) lanes = TAIL_LANES;
#pragma GCC unroll 16
    for (int k = 0; k < n; k++) {
      a = vf_load_n(x[k] + d * bytes, lanes, dtype);
      if (bound) top_a = vf_load_n(x[k] + high + d * bytes, lanes, dtype);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        vf row = vf_load(q, r * padded + d, KVL_DTYPE_F32);
        if (bound) sum[r * n + k] = bound_step(row, a, top_a, sum[r * n + k]);
        else sum[r * n + k] = vf_fma(row, a, sum[r * n + k]);
      }
    }
  }
  return vf_sum_lanes(sum);
}

/* Stores to out[r * out_row + k] the lanes that products() returns. */
static inline KVL_HOT void store(vf lanes, float *out, int64_t out_row, const int rows) {
  const int n = VF / rows;
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
    memcpy(out + r * out_row, (const float *)&lanes + r * n, n * sizeof(float));
}

/* All products of query rows and memory rows, a step at a time. */
static inline KVL_HOT void tile(const struct dots *given, const int rows, const int bound,
                                const int dtype) {
  const struct dots d = *given; /* a copy, which storing a product does not change */
  const int padded = dim_padded(d.dim), step = VF / rows;
  for (int k = 0; k < d.keys; k += step)
    for (int r = 0; r < d.rows; r += rows)
      store(
          products(d.q + r * padded, d.x + k, d.high, d.soon + k, d.dim, rows, bound, dtype),
          d.out + r * d.out_row + k, d.out_row, rows);
}

/* The functions of one dtype, and the choice between them. */
#define FUNCTION(name, rows, bound, type) \
  static KVL_APART void name(const struct dots *d) { tile(d, rows, bound, KVL_DTYPE_##type); }
#define FUNCTIONS(type)                  \
  FUNCTION(products1_##type, 1, 0, type) \
  FUNCTION(products2_##type, 2, 0, type) \
  FUNCTION(products4_##type, 4, 0, type) \
  FUNCTION(bounds1_##type, 1, 1, type)   \
  FUNCTION(bounds2_##type, 2, 1, type)   \
  FUNCTION(bounds4_##type, 4, 1, type)
FUNCTIONS(F32)
FUNCTIONS(F16)
FUNCTIONS(BF16)
FUNCTIONS(F8E4M3)

#define CHOOSE(name, type)               \
  if (rows == 1) name##1_##type(d);      \
  else if (rows == 2) name##2_##type(d); \
  else name##4_##type(d);

void KVL_CPU_NAME(dots)(const struct dots *d) {
  const int rows = dot_rows(d->rows);
  switch (d->dtype) {
#define CASE(type)           \
  case KVL_DTYPE_##type:     \
    if (d->bound) {          \
      CHOOSE(bounds, type)   \
    } else {                 \
      CHOOSE(products, type) \
    }                        \
    break;
    CASE(F32)
    CASE(F16)
    CASE(BF16)
    CASE(F8E4M3)
#undef CASE
  }
}
