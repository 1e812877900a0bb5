/* The shared memory of a thread block of paged_wgmma.cuh, its barriers, and the warps that
 * fill it: one finds the work, one brings K, one V and one Q. */
#ifndef KVL_CUDA_WGMMA_MEMORY_CUH
#define KVL_CUDA_WGMMA_MEMORY_CUH

#include "wgmma_plan.cuh"

namespace kvl {

#if KVL_SM90A

/* The layout: Q [Q_STAGES, consumers, PARTS, 64, ATOM], K and V [STAGES, GROUPS, PARTS, 8,
 * ATOM], all in swizzled atoms; then what each consumer's warp writes, a part at a time [16,
 * 64]. */
template <class shape> struct wgmma_memory {
  static constexpr int STAGES = shape::STAGES, QS = shape::Q_STAGES, SLOTS = 4;
  static constexpr int CONSUMER_WARPS = 4 * shape::CONSUMERS, READERS = CONSUMER_WARPS + 3;
  static constexpr int BARRIERS = 4 * STAGES + 2 * QS + 2 * SLOTS + 1;
  /* What consumers know of a tile: the position where each eight keys begin, or NO_KEYS; and
   * its first and last position (the last is INT_MAX when some keys do not exist). */
  int positions[STAGES][shape::GROUPS];
  int2 spans[STAGES];
  wgmma_work work[SLOTS];
  float scale; /* turns scores into base 2 */
  alignas(8) uint64_t barriers[BARRIERS];

  __device__ uint32_t q(int stage, int consumer) const {
    return tiles() + stage * shape::Q_BYTES + consumer * shape::Q_ROWS_BYTES;
  }
  __device__ uint32_t k(int stage) const {
    return tiles() + QS * shape::Q_BYTES + stage * shape::TILE_BYTES;
  }
  __device__ uint32_t v(int stage) const { return k(STAGES + stage); }
  __device__ uint32_t out(int warp) const {
    return k(2 * STAGES) + warp * shape::OUT_WARP_BYTES;
  }
  __device__ uint32_t k_full(int s) const { return barrier(s); }
  __device__ uint32_t v_full(int s) const { return barrier(STAGES + s); }
  __device__ uint32_t k_empty(int s) const { return barrier(2 * STAGES + s); }
  __device__ uint32_t v_empty(int s) const { return barrier(3 * STAGES + s); }
  __device__ uint32_t q_full(int s) const { return barrier(4 * STAGES + s); }
  __device__ uint32_t q_empty(int s) const { return barrier(4 * STAGES + QS + s); }
  __device__ uint32_t work_full(int s) const { return barrier(4 * STAGES + 2 * QS + s); }
  __device__ uint32_t work_empty(int s) const { return work_full(SLOTS + s); }
  __device__ uint32_t side() const { return barrier(BARRIERS - 1); }

  __device__ void init(const kvl_paged_attention_args &a) {
    scale = a.scale * LOG2E;
    for (int i = 0; i < STAGES; i++) {
      barrier_init(k_full(i), WARP);
      barrier_init(v_full(i), 1);
      barrier_init(k_empty(i), CONSUMER_WARPS);
      barrier_init(v_empty(i), CONSUMER_WARPS);
    }
    for (int i = 0; i < QS; i++) {
      barrier_init(q_full(i), 1);
      barrier_init(q_empty(i), CONSUMER_WARPS);
    }
    for (int i = 0; i < SLOTS; i++) {
      barrier_init(work_full(i), 1);
      barrier_init(work_empty(i), READERS * WARP);
    }
    barrier_init(side(), 1);
    barrier_init_done();
  }

  /* Work number n of this thread block, for the lanes of a warp. It stays until all readers
   * have called work_done. */
  __device__ const wgmma_work &wait_work(uint32_t n) const {
    barrier_wait(work_full(n % SLOTS), n / SLOTS & 1);
    return work[n % SLOTS];
  }
  __device__ void work_done(uint32_t n) const { barrier_arrive(work_empty(n % SLOTS)); }

private:
  __device__ uint32_t barrier(int i) const { return shared_address(barriers) + 8 * i; }
  static __device__ uint32_t tiles() {
    extern __shared__ char dynamic[];
    return (shared_address(dynamic) + 1023) & ~1023u;
  }
};

/* Calls f with all the work of this thread block. A warp calls it. */
template <class shape, class F>
__device__ __forceinline__ void each_work(const wgmma_memory<shape> &memory, F f) {
  for (uint32_t n = 0;; n++) {
    const wgmma_work w = memory.wait_work(n);
    memory.work_done(n);
    if (w.tokens == 0) return;
    f(w);
  }
}

/* Where 16-byte piece `piece` of row `row` lies, in atoms one after the other with PIECES
 * pieces a row. */
template <int PIECES> __device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  return row * PIECES * 16 + (piece ^ (PIECES == 8 ? row : row / 2) % PIECES) * 16;
}

/* ---- producers ------------------------------------------------------------------------- */

