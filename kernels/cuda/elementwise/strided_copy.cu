/* out[i . out_stride] = a[i . a_stride] over a shape: transpositions, broadcasts, and parts of
 * tensors along any dim. Only bits are moved, so any dtype of the same size works.
 *   a, out  elements of 1, 2, 4 or 8 bytes, strided; a stride of `a` may be 0
 * Reads and writes each element once. Where out is contiguous along the last dim and `a` is
 * contiguous or constant, packs of 16 bytes are moved, if rows allow them. Where `a` is
 * contiguous along the dim before, tiles go through shared memory, so that both sides are
 * accessed in order. The rest is moved element by element.
 * Limit: memory bandwidth; sectors, where a side is contiguous along neither of the two dims.
 * Source: Ruetsch and Micikevicius, "Optimizing matrix transpose in CUDA", 2009. */
#include "args/elementwise.h"
#include "cuda/elementwise.cuh"

namespace {

struct layout { /* of the leading `ndim` dims */
  int64_t shape[KVL_DIMS_MAX], a_stride[KVL_DIMS_MAX], out_stride[KVL_DIMS_MAX];
  int ndim;

  __device__ __forceinline__ void offsets(int64_t i, int64_t *a, int64_t *out) const {
    *a = *out = 0;
    for (int d = ndim - 1; d >= 0; d--) {
      int64_t at;
      kvl::divide(i, shape[d], &i, &at);
      *a += at * a_stride[d];
      *out += at * out_stride[d];
    }
  }
};

layout layout_of(const kvl_strided_copy_args *g, int ndim) {
  layout at = {};
  at.ndim = ndim;
  for (int d = 0; d < ndim; d++) {
    at.shape[d] = g->shape[d];
    at.a_stride[d] = g->a_stride[d];
    at.out_stride[d] = g->out_stride[d];
  }
  return at;
}

/* ---- element by element, or pack by pack along the last dim ------------------------ */

template <class T> struct copy_body {
  const T *a;
  T *out;
  layout at;
  bool constant; /* along the last dim */

  template <int N> __device__ void run(int64_t i) const {
    int64_t from, to;
    at.offsets(i, &from, &to);
    kvl::pack<T, N> x;
    if (!constant) {
      x = kvl::load_pack<N>(a + from);
    } else {
      const T one = a[from];
#pragma unroll
      for (int j = 0; j < N; j++) x.at[j] = one;
    }
    kvl::store_pack<N>(out + to, x);
  }
};

/* Does every row begin at a multiple of n elements? */
bool is_wide(const void *p, const int64_t *stride, int ndim, int n) {
  for (int d = 0; d < ndim - 1; d++)
    if (stride[d] % n) return false;
  return kvl::aligned16(p);
}

template <class T> int copy(const kvl_strided_copy_args *g, void *queue) {
  constexpr int n = kvl::WIDE<T>;
  const int last = g->ndim - 1;
  const bool constant = g->a_stride[last] == 0;
  copy_body<T> f{(const T *)g->a, (T *)g->out, layout_of(g, g->ndim), constant};
  bool wide = g->out_stride[last] == 1 && g->a_stride[last] <= 1 &&
              (last == 0 || g->shape[last] % n == 0) &&
              is_wide(g->out, g->out_stride, g->ndim, n) &&
              (constant || is_wide(g->a, g->a_stride, g->ndim, n));
  return kvl::each<n>(f, g->count, wide, queue);
}

/* ---- transpositions ---------------------------------------------------------------- */

constexpr int THREADS_X = 32, THREADS_Y = 8;

/* [m, n] with out contiguous along n and a along m, for each place of the outer dims. */
template <int TILE, class T>
__global__ void __launch_bounds__(THREADS_X *THREADS_Y)
    transpose_kernel(const T *a, T *out, layout outer, int64_t outer_count, int64_t m,
                     int64_t n, int64_t a_stride, int64_t out_stride) {
  __shared__ T tile[TILE][TILE + 1]; /* a column of it has no bank conflicts */
  const int64_t down = (m + TILE - 1) / TILE, across = (n + TILE - 1) / TILE;
  const int tx = threadIdx.x % THREADS_X, ty = threadIdx.x / THREADS_X;
  for (int64_t b = blockIdx.x; b < outer_count * down * across; b += gridDim.x) {
    int64_t rest = b / across, from, to;
    const int64_t j0 = b % across * TILE, i0 = rest % down * TILE;
    outer.offsets(rest / down, &from, &to);
    for (int y = ty; y < TILE; y += THREADS_Y)
      for (int x = tx; x < TILE; x += THREADS_X)
        if (i0 + x < m && j0 + y < n) tile[y][x] = a[from + (i0 + x) + (j0 + y) * a_stride];
    __syncthreads();
    for (int y = ty; y < TILE; y += THREADS_Y)
      for (int x = tx; x < TILE; x += THREADS_X)
        if (i0 + y < m && j0 + x < n) out[to + (i0 + y) * out_stride + (j0 + x)] = tile[x][y];
    __syncthreads(); /* the next tile overwrites this one */
  }
}

template <class T> int transpose(const kvl_strided_copy_args *g, void *queue) {
  constexpr int TILE = sizeof(T) <= 2 ? 64 : 32;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const int last = g->ndim - 1;
  const int64_t m = g->shape[last - 1], n = g->shape[last], outer = g->count / (m * n);
  int64_t tiles = outer * ((m + TILE - 1) / TILE) * ((n + TILE - 1) / TILE);
  transpose_kernel<TILE><<<kvl::grid(tiles, 1, q, 64), THREADS_X * THREADS_Y, 0, q->stream>>>(
      (const T *)g->a, (T *)g->out, layout_of(g, last - 1), outer, m, n, g->a_stride[last],
      g->out_stride[last - 1]);
  return kvl__cuda_launched();
}

template <class T> int strided(const kvl_strided_copy_args *g, void *queue) {
  const int last = g->ndim - 1;
  const bool turned = last > 0 && g->a_stride[last] > 1 && g->a_stride[last - 1] == 1 &&
                      g->out_stride[last] == 1;
  return turned ? transpose<T>(g, queue) : copy<T>(g, queue);
}

}  // namespace

KVL_CUDA_KERNEL(strided_copy) {
  const kvl_strided_copy_args *g = (const kvl_strided_copy_args *)args;
  if (g->count == 0) return KVL_OK;
  switch (g->bytes_element) {
    case 1: return strided<uint8_t>(g, queue);
    case 2: return strided<uint16_t>(g, queue);
    case 4: return strided<uint32_t>(g, queue);
    case 8: return strided<uint64_t>(g, queue);
    default: return KVL_ERR_UNSUPPORTED;
  }
}
