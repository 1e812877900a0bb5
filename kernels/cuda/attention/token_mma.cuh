/* Attention over lists of tokens on the tensor cores, for 16-bit q and a cache of q's dtype
 * or f8e4m3.
 *
 * A thread block takes one row of q, one KV head and up to 64 heads of its group, and walks
 * over its share of the list in tiles of KEYS tokens. K and V of a tile are rows of head_dim
 * numbers anywhere in memory. Neighbouring lanes copy a row, with asynchronous 16-byte
 * copies; two tiles (three for 64 dims of 16 bits) are in flight while one is computed. Up to
 * 16 heads are the rows of one mma, and the four warps share a tile's keys. More heads take
 * more warps (MW of them along the heads), so that a group reads its tokens once whatever its
 * size. Tiles of f8e4m3 have twice the tokens, and so as many bytes; they become f16 on their
 * way to the tensor cores (paged.cuh).
 *
 * When there are few rows, up to SPLITS_MAX blocks share a row's list. They form a cluster
 * and join their partial softmaxes through each other's shared memory, with no workspace and
 * no second kernel.
 *
 * The blocks of one KV head follow one another, row by row: the tokens that rows of a prompt
 * share fit the L2 for one head's K and V, but not for all heads'. */
#ifndef KVL_CUDA_TOKEN_MMA_CUH
#define KVL_CUDA_TOKEN_MMA_CUH

#include <cooperative_groups.h>

#include <type_traits>

#include "args/attention.h"
#include "cuda/attention/paged_split.cuh"

