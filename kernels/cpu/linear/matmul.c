/* out = a b, or a b^T for transpose_b, for each matrix of the batch; fp32 accumulation.
 *   a    f32 f16 bf16 f8e4m3  [batch or 1, m, k]
 *   b    like a               [batch or 1, k, n], or [.., n, k] transposed
 *   out  like a, or f32; for f8e4m3: f32 f16 bf16  [batch, m, n]
 * 2 batch m n k operations.
 * If m <= THIN_ROWS, thin.h reads b once in its own dtype. Limit: read bandwidth at m = 1,
 * multiply-adds from m = 8 on; [k, n] with long rows is latency-bound, 10 to 20 GB/s.
 * Otherwise panels of a and b are widened to f32 and multiplied by the BLAS's sgemm, which
 * has its own threads. Limit: fp32 multiply-adds.
 * Workspace: those panels; for thin.h, the rows of a in f32.
 *
 * Best of 60, bf16, b transposed, AVX-512, 2 cores of a Xeon (family 6 model 167) at
 * 2.6 GHz, OpenBLAS 0.3.21, 2026-11-21; in brackets sgemm alone on f32 inputs
 *   m    n    k       us   GFLOP/s   GB/s of b
 *   1  4096 4096     650        52      52
 *   16 1024  256      54       155 (100)
 *   512 1024 256    1150       232 (266)
 *   512 2048 2048  16600       258 (298)
 * 32 rows of 1024 x 256 take 106 us in thin.h and 160 through panels; 64 rows take equally
 * long in both. sbgemm would save the widening, but the distribution's OpenBLAS does not
 * export it. */
#include <cblas.h>

#include "args/linear.h"
#include "cpu/linear/thin.h"

enum { PANEL_ROWS = 1024, PANEL_ELEMENTS = 1 << 22 };

struct panels {
  int64_t m, n;      /* rows of a and columns of b in a panel */
  int64_t a, b, out; /* floats of workspace for each */
};

static int is_thin(const struct kvl_matmul_args *g) { return g->m <= THIN_ROWS || g->k == 0; }

static struct panels panels_of(const struct kvl_matmul_args *g) {
  struct panels p = {i64_min(g->m, PANEL_ROWS), g->n, 0, 0, 0};
  if (g->dtype == KVL_DTYPE_F32) return p;
  p.a = p.m * g->k;
  if (is_thin(g)) {
    if (!g->transpose_b && g->out_dtype != KVL_DTYPE_F32) p.out = p.m * p.n;
    return p;
  }
  p.n = i64_min(g->n, i64_max(256, PANEL_ELEMENTS / i64_max(1, g->k)));
  p.b = p.n * g->k;
  if (g->out_dtype != KVL_DTYPE_F32) p.out = p.m * p.n;
  return p;
}

KVL_CPU_WORKSPACE(matmul) {
  struct panels p = panels_of(args);
  return (size_t)(p.a + p.b + p.out) * sizeof(float);
}

/* ---- converting panels -------------------------------------------------------------- */

/* out[r][c] = in[r][c] for rows of `columns` elements; one side is f32. */
struct convert {
  const void *in;
  void *out;
  int64_t columns, in_row, out_row;
  int32_t from, to;
};

static inline KVL_HOT void convert_rows(const struct convert *g, int64_t begin, int64_t end,
                                        const int from, const int to) {
  for (int64_t r = begin; r < end; r++)
    for (int64_t c = 0; c < g->columns; c += VF) {
      int left = vf_left(c, g->columns);
      vf x = vf_load_n(at_const(g->in, r * g->in_row + c, from), left, from);
      vf_store_n(at(g->out, r * g->out_row + c, to), x, left, to);
    }
}

static int convert_piece(const void *args, int64_t begin, int64_t end) {
  const struct convert *g = args;
  enum { F32 = KVL_DTYPE_F32 };
  if (g->to == F32) KVL_BY_STORED(g->from, convert_rows(g, begin, end, D, F32))
  else KVL_BY_FLOAT(g->to, convert_rows(g, begin, end, F32, D))
  return 0;
}

static void convert(const void *in, int64_t in_row, int from, void *out, int64_t out_row,
                    int to, int64_t rows, int64_t columns) {
  struct convert g = {in, out, columns, in_row, out_row, from, to};
  kvl__split(rows, kvl__grain_rows(columns), convert_piece, &g);
}

