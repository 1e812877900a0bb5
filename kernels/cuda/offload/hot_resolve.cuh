/* The phases of hot_resolve, for the threads of one block. hot_resolve.cu describes the whole
 * and has the barriers. */
#ifndef KVL_CUDA_HOT_RESOLVE_CUH
#define KVL_CUDA_HOT_RESOLVE_CUH

#include "args/offload.h"
#include "cuda/block_scan.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {
namespace hot {

constexpr int THREADS = 1024, HALF = THREADS / 2;
constexpr int DIGITS = 2048; /* of the radix search */

/* Keys of slots: victims are the slots with the smallest keys. Priorities are in between. */
enum : uint32_t { KEY_FREE = 0, KEY_NAN = 1, KEY_FIXED = 0xFFFFFFFE, KEY_USED = 0xFFFFFFFF };

/* Sets of entries, as `words` 32-bit words each; before() counts the members before each
 * word. */
enum { LEADER, HIT, MISS, SETS };
struct entry_sets {
  uint32_t *memory;
  int words;
  __device__ uint32_t *bits(int set) const { return memory + 2 * set * words; }
  __device__ int *before(int set) const { return (int *)memory + (2 * set + 1) * words; }
  __device__ bool has(int set, int e) const { return bits(set)[e / 32] >> e % 32 & 1; }
  __device__ int rank(int set, int e) const { /* members before entry e */
    return before(set)[e / 32] + __popc(bits(set)[e / 32] & ((1u << e % 32) - 1));
  }
};

/* One KV head: its rows of the arguments, and its data in shared memory. */
struct head {
  int32_t *slot_of, *block_of, *order, *miss_from, *miss_to, *ahead;
  const float *priority;
  float *uses, *age;
  int kv_head, kv_heads, n, entries, slots, blocks;
  int32_t *found;     /* [entries]  the slot of a hit, mark(block) for a miss, or -1 */
  int32_t *order_old; /* [slots] */
  uint32_t *keys;     /* [slots], in the order of order_old */
  uint32_t *used;     /* bit i: slot i is a hit */
  entry_sets sets;
};

/* How many 32-bit words hold bits 0 ... `bits`: rank(entries) needs the last of them. */
__host__ __device__ inline int64_t words_of(int64_t bits) { return bits / 32 + 1; }
inline size_t temporary_bytes(const kvl_hot_resolve_args &a) {
  int64_t entries = a.seqs * a.n, slots = a.hot.slots;
  return 4 * (size_t)(entries + 2 * slots + words_of(slots) + 2 * SETS * words_of(entries));
}

__device__ __forceinline__ head head_of(const kvl_hot_resolve_args &a, char *temporary) {
  head h;
  const int64_t g = blockIdx.x, slots = a.hot.slots, entries = a.seqs * a.n;
  h.slot_of = a.hot.slot_of + g * a.hot.blocks;
  h.block_of = a.hot.block_of + g * slots;
  h.order = a.hot.order + g * slots;
  h.priority = a.hot.priority ? a.hot.priority + g * a.hot.blocks : nullptr;
  h.ahead = a.hot.ahead ? a.hot.ahead + g * slots : nullptr;
  h.uses = a.hot.uses ? a.hot.uses + g * a.hot.blocks : nullptr;
  h.age = a.hot.age ? a.hot.age + g * a.hot.blocks : nullptr;
  h.miss_from = a.miss_from + g * entries;
  h.miss_to = a.miss_to + g * entries;
  h.kv_head = (int)g;
  h.kv_heads = a.hot.memory.kv_heads;
  h.n = (int)a.n;
  h.entries = (int)entries;
  h.slots = (int)slots;
  h.blocks = (int)min(a.hot.blocks, (int64_t)INT32_MAX);
  h.found = (int32_t *)temporary;
  h.order_old = h.found + entries;
  h.keys = (uint32_t *)(h.order_old + slots);
  h.used = h.keys + slots;
  h.sets = {h.used + words_of(slots), (int)words_of(entries)};
  return h;
}

/* Maps a block to a number that is neither a slot nor -1. mark(mark(b)) is b. */
__device__ __forceinline__ int32_t mark(int32_t block) { return -2 - block; }
__device__ __forceinline__ bool within(int32_t i, int end) {
  return (uint32_t)i < (uint32_t)end;
}

/* ---- 1: look up -------------------------------------------------------------------- */

/* HALF threads call it; this is number `rank`. Loads of one kind are grouped, so that a
 * thread waits once for all of its entries. */
__device__ __forceinline__ void look_up(const kvl_hot_resolve_args &a, const head &h,
                                        int rank) {
  constexpr int EACH = 8;
  const int32_t *selection = a.selection +
                             (a.selection_heads > 1 ? (int64_t)h.kv_head * h.n : 0);
  const int64_t stride = a.selection_heads * h.n;
  const int each = (int)a.hot.each; /* 1, or the tokens of a block of the tables */
  for (int first = 0; first < h.entries; first += EACH * HALF) {
    int32_t block[EACH], slot[EACH];
#pragma unroll
    for (int u = 0; u < EACH; u++) {
      int e = first + u * HALF + rank, seq = e / h.n;
      block[u] = e < h.entries ? selection[seq * stride + (e - seq * h.n)] : -1;
    }
#pragma unroll
    for (int u = 0; u < EACH; u++) {
      int seq = (first + u * HALF + rank) / h.n;
      const int at = each == 1 ? block[u] : block[u] / each, offset = block[u] - at * each;
      const bool valid = block[u] >= 0 && at < a.max_blocks;
      const int64_t found = valid ? (int64_t)a.tables[seq * a.max_blocks + at] * each + offset
                                  : -1;
      block[u] = found < h.blocks ? (int32_t)found : -1;
    }
#pragma unroll
    for (int u = 0; u < EACH; u++)
      slot[u] = within(block[u], h.blocks) ? h.slot_of[block[u]] : h.slots;
#pragma unroll
    for (int u = 0; u < EACH; u++) {
      int e = first + u * HALF + rank;
      bool hit = within(slot[u], h.slots), miss = slot[u] < 0; /* -1, or a claim */
      if (hit) atomicOr(h.used + slot[u] / 32, 1u << slot[u] % 32);
      if (miss) atomicMin(h.slot_of + block[u], INT32_MIN + e);
      if (e < h.entries) h.found[e] = hit ? slot[u] : miss ? mark(block[u]) : -1;
      unsigned hits = __ballot_sync(ALL_LANES, hit), misses = __ballot_sync(ALL_LANES, miss);
      if (e % WARP == 0 && e < h.entries) {
        h.sets.bits(HIT)[e / 32] = hits;
        h.sets.bits(MISS)[e / 32] = misses;
      }
    }
  }
}

__device__ __forceinline__ void read_slots(const head &h, int rank) {
  constexpr int EACH = 8;
  for (int first = 0; first < h.slots; first += EACH * HALF) {
    int32_t slot[EACH], held[EACH];
    float priority[EACH];
#pragma unroll
    for (int u = 0; u < EACH; u++) {
      int p = first + u * HALF + rank;
      slot[u] = p < h.slots ? h.order[p] : -1;
    }
#pragma unroll
    for (int u = 0; u < EACH; u++)
      held[u] = within(slot[u], h.slots) ? h.block_of[slot[u]] : h.blocks;
#pragma unroll
    for (int u = 0; u < EACH; u++)
      priority[u] = h.priority && within(held[u], h.blocks) ? h.priority[held[u]] : NAN;
#pragma unroll
    for (int u = 0; u < EACH; u++) {
      int p = first + u * HALF + rank;
      if (p >= h.slots) break;
      h.order_old[p] = slot[u];
      if (held[u] == -1) h.keys[p] = KEY_FREE;
      else if (!within(held[u], h.blocks)) h.keys[p] = KEY_FIXED; /* a broken state */
      else h.keys[p] = max(order_key(priority[u]), KEY_NAN);
    }
  }
}

/* ---- 2: number the entries ----------------------------------------------------------- */

/* Finds the first entry of each missing block: the one whose claim stands in slot_of. */
__device__ __forceinline__ void find_leaders(const head &h) {
  constexpr int EACH = 4;
  for (int first = 0; first < h.entries; first += EACH * THREADS) {
    int32_t claim[EACH];
#pragma unroll
    for (int u = 0; u < EACH; u++) {
      int e = first + u * THREADS + threadIdx.x;
      int32_t found = e < h.entries ? h.found[e] : -1;
      claim[u] = found < -1 ? __ldcg(h.slot_of + mark(found)) : -1;
    }
#pragma unroll
    for (int u = 0; u < EACH; u++) {
      int e = first + u * THREADS + threadIdx.x;
      unsigned leaders = __ballot_sync(ALL_LANES, claim[u] == INT32_MIN + e);
      if (e % WARP == 0 && e < h.entries) h.sets.bits(LEADER)[e / 32] = leaders;
    }
  }
}

/* Numbers the members of all sets; `total` has their counts. Ends with a barrier. */
__device__ __forceinline__ void number_entries(const head &h, int (&total)[SETS],
                                               int (*shared)[WARP]) {
#pragma unroll
  for (int set = 0; set < SETS; set++) total[set] = 0;
  for (int first = 0; first < h.sets.words; first += THREADS) {
    const int w = first + threadIdx.x;
    int before[SETS], sum[SETS];
#pragma unroll
    for (int set = 0; set < SETS; set++)
      before[set] = w < h.sets.words ? __popc(h.sets.bits(set)[w]) : 0;
    block_scan(before, sum, shared);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      if (w < h.sets.words) h.sets.before(set)[w] = total[set] + before[set];
      total[set] += sum[set];
    }
  }
  __syncthreads();
}

