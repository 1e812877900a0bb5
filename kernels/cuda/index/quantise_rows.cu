/* Converts rows to f8e4m3, each with its own scale.
 *   x       f32 f16 bf16  [rows, dim]
 *   out     f8e4m3        [rows, dim]   x / scale, saturating
 *   scales  f32           [rows]        max(amax, 1e-4) / 448; is_ue8m0: rounded up to 2^e
 *   weights f32           [rows]        optional: scales *= weights * factor
 * With `rotates`, x is rotated first, as by hadamard, and rounded to its dtype. One warp handles one row. Exact: a division and a rounding.
 * Bytes   rows * dim * (element of x + 1); limit: memory
 * Source  DeepSeek's act_quant */
#include "args/index.h"
#include "cuda/index/index.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {
namespace {

template <int N, class T>
__global__ void __launch_bounds__(QUANTISE_THREADS) quantise_rows(kvl_quantise_rows_args a) {
  constexpr int WARPS = QUANTISE_THREADS / WARP;
  let_next_start();
  wait_for_previous();
  for (int64_t row = blockIdx.x * (int64_t)WARPS + threadIdx.x / WARP; row < a.rows;
       row += (int64_t)gridDim.x * WARPS) {
    const float scale = index_row<N>((const T *)a.x + row * a.dim,
                                     (uint8_t *)a.out + row * a.dim, a.dim, a.rotates,
                                     a.is_ue8m0);
    if (threadIdx.x % WARP == 0)
      a.scales[row] = a.weights ? __fmul_rn(scale, __fmul_rn(a.weights[row], a.factor))
                                : scale;
  }
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(quantise_rows) {
  using namespace kvl;
  const kvl_quantise_rows_args &a = *(const kvl_quantise_rows_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.rows == 0) return KVL_OK;
  const bool wide = a.dim % 16 == 0 && aligned16(a.x, a.out);
  const unsigned blocks = grid(a.rows, QUANTISE_THREADS / WARP, q);
  KVL_CUDA_BY_FLOAT(a.dtype, T, {
    return launch_programmatic(wide ? quantise_rows<4, T> : quantise_rows<1, T>, blocks,
                               QUANTISE_THREADS, 0, q, a);
  })
}
