/* Logits of an indexer on any GPU since sm_80, for what mqa_wgmma.cuh does not take. f8e4m3
 * is converted to f16, exactly, and multiplied by mma.sync with fp32 sums.
 *
 * A thread block takes a segment of the columns of one row, and holds the row's heads of q in
 * shared memory. A warp takes 16 tokens at a time: the tokens are the rows of the product,
 * eight heads its columns. A dot product does not depend on the order of its dims, so a lane
 * takes whole words of four neighbouring dims, of a key and of q alike.
 *
 * Of every eight heads a lane has two, which it adds up in order; then a butterfly adds the
 * sums of the row's four lanes. relu(x) is computed as x + |x| with half of the weight, so
 * that a NaN stays NaN.
 *
 * Limit     L2: 132 bytes per element of the result, since a row uses each key only once
 * Tolerance 2e-6 of the sum of |terms|, as on the CPU */
#ifndef KVL_CUDA_MQA_MMA_CUH
#define KVL_CUDA_MQA_MMA_CUH

#include "args/index.h"
#include "cuda/index/index.cuh"
#include "cuda/mma.cuh"

namespace kvl {

/* The columns of a row, and their keys: contiguous keys, or keys in index-K memory. */
struct mqa_contiguous {
  const kvl_mqa_logits_args a;
  static constexpr bool PAGED = false;
  __device__ int begin(int64_t row) const { return max(a.starts[row], 0); }
  __device__ int end(int64_t row) const {
    return (int)min((int64_t)a.ends[row], min(a.tokens, a.columns));
  }
  __device__ index_place key(int64_t, int j) const {
    return {(uint8_t *)a.k + (int64_t)j * a.dim, (float *)a.scales + j};
  }
  __host__ __device__ int64_t rows() const { return a.rows; }
  __host__ __device__ int64_t columns() const { return min(a.tokens, a.columns); }
  __host__ __device__ int dim() const { return a.dim; }
};
struct mqa_paged {
  const kvl_mqa_logits_paged_args a;
  static constexpr bool PAGED = true;
  __device__ int begin(int64_t) const { return 0; }
  __device__ int end(int64_t row) const { return (int)min((int64_t)a.lens[row], columns()); }
  __device__ index_place key(int64_t row, int j) const {
    const int entry = j / a.cache.block_size;
    return index_at(a.cache, a.tables[row / a.each * a.max_blocks + entry],
                    j - entry * a.cache.block_size);
  }
  __host__ __device__ int64_t rows() const { return a.sequences * a.each; }
  __host__ __device__ int64_t columns() const {
    return min(a.columns, a.max_blocks * a.cache.block_size);
  }
  __host__ __device__ int dim() const { return a.cache.dim; }
};

template <int D> struct mqa_mma_shape {
  static constexpr int WARPS = 4, THREADS = WARPS * WARP, TOKENS = 16;
  static constexpr int SEGMENT = 1024;            /* columns that a thread block takes */
  static constexpr int HEADS = 64, WORDS = D / 4; /* the most heads; words of four dims */
  /* Of a head of q, as f16, padded so that the lanes of half a warp never share a bank. */
  static constexpr int HEAD_BYTES = 2 * D + 32;
};

/* Loads a row's heads of q and half of their weights; zeros up to a multiple of eight. */
template <int D>
__device__ __forceinline__ void mqa_take_queries(const uint32_t *q, const float *weights,
                                                 int heads, char *to, float *halves) {
  using shape = mqa_mma_shape<D>;
  const int padded = (heads + 7) / 8 * 8;
  for (int i = threadIdx.x; i < padded * shape::WORDS; i += shape::THREADS) {
    const int head = i / shape::WORDS, word = i % shape::WORDS;
    *(uint2 *)(to + head * shape::HEAD_BYTES + word * 8) = halves_of(head < heads ? q[i] : 0);
  }
  for (int h = threadIdx.x; h < padded; h += shape::THREADS)
    halves[h] = h < heads ? 0.5f * weights[h] : 0.f;
}

template <int D, class Keys, class Out>
__global__ void __launch_bounds__(mqa_mma_shape<D>::THREADS)
    mqa_mma(const __grid_constant__ Keys keys, int64_t segments) {
  using shape = mqa_mma_shape<D>;
  constexpr int STEPS = D / 16;
  __shared__ __align__(16) char q[shape::HEADS * shape::HEAD_BYTES];
  __shared__ float halves[shape::HEADS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, heads = keys.a.heads;
  for (int64_t item = blockIdx.x; item < keys.rows() * segments; item += gridDim.x) {
    const int64_t row = item / segments;
    const int first = (int)(item - row * segments) * shape::SEGMENT;
    const int begin = max(keys.begin(row), first);
    const int end = min(keys.end(row), first + shape::SEGMENT);
    if (begin >= end) continue; /* all threads of the block */
    __syncthreads();
    mqa_take_queries<D>((const uint32_t *)keys.a.q + row * heads * shape::WORDS,
                        keys.a.weights + row * heads, heads, q, halves);
    __syncthreads();
    Out *out = (Out *)keys.a.logits + row * keys.a.columns;
    for (int t = begin + warp * shape::TOKENS; t < end; t += shape::WARPS * shape::TOKENS) {
      index_place place[2];
      uint2 k[2][STEPS];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        place[i] = keys.key(row, min(t + lane / 4 + 8 * i, end - 1));
#pragma unroll
        for (int s = 0; s < STEPS; s++)
          k[i][s] = halves_of(
              place[i].key ? ((const uint32_t *)place[i].key)[s * 4 + lane % 4] : 0);
      }
      float sum[2] = {0.f, 0.f};
      for (int h = 0; h < heads; h += 8) {
        float c[4] = {};
        const uint2 *head = (const uint2 *)(q + (h + lane / 4) * shape::HEAD_BYTES);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
          const uint32_t a[4] = {k[0][s].x, k[1][s].x, k[0][s].y, k[1][s].y};
          const uint2 b = head[s * 4 + lane % 4];
          mma(c, a, b.x, b.y, __half());
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
          sum[i / 2] += (c[i] + fabsf(c[i])) * halves[h + lane % 4 * 2 + i % 2];
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float logit = warp_sum<4>(sum[i]);
        const int j = t + lane / 4 + 8 * i;
        if (lane % 4 == i && j < end)
          out[j] = from_float<Out>(place[i].key ? logit * *place[i].scale : -INFINITY);
      }
    }
  }
}

template <int D, class Keys> int launch_mqa_mma(const Keys &keys, const kvl_cuda_queue *q) {
  using shape = mqa_mma_shape<D>;
  const int64_t segments = (keys.columns() + shape::SEGMENT - 1) / shape::SEGMENT;
  const int64_t items = keys.rows() * segments;
  if (items == 0) return KVL_OK;
  const unsigned blocks = (unsigned)(items < INT_MAX ? items : INT_MAX);
  if (keys.a.dtype == KVL_DTYPE_F32)
    mqa_mma<D, Keys, float><<<blocks, shape::THREADS, 0, q->stream>>>(keys, segments);
  else
    mqa_mma<D, Keys, __nv_bfloat16><<<blocks, shape::THREADS, 0, q->stream>>>(keys, segments);
  return kvl__cuda_launched();
}

template <class Keys> int mqa_logits_mma(const Keys &keys, const kvl_cuda_queue *q) {
  switch (keys.dim()) {
    case 32: return launch_mqa_mma<32>(keys, q);
    case 64: return launch_mqa_mma<64>(keys, q);
    default: return launch_mqa_mma<128>(keys, q);
  }
}

}  // namespace kvl

#endif
