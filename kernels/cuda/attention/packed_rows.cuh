/* The online softmax of 8 or 16 query rows over packed numbers with scales (int8), for one
 * warp, over tiles of 32 keys in shared memory: what decode_packed.cuh and listed_warps.cuh
 * share.
 *
 * Keys, and then dims, are the 16 rows of every mma, and eight query rows are its columns:
 *   S^T [16 keys, 8 rows]  = K   [16 keys, 16 dims] Q^T [16 dims, 8 rows]
 *   O^T [16 dims, 8 rows] += V^T [16 dims, 16 keys] P^T [16 keys, 8 rows]
 * So up to eight heads of a group leave no row of an mma empty, and a lane has half as many
 * scores and sums as it would with query rows as the mma's rows.
 *
 * With i = lane / 4 and j = lane % 4, a lane has the scores of the keys in rows i, 8 + i,
 * 16 + i and 24 + i of a tile, which are its keys 0 ... 3, and, of each eight query rows, of
 * 2 j and 2 j + 1. Of a piece of V (16 dims) a lane gets the even dims, which are rows 0-7 of
 * the mma, and the odd dims, which are its rows 8-15: its sums are of dims 2 i and 2 i + 1.
 * P^T has to be transposed (movmatrix) between the two products.
 *
 * A number n of a key becomes the f16 number n + RAISED, which needs no subtraction.
 * Products start at -RAISED times the sum of the row's q, which cancels RAISED. Numbers of
 * values become f16 without RAISED: if one key has a large scale, the rounding error that
 * RAISED leaves could be more than all other keys add to a dim where that key has 0.
 *
 * A row's weights are relative to the largest score of their own tile, so they are as exact
 * in a tile that matters little as in the one that matters most. */
#ifndef KVL_CUDA_PACKED_ROWS_CUH
#define KVL_CUDA_PACKED_ROWS_CUH

#include "cuda/attention/paged.cuh"

