/* The arguments of score_rows.cuh, and how it brings a group's queries into shared memory. */
#ifndef KVL_CUDA_SCORE_QUERIES_CUH
#define KVL_CUDA_SCORE_QUERIES_CUH

#include "cuda/convert.cuh"
#include "cuda/select/score_mma.cuh"

namespace kvl {

/* SCORE_TILES is SCORE_MAX_QK when a tile of tokens never spans two blocks. */
enum score_kind { SCORE_MINMAX, SCORE_MEAN, SCORE_MAX_QK, SCORE_TILES };

/* One call of any kind. The row of an item starts at element
 *   block * block_stride + kv_head * head_stride + token in block * head_dim */
struct score_call {
  const void *q, *rows;
  const int32_t *tables, *lens;
  float *scores;
  int64_t seqs, heads, kv_heads, head_dim, max_blocks, blocks, block_stride, head_stride;
  int block_size, group, dtype, rows_dtype;
  kvl_strips strips; /* of packed rows, whose strides are bytes */
};

template <class T, int D, score_kind KIND>
struct score_shape : score_ring<T, D, KIND == SCORE_MINMAX ? 2 : 1> {};

/* Brings the group's queries into shared memory, as rows [terms][ROWS][padded], with the
 * factor that each head's sums must be multiplied with. A thread takes 8 dims of a head at a
 * time; it loads the first of them as early as it can. All threads take part. */
template <class T, int D, score_kind KIND> struct score_queries {
  using shape = score_shape<T, D, KIND>;
  static constexpr int THREADS = shape::WARPS * WARP, LANES = D / 8;
  const score_call &a;
  int64_t head0;
  int group, padded;
  float x[8];

  __device__ __forceinline__ void load(int i) {
    const int col = i / LANES, d = i % LANES * 8;
    const bool inside = col < group && d < (int)a.head_dim;
    if (inside) load_any(a.q, a.dtype, (head0 + col) * a.head_dim + d, x);
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = inside ? x[e] : 0.f;
  }
  __device__ __forceinline__ void store(int i, int terms, uint4 *to, float *unscale) {
    float rows[shape::ROWS][8]; /* row 0, for min, has the negative numbers */
#pragma unroll
    for (int e = 0; e < 8; e++)
#pragma unroll
      for (int r = 0; r < shape::ROWS; r++)
        rows[r][e] = shape::ROWS == 1 || (x[e] < 0.f) == (r == 0) ? x[e] : 0.f;
    score_store_terms<T, D>(rows, i / LANES, i % LANES, padded, terms, to,
                            unscale + i / LANES);
  }
  __device__ __forceinline__ void begin() { load(threadIdx.x); }
  __device__ __forceinline__ void finish(int terms, uint4 *to, float *unscale) {
    for (int i = threadIdx.x; i < padded * LANES;) {
      store(i, terms, to, unscale);
      i += THREADS;
      if (i < padded * LANES) load(i);
    }
  }
};

}  // namespace kvl

#endif
