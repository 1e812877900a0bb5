/* out = index of the largest (least) element of each row: ties to the lower index, NaN never
 * wins (a row of NaN gives 0).
 *   a    f32 f16 bf16 i32  [rows, n]   n >= 1
 *   out  i32               [rows]
 * Reads a once; see best_index.cuh. When there are few long rows, they are cut into pieces,
 * whose keys go through the workspace.
 * Limit: memory bandwidth.
 * Measured: 3.0 TB/s for one f32 row of 2^28. H100 80GB HBM3, 2026-11-20. */
#include "args/elementwise.h"
#include "cuda/best_index.cuh"
#include "cuda/convert.cuh"

namespace {

using kvl::index_key, kvl::index_of_key, kvl::larger_key;
using kvl::team;

/* Larger for what wins. */
template <class T> __device__ __forceinline__ uint32_t order_of(T x, bool least) {
  if constexpr (kvl::same<T, int32_t>) {
    return (uint32_t)x ^ (least ? 0x7FFFFFFFu : 0x80000000u);
  } else {
    const float y = kvl::to_float(x);
    return kvl::order_key(least ? -y : y);
  }
}

template <int N, class T>
__device__ __forceinline__ index_key best_of(const T *a, bool least, int64_t begin,
                                             int64_t end, int rank, int threads) {
  index_key best = 0;
  kvl::walk<N>(begin, end, rank, threads, [&](auto w, int64_t i) {
    const kvl::pack<T, w.value> x = kvl::load_pack<w.value>(a + i);
#pragma unroll
    for (int j = 0; j < w.value; j++) {
      const index_key key = kvl::index_key_of(order_of(x.at[j], least), i + j);
      best = larger_key()(best, key);
    }
  });
  return best;
}

template <int N, int THREADS, class T>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    rows_kernel(const T *a, bool least, int32_t *out, int64_t rows, int64_t n) {
  using own = team<THREADS>;
  for (int64_t row = own::first_row(); row < rows; row += own::row_step()) {
    index_key best = best_of<N>(a + row * n, least, 0, n, own::rank(), THREADS);
    best = own::reduce(best, larger_key(), index_key(0));
    if (own::rank() == 0) out[row] = index_of_key(best);
  }
}

/* Grid: pieces, rows. */
template <int N, class T>
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    pieces_kernel(const T *a, bool least, index_key *part, int64_t n, int64_t length) {
  int64_t row = blockIdx.y, begin = blockIdx.x * length, end = min(begin + length, n);
  index_key best = best_of<N>(a + row * n, least, begin, end, threadIdx.x, kvl::ROW_THREADS);
  best = team<kvl::ROW_THREADS>::reduce(best, larger_key(), index_key(0));
  if (threadIdx.x == 0) part[row * gridDim.x + blockIdx.x] = best;
}

template <int N, class T> void launch(const kvl_argmax_args *g, const kvl_cuda_queue *q) {
  const T *a = (const T *)g->a;
  const bool least = g->least;
  kvl::split cut = kvl::split_rows(g->rows, g->n, q->sm_count);
  if (cut.count > 1) {
    dim3 blocks((unsigned)cut.count, (unsigned)g->rows);
    index_key *part = (index_key *)g->workspace;
    pieces_kernel<N>
        <<<blocks, kvl::ROW_THREADS, 0, q->stream>>>(a, least, part, g->n, cut.length);
    kvl::join_keys<<<(unsigned)g->rows, kvl::ROW_THREADS, 0, q->stream>>>(
        part, g->out, g->rows, (int)cut.count);
  } else if (g->n <= kvl::ROW_SHORT) {
    rows_kernel<N, kvl::WARP>
        <<<kvl::team_grid<kvl::WARP>(g->rows, q), kvl::ROW_THREADS, 0, q->stream>>>(
            a, least, g->out, g->rows, g->n);
  } else {
    rows_kernel<N, kvl::ROW_THREADS>
        <<<kvl::team_grid<kvl::ROW_THREADS>(g->rows, q), kvl::ROW_THREADS, 0, q->stream>>>(
            a, least, g->out, g->rows, g->n);
  }
}

template <class T> void argmax(const kvl_argmax_args *g, const kvl_cuda_queue *q) {
  if (kvl::wide_rows(g->rows, g->n, kvl::WIDE<T>, g->a)) launch<kvl::WIDE<T>, T>(g, q);
  else launch<1, T>(g, q);
}

}  // namespace

KVL_CUDA_WORKSPACE(argmax) {
  const kvl_argmax_args *g = (const kvl_argmax_args *)args;
  return kvl::bytes_of_pieces(kvl::split_rows(g->rows, g->n, sm_count), g->rows,
                              sizeof(index_key));
}

KVL_CUDA_KERNEL(argmax) {
  const kvl_argmax_args *g = (const kvl_argmax_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (g->rows == 0 || g->n == 0) return KVL_OK;
  if (g->dtype == KVL_DTYPE_I32) argmax<int32_t>(g, q);
  else KVL_CUDA_BY_FLOAT(g->dtype, T, { argmax<T>(g, q); })
  return kvl__cuda_launched();
}
