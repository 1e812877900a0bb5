/* select for rows of up to SHORT_MOST blocks: one thread block per row, which keeps the row in
 * registers. A warp has a contiguous run of the row, so index order needs only ballots and
 * the sums of earlier warps.
 *   range   the highest and the lowest score that compete
 *   count   a histogram of 2048 equal parts of that range
 *   locate  the bin of the wanted-th score; what earlier bins hold is taken
 *   few     the scores of that bin are all compared with each other, if there are up to FEW.
 *           If there are more, the bin is the range of another round
 *   write   the place of each taken block in index order
 * Every round leaves a smaller range: its two ends fall into different bins, so no bin has
 * all of it. The first round divides the range of the scores (or of their bit patterns, if
 * that range is above 2^100 or below 2^-100), later rounds the range of the bit patterns;
 * there are at most three rounds. Equal scores are replaced by their indices, of which a
 * bin holds few. Every mapping to bins is monotonic, so the result is exact whatever the
 * rounding is.
 *
 * The time is latency: 7 barriers for scores that differ, about 20 shuffles and reductions of
 * a warp in a row, and one load from memory that others have written. */
#ifndef KVL_CUDA_SELECT_SHORT_CUH
#define KVL_CUDA_SELECT_SHORT_CUH

#include "args/select.h"
#include "cuda/block_scan.cuh"
#include "cuda/programmatic.cuh"
#include "cuda/select/select_parts.cuh"

namespace kvl {

constexpr int SHORT_MOST = 9216; /* 128K tokens and an eighth, in blocks of 16 */

namespace short_rows {

constexpr uint32_t BINS = 2048, FEW = 64;

struct rival {
  float score;
  int index;
};
__device__ __forceinline__ bool precedes(const rival &a, const rival &b) {
  return (a.score > b.score) | ((a.score == b.score) & (a.index < b.index)); /* no branch */
}
struct alignas(16) found_bin {
  uint32_t bin, before, count; /* before: rivals in lower bins */
};
struct shared_memory {
  alignas(16) uint32_t count[BINS + 1]; /* the last one is of those that do not compete */
  found_bin found;
  rival few[FEW], edge;
  uint2 range[WARP];
  uint32_t sums[WARP], taken[WARP], few_count;
};

/* The order keys of the highest and the lowest number over the thread block; one that is NaN
 * does not count. Has a barrier. When all are NaN, both are 0. */
template <int THREADS, int N>
__device__ __forceinline__ void range_of(shared_memory &s, const float (&x)[N],
                                         uint32_t *highest, uint32_t *lowest) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  float high = x[0], low = x[0];
#pragma unroll
  for (int j = 1; j < N; j++) high = fmaxf(high, x[j]), low = fminf(low, x[j]);
  const uint32_t high_key = __reduce_max_sync(ALL_LANES, order_key(high));
  const uint32_t low_key = __reduce_min_sync(ALL_LANES, order_key(low) - 1); /* NaN last */
  if (lane == 0) s.range[warp] = make_uint2(high_key, low_key);
  __syncthreads();
  const uint2 of_warp = s.range[lane % (THREADS / WARP)];
  *highest = __reduce_max_sync(ALL_LANES, of_warp.x);
  *lowest = __reduce_min_sync(ALL_LANES, of_warp.y) + 1;
}

/* Finds the bin of the need-th rival, counted from 1, and clears the counts. Returns false if
 * there are not more than `need`. Call it after a barrier. */
template <int THREADS>
__device__ __forceinline__ bool locate(shared_memory &s, uint32_t need, found_bin *found) {
  constexpr int EACH = BINS / THREADS;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint32_t *bins = &s.count[threadIdx.x * EACH];
  const pack<uint32_t, EACH> own = load_pack<EACH>(bins);
  store_pack(bins, pack<uint32_t, EACH>{});
  uint32_t sum = own.at[0];
#pragma unroll
  for (int j = 1; j < EACH; j++) sum += own.at[j];
  uint32_t upto = warp_scan(sum);
  if (lane == WARP - 1) s.sums[warp] = upto;
  __syncthreads();
  const uint32_t of_warp = lane < THREADS / WARP ? s.sums[lane] : 0;
  upto += __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0);
  if (__reduce_add_sync(ALL_LANES, of_warp) <= need) return false;
  uint32_t before = upto - sum;
  if (before < need && need <= upto) { /* true for one thread */
    uint32_t bin = threadIdx.x * EACH, count = own.at[0];
#pragma unroll
    for (int j = 1; j < EACH; j++)
      if (need > before + count) before += count, count = own.at[j], bin++;
    s.found = {bin, before, count};
  }
  __syncthreads();
  *found = s.found;
  return true;
}