namespace kvl {

/* The power of two that scales numbers of up to `top` to less than 2^15, and its inverse.
 * top is 2^-112 or more, so that both are normal numbers. */
constexpr float LEAST_TOP = 0x1p-112f;
__device__ __forceinline__ float2 f16_unit(float top) {
  const uint32_t exponent = __float_as_uint(top) & 0x7F800000u;
  return make_float2(__uint_as_float((268u << 23) - exponent),
                     __uint_as_float(exponent - (14u << 23)));
}
/* The scales of a tile may differ by this factor if one power of two is to serve all of its
 * rows. */
constexpr uint32_t NARROW = 20u << 23; /* in their exponents */

/* Every lane gets the result of the eight lanes with the same lane % 4. */
template <class F> __device__ __forceinline__ float column_reduce(float x, F f) {
#pragma unroll
  for (int step = 4; step < WARP; step *= 2) x = f(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}

/* PIECES: of a tile's row. */
template <class T, int D, class C, int ROWS, int PIECES> struct packed_rows {
  using M = __half; /* the type on the tensor cores */
  static constexpr int EIGHTS = ROWS / 8, GROUPS = D / PACKED_GROUP;
  static constexpr int PIECES_GROUP = PACKED_GROUP / 16;
  using tile_scores = float[EIGHTS][4][2]; /* of four keys and two rows of each eight */

  const int lane;
  float scale[EIGHTS][2]; /* of the lane's rows, as are m and l */
  uint32_t q[EIGHTS][D / 16][2];
  float start[EIGHTS][GROUPS][2];   /* of the sums of a group's products */
  float out[EIGHTS][D / 16][4];     /* dims 2 i, 2 i + 1 of 16, two rows each */
  float m[EIGHTS][2], l[EIGHTS][2]; /* l is the sum over the lane's keys */

  __device__ __forceinline__ packed_rows() : lane(threadIdx.x % WARP) {}

  /* The row of the lane's column c, 0 or 1, of the t-th eight. */
  __device__ __forceinline__ int row_of(int t, int c) const {
    return t * 8 + lane % 4 * 2 + c;
  }

  /* Begins with `count` rows of q, from `first` on. */
  __device__ __forceinline__ void begin(const T *first, int count, int head_dim,
                                        float score_scale) {
#pragma unroll
    for (int t = 0; t < EIGHTS; t++) {
      const int row = t * 8 + lane / 4; /* of q, as an operand */
      const int shift = load_rows(q[t], row < count ? first + row * head_dim : nullptr,
                                  head_dim);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int up = __shfl_sync(ALL_LANES, shift, (lane % 4 * 2 + c) * 4);
        scale[t][c] = score_scale * power_of_two(-up);
        m[t][c] = -INFINITY;
        l[t][c] = 0.f;
      }
#pragma unroll
      for (int n = 0; n < D / 16; n++)
        out[t][n][0] = out[t][n][1] = out[t][n][2] = out[t][n][3] = 0.f;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        float sums[4] = {};
#pragma unroll
        for (int k = g * PIECES_GROUP; k < (g + 1) * PIECES_GROUP; k++)
          take_raised(sums, q[t][k][0], q[t][k][1]);
#pragma unroll
        for (int c = 0; c < 2; c++) start[t][g][c] = sums[c];
      }
    }
  }
  /* Loads a row of q as f16, scaled by a power of two, which it returns. */
  __device__ __forceinline__ int load_rows(uint32_t (&x)[D / 16][2], const T *from,
                                           int head_dim) const {
    float top = 0.f;
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        x[k][h] = load_pair(from, k * 16 + lane % 4 * 4 + h * 2, head_dim);
        const float2 two = unpack2(x[k][h], T());
        top = fmaxf(top, fmaxf(fabsf(two.x), fabsf(two.y)));
      }
    const int shift = f16_shift(warp_max<4>(top));
    const float by = power_of_two(shift);
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float2 two = unpack2(x[k][h], T());
        x[k][h] = pack2(two.x * by, two.y * by, M());
      }
    return shift;
  }
  /* sums -= RAISED * (b summed over its 16 rows) */
  __device__ __forceinline__ static void take_raised(float (&sums)[4], uint32_t b0,
                                                     uint32_t b1) {
    static_assert(RAISED == 1152, "of which TWO has the bits");
    constexpr uint32_t TWO = 0xE480E480u; /* -RAISED, twice */
    const uint32_t ones[4] = {TWO, TWO, TWO, TWO};
    mma(sums, ones, b0, b1, M());
  }

  /* The address from which a lane loads its row of a tile at `tile`: of piece 0. */
  __device__ __forceinline__ uint32_t own_row(uint32_t tile) const {
    return tile + lane * PIECES * 16 + tile_mix<PIECES>(lane) * 16;
  }
  /* The address of a piece in the lane's row of a load, see tile_byte: `at` is that of
   * piece 0; tiles begin at multiples of 128, but not of 256. */
  __device__ __forceinline__ static uint32_t piece_at(uint32_t at, int piece) {
    return (at ^ piece % 8 * 16) + piece / 8 * 128;
  }

  /* s = K q, scaled: each group of dims has its own sums, which the keys' scales multiply.
   * The rows' scales are multiplied in first, because with a key's scale alone a product
   * could overflow f32. */
  template <class S>
  __device__ __forceinline__ void scores(tile_scores &s, uint32_t k_at,
                                         const S &of_keys) const {
#pragma unroll
    for (int t = 0; t < EIGHTS; t++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[t][e][0] = s[t][e][1] = 0.f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      if (g >= of_keys.groups) break;
      float by[4], sums[EIGHTS][2][4]; /* of matrices 0 and 1, 2 and 3 */
      of_keys.of_four(by, g);
#pragma unroll
      for (int t = 0; t < EIGHTS; t++)
#pragma unroll
        for (int c = 0; c < 8; c++) sums[t][c / 4][c % 4] = start[t][g][c % 2];
#pragma unroll
      for (int k = g * PIECES_GROUP; k < (g + 1) * PIECES_GROUP; k++) {
        uint32_t b[4];
        load_matrices(b, piece_at(k_at, k));
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint2 x = raised_bytes<C>(b[2 * h]), y = raised_bytes<C>(b[2 * h + 1]);
          const uint32_t keys[4] = {x.x, y.x, x.y, y.y};
#pragma unroll
          for (int t = 0; t < EIGHTS; t++) mma(sums[t][h], keys, q[t][k][0], q[t][k][1], M());
        }
      }
#pragma unroll
      for (int t = 0; t < EIGHTS; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
          for (int c = 0; c < 2; c++)
            s[t][e][c] += sums[t][e / 2][e % 2 * 2 + c] * (by[e] * scale[t][c]);
    }
  }

  /* Turns scaled scores into weights (the largest of a row is 1), rescales m, l and out to
   * the new maximum, and returns the factor of the tile's weights relative to it. */
  __device__ __forceinline__ void weigh(tile_scores &s, float (&share)[EIGHTS][2]) {
    float top[EIGHTS][2];
    bool raised = false;
#pragma unroll
    for (int t = 0; t < EIGHTS; t++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float own = fmaxf(fmaxf(s[t][0][c], s[t][1][c]), fmaxf(s[t][2][c], s[t][3][c]));
        top[t][c] = column_reduce(own, max_op());
        raised = raised || top[t][c] > m[t][c];
      }
    if (__any_sync(ALL_LANES, raised)) raise(top);
#pragma unroll
    for (int t = 0; t < EIGHTS; t++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float shift = finite_shift(top[t][c]);
        float sum = 0.f;
#pragma unroll
        for (int e = 0; e < 4; e++) sum += s[t][e][c] = exp2_fast(s[t][e][c] - shift);
        share[t][c] = exp2_fast(top[t][c] - finite_shift(m[t][c]));
        l[t][c] += sum * share[t][c];
      }
  }
  /* Raises m to the maxima of new scores, and rescales l and out. */
  __device__ __forceinline__ void raise(const float (&top)[EIGHTS][2]) {
#pragma unroll
    for (int t = 0; t < EIGHTS; t++) {
      float down[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float most = fmaxf(m[t][c], top[t][c]);
        down[c] = exp2_fast(m[t][c] - finite_shift(most));
        m[t][c] = most;
        l[t][c] *= down[c];
      }
#pragma unroll
      for (int n = 0; n < D / 16; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) out[t][n][c] *= down[c % 2];
    }
  }

  /* out += V P, where the values' scales multiply the weights. A power of two brings these
   * products into f16's range. It depends on a group's largest scale or, where scales
   * differ much, on a row's largest product, so that only products of less than 2^-39 of it
   * get lost. Values that are not seen get scales of 0, so that no NaN gets in: their
   * weights are 0. sees(e): is key e of the lane seen? */
  template <class S, class F>
  __device__ __forceinline__ void values(const tile_scores &s,
                                         const float (&share)[EIGHTS][2], uint32_t v_at,
                                         const S &of_values, const F &sees) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      if (g >= of_values.groups) break;
      float by[4], back[EIGHTS][2];
      uint32_t p[EIGHTS][4];
      of_values.of_four(by, g);
