/* What a thread block of paged_wgmma.cuh works on, and with: its shape, the items of work and
 * how each of its warps finds them, the layout of shared memory with its barriers, and the
 * warps that fill it. */
#ifndef KVL_CUDA_WGMMA_WORK_CUH
#define KVL_CUDA_WGMMA_WORK_CUH

#include "hopper.cuh"
#include "paged_output.cuh"

namespace kvl {

template <int D_> struct wgmma_shape {
  static constexpr int D = D_, KEYS = 128, STAGES = D == 64 ? 4 : 2, Q_STAGES = 2;
  static constexpr bool TURNS = D == 64; /* consumers take turns at the products */
  static constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS;
  static constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
  static constexpr int GROUPS = KEYS / 8; /* of keys; a swizzle atom has 8 rows */
  static constexpr int HALVES = D / 64;   /* of a row; an atom is 64 numbers wide */
  static constexpr int GROUP_BYTES = HALVES * 1024, TILE_BYTES = GROUPS * GROUP_BYTES;
  static constexpr int Q_ROWS_BYTES = 64 * D * 2, Q_BYTES = CONSUMERS * Q_ROWS_BYTES;
  /* One KiB is for alignment: dynamic shared memory need not begin at an atom. */
  static constexpr int SHARED_BYTES = Q_STAGES * Q_BYTES + 2 * STAGES * TILE_BYTES + 1024;
};

constexpr int NO_KEYS = INT_MAX - 8; /* the position of keys that do not exist */

/* What the host works out. Items are numbered tile by tile, from the last tile on, and within
 * a tile by lane (KV head and subgroup of its heads): with a causal mask, long items come
 * first. */
struct wgmma_plan {
  int box; /* how many groups of eight keys one copy brings */
  int tokens_tile, subgroups, lanes, items;
};

/* prefix_count by a single warp. */
template <class F> __device__ __forceinline__ int warp_prefix_count(int n, F holds) {
  const int lane = threadIdx.x % WARP;
  int low = 0;
  while (n > 0) {
    const int step = (n + WARP - 1) / WARP, end = min((lane + 1) * step, n);
    const bool whole = lane * step < n && holds(low + end - 1);
    const int full = min(__popc(__ballot_sync(ALL_LANES, whole)) * step, n);
    low += full;
    n = min(step - 1, n - full);
  }
  return low;
}

/* An item: the rows of a tile of tokens for one KV head, and the keys that they see. Every
 * warp finds its items by itself. */
struct wgmma_work {
  int token0, tokens, position0; /* tokens 0: nothing to do */
  int kv_head, head0, heads_each, seq, length;
  int first_key; /* of tile 0; no row's window reaches further back */
  int tiles;     /* at least one, even if it has no keys */

