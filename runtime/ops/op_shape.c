/* Ops that move elements to another shape, and ops along any one dim. Each function checks its
 * arguments, works out strides and launches a kernel; kvlab.h describes the op. */
#include "args/elementwise.h"
#include "core/tensor.h"
#include "ops/op_args.h"

/* ---- copies with strides --------------------------------------------------------------- */

/* The row-major strides of a shape, in elements. */
static void strides_of(const kvl_tensor *t, int64_t *stride) {
  int64_t step = 1;
  for (int i = t->ndim - 1; i >= 0; i--) {
    stride[i] = step;
    step *= t->shape[i];
  }
}

static void expect_dim(struct kvl__call *c, const char *name, int dim, const kvl_tensor *t) {
  if (c->status >= 0 && (dim < 0 || dim >= t->ndim))
    kvl__call_fail(c, "%s is %d, expected 0 ... %d", name, dim, t->ndim - 1);
}

/* These kernels read elements after they have written others. */
static void expect_apart(struct kvl__call *c, const kvl_tensor *a, const kvl_tensor *out) {
  if (c->status < 0) return;
  int bytes = kvl_dtype_bytes(a->dtype);
  const char *p = a->ptr, *q = out->ptr;
  if (a->count && out->count && p < q + out->count * bytes && q < p + a->count * bytes)
    kvl__call_fail(c, "out shares memory with the tensor that is read");
}

static void swap_dims(struct kvl_strided_copy_args *s, int i, int j) {
  int64_t *of[3] = {s->shape, s->a_stride, s->out_stride};
  for (int k = 0; k < 3; k++) {
    int64_t x = of[k][i];
    of[k][i] = of[k][j];
    of[k][j] = x;
  }
}

/* Merges neighbouring dims where both strides allow it, drops dims of size 1, and puts the dim
 * along which `a` is closest to contiguous before the last one. */
static void normalise(struct kvl_strided_copy_args *s) {
  int n = 0;
  for (int i = 0; i < s->ndim; i++) {
    if (s->shape[i] == 1) continue;
    int join = n > 0 && s->a_stride[n - 1] == s->a_stride[i] * s->shape[i] &&
               s->out_stride[n - 1] == s->out_stride[i] * s->shape[i];
    if (join) s->shape[n - 1] *= s->shape[i];
    else s->shape[n++] = s->shape[i];
    s->a_stride[n - 1] = s->a_stride[i];
    s->out_stride[n - 1] = s->out_stride[i];
  }
  if (n == 0) { /* one element */
    s->shape[0] = s->a_stride[0] = s->out_stride[0] = 1;
    n = 1;
  }
  int closest = n - 2;
  for (int i = 0; i < n - 1; i++)
    if (s->a_stride[i] > 0 &&
        (s->a_stride[closest] == 0 || s->a_stride[i] < s->a_stride[closest]))
      closest = i;
  if (n > 2 && s->a_stride[n - 1] > 1) swap_dims(s, closest, n - 2);
  s->ndim = n;
}

/* Copies `shape` elements; a_stride and out_stride are in args already. */
static int strided_copy(struct kvl__call *c, struct kvl_strided_copy_args *args,
                        const void *a, void *out, const kvl_tensor *shape) {
  args->a = a;
  args->out = out;
  args->ndim = shape->ndim;
  args->count = shape->count;
  args->bytes_element = kvl_dtype_bytes(shape->dtype);
  memcpy(args->shape, shape->shape, sizeof args->shape);
  normalise(args);
  return KVL__LAUNCH(c, strided_copy, *args);
}

int kvl_transpose(const kvl_tensor *a, int dim0, int dim1, const kvl_tensor *out) {
  struct kvl__call c = {.op = "transpose"};
  kvl__arg(&c, "a", a, KVL__ANY, "...");
  kvl__arg(&c, "out", out, kvl__like(a), "...");
  expect_dim(&c, "dim0", dim0, a);
  expect_dim(&c, "dim1", dim1, a);
  if (c.status < 0) return c.status;
  struct kvl_strided_copy_args args = {0};
  kvl_tensor want = *a;
  want.shape[dim0] = a->shape[dim1];
  want.shape[dim1] = a->shape[dim0];
  kvl__expect_shape_of(&c, "out", out, "a with the two dims swapped", &want);
  expect_apart(&c, a, out);
  if (c.status < 0) return c.status;
  strides_of(a, args.a_stride);
  int64_t of_dim0 = args.a_stride[dim0];
  args.a_stride[dim0] = args.a_stride[dim1];
  args.a_stride[dim1] = of_dim0;
  strides_of(out, args.out_stride);
  return strided_copy(&c, &args, a->ptr, out->ptr, out);
}

int kvl_expand(const kvl_tensor *a, const kvl_tensor *out) {
  struct kvl__call c = {.op = "expand"};
  kvl__arg(&c, "a", a, KVL__ANY, "...");
  kvl__arg(&c, "out", out, kvl__like(a), "...");
  expect_apart(&c, a, out);
  if (c.status < 0) return c.status;
  struct kvl_strided_copy_args args = {0};
  int64_t step = 1;
  int missing = out->ndim - a->ndim, fits = missing >= 0;
  for (int i = out->ndim - 1; fits && i >= 0; i--) {
    int64_t size = i < missing ? 1 : a->shape[i - missing];
    fits = size == 1 || size == out->shape[i];
    args.a_stride[i] = size == 1 ? 0 : step;
    step *= size;
  }
  if (!fits) {
    char from[96], to[96];
    return kvl__call_fail(&c, "a is %s, out is %s: a does not broadcast to it",
                          kvl__tensor_words(a, from, sizeof from),
                          kvl__tensor_words(out, to, sizeof to));
  }
  strides_of(out, args.out_stride);
  return strided_copy(&c, &args, a->ptr, out->ptr, out);
}