namespace kvl {

/* The lists of a call. Row r, KV head g: places + (r * heads + min(g, heads-1)) * k. */
struct token_lists {
  const int32_t *places;
  int64_t k, heads;
  int64_t all;           /* how many places the cache has */
  divisor block;         /* tokens per block */
  int splits, subgroups; /* thread blocks per list, and per group of heads */
  __device__ const int32_t *list(int64_t row, int kv_head) const {
    return places + (row * heads + (heads > 1 ? kv_head : 0)) * k;
  }
};

constexpr int SPLITS_MAX = 8; /* the largest cluster that every Hopper GPU can place */

template <int D, int MW, bool F8> struct token_shape {
  static constexpr int WARPS = 4, THREADS = WARPS * WARP, KEYS = F8 && D <= 128 ? 128 : 64;
  static constexpr int KW = WARPS / MW, KEYS_WARP = KEYS / KW, ROWS = 16 * MW;
  static constexpr int NUMBERS = F8 ? 16 : 8; /* per piece */
  static constexpr int PIECES = (D / NUMBERS + 7) / 8 * 8, TILE_BYTES = KEYS * PIECES * 16;
  static constexpr int STAGES = F8 || D > 64 ? 3 : 4, BLOCKS = !F8 && D > 128 ? 1 : 2;
  static constexpr int SHARED_BYTES = STAGES * 2 * TILE_BYTES;
  static_assert(SHARED_BYTES >= WARPS * 16 * D * 4, "the ring takes the warps' sums");
};

/* A barrier of the cluster, or of the block when that is all of it; and the address of
 * another block's shared memory. */
__device__ __forceinline__ void splits_sync(int splits) {
#if __CUDA_ARCH__ >= 900
  if (splits > 1) {
    cooperative_groups::this_cluster().sync();
    return;
  }
#endif
  __syncthreads();
}
template <class P>
__device__ __forceinline__ const P *shared_of(P *mine, int splits, int rank) {
#if __CUDA_ARCH__ >= 900
  if (splits > 1) return cooperative_groups::this_cluster().map_shared_rank(mine, rank);
#endif
  return mine;
}

/* ---- a tile's products ------------------------------------------------------------------
 * Every fragment is loaded from shared memory while the products of the one before it run:
 * a block has few warps, and none of them could hide that. */

/* s = q K for a warp's 8 N keys, which are rows `row` and on of a tile. */
template <bool F8, class M, int PIECES, int N, int K>
__device__ __forceinline__ void tile_scores(float (&s)[N][4], const uint32_t (&q)[K][4],
                                            uint32_t k_at, int row) {
  constexpr int STEPS = F8 ? K / 2 : K, KEYS16 = N / 2; /* steps over the dims */
  const int lane = threadIdx.x % WARP;
  uint32_t b[2][4];
  auto load = [&](int i) { /* step i / KEYS16 of keys 16 (i % KEYS16) and on */
                           load_matrices(
                               b[i % 2],
                               k_at + tile_byte<PIECES>(
                                          row + i % KEYS16 * 16 + lane % 8 + lane / 16 * 8,
                                          2 * (i / KEYS16) + lane / 8 % 2));
  };
  load(0);
#pragma unroll
  for (int i = 0; i < STEPS * KEYS16; i++) {
    if (i + 1 < STEPS * KEYS16) load(i + 1);
    const int k = i / KEYS16, n = i % KEYS16 * 2;
    const uint32_t(&x)[4] = b[i % 2];
    if constexpr (F8) {
      mma(s[n], q[2 * k], f8_to_f16(x[0]), f8_to_f16(x[0] >> 16), M());
      mma(s[n + 1], q[2 * k], f8_to_f16(x[2]), f8_to_f16(x[2] >> 16), M());
      mma(s[n], q[2 * k + 1], f8_to_f16(x[1]), f8_to_f16(x[1] >> 16), M());
      mma(s[n + 1], q[2 * k + 1], f8_to_f16(x[3]), f8_to_f16(x[3] >> 16), M());
    } else {
      mma(s[n], q[k], x[0], x[1], M());
      mma(s[n + 1], q[k], x[2], x[3], M());
    }
  }
}

/* out += P V, as add_values does, for V of f8e4m3. */
template <int PIECES, int KEYS8, int DIMS8>
__device__ __forceinline__ void tile_values_f8(float (&out)[DIMS8][4],
                                               const float (&s)[KEYS8][4], uint32_t v_at,
                                               int first) {
  constexpr int PAIRS = DIMS8 / 4; /* of pieces */
  const int lane = threadIdx.x % WARP;
  uint32_t b[2][4], p[4];
  auto load = [&](int i) { /* pieces 2 (i % PAIRS), + 1 of keys 16 (i / PAIRS) and on */
                           load_matrices_transposed(
                               b[i % 2],
                               v_at + tile_byte<PIECES>(first + i / PAIRS * 16 + lane % 16,
                                                        2 * (i % PAIRS) + lane / 16));
  };
  load(0);
#pragma unroll
  for (int i = 0; i < KEYS8 / 2 * PAIRS; i++) {
    if (i + 1 < KEYS8 / 2 * PAIRS) load(i + 1);
    const int k = i / PAIRS, n = i % PAIRS;
    if (n == 0) {
      p[0] = pack2(s[2 * k][0], s[2 * k][1], __half());
      p[1] = pack2(s[2 * k][2], s[2 * k][3], __half());
      p[2] = pack2(s[2 * k + 1][0], s[2 * k + 1][1], __half());
      p[3] = pack2(s[2 * k + 1][2], s[2 * k + 1][3], __half());
    }
#pragma unroll
    for (int h = 0; h < 2; h++) { /* a piece has keys 0-7 and 8-15 of 16 dims */
      const uint32_t x = __byte_perm(b[i % 2][2 * h], 0, 0x3120);
      const uint32_t y = __byte_perm(b[i % 2][2 * h + 1], 0, 0x3120);
      mma(out[4 * n + 2 * h], p, f8_to_f16(x), f8_to_f16(y), __half());
      mma(out[4 * n + 2 * h + 1], p, f8_to_f16(x >> 16), f8_to_f16(y >> 16), __half());
    }
  }
}

/* C is the cache's type: T or f8e4m3. */
template <class T, class C, int D, int MW>
__global__ void __launch_bounds__(token_shape<D, MW, same<C, f8e4m3>>::THREADS,
                                  token_shape<D, MW, same<C, f8e4m3>>::BLOCKS)
    token_mma(const __grid_constant__ kvl_paged_attention_args a,
              const __grid_constant__ token_lists lists) {
  constexpr bool F8 = same<C, f8e4m3>;
  using shape = token_shape<D, MW, F8>;
  using M = std::conditional_t<F8, __half, T>; /* the type on the tensor cores */
  constexpr int KEYS = shape::KEYS, PIECES = shape::PIECES, STAGES = shape::STAGES;
  constexpr int KEYS_WARP = shape::KEYS_WARP, KW = shape::KW, WORDS = KEYS / WARP;
  extern __shared__ __align__(128) char shared[];
  __shared__ uint32_t seen[STAGES][WORDS];    /* bit i: key i is a token */
  __shared__ float2 states[shape::WARPS][16]; /* (m, l) of the warps' rows */

  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
  const int split = blockIdx.x % lists.splits;
  const int64_t row = blockIdx.x / lists.splits;
  const int kv_head = blockIdx.y / lists.subgroups, head_dim = a.cache.key.dim;
  const int group = (int)(a.heads / a.cache.kv_heads);
  const int first = blockIdx.y % lists.subgroups * shape::ROWS;
  const int count = min(group - first, shape::ROWS);
  const int64_t row0 = row * a.heads + kv_head * group + first; /* row of q, counting heads */

  /* ---- copying ------------------------------------------------------------------------- */
  const int32_t *const list = lists.list(row, kv_head);
  const char *const cache = (const char *)a.cache.memory;
  const int64_t to_value = kvl__to_value(&a.cache, kv_head);
  const int tiles_all = (int)((lists.k + KEYS - 1) / KEYS);
  const int each = (tiles_all + lists.splits - 1) / lists.splits;
  const int begin = min(split * each, tiles_all), end = min(begin + each, tiles_all);
  const uint32_t ring = shared_address(shared);
  int ahead[WORDS]; /* this lane's places of the next tile to fetch */
  auto look_up = [&](int t) {
#pragma unroll
    for (int h = 0; h < WORDS; h++) {
      const int64_t key = (int64_t)t * KEYS + h * WARP + lane;
      ahead[h] = t < end && key < lists.k ? list[key] : -1;
    }
  };
  auto fetch = [&](int t, int stage) {
    long long offset[WORDS];
    unsigned is[WORDS], any = 0;
#pragma unroll
    for (int h = 0; h < WORDS; h++) {
      const bool valid = ahead[h] >= 0 && ahead[h] < lists.all;
      const uint32_t place = valid ? ahead[h] : 0, block = lists.block.quotient(place);
      offset[h] = (long long)kvl__row_at(&a.cache, &a.cache.key, block, kv_head,
                                         place - block * lists.block.by);
      any |= is[h] = __ballot_sync(ALL_LANES, valid);
      if (tid == h) seen[stage][h] = is[h];
    }
    look_up(t + 1);
    if (any == 0) return;
    constexpr int SIDE = shape::THREADS / PIECES; /* rows that are copied side by side */
    static_assert(WARP % SIDE == 0, "a copy's rows are of one word");
    const int piece = tid % PIECES, side = tid / PIECES;
    const uint32_t k_at = ring + stage * 2 * shape::TILE_BYTES;
#pragma unroll
    for (int r0 = 0; r0 < KEYS; r0 += SIDE) {
      const int h = r0 / WARP, from = r0 % WARP + side;
      const int dim = piece * shape::NUMBERS;
      const char *const k = cache + __shfl_sync(ALL_LANES, offset[h], from) + piece * 16;
      const bool valid = is[h] >> from & 1 && dim < head_dim;
      const uint32_t to = k_at + tile_byte<PIECES>(r0 + side, piece);
      copy_async(to, k, valid); /* else zeros: no NaN gets in, and nothing is read */
      copy_async(to + shape::TILE_BYTES, k + to_value, valid);
    }
  };

  wait_for_previous();
  look_up(begin);
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    fetch(begin + s, s);
    copy_commit();
  }

