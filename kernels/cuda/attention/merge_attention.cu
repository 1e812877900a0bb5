/* Merges two attentions over disjoint keys by their lse.
 *
 *   out_a, out_b, out  f32 f16 bf16  [rows, head_dim]   out may alias out_a or out_b
 *   lse_a, lse_b, lse  f32           [rows]             lse may alias either; optional
 *
 *   lse = log(exp(lse_a) + exp(lse_b)), out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)
 * A side with lse -inf does not enter the result, whatever bits it holds: the other side is
 * copied as it is. With both -inf, out is 0 and lse -inf.
 *
 * Bytes      3 * rows * head_dim * element + 12 * rows
 * Limit      memory. The lanes of a row lie in one warp: all of them read the row's two lse
 *            before one of them writes it, so lse may be written in place.
 * Best       4096 x 32 rows of 128: bf16 34.7 us, 0.96 of the run's read bandwidth; f32
 *            70.4 us, 0.94 (H100 80GB HBM3, 2026-11-21)
 * Tolerance  1e-6 relative in f32; in f16 and bf16 half an ulp of out more.
 * Source     Rabe and Staats 2021; FlashInfer's state merge (Ye et al. 2025). */
#include "args/attention.h"
#include "cuda/programmatic.cuh"

namespace kvl {
namespace {

constexpr int MERGE_THREADS = 256;

/* `lanes` (a power of two up to 32) share a row; a lane takes N neighbours at a time. */
template <class T, int N>
__global__ void __launch_bounds__(MERGE_THREADS)
    merge(const __grid_constant__ kvl_merge_attention_args a, int lanes) {
  const int per_block = MERGE_THREADS / lanes, lane = threadIdx.x % lanes;
  const int64_t stride = (int64_t)gridDim.x * per_block;
  int64_t row = (int64_t)blockIdx.x * per_block + threadIdx.x / lanes;
  let_next_start();
  wait_for_previous();
  /* All lanes of a warp stay together: rows past the end only take part in the shuffles. */
  for (int64_t step = 0; blockIdx.x * (int64_t)per_block + step < a.rows; step += stride) {
    const int64_t r = row + step;
    const bool valid = r < a.rows;
    float lse_a = valid ? a.lse_a[r] : 0.f, lse_b = valid ? a.lse_b[r] : 0.f;
    __syncwarp();
    const bool has_a = lse_a != -INFINITY, has_b = lse_b != -INFINITY;
    const float m = fmaxf(lse_a, lse_b);
    float wa = has_a ? expf(lse_a - m) : 0.f, wb = has_b ? expf(lse_b - m) : 0.f;
    float sum = wa + wb, lse = has_a || has_b ? m + logf(sum) : -INFINITY;
    if (!has_a) lse = lse_b;
    else if (!has_b) lse = lse_a;
    wa /= sum;
    wb /= sum;
    if (valid && lane == 0 && a.lse) a.lse[r] = lse;
    const T *from_a = (const T *)a.out_a + r * a.head_dim;
    const T *from_b = (const T *)a.out_b + r * a.head_dim;
    T *to = (T *)a.out + r * a.head_dim;
    for (int64_t d = lane * N; valid && d < a.head_dim; d += lanes * N) {
      float x[N] = {}, y[N] = {};
      if (has_a && has_b) {
        load_floats(from_a + d, x);
        load_floats(from_b + d, y);
#pragma unroll
        for (int e = 0; e < N; e++) x[e] = x[e] * wa + y[e] * wb;
      } else if (has_a || has_b) {
        load_floats((has_a ? from_a : from_b) + d, x);
      }
      store_floats(to + d, x);
    }
  }
}

template <class T, int N>
int launch(const kvl_merge_attention_args &a, const kvl_cuda_queue *q) {
  int lanes = 1;
  while (lanes < WARP && lanes * N < a.head_dim) lanes *= 2;
  return launch_programmatic(merge<T, N>, grid(a.rows, MERGE_THREADS / lanes, q),
                             MERGE_THREADS, 0, q, a, lanes);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(merge_attention) {
  using namespace kvl;
  const kvl_merge_attention_args &a = *(const kvl_merge_attention_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.rows == 0) return KVL_OK;
  int status = KVL_OK;
  KVL_CUDA_BY_FLOAT(a.dtype, T, {
    if (a.head_dim % 8 == 0 && aligned16(a.out_a, a.out_b, a.out))
      status = launch<T, 8>(a, q);
    else status = launch<T, 1>(a, q);
  })
  return status;
}