/* Copies between `part` and the entries start ... of `whole` along dim, which must have part's
 * size there and the same size everywhere else. */
static int copy_part(struct kvl__call *c, const char *whole_name, const kvl_tensor *whole,
                     int dim, int64_t start, const char *part_name, const kvl_tensor *part,
                     int from_whole) {
  expect_dim(c, "dim", dim, whole);
  if (c->status < 0) return c->status;
  int64_t length = part->ndim == whole->ndim ? part->shape[dim] : 0;
  kvl_tensor want = *whole;
  want.shape[dim] = length;
  char words[40];
  snprintf(words, sizeof words, "%s but for dim %d", whole_name, dim);
  kvl__expect_shape_of(c, part_name, part, words, &want);
  if (c->status >= 0 && (start < 0 || start > whole->shape[dim] - length))
    kvl__call_fail(c, "entries %lld ... %lld of dim %d, expected within 0 ... %lld",
                   (long long)start, (long long)(start + length), dim,
                   (long long)whole->shape[dim]);
  expect_apart(c, part, whole);
  if (c->status < 0) return c->status;
  struct kvl_strided_copy_args args = {0};
  int64_t stride[KVL_DIMS_MAX];
  strides_of(whole, stride);
  char *at = (char *)whole->ptr + start * stride[dim] * kvl_dtype_bytes(whole->dtype);
  memcpy(from_whole ? args.a_stride : args.out_stride, stride, sizeof stride);
  strides_of(part, from_whole ? args.out_stride : args.a_stride);
  return from_whole ? strided_copy(c, &args, at, part->ptr, part)
                    : strided_copy(c, &args, part->ptr, at, part);
}

int kvl_take_part(const kvl_tensor *a, int dim, int64_t start, const kvl_tensor *out) {
  struct kvl__call c = {.op = "take_part"};
  kvl__arg(&c, "a", a, KVL__ANY, "...");
  kvl__arg(&c, "out", out, kvl__like(a), "...");
  return copy_part(&c, "a", a, dim, start, "out", out, 1);
}

int kvl_put_part(const kvl_tensor *a, int dim, int64_t start, const kvl_tensor *out) {
  struct kvl__call c = {.op = "put_part"};
  kvl__arg(&c, "a", a, KVL__ANY, "...");
  kvl__arg(&c, "out", out, kvl__like(a), "...");
  return copy_part(&c, "out", out, dim, start, "a", a, 0);
}

/* ---- along one dim --------------------------------------------------------------------- */

static void outer_inner(const kvl_tensor *a, int dim, int64_t *outer, int64_t *inner) {
  *outer = *inner = 1;
  for (int i = 0; i < dim; i++) *outer *= a->shape[i];
  for (int i = dim + 1; i < a->ndim; i++) *inner *= a->shape[i];
}

int kvl_cumsum(const kvl_tensor *a, int dim, const kvl_tensor *out) {
  struct kvl__call c = {.op = "cumsum"};
  kvl__arg(&c, "a", a, KVL__FLOAT | KVL__I32 | KVL__I64, "...");
  expect_dim(&c, "dim", dim, a);
  kvl__arg(&c, "out", out, kvl__like(a), "...");
  if (c.status >= 0) kvl__expect_shape_of(&c, "out", out, "a", a);
  if (c.status < 0) return c.status;
  struct kvl_cumsum_args args = {
      .a = a->ptr, .out = out->ptr, .n = a->shape[dim], .dtype = a->dtype};
  outer_inner(a, dim, &args.outer, &args.inner);
  return KVL__LAUNCH(&c, cumsum, args);
}

int kvl_logsumexp(const kvl_tensor *a, int dim, const kvl_tensor *out) {
  struct kvl__call c = {.op = "logsumexp"};
  kvl__arg(&c, "a", a, KVL__FLOAT, "...");
  expect_dim(&c, "dim", dim, a);
  kvl__arg(&c, "out", out, kvl__like(a) | KVL__F32, "...");
  if (c.status < 0) return c.status;
  kvl_tensor want = *a; /* a's shape without dim */
  want.ndim--;
  memmove(want.shape + dim, want.shape + dim + 1,
          sizeof want.shape[0] * (size_t)(want.ndim - dim));
  kvl__expect_shape_of(&c, "out", out, "a without dim", &want);
  if (c.status < 0) return c.status;
  struct kvl_logsumexp_args args = {.a = a->ptr,
                                    .out = out->ptr,
                                    .n = a->shape[dim],
                                    .dtype = a->dtype,
                                    .out_dtype = out->dtype};
  outer_inner(a, dim, &args.outer, &args.inner);
  args.workspace = kvl__call_workspace(&c, KVL_OP_logsumexp, &args);
  return KVL__LAUNCH(&c, logsumexp, args);
}
