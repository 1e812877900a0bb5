/* Paged attention for f32 queries (decode and prefill) over a cache of any codec, in fp32 on
 * the FMA units: tf32 would lose 13 bits of q. Lists that listed_mma.cuh does not take are here
 * for queries of any dtype (listed_f32.cuh).
 *
 * Up to ROWS query rows that share a KV head are taken together: the heads of a group, and in
 * prefill several tokens. A key's row is spread over LANES = D / 8 lanes with 8 dims each, so
 * a warp holds SIDE = 32 / LANES keys side by side, and does this four times in a batch. As
 * in paged_decode.cuh each warp is its own pipeline of asynchronous copies. In decode a warp
 * is a team of paged_split.cuh. In prefill the warps of a block share the keys of one tile of
 * query rows, and their results are joined in order. */
#ifndef KVL_CUDA_PAGED_F32_CUH
#define KVL_CUDA_PAGED_F32_CUH

#include "args/attention.h"
#include "cuda/attention/hook.cuh"
#include "cuda/attention/paged_split.cuh"

namespace kvl {

template <class T, int D, tile_size TILES = TILES_HERE> struct f32_shape {
  static constexpr bool SMALL = TILES == SMALL_TILES;
  static constexpr int WARPS = 4, STAGES = SMALL ? 2 : 3, BLOCKS = SMALL ? 1 : 2, TEAM = 1;
  static constexpr int THREADS = WARPS * WARP, REGISTERS = 255;
  static constexpr int LANES = D / 8, SIDE = WARP / LANES;  /* keys side by side */
  static constexpr int PIECES = D * (int)sizeof(T) / 16;    /* of a row */
  static constexpr int NUMBERS = WIDE<T> < 8 ? WIDE<T> : 8; /* that a lane loads at once */
  static constexpr int FIT = 8192 / (2 * PIECES * 16); /* keys in 8 KiB, together with V */
  static constexpr int KEYS = FIT < WARP ? FIT : WARP; /* of a tile */
  static constexpr int TILE_BYTES = KEYS * PIECES * 16, STAGE_BYTES = 2 * TILE_BYTES;
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
  static constexpr int WORDS = packs<T> ? 5 : 1; /* of a key: its index, and scales */
  static constexpr int SHARED_BYTES = RING_BYTES + WARPS * STAGES * KEYS * WORDS * 4;
  static_assert(KEYS % (4 * SIDE) == 0, "a tile is whole batches");
};

/* For each row of a warp: which keys it sees, in shared memory. */
template <int ROWS> struct f32_rows {
  int index[ROWS], begin[ROWS], limit[ROWS]; /* the first and the last key */
  float slope[ROWS];

  __device__ void set(const kvl_paged_attention_args &a, const query_rows &rows, int index0,
                      int length) {
    __syncwarp();
    const int r = threadIdx.x % WARP;
    if (r < ROWS) {
      const int at = index0 + r / rows.heads_each;
      index[r] = at;
      begin[r] = window_begin(a, at);
      limit[r] = r >= rows.count ? -1 : a.causal ? min(at, length - 1) : length - 1;
      slope[r] = a.alibi && r < rows.count ? a.alibi[rows.head(r)] * LOG2E : 0.f;
    }
    __syncwarp();
  }
};

/* The dim of a lane's e-th number. Lane k of LANES has groups k, k + LANES, ... of N dims
 * each, so neighbouring lanes read neighbouring bytes. */
template <class S> __device__ __forceinline__ int f32_dim(int e) {
  return (e / S::NUMBERS * S::LANES + (int)threadIdx.x % S::LANES) * S::NUMBERS +
         e % S::NUMBERS;
}

/* The tiles of a warp: tile, tile + step, ... before tile_end, in its ring. Keys is paged_keys,
 * or a type that finds rows in the same way. */
template <class T, int D, class Keys> struct f32_tiles {
  using shape = f32_shape<T, D>;
  static constexpr int KEYS = shape::KEYS, PIECES = shape::PIECES, N = shape::NUMBERS;
  const Keys &keys;
  const int tile_end, lane;
  char *const ring;
  int *const indices; /* [STAGES, KEYS] of the ring's keys */
  const char *const cache;
  const int64_t to_value;
  uint4 scales; /* of the key that was found last: up to four of K, and of V */

  __device__ f32_tiles(const Keys &keys_, int tile_end_, char *ring_, int *indices_)
      : keys(keys_), tile_end(tile_end_), lane(threadIdx.x % WARP), ring(ring_),
        indices(indices_), cache((const char *)keys_.a.cache.memory),
        to_value(keys_.to_value()), scales() {}

  /* The scales of a stage's keys, if numbers are packed: behind the indices of all warps. */
  __device__ uint4 *scales_of(int stage, int key) const {
    extern __shared__ __align__(128) char shared[];
    const int own = (int)(indices - (int *)(shared + shape::RING_BYTES));
    uint4 *const all = (uint4 *)((int *)(shared + shape::RING_BYTES) +
                                 shape::WARPS * shape::STAGES * KEYS);
    return all + own + stage * KEYS + key;
  }
  /* Two scales of a row from `group` on, of those that it has. */
  static __device__ uint32_t load_scales(const char *scales, int group, int groups) {
    const uint16_t *const at = (const uint16_t *)scales;
    return (group < groups ? at[group] : 0u) | (group + 1 < groups ? at[group + 1] : 0u)
                                                   << 16;
  }
  /* Finds this lane's key of tile t. */
  __device__ __forceinline__ paged_row find(int t) {
    const paged_row none = {0, -1, 0};
    const paged_row row = t < tile_end && lane < KEYS ? keys.find(t * KEYS + lane) : none;
    if constexpr (packs<T>) {
      const int groups = keys.a.cache.key.groups;
      scales = {};
      if (row.index >= 0) {
        const char *const at = cache + row.scales(keys.a.cache.key);
        scales = make_uint4(load_scales(at, 0, groups), load_scales(at, 2, groups),
                            load_scales(at + to_value, 0, groups),
                            load_scales(at + to_value, 2, groups));
      }
    }
    return row;
  }
  /* Starts to copy the tile whose keys were found last. */
  __device__ __forceinline__ void fetch(int stage, const paged_row &row) {
    const uint32_t at_k = shared_address(ring) + stage * shape::STAGE_BYTES;
    const int head_dim = keys.a.cache.key.dim;
    const long long offset = row.index < 0 ? -1 : (long long)row.offset;
#pragma unroll
    for (int i = 0; i < KEYS * PIECES / WARP; i++) {
      const int r = (i * WARP + lane) / PIECES, piece = (i * WARP + lane) % PIECES;
      const long long at = __shfl_sync(ALL_LANES, offset, r);
      const bool valid = at >= 0 && piece * WIDE<T> < head_dim;
      const char *k = valid ? cache + at + piece * 16 : cache;
      copy_async(at_k + (i * WARP + lane) * 16, k, valid);
      copy_async(at_k + shape::TILE_BYTES + (i * WARP + lane) * 16,
                 valid ? k + to_value : cache, valid);
    }
    if (lane < KEYS) indices[stage * KEYS + lane] = row.index;
    if constexpr (packs<T>)
      if (lane < KEYS) *scales_of(stage, lane) = scales;
  }
  /* This lane's eight numbers of a key's K or V. */
  __device__ __forceinline__ void load_row(int stage, bool is_value, int key,
                                           float (&x)[8]) const {
    const char *const tile_at = ring + stage * shape::STAGE_BYTES +
                                is_value * shape::TILE_BYTES;
#pragma unroll
    for (int e = 0; e < 8; e += N) {
      float part[N];
      load_floats((const T *)(tile_at + key * PIECES * 16) + f32_dim<shape>(e), part);
#pragma unroll
      for (int i = 0; i < N; i++) x[e + i] = part[i];
    }
    if constexpr (packs<T>) {
      const uint4 *const at = scales_of(stage, key);
      const float scale = scale_at((const char *)at + is_value * 8, f32_dim<shape>(0));
#pragma unroll
      for (int e = 0; e < 8; e++) x[e] *= scale;
    }
  }
};

/* The partial softmax of ROWS rows. A lane has 8 dims of each row. Until join(), lanes with
 * the same dims in different sides hold sums over different keys. */
template <class T, int D, int ROWS> struct f32_state {
  using shape = f32_shape<T, D>;
  static constexpr int LANES = shape::LANES, SIDE = shape::SIDE;
  float q[ROWS][8], out[ROWS][8], m[ROWS], l[ROWS];

  static __device__ int dim_of(int e) { return f32_dim<shape>(e); }

  /* Loads the queries, times `scale`, and has no keys yet. */
  __device__ __forceinline__ void begin(const kvl_paged_attention_args &a,
                                        const query_rows &rows, float scale) {
    const int head_dim = a.cache.key.dim;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      m[r] = -INFINITY;
      l[r] = 0.f;
      const bool has = r < rows.count;
      const int64_t row = has ? rows.row(a, r) * head_dim : 0;
#pragma unroll
      for (int e = 0; e < 8; e += shape::NUMBERS) {
        float part[shape::NUMBERS] = {};
        if (has && dim_of(e) < head_dim) load_any(a.q, a.dtype, row + dim_of(e), part);
#pragma unroll
        for (int i = 0; i < shape::NUMBERS; i++) {
          out[r][e + i] = 0.f;
          q[r][e + i] = part[i] * scale;
        }
      }
    }
  }
  /* Turns row r's products with four keys into weights. score_of turns the product that
   * this lane handles into a score. */
  template <class F> __device__ __forceinline__ void weigh(int r, float (&p)[4], F score_of) {
    const float score = score_of(sum_of_four<LANES>(p, threadIdx.x % WARP));
    float top = fmaxf(score, __shfl_xor_sync(ALL_LANES, score, LANES / 2));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, LANES / 4));
    top = fmaxf(top, m[r]);
    const float shift = finite_shift(top), down = exp2_fast(m[r] - shift);
    const float weight = exp2_fast(score - shift);
    m[r] = top;
    l[r] = l[r] * down + weight; /* of this lane's own scores */
