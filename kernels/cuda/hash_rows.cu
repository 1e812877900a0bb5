/* Hashes of vectors by random planes.
 *   x       f32 f16 bf16  [rows, head_dim]
 *   planes  f32           [bits, head_dim]
 *   hashes  u64           [rows, words]
 * A warp a row. Exact: the sums are fixed, see kernels.h.
 * Source  Charikar 2002 */
#include "hash.cuh"

namespace kvl {
namespace {

constexpr int THREADS = 256;

template <class T>
__global__ void __launch_bounds__(THREADS)
hash_rows_kernel(const __grid_constant__ kvl_hash_rows_args a) {
  const int words = (a.bits + 63) / 64;
  const int64_t warps = (int64_t)gridDim.x * (THREADS / WARP);
  for (int64_t row = (blockIdx.x * (int64_t)THREADS + threadIdx.x) / WARP; row < a.rows;
       row += warps) {
    float x[HASH_CHUNKS];
    hash_load((const T *)a.x + row * a.head_dim, a.head_dim, x);
    hash_store(x, a.planes, a.head_dim, a.bits, a.hashes + row * words);
  }
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(hash_rows) {
  using namespace kvl;
  const kvl_hash_rows_args &a = *(const kvl_hash_rows_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.rows == 0) return KVL_OK;
  const unsigned blocks = grid(a.rows, THREADS / WARP, q);
  KVL_CUDA_BY_FLOAT(a.dtype, T, {
    hash_rows_kernel<T><<<blocks, THREADS, 0, q->stream>>>(a);
  })
  return kvl__cuda_launched();
}
