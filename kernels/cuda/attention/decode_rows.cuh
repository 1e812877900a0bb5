/* The second half of a warp's work in paged_decode.cuh: the online softmax of up to 16
 * query rows, which are the 16 rows of every mma, over the tiles that decode_copies.cuh has
 * copied. A lane has two of the rows: lane / 4 and lane / 4 + 8. decode_packed.cuh does
 * this for codecs that pack numbers. */
#ifndef KVL_CUDA_DECODE_ROWS_CUH
#define KVL_CUDA_DECODE_ROWS_CUH

#include "cuda/attention/decode_copies.cuh"

namespace kvl {

/* A unit of a warp's task, and what changes its scores. */
template <class H> struct decode_unit {
  const kvl_paged_attention_args &a;
  const split_place &place;
  const H &hook;
  const int unit, kv_head;
  const score_rule rule;

  __device__ __forceinline__ decode_unit(const kvl_paged_attention_args &args,
                                         const split_place &place_, const H &hook_, int unit_,
                                         int kv_head_)
      : a(args), place(place_), hook(hook_), unit(unit_), kv_head(kv_head_), rule(args) {}

  /* Has the hook change the score of row `row` and a key at index `key`, or at none (-1). */
  __device__ __forceinline__ void call_hook(float &score, int row, int key, int seq,
                                            int length) const {
    const int group0 = (unit - kv_head * (int)place.subgroups.by) * place.rows;
    const int head = min(group0 + row, place.group - 1);
    const hook_row of = {seq, a.cache.kv_heads, kv_head, head, length, length - 1};
    score = hook(score, of, max(key, 0));
    const query_rows rows = unit_rows(place, seq, unit);
    if (key >= 0 && row < rows.count)
      keep_score(hook, (int64_t)seq * a.heads + rows.head0 + row, key, score);
  }
};

template <class T, int D, class C, class H> struct decode_rows : decode_unit<H> {
  using of_unit = decode_unit<H>;
  using of_unit::a, of_unit::place, of_unit::unit, of_unit::kv_head, of_unit::rule;
  using shape = decode_shape<D, C>;
  static constexpr bool IN_BYTES = shape::BYTES == 1;
  using M = std::conditional_t<IN_BYTES, __half, T>; /* the type on the tensor cores */
  static constexpr int KEYS = shape::KEYS, PIECES = shape::PIECES, NUMBERS = shape::NUMBERS;
  static constexpr int STEPS = D / (2 * NUMBERS);  /* over the dims, of two pieces each */
  static constexpr int TILES_STEP = D / 8 / STEPS; /* of an mma's results */
  using tile_scores = float[KEYS / 8][4];          /* 16 rows x keys 0-7, 8-15, ... */

  const int lane, row0, row1;
  float slope0 = 0.f, slope1 = 0.f, scale0, scale1, value_scale = 1.f;
  uint32_t q[D / 16][4];
  float out[D / 8][4], m0, m1, l0, l1;

  __device__ __forceinline__ decode_rows(const kvl_paged_attention_args &args,
                                         const split_place &place_, const H &hook_, int unit_,
                                         int kv_head_)
      : of_unit(args, place_, hook_, unit_, kv_head_), lane(threadIdx.x % WARP),
        row0(lane / 4), row1(row0 + 8), scale0(rule.scale), scale1(rule.scale) {}

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
    for (int k = 0; k < D / 16; k++) load_query<IN_BYTES>(q[k], q0, q1, k, head_dim);
    if (a.alibi) {
      slope0 = q0 ? a.alibi[rows.head0 + row0] * LOG2E : 0.f;
      slope1 = q1 ? a.alibi[rows.head0 + row1] * LOG2E : 0.f;
    }
    if constexpr (IN_BYTES) {
      const int2 shift = rows_to_f16<T>(q);
      const float k_scale = same<C, f8e4m3> && a.cache.k_scale ? a.cache.k_scale[kv_head]
                                                               : 1.f;
      scale0 = rule.scale * k_scale * power_of_two(-shift.x);
      scale1 = rule.scale * k_scale * power_of_two(-shift.y);
      if (same<C, f8e4m3> && a.cache.v_scale) value_scale = a.cache.v_scale[kv_head];
    }
  }

  /* Attends to a tile, whose keys' indices are in `indices`. */
  __device__ __forceinline__ void attend(char *stage, const int *indices, int seq,
                                         int length) {
    const uint32_t k_at = shared_address(stage), v_at = k_at + shape::TILE_BYTES;
    tile_scores s = {};
    scores(s, k_at);
    weigh(s, indices, seq, length);
    values(s, v_at);
  }

