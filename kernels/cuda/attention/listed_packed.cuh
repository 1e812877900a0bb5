/* What attention over lists needs for a codec that packs numbers (int8), in addition to
 * listed_mma.cuh: the scales.
 *
 * The scales of a token lie apart from its row, 2 to 8 bytes for K and as many for V. The
 * warp that looks up a tile loads them at once, four tiles ahead, with copies of 32-bit
 * words; scales of 2 and of 6 bytes may begin in the middle of a word. A token that the row
 * may not see has scales of 0.
 *
 * Each group of 64 dims has products of its own with a key, which the key's scale multiplies.
 * A value's scale multiplies its key's weight before the second product. The result may be
 * of any size, so it is stored as an f16 in a unit: each row has a unit for each group,
 * which changes only when a number does not fit, or when weights are scaled down. So a term
 * of a sum loses bits only if it is less than 2^-24 of the largest term of its row and
 * group, and is lost if it is less than 2^-35.
 *
 * For up to 16 heads of 128 dims a tile of 128 tokens takes about 875 instructions in each
 * warp, 320 of which convert bytes to f16, and 230 in the separate warp (nvcc 13.0,
 * sm_90a). An H200 at 4.6 TB/s and 1.755 GHz brings an SM a tile's numbers and scales every
 * 1700 cycles, or every 2060 where each token's scales take 32 bytes of memory. A scheduler
 * has one warp of a tile, so that half of its issue slots are empty. */
#ifndef KVL_CUDA_LISTED_PACKED_CUH
#define KVL_CUDA_LISTED_PACKED_CUH

#include "cuda/attention/listed.cuh"
#include "cuda/attention/listed_products.cuh"

namespace kvl {

/* The scales of the tiles that were looked up, in a ring. There are none if numbers are not
 * packed. */
template <class shape, bool PACKS = (shape::GROUPS > 0)> struct listed_scales {};
template <class shape> struct listed_scales<shape, true> {
  static constexpr int GROUPS_WORD = 2, WORDS = (shape::GROUPS + 1) / GROUPS_WORD;
  static constexpr bool BETWEEN = shape::GROUPS != 2; /* may rows begin between words? */
  /* Scales of keys, and of values. halves, bit i: the scales of key i begin in the middle
   * of a word. */
  alignas(16) uint32_t scales[shape::SLOTS][2][shape::KEYS][WORDS];
  uint32_t halves[shape::SLOTS][shape::WORDS];

  /* Loads the scales of a key, into those of key `at`. A warp does this for 32 neighbouring
   * keys at once. */
  __device__ __forceinline__ void copy_scales(const listed_keys<> &keys, int slot, int at,
                                              int physical, int token) {
    const kvl_strips &of = keys.a.cache.key;
    const char *from = kvl__keys_of(&keys.a.cache, physical, keys.kv_head) + of.scales +
                       token * of.groups / GROUPS_WORD * 4;
#pragma unroll
    for (int is_value = 0; is_value < 2; is_value++) {
      const uint32_t to = shared_address(scales[slot][is_value][at]);
#pragma unroll
      for (int w = 0; w < WORDS; w++)
        copy_word_async(to + w * 4, from + w * 4, physical >= 0);
      from += keys.to_value();
    }
    if (!BETWEEN) return;
    const unsigned half = __ballot_sync(ALL_LANES, token & of.groups & 1);
    if (threadIdx.x % WARP == 0) halves[slot][at / WARP] = half;
  }

  /* The scales of a group for the four neighbours from 4 (lane / 4) on, which are keys i,
   * 8 + i, 16 + i and 24 + i, with i = lane / 4. */
  __device__ __forceinline__ void of_four(float (&x)[4], int slot, bool is_value,
                                          int group) const {
    const int i = threadIdx.x % WARP / 4;
    const auto words = load_pack<4 * WORDS>(scales[slot][is_value][i * 4]);
    uint32_t half = 0;
    if (BETWEEN) half = halves[slot][0] >> i;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int w = group / 2; /* it begins in this word */
      const uint32_t next = w + 1 < WORDS ? words.at[e * WORDS + w + 1] : 0;
      const uint32_t two = __funnelshift_r(words.at[e * WORDS + w], next,
                                           (half >> e * 8 & 1) * 16);
      x[e] = __uint_as_float(group % 2 ? two & 0xFFFF0000u : two << 16);
    }
  }
};

/* A lane's scales of one group for 8 N neighbouring keys, or their values: for keys 2 (lane
 * % 4) and 2 (lane % 4) + 1 of each eight. */
template <int N, class Tiles>
__device__ __forceinline__ void load_scales(float (&x)[N][2], const Tiles &tiles, int slot,
                                            bool is_value, int key, int group) {
  static_assert(N <= 4, "all halves are bits of one word");
  constexpr int WORDS = Tiles::WORDS;
  const int pair = threadIdx.x % 4 * 2;
  uint32_t halves = 0;
  if (Tiles::BETWEEN) halves = tiles.halves[slot][key / WARP] >> (key % WARP + pair);
#pragma unroll
  for (int n = 0; n < N; n++) {
    const pack<uint32_t, 2 *WORDS> both = load_pack<2 * WORDS>(
        tiles.scales[slot][is_value][key + n * 8 + pair]);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int w = group / 2; /* it begins in this word */
      const uint32_t next = w + 1 < WORDS ? both.at[c * WORDS + w + 1] : 0;
      const uint32_t two = __funnelshift_r(both.at[c * WORDS + w], next,
                                           (halves >> (n * 8 + c) & 1) * 16);
      x[n][c] = __uint_as_float(group % 2 ? two & 0xFFFF0000u : two << 16);
    }
  }
}