/* Counts a call for the block of a hit. */
__device__ __forceinline__ void count_use(const head &h, int32_t slot, bool is_ahead) {
  const int32_t block = h.block_of[slot];
  if (!within(block, h.blocks)) return;
  if (h.uses && !is_ahead) h.uses[block] += 1;
  if (h.age) h.age[block] = 0;
}

/* Marks the slots of hits, which cannot be victims. Counts this thread's free and other
 * candidates, and the hits that clear a mark of `ahead`. */
__device__ __forceinline__ void mark_used(const head &h, bool is_ahead, int (&count)[3]) {
  count[0] = count[1] = count[2] = 0;
  for (int p = threadIdx.x; p < h.slots; p += THREADS) {
    const int32_t slot = h.order_old[p];
    uint32_t key = h.keys[p];
    if (within(slot, h.slots) && (h.used[slot / 32] >> slot % 32 & 1)) {
      h.keys[p] = key = KEY_USED;
      if (h.uses || h.age) count_use(h, slot, is_ahead);
      if (h.ahead && !is_ahead && h.ahead[slot] == 1) {
        h.ahead[slot] = 0;
        count[2]++;
      }
    }
    count[0] += key == KEY_FREE;
    count[1] += key != KEY_FREE && key < KEY_FIXED;
  }
}