  template <class shape>
  static __device__ wgmma_work find(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                                    int item) {
    wgmma_work w;
    const int tile = item / plan.lanes, lane = item - tile * plan.lanes;
    const int index = plan.items / plan.lanes - 1 - tile;
    w.tokens = 0;
    w.seq = warp_prefix_count(
                (int)a.seqs,
                [&](int s) { return a.starts[s] / plan.tokens_tile + s <= index; }) -
            1;
    if (w.seq < 0) return w;
    const int start = a.starts[w.seq], end = a.starts[w.seq + 1];
    w.token0 = start + (index - (start / plan.tokens_tile + w.seq)) * plan.tokens_tile;
    if (w.token0 >= end) return w;
    w.tokens = min(plan.tokens_tile, end - w.token0);
    w.kv_head = lane / plan.subgroups;
    const int group = (int)(a.heads / a.cache.kv_heads);
    const int first = (lane - w.kv_head * plan.subgroups) * shape::ROWS;
    w.head0 = w.kv_head * group + first;
    w.heads_each = min(group - first, shape::ROWS);
    const int length = a.lens[w.seq], block_size = a.cache.block_size;
    w.position0 = length - (end - w.token0);
    w.length = (int)min((int64_t)length, a.max_blocks * block_size);

    int keys = max(0, min(w.length, a.causal ? w.position0 + w.tokens : INT_MAX));
    int skip = window_begin(a, w.position0) / block_size;
    if (a.selection) {
      const int32_t *selection = a.selection + w.list(a);
      const unsigned seen = (keys + block_size - 1) / block_size, before = skip;
      auto listed = [&](unsigned limit) {
        return warp_prefix_count((int)a.max_selected,
                                 [=](int i) { return (unsigned)selection[i] < limit; });
      };
      keys = listed(seen) * block_size;
      skip = listed(before);
    }
    w.first_key = skip * block_size;
    w.tiles = max(1, (keys - w.first_key + shape::KEYS - 1) / shape::KEYS);
    return w;
  }
  __device__ int64_t list(const kvl_paged_attention_args &a) const {
    return (seq * a.selection_heads + (a.selection_heads > 1 ? kv_head : 0)) * a.max_selected;
  }
  __device__ int64_t slot_list(const kvl_paged_attention_args &a) const {
    return (seq * a.slot_heads + (a.slot_heads > 1 ? kv_head : 0)) * a.max_selected;
  }
  __device__ query_rows rows() const {
    return {token0, head0, heads_each, tokens * heads_each};
  }
};

/* Calls f for the items of this thread block. Their order turns around each round, so that
 * every block gets long and short ones. */
template <class shape, class F>
__device__ __forceinline__ void each_work(const kvl_paged_attention_args &a,
                                          const wgmma_plan &plan, F f) {
  const int grid = gridDim.x, rounds = (plan.items + grid - 1) / grid;
  for (int round = 0; round < rounds; round++) {
    const int item = round * grid + (round & 1 ? grid - 1 - (int)blockIdx.x : blockIdx.x);
    if (item >= plan.items) continue;
    const wgmma_work w = wgmma_work::find<shape>(a, plan, item);
    if (w.tokens > 0) f(w);
  }
}

#if KVL_SM90A

/* The layout of shared memory: Q [Q_STAGES, consumers, D / 64, 64, 64], K and V [STAGES,
 * GROUPS, HALVES, 8, 64], all in atoms of eight rows of 128 bytes. */
template <class shape> struct wgmma_memory {
  static constexpr int STAGES = shape::STAGES, QS = shape::Q_STAGES;
  static constexpr int BARRIERS = 4 * STAGES + 2 * shape::CONSUMERS * QS + 1;
  /* What consumers know of a tile: the position where each eight keys begin, or NO_KEYS; and
   * its first and last position (the last is INT_MAX when some keys do not exist). */
  int positions[STAGES][shape::GROUPS];
  int2 spans[STAGES];
  float scale; /* turns scores into base 2 */
  alignas(8) uint64_t barriers[BARRIERS];

  __device__ uint32_t q(int stage, int consumer) const {
    return tiles() + stage * shape::Q_BYTES + consumer * shape::Q_ROWS_BYTES;
  }
  __device__ uint32_t k(int stage) const {
    return tiles() + QS * shape::Q_BYTES + stage * shape::TILE_BYTES;
  }
  __device__ uint32_t v(int stage) const { return k(STAGES + stage); }
  __device__ uint32_t k_full(int s) const { return barrier(s); }
  __device__ uint32_t v_full(int s) const { return barrier(STAGES + s); }
  __device__ uint32_t k_empty(int s) const { return barrier(2 * STAGES + s); }
  __device__ uint32_t v_empty(int s) const { return barrier(3 * STAGES + s); }
  __device__ uint32_t q_full(int s, int c) const { return barrier(4 * STAGES + s * 2 + c); }
  __device__ uint32_t q_empty(int s, int c) const { return q_full(QS + s, c); }
  __device__ uint32_t side() const { return barrier(BARRIERS - 1); }

  __device__ void init(const kvl_paged_attention_args &a) {
    scale = a.scale * LOG2E;
    for (int i = 0; i < BARRIERS; i++) {
      const bool k_or_v_empty = i >= 2 * STAGES && i < 4 * STAGES;
      const bool q_empty = i >= 4 * STAGES + QS * shape::CONSUMERS && i < BARRIERS - 1;
      barrier_init(barrier(i), k_or_v_empty ? 4 * shape::CONSUMERS : q_empty ? 4 : 1);
    }
    barrier_init_done();
  }

private:
  __device__ uint32_t barrier(int i) const { return shared_address(barriers) + 8 * i; }
  static __device__ uint32_t tiles() {
    extern __shared__ char dynamic[];
    return (shared_address(dynamic) + 1023) & ~1023u;
  }
};
static_assert(wgmma_shape<64>::CONSUMERS == 2, "q_full counts on it");

/* ---- producers ------------------------------------------------------------------------- */

/* One warp brings all tiles of K, or of V. Lane g looks up eight keys, and the first lane of
 * a box copies it. A tile is looked up while its stage of the ring is still in use. */
template <class shape, bool V>
__device__ void bring_tiles(const kvl_paged_attention_args &a, const CUtensorMap &map,
                            const wgmma_plan &plan, wgmma_memory<shape> &memory) {
  constexpr int GROUPS = shape::GROUPS, STAGES = shape::STAGES;
  const int lane = threadIdx.x % WARP, g = lane % GROUPS, block_size = a.cache.block_size;
  uint32_t step = 0, side_parity = 0;
  each_work<shape>(a, plan, [&](const wgmma_work &w) {
    for (int tile = w.tiles - 1; tile >= 0; tile--, step++) {
      const int key = w.first_key + tile * shape::KEYS + g * 8;
      const int entry = key / block_size, token = key - entry * block_size;
      int position = NO_KEYS, row = 0, block = entry;
      if (a.selection) block = entry < a.max_selected ? a.selection[w.list(a) + entry] : -1;
      if (block >= 0 && block < a.max_blocks && block * block_size + token < w.length) {
        const int physical = a.slots ? a.slots[w.slot_list(a) + entry]
                                     : a.tables[w.seq * a.max_blocks + block];
        if (physical >= 0 && physical < a.cache.blocks) {
          position = block * block_size + token;
          row = (physical * 2 + V) * a.cache.kv_heads + w.kv_head;
        }
      }
      const bool there = position != NO_KEYS;
      const bool leads = there && lane < GROUPS && g % plan.box == 0;
      const int boxes = __popc(__ballot_sync(ALL_LANES, leads));
      /* Keys that do not exist have weight 0, but 0 * NaN is NaN: their V must be cleared. */
      const bool whole = __all_sync(ALL_LANES, there && (!V || position + 8 <= w.length));
      const int s = step % STAGES;
      const uint32_t to = V ? memory.v(s) : memory.k(s);
      const uint32_t full = V ? memory.v_full(s) : memory.k_full(s);
      const uint32_t arrive = V && !whole ? memory.side() : full;
      barrier_wait(V ? memory.v_empty(s) : memory.k_empty(s), (step / STAGES & 1) ^ 1);
      if (!V) {
        if (lane < GROUPS) memory.positions[s][lane] = position;
        if (lane == 0) memory.spans[s].x = position;
        if (lane == GROUPS - 1) memory.spans[s].y = whole ? position + 7 : INT_MAX;
        __syncwarp();
      }
      if (lane == 0) barrier_arrive_expect(arrive, boxes * plan.box * shape::GROUP_BYTES);
      __syncwarp();
      if (leads) copy_box(to + g * shape::GROUP_BYTES, &map, token / 8, row, arrive);
      if (!V || whole) continue;
      barrier_wait(memory.side(), side_parity);
      side_parity ^= 1;
      for (int i = 0; i < GROUPS; i++) {
        const int first = __shfl_sync(ALL_LANES, position, i);
        const int keys = first == NO_KEYS ? 0 : min(8, w.length - first);
        for (int piece = keys * 8 + lane; piece < 64; piece += WARP)
          for (int h = 0; h < shape::HALVES; h++)
            store_shared(to + i * shape::GROUP_BYTES + h * 1024 + piece * 16,
                         make_uint4(0, 0, 0, 0));
      }
      fence_async();
      barrier_arrive_warp(full, lane);
    }
  });
}

/* One warp brings a consumer's rows of Q, one item ahead. */
template <class T, class shape>
__device__ void bring_queries(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                              wgmma_memory<shape> &memory, int consumer) {
  constexpr int D = shape::D, QS = shape::Q_STAGES, PIECES = D / 8;
  const int lane = threadIdx.x % WARP;
  uint32_t step = 0;
  each_work<shape>(a, plan, [&](const wgmma_work &w) {
    const query_rows rows = w.rows();
    const T *q = (const T *)a.q + (rows.token0 * a.heads + w.head0) * D;
    /* Where rows `lane` and `lane` + 32 begin, in rows of q; -1: there is no such row. */
    int begins[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = consumer * 64 + h * WARP + lane, token = r / w.heads_each;
      begins[h] = r < rows.count ? token * (int)a.heads + r - token * w.heads_each : -1;
    }
    const int s = step % QS;
    const uint32_t to = memory.q(s, consumer);
    barrier_wait(memory.q_empty(s, consumer), (step++ / QS & 1) ^ 1);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll 8
      for (int i = lane; i < WARP * PIECES; i += WARP) {
        const int r = i / PIECES, piece = i % PIECES;
        const int begin = __shfl_sync(ALL_LANES, begins[h], r);
        copy_async(to + piece / 8 * 8192 + (h * WARP + r) * 128 + (piece % 8 ^ r % 8) * 16,
                   begin < 0 ? q : q + (int64_t)begin * D + piece * 8, begin >= 0);
      }
    copy_commit();
    copy_wait<0>();
    fence_async();
    barrier_arrive_warp(memory.q_full(s, consumer), lane);
  });
}

#endif

}  // namespace kvl

#endif
