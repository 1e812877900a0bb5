/* Converts single numbers from one float dtype to another, as vec.h converts every lane of a
 * vector. Floats round to nearest even; NaN stays NaN. */
#ifndef KVL_CPU_SCALAR_H
#define KVL_CPU_SCALAR_H

#include <stdint.h>
#include <string.h>

#include "kernel.h"

#if defined(KVL_ISA_AVX512) || defined(KVL_ISA_AVX2)
#include "cpu/intrinsics.h"
#endif

#define KVL_HOT __attribute__((always_inline))
/* Marks functions that are compiled once, not in each caller: they are rarely called, or do
 * much work in a call. */
#define KVL_APART __attribute__((noinline))

static inline float f32_from_bits(uint32_t i) {
  float f;
  memcpy(&f, &i, 4);
  return f;
}
static inline uint32_t f32_bits(float f) {
  uint32_t i;
  memcpy(&i, &f, 4);
  return i;
}

static inline float f32_from_bf16(uint16_t x) { return f32_from_bits((uint32_t)x << 16); }
static inline uint16_t bf16_from_f32(float f) {
  uint32_t i = f32_bits(f);
  if ((i & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((i >> 16) | 0x40);
  return (uint16_t)((i + 0x7FFF + ((i >> 16) & 1)) >> 16);
}
static inline float f32_from_f16(uint16_t h) {
#if defined(KVL_ISA_AVX512) || defined(KVL_ISA_AVX2)
  return _cvtsh_ss(h);
#else
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3FF;
  if (e == 31) return f32_from_bits(sign | 0x7F800000u | (m << 13));
  if (e == 0) return f32_from_bits(sign | f32_bits((float)m * 0x1p-24f));
  return f32_from_bits(sign | ((e + 112) << 23) | (m << 13));
#endif
}
static inline uint16_t f16_from_f32(float f) {
#if defined(KVL_ISA_AVX512) || defined(KVL_ISA_AVX2)
  return (uint16_t)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t i = f32_bits(f), sign = (i >> 16) & 0x8000, a = i & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return (uint16_t)(sign | 0x7E00 | ((a >> 13) & 0x3FF));
  if (a >= 0x477FF000u) return (uint16_t)(sign | 0x7C00); /* rounds to infinity */
  if (a < 0x38800000u)                                    /* subnormal */
    return (uint16_t)(sign | (f32_bits(f32_from_bits(a) + 0.5f) - 0x3F000000u));
  a += 0xFFF + ((a >> 13) & 1);
  return (uint16_t)(sign | ((a - 0x38000000u) >> 13));
#endif
}

/* f8e4m3 has a sign, 4 bits of exponent (bias 7) and 3 of mantissa. There is no infinity;
 * 0x7F is NaN. The largest number is 448, at which conversions to f8e4m3 saturate. Source:
 * OCP 8-bit floating point specification, 2023. */
static inline float f32_from_f8(uint8_t x) {
  /* The shift gives an exponent that is 120 too small for f32's bias. The product corrects
   * that exactly, also for subnormals. */
  float magnitude = f32_from_bits((uint32_t)(x & 0x7F) << 20) * 0x1p120f;
  uint32_t bits = (x & 0x7F) == 0x7F ? 0x7FC00000u : f32_bits(magnitude);
  return f32_from_bits(bits | (uint32_t)(x & 0x80) << 24);
}
static inline uint8_t f8_from_f32(float f) {
  uint32_t sign = (f32_bits(f) >> 24) & 0x80, a = f32_bits(f) & 0x7FFFFFFFu;
  float magnitude = f32_from_bits(a);
  magnitude = magnitude > 448.0f ? 448.0f : magnitude;
  uint32_t bits = f32_bits(magnitude);
  /* Below 2^-6 the step is 2^-9. Adding 2^14 rounds to that, because it is the last bit of
   * the sum. */
  uint32_t small = f32_bits(magnitude + 0x1p14f) - f32_bits(0x1p14f);
  uint32_t normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120u << 3);
  uint32_t r = bits < f32_bits(0x1p-6f) ? small : normal;
  return (uint8_t)(a > 0x7F800000u ? 0x7F : r | sign);
}

static inline KVL_HOT float f32_load(const void *p, int64_t i, const int dtype) {
  if (dtype == KVL_DTYPE_F32) return ((const float *)p)[i];
  if (dtype == KVL_DTYPE_F16) return f32_from_f16(((const uint16_t *)p)[i]);
  if (dtype == KVL_DTYPE_F8E4M3) return f32_from_f8(((const uint8_t *)p)[i]);
  return f32_from_bf16(((const uint16_t *)p)[i]);
}
static inline KVL_HOT void f32_store(void *p, int64_t i, float x, const int dtype) {
  if (dtype == KVL_DTYPE_F32) ((float *)p)[i] = x;
  else if (dtype == KVL_DTYPE_F16) ((uint16_t *)p)[i] = f16_from_f32(x);
  else if (dtype == KVL_DTYPE_F8E4M3) ((uint8_t *)p)[i] = f8_from_f32(x);
  else ((uint16_t *)p)[i] = bf16_from_f32(x);
}

static inline KVL_HOT int kvl__float_bytes(int dtype) {
  return dtype == KVL_DTYPE_F32 ? 4 : dtype == KVL_DTYPE_F8E4M3 ? 1 : 2;
}

#endif
