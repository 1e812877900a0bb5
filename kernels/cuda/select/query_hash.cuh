/* Hashes the mean queries of KV heads, in the thread block that will choose blocks by them.
 * The work has three steps, so that all memory is requested before anything is waited for:
 * the constructor loads the planes, then come sum_groups and finish. args/select.h fixes the
 * order of the sums. Eight lanes compute one sum: each takes two numbers of a plane per
 * chunk, and four shuffles add the parts. */
#ifndef KVL_CUDA_QUERY_HASH_CUH
#define KVL_CUDA_QUERY_HASH_CUH

#include "args/select.h"
#include "cuda/common.cuh"

namespace kvl {

template <int THREADS> struct query_hash {
  static constexpr int QUERIES = 8; /* heads that are hashed together */
  static constexpr int LANES = 8, BITS = THREADS / LANES;
  /* Chunks of 16 dims in registers; dims beyond them are read when they are needed. */
  static constexpr int CHUNKS = 8;
  typedef float rows[QUERIES][256]; /* the sums of groups */
  const kvl_select_hamming_args &a;
  const int64_t head;                /* the first KV head, counted over all sequences */
  const int heads, dim, lane, first; /* lane: 0 ... LANES - 1; first: this thread's bit */
  float2 plane[CHUNKS];

  __device__ __forceinline__ query_hash(const kvl_select_hamming_args &args, int64_t head_,
                                        int heads_)
      : a(args), head(head_), heads(heads_), dim(args.head_dim), lane(threadIdx.x % LANES),
        first(threadIdx.x / LANES) {
    load_plane(first);
  }
  /* The first of this lane's two dims in a chunk: it has parts 2 lane and 2 lane + 1. */
  __device__ __forceinline__ int dim_of(int chunk) const {
    return chunk * KVL_HASH_PARTS + 2 * lane;
  }
  __device__ __forceinline__ void load_plane(int bit) {
    const float *row = a.planes + bit * dim + 2 * lane;
    const int end = bit < a.bits ? dim : 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      if (dim_of(c) < end) plane[c] = *(const float2 *)(row + c * KVL_HASH_PARTS);
  }

  /* Sums up the query heads of each of QUERIES groups from `from` on, in the heads' order. */
  __device__ __forceinline__ void sum_groups(int from, rows &x) const {
    const int group = (int)((uint32_t)a.heads / (uint32_t)a.hashes.kv_heads);
    const int width = dim > 128 ? 256 : 128; /* threads per group */
    const int d = threadIdx.x % width;
#pragma unroll 1
    for (int g = threadIdx.x / width; g < min(heads - from, QUERIES); g += THREADS / width) {
      const int64_t at = (head + from + g) * group * dim + d;
      if (d >= dim) continue;
      float sum = 0.f;
#pragma unroll 1
      for (int h = 0; h < group; h += 4) { /* four loads at once */
        uint32_t y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) y[i] = bits_of(at + (int64_t)min(h + i, group - 1) * dim);
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (h + i == 0) sum = number_of(y[i]);
          else if (h + i < group) sum = __fadd_rn(sum, number_of(y[i]));
      }
      x[g][d] = sum;
    }
  }
  __device__ __forceinline__ uint32_t bits_of(int64_t at) const {
    return a.dtype == KVL_DTYPE_F32 ? ((const uint32_t *)a.q)[at]
                                    : ((const uint16_t *)a.q)[at];
  }
  __device__ __forceinline__ float number_of(uint32_t bits) const {
    if (a.dtype == KVL_DTYPE_F16) return __half2float(__ushort_as_half((uint16_t)bits));
    return __uint_as_float(a.dtype == KVL_DTYPE_BF16 ? bits << 16 : bits);
  }

  /* x . plane; all LANES lanes get it. */
  __device__ __forceinline__ float sum(const float *x, int bit) const {
    float even = 0.f, odd = 0.f;
    auto add = [&](int chunk, float2 p) {
      const float2 y = *(const float2 *)(x + dim_of(chunk));
      even = __fadd_rn(even, __fmul_rn(y.x, p.x));
      odd = __fadd_rn(odd, __fmul_rn(y.y, p.y));
    };
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      if (dim_of(c) < dim) add(c, plane[c]);
#pragma unroll 1
    for (int c = CHUNKS; dim_of(c) < dim; c++)
      add(c, *(const float2 *)(a.planes + bit * dim + dim_of(c)));
    /* Adds parts p and p + 8. From then on a lane holds one part: with t = lane % 4 it is
     * part 2 t, or 2 t + 1 in lanes 4 and up. */
    const bool is_odd = lane & 4;
    float sum = __fadd_rn(is_odd ? odd : even,
                          __shfl_xor_sync(ALL_LANES, is_odd ? even : odd, 4));
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
    return __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 4));
  }

  /* Writes the hashes into shared words, which must be 0; x has the first QUERIES sums.
   * Begins and ends with a barrier. */
  __device__ __forceinline__ void finish(rows &x, uint32_t *words) {
#pragma unroll 1
    for (int from = 0; from < heads; from += QUERIES) {
      if (from > 0) sum_groups(from, x);
      __syncthreads();
#pragma unroll 1
      for (int bit = first; bit < a.bits; bit += BITS) {
        if (a.bits > BITS && bit + from > first) load_plane(bit);
#pragma unroll 1
        for (int g = 0; g < min(heads - from, QUERIES); g++) {
          const uint32_t positive = __ballot_sync(ALL_LANES, sum(x[g], bit) > 0.f);
          uint32_t *word = words + (from + g) * 2 * a.hashes.words + bit / 32;
          if (lane == 0 && positive >> threadIdx.x % WARP & 1) atomicOr(word, 1u << bit % 32);
        }
      }
      __syncthreads();
    }
  }
};

}  // namespace kvl

#endif
