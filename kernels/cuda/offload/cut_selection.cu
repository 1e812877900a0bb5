/* Cuts a selection into passes over a ring and a list of open blocks; see kvl_cut in kvlab.h.
 *
 *   selection     i32  [seqs, heads, max_selected]   NULL: every block
 *   tables        i32  [seqs, max_blocks]
 *   lens          i32  [seqs]
 *   opens         i32  [seqs, 2]   first open logical block, its index in the buffer
 *   logical       i32  [passes, seqs, heads, n]      entry j of the blocks before the open
 *   physical      i32  [passes, seqs, heads, n]      ones goes to index j % n of pass j / n
 *   open_logical  i32  [seqs, heads, n_open]
 *   open_slots    i32  [seqs, heads, n_open]
 * -1 padded. Entries that do not fit are dropped; an entry past the sequence's last block
 * is ignored.
 *
 * Bytes   4 * (max_selected + 3 * passes * n + 2 * n_open) a row
 * Limit   latency: one thread block per row, one scan per 1024 entries */
#include "args/offload.h"
#include "cuda/block_scan.cuh"
#include "cuda/elementwise.cuh"

namespace kvl {
namespace {

__global__ void __launch_bounds__(1024)
    cut(const __grid_constant__ kvl_cut_selection_args a) {
  __shared__ int sums[2][WARP];
  const int64_t row = blockIdx.x, rows = gridDim.x, seq = row / a.heads;
  const int tid = threadIdx.x, threads = blockDim.x;
  const int32_t *list = a.selection ? a.selection + row * a.max_selected : nullptr;
  const int32_t *table = a.tables + seq * a.max_blocks;
  const int64_t length = max(a.lens[seq], 0);
  const int64_t blocks = min((length + a.block_size - 1) / a.block_size, a.max_blocks);
  const int64_t entries = list ? a.max_selected : blocks, room = a.passes * a.n;
  const int64_t first_open = a.opens[2 * seq], first_slot = a.opens[2 * seq + 1];
  int32_t *open_logical = a.open_logical + row * a.n_open;
  int32_t *open_slots = a.open_slots + row * a.n_open;

  auto place = [&](int64_t j, int32_t logical, int32_t physical) {
    int64_t pass, at;
    divide(j, a.n, &pass, &at);
    at += (pass * rows + row) * a.n;
    a.logical[at] = logical;
    a.physical[at] = physical;
  };
  int64_t closed = 0, open = 0;
  for (int64_t first = 0; first < entries; first += threads) {
    const int64_t i = first + tid;
    const int64_t block = i >= entries ? -1 : list ? list[i] : i;
    const bool there = block >= 0 && block < blocks, is_open = block >= first_open;
    int before[2] = {there && !is_open, there && is_open}, total[2];
    block_scan(before, total, sums);
    if (there && !is_open && closed + before[0] < room)
      place(closed + before[0], (int32_t)block, table[block]);
    if (there && is_open && open + before[1] < a.n_open) {
      open_logical[open + before[1]] = (int32_t)block;
      open_slots[open + before[1]] = (int32_t)(first_slot + block - first_open);
    }
    closed += total[0];
    open += total[1];
  }
  for (int64_t j = closed + tid; j < room; j += threads) place(j, -1, -1);
  for (int64_t j = open + tid; j < a.n_open; j += threads)
    open_logical[j] = open_slots[j] = -1;
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(cut_selection) {
  const kvl_cut_selection_args &a = *(const kvl_cut_selection_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const int64_t rows = a.seqs * a.heads,
                entries = a.selection ? a.max_selected : a.max_blocks;
  if (rows == 0) return KVL_OK;
  kvl::cut<<<(unsigned)rows, entries <= 256 ? 256 : 1024, 0, q->stream>>>(a);
  return kvl__cuda_launched();
}
