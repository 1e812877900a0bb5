/* The second half of a warp's work in paged_decode.cuh over packed numbers with scales
 * (int8): packed_rows.cuh over the tiles that decode_copies.cuh has copied. decode_rows.cuh
 * does this for all other codecs.
 *
 * Keys 4 i + m of a tile lie in its rows 8 m + i (tile_row): so a lane's four keys are
 * neighbours, and with them their scales and indices.
 *
 * Eight rows and head_dim 128 take about 900 instructions for a tile of 32 keys, 215 of which
 * copy another one (nvcc 13.0, sm_90a): 28 a key. With query rows as the mma's rows and a
 * subtraction for each number of keys, too, it was 41. An H200 at 4.56 TB/s and 1.755 GHz brings a scheduler
 * a key, its value and their scales every 53 cycles. */
#ifndef KVL_CUDA_DECODE_PACKED_CUH
#define KVL_CUDA_DECODE_PACKED_CUH

#include "cuda/attention/decode_rows.cuh"
#include "cuda/attention/packed_rows.cuh"

namespace kvl {

/* The scales of a tile's keys, or of its values, in shared memory: bf16 [KEYS, groups]. */
template <int GROUPS> struct tile_scales {
  const char *const at; /* of the lane's first key */
  const int groups;     /* GROUPS, or 3 of 4 */

  /* The scales of a group for the lane's four keys, which are neighbours. */
  __device__ __forceinline__ void of_four(float (&x)[4], int group) const {
    constexpr __nv_bfloat16 BF16 = {};
    if constexpr (GROUPS == 1) {
      const uint2 words = *(const uint2 *)at;
      const float2 low = unpack2(words.x, BF16), high = unpack2(words.y, BF16);
      x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    } else if constexpr (GROUPS == 2) {
      const uint4 four = *(const uint4 *)at;
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float2 both = unpack2(words[e], BF16);
        x[e] = group ? both.y : both.x;
      }
    } else {
      const __nv_bfloat16 *const from = (const __nv_bfloat16 *)at + group;
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] = __bfloat162float(from[e * groups]);
    }
  }
};

template <class T, int D, class C, class H, int ROWS>
struct decode_packed : decode_unit<H>,
                       packed_rows<T, D, C, ROWS, decode_shape<D, C, ROWS>::PIECES> {
  using shape = decode_shape<D, C, ROWS>;
  using of_unit = decode_unit<H>;
  using of_rows = packed_rows<T, D, C, ROWS, shape::PIECES>;
  using of_rows::lane, of_rows::row_of;
  using of_unit::a, of_unit::place, of_unit::unit, of_unit::rule;
  static constexpr int EIGHTS = of_rows::EIGHTS, GROUPS = of_rows::GROUPS;
  static_assert(shape::KEYS == 32 && shape::STAGE_BYTES % 128 == 0, "see piece_at");
  using scales = tile_scales<GROUPS>;
  using tile_scores = typename of_rows::tile_scores;

  float value_scale = 1.f;

  __device__ __forceinline__ decode_packed(const kvl_paged_attention_args &args,
                                           const split_place &place_, const H &hook_,
                                           int unit_, int kv_head_)
      : of_unit(args, place_, hook_, unit_, kv_head_) {}

  /* The slope of ALiBi for a row. It takes no register where there is none. */
  __device__ __forceinline__ float slope_of(int seq, int row) const {
    const query_rows rows = unit_rows(place, seq, unit);
    return row < rows.count ? a.alibi[rows.head0 + row] * LOG2E : 0.f;
  }
  __device__ __forceinline__ void begin_sequence(int seq) {
    const int head_dim = a.cache.key.dim;
    const query_rows rows = unit_rows(place, seq, unit);
    of_rows::begin((const T *)a.q + (seq * a.heads + rows.head0) * head_dim, rows.count,
                   head_dim, rule.scale);
  }

  /* Attends to a tile, whose keys' indices are in `indices`. */
  __device__ __forceinline__ void attend(char *stage, const int *indices, int seq,
                                         int length) {
    const int groups = GROUPS <= 2 ? GROUPS : a.cache.key.groups;
    const char *const scales_at = stage + 2 * shape::TILE_BYTES + lane / 4 * 8 * groups;
    const scales of_keys = {scales_at, groups};
    const scales of_values = {scales_at + shape::KEYS * 2 * groups, groups};
    const int4 four = *(const int4 *)(indices + lane / 4 * 4);
    const int where[4] = {four.x, four.y, four.z, four.w};
    const uint32_t at = of_rows::own_row(shared_address(stage));
    tile_scores s;
    float share[EIGHTS][2]; /* by which this tile's weights count */
    of_rows::scores(s, at, of_keys);
    finish_scores(s, where, seq, length);
    of_rows::weigh(s, share);
    of_rows::values(s, share, at + shape::TILE_BYTES, of_values,
                    [&](int e) { return where[e] >= 0; });
  }

  /* Changes a scaled score: cap, ALiBi, hook; a key that is not seen gets -inf. */
  __device__ __forceinline__ void finish_scores(tile_scores &s, const int (&where)[4],
                                                int seq, int length) const {
    if (rule.cap != 0.f) {
#pragma unroll
      for (int t = 0; t < EIGHTS; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
          for (int c = 0; c < 2; c++) s[t][e][c] = rule.cap * tanh_fast(s[t][e][c]);
    }
    if (a.alibi) {
#pragma unroll
      for (int t = 0; t < EIGHTS; t++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const float slope = slope_of(seq, row_of(t, c));
#pragma unroll
          for (int e = 0; e < 4; e++)
            s[t][e][c] += slope * (float)kvl__apart(where[e], length - 1);
        }
    }
#pragma unroll
    for (int t = 0; t < EIGHTS; t++)
#pragma unroll
      for (int e = 0; e < 4; e++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          if constexpr (H::ACTIVE)
            this->call_hook(s[t][e][c], row_of(t, c), where[e], seq, length);
          if (where[e] < 0) s[t][e][c] = -INFINITY;
        }
  }

  __device__ __forceinline__ void end_sums() { of_rows::template end_sums<H::HIDES>(); }
};

}  // namespace kvl

#endif
