/* Flash attention of many query rows over paged KV on the tensor cores (mma.sync), for 16-bit
 * q and a cache of q's dtype, f8e4m3 or int8: for everything that paged_wgmma.cuh does not take.
 *
 * A thread block takes 128 query rows that share a KV head: 128 / group tokens with all heads
 * of the group, so short chunks fill a tile, and K and V are fetched once for the group. Each
 * of the 8 warps owns 16 rows and walks over all keys in tiles of KEYS. Asynchronous copies
 * double-buffer the tiles of K and V: tile j + 1 arrives while tile j is used, with one
 * barrier per tile. Numbers of 8 bits are converted to q's type on the way to shared memory, by
 * plain loads and stores; the scales of K and V are applied to scores and to sums.
 *
 * Where there are too few tiles of tokens for the device, the keys of each are cut into equal
 * shares, one for each thread block along z. These leave partial softmaxes, which
 * prefill_combine joins in the order of shares. Only the keys that may be seen decide where
 * the cuts are, so KV in slots gives the same bits as KV in its blocks.
 *
 * Versions, 32K causal, bf16, head_dim 128, H100, 2026-11-20:
 *   1  8 warps x 16 rows, q in registers                               294 TFLOP/s
 *   2  version 1, q in shared memory, sums scaled only on a new maximum  276
 *   3  4 warps x 32 rows (each fragment of K and V feeds two mma), two blocks per SM,
 *      64 keys per tile: 300 bytes of spills                           218
 *   4  version 3 with 32 keys per tile                                 224
 * So reads of shared memory are not the limit; the next step was wgmma: paged_wgmma.cuh. */
#ifndef KVL_CUDA_PAGED_PREFILL_CUH
#define KVL_CUDA_PAGED_PREFILL_CUH

#include "args/attention.h"
#include "cuda/attention/hook.cuh"
#include "cuda/attention/paged_output.cuh"

