/* k, scales = cache[places]; a place that does not exist gives zeros.
 *   cache   u8      [blocks, block_size * (dim + 4)]   a block has its keys, then its scales
 *   places  i64     [n]
 *   k       f8e4m3  [n, dim]   dim 32, 64 or 128
 *   scales  f32     [n]
 * Copies words of 4 bytes, neighbouring words by neighbouring threads: with an odd block_size
 * the keys have no wider alignment.
 * Bytes   2 * n * (dim + 4); limit: memory */
#include "args/index.h"
#include "cuda/index/index.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {
namespace {

enum { GATHER_THREADS = 256 };

__global__ void __launch_bounds__(GATHER_THREADS) index_gather(kvl_index_gather_args a) {
  const int words = a.cache.dim / 4, each = GATHER_THREADS / words;
  const int word = threadIdx.x % words;
  let_next_start();
  wait_for_previous();
  for (int64_t i = blockIdx.x * (int64_t)each + threadIdx.x / words; i < a.n;
       i += (int64_t)gridDim.x * each) {
    const index_place from = index_of_place(a.cache, a.places[i]);
    ((uint32_t *)a.k)[i * words + word] = from.key ? ((const uint32_t *)from.key)[word] : 0;
    if (word == 0) a.scales[i] = from.key ? *from.scale : 0.f;
  }
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(index_gather) {
  using namespace kvl;
  const kvl_index_gather_args &a = *(const kvl_index_gather_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.n == 0) return KVL_OK;
  const unsigned blocks = grid(a.n, GATHER_THREADS * 4 / a.cache.dim, q);
  return launch_programmatic(index_gather, blocks, GATHER_THREADS, 0, q, a);
}