/* One warp finds the work, up to SLOTS pieces ahead. */
template <class shape>
__device__ void find_work(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                          wgmma_memory<shape> &memory) {
  constexpr int SLOTS = wgmma_memory<shape>::SLOTS;
  uint32_t n = 0;
  auto give = [&](const wgmma_work &w) {
    const int slot = n % SLOTS;
    barrier_wait(memory.work_empty(slot), (n / SLOTS & 1) ^ 1);
    if (threadIdx.x % WARP == 0) {
      memory.work[slot] = w;
      barrier_arrive(memory.work_full(slot));
    }
    n++;
  };
  if (plan.shares > 0) each_piece<shape>(a, plan, give);
  else each_item<shape>(a, plan, give);
  wgmma_work none;
  none.tokens = 0;
  give(none);
}

/* One warp brings all tiles of K, or of V. Lane g looks up eight keys, one tile ahead, and the
 * first lane of a box copies it. */
template <class shape, bool V>
__device__ void bring_tiles(const kvl_paged_attention_args &a, const CUtensorMap &map,
                            const wgmma_plan &plan, wgmma_memory<shape> &memory) {
  constexpr int GROUPS = shape::GROUPS, STAGES = shape::STAGES;
  const int lane = threadIdx.x % WARP, g = lane % GROUPS, block_size = a.cache.block_size;
  uint32_t step = 0, side_parity = 0;
  each_work<shape>(memory, [&](const wgmma_work &w) {
    int entry = 0, token = 0;
    auto look_up = [&](int tile) {
      const int key = w.first_key + max(tile, 0) * shape::KEYS + g * 8;
      entry = plan.by_block.quotient(key);
      token = key - entry * block_size;
      return wgmma_key(a, w, entry, token);
    };
    wgmma_key next = look_up(w.tiles - 1);
    for (int tile = w.tiles - 1; tile >= 0; tile--, step++) {
      const int position = next.position, from = token / 8;
      const int row = (next.physical * 2 + V) * a.cache.kv_heads + w.kv_head;
      const bool there = position != NO_KEYS;
      const bool leads = there && lane < GROUPS && g % plan.box == 0;
      const int bytes = __popc(__ballot_sync(ALL_LANES, leads)) * plan.box *
                        shape::GROUP_BYTES;
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
      }
      if (lane == 0) barrier_arrive_expect(arrive, bytes);
      else if (!V) barrier_arrive(full);
      __syncwarp();
      if (leads) copy_box(to + g * shape::GROUP_BYTES, &map, from, row, arrive);
      next = look_up(tile - 1);
      if (!V || whole) continue;
      barrier_wait(memory.side(), side_parity);
      side_parity ^= 1;
      constexpr int PIECES = shape::ATOM / 8; /* of 16 bytes, in an atom's row */
      for (int i = 0; i < GROUPS; i++) {
        const int first = __shfl_sync(ALL_LANES, position, i);
        const int keys = first == NO_KEYS ? 0 : min(8, w.length - first);
        for (int piece = keys * PIECES + lane; piece < 8 * PIECES; piece += WARP)
          for (int part = 0; part < shape::PARTS; part++)
            store_shared(to + i * shape::GROUP_BYTES + part * shape::ATOM_BYTES + piece * 16,
                         make_uint4(0, 0, 0, 0));
      }
      fence_async();
      barrier_arrive_warp(full, lane);
    }
  });
}

/* One warp brings the rows of Q, Q_STAGES - 1 items ahead. */
template <class T, class shape>
__device__ void bring_queries(const kvl_paged_attention_args &a,
                              wgmma_memory<shape> &memory) {
  constexpr int D = shape::D, QS = shape::Q_STAGES, PIECES = D / 8;
  constexpr int IN_ATOM = shape::ATOM / 8, ROW_BYTES = 2 * shape::ATOM;
  constexpr int SETS = shape::ROWS / WARP;
  const int lane = threadIdx.x % WARP;
  uint32_t step = 0;
  each_work<shape>(memory, [&](const wgmma_work &w) {
    const query_rows rows = w.rows();
    const T *q = (const T *)a.q + (rows.token0 * a.heads + w.head0) * D;
    /* Where rows `lane`, `lane` + 32, ... begin, in rows of q; -1: there is no such row. */
    int begins[SETS];
#pragma unroll
    for (int h = 0; h < SETS; h++) {
      const int r = h * WARP + lane, token = r / w.heads_each;
      begins[h] = r < rows.count ? token * (int)a.heads + r - token * w.heads_each : -1;
    }
    const int s = step % QS;
    barrier_wait(memory.q_empty(s), (step++ / QS & 1) ^ 1);
#pragma unroll
    for (int h = 0; h < SETS; h++) {
      const uint32_t to = memory.q(s, h / 2);
#pragma unroll 8
      for (int i = lane; i < WARP * PIECES; i += WARP) {
        const int r = i / PIECES, piece = i % PIECES, row = h % 2 * WARP + r;
        const int begin = __shfl_sync(ALL_LANES, begins[h], r);
        copy_async(
            to + piece / IN_ATOM * 64 * ROW_BYTES + swizzled<IN_ATOM>(row, piece % IN_ATOM),
            begin < 0 ? q : q + (int64_t)begin * D + piece * 8, begin >= 0);
      }
    }
    copy_commit();
    copy_wait<0>();
    fence_async();
    barrier_arrive_warp(memory.q_full(s), lane);
  });
}

#endif

}  // namespace kvl

#endif
