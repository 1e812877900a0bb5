/* Elementwise ops, reductions, top-k, matmul, gathers and casts. Each function checks its
 * arguments, works out strides and launches a kernel; kvlab.h describes the op. */
#include "args/elementwise.h"
#include "args/linear.h"
#include "args/select.h"
#include "core/tensor.h"
#include "ops/op_args.h"

static void expect_enum(struct kvl__call *c, const char *name, int value, int last) {
  if (value < 0 || value > last)
    kvl__call_fail(c, "%s is %d, expected 0 ... %d", name, value, last);
}

/* ---- fills ---------------------------------------------------------------------------- */

int kvl_fill(const kvl_tensor *t, double value) {
  struct kvl__call c = {.op = "fill"};
  kvl__arg(&c, "t", t, KVL__ANY, "...");
  if (c.status < 0) return c.status;
  struct kvl_fill_args args = {t->ptr, t->count, value, t->dtype};
  return KVL__LAUNCH(&c, fill, args);
}

int kvl_arange(const kvl_tensor *t, double start, double step) {
  struct kvl__call c = {.op = "arange"};
  kvl__arg(&c, "t", t, KVL__ANY & ~KVL__F8, "...");
  if (c.status < 0) return c.status;
  struct kvl_arange_args args = {t->ptr, t->count, start, step, t->dtype};
  return KVL__LAUNCH(&c, arange, args);
}

int kvl_random(const kvl_tensor *t, int kind, double a, double b, uint64_t seed,
               uint64_t offset) {
  struct kvl__call c = {.op = "random"};
  expect_enum(&c, "kind", kind, KVL_RANDOM_INTEGER);
  kvl__arg(&c, "t", t, kind == KVL_RANDOM_INTEGER ? KVL__I32 | KVL__I64 : KVL__FLOAT, "...");
  if (kind == KVL_RANDOM_INTEGER && !(b > a && b - a < 4294967296.0))
    kvl__call_fail(&c, "range is [%g, %g), expected 1 ... 2^32 - 1 integers", a, b);
  if (c.status < 0) return c.status;
  struct kvl_random_args args = {t->ptr, t->count, seed, offset, a, b, kind, t->dtype};
  return KVL__LAUNCH(&c, random, args);
}

/* ---- elementwise ----------------------------------------------------------------------- */

int kvl_cast(const kvl_tensor *a, const kvl_tensor *out) {
  struct kvl__call c = {.op = "cast"};
  kvl__arg(&c, "a", a, KVL__ANY & ~KVL__U64, "...");
  kvl__arg(&c, "out", out, KVL__ANY & ~KVL__U64, "...");
  if (c.status >= 0) kvl__expect_shape_of(&c, "out", out, "a", a);
  if (c.status < 0) return c.status;
  unsigned pair = kvl__like(a) | kvl__like(out);
  if ((pair & KVL__F8) && (pair & ~(unsigned)(KVL__F8 | KVL__FLOAT)))
    return kvl__call_fail(
        &c, "from %s to %s: f8e4m3 can be cast from and to f32, f16 and bf16 only",
        kvl_dtype_name(a->dtype), kvl_dtype_name(out->dtype));
  struct kvl_cast_args args = {a->ptr, out->ptr, a->count, a->dtype, out->dtype};
  return KVL__LAUNCH(&c, cast, args);
}

int kvl_unary(int op, const kvl_tensor *a, const kvl_tensor *out) {
  struct kvl__call c = {.op = "unary"};
  expect_enum(&c, "op", op, KVL_UNARY_FLOOR);
  kvl__arg(&c, "a", a, KVL__FLOAT, "...");
  kvl__arg(&c, "out", out, kvl__like(a), "...");
  if (c.status >= 0) kvl__expect_shape_of(&c, "out", out, "a", a);
  if (c.status < 0) return c.status;
  struct kvl_unary_args args = {a->ptr, out->ptr, a->count, op, a->dtype};
  return KVL__LAUNCH(&c, unary, args);
}

