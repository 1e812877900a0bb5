/* Vectors of floats for one instruction set: KVL_ISA is plain, avx2 or avx512, and every
 * file of kernels/cpu/ is compiled once for each. One source, three widths.
 *
 * Storage dtypes are read and written through vf_load / vf_store with the dtype as a
 * constant: write the body as `static inline KVL_HOT ... body(..., const int dtype)` and
 * call it through KVL_BY_FLOAT, which makes one specialised copy per dtype. */
#ifndef KVL_CPU_VEC_H
#define KVL_CPU_VEC_H

#include <math.h>

#include "cpu/scalar.h"

#define KVL_JOIN_(a, b, c, d) a##b##c##d
#define KVL_JOIN(a, b, c, d) KVL_JOIN_(a, b, c, d)
#define KVL_CPU_NAME(op) KVL_JOIN(kvl_cpu_, op, _, KVL_ISA)
/* Defines the launcher of `op`; the body sees `args` (const void *) and `queue`, for
 * kvl__link_bytes. */
#define KVL_CPU_KERNEL(op)     \
  kvl_kernel KVL_CPU_NAME(op); \
  int KVL_CPU_NAME(op)(const void *args, void *queue __attribute__((unused)))

/* The bytes of workspace that an op wants. It may look at shapes only: the tensors may not have
 * been computed yet. */
#define KVL_CPU_WORKSPACE_NAME(op) KVL_JOIN(kvl_cpu_, op, _workspace_, KVL_ISA)
#define KVL_CPU_WORKSPACE(op)                          \
  size_t KVL_CPU_WORKSPACE_NAME(op)(const void *args); \
  size_t KVL_CPU_WORKSPACE_NAME(op)(const void *args)

/* Tells the emulated link how many bytes the kernel moved over it. */
static inline void kvl__link_bytes(void *queue, int direction, int64_t bytes) {
  struct kvl_cpu_job *job = queue;
  if (job) job->bytes_link[direction] += bytes;
}

/* Runs `call` with `D` bound to a float dtype as a constant; there is one copy of it per
 * dtype. KVL_BY_STORED knows f8e4m3, too. */
#define KVL_BY_FLOAT(dtype, call)        \
  switch (dtype) {                       \
    case KVL_DTYPE_F32: {                \
      enum { D = KVL_DTYPE_F32 };        \
      call;                              \
    } break;                             \
    case KVL_DTYPE_F16: {                \
      enum { D = KVL_DTYPE_F16 };        \
      call;                              \
    } break;                             \
    case KVL_DTYPE_BF16: {               \
      enum { D = KVL_DTYPE_BF16 };       \
      call;                              \
    } break;                             \
    default: return KVL_ERR_UNSUPPORTED; \
  }
#define KVL_BY_STORED(dtype, call)     \
  switch (dtype) {                     \
    case KVL_DTYPE_F8E4M3: {           \
      enum { D = KVL_DTYPE_F8E4M3 };   \
      call;                            \
    } break;                           \
    default: KVL_BY_FLOAT(dtype, call) \
  }

/* ---- vectors: VF floats ------------------------------------------------------------- */

#if defined(KVL_ISA_AVX512)
enum { VF = 16 };
#elif defined(KVL_ISA_AVX2)
enum { VF = 8 };
#else
enum { VF = 4 };
#endif
typedef float vf __attribute__((vector_size(VF * 4), aligned(VF * 4)));
typedef int32_t vi __attribute__((vector_size(VF * 4), aligned(VF * 4)));

static inline KVL_HOT vf vf_set(float x) {
#if defined(KVL_ISA_AVX512)
  return (vf)_mm512_set1_ps(x);
#elif defined(KVL_ISA_AVX2)
  return (vf)_mm256_set1_ps(x);
#else
  return (vf){x, x, x, x};
#endif
}

