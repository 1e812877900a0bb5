/* What score_rows.cuh and the kernels of expressions (expression_products.cuh) compute with:
 * the shapes of tiles, the group's queries in shared memory as 16-bit numbers, and products
 * of a tile and the queries on the tensor cores.
 *
 * Products of 16-bit numbers are exact in fp32, so scores differ only by the order of sums.
 * Numbers of more bits become a sum of 16-bit terms: three for f32 rows, score_terms() for q.
 * f8e4m3 rows become f16; where q becomes f16 too, a power of 2 per head brings it into f16's
 * range.
 *
 * A dot product does not depend on the order of its dims. So each lane may load whole pieces
 * of 16 bytes, if it takes the same dims of the row and of q: lanes 4n ... 4n + 3 take
 * neighbouring pieces of row n. In odd rows the two halves of every 128 bytes are swapped, so
 * that 8 lanes hit every bank once. */
#ifndef KVL_CUDA_SCORE_MMA_CUH
#define KVL_CUDA_SCORE_MMA_CUH

#include "cuda/mma.cuh"

namespace kvl {

/* The ring of each warp: a tile is 16 items with N rows of up to D numbers. */
template <class T, int D, int N> struct score_ring {
  static constexpr int ITEMS = 16, ROWS = N;
  static constexpr int PIECES = D * (int)sizeof(T) / 16, ROW_BYTES = PIECES * 16;
  static constexpr int TILE_BYTES = ITEMS * ROWS * ROW_BYTES;
  /* f32 rows need many products per byte, so more warps help them more than deeper rings. */
  static constexpr bool DEEP = sizeof(T) < 4 || TILE_BYTES > 16384;
  static constexpr int RING = (DEEP && TILE_BYTES <= 16384 ? 48 : 96) * 1024; /* at most */
  static constexpr int TILES = RING / TILE_BYTES, AHEAD = DEEP ? 3 : 2;
  static constexpr int WARPS = TILES >= 4 * AHEAD ? 4 : TILES / AHEAD;
  static constexpr int STAGES = TILES / WARPS < 8 ? TILES / WARPS : 8;
  static constexpr int BLOCKS = 192 * 1024 / RING; /* thread blocks per SM */
  static constexpr int RING_BYTES = WARPS * STAGES * TILE_BYTES;
  static constexpr int SHARED_BYTES = RING_BYTES + 128; /* without q */
  static_assert(WARPS * STAGES <= 32, "a mask of known items for each tile in the ring");
};

/* The type in which the tensor cores get rows of T. */
template <class T> struct score_type { using type = T; };
template <> struct score_type<f8e4m3> { using type = __half; };
template <> struct score_type<float> { using type = __nv_bfloat16; };

/* How many 16-bit numbers represent a number of q as exactly as fp32 sums need. */
template <class M> int score_terms(int q_dtype) {
  if (same<M, __half>) return q_dtype == KVL_DTYPE_F32 ? 2 : 1;
  return q_dtype == KVL_DTYPE_BF16 ? 1 : q_dtype == KVL_DTYPE_F16 ? 2 : 3;
}

/* The index of 16-byte piece `piece` of row `row` in a tile, and (score_q_piece) in q that is
 * multiplied with rows of T. Lanes that read together never share a bank. */
template <int PIECES> __device__ __forceinline__ int score_piece(int row, int piece) {
  return row * PIECES + (PIECES >= 8 ? piece ^ (row & 1) * 4 : piece);
}
template <class T, int D> __device__ __forceinline__ int score_q_piece(int row, int piece) {
  constexpr int swap = sizeof(T) == 1 ? 1 : sizeof(T) == 2 ? 4 : 2;
  return row * (D / 8) + (piece ^ (row & (sizeof(T) == 4 ? 3 : 1)) * swap);
}

/* c += one piece of 16 rows * q. x0 and x1 are the piece of this lane's two rows; q_row is
 * the row of q for its column, q_term the number of that row's term. */
template <class T, int D>
__device__ __forceinline__ void score_mma(float (&c)[4], const uint4 &x0, const uint4 &x1,
                                          const uint4 *q, int q_row, int piece, int q_term) {
  using M = typename score_type<T>::type;
  if constexpr (sizeof(T) == 2) {
    const uint4 b = q[score_q_piece<T, D>(q_row, piece)];
    const uint32_t a0[4] = {x0.x, x1.x, x0.y, x1.y}, a1[4] = {x0.z, x1.z, x0.w, x1.w};
    mma(c, a0, b.x, b.y, M());
    mma(c, a1, b.z, b.w, M());
  } else if constexpr (sizeof(T) == 1) {
    const uint32_t r0[4] = {x0.x, x0.y, x0.z, x0.w}, r1[4] = {x1.x, x1.y, x1.z, x1.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 b = q[score_q_piece<T, D>(q_row, 2 * piece + i / 2)];
      const uint2 h0 = halves_of(r0[i]), h1 = halves_of(r1[i]);
      const uint32_t a[4] = {h0.x, h1.x, h0.y, h1.y};
      mma(c, a, i % 2 ? b.z : b.x, i % 2 ? b.w : b.y, M());
    }
  } else {
    /* Leaves out terms that together fall below 2^-24. The tensor cores truncate sums
     * instead of rounding them; here this affects only the sum of a piece, not the whole
     * sum. */
    float sum[4] = {};
    const uint4 *at = q + score_q_piece<T, D>(q_row, piece / 2);
    const uint2 b = ((const uint2 *)at)[piece % 2];
    float f0[4], f1[4];
    load_floats((const float *)&x0, f0);
    load_floats((const float *)&x1, f1);
#pragma unroll
    for (int term = 0; term < 3; term++) {
      if (term + q_term > 2) break;
      const uint2 t0 = next_term(f0), t1 = next_term(f1);
      const uint32_t a[4] = {t0.x, t1.x, t0.y, t1.y};
      mma(sum, a, b.x, b.y, M());
    }
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] += sum[i];
  }
}