/* Finds the strides of t when t is broadcast to the shape of `out`. The two are aligned at
 * the last dim, and a dim that t lacks, or where its size is 1, has stride 0. Returns 0 if
 * the shapes do not broadcast. */
static int broadcast(const kvl_tensor *t, const kvl_tensor *out, int64_t *stride) {
  int64_t step = 1;
  int missing = out->ndim - t->ndim;
  if (missing < 0) return 0;
  for (int i = out->ndim - 1; i >= 0; i--) {
    int64_t size = i < missing ? 1 : t->shape[i - missing];
    if (size != 1 && size != out->shape[i]) return 0;
    stride[i] = size == 1 ? 0 : step;
    step *= size;
  }
  return 1;
}

/* Merges neighbouring dims where the strides of both operands allow it, and drops dims of
 * size 1. */
static void merge_dims(struct kvl_binary_args *s) {
  int n = 0;
  for (int i = 0; i < s->ndim; i++) {
    if (s->shape[i] == 1) continue;
    int join = n > 0 && s->a_stride[n - 1] == s->a_stride[i] * s->shape[i] &&
               s->b_stride[n - 1] == s->b_stride[i] * s->shape[i];
    if (join) s->shape[n - 1] *= s->shape[i];
    else s->shape[n++] = s->shape[i];
    s->a_stride[n - 1] = s->a_stride[i];
    s->b_stride[n - 1] = s->b_stride[i];
  }
  if (n == 0) { /* one element */
    s->shape[0] = 1;
    s->a_stride[0] = s->b_stride[0] = 0;
    n = 1;
  }
  s->ndim = n;
}

static int binary(int op, const kvl_tensor *a, const kvl_tensor *b, double scalar,
                  const kvl_tensor *out) {
  struct kvl__call c = {.op = "binary"};
  if (op == KVL_BINARY_POW && !b && scalar == 2) op = KVL_BINARY_MUL, b = a; /* the same */
  int compares = op >= KVL_BINARY_EQ;
  expect_enum(&c, "op", op, KVL_BINARY_GE);
  kvl__arg(&c, "a", a, KVL__FLOAT | KVL__I32 | KVL__I64, "...");
  kvl__arg(&c, "b?", b, kvl__like(a), "...");
  kvl__arg(&c, "out", out, compares ? KVL__U8 : kvl__like(a), "...");
  if (c.status < 0) return c.status;
  struct kvl_binary_args args = {.a = a->ptr,
                                 .b = b ? b->ptr : NULL,
                                 .out = out->ptr,
                                 .scalar = scalar,
                                 .count = out->count,
                                 .ndim = out->ndim,
                                 .op = op,
                                 .dtype = a->dtype,
                                 .out_dtype = out->dtype};
  memcpy(args.shape, out->shape, sizeof args.shape);
  int fits = broadcast(a, out, args.a_stride) && (!b || broadcast(b, out, args.b_stride));
  for (int i = 0; fits && i < out->ndim; i++) { /* out must not be larger than both */
    int ia = i - (out->ndim - a->ndim), ib = b ? i - (out->ndim - b->ndim) : -1;
    int64_t size = ia >= 0 ? a->shape[ia] : 1;
    if (ib >= 0 && size == 1) size = b->shape[ib];
    fits = size == out->shape[i];
  }
  if (!fits) {
    char ta[96], tb[96], to[96];
    return kvl__call_fail(&c, "a is %s, b is %s, out is %s: they do not broadcast",
                          kvl__tensor_words(a, ta, sizeof ta),
                          b ? kvl__tensor_words(b, tb, sizeof tb) : "a number",
                          kvl__tensor_words(out, to, sizeof to));
  }
  merge_dims(&args);
  return KVL__LAUNCH(&c, binary, args);
}

int kvl_binary(int op, const kvl_tensor *a, const kvl_tensor *b, const kvl_tensor *out) {
  if (!b) return kvl__fail(KVL_ERR_INVALID, "binary: b is missing, expected a tensor");
  return binary(op, a, b, 0, out);
}