#pragma unroll
      for (int e = 0; e < 4; e++) by[e] = sees(e) ? by[e] : 0.f;
      const float top = fmaxf(fmaxf(by[0], by[1]), fmaxf(by[2], by[3]));
      const float least = fminf(fminf(by[0], by[1]), fminf(by[2], by[3]));
      const uint32_t most = __reduce_max_sync(ALL_LANES, __float_as_uint(top));
      const bool narrow = most - __reduce_min_sync(ALL_LANES, __float_as_uint(least)) <
                          NARROW;
#pragma unroll
      for (int t = 0; t < EIGHTS; t++)
        pack_weights(p[t], back[t], s[t], by, __uint_as_float(most), narrow);
#pragma unroll
      for (int piece = g * PIECES_GROUP; piece < (g + 1) * PIECES_GROUP; piece++) {
        uint32_t b[4], dims[2][4]; /* of matrices 0 and 1, 2 and 3 */
        load_matrices_transposed(b, piece_at(v_at, piece));
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint2 x = bytes_to_f16<C, true>(b[2 * h]);
          const uint2 y = bytes_to_f16<C, true>(b[2 * h + 1]);
          dims[h][0] = x.x, dims[h][1] = x.y, dims[h][2] = y.x, dims[h][3] = y.y;
        }