/* ---- many rows ---------------------------------------------------------------------- */

static int wide(const struct kvl_matmul_args *g, const void *a, const void *b, void *out) {
  struct panels p = panels_of(g);
  float *a32 = g->workspace, *b32 = a32 + p.a, *out32 = b32 + p.b;
  int64_t b_row = g->transpose_b ? g->k : g->n;
  for (int64_t i = 0; i < g->m; i += p.m) {
    int64_t m = i64_min(p.m, g->m - i);
    const float *x = at_const(a, i * g->a_row, g->dtype);
    int64_t x_row = p.a ? g->k : g->a_row;
    if (p.a) convert(x, g->a_row, g->dtype, a32, g->k, KVL_DTYPE_F32, m, g->k), x = a32;
    for (int64_t j = 0; j < g->n; j += p.n) {
      int64_t n = i64_min(p.n, g->n - j), y_row = b_row, z_row = g->out_row;
      const float *y = at_const(b, g->transpose_b ? j * g->k : j, g->dtype);
      float *z = at(out, i * g->out_row + j, g->out_dtype);
      if (p.b) {
        int64_t rows = g->transpose_b ? n : g->k;
        y_row = g->transpose_b ? g->k : n;
        convert(y, b_row, g->dtype, b32, y_row, KVL_DTYPE_F32, rows, y_row);
        y = b32;
      }
      if (p.out) z = out32, z_row = n;
      cblas_sgemm(CblasRowMajor, CblasNoTrans, g->transpose_b ? CblasTrans : CblasNoTrans,
                  (int)m, (int)n, (int)g->k, 1, x, (int)x_row, y, (int)y_row, 0, z,
                  (int)z_row);
      if (p.out)
        convert(z, n, KVL_DTYPE_F32, at(out, i * g->out_row + j, g->out_dtype), g->out_row,
                g->out_dtype, m, n);
    }
  }
  return 0;
}

/* ---- few rows ----------------------------------------------------------------------- */

static int dots_piece(const void *args, int64_t begin, int64_t end) {
  const struct thin *g = args;
  KVL_BY_STORED(g->dtype, thin_dots(g, begin, end, D))
  return 0;
}

static int columns_piece(const void *args, int64_t begin, int64_t end) {
  const struct thin *g = args;
  KVL_BY_FLOAT(g->dtype, thin_columns(g, begin, end, D))
  return 0;
}

static int thin(const struct kvl_matmul_args *g, const void *a, const void *b, void *out) {
  struct panels p = panels_of(g);
  float *a32 = g->workspace, *out32 = a32 + p.a;
  struct thin t = {.x = p.a ? a32 : a,
                   .y = b,
                   .out = p.out ? (void *)out32 : out,
                   .rows = g->m,
                   .n = g->n,
                   .k = g->k,
                   .x_row = p.a ? g->k : g->a_row,
                   .out_row = p.out ? g->n : g->out_row,
                   .dtype = g->dtype,
                   .out_dtype = g->out_dtype};
  if (p.a) convert(a, g->a_row, g->dtype, a32, g->k, KVL_DTYPE_F32, g->m, g->k);
  /* a column reads k elements of b; with m rows of a it costs about 1 + m / 4 times that */
  int64_t grain = 4 * KVL_GRAIN / (4 + g->m) / i64_max(1, g->k);
  int64_t unit = g->transpose_b ? THIN_DOTS : THIN_COLUMNS;
  grain = (grain / unit + 1) * unit;
  int status = kvl__split(g->n, grain, g->transpose_b ? dots_piece : columns_piece, &t);
  if (p.out) convert(out32, g->n, KVL_DTYPE_F32, out, g->out_row, g->out_dtype, g->m, g->n);
  return status;
}

KVL_CPU_KERNEL(matmul) {
  const struct kvl_matmul_args *g = args;
  if (g->m == 0 || g->n == 0) return 0;
  for (int64_t i = 0; i < g->batch; i++) {
    const void *a = at_const(g->a, i * g->a_stride, g->dtype);
    const void *b = at_const(g->b, i * g->b_stride, g->dtype);
    void *out = at(g->out, i * g->out_stride, g->out_dtype);
    int status = is_thin(g) ? thin(g, a, b, out) : wide(g, a, b, out);
    if (status < 0) return status;
  }
  return 0;
}