int kvl_binary_scalar(int op, const kvl_tensor *a, double b, const kvl_tensor *out) {
  return binary(op, a, NULL, b, out);
}

/* An operand that is missing is a number. */
static int where(const kvl_tensor *cond, const kvl_tensor *a, double a_value,
                 const kvl_tensor *b, double b_value, const kvl_tensor *out) {
  struct kvl__call c = {.op = "where"};
  kvl__arg(&c, "cond", cond, KVL__U8, "...");
  kvl__arg(&c, "a?", a, KVL__ANY, "...");
  kvl__arg(&c, "b?", b, kvl__like(a), "...");
  kvl__arg(&c, "out", out, a ? kvl__like(a) : kvl__like(b), "...");
  if (c.status >= 0 && a) kvl__expect_shape_of(&c, "a", a, "cond", cond);
  if (c.status >= 0 && b) kvl__expect_shape_of(&c, "b", b, "cond", cond);
  if (c.status >= 0) kvl__expect_shape_of(&c, "out", out, "cond", cond);
  if (c.status < 0) return c.status;
  struct kvl_where_args args = {.cond = cond->ptr,
                                .a = a ? a->ptr : NULL,
                                .b = b ? b->ptr : NULL,
                                .out = out->ptr,
                                .a_value = a_value,
                                .b_value = b_value,
                                .count = out->count,
                                .dtype = out->dtype};
  return KVL__LAUNCH(&c, where, args);
}

int kvl_where(const kvl_tensor *cond, const kvl_tensor *a, const kvl_tensor *b,
              const kvl_tensor *out) {
  if (!a || !b)
    return kvl__fail(KVL_ERR_INVALID, "where: %s is missing, expected a tensor",
                     a ? "b" : "a");
  return where(cond, a, 0, b, 0, out);
}

int kvl_where_scalar(const kvl_tensor *cond, const kvl_tensor *a, double a_value,
                     const kvl_tensor *b, double b_value, const kvl_tensor *out) {
  return where(cond, a, a_value, b, b_value, out);
}

/* ---- reductions ------------------------------------------------------------------------ */

int kvl_reduce(int op, const kvl_tensor *a, int dim, const kvl_tensor *out) {
  struct kvl__call c = {.op = "reduce"};
  expect_enum(&c, "op", op, KVL_REDUCE_MIN);
  unsigned ints = op == KVL_REDUCE_MEAN ? 0 : KVL__I32;
  if (kvl__arg(&c, "a", a, KVL__FLOAT | ints, "...") && (dim < 0 || dim >= a->ndim))
    kvl__call_fail(&c, "dim is %d, expected 0 ... %d", dim, a->ndim - 1);
  unsigned also = a && a->dtype != KVL_DTYPE_I32 ? KVL__F32 : 0;
  kvl__arg(&c, "out", out, kvl__like(a) | also, "...");
  if (c.status < 0) return c.status;
  kvl_tensor want = *a; /* a's shape without dim */
  want.ndim--;
  memmove(want.shape + dim, want.shape + dim + 1,
          sizeof want.shape[0] * (size_t)(want.ndim - dim));
  kvl__expect_shape_of(&c, "out", out, "a without dim", &want);
  struct kvl_reduce_args args = {.a = a->ptr,
                                 .out = out->ptr,
                                 .outer = 1,
                                 .inner = 1,
                                 .n = a->shape[dim],
                                 .op = op,
                                 .dtype = a->dtype,
                                 .out_dtype = out->dtype};
  for (int i = 0; i < dim; i++) args.outer *= a->shape[i];
  for (int i = dim + 1; i < a->ndim; i++) args.inner *= a->shape[i];
  if (args.n == 0 && a->dtype == KVL_DTYPE_I32 && op != KVL_REDUCE_SUM)
    kvl__call_fail(&c, "dim %d is empty, and i32 has no infinity as a result", dim);
  args.workspace = kvl__call_workspace(&c, KVL_OP_reduce, &args);
  return KVL__LAUNCH(&c, reduce, args);
}

