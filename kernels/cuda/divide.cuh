/* Division of integers, for which the GPU has no instruction. */
#ifndef KVL_CUDA_DIVIDE_CUH
#define KVL_CUDA_DIVIDE_CUH

#include "cuda/common.cuh"

namespace kvl {

/* Divides numbers below 2^31 by a number that the host knows, in 3 instructions, not 16.
 * Source: Granlund and Montgomery 1994. */
struct divisor {
  uint32_t by = 1, factor = 1;
  int shift = 0;
  divisor() = default;
  explicit divisor(uint32_t n) : by(n) { /* 1 ... 2^31 */
    while ((uint64_t)1 << shift < n) shift++;
    factor = (uint32_t)(((((uint64_t)1 << shift) - n) << 32) / n + 1);
  }
  __device__ uint32_t quotient(uint32_t x) const {
    return (__umulhi(x, factor) + x) >> shift;
  }
};

/* A number n >= 1 that divides x >= 0 in 2 instructions, where x * n is below 2^30. */
struct short_divisor {
  int by;
  uint32_t factor; /* 2^31 / n, rounded up */
  short_divisor() = default;
  explicit short_divisor(int n) : by(n), factor(((1u << 31) + n - 1) / n) {}
  __host__ __device__ operator int() const { return by; }
};
__device__ __forceinline__ int operator/(int x, short_divisor n) {
  return __umulhi(2 * x + 1, n.factor);
}

/* Integers >= 0 by any divisor. Most fit 32 bits, whose division is several times as fast. */
__device__ __forceinline__ int64_t quotient_of(int64_t a, int b) {
  return a >> 32 ? a / b : (uint32_t)a / (uint32_t)b;
}
__device__ __forceinline__ void divide(int64_t a, int64_t b, int64_t *quotient,
                                       int64_t *rest) {
  if ((uint64_t)(a | b) >> 32) {
    *quotient = a / b;
    *rest = a % b;
  } else {
    *quotient = (uint32_t)a / (uint32_t)b;
    *rest = (uint32_t)a % (uint32_t)b;
  }
}

}  // namespace kvl

#endif
