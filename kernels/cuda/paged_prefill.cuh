/* Flash attention of many query rows over paged KV for 16-bit q and a cache like it or of
 * f8e4m3, on the tensor cores (mma.sync): what paged_wgmma.cuh does not take.
 *
 * One block of threads takes 128 query rows that share a KV head: 128 / group tokens with
 * all heads of the group, so short chunks fill a tile and K and V are fetched once for the
 * group. Each of the 8 warps owns 16 rows and walks all keys, in tiles of KEYS. Tiles of K
 * and V are double-buffered by asynchronous copies: tile j + 1 arrives while tile j is
 * used, with one barrier a tile. f8e4m3 becomes q's type on the way to shared memory, by
 * plain loads and stores; the scales of K and V are applied to scores and to sums.
 *
 * Versions, 32K causal, bf16, head_dim 128, H100, 2026-11-20:
 *   1  8 warps x 16 rows, q in registers                               294 TFLOP/s
 *   2  version 1, q in shared memory, sums scaled only on a new maximum  276
 *   3  4 warps x 32 rows (each fragment of K and V feeds two mma), two blocks an SM,
 *      64 keys a tile: 300 bytes of spills                             218
 *   4  version 3 with 32 keys a tile                                   224
 * So reads of shared memory are not the limit; the next step is wgmma: paged_wgmma.cuh. */
#ifndef KVL_CUDA_PAGED_PREFILL_CUH
#define KVL_CUDA_PAGED_PREFILL_CUH

#include "paged_output.cuh"

