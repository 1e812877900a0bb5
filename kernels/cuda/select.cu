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
 * k-th largest is found by 11 + 11 + 10 bits with a histogram in shared memory each
 * (11 bits, so that clustered scores spread over many counters). Every warp then counts and
 * writes its own stretch of the row, so ascending order and ties cost nothing extra.
 * Rows up to CACHED numbers are kept in shared memory, longer ones are read again (from L2).
 *
 * Bytes     4 * (blocks + k) a row
 * Limit     latency of the passes for short rows; for long ones the instructions of five
 *           passes on one SM
 * Best      H100 80GB HBM3, 2026-11-20, L2 flushed, median of 30 (an empty launch reads 3.3):
 *           [128,2048] k205 12.0 us, [1,8192] k256 15.0, [64,8192] k2048 16.5,
 *           [1,131072] k2048 181, [64,131072] k2048 198, the same clustered 202
 * Versions  1  this one
 *           2  eight keys a thread loaded ahead: 12.0, 15.2, 16.1, 193, 205, 208
 *           3  four 8-bit passes, a histogram column a lane (no conflicts), all keys in
 *              shared memory up to 48K: 20.3, 19.2, 22.5, 237, 241, 253
 *           So neither loads nor conflicts are the limit: fewer passes over the whole row are
 *           the next step (gather the chosen digit's keys after the first).
 * Exact.    Source: Alabi et al. 2012 (radix select) */
#include "paged.cuh"

namespace kvl {
namespace {

constexpr int DIGITS = 2048, CACHED = 8192;

template <bool IS_CACHED>
__global__ void __launch_bounds__(1024)
select_blocks(const __grid_constant__ kvl_select_args a) {
  __shared__ uint32_t cached[IS_CACHED ? CACHED : 1];
  __shared__ int counts[DIGITS], warp_sums[WARP], found[2];
  __shared__ int above_warp[WARP], equal_warp[WARP];
  const int64_t row = blockIdx.x;
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
  const int threads = blockDim.x, warps = threads / WARP;
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

  /* Keys above `edge` are taken, and the first `ties` of those equal to it. */
  uint32_t edge = 0;
  int ties = wanted;
  if (wanted < high - low) {
    int shift = 32;
    for (int pass = 0; pass < 3; pass++) {
      const int bits = pass < 2 ? 11 : 10, digits = 1 << bits;
      const int shift_above = shift;
      shift -= bits;
      for (int i = tid; i < DIGITS; i += threads) counts[i] = 0;
      __syncthreads();   /* and `cached` is whole */
      for (int i = low + tid; i < high; i += threads) {
        uint32_t key = key_at(i);
        bool same = pass == 0 || key >> shift_above == edge >> shift_above;
        if (same) atomicAdd(&counts[key >> shift & (digits - 1)], 1);
      }
      __syncthreads();
      /* Thread t sums 8 counters, from the largest digit down; the first 256 suffice. */
      int sum = 0, top = digits - 1 - tid * 8;
      if (top >= 0)
        for (int j = 0; j < 8; j++) sum += counts[top - j];
      int upto = sum;
      for (int step = 1; step < WARP; step *= 2) {
        int x = __shfl_up_sync(ALL_LANES, upto, step);
        if (lane >= step) upto += x;
      }
      if (lane == WARP - 1) warp_sums[warp] = upto;
      __syncthreads();
      for (int w = 0; w < warp; w++) upto += warp_sums[w];
      if (top >= 0 && upto >= ties && upto - sum < ties) {   /* one thread */
        int taken = upto - sum, digit = top;
        while (taken + counts[digit] < ties) taken += counts[digit--];
        found[0] = digit;
        found[1] = taken;
      }
      __syncthreads();
      edge |= (uint32_t)found[0] << shift;
      ties -= found[1];
    }
  } else {
    __syncthreads();   /* `cached` is whole */
  }

  /* Each warp owns a stretch: count, add up the warps before, write. */
  const int stretch = ((high - low + warps - 1) / warps + WARP - 1) / WARP * WARP;
  const int begin = min(low + warp * stretch, high), end = min(begin + stretch, high);
  int above = 0, equal = 0;
  for (int i = begin + lane; i < end; i += WARP) {
    uint32_t key = key_at(i);
    above += key > edge;
    equal += key == edge;
  }
  above = warp_sum(above);
  equal = warp_sum(equal);
  if (lane == 0) above_warp[warp] = above, equal_warp[warp] = equal;
  __syncthreads();
  above = equal = 0;
  for (int w = 0; w < warp; w++) above += above_warp[w], equal += equal_warp[w];
  const unsigned before = (1u << lane) - 1;
  for (int i = begin; i < end; i += WARP) {
    bool inside = i + lane < end;
    uint32_t key = inside ? key_at(i + lane) : 0;
    unsigned is_above = __ballot_sync(ALL_LANES, inside && key > edge);
    unsigned is_equal = __ballot_sync(ALL_LANES, inside && key == edge);
    int rank_equal = equal + __popc(is_equal & before);
    bool taken = inside && (key > edge || (key == edge && rank_equal < ties));
    /* every key above and min(equal, ties) of the equal ones came before */
    int place = above + __popc(is_above & before) + min(rank_equal, ties);
    if (taken) selection[sink + place] = i + lane;
    above += __popc(is_above);
    equal += __popc(is_equal);
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
  if (a.max_blocks <= CACHED) select_blocks<true><<<rows, threads, 0, q->stream>>>(a);
  else select_blocks<false><<<rows, threads, 0, q->stream>>>(a);
  return kvl__cuda_launched();
}