namespace kvl {

template <int D, tile_size TILES = TILES_HERE> struct prefill_shape {
  static constexpr bool LESS = TILES == SMALL_TILES && D > 128;
  static constexpr int WARPS = LESS ? 4 : 8, ROWS = WARPS * 16, THREADS = WARPS * WARP;
  static constexpr int KEYS = D > 192 || LESS ? 32 : 64;
  static constexpr int PIECES = TILE_PIECES<D>;
  static constexpr bool Q_SHARED = D > 128; /* otherwise q stays in registers */
  static constexpr int TILE_BYTES = KEYS * PIECES * 16;
  static constexpr int Q_BYTES = Q_SHARED ? ROWS * D * 2 : 0;
  static constexpr int SHARED_BYTES = Q_BYTES + 4 * TILE_BYTES;
};

/* The keys are cut into at most `shares` shares of at least `least` tiles each. They leave
 * this (a single share leaves only its notes):
 *   notes  u8   [shares, tokens, heads]            rows to mend, see paged_mend.cuh
 *   out    f32  [shares, tokens, heads, head_dim]  normalised
 *   lse    f32  [shares, tokens, heads]            base 2 */
struct prefill_parts {
  int shares, least;
  uint8_t *notes;
  float *out, *lse;
};

/* The rows of three tiles: tile j + 2 is looked up while tile j + 1 is copied and tile j is
 * used. */
template <int KEYS, bool PACKED> struct row_lists {
  int length; /* of the sequence; here for draft trees, as registers are short */
  int64_t offset[3][KEYS], scales[3][PACKED ? KEYS : 1];
  int index[3][KEYS];
  int whole[3][KEYS / WARP]; /* whether all of these 32 keys exist */
};

/* ---- tiles of keys --------------------------------------------------------------------- */

/* Looks up the rows of tile t. */
template <int KEYS, bool PACKED>
__device__ __forceinline__ void find_rows(const paged_walk &walk,
                                          row_lists<KEYS, PACKED> &lists, int t, int tid,
                                          int lane, int warp) {
  if (tid >= KEYS) return;
  paged_row row = walk.find(t * KEYS + tid);
  lists.offset[t % 3][tid] = row.offset;
  if constexpr (PACKED) lists.scales[t % 3][tid] = row.scales(walk.a.cache.key);
  lists.index[t % 3][tid] = row.index;
  int whole = __all_sync(ALL_LANES, row.index >= 0);
  if (lane == 0) lists.whole[t % 3][warp] = whole;
}

/* Starts to copy tile t to its buffer, K and then V. Its rows were found before the last
 * barrier. C is the type of the cache: T, f8e4m3 or int8. */
template <class T, int D, class C>
__device__ __forceinline__ void fetch_tile(
    const row_lists<prefill_shape<D>::KEYS, packs<C>> &lists, const char *cache,
    int64_t to_value, int head_dim, uint32_t tiles_at, int t) {
  using shape = prefill_shape<D>;
  constexpr int PIECES = shape::PIECES;
  const int tid = threadIdx.x;
  const uint32_t k_at = tiles_at + (t & 1) * 2 * shape::TILE_BYTES;
  const uint32_t v_at = k_at + shape::TILE_BYTES;
  constexpr int COUNT = shape::KEYS * PIECES / shape::THREADS;
  /* Numbers of 8 bits are loaded together and then converted: one wait for memory. */
  constexpr int AT_ONCE = same<C, T> ? 1 : COUNT % 4 == 0 ? 4 : COUNT % 3 == 0 ? 3 : 1;
#pragma unroll
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    uint2 k_came[AT_ONCE], v_came[AT_ONCE];
    float by_k[AT_ONCE], by_v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = (first + i) * shape::THREADS + tid, r = at / PIECES;
      const int piece = at % PIECES;
      const bool valid = lists.index[t % 3][r] >= 0 && piece * 8 < head_dim;
      const char *k = valid ? cache + lists.offset[t % 3][r] + piece * 8 * sizeof(C) : cache;
      const char *v = valid ? k + to_value : cache;
      if constexpr (same<C, T>) {
        copy_async(k_at + tile_byte<PIECES>(r, piece), k, valid);
        copy_async(v_at + tile_byte<PIECES>(r, piece), v, valid);
      } else {
        k_came[i] = valid ? *(const uint2 *)k : make_uint2(0, 0);
        v_came[i] = valid ? *(const uint2 *)v : make_uint2(0, 0);
        by_k[i] = by_v[i] = 1.f;
        if constexpr (packs<C>) {
          if (valid) {
            const char *const scales = cache + lists.scales[t % 3][r];
            by_k[i] = scale_at(scales, piece * 8);
            by_v[i] = scale_at(scales + to_value, piece * 8);
          }
        }
      }
    }
    if constexpr (!same<C, T>) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int at = (first + i) * shape::THREADS + tid;
        const uint32_t to = tile_byte<PIECES>(at / PIECES, at % PIECES);
        store_shared(k_at + to, widen<T, C>(k_came[i], by_k[i]));
        store_shared(v_at + to, widen<T, C>(v_came[i], by_v[i]));
      }
    }
  }
}

/* ---- scores ---------------------------------------------------------------------------- */

/* A query row and the indices that it sees: low ... limit. Its own index is `at`. */
struct prefill_row {
  int r, at, low, limit;
  bool has; /* whether there is such a row */
  float slope;

  __device__ __forceinline__ prefill_row(const kvl_paged_attention_args &a,
                                         const query_rows &rows, int index0, int length,
                                         int r_)
      : r(r_), at(index0 + r_ / rows.heads_each), low(window_begin(a, at)),
        has(r_ < rows.count) {
    limit = !has ? -1 : a.causal ? at : length - 1;
    slope = a.alibi && has ? a.alibi[rows.head(r)] * LOG2E : 0.f;
  }
  template <class T>
  __device__ __forceinline__ const T *query(const kvl_paged_attention_args &a,
                                            const query_rows &rows, int head_dim) const {
    if (!has) return nullptr;
    return (const T *)a.q + rows.row(a, r) * head_dim;
  }
  __device__ __forceinline__ bool sees(int index) const {
    return index >= low && index <= limit;
  }
  /* A row that does not exist is the last that does. */
  __device__ __forceinline__ hook_row for_hook(const kvl_paged_attention_args &a,
                                               const query_rows &rows, int64_t seq,
                                               int kv_head, int length) const {
    const int group = (int)(a.heads / a.cache.kv_heads);
    const int head = rows.head(has ? r : rows.count - 1) % group;
    return {seq, a.cache.kv_heads, kv_head, head, length, at};
  }
};

/* What holds for all rows of a warp: none of them sees keys past `most`, and all of them
 * see keys from `low` to `least` (rows that do not exist may see anything). No tree hides a
 * key up to `all`. */