#pragma unroll
    for (int e = 0; e < 8; e++) out[r][e] *= down;
#pragma unroll
    for (int u = 0; u < 4; u++)
      p[u] = __shfl_sync(ALL_LANES, weight, u / 2 * (LANES / 2) + u % 2 * (LANES / 4), LANES);
  }
  /* Attends to 4 * SIDE keys of a stage, from `batch` on. score(r, product, index) makes a
   * score of a product. */
  template <class Tiles, class F>
  __device__ __forceinline__ void attend_batch(const Tiles &tiles, int stage, int batch,
                                               F score) {
    const int lane = threadIdx.x % WARP, side = lane / LANES;
    float p[ROWS][4], x[8];
#pragma unroll
    for (int u = 0; u < 4; u++) {
      tiles.load_row(stage, false, batch + u * SIDE + side, x);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        p[r][u] = 0.f;
#pragma unroll
        for (int e = 0; e < 8; e++) p[r][u] += q[r][e] * x[e];
      }
    }
    /* Which of four scores this lane ends up with. */
    const int own = (lane & (LANES / 2) ? 2 : 0) + (lane & (LANES / 4) ? 1 : 0);
    const int at = tiles.indices[stage * shape::KEYS + batch + own * SIDE + side];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      weigh(r, p[r], [&](float product) { return score(r, product, at); });
