/* Writes keys to index-K memory in f8e4m3, each with its own scale: cache[place] = k.
 *   k       f32 f16 bf16  [n, dim]   dim 32, 64 or 128
 *   places  i64           [n]   block * block_size + offset; < 0 is skipped, no two the same
 *   cache   u8            [blocks, block_size * (dim + 4)]   of a block: keys, then scales
 * One warp handles one token. Exact, as quantise_rows.
 * Bytes   n * dim * (element of k + 1); limit: memory
 * Source  SGLang's index-K pool */
#include "args/index.h"
#include "cuda/index/index.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {
namespace {

template <class T>
__global__ void __launch_bounds__(QUANTISE_THREADS) index_append(kvl_index_append_args a) {
  constexpr int WARPS = QUANTISE_THREADS / WARP;
  let_next_start();
  wait_for_previous();
  for (int64_t i = blockIdx.x * (int64_t)WARPS + threadIdx.x / WARP; i < a.n;
       i += (int64_t)gridDim.x * WARPS) {
    const index_place to = index_of_place(a.cache, a.places[i]);
    if (!to.key) continue;
    const int dim = a.cache.dim;
    const float scale = index_row<4>((const T *)a.k + i * dim, to.key, dim, a.rotates,
                                     a.is_ue8m0);
    if (threadIdx.x % WARP == 0) *to.scale = scale;
  }
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(index_append) {
  using namespace kvl;
  const kvl_index_append_args &a = *(const kvl_index_append_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.n == 0) return KVL_OK;
  const unsigned blocks = grid(a.n, QUANTISE_THREADS / WARP, q);
  KVL_CUDA_BY_FLOAT(a.dtype, T, {
    return launch_programmatic(index_append<T>, blocks, QUANTISE_THREADS, 0, q, a);
  })
}