namespace kvl {

template <int D> struct prefill_shape {
  static constexpr int WARPS = 8, ROWS = WARPS * 16, THREADS = WARPS * WARP;
  static constexpr int KEYS = D > 192 ? 32 : 64;
  static constexpr int PIECES = TILE_PIECES<D>;
  static constexpr bool Q_SHARED = D > 128;   /* else q stays in registers */
  static constexpr int TILE_BYTES = KEYS * PIECES * 16;
  static constexpr int Q_BYTES = Q_SHARED ? ROWS * D * 2 : 0;
  static constexpr int SHARED_BYTES = Q_BYTES + 4 * TILE_BYTES;
};

/* Three generations of a tile's rows: tile j + 2 is looked up while j + 1 is copied and j
 * is used. */
template <int KEYS> struct row_lists {
  int64_t offset[3][KEYS];
  int position[3][KEYS];
  int whole[3][KEYS / WARP];   /* is every key of these 32 there? */
};

/* C: the cache's type, T or f8e4m3. */
template <class T, int D, class C = T>
__global__ void __launch_bounds__(prefill_shape<D>::THREADS, 1)
paged_prefill(const __grid_constant__ kvl_paged_attention_args a, int subgroups) {
  using shape = prefill_shape<D>;
  constexpr int KEYS = shape::KEYS, PIECES = shape::PIECES;
  extern __shared__ __align__(128) char shared[];
  __shared__ row_lists<KEYS> lists;

  const int group = (int)(a.heads / a.cache.kv_heads), kv_head = blockIdx.y / subgroups;
  const int first = blockIdx.y % subgroups * shape::ROWS;
  const int heads_each = min(group - first, shape::ROWS);
  /* With a causal mask later tiles are longer: they start first. */
  const query_tile tile_q =
      find_tile(a, gridDim.x - 1 - blockIdx.x, max(1, shape::ROWS / group));
  if (tile_q.seq < 0) return;
  const query_rows rows = {tile_q.token0, kv_head * group + first, heads_each,
                           tile_q.tokens * heads_each};
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
  const int head_dim = a.cache.head_dim, length = a.lens[tile_q.seq];
  const int last = tile_q.position0 + tile_q.tokens - 1;
  const paged_walk walk(a, tile_q.seq, kv_head, a.causal ? min(last + 1, length) : length,
                        window_begin(a, tile_q.position0));
  const int tile0 = walk.first / KEYS, tiles = (walk.keys + KEYS - 1) / KEYS;
  const C *cache = (const C *)a.cache.kv;
  const int64_t to_value = walk.to_value();

  char *q_shared = shared;
  const uint32_t tiles_at = shared_address(shared + shape::Q_BYTES);
  auto find = [&](int t) {
    if (tid >= KEYS) return;
    paged_row row = walk.find(t * KEYS + tid);
    lists.offset[t % 3][tid] = row.offset;
    lists.position[t % 3][tid] = row.position;
    int whole = __all_sync(ALL_LANES, row.position >= 0);
    if (lane == 0) lists.whole[t % 3][warp] = whole;
  };
  auto fetch = [&](int t) {
    const uint32_t k_at = tiles_at + (t & 1) * 2 * shape::TILE_BYTES;
    const uint32_t v_at = k_at + shape::TILE_BYTES;
#pragma unroll
    for (int i = 0; i < KEYS * PIECES / shape::THREADS; i++) {
      int r = (i * shape::THREADS + tid) / PIECES, piece = (i * shape::THREADS + tid) % PIECES;
      bool valid = lists.position[t % 3][r] >= 0 && piece * 8 < head_dim;
      const C *k = valid ? cache + lists.offset[t % 3][r] + piece * 8 : cache;
      const C *v = valid ? k + to_value : cache;
      uint32_t to = tile_byte<PIECES>(r, piece);
      if constexpr (std::is_same_v<C, T>) {
        copy_async(k_at + to, k, valid);
        copy_async(v_at + to, v, valid);
      } else {
        const uint4 none = make_uint4(0, 0, 0, 0);
        store_shared(k_at + to, valid ? widen<T>(k) : none);
        store_shared(v_at + to, valid ? widen<T>(v) : none);
      }
    }
  };
  find(tile0);
  find(tile0 + 1);
  __syncthreads();
  fetch(tile0);
  copy_commit();

  /* This lane's rows of every mma: lane/4 and lane/4 + 8 of the warp's 16. */
  const int r0 = warp * 16 + lane / 4, r1 = r0 + 8, pair = lane % 4 * 2;
  const bool has0 = r0 < rows.count, has1 = r1 < rows.count;
  const T *q0 = nullptr, *q1 = nullptr;
  if (has0) q0 = (const T *)a.q + (rows.token(r0) * a.heads + rows.head(r0)) * head_dim;
  if (has1) q1 = (const T *)a.q + (rows.token(r1) * a.heads + rows.head(r1)) * head_dim;
  const int at0 = tile_q.position0 + r0 / heads_each, at1 = tile_q.position0 + r1 / heads_each;
  const int limit0 = !has0 ? -1 : a.causal ? at0 : length - 1;
  const int limit1 = !has1 ? -1 : a.causal ? at1 : length - 1;
  const int low0 = window_begin(a, at0), low1 = window_begin(a, at1);
  const float slope0 = a.alibi && has0 ? a.alibi[rows.head(r0)] * LOG2E : 0.f;
  const float slope1 = a.alibi && has1 ? a.alibi[rows.head(r1)] * LOG2E : 0.f;
  /* Keys past `most` concern no row of the warp; keys from `low` to `least` concern every
   * row of it (rows that do not exist may see what they like). */
  const int most = warp_max(max(limit0, limit1));
  const int least = warp_min(min(has0 ? limit0 : INT_MAX, has1 ? limit1 : INT_MAX));
  const int low = warp_max(max(has0 ? low0 : 0, has1 ? low1 : 0));
  const bool biased = a.alibi || a.soft_cap > 0.f;
  const score_rule rule(a);
  const float k_scale = a.cache.k_scale ? a.cache.k_scale[kv_head] : 1.f;
  const float scale = rule.scale * k_scale;

  uint32_t q[shape::Q_SHARED ? 1 : D / 16][4];
  uint4 *q_warp = (uint4 *)q_shared + warp * (D / 16) * WARP + lane;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    uint32_t x[4] = {load_pair(q0, k * 16 + pair, head_dim),
                     load_pair(q1, k * 16 + pair, head_dim),
                     load_pair(q0, k * 16 + pair + 8, head_dim),
                     load_pair(q1, k * 16 + pair + 8, head_dim)};
    if constexpr (shape::Q_SHARED) q_warp[k * WARP] = make_uint4(x[0], x[1], x[2], x[3]);
    else
#pragma unroll
      for (int i = 0; i < 4; i++) q[k][i] = x[i];
  }

