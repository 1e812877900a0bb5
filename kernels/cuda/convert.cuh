/* Converts between number types: kvl::convert<To>(x), for all storage dtypes and double.
 * To a float it rounds to nearest even, through f32 for the 16-bit types; f8e4m3 saturates at
 * +-448. Float to integer truncates and saturates; NaN gives 0. Integer to integer
 * saturates. */
#ifndef KVL_CUDA_CONVERT_CUH
#define KVL_CUDA_CONVERT_CUH

#include <cuda_fp8.h>

#include "cuda/common.cuh"

namespace kvl {

struct f8e4m3 {
  __nv_fp8_storage_t bits;
};

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

/* f8_to_f16: two f8e4m3 as two f16; halves_of: four as four. Exact. From sm_89 on there is an
 * instruction for it. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
/* Two of them, each in the upper byte of its 16 bits. The seven low bits of a number are
 * those of an f16 that is 256 times smaller; NaN is 0x7F. */
__device__ __forceinline__ uint32_t f8_halves(uint32_t x) {
  const uint32_t magnitude = x & 0x7F007F00u, nan = magnitude + 0x01000100u & 0x80008000u;
  uint32_t y = (x & 0x80008000u) | magnitude >> 1;
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(y) : "r"(0x5C005C00u)); /* 256 */
  return y | (nan >> 15) * 0x7FFFu;
}
__device__ __forceinline__ uint32_t f8_to_f16(uint16_t x) {
  return f8_halves(__byte_perm(x, 0, 0x1404));
}
__device__ __forceinline__ uint2 halves_of(uint32_t x) {
  return make_uint2(f8_to_f16((uint16_t)x), f8_halves(__byte_perm(x, 0, 0x3424)));
}
#else
__device__ __forceinline__ uint32_t f8_to_f16(uint16_t x) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(x, __NV_E4M3);
  return pair.x | (uint32_t)pair.y << 16;
}
__device__ __forceinline__ uint2 halves_of(uint32_t x) {
  return make_uint2(f8_to_f16((uint16_t)x), f8_to_f16(x >> 16));
}
#endif
__device__ __forceinline__ float to_float(f8e4m3 x) {
  return __half2float(__ushort_as_half((uint16_t)f8_to_f16(x.bits)));
}

template <class To> constexpr bool is_signed = To(-1) < To(0);
template <class To> constexpr int value_bits = sizeof(To) * 8 - is_signed<To>;
template <class To> constexpr To most = To(~uint64_t(0) >> (64 - value_bits<To>));
template <class To> constexpr To least = is_signed<To> ? -most<To> - 1 : 0;

/* From float or double. 2^bits is exact in both, unlike the largest integer. */
template <class To, class From> __host__ __device__ __forceinline__ To integer_from(From x) {
  constexpr From limit = From(uint64_t(1) << (value_bits<To> - 1)) * 2;
  if (x != x) return 0;
  if (x >= limit) return most<To>;
  return x <= (is_signed<To> ? -limit : From(0)) ? least<To> : To(x);
}

template <class To> __device__ __forceinline__ To clamped(int64_t x) {
  if constexpr (sizeof(To) == 8) return x;
  else return x > most<To> ? most<To> : x < least<To> ? least<To> : To(x);
}

template <class To, class From> __device__ __forceinline__ To convert(From x) {
  constexpr bool to_int = same<To, int32_t> || same<To, int64_t> || same<To, uint8_t> ||
                          same<To, uint64_t>;
  if constexpr (same<To, From>) return x;
  else if constexpr (same<From, __half> || same<From, __nv_bfloat16> || same<From, f8e4m3>)
    return convert<To>(to_float(x));
  else if constexpr (to_int && (same<From, float> || same<From, double>))
    return integer_from<To>(x);
  else if constexpr (to_int) return clamped<To>(x);
  else if constexpr (same<To, f8e4m3>)
    return f8e4m3{__nv_cvt_float_to_fp8(float(x), __NV_SATFINITE, __NV_E4M3)};
  else return from_float<To>(float(x));
}

}  // namespace kvl

/* The dtypes of KVL_CUDA_BY_FLOAT, and the integers that cast converts. */
#define KVL_CUDA_BY_NUMBER(dtype, T, ...)             \
  switch (dtype) {                                    \
    case KVL_DTYPE_I32: {                             \
      using T = int32_t;                              \
      __VA_ARGS__                                     \
    } break;                                          \
    case KVL_DTYPE_I64: {                             \
      using T = int64_t;                              \
      __VA_ARGS__                                     \
    } break;                                          \
    case KVL_DTYPE_U8: {                              \
      using T = uint8_t;                              \
      __VA_ARGS__                                     \
    } break;                                          \
    default: KVL_CUDA_BY_FLOAT(dtype, T, __VA_ARGS__) \
  }
/* Every dtype. */
#define KVL_CUDA_BY_ANY(dtype, T, ...)                 \
  switch (dtype) {                                     \
    case KVL_DTYPE_F8E4M3: {                           \
      using T = kvl::f8e4m3;                           \
      __VA_ARGS__                                      \
    } break;                                           \
    case KVL_DTYPE_U64: {                              \
      using T = uint64_t;                              \
      __VA_ARGS__                                      \
    } break;                                           \
    default: KVL_CUDA_BY_NUMBER(dtype, T, __VA_ARGS__) \
  }

#endif