struct prefill_sight {
  int most, least, low;
  __device__ __forceinline__ prefill_sight(const prefill_row &row0, const prefill_row &row1,
                                           int all)
      : most(warp_max(max(row0.limit, row1.limit))),
        least(min(all, warp_min(min(row0.has ? row0.limit : INT_MAX,
                                    row1.has ? row1.limit : INT_MAX)))),
        low(warp_max(max(row0.has ? row0.low : 0, row1.has ? row1.low : 0))) {}
};

/* Takes the k-th of K fragments in registers or, for K = 1, the k-th in shared memory. */
template <int K>
__device__ __forceinline__ void take_fragment(uint32_t (&x)[4], const uint32_t (&q)[K][4],
                                              const uint4 *q_warp, int k) {
  if constexpr (K == 1) {
    uint4 y = q_warp[k * WARP];
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = q[k][i];
  }
}
/* s += q k^T over the k-th sixteen dims, whose fragment is q; the keys are at k_at. */
template <class T, int PIECES, int N>
__device__ __forceinline__ void multiply_keys(float (&s)[N][4], const uint32_t (&q)[4],
                                              uint32_t k_at, int k, int lane) {
#pragma unroll
  for (int n = 0; n < N / 2; n++) {
    uint32_t b[4];
    load_matrices(
        b, k_at + tile_byte<PIECES>(n * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
    mma(s[2 * n], q, b[0], b[1], T());
    mma(s[2 * n + 1], q, b[2], b[3], T());
  }
}

/* Turn products into scores: scale_scores for a tile that every row sees as a whole,
 * mask_scores for any other. */
template <int N> __device__ __forceinline__ void scale_scores(float (&s)[N][4], float scale) {
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      s[n][c] *= scale;
      s[n][c + 2] *= scale;
    }
}
template <int N, class H>
__device__ __forceinline__ void mask_scores(float (&s)[N][4], const score_rule &rule,
                                            float k_scale, const int *indices, int pair,
                                            const prefill_row &row0, const prefill_row &row1,
                                            const H &hook, const hook_row &of0,
                                            const hook_row &of1) {
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      int at = indices[n * 8 + pair + c];
      bool seen0 = row0.sees(at), seen1 = row1.sees(at);
      float x0 = rule(s[n][c] * k_scale), x1 = rule(s[n][c + 2] * k_scale);
      x0 += row0.slope * (float)kvl__apart(at, row0.at);
      x1 += row1.slope * (float)kvl__apart(at, row1.at);
      if constexpr (H::ACTIVE) x0 = hook(x0, of0, max(at, 0)), x1 = hook(x1, of1, max(at, 0));
      s[n][c] = seen0 ? x0 : -INFINITY;
      s[n][c + 2] = seen1 ? x1 : -INFINITY;
    }
}
/* Called after mask_scores: also hides the tokens on other branches of a draft tree. Rows that
 * do not exist see nothing already. */
template <int N>
__device__ __forceinline__ void hide_by_tree(const kvl_paged_attention_args &a,
                                             const query_rows &rows, float (&s)[N][4],
                                             const int *indices, int length, int pair,
                                             int r) {
  const int64_t token0 = rows.token(min(r, rows.count - 1));
  const int64_t token1 = rows.token(min(r + 8, rows.count - 1));
  const int from = tree_begin(a, length);
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      int at = indices[n * 8 + pair + c];
      if (at < from) continue;
      if (!tree_shows(a, token0, length, at)) s[n][c] = -INFINITY;
      if (!tree_shows(a, token1, length, at)) s[n][c + 2] = -INFINITY;
    }
}

/* Raises the two rows' maxima to the largest of their scores. */
template <int N>
__device__ __forceinline__ void raise_tops(const float (&s)[N][4], float &top0, float &top1) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    top0 = fmaxf(top0, fmaxf(s[n][0], s[n][1]));
    top1 = fmaxf(top1, fmaxf(s[n][2], s[n][3]));
  }
  top0 = warp_max<4>(top0);
  top1 = warp_max<4>(top1);
}

/* Writes row r, or its part of this share, straight from the registers: of every four it
 * takes two, from `half` on. Four lanes write 8 neighbours. */
