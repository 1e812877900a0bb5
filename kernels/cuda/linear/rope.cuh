/* The rotation of pairs, which rope and rope_append share so that both give the same bits. */
#ifndef KVL_CUDA_ROPE_CUH
#define KVL_CUDA_ROPE_CUH

#include "cuda/programmatic.cuh"

namespace kvl {

enum { ROPE_THREADS = 128, ROPE_PAIRS = 256 }; /* pairs a block takes at a time */

/* A token's sines and cosines, made once for all of its heads. */
struct rope_angles {
  alignas(16) float angle[ROPE_PAIRS], sine[ROPE_PAIRS], cosine[ROPE_PAIRS];

  /* Called by all threads of the block; the caller has to add a barrier. sincosf is the
   * accurate one: positions reach millions of radians, where the fast one returns noise. A
   * second call, with angles that may have changed since, computes only those that did. */
  __device__ __forceinline__ void make(float position, const float *inv_freq, int pairs,
                                       bool first = true) {
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += ROPE_THREADS) {
      const float x = position * read_early(inv_freq + i);
      if (!first && x == angle[i]) continue;
      angle[i] = x;
      sincosf(x, &sine[i], &cosine[i]);
    }
  }
  /* Loads N neighbours; if N is a multiple of 4, the first is one, too. Single loads would
   * meet in the banks of shared memory. */
  template <int N>
  static __device__ __forceinline__ void load(float (&to)[N], const float *from) {
    if constexpr (N % 4 == 0) {
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        const float4 four = *(const float4 *)(from + j);
        to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; j++) to[j] = from[j];
    }
  }
  /* Rotates pairs (low, high) in place, from pair number `first` on. */
  template <int N>
  __device__ __forceinline__ void turn(float (&low)[N], float (&high)[N], int first) const {
    float s[N], c[N];
    load(s, sine + first), load(c, cosine + first);
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float u = low[j], v = high[j];
      low[j] = __fmaf_rn(u, c[j], __fmul_rn(-v, s[j]));
      high[j] = __fmaf_rn(v, c[j], __fmul_rn(u, s[j]));
    }
  }
  /* Rotates x, which are N numbers of the row `from`, from `dim` on. Their partners are
   * `other` if `pairs` is a multiple of N, so that all of x are low or all are high. */
  template <class T, int N>
  __device__ __forceinline__ void turn_half(pack<T, N> &x, const pack<T, N> &other,
                                            const T *from, int dim, int pairs) const {
    if (dim >= 2 * pairs) return;
    if (pairs % N == 0) {
      const bool is_low = dim < pairs;
      const int first = is_low ? dim : dim - pairs;
      float s[N], c[N];
      load(s, sine + first), load(c, cosine + first);
#pragma unroll
      for (int e = 0; e < N; e++) {
        const float y = to_float(other.at[e]);
        x.at[e] = from_float<T>(
            __fmaf_rn(to_float(x.at[e]), c[e], __fmul_rn(is_low ? -y : y, s[e])));
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < N; e++) {
      const int d = dim + e;
      if (d >= 2 * pairs) break;
      const bool is_low = d < pairs;
      const int pair = is_low ? d : d - pairs;
      float low[1] = {to_float(is_low ? x.at[e] : from[pair])};
      float high[1] = {to_float(is_low ? from[d + pairs] : x.at[e])};
      turn(low, high, pair);
      x.at[e] = from_float<T>(is_low ? low[0] : high[0]);
    }
  }
};

/* How many of its token's `items` a thread block takes: all of them or, when there are few
 * tokens, as many as it has threads, so that the blocks fill the device. */
inline int64_t rope_items_block(int64_t tokens, int64_t items, const kvl_cuda_queue *q) {
  if (tokens >= 4 * q->sm_count || items <= ROPE_THREADS) return items;
  int64_t blocks = (items + ROPE_THREADS - 1) / ROPE_THREADS;
  return blocks <= 65535 ? ROPE_THREADS : (items + 65534) / 65535;
}

}  // namespace kvl

#endif
