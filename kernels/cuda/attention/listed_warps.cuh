/* Attention over listed tokens of packed numbers (int8), for groups of up to eight heads:
 * packed_rows.cuh over lists. listed_mma.cuh takes larger groups.
 *
 * As in paged_decode.cuh, every warp is its own pipeline: it takes every WARPS-th tile of 32
 * keys of its block's share, looks them up, copies their K, V and scales into its own ring,
 * and computes a tile while the next one comes. Each lane looks up one key of a tile. The
 * three steps of that (the key's entry, its block, its row) each have a tile's time to wait
 * for memory. Warps meet only at the end, when their softmaxes are joined. */
#ifndef KVL_CUDA_LISTED_WARPS_CUH
#define KVL_CUDA_LISTED_WARPS_CUH

#include "cuda/attention/listed_packed.cuh"
#include "cuda/attention/packed_rows.cuh"

namespace kvl {

template <int D, class C, tile_size TILES = TILES_HERE> struct warps_shape {
  static constexpr int KEYS = WARP, ROWS = 8, WORDS = 1, GROUPS = D / PACKED_GROUP;
  static constexpr int PIECES = D / 16, TILE_BYTES = KEYS * PIECES * 16;
  static constexpr int STAGES = D <= 64 ? 3 : 2, SLOTS = STAGES;
  static constexpr int WARPS = TILES == SMALL_TILES ? (D > 128 ? 2 : 4) : D <= 64 ? 8 : 6;
  static constexpr int BLOCKS = TILES == LARGE_TILES && D <= 128 ? 2 : 1;
  static constexpr int THREADS = WARPS * WARP;
  static constexpr int RING_BYTES = STAGES * 2 * TILE_BYTES; /* of a warp */
  static constexpr int SHARED_BYTES = WARPS * RING_BYTES;
  static_assert(RING_BYTES >= ROWS * D * 4, "a ring takes the rows' sums");
};

/* What a warp knows about the tiles in its ring. Keys are in the order of a lane's four: key k
 * of a tile is at k % 8 * 4 + k / 8. */
template <class shape> struct warp_tiles : listed_scales<shape> {
  alignas(16) int index[shape::STAGES][shape::KEYS]; /* -1: not seen */
  unsigned seen[shape::STAGES];                      /* bit k: key k is seen */
};

template <class T, class C, int D, class H>
struct lone_warp : packed_rows<T, D, C, 8, warps_shape<D, C>::PIECES> {
  using shape = warps_shape<D, C>;
  using of_rows = packed_rows<T, D, C, 8, shape::PIECES>;
  using of_rows::lane;
  static constexpr int PIECES = shape::PIECES, SIDE = WARP / PIECES;
  using tile_scores = typename of_rows::tile_scores;

  const listed_keys<> &keys;
  warp_tiles<shape> &tiles;
  const H &hook;
  const int64_t row0; /* of [tokens, heads]: the group's first */
  const int count;    /* heads of the group */
  const score_rule rule;
  const uint32_t ring;
  const int end;   /* the tile after the last */
  int token, said; /* of the next tile to copy, */
  int entry;       /* and of the one after it */

  __device__ __forceinline__ lone_warp(const listed_keys<> &keys_, warp_tiles<shape> &tiles_,
                                       const H &hook_, int64_t row0_, int count_,
                                       uint32_t ring_, int end_)
      : keys(keys_), tiles(tiles_), hook(hook_), row0(row0_), count(count_), rule(keys_.a),
        ring(ring_), end(end_) {}

  /* ---- looking up and copying ---- */

  __device__ __forceinline__ int key_of(int t) const { return t * shape::KEYS + lane; }
  __device__ __forceinline__ void ask(int t) {
    entry = t < end ? keys.entry_of(key_of(t)) : -1;
  }
  __device__ __forceinline__ void look_up(int t) {
    token = keys.token_of(entry);
    said = keys.said_of(key_of(t), token);
  }

  /* Copies tile `t`, which was looked up, and takes the next steps for later tiles. Keys that
   * are not seen become zeros, so that no NaN gets in. */
  __device__ __forceinline__ void fetch(int t, int stage) {
    int physical, offset;
    keys.locate(token, said, &physical, &offset);
    const uint32_t place = keys.template row_place<true>(physical, offset);
    const unsigned seen = __ballot_sync(ALL_LANES, physical >= 0);
    const int spot = lane % 8 * 4 + lane / 8;
    tiles.index[stage][spot] = physical >= 0 ? token : -1;
    if (lane == 0) tiles.seen[stage] = seen;
    if (seen) {
      tiles.copy_scales(keys, stage, spot, physical, offset);
      const kvl_pages &c = keys.a.cache;
      const int piece = lane % PIECES, side = lane / PIECES;
      const unsigned own = piece * 16 < c.key.dim ? seen >> side : 0;
      const char *const from = (const char *)c.memory + c.key.begin + piece * 16;
      const int64_t to_value = keys.to_value();
      const uint32_t to = ring + stage * 2 * shape::TILE_BYTES;
#pragma unroll
      for (int i = 0; i < shape::KEYS; i += SIDE) {
        const uint32_t row = __shfl_sync(ALL_LANES, place, i + side);
        const uint32_t at = to + tile_byte<PIECES>(i + side, piece);
        const char *const k = from + (uint64_t)row * 16;
        copy_async_alone(at, k, own >> i & 1);
        copy_async_alone(at + shape::TILE_BYTES, k + to_value, own >> i & 1);
      }
    }
    copy_commit();
    look_up(t + shape::WARPS);
    ask(t + 2 * shape::WARPS);
  }

