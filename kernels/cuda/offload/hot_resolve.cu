/* Gives every selected block of the host tier a slot on the device, evicting other blocks.
 *
 *   selection        i32  [seqs, kv_heads or 1, n]   logical, -1 padded
 *   tables           i32  [seqs, max_blocks]
 *   each             1, or the tokens of a block of the tables; then read token for block
 *   slot_of          i32  [kv_heads, blocks]    updated; -1: the block has no slot
 *   block_of, order  i32  [kv_heads, slots]     updated; order: least recently used first
 *   priority         f32  [kv_heads, blocks]    optional
 *   slots            i32  [seqs, kv_heads, n]
 *   miss_from/to     i32  [kv_heads, seqs * n]  block and slot, -1 padded
 *   hit_/miss_...    i32  [seqs, kv_heads, n]   the hits and the misses of the selection as
 *                                               separate lists, -1 padded; optional
 *   ahead            i32  [kv_heads, slots]     updated; optional
 *   uses, age        f32  [kv_heads, blocks]    updated; optional; may be priority
 *   counters         i64  [5]                   increased by hits, misses, evictions and, in
 *                                               the last one, cleared marks of `ahead`
 *   workspace        kv_heads * temporary_bytes, where shared memory may be too small
 *
 * The result is the same on every device, whatever runs in parallel:
 * - Entries are taken in the order (sequence, index). An entry that is -1 or out of range
 *   gets slot -1. A block that has a slot at the start is a hit each time it is named. For
 *   a block without a slot, the first entry is a miss; the order of these first entries is
 *   the order of the list of misses. Further entries of the same block are not counted.
 * - Victims are slots that no selected block holds: free slots first, then those of the
 *   lowest priority (NaN is lowest of all), ties by `order`. The misses get the victims in
 *   the order of `order`.
 * - Afterwards `order` has the slots that this call did not use first and the used ones last;
 *   both keep their relative order.
 * - A slot that is filled gets is_ahead in `ahead`. A hit clears it, unless this call is
 *   ahead itself; the slots cleared in this way are counted.
 * - For a block that gets a slot, uses becomes 1, or 0 if this call is ahead, and age 0.
 *   For a hit, uses grows by 1, unless this call is ahead, and age becomes 0. For any other
 *   block that keeps its slot, age grows by 1, unless this call is ahead.
 *
 * One thread block per KV head. Its phases exchange data through shared memory (through the
 * workspace where that is too small: past 17 to 27 thousand slots on an H100):
 *   1  half of the warps look the entries up, mark the slots of hits, and claim slot_of of a
 *      missing block for the lowest entry (atomic minimum of INT32_MIN + entry); the other
 *      half read order, block_of and priority
 *   2  entries whose claim stands are leaders; a scan numbers the bits of leaders, hits and
 *      misses
 *   3  find the key of the last victim (a radix search, only when priorities decide)
 *   4  a walk over `order` numbers the victims and writes the new order
 *   5  the misses move in: update slot_of and block_of
 *   6  write the slot of every entry, and the lists of hits and misses
 *
 * Bytes   4 * (9 * seqs * n + 2 * slots) a head; and scattered sectors of 32 bytes: two or
 *         three per entry, one or two per slot
 * Limit   latency: seven accesses of device memory or L2, each of which depends on the one
 *         before, and a dozen barriers on one SM
 * Best    H100 80GB HBM3, 2026-11-21, cold L2, 8 heads: 410
 *         entries, 4096 slots 13.7 us (40 misses 14.1; with priorities 17.0); 3280 entries,
 *         6560 slots 19.3 us (320 misses 19.6; 23.8)
 * Exact.  Source: Alabi et al. 2012 (radix select) */
#include "args/offload.h"
#include "cuda/offload/hot_resolve.cuh"

namespace kvl {
namespace {

constexpr int SHARED_STATIC = 10 << 10; /* the kernel's own arrays, at most */
constexpr int SHARED_SURE = 80 << 10;   /* every device has as much in addition */

template <bool IS_SHARED>
__global__ void __launch_bounds__(hot::THREADS)
    resolve(const __grid_constant__ kvl_hot_resolve_args a, int64_t bytes) {
  using namespace hot;
  extern __shared__ __align__(16) char shared[];
  __shared__ int sums[SETS][WARP];
  const int tid = threadIdx.x;
  const head h = head_of(
      a, IS_SHARED ? shared : (char *)a.workspace + (int64_t)blockIdx.x * bytes);
  let_next_start();
  /* The workspace is memory that kernels ahead may still use. */
  if (!IS_SHARED) wait_for_previous();
  for (int i = tid; i < words_of(h.slots); i += THREADS) h.used[i] = 0;
  if (tid < SETS) h.sets.bits(tid)[h.sets.words - 1] = 0; /* no entry has a bit here */
  __syncthreads();
  if (IS_SHARED) wait_for_previous();
  if (tid < HALF) look_up(a, h, tid);
  else read_slots(h, tid - HALF);
  __syncthreads();

  int candidates[3], candidates_all[3], count[SETS]; /* free, others; marks cleared */
  find_leaders(h);
  mark_used(h, a.is_ahead, candidates);
  block_scan(candidates, candidates_all, sums); /* has barriers: the leaders are known */
  number_entries(h, count, sums);
  const int unheld = candidates_all[0];
  const int filled = min(count[LEADER], unheld + candidates_all[1]);

  victims v = {KEY_FREE, filled};
  if (filled > unheld && h.priority) v = search_keys(h, filled, sums);
  else if (filled > unheld) v = {KEY_NAN, filled - unheld};
  list_misses(h, filled);
  renew_order(h, v, filled, a.is_ahead, sums);
  __syncthreads();
  fill_slots(h, filled, a.is_ahead);
  __syncthreads();
  tell(a, h);
  if (tid == 0) {
    unsigned long long *counters = (unsigned long long *)a.hot.counters;
    atomicAdd(counters, (unsigned long long)count[HIT]);
    atomicAdd(counters + 1, (unsigned long long)count[LEADER]);
    atomicAdd(counters + 2, (unsigned long long)max(filled - unheld, 0));
    atomicAdd(counters + 4, (unsigned long long)candidates_all[2]);
  }
}

}  // namespace
}  // namespace kvl

KVL_CUDA_WORKSPACE(hot_resolve) {
  (void)sm_count;
  const kvl_hot_resolve_args &a = *(const kvl_hot_resolve_args *)args;
  size_t bytes = kvl::hot::temporary_bytes(a);
  return bytes <= kvl::SHARED_SURE ? 0 : bytes * a.hot.memory.kv_heads;
}

KVL_CUDA_KERNEL(hot_resolve) {
  using namespace kvl;
  const kvl_hot_resolve_args &a = *(const kvl_hot_resolve_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const unsigned heads = (unsigned)a.hot.memory.kv_heads;
  if (a.seqs * a.n == 0 || heads == 0) return KVL_OK;
  const int64_t bytes = (int64_t)hot::temporary_bytes(a);
  const int64_t room = q->shared_optin - SHARED_STATIC;
  if (bytes <= room) {
    int status = allow_shared<resolve<true>>(q, (int)room);
    if (status < 0) return status;
    return launch_programmatic(resolve<true>, heads, hot::THREADS, (size_t)bytes, q, a,
                               bytes);
  }
  return launch_programmatic(resolve<false>, heads, hot::THREADS, 0, q, a, bytes);
}
