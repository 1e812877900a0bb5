/* The shared memory of a thread block of paged_wgmma.cuh, its barriers, and the warps that
 * fill it: one finds the work, one brings K, one V and one Q. wgmma_convert.cuh has those that
 * turn 8-bit numbers into 16-bit ones. */
#ifndef KVL_CUDA_WGMMA_MEMORY_CUH
#define KVL_CUDA_WGMMA_MEMORY_CUH

#include "args/attention.h"
#include "cuda/attention/wgmma_plan.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {

constexpr int WORK_FINDER = 3; /* the warp that finds the work */

#if KVL_SM90A

/* What a bias of a query row depends on: the head (for a hook, the head in the group), its
 * ALiBi slope in base 2, the index. It is in shared memory because registers are short. */
struct alignas(16) wgmma_row {
  float slope;
  int at, head;
};

/* The layout: Q [Q_STAGES, consumers, PARTS, 64, ATOM], K and V [STAGES, GROUPS, PARTS, 8,
 * ATOM], all in swizzled atoms; then what each consumer's warp writes, a part at a time [16,
 * 64]; then scales of packed K and V [STAGES, KEYS, SCALES]. */
template <class shape> struct wgmma_memory {
  static constexpr int STAGES = shape::STAGES, QS = shape::Q_STAGES, SLOTS = 4;
  static constexpr int CONSUMER_WARPS = 4 * shape::CONSUMERS;
  static constexpr int COPIERS = shape::COPIERS;
  static constexpr int READERS = CONSUMER_WARPS + 1 + 2 * COPIERS + 4 * shape::BYTES;
  static constexpr int BARRIERS = (shape::BYTES ? 6 : 4) * STAGES + 2 * QS + 2 * SLOTS + 1;
  /* What consumers know of a tile: the indices of its keys (NO_KEYS or more: there is no
   * such key), and the first and last of them (the last is INT_MAX when some keys do not
   * exist), from each of the warps that copy K. */
  alignas(16) int indices[STAGES][shape::KEYS];
  int2 spans[COPIERS][STAGES];
  /* What converters know about a tile of K or V: that nothing is to be changed, or which
   * signs are to be flipped and how many keys of each eight exist. */
  uint32_t changes[shape::BYTES ? 2 : 1][STAGES];
  int8_t kept[shape::BYTES ? 2 : 1][STAGES][shape::GROUPS];
  wgmma_row rows[shape::ROWS]; /* of each consumer's present item; with a bias */
  wgmma_work work[SLOTS];
  float scale; /* turns a consumer's products into scores in base 2 */
  /* For f8e4m3: the same for each consumer's warp, and the unit of Q in each stage. */
  float scales[CONSUMER_WARPS], units[QS];
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
  __device__ uint32_t tile_scales(bool of_v, int s) const {
    return out(CONSUMER_WARPS) + (of_v * STAGES + s) * shape::SCALES_BYTES;
  }
  __device__ uint32_t k_full(int s) const { return barrier(s); }
  __device__ uint32_t v_full(int s) const { return barrier(STAGES + s); }
  __device__ uint32_t k_empty(int s) const { return barrier(2 * STAGES + s); }
  __device__ uint32_t v_empty(int s) const { return barrier(3 * STAGES + s); }
  __device__ uint32_t q_full(int s) const { return barrier(4 * STAGES + s); }
  __device__ uint32_t q_empty(int s) const { return barrier(4 * STAGES + QS + s); }
  __device__ uint32_t work_full(int s) const { return barrier(4 * STAGES + 2 * QS + s); }
  __device__ uint32_t work_empty(int s) const { return work_full(SLOTS + s); }
  __device__ uint32_t side() const { return work_empty(SLOTS); }
  __device__ uint32_t came(bool v, int s) const { return side() + 8 * (1 + v * STAGES + s); }
  /* Barriers of K or V: the one by which a producer signals that a tile is in shared
   * memory, and so on. */
  __device__ uint32_t brought(bool of_v, int s) const {
    return shape::BYTES ? came(of_v, s) : of_v ? v_full(s) : k_full(s);
  }
  __device__ uint32_t full(bool of_v, int s) const { return of_v ? v_full(s) : k_full(s); }
  __device__ uint32_t empty(bool of_v, int s) const { return of_v ? v_empty(s) : k_empty(s); }
  __device__ uint32_t tile(bool of_v, int s) const { return of_v ? v(s) : k(s); }

  __device__ void init(const wgmma_plan &plan, float scale_) {
    const int warps = 4 * plan.consumers, idle = CONSUMER_WARPS - warps;
    scale = scale_;
    for (int i = 0; i < STAGES; i++) {
      const bool by_row = plan.box == 0;
      barrier_init(k_full(i), shape::BYTES ? shape::SHARES : COPIERS * WARP);
      barrier_init(v_full(i), shape::BYTES ? shape::SHARES : by_row ? COPIERS * WARP : 1);
      if (shape::BYTES) barrier_init(came(false, i), WARP);
      if (shape::BYTES) barrier_init(came(true, i), WARP);
      barrier_init(k_empty(i), warps);
      barrier_init(v_empty(i), warps);
    }
    for (int i = 0; i < QS; i++) {
      barrier_init(q_full(i), 1);
      barrier_init(q_empty(i), warps);
    }
    for (int i = 0; i < SLOTS; i++) {
      barrier_init(work_full(i), 1);
      barrier_init(work_empty(i), (READERS - idle) * WARP);
    }
    barrier_init(side(), 1);
    barrier_init_done();
  }

  __device__ int2 span(int s) const {
    int2 all = spans[0][s];
    if (COPIERS > 1) all.y = max(all.y, spans[COPIERS - 1][s].y);
    return all;
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

/* Calls f with all the work of this thread block. A warp calls it. (latent.cuh has a memory of
 * its own.) */
template <class shape, template <class> class Memory, class F>
__device__ __forceinline__ void each_work(const Memory<shape> &memory, F f) {
  for (uint32_t n = 0;; n++) {
    const wgmma_work w = memory.wait_work(n);
    memory.work_done(n);
    if (w.tokens == 0) return;
    f(w);
  }
}

/* The offset of 16-byte piece `piece` of row `row`, in consecutive atoms with PIECES pieces
 * a row. */
template <int PIECES> __device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  return row * PIECES * 16 + (piece ^ (PIECES == 8 ? row : row / 2) % PIECES) * 16;
}

/* Where a consumer's 64 rows lie in its tile. A warp has 16 neighbouring rows of the tile, and a
 * lane numbers n and n + 8 of them. Bits 2 and 3 of a row's number tell its warp: so a few rows
 * are spread over all warps, and with up to 32 rows no lane has a second one. */
constexpr int SECOND_ROW = 32; /* a lane's second row, counted from its first */
__device__ __forceinline__ int tile_row(int r) { return r / 4 % 4 * 16 + r / 16 * 4 + r % 4; }
__device__ __forceinline__ int first_row(int consumer, int warp) {
  return consumer * 64 + warp * 4;
}
/* Row n of a warp, counted from its first. */
__device__ __forceinline__ int next_row(int n) { return n / 4 * 16 + n % 4; }

/* ---- producers ------------------------------------------------------------------------- */

/* Asks the L2 for tables and lengths: cold reads of them would be the first things to wait for.
 * N, the type of a thread's number, decides where ptxas keeps threadIdx afterwards: an int64_t
 * goes to local memory, and leaves a register to the warps that copy. */
template <class N>
__device__ __forceinline__ void ask_for_tables(const kvl_paged_attention_args &a) {
  const N number = (N)blockIdx.x * blockDim.x + threadIdx.x;
  if (number < (a.seqs * a.max_blocks + 31) / 32) prefetch_l2(a.tables + number * 32);
  if (number * 32 < a.seqs) prefetch_l2(a.lens + number * 32);
  if (a.starts && number * 32 < a.seqs) prefetch_l2(a.starts + number * 32);
}

/* One warp finds the work, up to SLOTS pieces ahead, and calls then(work) for each. All others
 * have called begin_after_others. */
template <class shape, template <class> class Memory, class F>
__device__ __forceinline__ void find_work(const kvl_paged_attention_args &a,
                                          const wgmma_plan &plan, Memory<shape> &memory,
                                          F then) {
  constexpr int SLOTS = Memory<shape>::SLOTS;
  uint32_t n = 0;
  auto give = [&](const wgmma_work &w) {
    const int slot = n % SLOTS;
    barrier_wait(memory.work_empty(slot), (n / SLOTS & 1) ^ 1);
    if (threadIdx.x % WARP == 0) {
      memory.work[slot] = w;
      barrier_arrive(memory.work_full(slot));
    }
    n++;
    if (w.tokens > 0) then(w);
  };
  if (plan.has_whole()) {
    begin_after_others();
    each_item<shape>(a, plan, give);
  }
  if (plan.divided > 0) each_piece<shape>(a, plan, plan.has_whole(), give);
  wgmma_work none;
  none.tokens = 0;
  give(none);
}
template <class shape, template <class> class Memory>
__device__ void find_work(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                          Memory<shape> &memory) {
  find_work(a, plan, memory, [](const wgmma_work &) {});
}

/* An f8e4m3 cache's scale of K. Consumers mask products before they scale them, so the
 * scale that they get is positive. The sign goes to K, which becomes 0 if the scale is
 * almost 0. */
struct key_scale {
  float size = 1.f;
  uint32_t signs = 0;
  bool none = false;
  __device__ key_scale(const kvl_paged_attention_args &a, int kv_head) {
    if (!a.cache.k_scale) return;
    const float scale = a.cache.k_scale[kv_head];
    none = fabsf(scale) < 1e-20f;
    size = none ? 1.f : fabsf(scale);
    signs = scale < 0.f ? 0x80808080u : 0u;
  }
};

constexpr uint32_t CHANGE_NOTHING = 1; /* other changes are signs of four numbers */

/* Tells the converters what to change in a tile: lane g has the group that begins at
 * `index`. Keys that do not exist must become 0 where they would reach a sum: V always, and
 * packed K, because its scales are not copied then. */
template <class shape>
__device__ __forceinline__ void tell_changes(bool V, const key_scale &scale,
                                             const wgmma_work &w, wgmma_memory<shape> &memory,
                                             int s, int index, bool whole) {
  const int lane = threadIdx.x % WARP;
  const bool by_index = V || shape::PACKED;
  const bool zero = by_index ? index >= NO_KEYS : scale.none;
  if (lane < shape::GROUPS)
    memory.kept[V][s][lane] = zero ? 0 : by_index ? min(8, w.length - index) : 8;
  const bool as_it_is = by_index ? whole : !scale.none && scale.signs == 0;
  if (lane == 0) memory.changes[V][s] = as_it_is ? CHANGE_NOTHING : V ? 0 : scale.signs;
}

/* One warp brings all tiles of K, or of V. Lane g looks up eight keys, one tile ahead, and the
 * first lane of a box copies it; a box that does not exist lies outside of the map, and becomes
 * zeros. */
template <class shape, bool V>
__device__ void bring_tiles(const kvl_paged_attention_args &a, const wgmma_maps &maps,
                            const wgmma_plan &plan, wgmma_memory<shape> &memory) {
  constexpr int GROUPS = shape::GROUPS, STAGES = shape::STAGES;
  const int lane = threadIdx.x % WARP, g = lane % GROUPS, block_size = a.cache.block_size;
  const int leader = g - g % plan.box, strips = kvl__strips(&a.cache);
  const int outside = (int)a.cache.blocks * strips;
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
      const int index = next.index, from = token / 8;
      const bool there = index != NO_KEYS, filled = there && index + 8 <= w.length;
      const int row = there ? next.physical * strips + kvl__strip(&a.cache, V, w.kv_head)
                            : outside;
      const bool whole = __all_sync(ALL_LANES, V ? filled : there);
      /* Keys past the end have weight 0, but 0 * NaN is NaN: in a block that was copied, their
       * V must be cleared. */
      const bool copied = __shfl_sync(ALL_LANES, there, leader);
      const uint32_t clear = V && !shape::BYTES
                                 ? __ballot_sync(ALL_LANES,
                                                 lane < GROUPS && copied && !filled)
                                 : 0;
      const bool leads = lane < GROUPS && g == leader;
      int bytes = GROUPS * shape::CAME_GROUP_BYTES;
      if constexpr (shape::PACKED) /* scales come for boxes that exist */
        bytes += __popc(__ballot_sync(ALL_LANES, leads && there)) * plan.box *
                 shape::SCALES_GROUP_BYTES;
      const int s = step % STAGES;
      const uint32_t to = memory.tile(V, s);
      const uint32_t full = memory.brought(V, s);
      const uint32_t arrive = clear ? memory.side() : full;
      barrier_wait(memory.empty(V, s), (step / STAGES & 1) ^ 1);
      if (!V) {
        int4 *const indices = (int4 *)memory.indices[s];
        if (lane < GROUPS) {
          indices[2 * lane] = make_int4(index, index + 1, index + 2, index + 3);
          indices[2 * lane + 1] = make_int4(index + 4, index + 5, index + 6, index + 7);
        }
        if (lane == 0) memory.spans[0][s].x = index;
        if (lane == GROUPS - 1) memory.spans[0][s].y = whole ? index + 7 : INT_MAX;
      }
      if constexpr (shape::BYTES)
        tell_changes(V, key_scale(a, w.kv_head), w, memory, s, index, whole);
      if (lane == 0) barrier_arrive_expect(arrive, bytes);
      else if (!V || shape::BYTES) barrier_arrive(full);
      __syncwarp();
      const uint32_t at = to + shape::came(g);
      if (leads && (plan.fills || shape::PARTS > 1))
        copy_box(at, &maps.rows, 0, from, row, arrive);
      if (leads && !plan.fills)
        copy_box(at + (shape::PARTS - 1) * shape::CAME_ATOM_BYTES, &maps.last,
                 shape::D - shape::ATOM, from, row, arrive);
      if constexpr (shape::PACKED)
        if (leads && there)
          copy_bytes(memory.tile_scales(V, s) + g * shape::SCALES_GROUP_BYTES,
                     (const char *)a.cache.memory + row * a.cache.key.bytes +
                         a.cache.key.scales + from * shape::SCALES_GROUP_BYTES,
                     plan.box * shape::SCALES_GROUP_BYTES, arrive);
      next = look_up(tile - 1);
      if (!clear) continue;
      barrier_wait(memory.side(), side_parity);
      side_parity ^= 1;
      constexpr int PIECES = shape::ATOM / 8; /* of 16 bytes, in an atom's row */
      for (uint32_t rest = clear; rest; rest &= rest - 1) {
        const int i = __ffs(rest) - 1, first = __shfl_sync(ALL_LANES, index, i);
        const int keys = first == NO_KEYS ? 0 : w.length - first;
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

/* The same for blocks that are no multiple of eight tokens: each row is copied by itself, 16
 * bytes at a time, and rows that do not exist become 0. COPIERS warps share a tile; this one
 * has the MINE keys of number `share`, and a lane looks up EACH of them. A tile is handed
 * over when its copies have arrived; up to AHEAD later tiles may be under way by then. */
template <class shape>
__device__ void bring_rows(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                           wgmma_memory<shape> &memory, bool V, int share) {
  constexpr int KEYS = shape::KEYS, STAGES = shape::STAGES, MINE = KEYS / shape::COPIERS;
  constexpr int EACH = (MINE + WARP - 1) / WARP;
  constexpr int ATOM_ROW = shape::BYTES ? shape::ATOM : 2 * shape::ATOM; /* bytes */
  constexpr int IN_ATOM = ATOM_ROW / 16, ROWS = WARP / IN_ATOM;          /* of one copy */
  constexpr int AHEAD = STAGES > 2 ? 2 : 1;
  constexpr uint32_t NO_ROW = ~0u;
  const int lane = threadIdx.x % WARP, block_size = a.cache.block_size;
  const int r = lane / IN_ATOM, piece = lane % IN_ATOM, mine = share * MINE;
  /* places[0]: where this lane's piece of row r lies in its group. If a copy brings four rows,
   * the lane also brings row r + 4: places[1]. */
  uint32_t places[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    places[i] = r / 8 * shape::CAME_GROUP_BYTES +
                (shape::BYTES ? (r % 8 + 4 * i) * ATOM_ROW + piece * 16
                              : swizzled<IN_ATOM>((r + 4 * i) % 8, piece));
  const char *const cache = (const char *)a.cache.memory;
  const int row_bytes = a.cache.key.bytes_row;
  /* Row `row` of all strips begins here; scales lie between strips. */
  auto row_at = [&](uint32_t row) {
    int64_t at = (int64_t)row * row_bytes;
    if (shape::PACKED)
      at += (int64_t)plan.by_block.quotient(row) * block_size * (2 * shape::SCALES);
    return at;
  };
  uint32_t step = 0, handed = 0;
  auto hand_over = [&] {
    fence_async();
    barrier_arrive(memory.brought(V, handed++ % STAGES));
  };
  auto finish = [&] {
    copy_wait<0>();
    while (handed < step) hand_over();
  };
  each_work<shape>(memory, [&](const wgmma_work &w) {
    int index[EACH];
    uint32_t row[EACH];
    auto look_up = [&](int tile) {
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        const int key = w.first_key + max(tile, 0) * KEYS + mine +
                        min(j * WARP + lane, MINE - 1);
        const int entry = plan.by_block.quotient(key), token = key - entry * block_size;
        const wgmma_key at(a, w, entry, token);
        index[j] = at.index;
        row[j] = at.physical < 0 ? NO_ROW
                                 : (uint32_t)(at.physical * kvl__strips(&a.cache) +
                                              kvl__strip(&a.cache, V, w.kv_head)) *
                                           block_size +
                                       token;
      }
    };
    /* The scales of eight keys lie side by side; a lane copies 16 bytes. */
    auto copy_scales = [&](int s) {
      if constexpr (shape::PACKED) {
        int first = NO_KEYS;
        bool whole = true;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
          constexpr int PIECES = 4 * shape::SCALES; /* of WARP keys */
          const uint32_t found = __shfl_sync(ALL_LANES, row[j],
                                             lane % PIECES / shape::SCALES * 8);
          const bool there = found != NO_ROW;
          const uint32_t own = there ? found : 0;
          const int64_t at = ((int64_t)plan.by_block.quotient(own) + 1) * block_size *
                                 row_bytes +
                             (int64_t)own * (2 * shape::SCALES);
          if (lane < PIECES)
            copy_async(memory.tile_scales(V, s) + (j * PIECES + lane) * 16,
                       cache + at + lane % shape::SCALES * 16, there);
          const int begin = __shfl_sync(ALL_LANES, index[j], lane % 4 * 8);
          if (lane / 4 == j) first = begin;
          whole = whole && index[j] != NO_KEYS;
        }
        whole = __all_sync(ALL_LANES, whole);
        tell_changes(V, key_scale(a, w.kv_head), w, memory, s, first, whole);
      }
    };
    look_up(w.tiles - 1);
    for (int tile = w.tiles - 1; tile >= 0; tile--) {
      const int s = step % STAGES;
      const uint32_t to = memory.tile(V, s);
      barrier_wait(memory.empty(V, s), (step / STAGES & 1) ^ 1);
      if (!V) {
        bool whole = true;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
          if (j * WARP + lane < MINE) memory.indices[s][mine + j * WARP + lane] = index[j];
          whole = whole && index[j] != NO_KEYS;
        }
        whole = __all_sync(ALL_LANES, whole);
        if (lane == 0) memory.spans[share][s].x = index[0];
        if (lane == WARP - 1) memory.spans[share][s].y = whole ? index[EACH - 1] : INT_MAX;
      }
      if constexpr (shape::F8)
        tell_changes(V, key_scale(a, w.kv_head), w, memory, s, 0, true);
      if constexpr (shape::PACKED) copy_scales(s);
#pragma unroll
      for (int first = 0; first < MINE; first += ROWS) {
        const uint32_t found = __shfl_sync(ALL_LANES, row[first / WARP], first % WARP + r);
        const bool there = found != NO_ROW;
        const char *const from = cache + row_at(there ? found : 0) + piece * 16;
        const uint32_t at = to + shape::came(mine / 8 + first / 8) + places[first % 8 / 4];
#pragma unroll
        for (int part = 0; part < shape::PARTS; part++)
          copy_async(at + part * 8 * ATOM_ROW, from + part * ATOM_ROW,
                     there && part * ATOM_ROW + piece * 16 < row_bytes);
      }
      copy_commit();
      step++;
      if (step - handed > AHEAD) {
        copy_wait<AHEAD>();
        hand_over();
      }
      /* If there is no room for the next tile yet, nothing else can be done ahead. */
      const bool room = barrier_passed(memory.empty(V, step % STAGES),
                                       (step / STAGES & 1) ^ 1);
      if (!__all_sync(ALL_LANES, room)) finish();
      look_up(tile - 1);
    }
  });
  finish();
}

/* Turns rows of Q, which a warp has brought to shared memory, from bf16 into f16: multiplied by
 * a power of two, so that the largest number is about 2^14. Returns the unit, one over that
 * power. Numbers that are 2^38 times smaller than the largest become 0. */
template <class shape>
__device__ __forceinline__ float queries_to_f16(uint32_t at, int bytes) {
  const int lane = threadIdx.x % WARP;
  float top = 0.f;
  for (int i = lane * 16; i < bytes; i += WARP * 16) {
    const uint4 x = load_shared(at + i);
    for (uint32_t pair : {x.x, x.y, x.z, x.w})
      top = fmaxf(top, fmaxf(fabsf(__uint_as_float(pair << 16)),
                             fabsf(__uint_as_float(pair & 0xFFFF0000u))));
  }
  const int shift = max(-100, min(100, f16_shift(warp_max(top))));
  const float by = __int_as_float((127 + shift) << 23);
  auto scaled = [=](uint32_t pair) {
    return pack2(__uint_as_float(pair << 16) * by, __uint_as_float(pair & 0xFFFF0000u) * by,
                 __half());
  };
#pragma unroll 4
  for (int i = lane * 16; i < bytes; i += WARP * 16) {
    const uint4 x = load_shared(at + i);
    store_shared(at + i, make_uint4(scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w)));
  }
  return __int_as_float((127 - shift) << 23);
}