#if defined(KVL_ISA_AVX512)
static inline KVL_HOT vf vf_fma(vf a, vf b, vf c) {
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
static inline KVL_HOT vf vf_max(vf a, vf b) {
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}
static inline KVL_HOT vf vf_min(vf a, vf b) {
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
}
#elif defined(KVL_ISA_AVX2)
static inline KVL_HOT vf vf_fma(vf a, vf b, vf c) {
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
static inline KVL_HOT vf vf_max(vf a, vf b) {
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
}
static inline KVL_HOT vf vf_min(vf a, vf b) {
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
}
#else
static inline KVL_HOT vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
static inline KVL_HOT vf vf_max(vf a, vf b) { /* b if either is NaN, as maxps does */
  vi m = (vi)(a > b);
  return (vf)(((vi)a & m) | ((vi)b & ~m));
}
static inline KVL_HOT vf vf_min(vf a, vf b) {
  vi m = (vi)(a < b);
  return (vf)(((vi)a & m) | ((vi)b & ~m));
}
#endif

#if defined(KVL_ISA_AVX512) || defined(KVL_ISA_AVX2)
/* An f8e4m3 shifted left by 7 is an f16, but f8e4m3's bias is 8 less, so the f16 is 2^-8 of
 * the value. f16 has one more bit, 0x4000. The bytes in x are sign-extended, so this bit
 * begins as a copy of the sign. It must become 0, or 1 for NaN. In a NaN all bits below the
 * sign are 1, so that adding 1 to the lowest carries into this bit; in other numbers it does
 * not. */
typedef int16_t v16 __attribute__((vector_size(VF * 4))); /* 2 * VF elements */
static inline KVL_HOT v16 f16_from_f8(v16 x) {
  v16 h = x << 7;
  return h ^ ((h + 0x80) & 0x4000);
}
#endif

/* The byte that f8_from_f32 gives, in each lane. */
static inline KVL_HOT vi vf_to_f8(vf x) {
  vi sign = ((vi)x >> 24) & 0x80, nan = (vi)(x != x);
  vf magnitude = vf_min((vf)((vi)x & 0x7FFFFFFF), vf_set(448));
  vi bits = (vi)magnitude, tiny = (vi)(magnitude < 0x1p-6f);
  vi small = (vi)(magnitude + 0x1p14f) - 0x46800000; /* the bits of 2^14 */
  vi normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
  vi r = (tiny & small) | (~tiny & normal) | sign;
  return (nan & 0x7F) | (~nan & r);
}

#if defined(KVL_ISA_AVX512)
static inline KVL_HOT float vf_sum(vf a) { return _mm512_reduce_add_ps((__m512)a); }
static inline KVL_HOT float vf_hmax(vf a) { return _mm512_reduce_max_ps((__m512)a); }
static inline KVL_HOT vf vf_from_f16(__m256i h) { return (vf)_mm512_cvtph_ps(h); }
/* Loads n elements, 0 <= n <= VF. Lanes past n are 0, and their memory is not touched. */
static inline KVL_HOT vf vf_load_n(const void *p, int n, const int dtype) {
  __mmask16 m = (__mmask16)((1u << n) - 1);
  if (dtype == KVL_DTYPE_F32) return (vf)_mm512_maskz_loadu_ps(m, p);
  if (dtype == KVL_DTYPE_F8E4M3) {
    __m256i b = _mm256_castsi128_si256(_mm_maskz_loadu_epi8(m, p));
    v16 h = f16_from_f8((v16)_mm512_cvtepi8_epi16(b));
    return vf_from_f16(_mm512_castsi512_si256((__m512i)h)) * 0x1p8f;
  }
  __m256i h = _mm256_maskz_loadu_epi16(m, p);
  if (dtype == KVL_DTYPE_F16) return vf_from_f16(h);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
}
static inline KVL_HOT __m256i vf_to_bf16(vf x) {
  __m512i i = (__m512i)x;
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(i, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(i, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, i, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}
/* Stores the lowest byte of the first n lanes, 0 <= n <= VF. */
static inline KVL_HOT void vi_store_bytes(void *p, vi x, int n) {
  _mm_mask_storeu_epi8(p, (__mmask16)((1u << n) - 1), _mm512_cvtepi32_epi8((__m512i)x));
}
static inline KVL_HOT void vf_store_n(void *p, vf x, int n, const int dtype) {
  __mmask16 m = (__mmask16)((1u << n) - 1);
  if (dtype == KVL_DTYPE_F32) _mm512_mask_storeu_ps(p, m, (__m512)x);
  else if (dtype == KVL_DTYPE_F16)
    _mm256_mask_storeu_epi16(p, m, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
  else if (dtype == KVL_DTYPE_F8E4M3) vi_store_bytes(p, vf_to_f8(x), n);
  else _mm256_mask_storeu_epi16(p, m, vf_to_bf16(x));
}
#else
static inline KVL_HOT float vf_sum(vf a) {
  float s[VF];
  memcpy(s, &a, sizeof s);
  for (int w = VF / 2; w > 0; w /= 2)
    for (int i = 0; i < w; i++) s[i] += s[i + w];
  return s[0];
}
static inline KVL_HOT float vf_hmax(vf a) {
  float s[VF];
  memcpy(s, &a, sizeof s);
  for (int i = 1; i < VF; i++) s[0] = s[i] > s[0] ? s[i] : s[0];
  return s[0];
}
#if defined(KVL_ISA_AVX2)
static inline KVL_HOT vf vf_from_f16(__m128i h) { return (vf)_mm256_cvtph_ps(h); }
/* The lanes, each of which is 0 ... 65535, in 16 bits. */
static inline KVL_HOT __m128i vi_to_16(vi x) {
  __m256i twice = _mm256_packus_epi32((__m256i)x, (__m256i)x);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0x08));
}
static inline KVL_HOT __m128i vf_to_bf16(vf x) {
  const vi i = (vi)x, nan = (vi)(x != x), half = 0x7FFF + ((i >> 16) & 1);
  const vi rounded = (vi)_mm256_add_epi32((__m256i)i, (__m256i)half); /* NaN may overflow */
  const vi r = (nan & (i | 0x400000)) | (~nan & rounded);
  return vi_to_16((r >> 16) & 0xFFFF);
}
#else
/* The lanes of x are bytes. Subnormals are multiples of 2^-9 and are converted as whole
 * numbers, because multiplying f32's own subnormals would be slow. */
static inline KVL_HOT vf vf_from_f8(vi x) {
  vi m = x & 0x7F, tiny = m < 8, nan = (vi)(m == 0x7F) & 0x7F800000;
  vi small = (vi)(__builtin_convertvector(m, vf) * 0x1p-9f);
  vi normal = (m << 20) + (120 << 23);
  return (vf)((tiny & small) | (~tiny & normal) | nan | (x & 0x80) << 24);
}
#endif
static inline KVL_HOT vf vf_load_full(const void *p, const int dtype) {
  vf x;
  if (dtype == KVL_DTYPE_F32) {
    memcpy(&x, p, sizeof x);
    return x;
  }
#if defined(KVL_ISA_AVX2)
  if (dtype == KVL_DTYPE_F8E4M3) {
    v16 h = f16_from_f8((v16)_mm256_cvtepi8_epi16(_mm_loadl_epi64(p)));
    return vf_from_f16(_mm256_castsi256_si128((__m256i)h)) * 0x1p8f;
  }
  __m128i h = _mm_loadu_si128(p);
  if (dtype == KVL_DTYPE_F16) return vf_from_f16(h);
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
#else
  if (dtype == KVL_DTYPE_F8E4M3) {
    const uint8_t *b = p;
    return vf_from_f8((vi){b[0], b[1], b[2], b[3]});
  }
  return (vf){f32_load(p, 0, dtype), f32_load(p, 1, dtype), f32_load(p, 2, dtype),
              f32_load(p, 3, dtype)};
#endif
}
/* Stores the lowest byte of the first n lanes, 0 <= n <= VF. */
static inline KVL_HOT void vi_store_bytes(void *p, vi x, int n) {
#if defined(KVL_ISA_AVX2)
  if (n == VF) {
    __m128i pairs = vi_to_16(x & 0xFF);
    _mm_storel_epi64(p, _mm_packus_epi16(pairs, pairs));
    return;
  }
#endif
  for (int i = 0; i < n; i++) ((uint8_t *)p)[i] = (uint8_t)x[i];
}
static inline KVL_HOT void vf_store_full(void *p, vf x, const int dtype) {
  if (dtype == KVL_DTYPE_F32) {
    memcpy(p, &x, sizeof x);
    return;
  }
  if (dtype == KVL_DTYPE_F8E4M3) {
    vi_store_bytes(p, vf_to_f8(x), VF);
    return;
  }
#if defined(KVL_ISA_AVX2)
  _mm_storeu_si128(p, dtype == KVL_DTYPE_F16
                          ? _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT)
                          : vf_to_bf16(x));
#else
  for (int i = 0; i < VF; i++) f32_store(p, i, x[i], dtype);
#endif
}
/* Fewer than VF. Not inlined: every loop ends with one of these, and inlined they would
 * take more time to compile than the loops. */
static KVL_APART __attribute__((unused)) vf vf_load_few(const void *p, int n, int dtype) {
  vf x = {0};
  for (int i = 0; i < n; i++) x[i] = f32_load(p, i, dtype);
  return x;
}
static KVL_APART __attribute__((unused)) void vf_store_few(void *p, vf x, int n, int dtype) {
  for (int i = 0; i < n; i++) f32_store(p, i, x[i], dtype);
}
static inline KVL_HOT vf vf_load_n(const void *p, int n, const int dtype) {
  return n == VF ? vf_load_full(p, dtype) : vf_load_few(p, n, dtype);
}
static inline KVL_HOT void vf_store_n(void *p, vf x, int n, const int dtype) {
  if (n == VF) vf_store_full(p, x, dtype);
  else vf_store_few(p, x, n, dtype);
}
#endif

static inline KVL_HOT vf vf_load(const void *p, int64_t i, const int dtype) {
  return vf_load_n((const char *)p + i * kvl__float_bytes(dtype), VF, dtype);
}
static inline KVL_HOT void vf_store(void *p, int64_t i, vf x, const int dtype) {
  vf_store_n((char *)p + i * kvl__float_bytes(dtype), x, VF, dtype);
}
/* The number of elements in [i, min(i + VF, n)), for loops with a tail. */
static inline KVL_HOT int vf_left(int64_t i, int64_t n) {
  return n - i < VF ? (int)(n - i) : VF;
}
static inline KVL_HOT const void *at_const(const void *p, int64_t i, const int dtype) {
  return (const char *)p + i * kvl__float_bytes(dtype);
}
static inline KVL_HOT void *at(void *p, int64_t i, const int dtype) {
  return (char *)p + i * kvl__float_bytes(dtype);
}

/* Lane i: mask ? a : b, where every mask lane is 0 or -1 as comparisons make them. */
static inline KVL_HOT vf vf_select(vi mask, vf a, vf b) {
  return (vf)((mask & (vi)a) | (~mask & (vi)b));
}

/* Lane j of the result is the sum of x[j]'s lanes; x is overwritten. A fold adds the halves
 * of the segments of two vectors: a blend takes what stays in place, and a shuffle what
 * crosses over. So VF sums cost 3 VF instructions instead of VF * log VF. */
#define KVL_STAY(i, n) ((i) % (2 * (n)) < (n) ? (i) : VF + (i))
#define KVL_CROSS(i, n) ((i) % (2 * (n)) < (n) ? (i) + (n) : VF + (i) - (n))
#if defined(KVL_ISA_AVX512)
#define KVL_LANES(f, n)                                                              \
  (vi) {                                                                             \
    f(0, n), f(1, n), f(2, n), f(3, n), f(4, n), f(5, n), f(6, n), f(7, n), f(8, n), \
        f(9, n), f(10, n), f(11, n), f(12, n), f(13, n), f(14, n), f(15, n)          \
  }
#elif defined(KVL_ISA_AVX2)
#define KVL_LANES(f, n) \
  (vi) { f(0, n), f(1, n), f(2, n), f(3, n), f(4, n), f(5, n), f(6, n), f(7, n) }
#else
#define KVL_LANES(f, n) \
  (vi) { f(0, n), f(1, n), f(2, n), f(3, n) }
#endif
#define KVL_FOLD(x, n)                                                     \
  _Pragma("GCC unroll 8") for (int i = 0; i < (n); i++)                    \
      x[i] = __builtin_shuffle(x[i], x[i + (n)], KVL_LANES(KVL_STAY, n)) + \
             __builtin_shuffle(x[i], x[i + (n)], KVL_LANES(KVL_CROSS, n))
static inline KVL_HOT vf vf_sum_lanes(vf *x) {
#if defined(KVL_ISA_AVX512)
  KVL_FOLD(x, 8);
#endif
#if defined(KVL_ISA_AVX512) || defined(KVL_ISA_AVX2)
  KVL_FOLD(x, 4);
#endif
  KVL_FOLD(x, 2);
  KVL_FOLD(x, 1);
  return x[0];
}

/* Lane j of x[i] becomes lane i of x[j]: each step exchanges the upper half of a vector's
 * segments with the lower half of another's. */
#define KVL_LOWER(i, n) ((i) % (2 * (n)) < (n) ? (i) : VF + (i) - (n))
#define KVL_UPPER(i, n) ((i) % (2 * (n)) < (n) ? (i) + (n) : VF + (i))
#define KVL_EXCHANGE(x, n)                                                \
  _Pragma("GCC unroll 16") for (int i = 0; i < VF; i++) if (!(i & (n))) { \
    const vf low = x[i], high = x[i + (n)];                               \
    x[i] = __builtin_shuffle(low, high, KVL_LANES(KVL_LOWER, n));         \
    x[i + (n)] = __builtin_shuffle(low, high, KVL_LANES(KVL_UPPER, n));   \
  }
static inline KVL_HOT void vf_transpose(vf *x) {
#if defined(KVL_ISA_AVX512)
  KVL_EXCHANGE(x, 8)
#endif
#if defined(KVL_ISA_AVX512) || defined(KVL_ISA_AVX2)
  KVL_EXCHANGE(x, 4)
#endif
  KVL_EXCHANGE(x, 2)
  KVL_EXCHANGE(x, 1)
}

/* e^x: 2^n * p(r), relative error below 2e-7; 0 below -87.3, inf above 88.8; NaN stays. */
static inline KVL_HOT vf vf_exp(vf x) {
  vf y = vf_min(vf_set(88.8f), vf_max(vf_set(-87.4f), x)); /* NaN stays: see vf_max */
  vf t = y * 1.44269504f;
  vf n = (t + 12582912.0f) - 12582912.0f; /* rounds to nearest: |t| < 2^22 */
  vf r = vf_fma(n, vf_set(-0.693359375f), y);
  r = vf_fma(n, vf_set(2.12194440e-4f), r);
  vf p = vf_set(1.9875691500e-4f);
  p = vf_fma(p, r, vf_set(1.3981999507e-3f));
  p = vf_fma(p, r, vf_set(8.3334519073e-3f));
  p = vf_fma(p, r, vf_set(4.1665795894e-2f));
  p = vf_fma(p, r, vf_set(1.6666665459e-1f));
  p = vf_fma(p, r, vf_set(5.0000001201e-1f));
  p = vf_fma(p * r, r, r) + 1.0f;
#if defined(KVL_ISA_AVX512)
  __mmask16 some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
  return (vf)_mm512_maskz_scalef_ps(some, (__m512)p, (__m512)n);
#else
  vi e = __builtin_convertvector(n, vi);
  vi half = e >> 1; /* in two steps: 2^128 is no f32 */
  vf s0 = (vf)((half + 127) << 23), s1 = (vf)((e - half + 127) << 23);
  vf z = p * s0 * s1;
  vi low = (vi)(x < -87.3f), nan = (vi)(x != x);
  return (vf)((((vi)z) & ~low & ~nan) | ((vi)x & nan));
#endif
}
static inline float f32_exp(float x) { return vf_exp(vf_set(x))[0]; }

#endif
