/* out[o][j][i] = the sum of a[o][0][i] ... a[o][j][i].
 *   a, out  f32 f16 bf16 i32 i64  [outer, n, inner]   may be the same memory
 * Floats are added in double, and every sum is rounded once; whole numbers wrap.
 * Reads and writes each element once. inner == 1: a warp (a block for rows above 1024) goes
 * along its row in tiles, with a scan in each and the sum so far between them. inner > 1: a
 * thread goes down a column.
 * Limit: memory bandwidth for many rows or columns. One row has one block, which is bound by
 * the latency of its tiles. */
#include "args/elementwise.h"
#include "cuda/block_scan.cuh"
#include "cuda/convert.cuh"
#include "cuda/row.cuh"

namespace {

using kvl::team;
enum { EACH = 4 }; /* neighbours that a thread takes */

template <class T> struct sum_of { using type = double; };
template <> struct sum_of<int32_t> { using type = unsigned long long; }; /* wraps */
template <> struct sum_of<int64_t> { using type = unsigned long long; };

template <class A, class T> __device__ __forceinline__ A widened(T x) {
  if constexpr (kvl::same<A, double>) return (double)kvl::to_float(x);
  else return (A)x;
}
template <class T, class A> __device__ __forceinline__ T rounded(A x) {
  if constexpr (kvl::same<A, double>) return kvl::from_float<T>((float)x);
  else return (T)x;
}

/* The sum over the threads of the team before this one; *total is that over all. */
template <int THREADS, class A> __device__ __forceinline__ A before_in_team(A x, A *total) {
  const int lane = threadIdx.x % kvl::WARP, warp = threadIdx.x / kvl::WARP;
  const A upto = kvl::warp_scan(x);
  A before = __shfl_up_sync(kvl::ALL_LANES, upto, 1); /* upto - x is NaN for infinities */
  if (lane == 0) before = 0;
  *total = __shfl_sync(kvl::ALL_LANES, upto, kvl::WARP - 1);
  if constexpr (THREADS > kvl::WARP) {
    __shared__ A of_warp[THREADS / kvl::WARP];
    if (lane == 0) of_warp[warp] = *total;
    __syncthreads();
    A sum = 0, mine = 0;
    for (int w = 0; w < THREADS / kvl::WARP; w++) {
      if (w == warp) mine = sum;
      sum += of_warp[w];
    }
    *total = sum;
    before = mine + before;
    __syncthreads(); /* the next tile overwrites of_warp */
  }
  return before;
}

template <int THREADS, class T>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    rows_kernel(const T *a, T *out, int64_t rows, int64_t n, bool wide) {
  using own = team<THREADS>;
  using A = typename sum_of<T>::type;
  for (int64_t row = own::first_row(); row < rows; row += own::row_step()) {
    const T *from = a + row * n;
    T *to = out + row * n;
    A carry = 0;
    for (int64_t tile = 0; tile < n; tile += THREADS * EACH) {
      const int64_t i = tile + own::rank() * EACH;
      const bool whole = wide && i + EACH <= n;
      kvl::pack<T, EACH> x = {};
      A sum[EACH], total;
      if (whole) x = kvl::load_pack<EACH>(from + i);
      else
        for (int j = 0; j < EACH; j++)
          if (i + j < n) x.at[j] = from[i + j];
      sum[0] = widened<A>(x.at[0]);
#pragma unroll
      for (int j = 1; j < EACH; j++) sum[j] = sum[j - 1] + widened<A>(x.at[j]);
      const A before = carry + before_in_team<THREADS>(sum[EACH - 1], &total);
#pragma unroll
      for (int j = 0; j < EACH; j++) x.at[j] = rounded<T>(before + sum[j]);
      if (whole) kvl::store_pack<EACH>(to + i, x);
      else
        for (int j = 0; j < EACH; j++)
          if (i + j < n) to[i + j] = x.at[j];
      carry += total;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    columns_kernel(const T *a, T *out, int64_t outer, int64_t n, int64_t inner) {
  using A = typename sum_of<T>::type;
  const int64_t step = (int64_t)gridDim.x * kvl::ROW_THREADS;
  for (int64_t c = (int64_t)blockIdx.x * kvl::ROW_THREADS + threadIdx.x; c < outer * inner;
       c += step) {
    const int64_t first = c / inner * n * inner + c % inner;
    A sum = 0;
#pragma unroll 4
    for (int64_t j = 0; j < n; j++) {
      sum += widened<A>(a[first + j * inner]);
      out[first + j * inner] = rounded<T>(sum);
    }
  }
}

template <class T> int cumsum(const kvl_cumsum_args *g, void *queue) {
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const T *a = (const T *)g->a;
  T *out = (T *)g->out;
  const int threads = kvl::ROW_THREADS;
  const bool wide = g->n % EACH == 0 && kvl::aligned16(a, out);
  if (g->inner > 1)
    columns_kernel<<<kvl::grid(g->outer * g->inner, threads, q, 64), threads, 0, q->stream>>>(
        a, out, g->outer, g->n, g->inner);
  else if (g->n <= kvl::ROW_SHORT)
    rows_kernel<kvl::WARP><<<kvl::team_grid<kvl::WARP>(g->outer, q), threads, 0, q->stream>>>(
        a, out, g->outer, g->n, wide);
  else
    rows_kernel<threads><<<kvl::team_grid<threads>(g->outer, q), threads, 0, q->stream>>>(
        a, out, g->outer, g->n, wide);
  return kvl__cuda_launched();
}

}  // namespace

KVL_CUDA_KERNEL(cumsum) {
  const kvl_cumsum_args *g = (const kvl_cumsum_args *)args;
  if (g->outer == 0 || g->n == 0 || g->inner == 0) return KVL_OK;
  if (g->dtype == KVL_DTYPE_I32) return cumsum<int32_t>(g, queue);
  if (g->dtype == KVL_DTYPE_I64) return cumsum<int64_t>(g, queue);
  KVL_CUDA_BY_FLOAT(g->dtype, T, { return cumsum<T>(g, queue); })
  return KVL_OK;
}
