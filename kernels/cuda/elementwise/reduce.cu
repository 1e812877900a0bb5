/* out[o][i] = sum, mean, max or min over n of a[o][n][i].
 *   a    f32 f16 bf16 [outer, n, inner], or i32 for all but the mean
 *   out  like a, or f32 [outer, inner]
 * MAX and MIN are NaN when an element is. Sums are fp32, in many short runs that a tree
 * joins; i32 wraps. The order of adding depends only on the shape and the device's size.
 * Reads a once. Rows (inner == 1) are reduced by a warp or a block each. For columns a thread
 * takes a pack of them, and the threads of a block spread down n. Where that leaves the
 * device idle, n is cut into pieces; their results go to the workspace, and the same kernels
 * reduce them. The pieces of a row are interleaved tiles: blocks that read neighbouring tiles
 * at the same time are faster than blocks that each read a stretch of their own.
 * Limit: memory bandwidth; this op over one row is what others call R.
 * Measured: f32, one row of 2^29: 3.14 TB/s (2026-11-21); 2^28 numbers
 * down columns of 65536 x 4096: 3.0, of 2^26 x 4: 2.8 (2026-11-20). H100 80GB HBM3. */
#include "args/elementwise.h"
#include "cuda/convert.cuh"
#include "cuda/row.cuh"

namespace {

using kvl::team;
enum { THREADS = kvl::ROW_THREADS, PIECE_THREADS = 512 }; /* per block; per piece */

/* ---- operations on float or int32_t ---------------------------------------------- */

struct sum_op {
  static __device__ float none(float) { return 0; }
  static __device__ int32_t none(int32_t) { return 0; }
  __device__ float operator()(float a, float b) const { return a + b; }
  __device__ int32_t operator()(int32_t a, int32_t b) const {
    return (int32_t)((uint32_t)a + (uint32_t)b);
  }
};
struct larger_op {
  static __device__ float none(float) { return -INFINITY; }
  static __device__ int32_t none(int32_t) { return INT32_MIN; }
  template <class A> __device__ A operator()(A a, A b) const {
    return a != a || a > b ? a : b;
  }
};
struct smaller_op {
  static __device__ float none(float) { return INFINITY; }
  static __device__ int32_t none(int32_t) { return INT32_MAX; }
  template <class A> __device__ A operator()(A a, A b) const {
    return a != a || a < b ? a : b;
  }
};

template <class T> struct sum_of { using type = float; };
template <> struct sum_of<int32_t> { using type = int32_t; };

/* Where the results go. */
struct sink {
  void *out;
  int dtype;
  float divisor; /* n for the mean, else 1 */

  __device__ void put(int64_t i, float x) const {
    kvl::store_any(out, dtype, i, x / divisor);
  }
  __device__ void put(int64_t i, int32_t x) const {
    if (dtype == KVL_DTYPE_F32) ((float *)out)[i] = (float)x;
    else ((int32_t *)out)[i] = x;
  }
};

/* ---- kernels: [outer, n, inner] in pieces of n -> [outer, pieces, inner] ------------- */

struct shape {
  int64_t outer, n, inner;
  kvl::split cut;
};

/* Loads what is read only once, and in order. */
template <int N, class T> __device__ __forceinline__ kvl::pack<T, N> load_once(const T *p) {
  kvl::pack<T, N> x;
  if constexpr (sizeof x == 16)
    reinterpret_cast<uint4 &>(x) = kvl::load_streaming((const uint4 *)p);
  else x = kvl::load_pack<N>(p);
  return x;
}

template <class A, class T, int N, class F>
__device__ __forceinline__ A joined(const kvl::pack<T, N> &x, F f) {
  A at[N];
#pragma unroll
  for (int j = 0; j < N; j++) at[j] = kvl::convert<A>(x.at[j]);
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < step; j++) at[j] = f(at[j], at[j + step]);
  return at[0];
}

