/* out[o][i] = sum, mean, max or min over n of a[o][n][i].
 *   a    f32 f16 bf16 [outer, n, inner], or i32 for all but the mean
 *   out  like a, or f32  [outer, inner]
 * Lanes add up RUN terms at a time in f32, and the sums of these runs are added in double, so
 * the error does not grow with n. MAX and MIN are NaN if an element is. Sums of i32 are
 * exact; a sum that does not fit an i32 result wraps.
 * Reads a once. inner == 1: long rows are cut into at most CHUNKS parts. inner > 1: threads
 * share tiles of COLUMNS columns, and read each tile down all of n.
 * Limit: read bandwidth. */
#include "args/elementwise.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

enum { CHUNK = 65536, CHUNKS = 64, COLUMNS = 4 * VF };

static inline KVL_HOT double none(const int op) {
  return op == KVL_REDUCE_MAX ? -INFINITY : op == KVL_REDUCE_MIN ? INFINITY : 0;
}
static inline KVL_HOT double join(double a, double b, const int op) {
  if (op == KVL_REDUCE_MAX) return a > b || a != a ? a : b;
  if (op == KVL_REDUCE_MIN) return a < b || a != a ? a : b;
  return a + b;
}
static inline KVL_HOT vf vf_join(vf a, vf b, const int op) {
  if (op == KVL_REDUCE_MAX) return vf_max_nan(a, b);
  if (op == KVL_REDUCE_MIN) return vf_min_nan(a, b);
  return a + b;
}
static inline KVL_HOT double vf_join_lanes(vf a, const int op) {
  if (op != KVL_REDUCE_MAX && op != KVL_REDUCE_MIN) return vf_sum(a);
  float lane[VF];
  memcpy(lane, &a, sizeof lane);
  double r = lane[0];
  for (int i = 1; i < VF; i++) r = join(r, lane[i], op);
  return r;
}

/* ---- contiguous runs ---------------------------------------------------------------- */

static inline KVL_HOT double run(const void *p, int64_t n, const int op, const int dtype) {
  double total = none(op);
  int64_t i = 0;
  while (n - i >= 4 * VF) {
    int64_t end = i64_min(i + RUN * 4 * VF, n - 4 * VF + 1);
    vf x0 = vf_set((float)none(op)), x1 = x0, x2 = x0, x3 = x0;
    for (; i < end; i += 4 * VF) {
      x0 = vf_join(x0, vf_load(p, i, dtype), op);
      x1 = vf_join(x1, vf_load(p, i + VF, dtype), op);
      x2 = vf_join(x2, vf_load(p, i + 2 * VF, dtype), op);
      x3 = vf_join(x3, vf_load(p, i + 3 * VF, dtype), op);
    }
    vf x = vf_join(vf_join(x0, x1, op), vf_join(x2, x3, op), op);
    total = join(total, vf_join_lanes(x, op), op);
  }
  for (; i < n; i++) total = join(total, f32_load(p, i, dtype), op);
  return total;
}

#define BY_OP(call)                          \
  switch (a->op) { /* ORDER kvl_reduce_op */ \
    case KVL_REDUCE_MAX: {                   \
      enum { OP = KVL_REDUCE_MAX };          \
      call;                                  \
    } break;                                 \
    case KVL_REDUCE_MIN: {                   \
      enum { OP = KVL_REDUCE_MIN };          \
      call;                                  \
    } break;                                 \
    default: {                               \
      enum { OP = KVL_REDUCE_SUM };          \
      call;                                  \
    }                                        \
  }

static int run_any(const struct kvl_reduce_args *a, int64_t first, int64_t n, double *out) {
  KVL_BY_FLOAT(a->dtype, BY_OP(*out = run(at_const(a->a, first, D), n, OP, D)))
  return 0;
}

static void finish(const struct kvl_reduce_args *a, int64_t i, double x) {
  if (a->op == KVL_REDUCE_MEAN) x /= (double)a->n;
  f32_store(a->out, i, (float)x, a->out_dtype);
}

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_reduce_args *a = args;
  for (int64_t r = begin; r < end; r++) {
    double x;
    int status = run_any(a, r * a->n, a->n, &x);
    if (status < 0) return status;
    finish(a, r, x);
  }
  return 0;
}

/* One long row at a time. Threads share its chunks. */
struct long_row {
  const struct kvl_reduce_args *a;
  int64_t row, chunk;
  double part[CHUNKS];
};

static int chunk_piece(const void *args, int64_t begin, int64_t end) {
  struct long_row *g = (struct long_row *)args;
  for (int64_t c = begin; c < end; c++) {
    int64_t n = i64_min(g->chunk, g->a->n - c * g->chunk);
    int status = run_any(g->a, g->row * g->a->n + c * g->chunk, n, &g->part[c]);
    if (status < 0) return status;
  }
  return 0;
}

