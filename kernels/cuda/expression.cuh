/* What the CUDA kernels that are generated from expressions
 * (lua/kvlab/kernel/print/cuda.lua) call. NVRTC compiles them, and needs no header of the
 * toolkit: this file includes none. The names and meanings are those of
 * kernels/cpu/expression.h. */
#ifndef KVL_CUDA_EXPRESSION_CUH
#define KVL_CUDA_EXPRESSION_CUH

typedef int int32_t;
typedef unsigned uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned short uint16_t;
typedef unsigned char uint8_t;
#define KVL_HAS_INTS
#include "page.h"

#ifndef INFINITY
#define INFINITY __int_as_float(0x7F800000)
#define NAN __int_as_float(0x7FFFFFFF)
#endif
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define UINT32_MAX 4294967295u
#define UINT64_MAX 18446744073709551615ull
#define ALL_LANES 0xFFFFFFFFu
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define DEVICE_APART static __device__ __noinline__ /* code that seldom runs */

/* ---- launches ------------------------------------------------------------------------ */

/* Waits for the kernels before this one, and lets the next one start beside it. */
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- stored numbers -------------------------------------------------------------------- */

DEVICE float from_bf16(uint32_t x) { return __uint_as_float(x << 16); }
#ifdef __CUDA_ARCH__ /* elsewhere, spec/cuda_emulation.h has these */
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]
DEVICE float from_f16(uint32_t x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((uint16_t)x));
  return r;
}
DEVICE uint16_t to_f16(float f) {
  uint16_t r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(f));
  return r;
}
#endif
/* A shift gives an exponent that is 120 too small; the product corrects it, also for
 * subnormals. 0x7F is NaN. */
DEVICE float from_f8e4m3(uint32_t x) {
  const float magnitude = __uint_as_float((x & 0x7F) << 20) * 0x1p120f;
  const uint32_t bits = (x & 0x7F) == 0x7F ? 0x7FC00000u : __float_as_uint(magnitude);
  return __uint_as_float(bits | (x & 0x80) << 24);
}
DEVICE uint16_t to_bf16(float f) {
  const uint32_t i = __float_as_uint(f);
  if ((i & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((i >> 16) | 0x40);
  return (uint16_t)((i + 0x7FFF + ((i >> 16) & 1)) >> 16);
}
DEVICE uint8_t to_f8e4m3(float f) {
  const uint32_t sign = (__float_as_uint(f) >> 24) & 0x80,
                 a = __float_as_uint(f) & 0x7FFFFFFF;
  float magnitude = __uint_as_float(a);
  magnitude = magnitude > 448.0f ? 448.0f : magnitude;
  const uint32_t bits = __float_as_uint(magnitude);
  const uint32_t small = __float_as_uint(magnitude + 0x1p14f) - __float_as_uint(0x1p14f);
  const uint32_t normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120u << 3);
  const uint32_t r = bits < __float_as_uint(0x1p-6f) ? small : normal;
  return (uint8_t)(a > 0x7F800000u ? 0x7F : r | sign);
}

/* N consecutive elements of BYTES each, loaded at once and taken out one by one. */
template <int BYTES> struct chunk {
  static constexpr int WORDS = (BYTES + 3) / 4;
  uint32_t w[WORDS];
  float scale; /* of int8 */
  DEVICE_MEMBER void load(const void *p) {
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
      for (int i = 0; i < BYTES / 16; i++) {
        const uint4 x = __ldg((const uint4 *)p + i);
        w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
      }
    } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS; i++) w[i] = __ldg((const uint32_t *)p + i);
    } else if constexpr (BYTES == 2) {
      w[0] = __ldg((const uint16_t *)p);
    } else {
      w[0] = 0;
#pragma unroll
      for (int i = 0; i < BYTES; i++)
        w[0] |= (uint32_t)__ldg((const uint8_t *)p + i) << 8 * i;
    }
  }
  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int i = 0; i < WORDS; i++) w[i] = 0;
    scale = 0;
  }
  DEVICE_MEMBER uint32_t u8(int i) const { return w[i / 4] >> 8 * (i % 4) & 0xFF; }
  DEVICE_MEMBER uint32_t u16(int i) const { return w[i / 2] >> 16 * (i % 2) & 0xFFFF; }
  DEVICE_MEMBER float f32(int i) const { return __uint_as_float(w[i]); }
  DEVICE_MEMBER float f16(int i) const { return from_f16(u16(i)); }
  DEVICE_MEMBER float bf16(int i) const {
    return __uint_as_float(i % 2 ? w[i / 2] & 0xFFFF0000u : w[i / 2] << 16);
  }
  DEVICE_MEMBER float f8e4m3(int i) const { return from_f8e4m3(u8(i)); }
  DEVICE_MEMBER float int8(int i) const { return (float)(signed char)u8(i) * scale; }
};

