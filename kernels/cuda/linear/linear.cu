/* y = h weight^T + bias, where h is x or, with a norm, rmsnorm(x); then out = y, out += y, or
 * SwiGLU: out = silu(first half of y) * second half.
 *   x       f32 f16 bf16   [rows, k]
 *   norm    like x or f32  [k], optional
 *   weight  like x         [n, k]
 *   bias    like x         [n], optional
 *   out     like x or f32  [rows, n], or [rows, n / 2] for SwiGLU; with several parts,
 *                          [rows, columns[i]] each
 * On Hopper, up to 32 rows are one launch (linear_wgmma.cuh); a norm of f16 or of more than 16
 * rows is one more. Otherwise the kernels of rmsnorm and matmul do the work, for at most
 * PANEL_ROWS rows at a time. A product without a bias is the result or is added to it; others
 * are rounded to x's dtype, and a small kernel finishes them.
 * Limit: the bytes of the weights for few rows, that of matmul for many.
 * Measured: bench/linear.lua, notes/20261122-linear.md. */
#include "args/linear.h"
#include "cuda/linear/linear_wgmma.cuh"
#include "cuda/row.cuh"

KVL_CUDA_KERNEL(rmsnorm);
KVL_CUDA_KERNEL(matmul);
KVL_CUDA_WORKSPACE(matmul);