/* Finds the need-th of the listed rivals. A warp takes one of them and compares it with all.
 * Call it after a barrier; it ends with one. */
template <int THREADS>
__device__ __forceinline__ rival edge_of(shared_memory &s, uint32_t count, uint32_t need) {
  const uint32_t lane = threadIdx.x % WARP;
#pragma unroll 1
  for (uint32_t i = threadIdx.x / WARP; i < count; i += THREADS / WARP) {
    const rival own = s.few[i];
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t other = lane; other < lane + count; other += WARP)
      before += __popc(
          __ballot_sync(ALL_LANES, other < count && precedes(s.few[other], own)));
    if (before + 1 == need && lane == 0) s.edge = own;
  }
  __syncthreads();
  return s.edge;
}

/* Which of this thread's blocks are taken: those whose bit is set, and those whose bin is
 * below the limit. */
template <int EACH> struct chosen {
  static_assert(EACH <= 32, "a bit for each");
  uint32_t bits, limit, bin[EACH];
  __device__ __forceinline__ bool has(int j) const { return bin[j] < limit || bits >> j & 1; }
};

/* Marks in c the `need` highest of the thread block's numbers x that are not NaN; of equal
 * ones, those with the lower index. This thread has those of blocks first + j * WARP, all
 * within low ... high - 1. */
