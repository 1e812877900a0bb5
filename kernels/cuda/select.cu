/* The blocks each sequence may attend to: the first `sink`, the last `recent` and the
 * highest scores, exactly, in ascending order.
 *
 *   scores     f32  [seqs, selection_heads, max_blocks]
 *   lens       i32  [seqs]
 *   selection  i32  [seqs, selection_heads, max_selected]   -1 padded
 *   counts     i32  [seqs, selection_heads]                 optional
 * k = min(kvl__budget_blocks(budget, blocks of the sequence), max_selected). Ties go to the
 * lower index, NaN comes last. When k is short, sinks stay first, then the latest blocks.
 *
 * One block of threads a row. The scores become unsigned integers of the same order; the
 * k-th largest is found eight bits at a time with a histogram in shared memory. Scores are
 * alike in their top bits, and additions to one address wait for each other: so every lane
 * has its own column of the histogram (one bank, no conflict whatever the scores). Every
 * warp then counts and writes its own stretch of the row, so ascending order and ties cost
 * nothing extra. Rows are kept in shared memory while they fit, longer ones are read again
 * (from L2).
 *
 * Bytes   4 * (blocks + k) a row; limit: latency of the passes for short rows
 * Exact.  Source: Alabi et al. 2012 (radix select) */
#include "paged.cuh"

