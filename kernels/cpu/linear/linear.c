/* y = h weight^T + bias, where h is x or, with a norm, rmsnorm(x); then out = y, out += y, or
 * SwiGLU: out = silu(first half of y) * second half.
 *   x     f32 f16 bf16   [rows, k]
 *   norm  like x or f32  [k], optional
 *   weight like x [n, k], bias like x [n], optional
 *   out   like x or f32  [rows, n], or [rows, n / 2] for SwiGLU; with several parts,
 *                        [rows, columns[i]] each
 * The kernels of rmsnorm and matmul do the work, for at most PANEL_ROWS rows at a time; y is
 * in f32. The bias, residual or SwiGLU of a decode step is so little work that no threads
 * are woken for it. Limit: that of matmul.
 * Workspace: h and y of a panel, and what matmul wants. */
#include "args/linear.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

enum { PANEL_ROWS = 1024 };

kvl_kernel KVL_CPU_NAME(rmsnorm), KVL_CPU_NAME(matmul);
size_t KVL_CPU_WORKSPACE_NAME(matmul)(const void *args);

struct panel {
  struct kvl_rmsnorm_args norm;
  struct kvl_matmul_args product;
  int64_t rows, outputs;
  size_t bytes_h, bytes_y; /* multiples of 64 */
  int is_finished;         /* the product is the result */
};

static size_t round_up(int64_t elements, int dtype) {
  return ((size_t)elements * (dtype == KVL_DTYPE_F32 ? 4 : 2) + 63) / 64 * 64;
}

/* The calls for the first panel; addresses in the workspace come later. */
static struct panel panel_of(const struct kvl_linear_args *g) {
  int64_t rows = i64_min(g->rows, PANEL_ROWS);
  struct panel p = {.rows = rows,
                    .outputs = g->form == KVL_LINEAR_SWIGLU ? g->n / 2 : g->n,
                    .is_finished = g->form == KVL_LINEAR_PLAIN && !g->bias};
  p.bytes_h = g->norm ? round_up(rows * g->k, g->dtype) : 0;
  p.bytes_y = p.is_finished ? 0 : round_up(rows * g->n, KVL_DTYPE_F32);
  p.norm = (struct kvl_rmsnorm_args){.weight = g->norm,
                                     .dim = g->k,
                                     .row = g->k,
                                     .eps = g->eps,
                                     .dtype = g->dtype,
                                     .weight_dtype = g->norm_dtype};
  p.product = (struct kvl_matmul_args){
      .b = g->weight,
      .batch = 1,
      .m = rows,
      .n = g->n,
      .k = g->k,
      .a_row = g->k,
      .out_row = g->n,
      .transpose_b = 1,
      .dtype = g->dtype,
      .out_dtype = p.is_finished ? g->out_dtype : KVL_DTYPE_F32};
  return p;
}

KVL_CPU_WORKSPACE(linear) {
  struct panel p = panel_of(args);
  return p.bytes_h + p.bytes_y + KVL_CPU_WORKSPACE_NAME(matmul)(&p.product);
}

/* ---- what becomes of y -------------------------------------------------------------- */

struct finish {
  const struct kvl_linear_args *g;
  const float *y;
  int64_t first, outputs; /* first: the panel's first row */
};

static inline KVL_HOT vf biased(const struct kvl_linear_args *g, const float *y, int64_t j,
                                int left, const int dtype) {
  vf v = vf_load_n(y + j, left, KVL_DTYPE_F32);
  return g->bias ? v + vf_load_n(at_const(g->bias, j, dtype), left, dtype) : v;
}

static inline KVL_HOT void finish_rows(const struct finish *f, int64_t begin, int64_t end,
                                       const int dtype, const int out_dtype) {
  const struct kvl_linear_args *g = f->g;
  for (int64_t r = begin; r < end; r++) {
    const float *y = f->y + r * g->n;
    for (int64_t j = 0; j < f->outputs; j += VF) {
      int left = vf_left(j, f->outputs);
      void *out = at(g->out, (f->first + r) * f->outputs + j, out_dtype);
      vf v = biased(g, y, j, left, dtype);
      if (g->form == KVL_LINEAR_ADD) v += vf_load_n(out, left, out_dtype);
      if (g->form == KVL_LINEAR_SWIGLU)
        v = v * vf_sigmoid(v) * biased(g, y, j + f->outputs, left, dtype);
      vf_store_n(out, v, left, out_dtype);
    }
  }
}

static int finish_piece(const void *args, int64_t begin, int64_t end) {
  const struct finish *f = args;
  enum { F32 = KVL_DTYPE_F32 };
  if (f->g->out_dtype == F32) KVL_BY_FLOAT(f->g->dtype, finish_rows(f, begin, end, D, F32))
  else KVL_BY_FLOAT(f->g->dtype, finish_rows(f, begin, end, D, D))
  return 0;
}

/* Multiplies `rows` rows, which begin at row `first`; x has them, normalised if there is a
 * norm. g has one part. */
static int multiply_panel(const struct kvl_linear_args *g, const void *x, int64_t first,
                          int64_t rows, float *y, void *workspace, void *queue) {
  struct panel p = panel_of(g);
  p.product.workspace = workspace;
  p.product.a = x, p.product.m = rows;
  p.product.out = p.is_finished ? at(g->out, first * g->n, g->out_dtype) : (void *)y;
  int status = KVL_CPU_NAME(matmul)(&p.product, queue);
  if (status < 0 || p.is_finished) return status;
  struct finish f = {g, y, first, p.outputs};
  return kvl__split(rows, kvl__grain_rows(g->n), finish_piece, &f);
}

KVL_CPU_KERNEL(linear) {
  const struct kvl_linear_args *g = args;
  if (g->rows == 0 || g->n == 0) return 0;
  struct panel p = panel_of(g);
  char *h = g->workspace, *y = h + p.bytes_h;
  for (int64_t i = 0; i < g->rows; i += p.rows) {
    int64_t rows = i64_min(p.rows, g->rows - i);
    const void *x = at_const(g->x, i * g->k, g->dtype);
    int status = 0;
    if (g->norm) {
      p.norm.x = x, p.norm.out = h, p.norm.rows = rows;
      status = KVL_CPU_NAME(rmsnorm)(&p.norm, queue);
      x = h;
    }
    for (int j = 0; j < g->parts && status >= 0; j++) {
      struct kvl_linear_args part = kvl__linear_part(g, j);
      status = multiply_panel(&part, x, i, rows, (float *)y, y + p.bytes_y, queue);
    }
    if (status < 0) return status;
  }
  return 0;
}
