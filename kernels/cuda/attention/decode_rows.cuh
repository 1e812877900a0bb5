/* The second half of a warp of paged_decode.cuh: the online softmax of up to 16 query rows,
 * which are the 16 rows of every mma, over the tiles that decode_copies.cuh has copied. A
 * lane has two of the rows: lane / 4, and 8 more. */
#ifndef KVL_CUDA_DECODE_ROWS_CUH
#define KVL_CUDA_DECODE_ROWS_CUH

#include "cuda/attention/decode_copies.cuh"

namespace kvl {

template <class T, int D, bool F8, class H> struct decode_rows {
  using shape = decode_shape<D, F8>;
  using M = std::conditional_t<F8, __half, T>; /* the type on the tensor cores */
  static constexpr int KEYS = shape::KEYS, PIECES = shape::PIECES, NUMBERS = shape::NUMBERS;
  using tile_scores = float[KEYS / 8][4]; /* 16 rows x keys 0-7, 8-15, ... */

  const kvl_paged_attention_args &a;
  const split_place &place;
  const H &hook;
  const int unit, kv_head, lane, row0, row1;
  const score_rule rule;
  float slope0 = 0.f, slope1 = 0.f, scale0, scale1, value_scale = 1.f;
  uint32_t q[D / 16][4];
  float out[D / 8][4], m0, m1, l0, l1;

  __device__ __forceinline__ decode_rows(const kvl_paged_attention_args &args,
                                         const split_place &place_, const H &hook_, int unit_,
                                         int kv_head_)
      : a(args), place(place_), hook(hook_), unit(unit_), kv_head(kv_head_),
        lane(threadIdx.x % WARP), row0(lane / 4), row1(row0 + 8), rule(args),
        scale0(rule.scale), scale1(rule.scale) {}

  __device__ __forceinline__ void begin_sequence(int seq) {
    m0 = m1 = -INFINITY;
    l0 = l1 = 0.f;
#pragma unroll
    for (int n = 0; n < D / 8; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.f;
    const int head_dim = a.cache.key.dim;
    const query_rows rows = unit_rows(place, seq, unit);
    const T *const first = (const T *)a.q + (seq * a.heads + rows.head0) * head_dim;
    const T *const q0 = row0 < rows.count ? first + row0 * head_dim : nullptr;
    const T *const q1 = row1 < rows.count ? first + row1 * head_dim : nullptr;
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_query<F8>(q[k], q0, q1, k, head_dim);
    if (a.alibi) {
      slope0 = q0 ? a.alibi[rows.head0 + row0] * LOG2E : 0.f;
      slope1 = q1 ? a.alibi[rows.head0 + row1] * LOG2E : 0.f;
    }
    if constexpr (F8) {
      const int2 shift = rows_to_f16<T>(q);
      const float k_scale = a.cache.k_scale ? a.cache.k_scale[kv_head] : 1.f;
      scale0 = ldexpf(rule.scale * k_scale, -shift.x);
      scale1 = ldexpf(rule.scale * k_scale, -shift.y);
      if (a.cache.v_scale) value_scale = a.cache.v_scale[kv_head];
    }
  }

  /* Attends to a tile, whose keys' positions are in `positions`. */
  __device__ __forceinline__ void attend(uint32_t k_at, const int *positions, int seq,
                                         int length) {
    tile_scores s = {};
    scores(s, k_at);
    weigh(s, positions, seq, length);
    values(s, k_at + shape::TILE_BYTES);
  }

  /* s = q K, scaled and capped. */
  __device__ __forceinline__ void scores(tile_scores &s, uint32_t k_at) const {
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++)
#pragma unroll
      for (int k = 0; k < D / (2 * NUMBERS); k++) {
        uint32_t b[4];
        load_matrices(b, k_at + tile_byte<PIECES>(n * 16 + lane % 8 + lane / 16 * 8,
                                                  2 * k + lane / 8 % 2));
        if constexpr (F8) {
#pragma unroll
          for (int h = 0; h < 4; h++)
            mma(s[2 * n + h / 2], q[2 * k + h % 2], f8_to_f16(b[h]), f8_to_f16(b[h] >> 16),
                M());
        } else {
          mma(s[2 * n], q[k], b[0], b[1], M());
          mma(s[2 * n + 1], q[k], b[2], b[3], M());
        }
      }
    scale_rows(s, scale0, scale1);
    if (rule.cap != 0.f) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) s[n][c] = rule.cap * tanh_fast(s[n][c]);
    }
  }

  /* Has the hook change the scores of a key at position `key`, or at none (-1). */
  __device__ __forceinline__ void call_hook(float &score0, float &score1, int key, int seq,
                                            int length) const {
    const int at = max(key, 0), own = length - 1;
    const int group0 = (unit - kv_head * (int)place.subgroups.by) * place.rows;
    const int last = place.group - 1, kv_heads = a.cache.kv_heads;
    const hook_row of0 = {seq, kv_heads, kv_head, min(group0 + row0, last), length, own};
    const hook_row of1 = {seq, kv_heads, kv_head, min(group0 + row1, last), length, own};
    score0 = hook(score0, of0, at);
    score1 = hook(score1, of1, at);
    const query_rows rows = unit_rows(place, seq, unit);
    const int64_t row = (int64_t)seq * a.heads + rows.head0;
    if (key >= 0 && row0 < rows.count) keep_score(hook, row + row0, key, score0);
    if (key >= 0 && row1 < rows.count) keep_score(hook, row + row1, key, score1);
  }

  /* Turns scores into weights, and brings m, l and out to the new maximum. */
  __device__ __forceinline__ void weigh(tile_scores &s, const int *positions, int seq,
                                        int length) {
    float top0 = m0, top1 = m1;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
      const int2 where = *(const int2 *)(positions + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int key = c ? where.y : where.x;
        if (a.alibi) {
          s[n][c] += slope0 * (float)(key - length + 1);
          s[n][c + 2] += slope1 * (float)(key - length + 1);
        }
        if constexpr (H::ACTIVE) call_hook(s[n][c], s[n][c + 2], key, seq, length);
        s[n][c] = key < 0 ? -INFINITY : s[n][c];
        s[n][c + 2] = key < 0 ? -INFINITY : s[n][c + 2];
        top0 = fmaxf(top0, s[n][c]);
        top1 = fmaxf(top1, s[n][c + 2]);
      }
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
  }

  /* out += P V */
  __device__ __forceinline__ void values(const tile_scores &s, uint32_t v_at) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      /* The scores already have the layout of the next mma's left operand. */
      const uint32_t p[4] = {pack2(s[2 * k][0], s[2 * k][1], M()),
                             pack2(s[2 * k][2], s[2 * k][3], M()),
                             pack2(s[2 * k + 1][0], s[2 * k + 1][1], M()),
                             pack2(s[2 * k + 1][2], s[2 * k + 1][3], M())};