#pragma unroll
    for (int u = 0; u < 4; u++) {
      tiles.load_row(stage, true, batch + u * SIDE + side, x);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        if (p[r][u] != 0.f) /* V of a key that is not seen may be NaN */
#pragma unroll
          for (int e = 0; e < 8; e++) out[r][e] += p[r][u] * x[e];
    }
  }

  /* Attends to tiles tile, tile + step, ... before tile_end. A hook gets the sequence and its
   * length. */
  template <class Keys, class H = no_hook>
  __device__ void attend(const Keys &keys, const query_rows &rows, const f32_rows<ROWS> &sees,
                         int tile, int tile_end, int step, char *ring, int *indices,
                         const H &hook = {}, int64_t seq = 0, int length = 0) {
    constexpr int STAGES = shape::STAGES;
    const kvl_paged_attention_args &a = keys.a;
    f32_tiles<T, D, Keys> tiles(keys, tile_end, ring, indices);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      tiles.fetch(s, tiles.find(tile + s * step));
      copy_commit();
    }
    const score_rule rule(a);
    const int tree = tree_begin(a, length), group = (int)(a.heads / a.cache.kv_heads);
    const int kv_head = rows.head0 / group;
    begin(a, rows, rule.scale * (a.cache.k_scale ? a.cache.k_scale[kv_head] : 1.f));
    auto score_of = [&](int r, float score, int at) {
      if (rule.cap != 0.f) score = rule.cap * tanh_fast(score);
      score += sees.slope[r] * (float)kvl__apart(at, sees.index[r]);
      if constexpr (H::ACTIVE) {
        const int head = rows.head(min(r, rows.count - 1)) % group;
        const hook_row row = {seq, a.cache.kv_heads, kv_head, head, length, sees.index[r]};
        score = hook(score, row, max(at, 0));
        if (at >= 0 && r < rows.count && threadIdx.x % (LANES / 4) == 0)
          keep_score(hook, rows.row(a, r), at, score);
      }
      const bool hidden = at < sees.begin[r] || at > sees.limit[r] ||
                          (at >= tree && r < rows.count &&
                           !tree_shows(a, rows.token(r), length, at));
      return hidden ? -INFINITY : score;
    };

    paged_row next = tiles.find(tile + (STAGES - 1) * step);
    for (int stage = 0; tile < tile_end;
         tile += step, stage = stage + 1 == STAGES ? 0 : stage + 1) {
      copy_wait<STAGES - 2>();
      __syncwarp();
      tiles.fetch(stage == 0 ? STAGES - 1 : stage - 1, next);
      copy_commit();
      next = tiles.find(tile + STAGES * step);
#pragma unroll 1
      for (int batch = 0; batch < shape::KEYS; batch += 4 * SIDE)
        attend_batch(tiles, stage, batch, score_of);
    }
    copy_wait<0>();
    __syncwarp(); /* the ring is free again */
  }

  /* After it, every lane has the sums over all keys of the warp. */
  __device__ void join() {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      l[r] += __shfl_xor_sync(ALL_LANES, l[r], LANES / 2);
      l[r] += __shfl_xor_sync(ALL_LANES, l[r], LANES / 4);
      float top = m[r];
#pragma unroll
      for (int step = LANES; step < WARP; step *= 2)
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
      const float down = exp2_fast(m[r] - finite_shift(top));
      m[r] = top;
      l[r] *= down;
#pragma unroll
      for (int e = 0; e < 8; e++) out[r][e] *= down;
#pragma unroll
      for (int step = LANES; step < WARP; step *= 2) {
        l[r] += __shfl_xor_sync(ALL_LANES, l[r], step);
#pragma unroll
        for (int e = 0; e < 8; e++) out[r][e] += __shfl_xor_sync(ALL_LANES, out[r][e], step);
      }
    }
  }

  /* Call it after join. Stores sums [ROWS, D] and states [ROWS] for finish_rows. */
  __device__ void store(float *sums, float2 *states) const {
    const int lane = threadIdx.x % WARP;
    if (lane >= LANES) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (lane == 0) states[r] = make_float2(m[r], l[r]);
#pragma unroll
      for (int e = 0; e < 8; e++) sums[r * D + dim_of(e)] = out[r][e];
    }
  }
};

