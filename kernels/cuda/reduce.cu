/* out[o][i] = sum, mean, max or min over n of a[o][n][i].
 *   a    f32 f16 bf16 [outer, n, inner], or i32 for all but the mean
 *   out  like a, or f32 [outer, inner]
 * MAX and MIN are NaN when an element is. Sums are fp32, in many short runs that meet in a
 * tree; i32 wraps. The order of adding depends only on the shape and the device's size.
 * Reads a once. Rows (inner == 1): a warp or a block each. Columns: a pack of them a
 * thread, the threads of a block spread down n. Where that leaves the device idle, n is
 * cut into pieces whose results, in the scratch, are reduced by the same kernels.
 * Limit: memory bandwidth.
 * Measured: f32 in one row 3.0 TB/s, down columns of 65536 x 4096 3.0, of 2^26 x 4 2.8.
 * H100 80GB HBM3, 2026-11-20, 2^28 elements. */
#include "convert.cuh"
#include "row.cuh"

namespace {

using kvl::team;
enum { THREADS = kvl::ROW_THREADS };

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

/* Where results go. */
struct sink {
  void *out;
  int dtype;
  float divisor;   /* n for the mean, else 1 */

  __device__ void put(int64_t i, float x) const {
    x /= divisor;
    if (dtype == KVL_DTYPE_F32) ((float *)out)[i] = x;
    else if (dtype == KVL_DTYPE_F16) ((__half *)out)[i] = kvl::from_float<__half>(x);
    else ((__nv_bfloat16 *)out)[i] = kvl::from_float<__nv_bfloat16>(x);
  }
  __device__ void put(int64_t i, int32_t x) const {
    if (dtype == KVL_DTYPE_F32) ((float *)out)[i] = (float)x;
    else ((int32_t *)out)[i] = x;
  }
};

/* ---- kernels: [outer, n, inner] in pieces of n -> [outer, pieces, inner] --------- */

struct shape {
  int64_t outer, n, inner;
  kvl::split cut;
};

template <int N, int TEAM, class F, class T>
__global__ void __launch_bounds__(THREADS) rows_kernel(const T *a, shape s, sink to) {
  using A = typename sum_of<T>::type;
  using own = team<TEAM>;
  F f;
  for (int64_t r = own::first_row(); r < s.outer * s.cut.count; r += own::row_step()) {
    int64_t row = r / s.cut.count, begin = r % s.cut.count * s.cut.length;
    A total = F::none(A());
    kvl::walk<N>(begin, min(s.n, begin + s.cut.length), own::rank(), TEAM,
                 [&](auto w, int64_t i) {
      kvl::pack<T, w.value> x = kvl::load_pack<w.value>(a + row * s.n + i);
#pragma unroll
      for (int j = 0; j < w.value; j++) total = f(total, kvl::convert<A>(x.at[j]));
    });
    total = own::reduce(total, f, F::none(A()));
    if (own::rank() == 0) to.put(r, total);
  }
}

/* A block has `wide` threads side by side (a power of two), N columns each, and the rest
 * of its threads down n. */
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
    __syncthreads();   /* before the next tile writes `shared` */
  }
}

/* ---- launches -------------------------------------------------------------------- */

template <int N, class F, class T>
void rows(const T *a, const shape &s, sink to, const kvl_cuda_queue *q) {
  if (s.cut.length <= kvl::ROW_SHORT)
    rows_kernel<N, kvl::WARP, F>
        <<<kvl::team_grid<kvl::WARP>(s.outer, q), THREADS, 0, q->stream>>>(a, s, to);
  else
    rows_kernel<N, THREADS, F><<<kvl::team_grid<THREADS>(s.outer * s.cut.count, q), THREADS,
                                 0, q->stream>>>(a, s, to);
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
  columns_kernel<N, F><<<kvl::grid(s.outer * s.cut.count * tiles, 1, q, 32), THREADS, 0,
                         q->stream>>>(a, s, wide, to);
}

/* Pieces of n for columns: at least 16 rounds of a block's threads each. */
kvl::split split_columns(const shape &s, int n, const kvl_cuda_queue *q) {
  int wide = columns_wide(s.inner / n), tall = THREADS / wide;
  int64_t blocks = s.outer * ((s.inner + wide * n - 1) / (wide * n));
  int64_t want = (int64_t)q->sm_count * 8 / blocks, most = s.n / (16 * tall);
  int64_t room = (int64_t)(KVL_CUDA_SCRATCH / 4) / (s.outer * s.inner);
  if (want > most) want = most;
  if (want > room) want = room;
  if (want < 2) return {1, s.n};
  int64_t length = (s.n + want - 1) / want;
  return {(s.n + length - 1) / length, length};
}

template <int N, class F, class T>
void reduce(const kvl_reduce_args *g, const kvl_cuda_queue *q) {
  using A = typename sum_of<T>::type;
  const T *a = (const T *)g->a;
  sink to = {g->out, g->out_dtype, g->op == KVL_REDUCE_MEAN ? (float)g->n : 1.0f};
  sink part = {q->scratch, kvl::same<A, float> ? KVL_DTYPE_F32 : KVL_DTYPE_I32, 1.0f};
  shape s = {g->outer, g->n, g->inner, {1, g->n}};
  bool flat = g->inner == 1;
  s.cut = flat ? kvl::split_rows(g->outer, g->n, sizeof(A), q) : split_columns(s, N, q);
  if (flat) rows<N, F>(a, s, s.cut.count > 1 ? part : to, q);
  else columns<N, F>(a, s, s.cut.count > 1 ? part : to, q);
  if (s.cut.count == 1) return;
  shape joined = {g->outer, s.cut.count, g->inner, {1, s.cut.count}};
  if (flat) rows<1, F>((const A *)q->scratch, joined, to, q);
  else columns<1, F>((const A *)q->scratch, joined, to, q);
}

template <class T, class F> int reduce_by(const kvl_reduce_args *g, void *queue) {
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  constexpr int n = kvl::WIDE<T>;
  bool wide = g->inner == 1 ? kvl::wide_rows(g->outer, g->n, n, g->a)
                            : kvl::aligned16(g->a) && g->inner % n == 0;
  if (wide) reduce<n, F, T>(g, q);
  else reduce<1, F, T>(g, q);
  return kvl__cuda_launched();
}

template <class T> int reduce_of(const kvl_reduce_args *g, void *queue) {
  if (g->op == KVL_REDUCE_MAX) return reduce_by<T, larger_op>(g, queue);
  if (g->op == KVL_REDUCE_MIN) return reduce_by<T, smaller_op>(g, queue);
  return reduce_by<T, sum_op>(g, queue);
}

}  // namespace

KVL_CUDA_KERNEL(reduce) {
  const kvl_reduce_args *g = (const kvl_reduce_args *)args;
  if (g->outer == 0 || g->inner == 0) return KVL_OK;
  if (g->dtype == KVL_DTYPE_I32)
    return g->op == KVL_REDUCE_MEAN ? KVL_ERR_UNSUPPORTED : reduce_of<int32_t>(g, queue);
  KVL_CUDA_BY_FLOAT(g->dtype, T, { return reduce_of<T>(g, queue); })
  return KVL_OK;
}
