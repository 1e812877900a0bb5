/* The two products of a tile of listed tokens, for one warp: mma.sync over rows of K and V in
 * shared memory.
 *
 * Every fragment is loaded from shared memory while the products of the previous one run,
 * because a block has too few warps to hide these loads. */
#ifndef KVL_CUDA_LISTED_PRODUCTS_CUH
#define KVL_CUDA_LISTED_PRODUCTS_CUH

#include "cuda/attention/paged.cuh"

namespace kvl {

/* The address from which a lane reads pieces 2 n and on, for the rows whose first pieces it
 * reads at `first`. All rows of a tile begin at multiples of 128 bytes. */
__device__ __forceinline__ uint32_t pair_at(uint32_t first, int n) {
  return (first ^ n % 4 * 32) + n / 4 * 128;
}

using left_operand = pack<uint32_t, 4>; /* of an mma */

/* s = q K for a warp's 8 N keys, which are rows `row` and on of a tile, over the dims of q:
 * PAIRS pairs of pieces of K, from number `from` on. If there are few keys, each has two
 * sums, so that products wait less for one another. */
template <class C, class M, int PIECES, int PAIRS, int N, int K>
__device__ __forceinline__ void tile_scores(float (&s)[N][4], const uint32_t (&q)[K][4],
                                            int from, uint32_t k_at, int row) {
  constexpr bool IN_BYTES = sizeof(C) == 1;
  constexpr int KEYS16 = N / 2, SUMS = !IN_BYTES && N == 2 ? 2 : 1;
  const int lane = threadIdx.x % WARP;
  const uint32_t first = k_at +
                         tile_byte<PIECES>(row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  uint32_t b[2][4];
  float sums[SUMS][N][4] = {};
  auto load = [&](int i) { /* pair i / KEYS16 of keys 16 (i % KEYS16) and on */
                           load_matrices(b[i % 2], pair_at(first, from + i / KEYS16) +
                                                       i % KEYS16 * 16 * PIECES * 16);
  };
  load(0);
#pragma unroll
  for (int i = 0; i < PAIRS * KEYS16; i++) {
    if (i + 1 < PAIRS * KEYS16) load(i + 1);
    const int k = i / KEYS16, n = i % KEYS16 * 2;
    const uint32_t(&x)[4] = b[i % 2];
    if constexpr (IN_BYTES) {
      auto add = [&](float(&sum)[4], const uint32_t(&dims)[4], uint32_t keys) {
        const uint2 y = bytes_to_f16<C>(keys);
        mma(sum, dims, y.x, y.y, M());
      };
      add(sums[0][n], q[2 * k], x[0]);
      add(sums[0][n + 1], q[2 * k], x[2]);
      add(sums[0][n], q[2 * k + 1], x[1]);
      add(sums[0][n + 1], q[2 * k + 1], x[3]);
    } else {
      mma(sums[k % SUMS][n], q[k], x[0], x[1], M());
      mma(sums[k % SUMS][n + 1], q[k], x[2], x[3], M());
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int c = 0; c < 4; c++)
      s[n][c] = SUMS > 1 ? sums[0][n][c] + sums[SUMS - 1][n][c] : sums[0][n][c];
}

/* out += P V for 8 KEYS8 keys, which are rows `row` and on of a tile: PAIRS pairs of pieces of
 * V, from number `from` on. weights(k) gives the weights of keys 16 k and on. */
template <class C, class M, int PIECES, int PAIRS, int KEYS8, int DIMS8, class P>
__device__ __forceinline__ void tile_values(float (&out)[DIMS8][4], int from, uint32_t v_at,
                                            int row, const P &weights) {
  const int lane = threadIdx.x % WARP;
  const uint32_t first = v_at + tile_byte<PIECES>(row + lane % 16, lane / 16);
  uint32_t b[2][4];
  left_operand p;
  auto load = [&](int i) { /* pair i % PAIRS of keys 16 (i / PAIRS) and on */
                           load_matrices_transposed(b[i % 2],
                                                    pair_at(first, from + i % PAIRS) +
                                                        i / PAIRS * 16 * PIECES * 16);
  };
  load(0);
#pragma unroll
  for (int i = 0; i < KEYS8 / 2 * PAIRS; i++) {
    if (i + 1 < KEYS8 / 2 * PAIRS) load(i + 1);
    const int n = from + i % PAIRS;
    const uint32_t(&x)[4] = b[i % 2];
    if (i % PAIRS == 0) p = weights(i / PAIRS);
    if constexpr (sizeof(C) == 1) {
#pragma unroll
      for (int h = 0; h < 2; h++) { /* a piece has keys 0-7 and 8-15 of 16 dims */
        const uint2 y = bytes_to_f16<C, true>(x[2 * h]);
        const uint2 z = bytes_to_f16<C, true>(x[2 * h + 1]);
        mma(out[4 * n + 2 * h], p.at, y.x, z.x, M());
        mma(out[4 * n + 2 * h + 1], p.at, y.y, z.y, M());
      }
    } else {
      mma(out[2 * n], p.at, x[0], x[1], M());
      mma(out[2 * n + 1], p.at, x[2], x[3], M());
    }
  }
}

}  // namespace kvl

#endif
