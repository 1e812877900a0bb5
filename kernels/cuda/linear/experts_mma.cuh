/* The products of a layer of experts in 16 bits, where there is no wgmma. A
 * piece of work is a tile of up to 64 rows and COLUMNS rows of its expert's matrix, for a
 * thread block; each of its warps has 32 rows and 32 columns. Both sides go through a ring
 * in shared memory, STAGES stages of K numbers.
 *
 * With SwiGLU a warp has 16 gates and their 16 partners, so a thread has both numbers of a
 * pair.
 *
 * Limit     tensor cores
 * Source    as experts.cu */
#ifndef KVL_CUDA_EXPERTS_MMA_CUH
#define KVL_CUDA_EXPERTS_MMA_CUH

#include "cuda/elementwise/silu.cuh"
#include "cuda/linear/expert_tiles.cuh"
#include "cuda/mma.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {

struct experts_mma_shape {
  enum { ROWS = 64, COLUMNS = 128, K = 64, PIECES = K / 8, STAGES = 3, THREADS = 256 };
  enum { X_BYTES = ROWS * K * 2, STAGE_BYTES = X_BYTES + COLUMNS * K * 2 };
  enum { SHARED_BYTES = STAGES * STAGE_BYTES };
  static_assert(fits(SMALL_TILES, SHARED_BYTES, THREADS, 128), "too much for some GPU");
};

/* x [rows, k], weights [experts, rows of a matrix, k]; k is a multiple of 8. */
template <class T>
__global__ void __launch_bounds__(experts_mma_shape::THREADS)
    experts_mma(const __grid_constant__ experts_product g, const T *weights, const T *x,
                int64_t k) {
  using shape = experts_mma_shape;
  constexpr int PIECES = shape::PIECES, STAGES = shape::STAGES;
  constexpr int EACH = shape::THREADS / PIECES; /* rows that all threads copy at once */
  extern __shared__ uint4 shared_tiles[];
  const uint32_t tiles = shared_address(shared_tiles);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int down = warp / 4 * 32,
            across = warp % 4 * 32; /* of this warp's rows and columns */
  const int piece = threadIdx.x % PIECES, mine = threadIdx.x / PIECES;
  const int stages = (int)((k + shape::K - 1) / shape::K);
  const int cut_units = g.swiglu ? shape::COLUMNS / 2 : shape::COLUMNS;
  let_next_start();
  wait_for_previous();
  const int items = g.tiles_there() * g.cuts;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int tile = item / g.cuts, cut = item - tile * g.cuts;
    const expert_tile of = g.tile(tile);
    const T *const from_x = x + (int64_t)(tile / g.share * g.step) * k;
    const T *const from_w = weights + of.expert * (int64_t)(g.swiglu ? 2 : 1) * g.units * k;
    auto copy = [&](int stage) {
      const uint32_t to = tiles + stage % STAGES * shape::STAGE_BYTES;
      const int64_t at = (int64_t)stage * shape::K + piece * 8;
#pragma unroll
      for (int i = 0; i < shape::ROWS / EACH; i++) {
        const int r = mine + i * EACH;
        const bool is_there = r < of.rows && at < k;
        copy_async(to + tile_byte<PIECES>(r, piece), from_x + (is_there ? r * k + at : 0),
                   is_there);
      }
#pragma unroll
      for (int i = 0; i < shape::COLUMNS / EACH; i++) {
        const int c = mine + i * EACH;
        /* With SwiGLU 16 gates and their 16 partners alternate. */
        const int unit = cut * cut_units + (g.swiglu ? c / 32 * 16 + c % 16 : c);
        const bool is_there = unit < g.units && at < k;
        const int64_t row = unit + (g.swiglu && c % 32 >= 16 ? g.units : 0);
        copy_async(to + shape::X_BYTES + tile_byte<PIECES>(c, piece),
                   from_w + (is_there ? row * k + at : 0), is_there);
      }
    };
    float d[2][4][4] = {};
    for (int s = 0; s < STAGES - 1; s++) {
      if (s < stages) copy(s);
      copy_commit();
    }
    for (int s = 0; s < stages; s++) {
      copy_wait<STAGES - 2>();
      __syncthreads();
      if (s + STAGES - 1 < stages) copy(s + STAGES - 1);
      copy_commit();
      const uint32_t rows = tiles + s % STAGES * shape::STAGE_BYTES;
      const uint32_t columns = rows + shape::X_BYTES;
#pragma unroll
      for (int step = 0; step < shape::K / 16; step++) {
        uint32_t a[2][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          load_matrices(a[i], rows + tile_byte<PIECES>(down + i * 16 + lane % 16,
                                                       step * 2 + lane / 16));
          load_matrices(
              b[i], columns + tile_byte<PIECES>(across + i * 16 + lane / 16 * 8 + lane % 8,
                                                step * 2 + lane / 8 % 2));
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int n = 0; n < 4; n++)
            mma(d[i][n], a[i], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1], T());
      }
    }
    copy_wait<0>();
    __syncthreads(); /* the next tile overwrites the ring */
#pragma unroll
    for (int i = 0; i < 4; i++) { /* the lane's rows */
      const int r = down + i / 2 * 16 + i % 2 * 8 + lane / 4;
      if (r >= of.rows) continue;
      T *const out = (T *)g.out + ((int64_t)tile * g.rows + r) * g.units;
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float *const y = &d[i / 2][n][i % 2 * 2];
        pack<T, 2> z;
        if (g.swiglu && n >= 2) break;
        const int unit = cut * cut_units + (g.swiglu ? across / 2 : across) + n * 8 +
                         lane % 4 * 2;
        const float *const partner = &d[i / 2][(n + 2) % 4][i % 2 * 2];
#pragma unroll
        for (int e = 0; e < 2; e++)
          z.at[e] = from_float<T>(g.swiglu ? silu<T>(y[e]) * partner[e] : y[e]);
        if (unit < g.units) store_pack<2>(out + unit, z);
      }
    }
  }
}

template <class T>
int launch_experts_mma(experts_product g, const T *weights, const T *x, int64_t k,
                       const kvl_cuda_queue *q) {
  using shape = experts_mma_shape;
  const int status = allow_shared<experts_mma<T>>(q, shape::SHARED_BYTES);
  if (status != KVL_OK) return status;
  g.cuts = ceil_div((g.swiglu ? 2 : 1) * (int64_t)g.units, shape::COLUMNS);
  return launch_programmatic(experts_mma<T>, grid((int64_t)g.most * g.cuts, 1, q, 2),
                             shape::THREADS, shape::SHARED_BYTES, q, g, weights, x, k);
}

}  // namespace kvl

#endif
