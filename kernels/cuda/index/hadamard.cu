/* out = scale * H x for each row; H is the Walsh-Hadamard matrix in Sylvester's order.
 *   x, out  f32 f16 bf16  [rows, dim]   dim a power of two up to 1024; out may be x
 * A warp takes a run of max(dim, 32) elements: each lane has one of every 32. It makes f32
 * sums and differences of elements 1, 2, 4 ... dim / 2 apart, in this order, and multiplies
 * by scale at the end, so the bits equal the CPU's.
 * Bytes   2 * rows * dim * element; limit: memory */
#include "args/index.h"
#include "cuda/index/index.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {
namespace {

enum { HADAMARD_THREADS = 256 };

template <int PER, class T>
__global__ void __launch_bounds__(HADAMARD_THREADS) hadamard(kvl_hadamard_args a) {
  const int lane = threadIdx.x % WARP, across = min(a.dim, WARP);
  const int64_t count = a.rows * a.dim, run = PER * WARP;
  const int64_t warp = blockIdx.x * (int64_t)(HADAMARD_THREADS / WARP) + threadIdx.x / WARP;
  let_next_start();
  wait_for_previous();
  for (int64_t first = warp * run; first < count;
       first += gridDim.x * (int64_t)(HADAMARD_THREADS / WARP) * run) {
    float v[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const int64_t at = first + i * WARP + lane;
      v[i] = at < count ? to_float(((const T *)a.x)[at]) : 0.f;
    }
    hadamard_lanes(v, across);
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const int64_t at = first + i * WARP + lane;
      if (at < count) ((T *)a.out)[at] = from_float<T>(v[i] * a.scale);
    }
  }
}

template <class T> int launch(const kvl_hadamard_args &a, const kvl_cuda_queue *q) {
  const int64_t runs = (a.rows * a.dim + max(a.dim, WARP) - 1) / max(a.dim, WARP);
  const unsigned blocks = grid(runs, HADAMARD_THREADS / WARP, q);
  auto kernel = a.dim == 64     ? hadamard<2, T>
                : a.dim == 128  ? hadamard<4, T>
                : a.dim == 256  ? hadamard<8, T>
                : a.dim == 512  ? hadamard<16, T>
                : a.dim == 1024 ? hadamard<32, T>
                                : hadamard<1, T>;
  return launch_programmatic(kernel, blocks, HADAMARD_THREADS, 0, q, a);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(hadamard) {
  using namespace kvl;
  const kvl_hadamard_args &a = *(const kvl_hadamard_args *)args;
  if (a.rows == 0) return KVL_OK;
  KVL_CUDA_BY_FLOAT(a.dtype, T, { return launch<T>(a, (const kvl_cuda_queue *)queue); })
}
