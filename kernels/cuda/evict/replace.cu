/* Finds where the new token of each row goes: to the end, or, in a row that is full, to the
 * place of the token with the lowest score, and saves the token that was there. See
 * kvl_replace in
 * runtime/kvlab.h.
 *
 *   scores     f32  [rows, n]     optional; with score_firsts i32 [rows], [n]
 *   positions  f32  [cells]       changed
 *   lens, now, firsts  i32 [rows]; tables i32 [rows, max_blocks]; wanted i64 [rows]
 *   index, blocks, block_tokens i32, replaced f32, places i64   [rows]
 *   cache, saved  pages           optional
 *
 * Bytes   8 for each token of a full row, and a token's, twice. A thread block has a row.
 * Limit   the launch: 128 rows of 2048 tokens are 2 MB. Exact. */
#include "cuda/evict/token.cuh"

namespace kvl {
namespace {

constexpr int REPLACE_THREADS = 512;

__device__ __forceinline__ kvl_worth other(const kvl_worth &w, int lanes) {
  kvl_worth o;
  o.kind = __shfl_xor_sync(ALL_LANES, w.kind, lanes);
  o.score = __shfl_xor_sync(ALL_LANES, w.score, lanes);
  o.position = __shfl_xor_sync(ALL_LANES, w.position, lanes);
  o.index = __shfl_xor_sync(ALL_LANES, w.index, lanes);
  return o;
}

__device__ __forceinline__ kvl_worth least_of_warp(kvl_worth w) {
#pragma unroll
  for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
    const kvl_worth o = other(w, lanes);
    if (kvl__goes_before(o, w)) w = o;
  }
  return w;
}

/* The index of the token that is worth least, for all threads of the block. */
__device__ __forceinline__ int32_t find_least(const kvl_replace_args &a, int64_t row,
                                              int32_t count) {
  __shared__ kvl_worth found[REPLACE_THREADS / WARP];
  __shared__ int32_t index;
  kvl_worth least = {3, 0, 0, INT32_MAX};
#pragma unroll 4
  for (int32_t i = threadIdx.x; i < count; i += REPLACE_THREADS) {
    const kvl_worth one = kvl__worth(&a, row, i);
    if (kvl__goes_before(one, least)) least = one;
  }
  least = least_of_warp(least);
  if (threadIdx.x % WARP == 0) found[threadIdx.x / WARP] = least;
  __syncthreads();
  if (threadIdx.x < WARP) {
    least = {3, 0, 0, INT32_MAX};
    if (threadIdx.x < REPLACE_THREADS / WARP) least = found[threadIdx.x];
    least = least_of_warp(least);
    if (threadIdx.x == 0) index = least.index;
  }
  __syncthreads();
  return index;
}

/* U: the unit in which a token is saved. */
template <class U>
__global__ void __launch_bounds__(REPLACE_THREADS)
    replace(const __grid_constant__ kvl_replace_args a,
            const __grid_constant__ token_units l) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const int32_t count = kvl__row_tokens(&a, row);
  if (count < 1) {
    if (threadIdx.x == 0) kvl__put_nowhere(&a, row);
    return;
  }
  const int32_t index = a.wanted[row] < 0 ? find_least(a, row, count) : count - 1;
  if (threadIdx.x == 0) kvl__put_new(&a, row, index);
  if (!a.saved.memory) return;
  const int64_t place = kvl__place(&a, row, index);
  for (uint32_t i = threadIdx.x; i < l.each.by; i += REPLACE_THREADS) {
    const token_unit<U> unit = find_unit<U>(a.cache, place, a.saved, row, l, i);
    if (unit.from) *unit.to = *unit.from;
  }
}

template <class U> int launch(const kvl_replace_args &a, const kvl_cuda_queue *q) {
  const token_units l = a.saved.memory ? units_of<U>(a.cache) : token_units();
  return launch_programmatic(replace<U>, (unsigned)a.rows, REPLACE_THREADS, 0, q, a, l);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(replace) {
  using namespace kvl;
  const kvl_replace_args &a = *(const kvl_replace_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.rows == 0) return KVL_OK;
  if (!a.saved.memory) return launch<uint4>(a, q);
  return with_unit(a.cache, a.saved, [&](auto unit) { return launch<decltype(unit)>(a, q); });
}