static int long_rows(const struct kvl_reduce_args *a) {
  struct long_row g = {.a = a, .chunk = i64_max(CHUNK, (a->n + CHUNKS - 1) / CHUNKS)};
  int64_t chunks = (a->n + g.chunk - 1) / g.chunk;
  for (g.row = 0; g.row < a->outer; g.row++) {
    int status = kvl__split(chunks, 1, chunk_piece, &g);
    if (status < 0) return status;
    double x = g.part[0];
    for (int64_t c = 1; c < chunks; c++) BY_OP(x = join(x, g.part[c], OP))
    finish(a, g.row, x);
  }
  return 0;
}

/* ---- columns: inner > 1 ------------------------------------------------------------- */

/* Reduces `vectors` vectors of columns, with `left` lanes each, from element `first` on. */
static inline KVL_HOT void columns(const struct kvl_reduce_args *a, int64_t first, int left,
                                   const int vectors, double *total, const int op,
                                   const int dtype) {
  for (int c = 0; c < vectors * VF; c++) total[c] = none(op);
  for (int64_t r = 0; r < a->n;) {
    vf x[4];
    float lane[COLUMNS];
    for (int v = 0; v < vectors; v++) x[v] = vf_set((float)none(op));
    for (int64_t end = i64_min(a->n, r + RUN); r < end; r++)
      for (int v = 0; v < vectors; v++) {
        const void *p = at_const(a->a, first + r * a->inner + v * VF, dtype);
        x[v] = vf_join(x[v], vf_load_n(p, left, dtype), op);
      }
    for (int v = 0; v < vectors; v++) vf_store(lane, v * VF, x[v], KVL_DTYPE_F32);
    for (int c = 0; c < vectors * VF; c++) total[c] = join(total[c], lane[c], op);
  }
}

static int columns_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_reduce_args *a = args;
  int64_t tiles = (a->inner + COLUMNS - 1) / COLUMNS;
  double total[COLUMNS];
  for (int64_t t = begin; t < end; t++) {
    int64_t o = t / tiles, c = t % tiles * COLUMNS, stop = i64_min(a->inner, c + COLUMNS);
    int64_t first = o * a->n * a->inner;
    if (stop - c == COLUMNS) {
      KVL_BY_FLOAT(a->dtype, BY_OP(columns(a, first + c, VF, 4, total, OP, D)))
      for (int i = 0; i < COLUMNS; i++) finish(a, o * a->inner + c + i, total[i]);
      continue;
    }
    for (; c < stop; c += VF) {
      int left = vf_left(c, stop);
      KVL_BY_FLOAT(a->dtype, BY_OP(columns(a, first + c, left, 1, total, OP, D)))
      for (int i = 0; i < left; i++) finish(a, o * a->inner + c + i, total[i]);
    }
  }
  return 0;
}

/* ---- i32 ---------------------------------------------------------------------------- */

static int whole_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_reduce_args *a = args;
  for (int64_t i = begin; i < end; i++) {
    int64_t first = i / a->inner * a->n * a->inner + i % a->inner;
    const int32_t *p = (const int32_t *)a->a + first;
    int64_t x = 0;
    if (a->op == KVL_REDUCE_MAX) x = INT32_MIN;
    if (a->op == KVL_REDUCE_MIN) x = INT32_MAX;
    for (int64_t r = 0; r < a->n; r++) {
      int64_t y = p[r * a->inner];
      if (a->op == KVL_REDUCE_MAX) x = y > x ? y : x;
      else if (a->op == KVL_REDUCE_MIN) x = y < x ? y : x;
      else x += y;
    }
    if (a->out_dtype == KVL_DTYPE_F32) ((float *)a->out)[i] = (float)x;
    else ((int32_t *)a->out)[i] = (int32_t)x;
  }
  return 0;
}

KVL_CPU_KERNEL(reduce) {
  const struct kvl_reduce_args *a = args;
  int64_t grain = kvl__grain_rows(a->n);
  if (a->dtype == KVL_DTYPE_I32 && a->op == KVL_REDUCE_MEAN) return KVL_ERR_UNSUPPORTED;
  if (a->dtype == KVL_DTYPE_I32)
    return kvl__split(a->outer * a->inner, grain, whole_piece, a);
  if (a->inner == 1 && a->n >= 2 * CHUNK) return long_rows(a);
  if (a->inner == 1) return kvl__split(a->outer, grain, rows_piece, a);
  int64_t tiles = (a->inner + COLUMNS - 1) / COLUMNS;
  return kvl__split(a->outer * tiles, kvl__grain_rows(a->n * COLUMNS), columns_piece, a);
}
