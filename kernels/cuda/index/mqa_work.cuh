/* What a thread block of mqa_wgmma.cuh works on and works with: its shape, its share of all
 * groups and how a warp walks through the share, the layout of shared memory, and the two
 * warps that fill it. */
#ifndef KVL_CUDA_MQA_WORK_CUH
#define KVL_CUDA_MQA_WORK_CUH

#include "args/index.h"
#include "cuda/block_scan.cuh"
#include "cuda/hopper.cuh"
#include "cuda/index/mqa_mma.cuh"

namespace kvl {

/* Keys: mqa_contiguous or mqa_paged. RQ: rows of q per consumer. */
template <class Keys_, int H_, int D_, int RQ_> struct mqa_shape {
  using Keys = Keys_;
  static constexpr bool PAGED = Keys::PAGED;
  static constexpr int H = H_, D = D_, RQ = RQ_, N = H * RQ, CONSUMERS = 2;
  static constexpr int ROWS = PAGED ? RQ : CONSUMERS * RQ; /* rows of q per group */
  static constexpr int COLUMNS = ROWS * H;
  static constexpr int TOKENS = PAGED ? 256 : 128; /* of a tile */
  static constexpr int UNIT = PAGED ? 64 : 128;    /* tokens in which shares are counted */
  static constexpr int ITEM_UNITS = 1;             /* the cost of beginning an item */
  static constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
  static constexpr int Q_STAGES = 2, Q_BYTES = COLUMNS * D, TILE_BYTES = TOKENS * D;
  static constexpr int STAGES = PAGED && D == 128 ? 4 : 8;
  static constexpr int SCALES = PAGED ? TOKENS : 1; /* of a tile, in shared memory */
  /* One KiB is for alignment: dynamic shared memory need not begin at an atom. */
  static constexpr int SHARED_BYTES = Q_STAGES * Q_BYTES + STAGES * TILE_BYTES + 1024;
};

/* What the host works out. */
struct mqa_plan {
  int64_t groups, each; /* of all; per sequence (contiguous keys: of all rows) */
  int64_t rows;         /* of q, per sequence or of all */
  int box_shift;        /* one copy brings 2^n tokens of a block */
};

/* A range of the tokens of a group. */
struct mqa_item {
  int64_t row0;                /* of q */
  int rows, begin, end, tiles; /* tiles 0: nothing is left */
};

#if KVL_SM90A

template <class shape> struct mqa_memory {
  static constexpr int STAGES = shape::STAGES, QS = shape::Q_STAGES;
  static constexpr int BARRIERS = 2 * STAGES + 2 * QS;
  mqa_item items[QS];
  int2 ranges[QS][shape::ROWS];     /* the columns of each row within the item */
  float halves[QS][shape::COLUMNS]; /* half of each weight */
  alignas(16) float scales[STAGES][shape::SCALES];
  uint32_t known[STAGES]; /* bit b: box b of the tile belongs to a block */
  int scan[1][WARP];
  int64_t first_group; /* the first group of this share, and the cost at its begin */
  int first_at;
  alignas(8) uint64_t barriers[BARRIERS];

  __device__ uint32_t q(int stage) const { return dynamic() + stage * shape::Q_BYTES; }
  __device__ uint32_t k(int stage) const {
    return dynamic() + QS * shape::Q_BYTES + stage * shape::TILE_BYTES;
  }
  __device__ uint32_t k_full(int s) const { return barrier(s); }
  __device__ uint32_t k_empty(int s) const { return barrier(STAGES + s); }
  __device__ uint32_t q_full(int s) const { return barrier(2 * STAGES + s); }
  __device__ uint32_t q_empty(int s) const { return barrier(2 * STAGES + QS + s); }
  __device__ void init() {
    for (int i = 0; i < BARRIERS; i++) {
      const bool is_empty = (i >= STAGES && i < 2 * STAGES) || i >= 2 * STAGES + QS;
      /* The barrier of a full q has two arrivals: q itself, and the rest of what is known
       * about the item. */
      const bool is_q_full = i >= 2 * STAGES && i < 2 * STAGES + QS;
      barrier_init(barrier(i), is_empty ? 4 * shape::CONSUMERS : is_q_full ? 2 : 1);
    }
    barrier_init_done();
  }

private:
  __device__ uint32_t barrier(int i) const { return shared_address(barriers) + 8 * i; }
  static __device__ uint32_t dynamic() {
    extern __shared__ char bytes[];
    return (shared_address(bytes) + 1023) & ~1023u;
  }
};

/* ---- work ------------------------------------------------------------------------------ */

/* The rows of a group; its tokens are not set. */
template <class shape>
__device__ __forceinline__ mqa_item mqa_rows(const mqa_plan &plan, int64_t group) {
  const int64_t sequence = group / plan.each;
  const int64_t first = (group - sequence * plan.each) * shape::ROWS;
  const int rows = (int)min(plan.rows - first, (int64_t)shape::ROWS);
  return {sequence * plan.rows + first, rows, INT_MAX, 0, 0};
}
/* A whole group: its rows, and the range of tokens that any of them sees. */
template <class shape>
__device__ __forceinline__ mqa_item mqa_group(const typename shape::Keys &keys,
                                              const mqa_plan &plan, int64_t group) {
  mqa_item w = mqa_rows<shape>(plan, group);
#pragma unroll
  for (int r = 0; r < shape::ROWS; r++) {
    if (r >= w.rows) break;
    const int begin = keys.begin(w.row0 + r), end = keys.end(w.row0 + r);
    if (begin < end) w.begin = min(w.begin, begin), w.end = max(w.end, end);
  }
  w.begin = min(w.begin, w.end) & ~7; /* whole sectors of the logits */
  return w;
}
template <class shape> __device__ __forceinline__ int mqa_cost(const mqa_item &w) {
  const int units = (w.end - w.begin + shape::UNIT - 1) / shape::UNIT;
  return units ? units + shape::ITEM_UNITS : 0;
}

/* What this thread block is to do: a range of the summed costs of all groups. */
struct mqa_share {
  int begin, end;