  /* ---- computing ---- */

  struct scales { /* of a stage's keys, or of its values */
    const warp_tiles<shape> &tiles;
    const int stage, groups;
    const bool is_value;
    __device__ __forceinline__ void of_four(float (&x)[4], int group) const {
      tiles.of_four(x, stage, is_value, group);
    }
  };

  __device__ __forceinline__ void attend(int stage) {
    if (tiles.seen[stage] == 0) return;
    const int groups = of_rows::GROUPS <= 2 ? of_rows::GROUPS : keys.a.cache.key.groups;
    const uint32_t at = of_rows::own_row(ring + stage * 2 * shape::TILE_BYTES);
    const int4 four = *(const int4 *)(tiles.index[stage] + lane / 4 * 4);
    const int where[4] = {four.x, four.y, four.z, four.w};
    tile_scores s;
    float share[1][2]; /* by which this tile's weights count */
    of_rows::scores(s, at, scales{tiles, stage, groups, false});
    finish_scores(s, where);
    of_rows::weigh(s, share);
    of_rows::values(s, share, at + shape::TILE_BYTES, scales{tiles, stage, groups, true},
                    [](int) { return true; }); /* else the scale is 0 */
  }

  /* Changes scaled scores: cap, ALiBi, hook; a key that is not seen gets -inf. */
  __device__ __forceinline__ void finish_scores(tile_scores &s, const int (&where)[4]) const {
    const kvl_paged_attention_args &a = keys.a;
    const query_sight &sight = keys.sight;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int r = of_rows::row_of(0, c);
      const float slope = a.alibi && r < count ? a.alibi[row0 % a.heads + r] * LOG2E : 0.f;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float &score = s[0][e][c];
        if (rule.cap != 0.f) score = rule.cap * tanh_fast(score);
        if (a.alibi) score += slope * (float)kvl__apart(where[e], sight.at);
        if constexpr (H::ACTIVE) {
          const hook_row of = {sight.seq,         a.cache.kv_heads, keys.kv_head,
                               min(r, count - 1), sight.length,     sight.at};
          score = hook(score, of, max(where[e], 0));
          if (where[e] >= 0 && r < count) keep_score(hook, row0 + r, where[e], score);
        }
        if (where[e] < 0) score = -INFINITY;
      }
    }
  }

  /* Attends to the warp's tiles, from `t` on. */
  __device__ __forceinline__ void run(int t) {
    constexpr int STAGES = shape::STAGES, WARPS = shape::WARPS;
    const int head_dim = keys.a.cache.key.dim;
    look_up(t);
    ask(t + WARPS);
    of_rows::begin((const T *)keys.a.q + row0 * head_dim, count, head_dim, rule.scale);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(t + s * WARPS, s);
    int stage = 0;
#pragma unroll 1
    for (; t < end; t += WARPS) {
      copy_wait<STAGES - 2>();
      __syncwarp(); /* all copies have arrived, and the last tile was read */
      fetch(t + (STAGES - 1) * WARPS, stage == 0 ? STAGES - 1 : stage - 1);
      attend(stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copy_wait<0>();
    of_rows::template end_sums<H::ACTIVE>();
  }
};

template <class T, class C, int D, class H>
__device__ __forceinline__ void listed_by_warps(const kvl_paged_attention_args &a,
                                                const listed_plan &plan, const H &hook) {
  using shape = warps_shape<D, C>;
  constexpr int WARPS = shape::WARPS, ROWS = shape::ROWS;
  extern __shared__ __align__(128) char shared[];
  __shared__ warp_tiles<shape> tiles[WARPS];
  __shared__ float2 states[WARPS * ROWS]; /* (m, l) of the warps' rows */
  const int64_t token = plan.token();
  const int kv_head = plan.kv_head(), warp = threadIdx.x / WARP;

  ask_for_table(a, plan, token);
  wait_for_previous();
  const listed_keys<> keys(a, plan.block, token, kv_head);
  listed_share share(plan, a.max_selected, shape::KEYS);
  if (keys.keys == 0) share.end = share.begin;
  const int group = (uint32_t)a.heads / (uint32_t)a.cache.kv_heads;
  const int64_t row0 = token * a.heads + kv_head * group;
  lone_warp<T, C, D, H> rows(keys, tiles[warp], hook, row0, group,
                             shared_address(shared + warp * shape::RING_BYTES), share.end);
  rows.ask(share.begin + warp);
  rows.run(share.begin + warp);
  let_next_start();
  __syncthreads(); /* the rings were read */
  rows.keep_states(states + warp * ROWS);
  rows.keep_sums((float *)shared + warp * ROWS * D, group);
  join_listed<WARPS, ROWS, D, true, shape::THREADS>(a, plan, row0, group, states,
                                                    (const float *)shared, 1.f);
}

template <class T, class C, int D>
__global__ void __launch_bounds__(warps_shape<D, C>::THREADS, warps_shape<D, C>::BLOCKS)
    listed_warps(const __grid_constant__ kvl_paged_attention_args a,
                 const __grid_constant__ listed_plan plan) {
  listed_by_warps<T, C, D>(a, plan, no_hook());
}

}  // namespace kvl

#endif
