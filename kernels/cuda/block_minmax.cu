/* Elementwise min and max of K over the valid tokens of the given blocks (Quest's summary).
 *
 *   cache    f32 f16 bf16  [blocks, 2, kv_heads, block_size, head_dim]
 *   blocks   i32           [n]   physical; -1 is skipped
 *   rows     i32           [n]   of the summary; NULL: blocks
 *   tokens   i32           [n]   valid tokens; 0 gives min +inf, max -inf
 *   summary  like cache    [rows, 2, kv_heads, head_dim]
 * 16-byte aligned; head_dim a multiple of 8. Exact. A NaN is ignored beside a number.
 *
 * Bytes   n * kv_heads * (tokens + 2) * head_dim * element; limit: memory
 * Best    32768 blocks of 16, bf16, 8 heads x 128: 430 us, 0.91 of the run's read bandwidth
 *         (H100 80GB HBM3, 2026-11-20, L2 flushed, median of 30)
 * Source  Tang et al. 2024 (Quest) */
#include "block_reduce.cuh"

namespace kvl {
namespace {

template <class T> struct min_max {
  enum { N = 2 };
  T *summary;
  __device__ void start(float (&x)[N][8]) const {
#pragma unroll
    for (int e = 0; e < 8; e++) x[0][e] = INFINITY, x[1][e] = -INFINITY;
  }
  __device__ void add(float (&x)[N][8], const float (&row)[8]) const {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      x[0][e] = fminf(x[0][e], row[e]);
      x[1][e] = fmaxf(x[1][e], row[e]);
    }
  }
  __device__ float join(int m, float a, float b) const { return m ? fmaxf(a, b) : fminf(a, b); }
  __device__ void finish(const float (&x)[N][8], const kvl_cache_view &cache, int64_t row,
                         int head, int dim, int) const {
    T *to = summary + (2 * row * cache.kv_heads + head) * cache.head_dim + dim;
    store_floats(to, x[0]);
    store_floats(to + (int64_t)cache.kv_heads * cache.head_dim, x[1]);
  }
};

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(block_minmax) {
  using namespace kvl;
  const kvl_block_minmax_args &a = *(const kvl_block_minmax_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.n == 0 || a.cache.kv_heads == 0) return KVL_OK;
  if (!aligned16(a.cache.kv, a.summary)) return kvl__cuda_check(cudaErrorMisalignedAddress);
  KVL_CUDA_BY_FLOAT(a.cache.dtype, T, {
    launch_block_reduce<T>(a, min_max<T>{(T *)a.summary}, q);
  })
  return kvl__cuda_launched();
}