  /* ---- computing ----------------------------------------------------------------------- */
  const int kw = warp % KW, mw = warp / KW, pair = lane % 4 * 2;
  const int r0 = mw * 16 + lane / 4, r1 = r0 + 8; /* this lane's rows of every mma */
  const T *const q0 = r0 < count ? (const T *)a.q + (row0 + r0) * head_dim : nullptr;
  const T *const q1 = r1 < count ? (const T *)a.q + (row0 + r1) * head_dim : nullptr;
  uint32_t q[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; k++) load_query<F8>(q[k], q0, q1, k, head_dim);
  float scale0 = a.scale * LOG2E * (a.cache.k_scale ? a.cache.k_scale[kv_head] : 1.f);
  float scale1 = scale0;
  if constexpr (F8) {
    const int2 shift = rows_to_f16<T>(q);
    scale0 *= power_of_two(-shift.x);
    scale1 *= power_of_two(-shift.y);
  }
  float out[D / 8][4] = {}, m0 = -INFINITY, m1 = -INFINITY, l0 = 0.f, l1 = 0.f;
  int stage = 0;
  for (int t = begin; t < end; t++, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    copy_wait<STAGES - 2>();
    __syncthreads(); /* tile t is complete, and the one before it was read */
    fetch(t + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    copy_commit();
    constexpr int OWN = (KEYS_WARP + WARP - 1) / WARP; /* words of this warp's keys */
    constexpr uint32_t EVERY = ~0u >> (WARP * OWN - KEYS_WARP);
    uint32_t bits[OWN], any = 0, every = EVERY;
#pragma unroll
    for (int w = 0; w < OWN; w++) {
      const int first_key = kw * KEYS_WARP + w * WARP;
      bits[w] = seen[stage][first_key / WARP] >> first_key % WARP & EVERY;
      any |= bits[w];
      every &= bits[w];
    }
    if (any == 0) continue;
    const uint32_t k_at = ring + stage * 2 * shape::TILE_BYTES;
    const uint32_t v_at = k_at + shape::TILE_BYTES;
    float s[KEYS_WARP / 8][4] = {}; /* 16 rows x keys 0-7, 8-15, ... */
    tile_scores<F8, M, PIECES>(s, q, k_at, kw * KEYS_WARP);
    scale_rows(s, scale0, scale1);
    if (every != EVERY) {
#pragma unroll
      for (int n = 0; n < KEYS_WARP / 8; n++)
#pragma unroll
        for (int c = 0; c < 2; c++)
          if (!(bits[n / 4] >> (n % 4 * 8 + pair + c) & 1)) s[n][c] = s[n][c + 2] = -INFINITY;
    }
    float top0 = m0, top1 = m1;
#pragma unroll
    for (int n = 0; n < KEYS_WARP / 8; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        top0 = fmaxf(top0, s[n][c]);
        top1 = fmaxf(top1, s[n][c + 2]);
      }
    top0 = warp_max<4>(top0);
    top1 = warp_max<4>(top1);
    if (__any_sync(ALL_LANES, top0 > m0 || top1 > m1)) {
      const float down0 = exp2_fast(m0 - finite_shift(top0));
      const float down1 = exp2_fast(m1 - finite_shift(top1));
      m0 = top0;
      m1 = top1;
      l0 *= down0;
      l1 *= down1;
      scale_rows(out, down0, down1);
    }
    weigh_rows(s, finite_shift(m0), finite_shift(m1), l0, l1);
    if constexpr (F8) tile_values_f8<PIECES>(out, s, v_at, kw * KEYS_WARP);
    else add_values<T, PIECES>(out, s, v_at, kw * KEYS_WARP, lane);
  }
  copy_wait<0>();
  let_next_start();

  /* ---- joining ------------------------------------------------------------------------- */
  __syncthreads(); /* the ring was read; now it holds the sums, f32 [warps, 16, D] */
  l0 = warp_sum<4>(l0);
  l1 = warp_sum<4>(l1);
  float *const sums = (float *)shared;
  const int at0 = lane / 4;
  if (lane % 4 == 0) {
    states[warp][at0] = make_float2(m0, l0);
    states[warp][at0 + 8] = make_float2(m1, l1);
  }
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) { /* rotated, so that rows are in different banks */
      const int dim = dim_of<F8>(n, c) ^ at0 * 8;
      sums[(warp * 16 + at0) * D + dim] = out[n][c];
      sums[(warp * 16 + at0 + 8) * D + dim] = out[n][c + 2];
    }
  splits_sync(lists.splits);
  const float value_scale = a.cache.v_scale ? a.cache.v_scale[kv_head] : 1.f;
  for (int i = (split * shape::THREADS + tid) * 4; i < count * D;
       i += lists.splits * shape::THREADS * 4) {
    const int r = i / D, dim = i % D, r16 = r % 16, from = r / 16 * KW;
    if (dim >= head_dim) continue;
    float m = -INFINITY, l = 0.f, x[4] = {};
    for (int s = 0; s < lists.splits; s++) {
      const float2 *const other = shared_of(&states[0][0], lists.splits, s);
#pragma unroll
      for (int w = 0; w < KW; w++) m = fmaxf(m, other[(from + w) * 16 + r16].x);
    }
    for (int s = 0; s < lists.splits; s++) {
      const float2 *const other = shared_of(&states[0][0], lists.splits, s);
      const float *const parts = shared_of(sums, lists.splits, s);
#pragma unroll
      for (int w = 0; w < KW; w++) {
        const float2 state = other[(from + w) * 16 + r16];
        const float weight = exp2_fast(state.x - finite_shift(m));
        float part[4];
        load_floats(parts + ((from + w) * 16 + r16) * D + (dim ^ (r16 & 7) * 8), part);
        l += weight * state.y;
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] += weight * part[e];
      }
    }
    row_end to = end_row(a, row0 + r, m, l);
    to.scale *= value_scale;
    write_row(a, to, row0 + r, dim, x);
  }
  splits_sync(lists.splits); /* others may still read this block's memory */
}

}  // namespace kvl

#endif
