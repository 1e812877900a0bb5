/* How kvl_linear turns the sums of a row into outputs: the end of linear_wgmma.cuh, and the
 * kernel that finishes a product of cuBLAS's. An output is a unit; with SwiGLU two rows of the
 * weights make one. Neighbouring units are stored together, E at once: eight, or one where
 * not all of them are aligned (stores_wide). */
#ifndef KVL_CUDA_LINEAR_OUTPUT_CUH
#define KVL_CUDA_LINEAR_OUTPUT_CUH

#include "args/linear.h"
#include "cuda/elementwise/silu.cuh"
#include "cuda/launch.cuh"

namespace kvl {

/* May units 8 i ... 8 i + 7 be stored together? */
inline bool stores_wide(const kvl_linear_args &g) {
  const int64_t units = g.form == KVL_LINEAR_SWIGLU ? g.n / 2 : g.n;
  bool wide = units % 8 == 0 && aligned16(g.bias, g.out);
  for (int i = 0; g.parts > 1 && i < g.parts; i++)
    wide = wide && g.columns[i] % 8 == 0 && aligned16(g.outs[i]);
  return wide;
}

/* Eight numbers of out, as they are stored, to which eight units are added. */
struct linear_before {
  uint4 at[2];
  __device__ __forceinline__ void load(const kvl_linear_args &g, int64_t first) {
    const bool is_f32 = g.out_dtype == KVL_DTYPE_F32;
    const uint4 *const from = (const uint4 *)((const char *)g.out + first * (is_f32 ? 4 : 2));
    at[0] = from[0];
    if (is_f32) at[1] = from[1];
  }
  template <class T>
  __device__ __forceinline__ void floats(const kvl_linear_args &g, float (&x)[8]) const {
    if (g.out_dtype == KVL_DTYPE_F32) load_floats((const float *)at, x);
    else load_floats((const T *)at, x);
  }
};

/* Stores units unit ... unit + E - 1 of `units` of row m. y: their sums; z: with SwiGLU, the
 * sums of their partners; before: what out has there, if it is added. */
template <class T, int E>
__device__ __forceinline__ void store_linear(const kvl_linear_args &g, int64_t units,
                                             int64_t m, int64_t unit, float (&y)[E],
                                             float (&z)[E], const float (&before)[E]) {
  const bool swiglu = g.form == KVL_LINEAR_SWIGLU;
  if (const T *bias = (const T *)g.bias) {
    float b[E];
    load_floats(bias + unit, b);
#pragma unroll
    for (int e = 0; e < E; e++) y[e] += b[e];
    if (swiglu) {
      load_floats(bias + unit + units, b);
#pragma unroll
      for (int e = 0; e < E; e++) z[e] += b[e];
    }
  }
  if (swiglu) {
#pragma unroll
    for (int e = 0; e < E; e++) y[e] = silu<T>(y[e]) * z[e];
  } else if (g.form == KVL_LINEAR_ADD) {
#pragma unroll
    for (int e = 0; e < E; e++) y[e] += before[e];
  }
  void *out = g.out;
  int dtype = g.out_dtype;
  if (g.parts > 1) {
    int i = 0;
    while (unit >= g.columns[i]) unit -= g.columns[i++];
    out = g.outs[i], units = g.columns[i], dtype = g.out_dtypes[i];
  }
  store_any(out, dtype, m * units + unit, y);
}

}  // namespace kvl

#endif
