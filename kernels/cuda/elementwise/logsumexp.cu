/* out[o][i] = log of the sum over n of e^a[o][n][i].
 *   a    f32 f16 bf16    [outer, n, inner]
 *   out  like a, or f32  [outer, inner]
 * Nothing, or only -inf, gives -inf; a +inf gives +inf; a NaN gives NaN.
 * Reads a once: the running sum is rescaled when its maximum grows, as in softmax.cu. Rows
 * (inner == 1) are taken by a warp or a block each; a few long rows are cut into pieces, whose
 * (maximum, sum) go through the workspace. For columns a block has 32 of them side by side,
 * and its other threads go down n.
 * Limit: memory bandwidth; few columns with a large n leave the device idle.
 * Source: Milakov and Gimelshein 2018, arXiv:1805.02867. */
#include "args/elementwise.h"
#include "cuda/row.cuh"

namespace {

using kvl::team;

struct stats { /* of e^(x - max) */
  float max, sum;
};

/* e^(x - max), and 1 for x = max even when both are infinite. */
__device__ __forceinline__ float weight(float x, float max) {
  return x == max ? 1.0f : expf(x - max);
}

__device__ __forceinline__ stats join(stats a, stats b) {
  const float max = fmaxf(a.max, b.max);
  return {max, a.sum * weight(a.max, max) + b.sum * weight(b.max, max)};
}

__device__ __forceinline__ void put(void *out, int dtype, int64_t i, stats s) {
  kvl::store_any(out, dtype, i, s.max + logf(s.sum));
}

/* ---- rows -------------------------------------------------------------------------- */

template <int N, class T>
__device__ __forceinline__ stats online(const T *a, int64_t begin, int64_t end, int rank,
                                        int threads) {
  stats s = {-INFINITY, 0};
  kvl::walk<N>(begin, end, rank, threads, [&](auto w, int64_t i) {
    float x[w.value], top = s.max, sum = 0;
    kvl::load_floats(a + i, x);
#pragma unroll
    for (int j = 0; j < w.value; j++) top = fmaxf(top, x[j]);
#pragma unroll
    for (int j = 0; j < w.value; j++) sum += weight(x[j], top);
    s.sum = s.sum * weight(s.max, top) + sum;
    s.max = top;
  });
  return s;
}

template <int THREADS> __device__ __forceinline__ stats joined(stats s) {
  float max = team<THREADS>::reduce(s.max, kvl::max_op(), -INFINITY);
  return {max, team<THREADS>::reduce(s.sum * weight(s.max, max), kvl::add_op(), 0.0f)};
}

template <int N, int THREADS, class T>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    rows_kernel(const T *a, void *out, int out_dtype, int64_t rows, int64_t n) {
  using own = team<THREADS>;
  for (int64_t row = own::first_row(); row < rows; row += own::row_step()) {
    stats s = joined<THREADS>(online<N>(a + row * n, 0, n, own::rank(), THREADS));
    if (own::rank() == 0) put(out, out_dtype, row, s);
  }
}

/* Grid: pieces, rows. */
template <int N, class T>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    pieces_kernel(const T *a, stats *part, int64_t n, int64_t length) {
  int64_t row = blockIdx.y, begin = blockIdx.x * length, end = min(begin + length, n);
  stats s = online<N>(a + row * n, begin, end, threadIdx.x, kvl::ROW_THREADS);
  s = joined<kvl::ROW_THREADS>(s);
  if (threadIdx.x == 0) part[row * gridDim.x + blockIdx.x] = s;
}

__global__ void __launch_bounds__(kvl::ROW_THREADS)
    join_kernel(const stats *part, void *out, int out_dtype, int pieces) {
  stats s = {-INFINITY, 0};
  for (int p = threadIdx.x; p < pieces; p += kvl::ROW_THREADS)
    s = join(s, part[(int64_t)blockIdx.x * pieces + p]);
  s = joined<kvl::ROW_THREADS>(s);
  if (threadIdx.x == 0) put(out, out_dtype, blockIdx.x, s);
}

template <int N, class T> void rows(const kvl_logsumexp_args *g, const kvl_cuda_queue *q) {
  const T *a = (const T *)g->a;
  kvl::split cut = kvl::split_rows(g->outer, g->n, q->sm_count);
  if (cut.count > 1) {
    dim3 blocks((unsigned)cut.count, (unsigned)g->outer);
    stats *part = (stats *)g->workspace;
    pieces_kernel<N><<<blocks, kvl::ROW_THREADS, 0, q->stream>>>(a, part, g->n, cut.length);
    join_kernel<<<(unsigned)g->outer, kvl::ROW_THREADS, 0, q->stream>>>(
        part, g->out, g->out_dtype, (int)cut.count);
  } else if (g->n <= kvl::ROW_SHORT) {
    rows_kernel<N, kvl::WARP>
        <<<kvl::team_grid<kvl::WARP>(g->outer, q), kvl::ROW_THREADS, 0, q->stream>>>(
            a, g->out, g->out_dtype, g->outer, g->n);
  } else {
    rows_kernel<N, kvl::ROW_THREADS>
        <<<kvl::team_grid<kvl::ROW_THREADS>(g->outer, q), kvl::ROW_THREADS, 0, q->stream>>>(
            a, g->out, g->out_dtype, g->outer, g->n);
  }
}

/* ---- columns ----------------------------------------------------------------------- */

template <class T>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    columns_kernel(const T *a, void *out, int out_dtype, int64_t outer, int64_t n,
                   int64_t inner) {
  constexpr int TALL = kvl::ROW_THREADS / kvl::WARP;
  __shared__ stats shared[TALL][kvl::WARP];
  const int x = threadIdx.x % kvl::WARP, y = threadIdx.x / kvl::WARP;
  const int64_t tiles = (inner + kvl::WARP - 1) / kvl::WARP;
  for (int64_t b = blockIdx.x; b < outer * tiles; b += gridDim.x) {
    const int64_t o = b / tiles, column = b % tiles * kvl::WARP + x;
    stats s = {-INFINITY, 0};
    if (column < inner) {
#pragma unroll 4
      for (int64_t r = y; r < n; r += TALL)
        s = join(s, {kvl::to_float(a[(o * n + r) * inner + column]), 1.0f});
    }
    shared[y][x] = s;
    __syncthreads();
    if (y == 0 && column < inner) {
      for (int t = 1; t < TALL; t++) s = join(s, shared[t][x]);
      put(out, out_dtype, o * inner + column, s);
    }
    __syncthreads(); /* the next tile overwrites `shared` */
  }
}

template <class T> int logsumexp(const kvl_logsumexp_args *g, void *queue) {
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const T *a = (const T *)g->a;
  if (g->inner > 1) {
    int64_t tiles = g->outer * ((g->inner + kvl::WARP - 1) / kvl::WARP);
    columns_kernel<<<kvl::grid(tiles, 1, q, 32), kvl::ROW_THREADS, 0, q->stream>>>(
        a, g->out, g->out_dtype, g->outer, g->n, g->inner);
  } else if (kvl::wide_rows(g->outer, g->n, kvl::WIDE<T>, g->a)) {
    rows<kvl::WIDE<T>, T>(g, q);
  } else {
    rows<1, T>(g, q);
  }
  return kvl__cuda_launched();
}

}  // namespace

KVL_CUDA_WORKSPACE(logsumexp) {
  const kvl_logsumexp_args *g = (const kvl_logsumexp_args *)args;
  if (g->inner != 1) return 0;
  return kvl::bytes_of_pieces(kvl::split_rows(g->outer, g->n, sm_count), g->outer,
                              sizeof(stats));
}

KVL_CUDA_KERNEL(logsumexp) {
  const kvl_logsumexp_args *g = (const kvl_logsumexp_args *)args;
  if (g->outer == 0 || g->inner == 0) return KVL_OK;
  KVL_CUDA_BY_FLOAT(g->dtype, T, { return logsumexp<T>(g, queue); })
  return KVL_OK;
}