template <int N>
__device__ __forceinline__ void write_out(const kvl_paged_attention_args &a,
                                          const prefill_parts &parts, const query_rows &rows,
                                          int r, int head_dim, const float (&out)[N][4],
                                          int half, float m, float l, bool mends,
                                          float v_scale, int pair) {
  int64_t row = rows.row(a, r);
  if (parts.shares > 1) {
    row += blockIdx.z * a.tokens * a.heads;
    const float scale = l == 0.f ? 0.f : v_scale / l;
    if (pair == 0) parts.lse[row] = l == 0.f ? -INFINITY : m + log2f(l);
    if (pair == 0) parts.notes[row] = mends;
#pragma unroll
    for (int n = 0; n < N; n++)
      if (n * 8 + pair < head_dim)
        *(float2 *)(parts.out + row * head_dim + n * 8 + pair) = make_float2(
            out[n][half] * scale, out[n][half + 1] * scale);
    return;
  }
  if (pair == 0) parts.notes[row] = mends;
  if (!writes_row(a, mends)) return;
  row_end end = end_row(a, row, m, l);
  end.scale *= v_scale;
  if (a.lse && pair == 0) a.lse[row] = end.lse;
#pragma unroll
  for (int n = 0; n < N; n++) {
    int64_t at = row * head_dim + n * 8 + pair;
    if (n * 8 + pair >= head_dim) continue;
    float x[2] = {out[n][half], out[n][half + 1]};
    finish(a, end, at, x);
    store_out(a, at, x);
  }
}

/* ---- the kernel ------------------------------------------------------------------------ */

