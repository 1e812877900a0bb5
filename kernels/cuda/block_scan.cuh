/* Prefix sums over the threads of a block: kernels use them to number things in order. */
#ifndef KVL_CUDA_BLOCK_SCAN_CUH
#define KVL_CUDA_BLOCK_SCAN_CUH

#include "cuda/common.cuh"

namespace kvl {

/* The sum over this lane and all lanes before it. */
template <class T> __device__ __forceinline__ T warp_scan(T x) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const T before = __shfl_up_sync(ALL_LANES, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

/* N prefix sums at once: x becomes the sum over the threads before this one, `total` the sum
 * over the block (whole warps, 1-D). The caller may reuse `shared` at once. */
template <int N>
__device__ __forceinline__ void block_scan(int (&x)[N], int (&total)[N],
                                           int (*shared)[WARP]) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
#pragma unroll
  for (int k = 0; k < N; k++) {
    int upto = warp_scan(x[k]);
    if (lane == WARP - 1) shared[k][warp] = upto;
    x[k] = upto - x[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; k++) {
    int of_warp = lane < warps ? shared[k][lane] : 0, upto = warp_scan(of_warp);
    x[k] += __shfl_sync(ALL_LANES, upto - of_warp, warp);
    total[k] = __shfl_sync(ALL_LANES, upto, WARP - 1);
  }
  __syncthreads(); /* before the caller writes `shared` again */
}

}  // namespace kvl

#endif
