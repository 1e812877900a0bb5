/* out = x / sqrt(mean(x^2) + eps) * weight over rows of dim; with `residual`, first
 * residual += x in place, and what is normalised is that sum as it was stored.
 *   x, out    f32 f16 bf16   [rows, dim]   out may be x
 *   residual  like x         [rows, dim]   optional
 *   weight    like x or f32  [dim]
 * Reads x (and residual) and writes out (and residual) once; the second pass over a row
 * finds it in L1 or L2.
 * Limit: memory bandwidth; latency below ~1000 rows.
 * Measured: bf16 65536 x 4096 2.6 TB/s; 2^21 x 128 2.4 (1.4 with a whole warp a row).
 * H100 80GB HBM3, 2026-11-20. Source: Zhang and Sennrich 2019. */
#include "row.cuh"

namespace {

using kvl::team;

template <int N, int THREADS, class T, class W>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
rmsnorm_kernel(const T *x, T *residual, const W *weight, T *out, int64_t rows, int64_t dim,
               float eps) {
  using own = team<THREADS>;
  for (int64_t row = own::first_row(); __any_sync(kvl::ALL_LANES, row < rows);
       row += own::row_step()) {
    int64_t length = row < rows ? dim : 0;   /* without a row it still shuffles along */
    const T *from = x + row * dim;
    T *sum_row = residual ? residual + row * dim : NULL;
    float squares = 0;
    kvl::walk<N>(0, length, own::rank(), THREADS, [&](auto w, int64_t i) {
      constexpr int n = w.value;
      float v[n];
      kvl::load_floats(from + i, v);
      if (sum_row) {
        float r[n];
        kvl::load_floats(sum_row + i, r);
#pragma unroll
        for (int j = 0; j < n; j++) v[j] = kvl::to_float(kvl::from_float<T>(v[j] + r[j]));
        kvl::store_floats(sum_row + i, v);
      }
#pragma unroll
      for (int j = 0; j < n; j++) squares += v[j] * v[j];
    });
    squares = own::reduce(squares, kvl::add_op(), 0.0f);
    float scale = 1.0f / sqrtf(squares / (float)dim + eps);
    if (sum_row) from = sum_row;   /* a thread reads only what it wrote itself */
    kvl::walk<N>(0, length, own::rank(), THREADS, [&](auto w, int64_t i) {
      constexpr int n = w.value;
      float v[n], g[n];
      kvl::load_floats(from + i, v);
      kvl::load_floats(weight + i, g);
#pragma unroll
      for (int j = 0; j < n; j++) v[j] = v[j] * scale * g[j];
      kvl::store_floats(out + row * dim + i, v);
    });
  }
}

template <int N, int THREADS, class T, class W>
void start(const kvl_rmsnorm_args *g, const kvl_cuda_queue *q) {
  rmsnorm_kernel<N, THREADS>
      <<<kvl::team_grid<THREADS>(g->rows, q), kvl::ROW_THREADS, 0, q->stream>>>(
          (const T *)g->x, (T *)g->residual, (const W *)g->weight, (T *)g->out, g->rows,
          g->dim, g->eps);
}

template <int N, class T, class W>
void rmsnorm(const kvl_rmsnorm_args *g, const kvl_cuda_queue *q) {
  enum { HALF_WARP = kvl::WARP / 2 };   /* bf16 heads of 128 dims are 16 packs */
  if (g->dim <= HALF_WARP * N) start<N, HALF_WARP, T, W>(g, q);
  else if (g->dim <= kvl::ROW_SHORT) start<N, kvl::WARP, T, W>(g, q);
  else start<N, kvl::ROW_THREADS, T, W>(g, q);
}

template <class T, class W> int rmsnorm_of(const kvl_rmsnorm_args *g, void *queue) {
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (g->rows == 0 || g->dim == 0) return KVL_OK;
  if (kvl::wide_rows(g->rows, g->dim, kvl::WIDE<T>, g->x, g->residual, g->weight, g->out))
    rmsnorm<kvl::WIDE<T>, T, W>(g, q);
  else rmsnorm<1, T, W>(g, q);
  return kvl__cuda_launched();
}

}  // namespace

KVL_CUDA_KERNEL(rmsnorm) {
  const kvl_rmsnorm_args *g = (const kvl_rmsnorm_args *)args;
  KVL_CUDA_BY_FLOAT(g->dtype, T, {
    if (g->weight_dtype == KVL_DTYPE_F32) return rmsnorm_of<T, float>(g, queue);
    return rmsnorm_of<T, T>(g, queue);
  })
  return KVL_OK;
}