/* TEAM threads reduce a row or a piece of one. */
template <int N, int TEAM, class F, class T>
__global__ void __launch_bounds__(TEAM < THREADS ? THREADS : TEAM)
    rows_kernel(const T *a, shape s, sink to) {
  using A = typename sum_of<T>::type;
  using own = team<TEAM>;
  F f;
  constexpr int TEAMS = TEAM < THREADS ? THREADS / TEAM : 1; /* per thread block */
  constexpr int PACKS = 4, TILE = PACKS * TEAM * N; /* packs that a thread has in flight */
  for (int64_t r = (int64_t)blockIdx.x * TEAMS + threadIdx.x / TEAM;
       r < s.outer * s.cut.count; r += (int64_t)gridDim.x * TEAMS) {
    const T *row = a + r / s.cut.count * s.n;
    A total = F::none(A());
    /* A tree joins a pack's elements: a chain would wait for each of them. */
    auto add = [&](const auto &x) { total = f(total, joined<A>(x, f)); };
    int64_t i = r % s.cut.count * TILE;
    for (; i + TILE <= s.n; i += s.cut.count * TILE) {
      kvl::pack<T, N> x[PACKS];
#pragma unroll
      for (int p = 0; p < PACKS; p++)
        x[p] = load_once<N>(row + i + (p * TEAM + own::rank()) * N);
#pragma unroll
      for (int p = 0; p < PACKS; p++) add(x[p]);
    }
    kvl::walk<N>(i, max(i, s.n), own::rank(), TEAM,
                 [&](auto w, int64_t at) { add(kvl::load_pack<w.value>(row + at)); });
    total = own::reduce(total, f, F::none(A()));
    if (own::rank() == 0) to.put(r, total);
  }
}

/* A block has `wide` threads (a power of two) side by side, with N columns each; its other
 * threads go down n. */
template <int N, class F, class T>
__global__ void __launch_bounds__(THREADS)
    columns_kernel(const T *a, shape s, int wide, sink to) {
  using A = typename sum_of<T>::type;
  __shared__ A shared[THREADS * N];
  F f;
  int x = threadIdx.x % wide, y = threadIdx.x / wide, tall = THREADS / wide;
  int64_t tiles = (s.inner + wide * N - 1) / (wide * N);
  for (int64_t b = blockIdx.x; b < s.outer * s.cut.count * tiles; b += gridDim.x) {
    int64_t first = b % tiles * wide * N, piece = b / tiles;
    int64_t begin = piece % s.cut.count * s.cut.length;
    int64_t end = min(s.n, begin + s.cut.length);
    int64_t column = first + x * N;
    const T *p = a + piece / s.cut.count * s.n * s.inner + column;
    A total[N];
#pragma unroll
    for (int j = 0; j < N; j++) total[j] = F::none(A());
    if (column < s.inner) {
#pragma unroll 4
      for (int64_t r = begin + y; r < end; r += tall) {
        kvl::pack<T, N> v = kvl::load_pack<N>(p + r * s.inner);
#pragma unroll
        for (int j = 0; j < N; j++) total[j] = f(total[j], kvl::convert<A>(v.at[j]));
      }
    }
#pragma unroll
    for (int j = 0; j < N; j++) shared[y * wide * N + x * N + j] = total[j];
    __syncthreads();
    for (int c = threadIdx.x; c < wide * N && first + c < s.inner; c += THREADS) {
      A sum = shared[c];
      for (int t = 1; t < tall; t++) sum = f(sum, shared[t * wide * N + c]);
      to.put(piece * s.inner + first + c, sum);
    }
    __syncthreads(); /* the next tile overwrites `shared` */
  }
}

/* ---- launches -------------------------------------------------------------------- */

template <int N, class F, class T>
void rows(const T *a, const shape &s, sink to, const kvl_cuda_queue *q) {
  if (s.cut.length <= kvl::ROW_SHORT)
    rows_kernel<N, kvl::WARP, F>
        <<<kvl::team_grid<kvl::WARP>(s.outer, q), THREADS, 0, q->stream>>>(a, s, to);
  else if (s.cut.count == 1)
    rows_kernel<N, THREADS, F>
        <<<kvl::team_grid<THREADS>(s.outer, q), THREADS, 0, q->stream>>>(a, s, to);
  else
    rows_kernel<N, PIECE_THREADS, F>
        <<<kvl::grid(s.outer * s.cut.count, 1, q, 32), PIECE_THREADS, 0, q->stream>>>(a, s,
                                                                                      to);
}

int columns_wide(int64_t packs) {
  int wide = 1;
  while (wide < kvl::WARP && wide < packs) wide *= 2;
  return wide;
}