namespace kvl {
namespace {

enum { PANEL_ROWS = 4096, FEW_ROWS = 64, FINISH_THREADS = 256 };

/* ---- what becomes of y ---------------------------------------------------------------- */

/* A thread takes E outputs of row blockIdx.y, all of one part. y [rows, n] */
template <int E, class T>
__global__ void __launch_bounds__(FINISH_THREADS)
    finish(const __grid_constant__ kvl_linear_args g, const T *y, int64_t first,
           int64_t outputs) {
  const int64_t j = ((int64_t)blockIdx.x * FINISH_THREADS + threadIdx.x) * E;
  let_next_start();
  wait_for_previous();
  if (j >= outputs) return;
  const T *const row = y + blockIdx.y * g.n + j;
  const int64_t m = first + blockIdx.y;
  float v[E], partner[E], before[E];
  load_floats(row, v);
  if (g.form == KVL_LINEAR_SWIGLU) load_floats(row + outputs, partner);
  if (g.form == KVL_LINEAR_ADD) load_any(g.out, g.out_dtype, m * outputs + j, before);
  store_linear<T>(g, outputs, m, j, v, partner, before);
}

template <class T>
int launch_finish(const kvl_linear_args &g, const void *y, int64_t first, int64_t rows,
                  int64_t outputs, const kvl_cuda_queue *q) {
  const bool wide = stores_wide(g);
  const int each = wide ? 8 : 1;
  const dim3 blocks((unsigned)ceil_div(outputs, FINISH_THREADS * each), (unsigned)rows);
  auto kernel = wide ? finish<8, T> : finish<1, T>;
  return launch_programmatic(kernel, blocks, FINISH_THREADS, 0, q, g, (const T *)y, first,
                             outputs);
}

/* ---- one op after the other ----------------------------------------------------------- */

/* The workspace of a panel: h, the normalised rows, and y, where a kernel finishes the product.
 * Few rows take one product for all parts. With many rows, each part has a product of its own,
 * since writing y and reading it again would cost more than a launch. */
struct panel {
  kvl_matmul_args product = {};
  size_t bytes_h, bytes_y;
  bool is_finished; /* the product is the result */
  explicit panel(const kvl_linear_args &g) {
    const int64_t rows = g.rows < PANEL_ROWS ? g.rows : PANEL_ROWS;
    const size_t element = g.dtype == KVL_DTYPE_F32 ? 4 : 2;
    auto bytes = [&](int64_t columns) {
      return ((size_t)(rows * columns) * element + 255) / 256 * 256;
    };
    const bool adds = g.form == KVL_LINEAR_ADD && g.rows > 2; /* matvec.cuh cannot add */
    is_finished = (adds || g.form == KVL_LINEAR_PLAIN) && !g.bias &&
                  (g.parts == 1 || g.rows > FEW_ROWS);
    bytes_h = g.norm ? bytes(g.k) : 0;
    bytes_y = is_finished ? 0 : bytes(g.n);
    /* A pointer that is NULL here will come from the allocator, so it is aligned. */
    product.a = g.norm ? nullptr : g.x, product.out = is_finished ? g.out : nullptr;
    product.b = g.weight, product.batch = 1, product.transpose_b = 1;
    product.m = rows, product.n = product.out_row = g.n, product.k = product.a_row = g.k;
    product.adds = is_finished && adds;
    product.dtype = g.dtype, product.out_dtype = is_finished ? g.out_dtype : g.dtype;
  }
};

/* Multiplies `rows` rows, which begin at row `first`; x has them, normalised if there is a
 * norm. */
int multiply_panel(const kvl_linear_args &g, const void *x, int64_t first, int64_t rows,
                   void *y, void *workspace, kvl_cuda_queue *q) {
  if (g.n == 0) return KVL_OK;
  panel p(g);
  const int64_t outputs = g.form == KVL_LINEAR_SWIGLU ? g.n / 2 : g.n;
  const size_t to = g.out_dtype == KVL_DTYPE_F32 ? 4 : 2;
  p.product.a = x, p.product.m = rows, p.product.workspace = workspace;
  p.product.out = p.is_finished ? (char *)g.out + (size_t)(first * outputs) * to : y;
  int status = kvl_cuda_matmul(&p.product, q);
  if (status != KVL_OK || p.is_finished) return status;
  KVL_CUDA_BY_FLOAT(g.dtype, T, { status = launch_finish<T>(g, y, first, rows, outputs, q); })
  return status;
}

int normalise(const kvl_linear_args &g, const void *x, void *h, int64_t rows,
              kvl_cuda_queue *q) {
  kvl_rmsnorm_args norm = {x,   nullptr, g.norm, h,       rows,
                           g.k, g.k,     g.eps,  g.dtype, g.norm_dtype};
  return kvl_cuda_rmsnorm(&norm, q);
}

/* One launch, and another one before it if the norm is separate. */
int one_launch(kvl_linear_args g, kvl_cuda_queue *q) {
  if (g.norm && !fuses_norm(g)) {
    const int status = normalise(g, g.x, g.workspace, g.rows, q);
    if (status != KVL_OK) return status;
    g.x = g.workspace, g.norm = nullptr;
  }
  return launch_linear_wgmma(g, q);
}

int one_by_one(const kvl_linear_args &g, kvl_cuda_queue *q) {
  const panel p(g);
  char *h = (char *)g.workspace, *y = h + p.bytes_h;
  const size_t in = g.dtype == KVL_DTYPE_F32 ? 4 : 2;
  int status = KVL_OK;
  for (int64_t i = 0; i < g.rows && status == KVL_OK; i += PANEL_ROWS) {
    const int64_t rows = g.rows - i < PANEL_ROWS ? g.rows - i : PANEL_ROWS;
    const void *x = (const char *)g.x + (size_t)(i * g.k) * in;
    if (g.norm) {
      status = normalise(g, x, h, rows, q);
      x = h;
    }
    if (g.rows <= FEW_ROWS || g.parts == 1) {
      if (status == KVL_OK) status = multiply_panel(g, x, i, rows, y, y + p.bytes_y, q);
      continue;
    }
    for (int j = 0; j < g.parts && status == KVL_OK; j++)
      status = multiply_panel(kvl__linear_part(&g, j), x, i, rows, y, y + p.bytes_y, q);
  }
  return status;
}

}  // namespace
}  // namespace kvl

KVL_CUDA_WORKSPACE(linear) {
  const kvl_linear_args &g = *(const kvl_linear_args *)args;
  if (g.rows == 0 || g.n == 0) return 0;
  kvl::panel p(g);
  return p.bytes_h + p.bytes_y + kvl_cuda_matmul_workspace(&p.product, sm_count);
}

KVL_CUDA_KERNEL(linear) {
  const kvl_linear_args &g = *(const kvl_linear_args *)args;
  kvl_cuda_queue *q = (kvl_cuda_queue *)queue;
  if (g.rows == 0 || g.n == 0) return KVL_OK;
  if (kvl::takes_linear_wgmma(g, q)) return kvl::one_launch(g, q);
  return kvl::one_by_one(g, q);
}