/* s = q K, scaled, for a warp's 8 N keys, from number `key` of a tile on. get_q(k, x) gives
 * dims 16 k and on of q. The rows' scales are multiplied in first, because with a key's
 * scale alone a product could overflow f32. */
template <class C, int PIECES, int GROUPS, class Tiles, int N, class Q>
__device__ __forceinline__ void packed_scores(float (&s)[N][4], const Q &get_q, float scale0,
                                              float scale1, uint32_t k_at, const Tiles &tiles,
                                              int slot, int key, int groups) {
  constexpr int PAIRS = PACKED_GROUP / 32; /* of pieces */
#pragma unroll
  for (int n = 0; n < N; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    if (GROUPS > 2 && g >= groups) break;
    uint32_t q[2 * PAIRS][4];
    float sums[N][4], by[N][2];
#pragma unroll
    for (int k = 0; k < 2 * PAIRS; k++) get_q(2 * PAIRS * g + k, q[k]);
    tile_scores<C, __half, PIECES, PAIRS>(sums, q, g * PAIRS, k_at, key);
    load_scales(by, tiles, slot, false, key, g);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        s[n][c] += sums[n][c] * (by[n][c] * scale0);
        s[n][c + 2] += sums[n][c + 2] * (by[n][c] * scale1);
      }
  }
}

/* The units of the sums of values of a lane's two rows: byte g of up[r] is the exponent of
 * 1 in the unit of row r and group g. Units are powers of two, so m is an integer. */
template <int GROUPS> struct packed_units {
  static constexpr int EIGHTS = PACKED_GROUP / 8, MOST = 127 + 122; /* 2^122 */
  using row_sums = float[GROUPS * EIGHTS][4];
  uint32_t up[2] = {MOST * 0x01010101u, MOST * 0x01010101u};

  __device__ __forceinline__ int exponent(int g, int row) const {
    return up[row] >> 8 * g & 255;
  }
  __device__ __forceinline__ float one(int g, int row) const {
    const uint32_t x = g < 3 ? up[row] << (23 - 8 * g) : up[row] >> 1;
    return __uint_as_float(x & 0x7F800000u);
  }
  /* Changes a unit and rescales the sums; the weights are also scaled down by 2^down. */
  __device__ __forceinline__ void change(row_sums &out, int g, int row, float to,
                                         float down) {
    const float by = exp2_fast(to - (float)exponent(g, row) - down);
    up[row] = (up[row] & ~(255u << 8 * g)) | (uint32_t)to << 8 * g;
#pragma unroll
    for (int n = g * EIGHTS; n < (g + 1) * EIGHTS; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) out[n][2 * row + c] *= by;
  }
  /* Scales all weights of a row down by 2^down, and with them its largest products. */
  __device__ __forceinline__ void lower(row_sums &out, int row, float down) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
      change(out, g, row, fminf((float)exponent(g, row) + down, (float)MOST), down);
  }
  /* Makes room for products of up to `top` in a row (each lane knows its own): the largest
   * becomes less than 2^11, and f16 ends at 2^16. */
  __device__ __forceinline__ void make_room(row_sums &out, int g, int row, float top) {
    const int to = 137 + 127 - (int)(__float_as_uint(warp_max<4>(top)) >> 23);
    change(out, g, row, (float)min(to, exponent(g, row)), 0.f);
  }
  /* Brings all sums back. */
  __device__ __forceinline__ void end(row_sums &out) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      change(out, g, 0, 127.f, 0.f);
      change(out, g, 1, 127.f, 0.f);
    }
  }
};

/* Makes left operands from products of weights and scales (not negative), times powers of
 * two. The powers are multiplied in last, because scales times powers may be infinite.
 * Returns whether a result of this lane is infinite. */
template <int N, int K>
__device__ __forceinline__ bool pack_products(left_operand (&p)[K], const float (&s)[N][4],
                                              const float (&by)[N][2], float one0,
                                              float one1) {
  static_assert(K * 2 == N, "an operand has 16 keys");
  __half2 top = {};
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float one = r ? one1 : one0;
      const __half2 x = __floats2half2_rn(s[n][2 * r] * by[n][0] * one,
                                          s[n][2 * r + 1] * by[n][1] * one);
      p[n / 2].at[n % 2 * 2 + r] = *reinterpret_cast<const uint32_t *>(&x);
      top = __hmax2(top, x);
    }
  const uint32_t x = *reinterpret_cast<const uint32_t *>(&top);
  return (x & 0x7C00u) == 0x7C00u || (x & 0x7C000000u) == 0x7C000000u;
}

/* out += P V for a warp's 8 N keys, from number `key` of a tile on, whose weights are in s. */
template <class C, int PIECES, class Tiles, int N, int GROUPS, int DIMS8>
__device__ __forceinline__ void packed_values(float (&out)[DIMS8][4],
                                              packed_units<GROUPS> &units,
                                              const float (&s)[N][4], uint32_t v_at,
                                              const Tiles &tiles, int slot, int key,
                                              int groups) {
  constexpr int PAIRS = PACKED_GROUP / 32; /* of pieces */
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    if (GROUPS > 2 && g >= groups) break;
    float by[N][2];
    left_operand p[N / 2];
    load_scales(by, tiles, slot, true, key, g);
    auto is_over = [&] { return pack_products(p, s, by, units.one(g, 0), units.one(g, 1)); };
    if (__any_sync(ALL_LANES, is_over())) {
      float top[2] = {};
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) top[c / 2] = fmaxf(top[c / 2], s[n][c] * by[n][c % 2]);
      units.make_room(out, g, 0, top[0]);
      units.make_room(out, g, 1, top[1]);
      is_over();
    }
    tile_values<C, __half, PIECES, PAIRS, N>(out, g * PAIRS, v_at, key,
                                             [&](int k) { return p[k]; });
  }
}

}  // namespace kvl

#endif