/* How many bits of a number are 1. */
template <int BITS> constexpr int ones = (BITS & 1) + ones<(BITS >> 1)>;
template <> constexpr int ones<0> = 0;

/* c = a tile of rows * 8 GROUPS heads of q. q_row is the row of q for this lane's column in
 * the first of the operand's rows [terms][rows in USED][padded]; USED has a bit for each of the
 * tile's rows that q is multiplied with, and dims from LENGTH on are zeros. */
template <class T, int D, int ROWS, int USED = (1 << ROWS) - 1, int LENGTH = D,
          int GROUPS = 1>
__device__ __forceinline__ void score_products(float (&c)[GROUPS][4], const uint4 *tile,
                                               const uint4 *q, int q_row, int padded,
                                               int terms) {
  constexpr int PIECES = D * (int)sizeof(T) / 16;
  constexpr int STEPS = (LENGTH * (int)sizeof(T) + 63) / 64;
  const int lane = threadIdx.x % WARP;
  float sums[2][GROUPS][4] = {}; /* two chains of sums */
#pragma unroll 1
  for (int t = 0; t < terms; t++) {
    int at = t * ones<USED>;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (!(USED >> r & 1)) continue;
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        const int piece = lane % 4 + 4 * j, row = r * 16 + lane / 4;
        const uint4 x0 = tile[score_piece<PIECES>(row, piece)],
                    x1 = tile[score_piece<PIECES>(row + 8, piece)];
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
          score_mma<T, D>(sums[j % 2][g], x0, x1, q, at * padded + q_row + 8 * g, piece, t);
      }
      at++;
    }
  }
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
#pragma unroll
    for (int i = 0; i < 4; i++) c[g][i] = sums[0][g][i] + sums[1][g][i];
}

/* The factor that brings the numbers of a head of q into f16's range. The largest, `most`,
 * becomes 2^14 ... 2^15. */
__device__ __forceinline__ float score_scale(float most) {
  return most > 0.f && most < INFINITY ? ldexpf(1.f, 14 - max(ilogbf(most), -100)) : 1.f;
}

/* Splits dims 8 piece ... 8 piece + 7 of each of a head's ROWS rows of q into terms, and writes
 * them to rows [terms][ROWS][padded] at `to`. Where q becomes f16, the head's numbers
 * are scaled; *unscale becomes what its sums must be multiplied with. D / 8
 * neighbouring lanes have the pieces of a head. */
template <class T, int D, int ROWS>
__device__ __forceinline__ void score_store_terms(const float (&x)[ROWS][8], int head,
                                                  int piece, int padded, int terms, uint4 *to,
                                                  float *unscale) {
  using M = typename score_type<T>::type;
  float scale = 1.f;
  if constexpr (same<M, __half>) {
    float most = 0.f;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int e = 0; e < 8; e++) most = fmaxf(most, fabsf(x[r][e]));
    most = warp_max<D / 8>(most);
    scale = score_scale(most);
  }
  if (piece == 0) *unscale = 1.f / scale;
  float left[ROWS][8];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int e = 0; e < 8; e++) left[r][e] = x[r][e] * scale;
  for (int t = 0; t < terms; t++)
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      pack<M, 8> term;
#pragma unroll
      for (int e = 0; e < 8; e++) {
        term.at[e] = from_float<M>(left[r][e]);
        left[r][e] -= to_float(term.at[e]);
      }
      const int row = (t * ROWS + r) * padded + head;
      store_pack<8>((M *)(to + score_q_piece<T, D>(row, piece)), term);
    }
}

}  // namespace kvl

#endif