template <int THREADS, int EACH>
__device__ __forceinline__ void choose(shared_memory &s, float (&x)[EACH], int first, int low,
                                       int high, uint32_t need, chosen<EACH> &c) {
  constexpr float SHIFT = 8388608; /* 2^23 + m has the bits of 2^23, plus m */
#pragma unroll 1
  for (bool is_linear = true;; is_linear = false) {
    uint32_t top, least;
    range_of<THREADS>(s, x, &top, &least);
    float most = order_value(top), span = most - order_value(least);
    if (__builtin_expect(top == least, 0)) { /* equal numbers: go by index */
#pragma unroll
      for (int j = 0; j < EACH; j++)
        if (x[j] == x[j]) x[j] = (float)-(first + j * WARP);
      is_linear = true, most = (float)-low, span = (float)(high - 1 - low);
    }
    if (__builtin_expect(is_linear && span > 0x1p-100f && span < 0x1p100f, 1)) {
      const float scale = __fdividef(BINS - 1, span);
#pragma unroll
      for (int j = 0; j < EACH; j++) /* of NaN: the last one */
        c.bin[j] = min(__float_as_uint(fmaf(most - x[j], scale, SHIFT)) - 0x4B000000u, BINS);
    } else {
      const int shift = max(0, 21 - __clz(top - least));
#pragma unroll
      for (int j = 0; j < EACH; j++)
        c.bin[j] = x[j] == x[j] ? min((top - order_key(x[j])) >> shift, BINS) : BINS;
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) atomicAdd(&s.count[c.bin[j]], 1u);
    __syncthreads();
    found_bin found;
    c.limit = BINS;
    if (!locate<THREADS>(s, need, &found)) return; /* all are taken */
    need -= found.before;
    c.limit = found.bin + (found.count == need);
    if (found.count == need) return;
    if (__builtin_expect(found.count <= FEW, 1)) {
      bool is_mine = false;
#pragma unroll
      for (int j = 0; j < EACH; j++) is_mine |= c.bin[j] == found.bin;
      if (is_mine) {
#pragma unroll
        for (int j = 0; j < EACH; j++)
          if (c.bin[j] == found.bin)
            s.few[atomicInc(&s.few_count, FEW)] = {x[j], first + j * WARP};
      }
      __syncthreads();
      const rival edge = edge_of<THREADS>(s, found.count, need);
      if (is_mine) {
#pragma unroll
        for (int j = 0; j < EACH; j++)
          if (c.bin[j] == found.bin && !precedes(edge, {x[j], first + j * WARP}))
            c.bits |= 1u << j;
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (c.bin[j] < found.bin) c.bits |= 1u << j;
      if (c.bin[j] != found.bin) x[j] = NAN;
    }
  }
}

/* EACH: blocks of the row that a thread has. */
template <int THREADS, int EACH>
__global__ void __launch_bounds__(THREADS)
    select_row(const __grid_constant__ kvl_select_args a,
               const __grid_constant__ divisor block_size) {
  __shared__ shared_memory s;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int first = warp * (EACH * WARP) + lane, width = (int)a.max_blocks;
  let_next_start();
  const uint32_t seq = blockIdx.x / (uint32_t)a.selection_heads;
  const int32_t *lens = a.lens + seq;
  const float *scores = a.scores + (int64_t)(a.score_heads > 1 ? blockIdx.x : seq) * width +
                        first;
  int32_t *selection = a.selection + blockIdx.x * a.max_selected;
  opaque(lens), opaque(scores), opaque(selection); /* they are ready when the wait ends */
  __builtin_assume(__isGlobal(scores)), __builtin_assume(__isGlobal(selection));
#pragma unroll
  for (int i = 0; i < BINS / THREADS; i++) s.count[i * THREADS + threadIdx.x] = 0;
  if (threadIdx.x == 0) s.few_count = 0;

  wait_for_previous();
  const int length = load_now(lens);
  float x[EACH];
#pragma unroll
  for (int j = 0; j < EACH; j++) x[j] = first + j * WARP < width ? scores[j * WARP] : NAN;
  const row_choice row(a, blocks_of(length, block_size, a.max_blocks), seq,
                       blockIdx.x - seq * (uint32_t)a.selection_heads);
  chosen<EACH> c;
  c.bits = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int i = first + j * WARP;
    const bool is_rival = i >= row.sink && i < row.high;
    if (!is_rival && i < row.n) c.bits |= 1u << j;
    if (!is_rival || !(x[j] > -INFINITY)) x[j] = NAN; /* not eligible */
  }
  if (row.is_choice) {
    choose<THREADS>(s, x, first, row.sink, row.high, row.wanted, c);
  } else {
    c.limit = row.wanted > 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) c.bin[j] = x[j] == x[j] ? 0 : BINS;
  }

  uint32_t place[EACH], own = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const uint32_t word = __ballot_sync(ALL_LANES, c.has(j));
    place[j] = own + __popc(word & ((1u << lane) - 1));
    own += __popc(word);
  }
  if (lane == 0) s.taken[warp] = own;
  __syncthreads();
  const uint32_t of_warp = lane < THREADS / WARP ? s.taken[lane] : 0;
  const uint32_t before = __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0);
  const int count = (int)__reduce_add_sync(ALL_LANES, of_warp);
#pragma unroll
  for (int j = 0; j < EACH; j++)
    if (c.has(j)) selection[before + place[j]] = first + j * WARP;
#pragma unroll 1
  for (int i = count + threadIdx.x; i < (int)a.max_selected; i += THREADS) selection[i] = -1;
  if (threadIdx.x == 0 && a.counts) a.counts[blockIdx.x] = count;
}

template <int THREADS> int launch(const kvl_select_args &a, const kvl_cuda_queue *q) {
  const divisor block_size((uint32_t)a.block_size);
  auto with = [&](auto kernel) {
    return launch_programmatic(kernel, dim3((unsigned)(a.seqs * a.selection_heads)), THREADS,
                               0, q, a, block_size);
  };
  constexpr auto each = [](int blocks) { return (blocks + THREADS - 1) / THREADS; };
  if (a.max_blocks <= 1024) return with(select_row<THREADS, each(1024)>);
  if (a.max_blocks <= 2560) return with(select_row<THREADS, each(2560)>);
  if (a.max_blocks <= 4608) return with(select_row<THREADS, each(4608)>);
  return with(select_row<THREADS, each(SHORT_MOST)>);
}

}  // namespace short_rows
}  // namespace kvl

#endif