  static __device__ mqa_share of(int total) {
    return {(int)((int64_t)total * blockIdx.x / gridDim.x),
            (int)((int64_t)total * (blockIdx.x + 1) / gridDim.x)};
  }
  /* All threads of the block call it. */
  template <class shape>
  static __device__ mqa_share find(const typename shape::Keys &keys, const mqa_plan &plan,
                                   mqa_memory<shape> &memory) {
    const int64_t each = (plan.groups + shape::THREADS - 1) / shape::THREADS;
    const int64_t low = min(threadIdx.x * each, plan.groups);
    const int64_t high = min(low + each, plan.groups);
    int before[1] = {0}, total[1];
    for (int64_t g = low; g < high; g++)
      before[0] += mqa_cost<shape>(mqa_group<shape>(keys, plan, g));
    const int own = before[0];
    block_scan(before, total, memory.scan);
    const mqa_share share = of(total[0]);
    if (before[0] <= share.begin && share.begin < before[0] + own) { /* one thread */
      int at = before[0];
      int64_t g = low;
      for (int n; at + (n = mqa_cost<shape>(mqa_group<shape>(keys, plan, g))) <= share.begin;)
        at += n, g++;
      memory.first_group = g;
      memory.first_at = at;
    }
    __syncthreads();
    return share;
  }
};

/* A warp's walk over the items of a share. It looks up 32 groups at once, one per lane. */
template <class shape> struct mqa_walk {
  const typename shape::Keys &keys;
  const mqa_plan &plan;
  mqa_share share;
  int64_t group; /* the next group; it begins at cost `at` */
  int at;
  int looked = WARP; /* the lane of the next group; WARP: no group is looked up */
  int lane_begin, lane_end;

  /* For few groups: a warp finds its share by itself, before any barrier of the block. */
  __device__ mqa_walk(const typename shape::Keys &k, const mqa_plan &p) : keys(k), plan(p) {
    const int lane = threadIdx.x % WARP;
    look(0);
    const int own = lane < plan.groups ? mqa_cost<shape>({0, 0, lane_begin, lane_end, 0}) : 0;
    const int upto = warp_scan(own), total = __shfl_sync(ALL_LANES, upto, WARP - 1);
    share = mqa_share::of(total);
    looked = __popc(__ballot_sync(ALL_LANES, upto <= share.begin));
    group = looked;
    at = __shfl_sync(ALL_LANES, upto - own, min(looked, WARP - 1));
  }
  __device__ mqa_walk(const typename shape::Keys &k, const mqa_plan &p, const mqa_share &s,
                      const mqa_memory<shape> &memory)
      : keys(k), plan(p), share(s), group(memory.first_group), at(memory.first_at) {}

  __device__ void look(int64_t first) {
    const int64_t own = min(first + threadIdx.x % WARP, plan.groups - 1);
    const mqa_item whole = mqa_group<shape>(keys, plan, own);
    lane_begin = whole.begin, lane_end = whole.end, looked = 0;
  }
  /* The next item; all lanes call it. False when there is no more. */
  __device__ bool next(mqa_item &w) {
    if (share.begin == share.end) return false; /* group and at may not be set */
    while (at < share.end) {
      if (looked == WARP) look(group);
      w = mqa_rows<shape>(plan, group++);
      w.begin = __shfl_sync(ALL_LANES, lane_begin, looked);
      w.end = __shfl_sync(ALL_LANES, lane_end, looked++);
      const int cost = mqa_cost<shape>(w);
      const int from = max(share.begin - at - shape::ITEM_UNITS, 0);
      const int to = min(share.end - at, cost) - shape::ITEM_UNITS;
      at += cost;
      if (from >= to) continue;
      w.end = min(w.end, w.begin + to * shape::UNIT);
      w.begin += from * shape::UNIT;
      w.tiles = (w.end - w.begin + shape::TOKENS - 1) / shape::TOKENS;
      return true;
    }
    return false;
  }
};

/* ---- producers ------------------------------------------------------------------------- */

/* One warp brings what the consumers know of an item, and its q, one item ahead. */
template <class shape>
__device__ void mqa_bring_items(const typename shape::Keys &keys, const CUtensorMap &map,
                                mqa_walk<shape> walk, mqa_memory<shape> &memory) {
  const int lane = threadIdx.x % WARP;
  mqa_item w;
  for (uint32_t step = 0;; step++) {
    const int s = step % shape::Q_STAGES;
    if (!walk.next(w)) w.tiles = 0;
    barrier_wait(memory.q_empty(s), (step / shape::Q_STAGES & 1) ^ 1);
    if (lane == 0) {
      memory.items[s] = w;
      barrier_arrive_expect(memory.q_full(s), w.tiles ? shape::Q_BYTES : 0);
      if (w.tiles)
        copy_box3(memory.q(s), &map, (int)(w.row0 * shape::H), 0, memory.q_full(s));
    }
    if (w.tiles) {
      for (int r = lane; r < shape::ROWS; r += WARP)
        memory.ranges[s][r] = r < w.rows ? make_int2(max(keys.begin(w.row0 + r), w.begin),
                                                     min(keys.end(w.row0 + r), w.end))
                                         : make_int2(0, 0);
      const float *weights = keys.a.weights + w.row0 * shape::H;
      for (int c = lane; c < shape::COLUMNS; c += WARP)
        memory.halves[s][c] = c < w.rows * shape::H ? 0.5f * weights[c] : 0.f;
    }
    barrier_arrive_warp(memory.q_full(s), lane);
    if (w.tiles == 0) return;
  }
}

/* One warp brings an item's tiles of contiguous keys. */
template <class shape>
__device__ void mqa_bring_tiles(const mqa_contiguous &, const CUtensorMap &map,
                                const mqa_plan &, const mqa_item &w,
                                mqa_memory<shape> &memory, uint32_t &step) {
  for (int t = 0; t < w.tiles; t++, step++) {
    const int s = step % shape::STAGES;
    barrier_wait(memory.k_empty(s), (step / shape::STAGES & 1) ^ 1);
    if (threadIdx.x % WARP > 0) continue;
    barrier_arrive_expect(memory.k_full(s), shape::TILE_BYTES);
    copy_box3(memory.k(s), &map, w.begin + t * shape::TOKENS, 0, memory.k_full(s));
  }
}
/* The same over index-K memory. A lane looks up a box (a part of one block) and copies it
 * when its tile's turn comes; meanwhile the next 32 boxes are looked up. */
template <class shape>
__device__ void mqa_bring_tiles(const mqa_paged &keys, const CUtensorMap &map,
                                const mqa_plan &plan, const mqa_item &w,
                                mqa_memory<shape> &memory, uint32_t &step) {
  const kvl_index_view &cache = keys.a.cache;
  const int32_t *table = keys.a.tables + w.row0 / plan.rows * keys.a.max_blocks;
  const int lane = threadIdx.x % WARP, tokens = 1 << plan.box_shift;
  const int boxes = shape::TOKENS >> plan.box_shift; /* per tile: 4 ... 32 */
  auto look = [&](int token) { return token < w.end ? table[token / cache.block_size] : -1; };
  int next = look(w.begin + lane * tokens);
  for (int first = w.begin; first < w.end; first += WARP * tokens) {
    const int token = first + lane * tokens, block = next;
    next = look(token + WARP * tokens);
    const bool has = block >= 0 && block < cache.blocks;
    const uint32_t known = __ballot_sync(ALL_LANES, has);
    const int offset = token % cache.block_size;
    for (int box = 0; box < WARP && first + box * tokens < w.end; box += boxes, step++) {
      const int s = step % shape::STAGES;
      const uint32_t own = known >> box & ALL_LANES >> (WARP - boxes);
      barrier_wait(memory.k_empty(s), (step / shape::STAGES & 1) ^ 1);
      if (lane == 0) {
        memory.known[s] = own;
        barrier_arrive_expect(memory.k_full(s), __popc(own) * tokens * (shape::D + 4));
      }
      __syncwarp();
      if (!has || lane < box || lane >= box + boxes) continue;
      const int at = (lane - box) * tokens;
      copy_box3(memory.k(s) + at * shape::D, &map, offset, block, memory.k_full(s),
                read_once());
      copy_bytes(shared_address(&memory.scales[s][at]), index_at(cache, block, offset).scale,
                 tokens * 4, memory.k_full(s));
    }
  }
}

#endif

}  // namespace kvl

#endif