template <class T, int D, int ROWS, class H>
__device__ __forceinline__ void f32_decode(const kvl_paged_attention_args &a,
                                           const split_place &place, const H &hook) {
  using shape = f32_shape<T, D>;
  extern __shared__ __align__(128) char shared[];
  __shared__ int kept[PLAN_LENGTHS];
  __shared__ f32_rows<ROWS> sees[shape::WARPS];
  wait_for_previous();
  split_plan plan(a, place, kept);
  plan.make();
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int task = blockIdx.x * shape::WARPS + warp;
  const uint32_t share = place.units.quotient(task);
  const int unit = task - (int)(share * place.units.by);
  const int kv_head = place.subgroups.quotient(unit);
  if (share >= plan.shares) return;
  char *ring = shared + warp * shape::STAGES * shape::STAGE_BYTES;
  int *indices = (int *)(shared + shape::RING_BYTES) + warp * shape::STAGES * shape::KEYS;
  const float value_scale = a.cache.v_scale ? a.cache.v_scale[kv_head] : 1.f;

  int left = (int)(plan.begin(share + 1) - plan.begin(share));
  uint32_t first;
  int seq = plan.find(plan.begin(share), first), tile = (int)(plan.begin(share) - first);
  for (; left > 0; seq++, tile = 0) {
    const int length = a.lens[seq], tiles = plan.tiles(length);
    const int from = plan.first_tile(length) + tile, count = min(tiles - tile, left);
    const query_rows rows = unit_rows(place, seq, unit);
    const paged_keys keys(a, seq, kv_head, window_begin(a, length - 1), length);
    sees[warp].set(a, rows, length - 1, length);
    f32_state<T, D, ROWS> state;
    state.attend(keys, rows, sees[warp], from, from + count, 1, ring, indices, hook, seq,
                 length);
    state.join();
    left -= count;
    if (left == 0) let_next_start();
    const bool starts = tile == 0, ends = tile + count == tiles;
    const int64_t own_part = starts && ends ? -1
                                            : place.part(share, seq, a.seqs, unit, starts);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (r >= rows.count || lane >= shape::LANES) continue;
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        const int dim = state.dim_of(e);
        float x[4] = {state.out[r][e], state.out[r][e + 1], state.out[r][e + 2],
                      state.out[r][e + 3]};
        if (dim < a.cache.key.dim)
          write_part(a, place, own_part, rows, r, dim, x, state.m[r], state.l[r],
                     value_scale);
      }
    }
  }
}

