/* Mean of K over the valid tokens of the given blocks.
 *
 *   cache    f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   blocks   i32                  [n]   physical; -1 is skipped
 *   rows     i32                  [n]   where the mean goes in summary; NULL: blocks
 *   tokens   i32                  [n]   valid tokens; 0 gives 0
 *   summary  like cache or f32 (of f8e4m3: f32 f16 bf16)  [rows, kv_heads, head_dim]
 * 16-byte aligned; head_dim a multiple of 8.
 *
 * Bytes      n * kv_heads * (tokens + 1) * head_dim * element; limit: memory
 * Best       2048 blocks of 16, 8 heads x 128: bf16 29.3 us, 0.79 of the run's read bandwidth
 *            (a plain read of as many bytes 27 us), f8e4m3 into bf16 20.6 us, 0.59
 *            (H100 80GB HBM3, 2026-11-21)
 * Tolerance  1e-6 of the largest |k| for fp32 sums of up to 4096 terms in another order than
 *            the CPU's; then the summary's rounding. */
#include "args/select.h"
#include "cuda/select/block_reduce.cuh"

namespace kvl {
namespace {

/* The mean of rows of C, stored in a summary of S. */
template <class C, class S> struct mean {
  using word = float;
  using T = typename read_type<C>::type;
  enum { N = 1, DIMS = REDUCE_DIMS<C>, WORDS = DIMS };
  S *summary;
  __device__ void start(float (&x)[N][WORDS]) const {
#pragma unroll
    for (int e = 0; e < WORDS; e++) x[0][e] = 0.f;
  }
  __device__ void add(float (&x)[N][WORDS], const pack<T, DIMS> &row) const {
#pragma unroll
    for (int e = 0; e < WORDS; e += 2) {
      float2 y;
      if constexpr (same<T, f8e4m3>) y = __half22float2(halves(row, e / 2));
      else y = make_float2(to_float(row.at[e]), to_float(row.at[e + 1]));
      x[0][e] += y.x;
      x[0][e + 1] += y.y;
    }
  }
  __device__ float join(int, float a, float b) const { return a + b; }
  __device__ void finish(float (&x)[N][WORDS], const kvl_pages &cache, int64_t row, int head,
                         int dim, int tokens) const {
#pragma unroll
    for (int e = 0; e < WORDS; e++) x[0][e] = tokens ? x[0][e] / (float)tokens : 0.f;
    store_summary(summary + (row * cache.kv_heads + head) * cache.key.dim + dim, x[0]);
  }
};

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(block_mean) {
  using namespace kvl;
  const kvl_block_mean_args &a = *(const kvl_block_mean_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  return with_any_codec<void>(a.cache.codec, [&](auto of) -> int {
    using C = typename decltype(of)::C;
    int status = KVL_OK;
    if constexpr (same<C, void>) {
      KVL_CUDA_BY_FLOAT(a.cache.codec, T, {
        if (a.summary_dtype == a.cache.codec)
          status = launch_block_reduce<T>(a, mean<T, T>{(T *)a.summary}, q);
        else status = launch_block_reduce<T>(a, mean<T, float>{(float *)a.summary}, q);
      })
    } else {
      KVL_CUDA_BY_FLOAT(a.summary_dtype, S, {
        status = launch_block_reduce<C>(a, mean<C, S>{(S *)a.summary}, q);
      })
    }
    return status;
  });
}