/* ---- 3: the last victim -------------------------------------------------------------- */

/* Victims are slots with keys below `edge`, and the first `ties` with a key equal to it. */
struct victims {
  uint32_t edge;
  int ties;
};

/* The wanted-th smallest key, by digits of 11, 11 and 10 bits from the top. */
__device__ __forceinline__ victims search_keys(const head &h, int wanted,
                                               int (*shared)[WARP]) {
  __shared__ int counts[DIGITS], chosen[2]; /* the digit; how many keys are below it */
  uint32_t prefix = 0;
  for (int pass = 0, shift = 32; pass < 3; pass++) {
    const int bits = pass < 2 ? 11 : 10, shift_above = shift;
    shift -= bits;
    for (int i = threadIdx.x; i < DIGITS; i += THREADS) counts[i] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < h.slots; p += THREADS) {
      const uint32_t key = h.keys[p];
      if (pass == 0 || key >> shift_above == prefix >> shift_above)
        atomicAdd(counts + (key >> shift & ((1u << bits) - 1)), 1);
    }
    __syncthreads();
    const int digit = 2 * threadIdx.x, low = counts[digit], both = low + counts[digit + 1];
    int before[1] = {both}, total[1];
    block_scan(before, total, shared);
    if (before[0] < wanted && wanted <= before[0] + both) { /* true for one thread */
      const bool high = wanted > before[0] + low;
      chosen[0] = digit + high;
      chosen[1] = before[0] + (high ? low : 0);
    }
    __syncthreads();
    prefix |= (uint32_t)chosen[0] << shift;
    wanted -= chosen[1];
  }
  return {prefix, wanted};
}

/* ---- 4: victims and the new order ---------------------------------------------------- */

/* Puts every leader's block into the list of misses. The first `filled` of them get a slot;
 * the others (only in a broken state) have none. */
__device__ __forceinline__ void list_misses(const head &h, int filled) {
  for (int e = threadIdx.x; e < h.entries; e += THREADS) {
    if (!h.sets.has(LEADER, e)) continue;
    const int m = h.sets.rank(LEADER, e), block = mark(h.found[e]);
    if (m < filled) h.miss_from[m] = block;
    else h.slot_of[block] = -1;
  }
  for (int m = filled + threadIdx.x; m < h.entries; m += THREADS)
    h.miss_from[m] = h.miss_to[m] = -1;
}

/* Makes the block of a slot that was not used older. */
__device__ __forceinline__ void grow_older(const head &h, int32_t slot) {
  const int32_t block = within(slot, h.slots) ? h.block_of[slot] : -1;
  if (within(block, h.blocks)) h.age[block] += 1;
}

