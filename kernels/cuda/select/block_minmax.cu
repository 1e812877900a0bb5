/* Elementwise min and max of K over the valid tokens of the given blocks (Quest's summary).
 *
 *   cache    f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   blocks   i32                  [n]   physical; -1 is skipped
 *   rows     i32                  [n]   where the result goes in summary; NULL: blocks
 *   tokens   i32                  [n]   valid tokens; 0 gives min +inf and max -inf (f8e4m3
 *                                 has no infinity: 448 and -448)
 *   summary  like cache           [rows, 2, kv_heads, head_dim]
 * 16-byte aligned; head_dim a multiple of 8. Exact. NaN loses against any number.
 *
 * Bytes   n * kv_heads * (tokens + 2) * head_dim * element; limit: memory
 * Best    2048 blocks of 16, 8 heads x 128: bf16 29.5 us, 0.83 of the run's read bandwidth (a
 *         plain read of as many bytes 28 us), f8e4m3 18.7 us, 0.65; 16 blocks 5.8 us, an
 *         empty launch 3.0 (H100 80GB HBM3, 2026-11-21)
 * Source  Tang et al. 2024 (Quest) */
#include "args/select.h"
#include "cuda/select/block_reduce.cuh"

namespace kvl {
namespace {

/* The 32-bit word in which numbers of T are compared exactly, in pairs where they fit. */
template <class T> struct pair_type { using type = __half2; }; /* f16, f8e4m3 */
template <> struct pair_type<__nv_bfloat16> { using type = __nv_bfloat162; };
template <> struct pair_type<float> { using type = float; }; /* one number */

__device__ __forceinline__ float lower(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ float upper(float a, float b) { return fmaxf(a, b); }
template <class P> __device__ __forceinline__ P lower(P a, P b) { return __hmin2(a, b); }
template <class P> __device__ __forceinline__ P upper(P a, P b) { return __hmax2(a, b); }

/* Of rows of C, stored in a summary of S. */
template <class C, class S = C> struct min_max {
  using T = typename read_type<C>::type;
  using word = typename pair_type<T>::type;
  enum {
    N = 2,
    DIMS = REDUCE_DIMS<C>,
    EACH = same<word, float> ? 1 : 2,
    WORDS = DIMS / EACH
  };
  S *summary;
  static __device__ word all(float x) {
    if constexpr (same<word, float>) return x;
    else if constexpr (same<word, __half2>) return __float2half2_rn(x);
    else return __float2bfloat162_rn(x);
  }
  __device__ void start(word (&x)[N][WORDS]) const {
#pragma unroll
    for (int e = 0; e < WORDS; e++) x[0][e] = all(INFINITY), x[1][e] = all(-INFINITY);
  }
  __device__ void add(word (&x)[N][WORDS], const pack<T, DIMS> &row) const {
#pragma unroll
    for (int e = 0; e < WORDS; e++) {
      word y;
      if constexpr (same<T, float>) y = row.at[e];
      else if constexpr (same<T, f8e4m3>) y = halves(row, e);
      else y = word(row.at[2 * e], row.at[2 * e + 1]);
      x[0][e] = lower(x[0][e], y);
      x[1][e] = upper(x[1][e], y);
    }
  }
  __device__ word join(int m, word a, word b) const { return m ? upper(a, b) : lower(a, b); }
  __device__ void finish(const word (&x)[N][WORDS], const kvl_pages &cache, int64_t row,
                         int head, int dim, int) const {
    S *to = summary + (2 * row * cache.kv_heads + head) * cache.key.dim + dim;
#pragma unroll
    for (int m = 0; m < N; m++, to += (int64_t)cache.kv_heads * cache.key.dim) {
      float y[DIMS];
#pragma unroll
      for (int e = 0; e < WORDS; e++) {
        if constexpr (EACH == 1) y[e] = x[m][e];
        else y[2 * e] = to_float(x[m][e].x), y[2 * e + 1] = to_float(x[m][e].y);
      }
      store_summary(to, y);
    }
  }
};

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(block_minmax) {
  using namespace kvl;
  const kvl_block_minmax_args &a = *(const kvl_block_minmax_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  return with_any_codec<void>(a.cache.codec, [&](auto of) -> int {
    using C = typename decltype(of)::C;
    int status = KVL_OK;
    if constexpr (same<C, void>) {
      KVL_CUDA_BY_FLOAT(a.cache.codec, T, {
        status = launch_block_reduce<T>(a, min_max<T>{(T *)a.summary}, q);
      })
    } else if constexpr (packs<C>) {
      KVL_CUDA_BY_FLOAT(a.summary_dtype, S, {
        status = launch_block_reduce<C>(a, min_max<C, S>{(S *)a.summary}, q);
      })
    } else {
      status = launch_block_reduce<C>(a, min_max<C>{(C *)a.summary}, q);
    }
    return status;
  });
}