/* The scale of number i of a strip of packed rows, and the number itself. */
DEVICE float packed_scale(const void *strip, int64_t i, int tokens, int dim) {
  const int group = kvl__group(KVL_CODEC_INT8), groups = (dim + group - 1) / group;
  const void *scales = (const char *)strip + (int64_t)tokens * dim;
  const int64_t at = i / dim * groups + i % dim / group;
  return __uint_as_float((uint32_t)__ldg((const uint16_t *)scales + at) << 16);
}
DEVICE float packed_one(const void *strip, int64_t i, int tokens, int dim) {
  return (float)((const signed char *)strip)[i] * packed_scale(strip, i, tokens, dim);
}

/* N numbers of a strip of f8_latent, from number i on (a multiple of N); and a single
 * number. A row has `dim` numbers, of which `values` are in 8 bits. */
template <int N> struct latent_chunk {
  float x[N];
  DEVICE_MEMBER void load(const void *strip, int64_t i, int dim, int values) {
    kvl_strips of = {};
    of.packed = values;
    const int d = (int)(i % dim);
    const char *row = (const char *)strip + i / dim * kvl__rest_in_row(&of, dim);
    if (d < values) {
      chunk<N> raw;
      raw.load(row + d);
      const float scale = __ldg((const float *)(row + kvl__scale_in_row(&of, d)));
#pragma unroll
      for (int e = 0; e < N; e++) x[e] = raw.f8e4m3(e) * scale;
    } else {
      chunk<2 * N> raw;
      raw.load(row + kvl__rest_in_row(&of, d));
#pragma unroll
      for (int e = 0; e < N; e++) x[e] = raw.bf16(e);
    }
  }
  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int e = 0; e < N; e++) x[e] = 0;
  }
  DEVICE_MEMBER float f32(int i) const { return x[i]; }
};
DEVICE float latent_one(const void *strip, int64_t i, int dim, int values) {
  latent_chunk<1> one;
  one.load(strip, i, dim, values);
  return one.x[0];
}

DEVICE void store_f32(void *p, int64_t i, float x) { ((float *)p)[i] = x; }
DEVICE void store_f16(void *p, int64_t i, float x) { ((uint16_t *)p)[i] = to_f16(x); }
DEVICE void store_bf16(void *p, int64_t i, float x) { ((uint16_t *)p)[i] = to_bf16(x); }
DEVICE void store_f8e4m3(void *p, int64_t i, float x) { ((uint8_t *)p)[i] = to_f8e4m3(x); }
DEVICE void store_i32(void *p, int64_t i, int32_t x) { ((int32_t *)p)[i] = x; }
DEVICE void store_u64(void *p, int64_t i, uint64_t x) { ((uint64_t *)p)[i] = x; }
DEVICE void store_u8(void *p, int64_t i, int32_t x) { ((uint8_t *)p)[i] = (uint8_t)x; }

/* N elements from element i on, at once where they are 16 bytes. */
template <class T, int N> DEVICE void store_all(T *p, const T *x) {
  if constexpr (sizeof(T) * N % 16 == 0) {
    const uint32_t *w = (const uint32_t *)x;
#pragma unroll
    for (int k = 0; k < (int)sizeof(T) * N / 16; k++)
      ((uint4 *)p)[k] = make_uint4(w[4 * k], w[4 * k + 1], w[4 * k + 2], w[4 * k + 3]);
  } else {
#pragma unroll
    for (int k = 0; k < N; k++) p[k] = x[k];
  }
}
#define STORE_CHUNK(name, memory, type, convert)                                       \
  template <int N> DEVICE void store_chunk_##name(void *p, int64_t i, const type *x) { \
    alignas(16) memory r[N];                                                           \
    _Pragma("unroll") for (int k = 0; k < N; k++) r[k] = (memory)(convert(x[k]));      \
    store_all<memory, N>((memory *)p + i, r);                                          \
  }
STORE_CHUNK(f32, float, float, )
STORE_CHUNK(f16, uint16_t, float, to_f16)
STORE_CHUNK(bf16, uint16_t, float, to_bf16)
STORE_CHUNK(f8e4m3, uint8_t, float, to_f8e4m3)
STORE_CHUNK(i32, int32_t, int32_t, )
STORE_CHUNK(u64, uint64_t, uint64_t, )
STORE_CHUNK(u8, uint8_t, int32_t, )

/* ---- operations ------------------------------------------------------------------------ */