template <int N, class F, class T>
void columns(const T *a, const shape &s, sink to, const kvl_cuda_queue *q) {
  int wide = columns_wide(s.inner / N);
  int64_t tiles = (s.inner + wide * N - 1) / (wide * N);
  columns_kernel<N, F>
      <<<kvl::grid(s.outer * s.cut.count * tiles, 1, q, 32), THREADS, 0, q->stream>>>(
          a, s, wide, to);
}

/* How many elements a thread takes at once: 16 bytes, or 1 when alignment forbids that. */
int pack_of(const kvl_reduce_args *g) {
  int n = g->dtype == KVL_DTYPE_F32 || g->dtype == KVL_DTYPE_I32 ? 4 : 8;
  bool wide = g->inner == 1 ? kvl::wide_rows(g->outer, g->n, n, g->a)
                            : kvl::aligned16(g->a) && g->inner % n == 0;
  return wide ? n : 1;
}

/* How n is cut for columns: a piece has at least 16 rounds of a block's threads. */
kvl::split split_columns(const kvl_reduce_args *g, int sm_count) {
  int n = pack_of(g), wide = columns_wide(g->inner / n), tall = THREADS / wide;
  int64_t blocks = g->outer * ((g->inner + wide * n - 1) / (wide * n));
  int64_t want = (int64_t)sm_count * 8 / blocks, most = g->n / (16 * tall);
  if (want > most) want = most;
  if (want < 2) return {1, g->n};
  int64_t length = (g->n + want - 1) / want;
  return {(g->n + length - 1) / length, length};
}

kvl::split split_of(const kvl_reduce_args *g, int sm_count) {
  if (g->outer == 0 || g->inner == 0) return {1, g->n};
  return g->inner == 1 ? kvl::split_rows(g->outer, g->n, sm_count)
                       : split_columns(g, sm_count);
}

template <int N, class F, class T>
void reduce(const kvl_reduce_args *g, const kvl_cuda_queue *q) {
  using A = typename sum_of<T>::type;
  const T *a = (const T *)g->a;
  sink to = {g->out, g->out_dtype, g->op == KVL_REDUCE_MEAN ? (float)g->n : 1.0f};
  sink part = {g->workspace, kvl::same<A, float> ? KVL_DTYPE_F32 : KVL_DTYPE_I32, 1.0f};
  shape s = {g->outer, g->n, g->inner, split_of(g, q->sm_count)};
  bool flat = g->inner == 1;
  if (flat) rows<N, F>(a, s, s.cut.count > 1 ? part : to, q);
  else columns<N, F>(a, s, s.cut.count > 1 ? part : to, q);
  if (s.cut.count == 1) return;
  shape joined = {g->outer, s.cut.count, g->inner, {1, s.cut.count}};
  if (flat) rows<1, F>((const A *)g->workspace, joined, to, q);
  else columns<1, F>((const A *)g->workspace, joined, to, q);
}

template <class T, class F> int reduce_by(const kvl_reduce_args *g, void *queue) {
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (pack_of(g) > 1) reduce<kvl::WIDE<T>, F, T>(g, q);
  else reduce<1, F, T>(g, q);
  return kvl__cuda_launched();
}

template <class T> int reduce_of(const kvl_reduce_args *g, void *queue) {
  if (g->op == KVL_REDUCE_MAX) return reduce_by<T, larger_op>(g, queue);
  if (g->op == KVL_REDUCE_MIN) return reduce_by<T, smaller_op>(g, queue);
  return reduce_by<T, sum_op>(g, queue);
}

}  // namespace

KVL_CUDA_WORKSPACE(reduce) {
  const kvl_reduce_args *g = (const kvl_reduce_args *)args;
  return kvl::bytes_of_pieces(split_of(g, sm_count), g->outer * g->inner, 4);
}

KVL_CUDA_KERNEL(reduce) {
  const kvl_reduce_args *g = (const kvl_reduce_args *)args;
  if (g->outer == 0 || g->inner == 0) return KVL_OK;
  if (g->dtype == KVL_DTYPE_I32)
    return g->op == KVL_REDUCE_MEAN ? KVL_ERR_UNSUPPORTED : reduce_of<int32_t>(g, queue);
  KVL_CUDA_BY_FLOAT(g->dtype, T, { return reduce_of<T>(g, queue); })
  return KVL_OK;
}