  /* s += q K for keys 16 n ... + 15, in step k over the dims. */
  __device__ __forceinline__ void add_products(tile_scores &s, uint32_t k_at, int n,
                                               int k) const {
    uint32_t b[4];
    load_matrices(
        b, k_at + tile_byte<PIECES>(n * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
    if constexpr (IN_BYTES) {
#pragma unroll
      for (int h = 0; h < 4; h++) {
        const uint2 x = bytes_to_f16<C>(b[h]);
        mma(s[2 * n + h / 2], q[2 * k + h % 2], x.x, x.y, M());
      }
    } else {
      mma(s[2 * n], q[k], b[0], b[1], M());
      mma(s[2 * n + 1], q[k], b[2], b[3], M());
    }
  }
  /* s = q K, scaled. */
  __device__ __forceinline__ void scores(tile_scores &s, uint32_t k_at) const {
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++)
#pragma unroll
      for (int k = 0; k < STEPS; k++) add_products(s, k_at, n, k);
    scale_rows(s, scale0, scale1);
  }

  /* Turns scaled scores into weights, and rescales m, l and out to the new maximum. */
  __device__ __forceinline__ void weigh(tile_scores &s, const int *indices, int seq,
                                        int length) {
    if (rule.cap != 0.f) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) s[n][c] = rule.cap * tanh_fast(s[n][c]);
    }
    float top0 = m0, top1 = m1;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
      const int2 where = *(const int2 *)(indices + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int key = c ? where.y : where.x;
        if (a.alibi) {
          s[n][c] += slope0 * (float)kvl__apart(key, length - 1);
          s[n][c + 2] += slope1 * (float)kvl__apart(key, length - 1);
        }
        if constexpr (H::ACTIVE) {
          this->call_hook(s[n][c], row0, key, seq, length);
          this->call_hook(s[n][c + 2], row1, key, seq, length);
        }
        s[n][c] = key < 0 ? -INFINITY : s[n][c];
        s[n][c + 2] = key < 0 ? -INFINITY : s[n][c + 2];
        top0 = fmaxf(top0, s[n][c]);
        top1 = fmaxf(top1, s[n][c + 2]);
      }
    }
    raise_maxima(top0, top1, m0, m1, l0, l1, out);
    weigh_rows(s, finite_shift(m0), finite_shift(m1), l0, l1);
  }

  /* The weights of keys 16 k ... + 15: they already have the layout of the next mma's left
   * operand. */
  __device__ __forceinline__ static void pack_weights(uint32_t (&p)[4], const tile_scores &s,
                                                      int k) {
    p[0] = pack2(s[2 * k][0], s[2 * k][1], M());
    p[1] = pack2(s[2 * k][2], s[2 * k][3], M());
    p[2] = pack2(s[2 * k + 1][0], s[2 * k + 1][1], M());
    p[3] = pack2(s[2 * k + 1][2], s[2 * k + 1][3], M());
  }
  /* to += P V for keys 16 k ... + 15 and two pieces of dims, in step n over these. */
  __device__ __forceinline__ void add_values(float (*to)[4], const uint32_t (&p)[4],
                                             uint32_t v_at, int k, int n) const {
    uint32_t b[4];
    load_matrices_transposed(b,
                             v_at + tile_byte<PIECES>(k * 16 + lane % 16, 2 * n + lane / 16));
    if constexpr (IN_BYTES) {
#pragma unroll
      for (int h = 0; h < 2; h++) { /* a piece has keys 0-7 and 8-15 of 16 dims */
        const uint2 x = bytes_to_f16<C, true>(b[2 * h]);
        const uint2 y = bytes_to_f16<C, true>(b[2 * h + 1]);
        mma(to[2 * h], p, x.x, y.x, M());
        mma(to[2 * h + 1], p, x.y, y.y, M());
      }
    } else {
      mma(to[0], p, b[0], b[1], M());
      mma(to[1], p, b[2], b[3], M());
    }
  }
  /* out += P V */
  __device__ __forceinline__ void values(const tile_scores &s, uint32_t v_at) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      uint32_t p[4];
      pack_weights(p, s, k);
#pragma unroll
      for (int n = 0; n < STEPS; n++) add_values(out + n * TILES_STEP, p, v_at, k, n);
    }
  }

  /* Ends the sums over keys: l becomes the sum over all lanes of a row. */
  __device__ __forceinline__ void end_sums() {
    if constexpr (H::HIDES) { /* a head may hide what others see: see paged_mend.cuh */
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
  /* Stores (m, l) of the rows. */
  __device__ __forceinline__ void keep_states(float2 *states) const {
    if (lane % 4) return;
    states[row0] = make_float2(m0, l0);
    states[row1] = make_float2(m1, l1);
  }
  /* Stores the sums of the first `count` rows in memory, [16, D]. */
  __device__ __forceinline__ void keep_sums(float *sums, int count) const {
    auto keep = [&](int row, int c) {
      if (row >= count) return;
      float *const to = sums + row * D;
#pragma unroll
      for (int n = 0; n < D / 8; n++) { /* rotated, so that rows are in different banks */
        if constexpr (IN_BYTES) {
          to[dim_of<IN_BYTES>(n, 0) ^ row0 * 8] = out[n][c];
          to[dim_of<IN_BYTES>(n, 1) ^ row0 * 8] = out[n][c + 1];
        } else { /* neighbours */
          *(float2 *)(to + (dim_of<IN_BYTES>(n, 0) ^ row0 * 8)) = make_float2(out[n][c],
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
