/* Selects the blocks that each sequence may attend to: the first `sink`, the last `recent`
 * and those with the highest scores, exactly, in ascending order.
 *
 *   scores     f32  [seqs, selection_heads or 1, max_blocks]
 *   lens       i32  [seqs]
 *   selection  i32  [seqs, selection_heads, max_selected]   -1 padded
 *   counts     i32  [seqs, selection_heads]                 optional
 * At most k = min(kvl__list_blocks(...), max_selected) are
 * taken. Ties go to the lower index. A block between sink and recent whose score is -inf or
 * NaN is not eligible and never taken. When k is too small for all, the sinks come first,
 * then the latest blocks.
 *
 * A row of up to 9216 blocks has one thread block and stays in its registers
 * (select_short.cuh). A longer one has a team of thread blocks (radix_select.cuh), which
 * reads the row once. Both start to load it before its length is known, and may start before
 * the scoring kernel ends.
 *
 * Bytes     4 * (max_blocks + k) a row
 * Limit     latency of the phases: bandwidth accounts for 11 of the 26 us of [64,131072]
 * Best      H100 80GB HBM3, 2026-11-21, L2 flushed, median of 30 (an empty launch reads 3.1),
 *           kernels/dev/topk.cu: [128,2048] k205 7.8 us, [1,8192] k256 7.6, [64,8192] k2048
 *           10.3, [64,65536] k19661 29.6, [1,131072] k2048 13.7, [64,131072] k2048 26.1,
 *           clustered (1 + 1e-3 N) 24.8. H200, 2026-11-22: [64,2^20] k2048 109, [64,131072]
 *           with 8 different values 33 (before: 365, 151); notes/20261122-topk.md
 * Versions  1  one thread block per row, digits of 11 + 11 + 10 bits over the whole row:
 *              12.0 15.0 16.5 - 181 198 202
 *           2  1 with eight keys per thread loaded ahead: no gain
 *           3  1 with four 8-bit passes and one histogram column per lane: slower
 *           4  rows in the registers of a cluster of 8, histograms joined in distributed
 *              shared memory: - 9.9 11.0 65 21 69 72
 *           5  teams that list what lies within a bracket: the times above, and still the
 *              search for long rows
 *           6  5, with rows of up to 9216 blocks in the registers of one thread block, which
 *              counts equal parts of the range of scores. H200, one
 *              cold launch and in brackets a link of a chain: [8,2049] k205 5.3 (2.3) us, 5
 *              had 8.6 (5.9); [8,8192] k410 7.7 (4.6), 8.0 (5.9); [128,2049] k205 5.7 (4.0),
 *              8.9 (6.2). A rehearsal with made-up scores before the wait, to bring the
 *              instructions near, cost 2 us cold and 0.3 in a chain
 * Exact.    Source: Floyd and Rivest 1975; Alabi et al. 2012 (radix select) */
#include "args/select.h"
#include "cuda/select/radix_select.cuh"
#include "cuda/select/select_short.cuh"

namespace kvl {
namespace {

/* Lists the eligible blocks of sink ... high-1 in ascending order; returns how many. One
 * thread block does it; `scan` is an exclusive prefix sum over the threads, and a
 * barrier. */
template <class SCAN>
__device__ __forceinline__ int write_eligible(const float *scores, int sink, int high,
                                              int32_t *selection, SCAN scan) {
  int count = 0;
#pragma unroll 1
  for (int at = sink; at < high; at += TEAM_THREADS) {
    const int i = at + threadIdx.x;
    const bool take = i < high && rank_of(scores[i]) < RANK_LEAST;
    uint32_t total;
    const uint32_t before = scan((uint32_t)take, &total);
    if (take) selection[sink + count + before] = i;
    count += (int)total;
    __syncthreads(); /* the next sums may overwrite these */
  }
  return count;
}

template <int EACH, int TEAM, int SAMPLES>
__global__ void __launch_bounds__(TEAM_THREADS, EACH < 16 ? 2 : 1)
    select_blocks(const __grid_constant__ kvl_select_args a, const team_shape shape,
                  const divisor block_size) {
  extern __shared__ __align__(16) char memory[];
  const uint32_t row = blockIdx.x / TEAM;
  wait_for_previous();
  /* This load comes first, because everything after it waits for it. */
  const uint32_t seq = row / (uint32_t)a.selection_heads;
  const int length = load_now(a.lens + seq);
  const float *scores = a.scores + (a.score_heads > 1 ? row : seq) * a.max_blocks;
  radix_select<EACH, TEAM, SAMPLES> s(memory, scores, (uint32_t)a.max_blocks, shape, true);

  const row_choice r(a, blocks_of(length, block_size, a.max_blocks), seq,
                     row - seq * (uint32_t)a.selection_heads);
  let_next_start();

  int32_t *selection = a.selection + row * a.max_selected;
  if (s.block == 0) { /* as if k blocks were eligible */
    if (threadIdx.x == 0 && a.counts) a.counts[row] = r.k;
    r.write_certain(selection, a.max_selected, r.sink);
  }
  if (r.is_choice) {
    if (!s.find(r.sink, r.high - r.sink, r.wanted, false)) return;
  } else {
    s.leave();
    if (s.block > 0 || r.wanted == 0) return;
  }
  if (r.is_choice && (uint32_t)(s.edge >> 32) < RANK_LEAST) {
    int32_t *best = selection + r.sink;
    opaque(best);
    s.write([&](uint32_t place, uint32_t index) { best[place] = (int32_t)index; });
    return;
  }
  /* The last one to be taken is not eligible, or nothing is left over: so all eligible blocks
   * are taken, and the recent ones follow them. */
  __syncthreads();
  const int count = r.sink + write_eligible(scores, r.sink, r.high, selection,
                                            [&](uint32_t x, uint32_t *sum) {
                                              return s.warps_before(x, sum);
                                            });
  if (count == r.k - r.recent) return;
  if (threadIdx.x == 0 && a.counts) a.counts[row] = count + r.recent;
#pragma unroll 1
  for (int i = count + threadIdx.x; i < r.k; i += s.THREADS)
    selection[i] = i < count + r.recent ? r.high + i - count : -1;
}

int select_long(const kvl_select_args &a, const kvl_cuda_queue *q) {
  const int64_t rows = a.seqs * a.selection_heads;
  const divisor block_size((uint32_t)a.block_size);
  return with_team(rows, a.max_blocks, q, [&](auto t) {
    constexpr int EACH = t.EACH, TEAM = t.TEAM, SAMPLES = t.SAMPLES;
    constexpr auto kernel = select_blocks<EACH, TEAM, SAMPLES>;
    team_shape shape = radix_select<EACH, TEAM, SAMPLES>::shape_of(a.max_blocks,
                                                                   a.max_selected, 0, q);
    int status = allow_shared<kernel>(q, q->shared_optin);
    if (status < 0) return status;
    return launch_teams(kernel, TEAM, rows, TEAM_THREADS, shape.bytes_shared, q, a, shape,
                        block_size);
  });
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(select) {
  using namespace kvl;
  const kvl_select_args &a = *(const kvl_select_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.seqs * a.selection_heads == 0) return KVL_OK;
  if (a.max_blocks <= SHORT_MOST) return short_rows::launch<512>(a, q);
  return select_long(a, q);
}