/* Each warp walks over a stretch of the old order, once to count and once to write. */
__device__ __forceinline__ void renew_order(const head &h, victims v, int filled,
                                            bool is_ahead, int (*shared)[WARP]) {
  enum { BELOW, EQUAL, USED, COUNTS };
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int stretch = (h.slots + THREADS - 1) / THREADS * WARP;
  const int begin = min(warp * stretch, h.slots), end = min(begin + stretch, h.slots);
  int before[COUNTS] = {}, total[COUNTS];
  for (int p = begin + lane; p < end; p += WARP) {
    const uint32_t key = h.keys[p];
    before[BELOW] += key < v.edge;
    before[EQUAL] += key == v.edge;
    before[USED] += key == KEY_USED;
  }
  block_scan(before, total, shared);
#pragma unroll
  for (int k = 0; k < COUNTS; k++) before[k] = __shfl_sync(ALL_LANES, before[k], 0);

  const int kept = h.slots - total[USED] - filled;
  const unsigned earlier = (1u << lane) - 1;
  for (int first = begin; first < end; first += WARP) {
    const int p = first + lane;
    const uint32_t key = p < end ? h.keys[p] : KEY_FIXED;
    const unsigned below = __ballot_sync(ALL_LANES, key < v.edge);
    const unsigned equal = __ballot_sync(ALL_LANES, key == v.edge);
    const unsigned used = __ballot_sync(ALL_LANES, key == KEY_USED);
    const int rank_equal = before[EQUAL] + __popc(equal & earlier);
    const bool victim = key < v.edge || (key == v.edge && rank_equal < v.ties);
    /* Before this one come all smaller keys and min(equal, ties) of the equal ones. */
    const int m = before[BELOW] + __popc(below & earlier) + min(rank_equal, v.ties);
    const int taken = m + before[USED] + __popc(used & earlier);
    if (p < end) {
      const int32_t slot = h.order_old[p];
      h.order[victim || key == KEY_USED ? kept + taken : p - taken] = slot;
      if (victim) h.miss_to[m] = slot;
      else if (h.age && !is_ahead && key != KEY_USED) grow_older(h, slot);
    }
    before[BELOW] += __popc(below);
    before[EQUAL] += __popc(equal);
    before[USED] += __popc(used);
  }
}

/* ---- 5, 6: move in, and write the results -------------------------------------------- */

__device__ __forceinline__ void fill_slots(const head &h, int filled, bool is_ahead) {
  for (int m = threadIdx.x; m < filled; m += THREADS) {
    const int32_t slot = h.miss_to[m], block = h.miss_from[m], held = h.block_of[slot];
    if (within(held, h.blocks)) h.slot_of[held] = -1;
    h.block_of[slot] = block;
    h.slot_of[block] = slot;
    if (h.ahead) h.ahead[slot] = is_ahead;
    if (h.uses) h.uses[block] = !is_ahead;
    if (h.age) h.age[block] = 0;
  }
}

/* Puts entry e into the row's list for this set, if the set has it. The entries of the row are
 * row ... row + h.n - 1. Pads the end of the list with -1. */
__device__ __forceinline__ void part(const head &h, int set, int e, int row, int64_t at,
                                     int32_t logical, int32_t slot, int32_t *logicals,
                                     int32_t *slots) {
  const int first = h.sets.rank(set, row), count = h.sets.rank(set, row + h.n) - first;
  if (h.sets.has(set, e)) {
    const int64_t place = at + h.sets.rank(set, e) - first;
    logicals[place] = logical;
    slots[place] = slot;
  }
  if (e - row >= count) logicals[at + e - row] = slots[at + e - row] = -1;
}

__device__ __forceinline__ void tell(const kvl_hot_resolve_args &a, const head &h) {
  constexpr int EACH = 4;
  for (int first = 0; first < h.entries; first += EACH * THREADS) {
    int32_t slot[EACH];
#pragma unroll
    for (int u = 0; u < EACH; u++) {
      const int e = first + u * THREADS + threadIdx.x;
      const int32_t found = e < h.entries ? h.found[e] : -1;
      slot[u] = found < -1 ? __ldcg(h.slot_of + mark(found)) : found;
    }
#pragma unroll
    for (int u = 0; u < EACH; u++) {
      const int e = first + u * THREADS + threadIdx.x;
      if (e >= h.entries) break;
      const int seq = e / h.n, row = seq * h.n;
      const int64_t at = ((int64_t)seq * h.kv_heads + h.kv_head) * h.n;
      a.slots[at + e - row] = slot[u];
      if (!a.hit_logical) continue;
      const int64_t list = seq * a.selection_heads + (a.selection_heads > 1 ? h.kv_head : 0);
      const int32_t logical = a.selection[list * h.n + e - row];
      part(h, HIT, e, row, at, logical, slot[u], a.hit_logical, a.hit_slots);
      part(h, MISS, e, row, at, logical, slot[u], a.miss_logical, a.miss_slots);
    }
  }
}

}  // namespace hot
}  // namespace kvl

#endif
