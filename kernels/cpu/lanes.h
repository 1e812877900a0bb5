/* More arithmetic on vec.h's vectors: choosing lane by lane, maxima that keep NaN, and the
 * functions of the unary ops. */
#ifndef KVL_CPU_LANES_H
#define KVL_CPU_LANES_H

#include "cpu/vec.h"

/* A lane adds up RUN terms in f32; the sums of these runs are then added in double. The error
 * of a sum is below RUN * 2^-24 of the sum of magnitudes, however many terms it has. */
enum { RUN = 32 };

/* Lanes of a where the mask is -1, of b where it is 0. */
static inline KVL_HOT vf vf_pick(vi mask, vf a, vf b) {
  return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}
/* The larger (smaller) of two lanes; NaN when either is. */
static inline KVL_HOT vf vf_max_nan(vf a, vf b) {
  return vf_pick((vi)(a > b) | (vi)(a != a), a, b);
}
static inline KVL_HOT vf vf_min_nan(vf a, vf b) {
  return vf_pick((vi)(a < b) | (vi)(a != a), a, b);
}
/* Whether any lane of a mask is -1. */
static inline KVL_HOT int vi_any(vi mask) {
#if defined(KVL_ISA_AVX512)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(KVL_ISA_AVX2)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}
static inline KVL_HOT vf vf_abs(vf x) { return (vf)((vi)x & 0x7FFFFFFF); }
static inline KVL_HOT vf vf_sqrt(vf x) {
#if defined(KVL_ISA_AVX512)
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(KVL_ISA_AVX2)
  return (vf)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < VF; i++) x[i] = sqrtf(x[i]);
  return x;
#endif
}
static inline KVL_HOT vf vf_floor(vf x) {
#if defined(KVL_ISA_AVX512)
  return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(KVL_ISA_AVX2)
  return (vf)_mm256_floor_ps((__m256)x);
#else
  for (int i = 0; i < VF; i++) x[i] = floorf(x[i]);
  return x;
#endif
}
static inline KVL_HOT vf vf_sigmoid(vf x) { return 1.0f / (1.0f + vf_exp(-x)); }

/* ln x: x = m * 2^e with m in [sqrt(1/2), sqrt(2)), ln m = 2 atanh((m - 1) / (m + 1)).
 * Relative error below 3e-7; ln 0 = -inf, ln of a negative number is NaN. */
static inline KVL_HOT vf vf_log(vf x) {
  vi tiny = (vi)(x < 0x1p-126f); /* subnormal: scale into the normal numbers */
  vf y = vf_pick(tiny, x * 0x1p24f, x);
  vi bits = (vi)y, e = ((bits >> 23) & 255) - 127;
  vf m = (vf)((bits & 0x7FFFFF) | 0x3F800000);
  vi high = (vi)(m > 1.41421354f);
  m = vf_pick(high, m * 0.5f, m);
  vf n = __builtin_convertvector(e - high - (tiny & 24), vf);
  vf r = (m - 1.0f) / (m + 1.0f), r2 = r * r;
  vf p = vf_fma(r2, vf_set(0.222222222f), vf_set(0.285714286f));
  p = vf_fma(r2, p, vf_set(0.4f));
  p = vf_fma(r2, p, vf_set(0.666666687f));
  p = vf_fma(r2 * r, p, n * 1.42860677e-6f); /* the low part of ln 2 */
  vf z = vf_fma(n, vf_set(0.693145752f), vf_fma(vf_set(2.0f), r, p));
  z = vf_pick((vi)(x == 0.0f), vf_set(-INFINITY), z);
  z = vf_pick((vi)(x < 0.0f), vf_set(NAN), z);
  return vf_pick((vi)(x == INFINITY) | (vi)(x != x), x, z);
}

/* tanh x: near 0 an odd polynomial, which keeps the relative error small; elsewhere
 * 1 - 2 / (e^2x + 1). Source of the coefficients: Moshier, Cephes, tanhf. */
static inline KVL_HOT vf vf_tanh(vf x) {
  vf x2 = x * x, ax = vf_abs(x);
  vf p = vf_fma(x2, vf_set(-5.70498872745e-3f), vf_set(2.06390887954e-2f));
  p = vf_fma(x2, p, vf_set(-5.37397155531e-2f));
  p = vf_fma(x2, p, vf_set(1.33314422036e-1f));
  p = vf_fma(x2, p, vf_set(-3.33332819422e-1f));
  p = vf_fma(x2 * x, p, x);
  vf far = 1.0f - 2.0f / (vf_exp(ax + ax) + 1.0f);
  far = (vf)((vi)far | ((vi)x & (int32_t)0x80000000));
  return vf_pick((vi)(ax < 0.625f), p, far);
}

#endif