#pragma unroll
      for (int n = 0; n < D / (2 * NUMBERS); n++) {
        uint32_t b[4];
        load_matrices_transposed(
            b, v_at + tile_byte<PIECES>(k * 16 + lane % 16, 2 * n + lane / 16));
        if constexpr (F8) {
#pragma unroll
          for (int h = 0; h < 2; h++) { /* a piece has keys 0-7 and 8-15 of 16 dims */
            const uint32_t x = __byte_perm(b[2 * h], 0, 0x3120);
            const uint32_t y = __byte_perm(b[2 * h + 1], 0, 0x3120);
            mma(out[4 * n + 2 * h], p, f8_to_f16(x), f8_to_f16(y), M());
            mma(out[4 * n + 2 * h + 1], p, f8_to_f16(x >> 16), f8_to_f16(y >> 16), M());
          }
        } else {
          mma(out[2 * n], p, b[0], b[1], M());
          mma(out[2 * n + 1], p, b[2], b[3], M());
        }
      }
    }
  }

  /* Ends the sums over keys: l becomes the sum over all lanes of a row. */
  __device__ __forceinline__ void end_sums() {
    if constexpr (H::ACTIVE) { /* a head may hide what others see: see paged_mend.cuh */
      float all[2] = {};
#pragma unroll
      for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) all[c / 2] += out[n][c];
      l0 += all[0] * 0.f;
      l1 += all[1] * 0.f;
    }
    l0 = warp_sum<4>(l0);
    l1 = warp_sum<4>(l1);
  }
  /* Keeps the sums of the first `count` rows in memory, [16, D]. */
  __device__ __forceinline__ void keep_sums(float *sums, int count) const {
    auto keep = [&](int row, int c) {
      if (row >= count) return;
      float *const to = sums + row * D;
#pragma unroll
      for (int n = 0; n < D / 8; n++) { /* rotated, so that rows are in different banks */
        if constexpr (F8) {
          to[dim_of<F8>(n, 0) ^ row0 * 8] = out[n][c];
          to[dim_of<F8>(n, 1) ^ row0 * 8] = out[n][c + 1];
        } else { /* neighbours */
          *(float2 *)(to + (dim_of<F8>(n, 0) ^ row0 * 8)) = make_float2(out[n][c],
                                                                        out[n][c + 1]);
        }
      }
    };
    keep(row0, 0);
    keep(row1, 2);
  }
};

}  // namespace kvl

#endif
