/* The hashes of the mean queries of KV heads, made by a block of threads that will choose by
 * them. Its steps are apart so that memory is asked for everything before anything is waited
 * for: the planes when it is made, then sum_groups, then finish. The sums are those that
 * kernels.h fixes; eight lanes make one, so that a plane is two numbers a chunk for each and
 * the parts meet in four shuffles. */
#ifndef KVL_CUDA_QUERY_HASH_CUH
#define KVL_CUDA_QUERY_HASH_CUH

#include "common.cuh"

namespace kvl {

template <int THREADS> struct query_hash {
  static constexpr int QUERIES = 8; /* heads hashed together */
  static constexpr int LANES = 8, BITS = THREADS / LANES;
  static constexpr int CHUNKS = 8;  /* of 16 dims, in registers; of more dims the rest is
                                         * read when it is needed */
  typedef float rows[QUERIES][256]; /* sums of groups */
  const kvl_select_hamming_args &a;
  const int64_t head;                /* the first of all KV heads of all sequences */
  const int heads, dim, lane, first; /* lane: of LANES; first: bit of this thread */
  float2 plane[CHUNKS];

  __device__ __forceinline__ query_hash(const kvl_select_hamming_args &args, int64_t head_,
                                        int heads_)
      : a(args), head(head_), heads(heads_), dim(args.head_dim), lane(threadIdx.x % LANES),
        first(threadIdx.x / LANES) {
    load_plane(first);
  }
  /* Dims of this lane in a chunk: parts 2 lane and 2 lane + 1. */
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

  /* Sums of the groups of QUERIES heads from `from` on, each in the order of its heads. */
  __device__ __forceinline__ void sum_groups(int from, rows &x) const {
    const int group = (int)((uint32_t)a.heads / (uint32_t)a.hashes.kv_heads);
    const int width = dim > 128 ? 256 : 128; /* threads to a head */
    const int d = threadIdx.x % width;
#pragma unroll 1
    for (int g = threadIdx.x / width; g < min(heads - from, QUERIES); g += THREADS / width) {
      const int64_t at = (head + from + g) * group * dim + d;
      if (d >= dim) continue;
      float sum = 0.f;
#pragma unroll 1
      for (int h = 0; h < group; h += 4) { /* four are asked for at once */
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

  /* x . plane, in each of the lanes. */
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
    /* Parts p and p + 8; from then on a lane has one, 2 t or (4 and on) 2 t + 1. */
    const bool is_odd = lane & 4;
    float sum = __fadd_rn(is_odd ? odd : even,
                          __shfl_xor_sync(ALL_LANES, is_odd ? even : odd, 4));
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
    return __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 4));
  }

  /* Into shared words, which are 0; x has the first QUERIES sums. Begins with a barrier, ends
   * with one. */
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
