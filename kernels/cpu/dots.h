/* Dot products of a few query rows with many memory rows, each of which is read once. This is
 * the inner step of decode attention and of every block score.
 *
 * The lanes of a vector are neighbours in head_dim, as they are in memory. VF dot products
 * are computed at once, so that their horizontal sums are done together (vf_sum_lanes) and
 * the multiply-adds never wait for each other. */
#ifndef KVL_CPU_DOTS_H
#define KVL_CPU_DOTS_H

#include "cpu/vec.h"

enum { HEAD_DIM_MAX = 576, DOT_ROWS_MAX = 4 }; /* KVL__LATENT_MAX of the ops */
_Static_assert(VF <= 16, "head_dim, a multiple of 8, leaves no tail or half a vector");

/* The shortest rest of a head_dim, in lanes, after pairs of vectors; 0: none. */
enum { TAIL_LANES = VF > 4 ? 8 : 0 };

/* How many query rows are processed together if there are `rows`: 1, 2 or 4. The missing ones
 * are zeros. */
static inline int dot_rows(int rows) { return rows > 2 ? 4 : rows; }

static inline KVL_HOT int dim_padded(int dim) { return (dim + VF - 1) / VF * VF; }

/* ---- stored rows --------------------------------------------------------------------- */

/* Loads 2 VF elements in the order that is cheapest. For bf16, a receives the even elements
 * and b the odd ones, which are a shift and a mask of one load; for other dtypes, a receives
 * the first half and b the second. The values are in units of vf_pair_unit. */
static inline KVL_HOT void vf_load_pair(const void *p, const int dtype, vf *a, vf *b) {
  if (dtype == KVL_DTYPE_BF16) {
    vi x;
    memcpy(&x, p, sizeof x);
    *a = (vf)(x << 16);
    *b = (vf)(x & -65536);
#if defined(KVL_ISA_AVX512)
  } else if (dtype == KVL_DTYPE_F8E4M3) {
    __m512i h = (__m512i)f16_from_f8((v16)_mm512_cvtepi8_epi16(_mm256_loadu_si256(p)));
    *a = vf_from_f16(_mm512_castsi512_si256(h));
    *b = vf_from_f16(_mm512_extracti64x4_epi64(h, 1));
#elif defined(KVL_ISA_AVX2)
  } else if (dtype == KVL_DTYPE_F8E4M3) {
    __m256i h = (__m256i)f16_from_f8((v16)_mm256_cvtepi8_epi16(_mm_loadu_si128(p)));
    *a = vf_from_f16(_mm256_castsi256_si128(h));
    *b = vf_from_f16(_mm256_extracti128_si256(h, 1));
#endif
  } else {
    *a = vf_load(p, 0, dtype);
    *b = vf_load(p, VF, dtype);
  }
}
static inline float vf_pair_unit(int dtype) {
  return VF > 4 && dtype == KVL_DTYPE_F8E4M3 ? 0x1p8f : 1;
}
/* Put two halves into the order of vf_load_pair, and back. */
static inline KVL_HOT void vf_to_pair(vf *a, vf *b, int dtype) {
  if (dtype != KVL_DTYPE_BF16) return;
  vi even;
  for (int i = 0; i < VF; i++) even[i] = 2 * i;
  vf x = __builtin_shuffle(*a, *b, even);
  *b = __builtin_shuffle(*a, *b, even + 1);
  *a = x;
}
static inline KVL_HOT void vf_from_pair(vf *a, vf *b, int dtype) {
  if (dtype != KVL_DTYPE_BF16) return;
  vi low;
  for (int i = 0; i < VF; i++) low[i] = i / 2 + i % 2 * VF;
  vf x = __builtin_shuffle(*a, *b, low);
  *b = __builtin_shuffle(*a, *b, low + VF / 2);
  *a = x;
}

/* How many elements of a row are taken a pair of vectors at a time (vf_load_pair). What is
 * left is a vector, half of one, or both. */
static inline KVL_HOT int dim_pairs(int dim) { return dim / (2 * VF) * (2 * VF); }

/* out = scale * row `row` of q, as f32 in the order and units that memory rows of row_dtype
 * are loaded in. */
static inline void load_query(const void *q, int64_t row, int dim, float scale, int dtype,
                              int row_dtype, float *out) {
  const float unit = scale * vf_pair_unit(row_dtype);
  int64_t at_row = row * dim;
  int d = 0;
  for (; d < dim_pairs(dim); d += 2 * VF) {
    vf a = vf_load(q, at_row + d, dtype), b = vf_load(q, at_row + d + VF, dtype);
    vf_to_pair(&a, &b, row_dtype);
    vf_store(out, d, unit * a, KVL_DTYPE_F32);
    vf_store(out, d + VF, unit * b, KVL_DTYPE_F32);
  }
  for (; d < dim; d++) out[d] = scale * f32_load(q, at_row + d, dtype);
}

/* Brings a sum of such rows, f32 in their order and units, back to the usual order and units,
 * in place. */
static inline void restore_row(float *row, int dim, int row_dtype) {
  const float unit = vf_pair_unit(row_dtype);
  for (int d = 0; d < dim_pairs(dim); d += 2 * VF) {
    vf a = vf_load(row, d, KVL_DTYPE_F32), b = vf_load(row, d + VF, KVL_DTYPE_F32);
    vf_from_pair(&a, &b, row_dtype);
    vf_store(row, d, unit * a, KVL_DTYPE_F32);
    vf_store(row, d + VF, unit * b, KVL_DTYPE_F32);
  }
}

/* Prefetches bytes [from, to) of a row into the second-level cache; the first level has room
 * only for the rows in use. Callers prefetch between the arithmetic, one line for each line
 * that is used: bursts would fill the queue of misses, and nothing would overlap any more. */
static inline KVL_HOT void prefetch(const char *row, int64_t from, int64_t to) {
  for (int64_t b = from; b < to; b += 64) __builtin_prefetch(row + b, 0, 2);
}
/* The same for `bytes` bytes, which are a constant, so that no branches cut the caller's loop
 * into pieces. That compiles twice as fast. */
static inline KVL_HOT void prefetch_some(const char *p, const int bytes) {
#pragma GCC unroll 8
  for (int b = 0; b < bytes; b += 64) __builtin_prefetch(p + b, 0, 2);
}

/* ---- products ------------------------------------------------------------------------- */

/* Many products at once. The product of query r and memory row k goes to out[r * out_row +
 * k]. x and soon have `keys` addresses, rounded up to VF, and a row of out has room for as
 * many results. With `bound`, x[k] is the elementwise minimum of some keys, and the row
 * `high` bytes further on is their maximum; the product is sum_d max(q_d * x_d, q_d *
 * high_d) then, which is at least q . key. */
struct dots {
  const float *q; /* [rows rounded up to dot_rows(rows), dim_padded(dim)], from load_query */
  const char *const *x;
  const char *const *soon; /* rows to prefetch, as many as in x */
  float *out;
  int64_t out_row, high;
  int rows, keys, dim, bound, dtype; /* dtype: of the memory rows */
};
void KVL_CPU_NAME(dots)(const struct dots *d);

#endif
