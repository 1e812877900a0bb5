/* out = x / sqrt(mean(x^2) + eps) * weight over rows of dim. With `residual`, first adds x to
 * residual, in place, and normalises that sum as it was stored. With `bias`, a LayerNorm: the
 * mean of x is subtracted first, and bias is added last.
 *   x, out    f32 f16 bf16   [rows, dim]   out may be x
 *   residual  like x         [rows, dim]   optional
 *   weight    like x or f32  [dim]         bias like weight, optional; without a residual
 * Rows of x, residual and out may be apart (row).
 * Rows of whole 16-byte packs up to 32768 16-bit numbers stay in registers; others are read
 * twice.
 *
 * Bytes   2 * rows * dim * element; 4 * with a residual
 * Limit   memory bandwidth; the launch for a decode step
 * Best    bf16, share of R = 3084 GB/s (above 1: the last writes are still in L2):
 *         [4096, 4096] 21.6 us 1.01, + residual 44.0 us 0.99; [4096, 14336] 77.3 us 0.99,
 *         + residual 168 us 0.91; [131072, 128] 20.9 us 1.04; [16, 4096] 4.4 us, an empty
 *         launch 3.0 (H100 80GB HBM3, 2026-11-21)
 * Tried   notes/20261121-step.md
 * Source  Zhang and Sennrich 2019 */
#include "args/linear.h"
#include "cuda/programmatic.cuh"
#include "cuda/row.cuh"

namespace kvl {
namespace {

enum norm_kind { NORM_PLAIN, NORM_RESIDUAL, NORM_LAYER };

/* The sum of x over a team: TEAM lanes, or 0 for a whole thread block, which then calls it
 * once for each `sums`. */
template <int TEAM> __device__ __forceinline__ float team_sum(float x, float *sums) {
  x = warp_sum < TEAM ? TEAM : WARP > (x);
  if constexpr (TEAM == 0) {
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    x = warp_sum(lane < (int)blockDim.x / WARP ? sums[lane] : 0.f);
  }
  return x;
}

/* A row is held in the registers of a team: PACKS packs of 16 bytes per thread, all in flight
 * before the first is used; short rows hold the weight's packs, too. TEAM is the number of
 * lanes, or 0 for a whole thread block. */
template <int TEAM, int PACKS, norm_kind KIND, class T, class W>
__global__ void __launch_bounds__(TEAM ? ROW_THREADS : 512)
    rmsnorm_row(const T *x, T *residual, const W *weight, const W *bias, T *out, int64_t rows,
                int64_t step, int dim, float eps) {
  constexpr bool RESIDUAL = KIND == NORM_RESIDUAL;
  constexpr int N = WIDE<T>;
  constexpr bool EARLY = PACKS <= 2;
  const int threads = TEAM ? TEAM : blockDim.x, rank = threadIdx.x % threads;
  int64_t row = blockIdx.x;
  if (TEAM) row = row * (ROW_THREADS / threads) + threadIdx.x / threads;
  const bool valid = row < rows; /* a thread without a row still takes part in the shuffles */
  let_next_start();
  wait_for_previous();
  pack<T, N> v[PACKS], r[RESIDUAL ? PACKS : 1];
  pack<W, N> g[EARLY ? PACKS : 1];
  auto at = [&](int p) { return (p * threads + rank) * N; };
  auto has = [&](int p) { return valid && at(p) < dim; };
#pragma unroll
  for (int p = 0; p < PACKS; p++)
    if (has(p)) v[p] = load_pack<N>(x + row * step + at(p));
  if constexpr (RESIDUAL)
#pragma unroll
    for (int p = 0; p < PACKS; p++)
      if (has(p)) r[p] = load_pack<N>(residual + row * step + at(p));
  if constexpr (EARLY)
#pragma unroll
    for (int p = 0; p < PACKS; p++)
      if (has(p)) g[p] = load_pack<N>(weight + at(p));
  __shared__ float sums[KIND == NORM_LAYER ? 2 : 1][WARP];
  float squares = 0, mean = 0;
  if constexpr (KIND == NORM_LAYER) {
#pragma unroll
    for (int p = 0; p < PACKS; p++)
#pragma unroll
      for (int e = 0; e < N; e++)
        if (has(p)) mean += to_float(v[p].at[e]);
    mean = team_sum<TEAM>(mean, sums[1]) / (float)dim;
  }
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    if (!has(p)) continue;
    if constexpr (RESIDUAL) {
#pragma unroll
      for (int e = 0; e < N; e++)
        v[p].at[e] = from_float<T>(to_float(v[p].at[e]) + to_float(r[p].at[e]));
      store_pack<N>(residual + row * step + at(p), v[p]);
    }
#pragma unroll
    for (int e = 0; e < N; e++) {
      const float apart = to_float(v[p].at[e]) - mean;
      squares += apart * apart;
    }
  }
  squares = team_sum<TEAM>(squares, sums[0]);
  const float scale = 1.0f / sqrtf(squares / (float)dim + eps);
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    if (!has(p)) continue;
    const pack<W, N> own = EARLY ? g[EARLY ? p : 0] : load_pack<N>(weight + at(p));
    pack<W, N> more = {};
    if constexpr (KIND == NORM_LAYER) more = load_pack<N>(bias + at(p));
#pragma unroll
    for (int e = 0; e < N; e++) {
      float y = (to_float(v[p].at[e]) - mean) * scale * to_float(own.at[e]);
      if constexpr (KIND == NORM_LAYER) y += to_float(more.at[e]);
      v[p].at[e] = from_float<T>(y);
    }
    store_pack<N>(out + row * step + at(p), v[p]);
  }
}

