/* The products of a layer of experts on Hopper, in 16 bits: the rows of each expert times one
 * of its two matrices.
 *
 * Rows are collected by expert in tiles; only the device knows how many tiles there are, and
 * whose they are. A piece of work is a tile of rows and COLUMNS rows of its
 * expert's matrix. The rows are the rows of wgmma's product, 64 for each consumer; if a tile has
 * fewer, what lies behind them in shared memory is multiplied, too, and never stored. One
 * warp has TMA bring both sides into a ring, stage by stage along k, for one piece of work after
 * the other; CONSUMERS warpgroups multiply.
 *
 * With SwiGLU, eight gates and their eight partners alternate in shared memory, so a thread has
 * both numbers of a pair.
 *
 * Limit     the bytes of the chosen experts at memory bandwidth; tensor cores from about 300
 *           rows of each expert on
 * Source    as experts.cu */
#ifndef KVL_CUDA_EXPERTS_WGMMA_CUH
#define KVL_CUDA_EXPERTS_WGMMA_CUH

#include "cuda/elementwise/silu.cuh"
#include "cuda/hopper.cuh"
#include "cuda/linear/expert_tiles.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {

struct experts_shape {
  enum { K = 64, PLACES = 12, STATIC = 1 << 10 };
  /* A warp brings both sides; it comes as a warpgroup if consumers need its registers. */
  static constexpr __host__ __device__ int threads(int consumers) {
    return consumers * WARPGROUP + (consumers > 2 ? WARPGROUP : WARP);
  }
  /* 64 numbers of a row each, that a stage has. */
  static constexpr __host__ __device__ int boxes(int columns) {
    return columns < 128 ? 128 / columns : 1;
  }
  static constexpr int stage_bytes(int columns, int rows) {
    return boxes(columns) * (columns + rows) * K * 2;
  }
};

/* weights: [experts, groups of 16 rows, 2, 8, k], the box 64 of k; rows: [k / 64, rows, 64] */
template <class T, int COLUMNS, int CONSUMERS>
__global__ void __launch_bounds__(experts_shape::threads(CONSUMERS), 1)
    experts_wgmma(const __grid_constant__ experts_product g,
                  const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap rows) {
#if KVL_SM90A
  using shape = experts_shape;
  constexpr int K = shape::K, PLACES = shape::PLACES, BOXES = shape::boxes(COLUMNS);
  constexpr int HALVES = COLUMNS == 256 ? 2 : 1, EACH = COLUMNS / HALVES;
  extern __shared__ char shared_bytes[];
  __shared__ uint64_t barriers_at[2][PLACES];
  const uint32_t full = shared_address(barriers_at[0]),
                 empty = shared_address(barriers_at[1]);
  const uint32_t bytes_w = BOXES * COLUMNS * K * 2, bytes_x = BOXES * g.rows * K * 2;
  const uint32_t ring_x = (shared_address(shared_bytes) + 1023) & ~1023u;
  const uint32_t ring_w = ring_x + g.places * bytes_x;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  constexpr int BRINGS = CONSUMERS * WARPGROUP / WARP; /* the warp that brings both sides */
  if (warp == BRINGS && lane == 0) {
    for (int i = 0; i < PLACES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, BRINGS);
    }
    barrier_init_done();
    prefetch_map(&weights);
    prefetch_map(&rows);
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();
  const int items = g.tiles_there() * g.cuts;
  int at = 0;
  uint32_t phase = 0;
  auto next = [&] {
    if (++at == g.places) at = 0, phase ^= 1;
  };

  if (warp >= BRINGS) {
    if constexpr (CONSUMERS > 2) registers_give<32>();
    if (warp > BRINGS || lane > 0) return;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const int tile = item / g.cuts, cut = item - tile * g.cuts;
      const expert_tile of = g.tile(tile);
      for (int i = 0; i < g.stages && of.rows > 0; i++, next()) {
        barrier_wait(empty + 8 * at, phase ^ 1);
        barrier_arrive_expect(full + 8 * at, bytes_w + bytes_x);
#pragma unroll
        for (int box = 0; box < BOXES; box++) {
          const int k = i * BOXES + box;
          copy_box(ring_w + at * bytes_w + box * COLUMNS * K * 2, &weights, k * K,
                   cut * (COLUMNS / 16), of.expert, full + 8 * at);
          copy_box3(ring_x + at * bytes_x + box * g.rows * K * 2, &rows,
                    tile / g.share * g.step, k, full + 8 * at);
        }
      }
    }
    return;
  }

  if constexpr (CONSUMERS > 2) registers_take<160>();
  const int group = warp / 4;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int tile = item / g.cuts, cut = item - tile * g.cuts;
    const int there = g.tile(tile).rows;
    if (there == 0) continue;
    if (CONSUMERS > 2 && group * 64 >= there) { /* nothing to do for this consumer */
      for (int i = 0; i < g.stages; i++, next()) {
        barrier_wait(full + 8 * at, phase);
        barrier_arrive_warp(empty + 8 * at, lane);
      }
      continue;
    }
    float d[HALVES][EACH / 2];
    int last = -1;
    for (int i = 0; i < g.stages; i++, next()) {
      barrier_wait(full + 8 * at, phase);
      products_begin();
#pragma unroll
      for (int box = 0; box < BOXES; box++) {
        const uint64_t x = rows_at<128>(ring_x + at * bytes_x + box * g.rows * K * 2 +
                                        group * 64 * K * 2);
        const uint64_t w = rows_at<128>(ring_w + at * bytes_w + box * COLUMNS * K * 2);
#pragma unroll
        for (int k = 0; k < K / 16; k++)
#pragma unroll
          for (int h = 0; h < HALVES; h++)
            product<T>(d[h], matrix_plus(x, k * 32),
                       matrix_plus(w, h * EACH * K * 2 + k * 32), i + box + k > 0);
      }
      products_commit();
      products_wait<1>();
      if (last >= 0) barrier_arrive_warp(empty + 8 * last, lane);
      last = at;
    }
    products_wait<0>();
