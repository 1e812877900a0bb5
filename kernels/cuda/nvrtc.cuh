/* The parts of the toolkit's headers that kvlab's CUDA headers use, for NVRTC, which
 * compiles attention with a policy's hook and needs no toolkit.
 * lua/kvlab/kernel/run/nvrtc.lua gives this text for each of cuda.h, cuda_bf16.h,
 * cuda_fp16.h, cuda_fp8.h, cuda_runtime.h, stddef.h, stdint.h and type_traits. */
#ifndef KVL_CUDA_NVRTC_CUH
#define KVL_CUDA_NVRTC_CUH

typedef int int32_t;
typedef unsigned uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned short uint16_t;
typedef unsigned char uint8_t;
typedef signed char int8_t;

#define INFINITY __int_as_float(0x7F800000)
#define NAN __int_as_float(0x7FFFFFFF)
#define INT_MAX 2147483647

/* How the driver describes a tensor to the copy engine. */
struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

namespace std {
template <bool B, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class A, class B> constexpr bool is_same_v = false;
template <class A> constexpr bool is_same_v<A, A> = true;
struct true_type {
  static constexpr bool value = true;
};
struct false_type {
  static constexpr bool value = false;
};
}  // namespace std

/* ---- 16-bit floats --------------------------------------------------------------------- */

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half2 {
  uint32_t bits;
};
struct __nv_bfloat162 {
  uint32_t bits;
};
struct __half2_raw {
  uint16_t x, y;
};

#define KVL_RTC_INLINE static __device__ __forceinline__

KVL_RTC_INLINE float __half2float(__half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
KVL_RTC_INLINE __half __float2half_rn(float x) {
  __half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
KVL_RTC_INLINE __half __ushort_as_half(uint16_t x) {
  __half y;
  y.bits = x;
  return y;
}
KVL_RTC_INLINE float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float((uint32_t)x.bits << 16);
}
KVL_RTC_INLINE __nv_bfloat16 __float2bfloat16_rn(float x) {
  __nv_bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
/* The first number is the low half. */
KVL_RTC_INLINE __half2 __floats2half2_rn(float low, float high) {
  __half2 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y.bits) : "f"(high), "f"(low));
  return y;
}
KVL_RTC_INLINE __half2 __hmax2(__half2 a, __half2 b) {
  __half2 y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y.bits) : "r"(a.bits), "r"(b.bits));
  return y;
}
KVL_RTC_INLINE __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  __nv_bfloat162 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y.bits) : "f"(high), "f"(low));
  return y;
}
KVL_RTC_INLINE float2 __half22float2(__half2 x) {
  return make_float2(__half2float(__ushort_as_half((uint16_t)x.bits)),
                     __half2float(__ushort_as_half((uint16_t)(x.bits >> 16))));
}
KVL_RTC_INLINE float2 __bfloat1622float2(__nv_bfloat162 x) {
  return make_float2(__uint_as_float(x.bits << 16), __uint_as_float(x.bits & 0xFFFF0000u));
}

/* ---- f8e4m3 ---------------------------------------------------------------------------- */

typedef uint8_t __nv_fp8_storage_t;
typedef uint16_t __nv_fp8x2_storage_t;
enum { __NV_E4M3, __NV_SATFINITE };

#if __CUDA_ARCH__ >= 890
KVL_RTC_INLINE __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, int) {
  uint32_t y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(x));
  return {(uint16_t)y, (uint16_t)(y >> 16)};
}
KVL_RTC_INLINE __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, int, int) {
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(0.f), "f"(x));
  return (uint8_t)y;
}
#else
/* Nothing that is compiled with a hook writes f8e4m3. */
__device__ __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, int, int);
#endif

#endif