template <class T, int D, class C, class H>
__device__ __forceinline__ void prefill(const kvl_paged_attention_args &a, int subgroups,
                                        const prefill_parts &parts, const H &hook) {
  using shape = prefill_shape<D>;
  constexpr int KEYS = shape::KEYS, PIECES = shape::PIECES;
  extern __shared__ __align__(128) char shared[];
  __shared__ row_lists<KEYS, packs<C>> lists;

  /* With a causal mask later tiles are longer, so they start first. */
  const query_block block = find_queries<shape::ROWS>(a, gridDim.x - 1 - blockIdx.x,
                                                      subgroups);
  const query_tile &tile_q = block.tile;
  const query_rows &rows = block.rows;
  const int kv_head = block.kv_head;
  if (tile_q.seq < 0) return;
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
  const int head_dim = a.cache.key.dim, length = a.lens[tile_q.seq];
  const int last = tile_q.index0 + tile_q.tokens - 1;
  const paged_walk walk(a, tile_q.seq, kv_head, a.causal ? min(last + 1, length) : length,
                        window_begin(a, tile_q.index0));
  int tile0 = walk.first / KEYS, tiles = (walk.keys + KEYS - 1) / KEYS;
  if (parts.shares > 1) { /* the tiles of this share; without any, its part is empty */
    /* A selection of all blocks is cut as the blocks themselves. */
    if (walk.keys >= walk.end) tile0 = walk.begin / KEYS;
    const int count = max((min(walk.keys, walk.end) + KEYS - 1) / KEYS - tile0, 0);
    const int shares = max(min(count / parts.least, parts.shares), 1), z = blockIdx.z;
    if (z + 1 != shares) tiles = z < shares ? tile0 + count * (z + 1) / shares : tile0;
    if (z < shares) tile0 += count * z / shares;
  }
  const char *cache = (const char *)a.cache.memory;
  const int64_t to_value = walk.to_value();
  const uint32_t tiles_at = shared_address(shared + shape::Q_BYTES);
  auto find = [&](int t) { find_rows(walk, lists, t, tid, lane, warp); };
  auto fetch = [&](int t) {
    fetch_tile<T, D, C>(lists, cache, to_value, head_dim, tiles_at, t);
  };
  if (tid == 0) lists.length = length;
  find(tile0);
  find(tile0 + 1);
  __syncthreads();
  fetch(tile0);
  copy_commit();

  /* This lane's two rows of every mma are lane/4 and lane/4 + 8 of the warp's 16. */
  const int r0 = warp * 16 + lane / 4, pair = lane % 4 * 2;
  const prefill_row row0(a, rows, tile_q.index0, length, r0);
  const prefill_row row1(a, rows, tile_q.index0, length, r0 + 8);
  const T *const q0 = row0.query<T>(a, rows, head_dim);
  const T *const q1 = row1.query<T>(a, rows, head_dim);
  const prefill_sight sight(row0, row1, tree_begin(a, length) - 1);
  const bool biased = a.alibi || a.soft_cap > 0.f || H::ACTIVE;
  const hook_row of0 = row0.for_hook(a, rows, tile_q.seq, kv_head, length);
  const hook_row of1 = row1.for_hook(a, rows, tile_q.seq, kv_head, length);
  const score_rule rule(a);
  const float k_scale = a.cache.k_scale ? a.cache.k_scale[kv_head] : 1.f;
  const float scale = rule.scale * k_scale;

  /* Loops over fragments stay here: in functions they make ptxas spill at head_dim 128. */
  uint32_t q[shape::Q_SHARED ? 1 : D / 16][4];
  uint4 *q_warp = (uint4 *)shared + warp * (D / 16) * WARP + lane;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    uint32_t x[4];
    load_fragment(x, q0, q1, k * 16 + pair, head_dim);
    if constexpr (shape::Q_SHARED) q_warp[k * WARP] = make_uint4(x[0], x[1], x[2], x[3]);
    else
#pragma unroll
      for (int i = 0; i < 4; i++) q[k][i] = x[i];
  }

  float out[D / 8][4] = {};
  float m0 = -INFINITY, m1 = -INFINITY, l0 = 0.f, l1 = 0.f;
  for (int t = tile0; t < tiles; t++) {
    copy_wait<0>();
    __syncthreads(); /* tile t and list t + 1 are complete, the buffer of t - 1 was read */
    if (t + 1 < tiles) fetch(t + 1);
    copy_commit();
    if (t + 2 < tiles) find(t + 2);

    const int *indices = lists.index[t % 3];
    if (indices[0] > sight.most) continue; /* no row of this warp sees them */
    const uint32_t k_at = tiles_at + (t & 1) * 2 * shape::TILE_BYTES;
    const uint32_t v_at = k_at + shape::TILE_BYTES;
    float s[KEYS / 8][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t x[4];
      take_fragment(x, q, q_warp, k);
      multiply_keys<T, PIECES>(s, x, k_at, k, lane);
    }
    /* Positions ascend, so if all keys of a tile exist, its last one is the first to be out
     * of sight. */
    const int *whole = lists.whole[t % 3];
    bool plain = whole[0] && whole[KEYS / WARP - 1] && indices[0] >= sight.low &&
                 indices[KEYS - 1] <= sight.least && !biased;
    float top0 = m0, top1 = m1;
    if (plain) scale_scores(s, scale);
    else mask_scores(s, rule, k_scale, indices, pair, row0, row1, hook, of0, of1);
    if (a.tree && !plain) hide_by_tree(a, rows, s, indices, lists.length, pair, r0);
    raise_tops(s, top0, top1);
    const float shift0 = finite_shift(top0), shift1 = finite_shift(top1);
    const float down0 = exp2_fast(m0 - shift0), down1 = exp2_fast(m1 - shift1);
    m0 = top0;
    m1 = top1;
    l0 *= down0;
    l1 *= down1;
    scale_rows(out, down0, down1);
    weigh_rows(s, shift0, shift1, l0, l1);
    add_values<T, PIECES>(out, s, v_at, 0, lane);
  }

  l0 = warp_sum<4>(l0);
  l1 = warp_sum<4>(l1);
  float all[2] = {};
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int c = 0; c < 4; c++) all[c / 2] += out[n][c];
  const bool mends0 = !(warp_sum<4>(all[0]) * 0.f == 0.f);
  const bool mends1 = !(warp_sum<4>(all[1]) * 0.f == 0.f);
  copy_wait<0>();
  const float v_scale = a.cache.v_scale ? a.cache.v_scale[kv_head] : 1.f;
  if (row0.has)
    write_out(a, parts, rows, row0.r, head_dim, out, 0, m0, l0, mends0, v_scale, pair);
  if (row1.has)
    write_out(a, parts, rows, row1.r, head_dim, out, 2, m1, l1, mends1, v_scale, pair);
}

template <class T, int D, class C = T>
__global__ void __launch_bounds__(prefill_shape<D>::THREADS, 1)
    paged_prefill(const __grid_constant__ kvl_paged_attention_args a, int subgroups,
                  const __grid_constant__ prefill_parts parts) {
  prefill<T, D, C>(a, subgroups, parts, no_hook());
}

}  // namespace kvl

#endif
