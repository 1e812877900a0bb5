/* How the fused kernel of kvl_linear turns a row's sum into outputs: the end of
 * linear_wgmma.cuh. A unit is an output; with SwiGLU two rows of the weights make one. */
#ifndef KVL_CUDA_LINEAR_OUTPUT_CUH
#define KVL_CUDA_LINEAR_OUTPUT_CUH

#include "args/linear.h"
#include "cuda/elementwise/silu.cuh"

namespace kvl {

/* The number that `out` has at `at`, as it is stored, for store_linear; 0 if nothing is
 * added to it. */
__device__ __forceinline__ uint32_t linear_before(const kvl_linear_args &g, int64_t at) {
  if (g.form != KVL_LINEAR_ADD) return 0;
  return g.out_dtype == KVL_DTYPE_F32 ? ((const uint32_t *)g.out)[at]
                                      : ((const uint16_t *)g.out)[at];
}

/* Stores output `unit` of `units` of row m. y: its sum, z: the sum of its partner with
 * SwiGLU; PARTS: are there several parts? */
template <bool PARTS, class T>
__device__ __forceinline__ void store_linear(const kvl_linear_args &g, int64_t units, int m,
                                             int64_t unit, float y, float z,
                                             uint32_t before) {
  const bool swiglu = g.form == KVL_LINEAR_SWIGLU;
  if (const T *bias = (const T *)g.bias) {
    y += to_float(bias[unit]);
    if (swiglu) z += to_float(bias[unit + units]);
  }
  if (swiglu) y = silu<T>(y) * z;
  if (g.form == KVL_LINEAR_ADD) {
    const uint16_t half = (uint16_t)before;
    y += g.out_dtype == KVL_DTYPE_F32 ? __uint_as_float(before)
                                      : to_float(reinterpret_cast<const T &>(half));
  }
  if constexpr (PARTS) {
    int i = 0;
    while (unit >= g.columns[i]) unit -= g.columns[i++];
    store_any(g.outs[i], g.out_dtype, m * g.columns[i] + unit, y);
  } else {
    store_any(g.out, g.out_dtype, m * units + unit, y);
  }
}

}  // namespace kvl

#endif