#pragma unroll
        for (int t = 0; t < EIGHTS; t++) {
          float sums[4] = {};
          mma(sums, dims[0], p[t][0], p[t][1], M());
          mma(sums, dims[1], p[t][2], p[t][3], M());
#pragma unroll
          for (int c = 0; c < 4; c++)
            out[t][piece][c] += sums[c] * (back[t][c % 2] * share[t][c % 2]);
        }
      }
    }
  }
  /* The products of eight rows' weights and values' scales, as the mma's right operand; the
   * factor that undoes their scaling; and the initial value of the sums. */
  __device__ __forceinline__ static void pack_weights(uint32_t (&p)[4], float (&back)[2],
                                                      const float (&s)[4][2],
                                                      const float (&by)[4], float most,
                                                      bool narrow) {
    float x[4][2], top[2] = {most, most}, up[2];
#pragma unroll
    for (int e = 0; e < 4; e++)
#pragma unroll
      for (int c = 0; c < 2; c++) x[e][c] = s[e][c] * by[e];
    if (!narrow) {
#pragma unroll
      for (int c = 0; c < 2; c++)
        top[c] = column_reduce(fmaxf(fmaxf(x[0][c], x[1][c]), fmaxf(x[2][c], x[3][c])),
                               max_op());
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float2 by_unit = f16_unit(fmaxf(top[c], LEAST_TOP));
      up[c] = by_unit.x;
      back[c] = by_unit.y;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
      p[e] = turn_matrix(pack2(x[e][0] * up[0], x[e][1] * up[1], M()));
  }

  /* Ends the sums over keys: l becomes the sum over all lanes of a row. */
  template <bool HIDES> __device__ __forceinline__ void end_sums() {
#pragma unroll
    for (int t = 0; t < EIGHTS; t++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        if constexpr (HIDES) { /* a head may hide what others see: see paged_mend.cuh */
          float all = 0.f;
#pragma unroll
          for (int n = 0; n < D / 16; n++) all += out[t][n][c] + out[t][n][c + 2];
          l[t][c] += all * 0.f;
        }
        l[t][c] = column_reduce(l[t][c], add_op());
      }
  }
  /* Stores (m, l) of the rows. */
  __device__ __forceinline__ void keep_states(float2 *states) const {
    if (lane >= 4) return;
#pragma unroll
    for (int t = 0; t < EIGHTS; t++)
#pragma unroll
      for (int c = 0; c < 2; c++) states[row_of(t, c)] = make_float2(m[t][c], l[t][c]);
  }
  /* Stores the sums of the first `count` rows in memory, [ROWS, D], rotated: dim d is at
   * d ^ (row % 8 * 8). */
  __device__ __forceinline__ void keep_sums(float *sums, int count) const {
#pragma unroll
    for (int t = 0; t < EIGHTS; t++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int row = row_of(t, c), dim = lane / 4 * 2;
        if (row >= count) continue;
#pragma unroll
        for (int n = 0; n < D / 16; n++)
          *(float2 *)(sums + row * D + ((n * 16 + dim) ^ row % 8 * 8)) = make_float2(
              out[t][n][c], out[t][n][c + 2]);
      }
  }
};

}  // namespace kvl

#endif