  float out[D / 8][4] = {};
  float m0 = -INFINITY, m1 = -INFINITY, l0 = 0.f, l1 = 0.f;
  for (int t = tile0; t < tiles; t++) {
    copy_wait<0>();
    __syncthreads();   /* tile t is whole, list t + 1 written, buffer of t - 1 read out */
    if (t + 1 < tiles) fetch(t + 1);
    copy_commit();
    if (t + 2 < tiles) find(t + 2);

    const int *positions = lists.position[t % 3];
    if (positions[0] > most) continue;   /* past every row of this warp */
    const uint32_t k_at = tiles_at + (t & 1) * 2 * shape::TILE_BYTES;
    const uint32_t v_at = k_at + shape::TILE_BYTES;
    float s[KEYS / 8][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t x[4];
      if constexpr (shape::Q_SHARED) {
        uint4 y = q_warp[k * WARP];
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = q[k][i];
      }
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        uint32_t b[4];
        load_matrices(b, k_at + tile_byte<PIECES>(n * 16 + lane % 8 + lane / 16 * 8,
                                                  2 * k + lane / 8 % 2));
        mma(s[2 * n], x, b[0], b[1], T());
        mma(s[2 * n + 1], x, b[2], b[3], T());
      }
    }
    /* Positions ascend: of keys that are all there, the last is the first not to be seen. */
    const int *whole = lists.whole[t % 3];
    bool plain = whole[0] && whole[KEYS / WARP - 1] && positions[0] >= low &&
                 positions[KEYS - 1] <= least && !biased;
    float top0 = m0, top1 = m1;
    if (plain) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          s[n][c] *= scale;
          s[n][c + 2] *= scale;
        }
    } else {
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          int at = positions[n * 8 + pair + c];
          bool seen0 = at >= low0 && at <= limit0, seen1 = at >= low1 && at <= limit1;
          float x0 = rule(s[n][c] * k_scale), x1 = rule(s[n][c + 2] * k_scale);
          s[n][c] = seen0 ? x0 + slope0 * (float)(at - at0) : -INFINITY;
          s[n][c + 2] = seen1 ? x1 + slope1 * (float)(at - at1) : -INFINITY;
        }
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
      top0 = fmaxf(top0, fmaxf(s[n][0], s[n][1]));
      top1 = fmaxf(top1, fmaxf(s[n][2], s[n][3]));
    }
    top0 = warp_max<4>(top0);
    top1 = warp_max<4>(top1);
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
  copy_wait<0>();
  const float v_scale = a.cache.v_scale ? a.cache.v_scale[kv_head] : 1.f;
  /* Rows straight from the registers: four lanes write 8 neighbours of each row. */
  auto write = [&](bool has, int r, int half, float m, float l) {
    if (!has) return;
    int64_t row = rows.token(r) * a.heads + rows.head(r);
    row_end end = end_row(a, row, m, l);
    end.scale *= v_scale;
    if (a.lse && pair == 0) a.lse[row] = end.lse;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      int64_t at = row * head_dim + n * 8 + pair;
      if (n * 8 + pair >= head_dim) continue;
      float x[2] = {out[n][half], out[n][half + 1]};
      finish(a, end, at, x);
      store_out(a, at, x);
    }
  };
  write(has0, r0, 0, m0, l0);
  write(has1, r1, 2, m1, l1);
}

}  // namespace kvl

#endif