DEVICE float max_f32(float a, float b) { return fmaxf(a, b); }
DEVICE float min_f32(float a, float b) { return fminf(a, b); }
DEVICE int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }
DEVICE int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
DEVICE uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
DEVICE uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
DEVICE uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }
DEVICE uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
DEVICE float mod_f32(float a, float b) { return a - floorf(a / b) * b; }
DEVICE int32_t mod_i32(int32_t a, int32_t b) {
  if (b == 0 || b == -1) return 0;
  const int32_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
DEVICE uint32_t mod_u32(uint32_t a, uint32_t b) { return b ? a % b : 0; }
DEVICE uint64_t mod_u64(uint64_t a, uint64_t b) { return b ? a % b : 0; }
DEVICE int32_t abs_i32(int32_t a) { return a < 0 ? -a : a; }
/* Near 0 a polynomial keeps the relative error small, about 1e-6. */
DEVICE float tanh_f32(float x) {
  const float y = x * x;
  const float near = x + x * y * (-1.f / 3 + y * (2.f / 15 + y * (-17.f / 315)));
  const float far = 1.f - __fdividef(2.f, __expf(2.f * fabsf(x)) + 1.f);
  return fabsf(x) < 0.25f ? near : copysignf(far, x);
}
DEVICE float sigmoid_f32(float a) { return 1 / (1 + expf(-a)); }
DEVICE int32_t popcount_u32(uint32_t x) { return __popc(x); }
DEVICE int32_t popcount_u64(uint64_t x) { return __popcll(x); }
DEVICE int32_t i32_from_f32(float x) { return __float2int_rz(x); } /* saturates, NaN is 0 */
DEVICE uint32_t u32_from_f32(float x) { return __float2uint_rz(x); }

/* ---- reductions ------------------------------------------------------------------------ */

/* log(sum(exp(x))) as the largest x so far and the sum of exp(x - largest). */
struct lse {
  float most, sum;
};
DEVICE void lse_add(lse *s, float x) {
  const float d = x == s->most ? 0 : x - s->most, e = __expf(-fabsf(d));
  s->sum = d > 0 ? s->sum * e + 1 : s->sum + e;
  s->most = d > 0 ? x : s->most;
}
DEVICE float lse_end(lse s) { return s.most + logf(s.sum); }

struct arg {
  float best;
  int32_t at;
};
DEVICE void arg_add(arg *s, float x, int32_t i) {
  if (x > s->best || (s->at < 0 && x == x)) *s = arg{x, i};
}
DEVICE void arg_join(arg *s, float best, int32_t at) {
  if (at >= 0 && (s->at < 0 || best > s->best || (best == s->best && at < s->at)))
    *s = arg{best, at};
}

/* Over the TEAM neighbouring lanes that hold a row; every lane gets the result. */
#define OVER_TEAM(name, type, join)                           \
  template <int TEAM> DEVICE type team_##name(type x) {       \
    _Pragma("unroll") for (int n = TEAM / 2; n > 0; n /= 2) { \
      const type y = __shfl_xor_sync(ALL_LANES, x, n);        \
      x = join;                                               \
    }                                                         \
    return x;                                                 \
  }
OVER_TEAM(sum, float, x + y)
OVER_TEAM(sum, int32_t, x + y)
OVER_TEAM(sum, uint32_t, x + y)
OVER_TEAM(sum, uint64_t, x + y)
OVER_TEAM(max, float, fmaxf(x, y))
OVER_TEAM(max, int32_t, max_i32(x, y))
OVER_TEAM(max, uint32_t, max_u32(x, y))
OVER_TEAM(max, uint64_t, max_u64(x, y))
OVER_TEAM(min, float, fminf(x, y))
OVER_TEAM(min, int32_t, min_i32(x, y))
OVER_TEAM(min, uint32_t, min_u32(x, y))
OVER_TEAM(min, uint64_t, min_u64(x, y))
OVER_TEAM(any, int32_t, x | y)
OVER_TEAM(all, int32_t, x &y)
template <int TEAM> DEVICE float team_lse(lse s) {
  const float most = team_max<TEAM>(s.most);
  if (s.most != most) s.sum = s.sum == 0 ? 0 : s.sum * __expf(s.most - most);
  return lse_end(lse{most, team_sum<TEAM>(s.sum)});
}
template <int TEAM> DEVICE int32_t team_arg(arg s) {
#pragma unroll
  for (int n = TEAM / 2; n > 0; n /= 2) {
    const float best = __shfl_xor_sync(ALL_LANES, s.best, n);
    const int32_t at = __shfl_xor_sync(ALL_LANES, s.at, n);
    arg_join(&s, best, at);
  }
  return s.at;
}

#endif