/* The number of rows of a tensor, the product of all dims but the last. */
static int64_t rows_of(const kvl_tensor *t) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < t->ndim; i++) rows *= t->shape[i];
  return rows;
}

int kvl_softmax(const kvl_tensor *a, double scale, const kvl_tensor *out) {
  struct kvl__call c = {.op = "softmax"};
  kvl__arg(&c, "a", a, KVL__FLOAT, "... n");
  kvl__arg(&c, "out", out, kvl__like(a) | KVL__F32, "... n");
  if (c.status >= 0) kvl__expect_shape_of(&c, "out", out, "a", a);
  if (c.status < 0) return c.status;
  struct kvl_softmax_args args = {.a = a->ptr,
                                  .out = out->ptr,
                                  .rows = rows_of(a),
                                  .n = kvl__dim(&c, "n"),
                                  .scale = (float)scale,
                                  .dtype = a->dtype,
                                  .out_dtype = out->dtype};
  args.workspace = kvl__call_workspace(&c, KVL_OP_softmax, &args);
  return KVL__LAUNCH(&c, softmax, args);
}

static int argmax(const kvl_tensor *a, int least, const kvl_tensor *out) {
  struct kvl__call c = {.op = least ? "argmin" : "argmax"};
  kvl__arg(&c, "a", a, KVL__FLOAT | KVL__I32, "... n");
  kvl__arg(&c, "out", out, KVL__I32, "...");
  if (c.status < 0) return c.status;
  kvl_tensor want = *a;
  want.ndim--;
  kvl__expect_shape_of(&c, "out", out, "a without its last dim", &want);
  int64_t n = kvl__dim(&c, "n");
  if (n < 1) kvl__call_fail(&c, "a has rows of 0 elements, expected 1 or more");
  if (c.status < 0) return c.status;
  struct kvl_argmax_args args = {.a = a->ptr,
                                 .out = out->ptr,
                                 .rows = rows_of(a),
                                 .n = n,
                                 .dtype = a->dtype,
                                 .least = least};
  args.workspace = kvl__call_workspace(&c, KVL_OP_argmax, &args);
  return KVL__LAUNCH(&c, argmax, args);
}

int kvl_argmax(const kvl_tensor *a, const kvl_tensor *out) { return argmax(a, 0, out); }
int kvl_argmin(const kvl_tensor *a, const kvl_tensor *out) { return argmax(a, 1, out); }

int kvl_draw(const kvl_tensor *scores, const kvl_tensor *numbers, const kvl_tensor *out) {
  struct kvl__call c = {.op = "draw"};
  kvl__arg(&c, "scores", scores, KVL__F32, "rows n");
  kvl__arg(&c, "numbers", numbers, KVL__I64, "rows 2");
  kvl__arg(&c, "out", out, KVL__I32, "rows");
  if (c.status < 0) return c.status;
  int64_t n = kvl__dim(&c, "n");
  if (n < 1 || n > INT32_MAX)
    kvl__call_fail(&c, "scores has rows of %lld, expected 1 ... 2^31 - 1", (long long)n);
  if (c.status < 0) return c.status;
  struct kvl_draw_args args = {.scores = scores->ptr,
                               .numbers = numbers->ptr,
                               .out = out->ptr,
                               .rows = scores->shape[0],
                               .n = n};
  args.workspace = kvl__call_workspace(&c, KVL_OP_draw, &args);
  return KVL__LAUNCH(&c, draw, args);
}