#pragma unroll
    for (int h = 0; h < HALVES; h++) settle(d[h]);
    barrier_arrive_warp(empty + 8 * last, lane);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = group * 64 + warp % 4 * 16 + lane / 4 + 8 * i;
      if (r >= there) continue;
      T *const out = (T *)g.out + ((int64_t)tile * g.rows + r) * g.units;
      const int first = cut * (g.swiglu ? COLUMNS / 2 : COLUMNS) + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < COLUMNS / 16; n++) { /* 16 rows of the matrix */
        const float *const y = &d[n * 16 / EACH][n * 16 % EACH / 2] + 2 * i;
        pack<T, 2> z;
        if (g.swiglu) {
          const int unit = first + 8 * n;
#pragma unroll
          for (int e = 0; e < 2; e++) z.at[e] = from_float<T>(silu<T>(y[e]) * y[4 + e]);
          if (unit < g.units) store_pack<2>(out + unit, z);
          continue;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int unit = first + 16 * n + 8 * half;
#pragma unroll
          for (int e = 0; e < 2; e++) z.at[e] = from_float<T>(y[4 * half + e]);
          if (unit < g.units) store_pack<2>(out + unit, z);
        }
      }
    }
    __syncwarp(); /* all lanes have to come to the next product */
  }
#endif
}

/* Maps matrices [experts, rows, k] as [experts, rows / 16, 2, 8, k]. With SwiGLU the two are
 * eight gates and their partners, which are half of the rows further on. */
inline int map_experts(int dtype, const void *p, int64_t experts, int64_t rows, int64_t k,
                       bool swiglu, int columns, CUtensorMap *map) {
  const cuuint64_t row = 2 * k;
  const cuuint64_t dims[5] = {(cuuint64_t)k, 8, 2, (cuuint64_t)rows / 16,
                              (cuuint64_t)experts};
  const cuuint64_t strides[4] = {row, swiglu ? rows / 2 * row : 8 * row,
                                 swiglu ? 8 * row : 16 * row, rows * row};
  const cuuint32_t box[5] = {experts_shape::K, 8, 2, (cuuint32_t)columns / 16, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult r = encode_map()(map,
                                  dtype == KVL_DTYPE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                  5, (void *)p, dims, strides, box, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? KVL_OK : kvl__cuda_check(cudaErrorInvalidValue);
}
/* Maps rows [rows, k] as [k / 64, rows, 64]. */
inline int map_expert_rows(int dtype, const void *p, int64_t rows, int64_t k, int box_rows,
                           CUtensorMap *map) {
  constexpr int K = experts_shape::K;
  const cuuint64_t dims[3] = {K, (cuuint64_t)rows, (cuuint64_t)k / K};
  const cuuint64_t strides[2] = {2 * (cuuint64_t)k, 2 * K};
  const cuuint32_t box[3] = {K, (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
  const CUresult r = encode_map()(map,
                                  dtype == KVL_DTYPE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                  3, (void *)p, dims, strides, box, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? KVL_OK : kvl__cuda_check(cudaErrorInvalidValue);
}

template <class T, int COLUMNS, int CONSUMERS>
int launch_experts_wgmma(const experts_product &g, const CUtensorMap &weights,
                         const CUtensorMap &rows, int blocks, const kvl_cuda_queue *q) {
  constexpr auto kernel = experts_wgmma<T, COLUMNS, CONSUMERS>;
  int status = allow_shared<kernel>(q, q->shared_optin - experts_shape::STATIC);
  if (status != KVL_OK) return status;
  const size_t bytes = 1024 + (size_t)g.places * experts_shape::stage_bytes(COLUMNS, g.rows);
  return launch_programmatic(kernel, blocks, experts_shape::threads(CONSUMERS), bytes, q, g,
                             weights, rows);
}
template <class T>
int launch_experts_wgmma(const experts_product &g, int columns, const CUtensorMap &weights,
                         const CUtensorMap &rows, int blocks, const kvl_cuda_queue *q) {
  if (g.rows > 128) return launch_experts_wgmma<T, 256, 3>(g, weights, rows, blocks, q);
  if (g.rows > 64)
    return columns == 256 ? launch_experts_wgmma<T, 256, 2>(g, weights, rows, blocks, q)
                          : launch_experts_wgmma<T, 128, 2>(g, weights, rows, blocks, q);
  switch (columns) {
    case 32: return launch_experts_wgmma<T, 32, 1>(g, weights, rows, blocks, q);
    case 64: return launch_experts_wgmma<T, 64, 1>(g, weights, rows, blocks, q);
    case 128: return launch_experts_wgmma<T, 128, 1>(g, weights, rows, blocks, q);
    default: return launch_experts_wgmma<T, 256, 1>(g, weights, rows, blocks, q);
  }
}

}  // namespace kvl

#endif
