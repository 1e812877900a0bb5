/* Mean of K over the valid tokens of the given blocks.
 *
 *   cache    f32 f16 bf16       [blocks, 2, kv_heads, block_size, head_dim]
 *   blocks   i32                [n]   physical; -1 is skipped
 *   rows     i32                [n]   of the summary; NULL: blocks
 *   tokens   i32                [n]   valid tokens; 0 gives 0
 *   summary  like cache or f32  [rows, kv_heads, head_dim]
 * 16-byte aligned; head_dim a multiple of 8.
 *
 * Bytes      n * kv_heads * (tokens + 1) * head_dim * element; limit: memory
 * Best       32768 blocks of 16, bf16, 8 heads x 128: 397 us, 0.93 of the run's read
 *            bandwidth (H100 80GB HBM3, 2026-11-20, L2 flushed, median of 30)
 * Tolerance  1e-6 of the largest |k|: fp32 sums of up to 4096 terms in another order than
 *            the CPU's; then the summary's rounding. */
#include "block_reduce.cuh"

namespace kvl {
namespace {

template <class T> struct mean {
  enum { N = 1 };
  T *summary;
  __device__ void start(float (&x)[N][8]) const {
#pragma unroll
    for (int e = 0; e < 8; e++) x[0][e] = 0.f;
  }
  __device__ void add(float (&x)[N][8], const float (&row)[8]) const {
#pragma unroll
    for (int e = 0; e < 8; e++) x[0][e] += row[e];
  }
  __device__ float join(int, float a, float b) const { return a + b; }
  __device__ void finish(float (&x)[N][8], const kvl_cache_view &cache, int64_t row, int head,
                         int dim, int tokens) const {
#pragma unroll
    for (int e = 0; e < 8; e++) x[0][e] = tokens ? x[0][e] / (float)tokens : 0.f;
    store_floats(summary + (row * cache.kv_heads + head) * cache.head_dim + dim, x[0]);
  }
};

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(block_mean) {
  using namespace kvl;
  const kvl_block_mean_args &a = *(const kvl_block_mean_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.n == 0 || a.cache.kv_heads == 0) return KVL_OK;
  if (!aligned16(a.cache.kv, a.summary)) return kvl__cuda_check(cudaErrorMisalignedAddress);
  KVL_CUDA_BY_FLOAT(a.cache.dtype, T, {
    if (a.summary_dtype == a.cache.dtype)
      launch_block_reduce<T>(a, mean<T>{(T *)a.summary}, q);
    else
      launch_block_reduce<T>(a,
                             mean<float>{(float *)a.summary}, q);
  })
  return kvl__cuda_launched();
}