int kvl_topk(const kvl_tensor *a, int which, const kvl_tensor *values,
             const kvl_tensor *indices) {
  struct kvl__call c = {.op = "topk"};
  kvl__arg(&c, "a", a, KVL__F32 | KVL__I32, "rows n");
  kvl__arg(&c, "indices", indices, KVL__I32, "rows k");
  kvl__arg(&c, "values?", values, kvl__like(a), "rows k");
  int64_t k = kvl__dim(&c, "k"), n = kvl__dim(&c, "n");
  if (k > n || n > INT32_MAX)
    kvl__call_fail(&c, "k is %lld and n %lld, expected k <= n < 2^31", (long long)k,
                   (long long)n);
  if (which & ~(KVL_TOPK_LARGEST | KVL_TOPK_BY_INDEX))
    kvl__call_fail(&c, "which is %d, expected LEAST or LARGEST, BY_INDEX or not", which);
  if (c.status < 0) return c.status;
  struct kvl_topk_args args = {.a = a->ptr,
                               .values = values ? values->ptr : NULL,
                               .indices = indices->ptr,
                               .rows = a->shape[0],
                               .n = n,
                               .k = k,
                               .largest = (which & KVL_TOPK_LARGEST) != 0,
                               .by_index = (which & KVL_TOPK_BY_INDEX) != 0,
                               .dtype = a->dtype};
  args.workspace = kvl__call_workspace(&c, KVL_OP_topk, &args);
  return KVL__LAUNCH(&c, topk, args);
}

/* ---- matmul and gathers ---------------------------------------------------------------- */

/* The libraries for tensor cores demand this of f8e4m3 matrices, so every device demands
 * it. */
static void expect_f8_matmul(struct kvl__call *c, const kvl_tensor *a, const kvl_tensor *b,
                             const kvl_tensor *out) {
  int64_t n = kvl__dim(c, "n"), k = kvl__dim(c, "k");
  if (c->status >= 0 && (k % 16 || n % 8))
    kvl__call_fail(c, "k is %lld and n %lld, expected multiples of 16 and 8 for f8e4m3",
                   (long long)k, (long long)n);
  if (c->status >= 0 && ((uintptr_t)a->ptr | (uintptr_t)b->ptr | (uintptr_t)out->ptr) % 16)
    kvl__call_fail(c, "a, b or out does not begin at a multiple of 16 bytes");
}

int kvl_matmul(const kvl_tensor *a, const kvl_tensor *b, int transpose_b,
               const kvl_tensor *out) {
  struct kvl__call c = {.op = "matmul"};
  const int a_batched = a && a->ndim == 3, b_batched = b && b->ndim == 3;
  const int batched = a_batched || b_batched;
  int is_f8 = a && a->dtype == KVL_DTYPE_F8E4M3;
  kvl__arg(&c, "a", a, KVL__FLOAT | (transpose_b ? KVL__F8 : 0),
           a_batched ? "batch m k" : "m k");
  if (b_batched) kvl__arg(&c, "b", b, kvl__like(a), transpose_b ? "batch n k" : "batch k n");
  else kvl__arg(&c, "b", b, kvl__like(a), transpose_b ? "n k" : "k n");
  kvl__arg(&c, "out", out, is_f8 ? KVL__FLOAT : kvl__like(a) | KVL__F32,
           batched ? "batch m n" : "m n");
  if (is_f8) expect_f8_matmul(&c, a, b, out);
  if (c.status < 0) return c.status;
  struct kvl_matmul_args args = {.a = a->ptr,
                                 .b = b->ptr,
                                 .out = out->ptr,
                                 .batch = batched ? kvl__dim(&c, "batch") : 1,
                                 .m = kvl__dim(&c, "m"),
                                 .n = kvl__dim(&c, "n"),
                                 .k = kvl__dim(&c, "k"),
                                 .transpose_b = transpose_b != 0,
                                 .dtype = a->dtype,
                                 .out_dtype = out->dtype};
  args.a_stride = a_batched ? args.m * args.k : 0;
  args.b_stride = b_batched ? args.n * args.k : 0;
  args.out_stride = args.m * args.n;
  args.a_row = args.k, args.out_row = args.n;
  if (args.batch > 1 && !b_batched) { /* b is shared: all rows of a form one matrix */
    args.m *= args.batch;
    args.batch = 1;
  }
  args.workspace = kvl__call_workspace(&c, KVL_OP_matmul, &args);
  return KVL__LAUNCH(&c, matmul, args);
}

