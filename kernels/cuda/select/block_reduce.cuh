/* Reduces the K rows of one (block, KV head) over its valid tokens: the shared part of
 * block_minmax and block_mean.
 *
 * A row of head_dim numbers is spread over `lanes` threads with 16 bytes each (f32: 32). The
 * number of lanes is a power of two, so that a warp holds whole rows; the other threads take
 * further tokens. If 32 threads cannot hold a row, such as a latent, they take a chunk of
 * it. For
 * small blocks one warp takes a (block, KV head), for large ones
 * eight. */
#ifndef KVL_CUDA_BLOCK_REDUCE_CUH
#define KVL_CUDA_BLOCK_REDUCE_CUH

#include "cuda/programmatic.cuh"
#include "cuda/strip.cuh"

namespace kvl {

constexpr int REDUCE_THREADS = 256;

/* How many dims of a row of T a thread takes. */
template <class T> constexpr int REDUCE_DIMS = sizeof(T) == 1 && !same<T, f8_latent> ? 16 : 8;

/* Pair e of the f8e4m3 numbers as two f16: exact. */
template <int N> __device__ __forceinline__ __half2 halves(const pack<f8e4m3, N> &x, int e) {
  const uint32_t y = f8_to_f16(reinterpret_cast<const uint16_t *>(&x)[e]);
  return reinterpret_cast<const __half2 &>(y);
}

/* Stores N numbers in the summary's dtype. */
template <class T, int N>
__device__ __forceinline__ void store_summary(T *to, const float (&x)[N]) {
  pack<T, N> raw;
#pragma unroll
  for (int e = 0; e < N; e++) raw.at[e] = convert<T>(x[e]);
  store_pack<N>(to, raw);
}

/* The reduction F of numbers that are stored as C and read as T has
 *   word    a 32-bit type of one or two numbers
 *   N       the number of accumulators; each has WORDS words for REDUCE_DIMS<C> dims
 *   start(word (&)[N][WORDS])                 the value of no token
 *   add(word (&)[N][WORDS], const pack<T, DIMS> &)
 *   join(m, a, b)                             joins two words of accumulator m
 *   finish(x, cache, row, head, dim, tokens)  stores the result */
template <class C, class A, class F, int THREADS>
__global__ void __launch_bounds__(REDUCE_THREADS)
    block_reduce_rows(const __grid_constant__ A a, int lanes, int chunks, const F f) {
  using word = typename F::word;
  constexpr int UNITS = REDUCE_THREADS / THREADS, WARPS = THREADS / WARP, AHEAD = 4;
  constexpr int DIMS = REDUCE_DIMS<C>, WORDS = F::WORDS, ROW = 256 / DIMS * WORDS;
  __shared__ word sums[WARPS > 1 ? WARPS : 1][WARPS > 1 ? F::N * ROW : 1];
  const int unit = threadIdx.x / THREADS, tid = threadIdx.x % THREADS;
  int64_t pair = blockIdx.x * (int64_t)UNITS + unit;
  int chunk = 0;
  if (chunks > 1) {
    chunk = (int)(pair % chunks);
    pair /= chunks;
  }
  let_next_start();
  wait_for_previous();
  /* When a block has one unit, the whole block returns here; when it has several, no
   * block-wide barrier follows. */
  const kvl_pages &cache = a.cache;
  if (pair >= a.n * cache.kv_heads) return;
  const int64_t i = pair / cache.kv_heads;
  const int head = (int)(pair - i * cache.kv_heads);
  const int64_t block = a.blocks[i], to = a.rows ? a.rows[i] : block;
  if (block < 0 || block >= cache.blocks || to < 0 || to >= a.summary_rows) return;
  const int count = max(0, min(a.tokens[i], cache.block_size));
  const int lane = tid % lanes, rows = THREADS / lanes;
  const int dim = (chunk * lanes + lane) * DIMS;
  const bool inside = dim < cache.key.dim;
  const char *k = (const char *)cache.memory + kvl__strip_at(&cache, &cache.key, block, head);

  word x[F::N][WORDS];
  f.start(x);
  if (inside)
    for (int t = tid / lanes; t < count; t += AHEAD * rows) {
      pack<typename read_type<C>::type, DIMS> raw[AHEAD];
#pragma unroll
      for (int u = 0; u < AHEAD; u++)
        if (t + u * rows < count) raw[u] = load_row<C, DIMS>(cache.key, k, t + u * rows, dim);
#pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        if (t + u * rows >= count) break;
        f.add(x, raw[u]);
      }
    }
  /* Joins the rows of a warp, then the warps, in a fixed order. */
  for (int step = lanes; step < WARP; step *= 2)
#pragma unroll
    for (int m = 0; m < F::N; m++)
#pragma unroll
      for (int e = 0; e < WORDS; e++)
        x[m][e] = f.join(m, x[m][e], __shfl_xor_sync(ALL_LANES, x[m][e], step));
  if constexpr (WARPS > 1) {
    if (tid % WARP < lanes)
#pragma unroll
      for (int m = 0; m < F::N; m++)
#pragma unroll
        for (int e = 0; e < WORDS; e++)
          sums[tid / WARP][m * ROW + lane * WORDS + e] = x[m][e];
    __syncthreads();
    if (tid < lanes)
      for (int w = 1; w < WARPS; w++)
#pragma unroll
        for (int m = 0; m < F::N; m++)
#pragma unroll
          for (int e = 0; e < WORDS; e++)
            x[m][e] = f.join(m, x[m][e], sums[w][m * ROW + lane * WORDS + e]);
  }
  if (tid < lanes && inside) f.finish(x, cache, to, head, dim, count);
}

/* A is the args struct of the op: cache, blocks, tokens, rows, summary, n and summary_rows. */
template <class C, class A, class F>
int launch_block_reduce(const A &a, const F &f, const kvl_cuda_queue *q) {
  if (a.n == 0 || a.cache.kv_heads == 0) return KVL_OK;
  if (!aligned16(a.cache.memory, a.summary))
    return kvl__cuda_check(cudaErrorMisalignedAddress);
  int lanes = 1;
  while (lanes < WARP && lanes * REDUCE_DIMS<C> < a.cache.key.dim) lanes *= 2;
  const int chunks = ceil_div(a.cache.key.dim, lanes * REDUCE_DIMS<C>);
  const int64_t pairs = a.n * a.cache.kv_heads * chunks, units = REDUCE_THREADS / WARP;
  if (a.cache.block_size > 64)
    return launch_programmatic(block_reduce_rows<C, A, F, REDUCE_THREADS>, (unsigned)pairs,
                               REDUCE_THREADS, 0, q, a, lanes, chunks, f);
  return launch_programmatic(block_reduce_rows<C, A, F, WARP>,
                             (unsigned)((pairs + units - 1) / units), REDUCE_THREADS, 0, q, a,
                             lanes, chunks, f);
}

}  // namespace kvl

#endif