template <class T, int D, int ROWS>
__global__ void __launch_bounds__(f32_shape<T, D>::WARPS *WARP, 2)
    paged_f32_decode(const __grid_constant__ kvl_paged_attention_args a,
                     const __grid_constant__ split_place place) {
  f32_decode<T, D, ROWS>(a, place, no_hook());
}

template <class T, int D, int ROWS, class H>
__device__ __forceinline__ void f32_prefill(const kvl_paged_attention_args &a, int subgroups,
                                            const H &hook) {
  using shape = f32_shape<T, D>;
  constexpr int WARPS = shape::WARPS, KEYS = shape::KEYS;
  extern __shared__ __align__(128) char shared[];
  __shared__ f32_rows<ROWS> sees[WARPS];
  const query_block block = find_queries<ROWS>(a, blockIdx.x, subgroups);
  const query_tile &tile_q = block.tile;
  const query_rows &rows = block.rows;
  const int kv_head = block.kv_head;
  if (tile_q.seq < 0) return;
  const int warp = threadIdx.x / WARP;
  const int length = a.lens[tile_q.seq], last = tile_q.index0 + tile_q.tokens - 1;
  sees[warp].set(a, rows, tile_q.index0, length);
  const paged_walk walk(a, tile_q.seq, kv_head, a.causal ? min(last + 1, length) : length,
                        window_begin(a, tile_q.index0));
  f32_state<T, D, ROWS> state;
  state.attend(walk, rows, sees[warp], walk.first / KEYS + warp,
               (walk.keys + KEYS - 1) / KEYS, WARPS,
               shared + warp * shape::STAGES * shape::STAGE_BYTES,
               (int *)(shared + shape::RING_BYTES) + warp * shape::STAGES * KEYS, hook,
               tile_q.seq, length);
  state.join();

  __syncthreads(); /* all warps are done with the ring, which now holds the states */
  static_assert(WARPS * ROWS * (D * 4 + 8) <= shape::RING_BYTES, "");
  float *sums = (float *)shared;
  float2 *states = (float2 *)(sums + WARPS * ROWS * D);
  state.store(sums + warp * ROWS * D, states + warp * ROWS);
  __syncthreads();
  finish_rows<WARPS, ROWS, D>(a, rows, a.cache.v_scale ? a.cache.v_scale[kv_head] : 1.f, sums,
                              states);
}

template <class T, int D, int ROWS>
__global__ void __launch_bounds__(f32_shape<T, D>::WARPS *WARP, 2)
    paged_f32_prefill(const __grid_constant__ kvl_paged_attention_args a, int subgroups) {
  f32_prefill<T, D, ROWS>(a, subgroups, no_hook());
}

}  // namespace kvl

#endif
