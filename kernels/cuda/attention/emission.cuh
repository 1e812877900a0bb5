/* What the kernels that emit in a prefill call (lua/kvlab/kernel/print/cuda_prompt.lua):
 * the keys of a few blocks, which stay in shared memory, and their products with a tile of
 * query rows on the tensor cores (score_mma.cuh). A row is a pair (query, head of the
 * group).
 *
 * Flops     2 * head_dim for each pair of a query row and a key that it sees, half of what
 *           attention needs; e^x and the expression come on top
 * Bytes     K once; q once for every KEYS keys, mostly from L2 */
#ifndef KVL_CUDA_EMISSION_CUH
#define KVL_CUDA_EMISSION_CUH

#include "cuda/select/score_mma.cuh"
#include "cuda/strip.cuh"

#include "cuda/expression.cuh"

/* Brings SLICE keys into tiles of 16, from key `first` of the blocks on: block b has
 * counts[b] keys, from byte start[b] of the cache on. The rest of a tile becomes zeros. C
 * is the type of an element in memory, T in the tiles; others become floats. */
template <class C, class T, int D, int DIM, int TOKENS, int BLOCKS, int SLICE, int THREADS>
DEVICE void emission_keys(char *tiles, const kvl_pages *cache, const int64_t *start,
                          const int *counts, int first) {
  constexpr int N = 16 / (int)sizeof(T), PIECES = D / N;
  static_assert(DIM % N == 0, "rows of whole pieces of 16 bytes");
  for (int i = threadIdx.x; i < SLICE * PIECES; i += THREADS) {
    const int key = i / PIECES, piece = i % PIECES;
    const int block = (first + key) / TOKENS, token = (first + key) % TOKENS;
    const bool has = block < BLOCKS && token < counts[block] && piece * N < DIM;
    const char *strip = (const char *)cache->memory + (has ? start[block] : 0);
    char *to = tiles +
               (key / 16 * 16 * PIECES + kvl::score_piece<PIECES>(key % 16, piece)) * 16;
    if constexpr (!kvl::same<C, T>) {
      kvl::pack<T, N> x = {};
      if (has) {
        const auto row = kvl::load_row<C, N>(cache->key, strip, token, piece * N);
#pragma unroll
        for (int e = 0; e < N; e++) x.at[e] = kvl::to_float(row.at[e]);
      }
      kvl::store_pack<N>((T *)to, x);
    } else {
      kvl::copy_async(kvl::shared_address(to),
                      (const T *)strip + (has ? token * DIM + piece * N : 0), has);
    }
  }
  kvl::copy_commit();
  kvl::copy_wait<0>();
}

/* Calls store(row, key, q . k) for ROWS query rows and the 16 keys of a tile; a warp. q has
 * the rows [terms][ROWS], as score_store_terms left them. */
template <class T, int D, int DIM, int ROWS, class STORE>
DEVICE void emission_products(const char *tile, const uint4 *q, int terms, STORE store) {
  constexpr int GROUPS = ROWS % 32 == 0 ? 4 : ROWS % 16 == 0 ? 2 : 1;
  const int key = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll 1
  for (int r0 = 0; r0 < ROWS; r0 += 8 * GROUPS) {
    float c[GROUPS][4];
    kvl::score_products<T, D, 1, 1, DIM, GROUPS>(c, (const uint4 *)tile, q, r0 + key, ROWS,
                                                 terms);
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; i++)
      store(r0 + i / 4 * 8 + column + i % 2, key + i % 4 / 2 * 8, c[i / 4][i % 4]);
  }
}

/* Adds x to a sum of many; `lost` keeps what rounding took away. */
DEVICE void emission_add(float &sum, float &lost, float x) {
  const float more = x - lost, next = sum + more;
  lost = fabsf(next) < INFINITY ? (next - sum) - more : 0.0f;
  sum = next;
}

/* Joins the results of PARTS threads, STRIDE apart, which take the same block and lane for
 * different queries. The first of them gets the result. memory has room for PARTS * STRIDE
 * numbers. */
template <int PARTS, int STRIDE, bool IS_MAX>
DEVICE float emission_total(float *memory, float own) {
  __syncthreads(); /* what memory held before was read */
  if (threadIdx.x < PARTS * STRIDE) memory[threadIdx.x] = own;
  __syncthreads();
  for (int i = 1; threadIdx.x < STRIDE && i < PARTS; i++) {
    const float other = memory[threadIdx.x + i * STRIDE];
    own = IS_MAX ? max_f32(own, other) : own + other;
  }
  return own;
}

#endif