/* For rows of any length and address: a block reads its row twice, the second time from L1
 * or L2. */
template <int N, class T, class W>
__global__ void __launch_bounds__(ROW_THREADS)
    rmsnorm_any(const T *x, T *residual, const W *weight, const W *bias, T *out, int64_t rows,
                int64_t step, int64_t dim, float eps) {
  __shared__ float sums[WARP];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T *from = x + row * step;
    T *sum_row = residual ? residual + row * step : nullptr;
    float squares = 0, mean = 0;
    if (bias) {
      walk<N>(0, dim, threadIdx.x, ROW_THREADS, [&](auto w, int64_t i) {
        float v[w.value];
        load_floats(from + i, v);
#pragma unroll
        for (int e = 0; e < w.value; e++) mean += v[e];
      });
      mean = block_sum(mean, sums) / (float)dim;
    }
    walk<N>(0, dim, threadIdx.x, ROW_THREADS, [&](auto w, int64_t i) {
      constexpr int n = w.value;
      float v[n];
      load_floats(from + i, v);
      if (sum_row) {
        float r[n];
        load_floats(sum_row + i, r);
#pragma unroll
        for (int e = 0; e < n; e++) v[e] = to_float(from_float<T>(v[e] + r[e]));
        store_floats(sum_row + i, v);
      }
#pragma unroll
      for (int e = 0; e < n; e++) squares += (v[e] - mean) * (v[e] - mean);
    });
    squares = block_sum(squares, sums);
    const float scale = 1.0f / sqrtf(squares / (float)dim + eps);
    if (sum_row) from = sum_row; /* a thread reads only what it wrote itself */
    walk<N>(0, dim, threadIdx.x, ROW_THREADS, [&](auto w, int64_t i) {
      constexpr int n = w.value;
      float v[n], g[n];
      load_floats(from + i, v);
      load_floats(weight + i, g);
#pragma unroll
      for (int e = 0; e < n; e++) v[e] = (v[e] - mean) * scale * g[e];
      if (bias) {
        load_floats(bias + i, g);
#pragma unroll
        for (int e = 0; e < n; e++) v[e] += g[e];
      }
      store_floats(out + row * step + i, v);
    });
  }
}

template <int N, class T, class W>
void start_any(const kvl_rmsnorm_args *g, const kvl_cuda_queue *q) {
  rmsnorm_any<N><<<grid(g->rows, 1, q, 32), ROW_THREADS, 0, q->stream>>>(
      (const T *)g->x, (T *)g->residual, (const W *)g->weight, (const W *)g->bias,
      (T *)g->out, g->rows, g->row, g->dim, g->eps);
}

template <int TEAM, int PACKS, class T, class W>
void start(const kvl_rmsnorm_args *g, const kvl_cuda_queue *q) {
  constexpr int TEAMS = TEAM ? ROW_THREADS / TEAM : 1, N = WIDE<T>;
  const int warps = (int)((g->dim / N + PACKS * WARP - 1) / (PACKS * WARP));
  const int threads = TEAM ? ROW_THREADS : warps * WARP;
  const unsigned blocks = (unsigned)((g->rows + TEAMS - 1) / TEAMS);
  /* The caller checks how the launches went. */
  auto launch = [&](auto kernel) {
    launch_programmatic(kernel, blocks, threads, 0, q, (const T *)g->x, (T *)g->residual,
                        (const W *)g->weight, (const W *)g->bias, (T *)g->out, g->rows,
                        g->row, (int)g->dim, g->eps);
  };
  if (g->residual) launch(rmsnorm_row<TEAM, PACKS, NORM_RESIDUAL, T, W>);
  else if (g->bias) launch(rmsnorm_row<TEAM, PACKS, NORM_LAYER, T, W>);
  else launch(rmsnorm_row<TEAM, PACKS, NORM_PLAIN, T, W>);
}

template <class T, class W> int rmsnorm_of(const kvl_rmsnorm_args *g, void *queue) {
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (g->rows == 0 || g->dim == 0) return KVL_OK;
  constexpr int N = WIDE<T>;
  const int64_t packs = g->dim / N;
  /* From this many threads per row on, each takes more packs. Few rows get all threads. */
  const int64_t most = g->rows < 2 * q->sm_count ? 512 : g->residual ? 256 : 128;
  if (g->dim % N || g->row % N || !aligned16(g->x, g->residual, g->weight, g->bias, g->out))
    start_any<1, T, W>(g, q);
  else if (packs <= WARP / 2) start<WARP / 2, 1, T, W>(g, q); /* a head of 128 16-bit dims */
  else if (packs <= WARP) start<WARP, 1, T, W>(g, q);
  else if (packs <= 2 * WARP) start<WARP, 2, T, W>(g, q);
  else if (packs <= most) start<0, 1, T, W>(g, q);
  else if (packs <= 2 * most) start<0, 2, T, W>(g, q);
  else if (packs <= 4 * 512) start<0, 4, T, W>(g, q);
  else if (packs <= 8 * 512) start<0, 8, T, W>(g, q);
  else start_any<N, T, W>(g, q);
  return kvl__cuda_launched();
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(rmsnorm) {
  using namespace kvl;
  const kvl_rmsnorm_args *g = (const kvl_rmsnorm_args *)args;
  KVL_CUDA_BY_FLOAT(g->dtype, T, {
    if (g->weight_dtype == KVL_DTYPE_F32) return rmsnorm_of<T, float>(g, queue);
    return rmsnorm_of<T, T>(g, queue);
  })
  return KVL_OK;
}