namespace kvl {
namespace {

constexpr int DIGITS = 256, HISTOGRAM_BYTES = DIGITS * WARP * 4;

template <bool IS_CACHED>
__global__ void __launch_bounds__(1024)
select_blocks(const __grid_constant__ kvl_select_args a) {
  extern __shared__ int counts[];   /* [DIGITS][WARP], then the row's keys */
  __shared__ int totals[DIGITS], warp_sums[WARP], found[3];
  __shared__ int above_warp[WARP], equal_warp[WARP];
  const int64_t row = blockIdx.x;
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
  const int threads = blockDim.x, warps = threads / WARP;
  uint32_t *cached = (uint32_t *)counts + DIGITS * WARP;
  const float *scores = a.scores + row * a.max_blocks;
  int32_t *selection = a.selection + row * a.max_selected;

  const int64_t length = max(a.lens[row / a.selection_heads], 0);
  const int n = (int)min((length + a.block_size - 1) / a.block_size, a.max_blocks);
  const int k = (int)min((int64_t)max(kvl__budget_blocks(a.budget, n), 0), a.max_selected);
  const int sink = min(min(a.budget.sink, n), k);
  const int recent = min(min(a.budget.recent, n - sink), k - sink);
  /* Blocks low ... high-1 compete for `wanted` places. */
  const int low = sink, high = n - recent, wanted = k - sink - recent;

  for (int i = tid; i < sink; i += threads) selection[i] = i;
  for (int i = tid; i < recent; i += threads) selection[k - recent + i] = high + i;
  for (int64_t i = k + tid; i < a.max_selected; i += threads) selection[i] = -1;
  if (tid == 0 && a.counts) a.counts[row] = k;
  if (wanted == 0) return;

  auto key_at = [&](int i) {
    if constexpr (IS_CACHED) return cached[i - low];
    else return order_key(scores[i]);
  };
  if constexpr (IS_CACHED)
    for (int i = low + tid; i < high; i += threads) cached[i - low] = order_key(scores[i]);

  /* Eight keys of a thread, `step` apart, are loaded before the first is used. */
  constexpr int AHEAD = 8;
  auto load_keys = [&](int i, int step, int end, uint32_t (&key)[AHEAD]) {
#pragma unroll
    for (int u = 0; u < AHEAD; u++) key[u] = i + u * step < end ? key_at(i + u * step) : 0;
  };

  /* Keys above `edge` are taken, and the first `ties` of those equal to it. */
  uint32_t edge = 0;
  int ties = wanted;
  if (wanted < high - low) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      for (int i = tid; i < DIGITS * WARP; i += threads) counts[i] = 0;
      __syncthreads();   /* and `cached` is whole */
      for (int i = low + tid; i < high; i += AHEAD * threads) {
        uint32_t key[AHEAD];
        load_keys(i, threads, high, key);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
          bool same = shift == 24 || (key[u] ^ edge) >> (shift + 8) == 0;
          if (same && i + u * threads < high)
            atomicAdd(&counts[(key[u] >> shift & 255) * WARP + lane], 1);
        }
      }
      __syncthreads();
      for (int digit = warp; digit < DIGITS; digit += warps) {
        int sum = warp_sum(counts[digit * WARP + lane]);
        if (lane == 0) totals[digit] = sum;
      }
      __syncthreads();
      /* Thread t has the digit t from the top: where does the count reach `ties`? */
      const int digit = DIGITS - 1 - tid, sum = tid < DIGITS ? totals[digit] : 0;
      int upto = sum;
      for (int step = 1; step < WARP; step *= 2) {
        int x = __shfl_up_sync(ALL_LANES, upto, step);
        if (lane >= step) upto += x;
      }
      if (lane == WARP - 1) warp_sums[warp] = upto;
      __syncthreads();
      for (int w = 0; w < warp; w++) upto += warp_sums[w];
      if (tid < DIGITS && upto >= ties && upto - sum < ties) {   /* one thread */
        found[0] = digit;
        found[1] = upto - sum;
        found[2] = sum;
      }
      __syncthreads();
      edge |= (uint32_t)found[0] << shift;
      ties -= found[1];
      if (found[2] == ties) {   /* the whole digit is taken; something lies below it */
        edge -= 1;
        ties = 0;
        break;
      }
    }
  } else {
    __syncthreads();   /* `cached` is whole */
  }

  /* Each warp owns a stretch: count, add up the warps before, write. */
  const int stretch = ((high - low + warps - 1) / warps + WARP - 1) / WARP * WARP;
  const int begin = min(low + warp * stretch, high), end = min(begin + stretch, high);
  int above = 0, equal = 0;
  for (int i = begin + lane; i < end; i += AHEAD * WARP) {
    uint32_t key[AHEAD];
    load_keys(i, WARP, end, key);
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      bool inside = i + u * WARP < end;
      above += inside && key[u] > edge;
      equal += inside && key[u] == edge;
    }
  }
  above = warp_sum(above);
  equal = warp_sum(equal);
  if (lane == 0) above_warp[warp] = above, equal_warp[warp] = equal;
  __syncthreads();
  above = equal = 0;
  for (int w = 0; w < warp; w++) above += above_warp[w], equal += equal_warp[w];
  const unsigned before = (1u << lane) - 1;
  for (int i = begin + lane; i - lane < end; i += AHEAD * WARP) {
    uint32_t key[AHEAD];
    load_keys(i, WARP, end, key);
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      bool inside = i + u * WARP < end;
      unsigned is_above = __ballot_sync(ALL_LANES, inside && key[u] > edge);
      unsigned is_equal = __ballot_sync(ALL_LANES, inside && key[u] == edge);
      int rank_equal = equal + __popc(is_equal & before);
      bool taken = inside && (key[u] > edge || (key[u] == edge && rank_equal < ties));
      /* every key above and min(equal, ties) of the equal ones came before */
      int place = above + __popc(is_above & before) + min(rank_equal, ties);
      if (taken) selection[sink + place] = i + u * WARP;
      above += __popc(is_above);
      equal += __popc(is_equal);
    }
  }
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(select) {
  using namespace kvl;
  const kvl_select_args &a = *(const kvl_select_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  unsigned rows = (unsigned)(a.seqs * a.selection_heads);
  if (rows == 0) return KVL_OK;
  int threads = a.max_blocks <= 1024 ? 256 : a.max_blocks <= 4096 ? 512 : 1024;
  int64_t bytes = HISTOGRAM_BYTES + a.max_blocks * 4, most = q->shared_optin - 4096;
  if (bytes <= most) {
    int status = allow_shared<select_blocks<true>>(q, (int)most);
    if (status < 0) return status;
    select_blocks<true><<<rows, threads, (int)bytes, q->stream>>>(a);
  } else {
    select_blocks<false><<<rows, threads, HISTOGRAM_BYTES, q->stream>>>(a);
  }
  return kvl__cuda_launched();
}