/* One warp brings the rows of Q, Q_STAGES - 1 items ahead. */
template <class T, class shape>
__device__ void bring_queries(const kvl_paged_attention_args &a,
                              wgmma_memory<shape> &memory) {
  constexpr int QS = shape::Q_STAGES, PIECES = shape::D / 8;
  constexpr int IN_ATOM = shape::ATOM / 8, ROW_BYTES = 2 * shape::ATOM;
  constexpr int SETS = shape::ROWS / WARP;
  const int lane = threadIdx.x % WARP, head_dim = a.cache.key.dim;
  uint32_t step = 0;
  each_work<shape>(memory, [&](const wgmma_work &w) {
    const query_rows rows = w.rows();
    const T *q = (const T *)a.q + (rows.token0 * a.heads + w.head0) * head_dim;
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
#pragma unroll 4
      for (int i = lane; i < WARP * PIECES; i += WARP) {
        const int r = i / PIECES, piece = i % PIECES;
        const int row = tile_row(h % 2 * WARP + r);
        const int begin = __shfl_sync(ALL_LANES, begins[h], r);
        copy_async(
            to + piece / IN_ATOM * 64 * ROW_BYTES + swizzled<IN_ATOM>(row, piece % IN_ATOM),
            begin < 0 ? q : q + (int64_t)begin * head_dim + piece * 8,
            begin >= 0 && piece * 8 < head_dim);
      }
    }
    copy_commit();
    copy_wait<0>();
    if constexpr (shape::F8) {
      __syncwarp();
      const float unit = a.dtype == KVL_DTYPE_BF16
                             ? queries_to_f16<shape>(memory.q(s, 0), shape::Q_BYTES)
                             : 1.f;
      if (lane == 0) memory.units[s] = unit;
    }
    fence_async();
    barrier_arrive_warp(memory.q_full(s), lane);
  });
}

#endif

}  // namespace kvl

#endif
