/* out = exp(scale * a - max) / sum for each row; a row of -inf gives zeros.
 *   a    f32 f16 bf16  [rows, n]
 *   out  like a, or f32; may be a
 * Reads a twice (the second time mostly from L1 or L2) and writes out once.
 * One pass gives the maximum and the sum: the running sum is rescaled when its maximum grows.
 * When there are few long rows, they are cut into pieces: one kernel leaves the (maximum,
 * sum) of each piece in the workspace, another joins them and writes out.
 * Limit: memory bandwidth; 16-bit rows above ~1000 elements stay below it (not profiled; two
 * exponentials per element are the suspect).
 * Measured: 2.5 TB/s for f32 2^21 x 128, 1.9 for bf16 65536 x 4096, 1.9 (2.8 with the
 * second reading) for one f32 row of 2^28. H100 80GB HBM3, 2026-11-20.
 * Source: Milakov and Gimelshein 2018, arXiv:1805.02867. */
#include "args/elementwise.h"
#include "cuda/row.cuh"

namespace {

using kvl::team;

struct stats { /* of exp(x - max), over a row or a piece */
  float max, sum;
};

/* exp(x - max), and 0 for x = -inf even when max is -inf too. */
__device__ __forceinline__ float weight(float x, float max) {
  return x == -INFINITY ? 0.0f : expf(x - max);
}

template <int N, class T>
__device__ __forceinline__ stats online(const T *a, float scale, int64_t begin, int64_t end,
                                        int rank, int threads) {
  stats s = {-INFINITY, 0};
  kvl::walk<N>(begin, end, rank, threads, [&](auto w, int64_t i) {
    float x[w.value], top = s.max, sum = 0;
    kvl::load_floats(a + i, x);
#pragma unroll
    for (int j = 0; j < w.value; j++) top = fmaxf(top, x[j] *= scale);
#pragma unroll
    for (int j = 0; j < w.value; j++) sum += weight(x[j], top);
    s.sum = s.sum * weight(s.max, top) + sum;
    s.max = top;
  });
  return s;
}

template <int THREADS> __device__ __forceinline__ stats join(stats s) {
  float max = team<THREADS>::reduce(s.max, kvl::max_op(), -INFINITY);
  return {max, team<THREADS>::reduce(s.sum * weight(s.max, max), kvl::add_op(), 0.0f)};
}

template <int N, class T, class Out>
__device__ __forceinline__ void write(const T *a, Out *out, float scale, stats s,
                                      int64_t begin, int64_t end, int rank, int threads) {
  float inverse = s.sum == 0 ? 0.0f : 1.0f / s.sum;
  kvl::walk<N>(begin, end, rank, threads, [&](auto w, int64_t i) {
    float x[w.value];
    kvl::load_floats(a + i, x);
#pragma unroll
    for (int j = 0; j < w.value; j++) x[j] = weight(x[j] * scale, s.max) * inverse;
    kvl::store_floats(out + i, x);
  });
}

template <int N, int THREADS, class T, class Out>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    rows_kernel(const T *a, Out *out, int64_t rows, int64_t n, float scale) {
  using own = team<THREADS>;
  for (int64_t row = own::first_row(); row < rows; row += own::row_step()) {
    stats s = online<N>(a + row * n, scale, 0, n, own::rank(), THREADS);
    write<N>(a + row * n, out + row * n, scale, join<THREADS>(s), 0, n, own::rank(), THREADS);
  }
}

/* Grid: pieces, rows. */
template <int N, class T>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    stats_kernel(const T *a, stats *part, int64_t n, int64_t length, float scale) {
  int64_t row = blockIdx.y, begin = blockIdx.x * length, end = min(begin + length, n);
  stats s = online<N>(a + row * n, scale, begin, end, threadIdx.x, kvl::ROW_THREADS);
  s = join<kvl::ROW_THREADS>(s);
  if (threadIdx.x == 0) part[row * gridDim.x + blockIdx.x] = s;
}

template <int N, class T, class Out>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    write_kernel(const T *a, Out *out, const stats *part, int64_t n, int64_t length,
                 float scale) {
  int64_t row = blockIdx.y, begin = blockIdx.x * length, end = min(begin + length, n);
  stats s = {-INFINITY, 0};
  for (int p = threadIdx.x; p < gridDim.x; p += kvl::ROW_THREADS) {
    stats other = part[row * gridDim.x + p];
    float max = fmaxf(s.max, other.max);
    s.sum = s.sum * weight(s.max, max) + other.sum * weight(other.max, max);
    s.max = max;
  }
  write<N>(a + row * n, out + row * n, scale, join<kvl::ROW_THREADS>(s), begin, end,
           threadIdx.x, kvl::ROW_THREADS);
}

template <int N, class T, class Out>
void softmax(const kvl_softmax_args *g, const kvl_cuda_queue *q) {
  const T *a = (const T *)g->a;
  Out *out = (Out *)g->out;
  kvl::split cut = kvl::split_rows(g->rows, g->n, q->sm_count);
  if (cut.count > 1) {
    dim3 blocks((unsigned)cut.count, (unsigned)g->rows);
    stats *part = (stats *)g->workspace;
    stats_kernel<N>
        <<<blocks, kvl::ROW_THREADS, 0, q->stream>>>(a, part, g->n, cut.length, g->scale);
    write_kernel<N><<<blocks, kvl::ROW_THREADS, 0, q->stream>>>(a, out, part, g->n,
                                                                cut.length, g->scale);
  } else if (g->n <= kvl::ROW_SHORT) {
    rows_kernel<N, kvl::WARP>
        <<<kvl::team_grid<kvl::WARP>(g->rows, q), kvl::ROW_THREADS, 0, q->stream>>>(
            a, out, g->rows, g->n, g->scale);
  } else {
    rows_kernel<N, kvl::ROW_THREADS>
        <<<kvl::team_grid<kvl::ROW_THREADS>(g->rows, q), kvl::ROW_THREADS, 0, q->stream>>>(
            a, out, g->rows, g->n, g->scale);
  }
}

template <class T, class Out> int softmax_of(const kvl_softmax_args *g, void *queue) {
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (g->rows == 0 || g->n == 0) return KVL_OK;
  if (kvl::wide_rows(g->rows, g->n, kvl::WIDE<T>, g->a, g->out))
    softmax<kvl::WIDE<T>, T, Out>(g, q);
  else softmax<1, T, Out>(g, q);
  return kvl__cuda_launched();
}

}  // namespace

KVL_CUDA_WORKSPACE(softmax) {
  const kvl_softmax_args *g = (const kvl_softmax_args *)args;
  return kvl::bytes_of_pieces(kvl::split_rows(g->rows, g->n, sm_count), g->rows,
                              sizeof(stats));
}

KVL_CUDA_KERNEL(softmax) {
  const kvl_softmax_args *g = (const kvl_softmax_args *)args;
  KVL_CUDA_BY_FLOAT(g->dtype, T, {
    if (g->out_dtype == KVL_DTYPE_F32) return softmax_of<T, float>(g, queue);
    return softmax_of<T, T>(g, queue);
  })
  return KVL_OK;
}
