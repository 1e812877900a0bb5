/* silu(x) = x / (1 + exp(-x)), computed in fp32 for a result of type T. */
#ifndef KVL_CUDA_SILU_CUH
#define KVL_CUDA_SILU_CUH

#include "cuda/common.cuh"

namespace kvl {

/* For 16-bit results a division with an error of 2 ulp is enough. __fdividef needs a
 * denominator of moderate size: here it is 1 ... 2. */
template <class T> __device__ __forceinline__ float silu(float x) {
  if constexpr (sizeof(T) == 4) return x / (1.0f + expf(-x));
  const float small = expf(-fabsf(x));
  return x * __fdividef(x < 0.f ? small : 1.f, 1.f + small);
}

}  // namespace kvl

#endif