static int64_t bytes_row(const kvl_tensor *t) {
  int64_t count = 1;
  for (int i = 1; i < t->ndim; i++) count *= t->shape[i];
  return count * kvl_dtype_bytes(t->dtype);
}

/* Expects that the rows of two tensors, all dims but the first, have the same shape. */
static void expect_rows_of(struct kvl__call *c, const char *name, const kvl_tensor *t,
                           const kvl_tensor *other) {
  char got[96], want[96];
  if (c->status < 0) return;
  if (t->ndim != other->ndim ||
      memcmp(t->shape + 1, other->shape + 1, sizeof t->shape[0] * (size_t)(t->ndim - 1)))
    kvl__call_fail(c, "%s is %s, expected the rows of %s", name,
                   kvl__tensor_words(t, got, sizeof got),
                   kvl__tensor_words(other, want, sizeof want));
}

int kvl_gather_rows(const kvl_tensor *src, const kvl_tensor *index, const kvl_tensor *out) {
  struct kvl__call c = {.op = "gather_rows"};
  kvl__arg(&c, "src", src, KVL__ANY, "rows ...");
  kvl__arg(&c, "index", index, KVL__I32, "n");
  kvl__arg(&c, "out", out, kvl__like(src), "n ...");
  expect_rows_of(&c, "out", out, src);
  if (c.status < 0) return c.status;
  struct kvl_gather_rows_args args = {src->ptr,     index->ptr,    out->ptr,
                                      index->count, src->shape[0], bytes_row(src)};
  return KVL__LAUNCH(&c, gather_rows, args);
}

int kvl_scatter_rows(const kvl_tensor *src, const kvl_tensor *index, const kvl_tensor *dst) {
  struct kvl__call c = {.op = "scatter_rows"};
  kvl__arg(&c, "src", src, KVL__ANY, "n ...");
  kvl__arg(&c, "index", index, KVL__I32, "n");
  kvl__arg(&c, "dst", dst, kvl__like(src), "rows ...");
  expect_rows_of(&c, "src", src, dst);
  if (c.status < 0) return c.status;
  struct kvl_scatter_rows_args args = {.src = src->ptr,
                                       .index = index->ptr,
                                       .out = dst->ptr,
                                       .n = index->count,
                                       .rows = dst->shape[0],
                                       .bytes_row = bytes_row(dst)};
  args.workspace = kvl__call_workspace(&c, KVL_OP_scatter_rows, &args);
  return KVL__LAUNCH(&c, scatter_rows, args);
}

int kvl_gather(const kvl_tensor *src, const kvl_tensor *index, const kvl_tensor *out) {
  struct kvl__call c = {.op = "gather"};
  kvl__arg(&c, "src", src, KVL__FLOAT | KVL__I32, "rows n");
  kvl__arg(&c, "index", index, KVL__I32, "rows m");
  kvl__arg(&c, "out", out, kvl__like(src), "rows m");
  if (c.status < 0) return c.status;
  struct kvl_gather_args args = {src->ptr,
                                 index->ptr,
                                 out->ptr,
                                 src->shape[0],
                                 src->shape[1],
                                 index->shape[1],
                                 kvl_dtype_bytes(src->dtype)};
  return KVL__LAUNCH(&c, gather, args);
}

int kvl_scatter(const kvl_tensor *src, const kvl_tensor *index, int add,
                const kvl_tensor *dst) {
  struct kvl__call c = {.op = "scatter"};
  kvl__arg(&c, "src", src, KVL__F32 | KVL__I32, "rows m");
  kvl__arg(&c, "index", index, KVL__I32, "rows m");
  kvl__arg(&c, "dst", dst, kvl__like(src), "rows n");
  if (c.status < 0) return c.status;
  struct kvl_scatter_args args = {src->ptr,      index->ptr,    dst->ptr, src->shape[0],
                                  dst->shape[1], src->shape[1], add != 0, src->dtype};
  return KVL__LAUNCH(&c, scatter, args);
}
