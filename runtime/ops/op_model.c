/* Transformer ops over the rows of tokens. Each function checks the shapes and launches a
 * kernel; kvlab.h describes the op. */
#include <math.h>

#include "args/attention.h"
#include "args/elementwise.h"
#include "args/linear.h"
#include "ops/op_args.h"

/* The end of a norm whose inputs were checked. bias: of a LayerNorm. */
static int norm(struct kvl__call *c, const kvl_tensor *x, const kvl_tensor *residual,
                const kvl_tensor *weight, const kvl_tensor *bias, double eps,
                const kvl_tensor *out) {
  kvl__arg(c, "out", out, kvl__like(x), "rows dim");
  if (!(eps >= 0)) kvl__call_fail(c, "eps is %g, expected >= 0", eps);
  if (c->status < 0) return c->status;
  struct kvl_rmsnorm_args args = {.x = x->ptr,
                                  .residual = residual ? residual->ptr : NULL,
                                  .weight = weight->ptr,
                                  .bias = bias ? bias->ptr : NULL,
                                  .out = out->ptr,
                                  .rows = x->shape[0],
                                  .dim = weight->count,
                                  .row = x->shape[1],
                                  .eps = (float)eps,
                                  .dtype = x->dtype,
                                  .weight_dtype = weight->dtype};
  return KVL__LAUNCH(c, rmsnorm, args);
}

int kvl_rmsnorm(const kvl_tensor *x, const kvl_tensor *residual, const kvl_tensor *weight,
                double eps, const kvl_tensor *out) {
  struct kvl__call c = {.op = "rmsnorm"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "rows dim");
  kvl__arg(&c, "residual?", residual, kvl__like(x), "rows dim");
  kvl__arg(&c, "weight", weight, kvl__like(x) | KVL__F32, "normed");
  const int64_t dim = kvl__dim(&c, "dim"), normed = kvl__dim(&c, "normed");
  if (c.status >= 0 && normed > dim)
    kvl__call_fail(&c, "weight has %lld numbers, expected at most the %lld of a row of x",
                   (long long)normed, (long long)dim);
  if (c.status >= 0 && normed < dim && (residual || !out || out->ptr != x->ptr))
    kvl__call_fail(&c,
                   "weight has %lld of the %lld numbers of a row of x, expected out to be "
                   "x, and no residual",
                   (long long)normed, (long long)dim);
  return norm(&c, x, residual, weight, NULL, eps, out);
}

int kvl_layernorm(const kvl_tensor *x, const kvl_tensor *weight, const kvl_tensor *bias,
                  double eps, const kvl_tensor *out) {
  struct kvl__call c = {.op = "layernorm"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "rows dim");
  kvl__arg(&c, "weight", weight, kvl__like(x) | KVL__F32, "dim");
  kvl__arg(&c, "bias", bias, kvl__like(weight), "dim");
  return norm(&c, x, NULL, weight, bias, eps, out);
}

/* Whether two tensors share memory. */
static int overlaps(const kvl_tensor *a, const kvl_tensor *b) {
  const char *p = a->ptr, *q = b->ptr;
  return p < q + kvl_dtype_bytes(b->dtype) * b->count &&
         q < p + kvl_dtype_bytes(a->dtype) * a->count;
}
static void expect_apart(struct kvl__call *c, const char *out_name, const kvl_tensor *out,
                         const char *name, const kvl_tensor *t) {
  if (c->status >= 0 && t && overlaps(out, t))
    kvl__call_fail(c, "%s shares memory with %s, expected memory of its own", out_name, name);
}

int kvl_head_matmul(const kvl_tensor *x, const kvl_tensor *weight, int transpose_weight,
                    const kvl_tensor *out) {
  struct kvl__call c = {.op = "head_matmul"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "tokens heads from");
  kvl__arg(&c, "weight", weight, kvl__like(x), transpose_weight ? "heads n k" : "heads k n");
  kvl__arg(&c, "out", out, kvl__like(x), "tokens heads to");
  const int64_t k = kvl__dim(&c, "k"), n = kvl__dim(&c, "n");
  const int64_t rest = kvl__dim(&c, "from") - k, to = kvl__dim(&c, "to");
  if (c.status >= 0 && k == 0) kvl__call_fail(&c, "k is 0, expected at least 1");
  if (c.status >= 0 && rest < 0)
    kvl__call_fail(&c, "x has %lld numbers a head, expected at least the %lld of weight",
                   (long long)(rest + k), (long long)k);
  if (c.status >= 0 && to != n + rest)
    kvl__call_fail(&c,
                   "out has %lld numbers a head, expected %lld: %lld of the product, and "
                   "%lld of x behind the first %lld",
                   (long long)to, (long long)(n + rest), (long long)n, (long long)rest,
                   (long long)k);
  expect_apart(&c, "out", out, "x", x);
  expect_apart(&c, "out", out, "weight", weight);
  if (c.status < 0) return c.status;
  struct kvl_head_matmul_args args = {.x = x->ptr,
                                      .w = weight->ptr,
                                      .out = out->ptr,
                                      .tokens = x->shape[0],
                                      .heads = x->shape[1],
                                      .k = k,
                                      .n = n,
                                      .rest = rest,
                                      .transpose_w = transpose_weight != 0,
                                      .frozen = weight->storage->is_frozen,
                                      .dtype = x->dtype};
  args.workspace = kvl__call_workspace(&c, KVL_OP_head_matmul, &args);
  return KVL__LAUNCH(&c, head_matmul, args);
}

/* If x has a single row and parts of the result follow the first part without a gap in
 * memory, joins them to it. */
static void join_parts(struct kvl_linear_args *g) {
  int64_t element = kvl_dtype_bytes((kvl_dtype)g->out_dtype);
  while (g->rows == 1 && g->parts > 1 && g->out_dtypes[1] == g->out_dtype &&
         (char *)g->outs[0] + g->columns[0] * element == g->outs[1]) {
    g->columns[0] += g->columns[1];
    g->parts--;
    for (int i = 1; i < g->parts; i++)
      g->outs[i] = g->outs[i + 1], g->columns[i] = g->columns[i + 1],
      g->out_dtypes[i] = g->out_dtypes[i + 1];
  }
}

static int linear(struct kvl__call *c, const kvl_tensor *x, const kvl_tensor *norm,
                  double eps, const kvl_tensor *weight, const kvl_tensor *bias, int form,
                  const kvl_tensor *const *outs, int parts) {
  static const char *const shapes[KVL_LINEAR_PARTS] = {
      "rows outputs", "rows outputs2", "rows outputs3", "rows outputs4", "rows outputs5"};
  static const char *const names[KVL_LINEAR_PARTS] = {"outs[0]", "outs[1]", "outs[2]",
                                                      "outs[3]", "outs[4]"};
  struct kvl_linear_args args = {.parts = parts};
  kvl__arg(c, "x", x, KVL__FLOAT, "rows k");
  kvl__arg(c, "norm?", norm, kvl__like(x) | KVL__F32, "k");
  kvl__arg(c, "weight", weight, kvl__like(x), "n k");
  kvl__arg(c, "bias?", bias, kvl__like(x), "n");
  if (form < KVL_LINEAR_PLAIN || form > KVL_LINEAR_SWIGLU)
    kvl__call_fail(c, "form is %d, expected KVL_LINEAR_PLAIN, _ADD or _SWIGLU", form);
  if (norm && !(eps >= 0)) kvl__call_fail(c, "eps is %g, expected >= 0", eps);
  int64_t outputs = 0;
  for (int i = 0; i < parts; i++) {
    const char *name = parts > 1 ? names[i] : "out";
    if (!kvl__arg(c, name, outs[i], kvl__like(x) | KVL__F32, shapes[i])) break;
    args.outs[i] = outs[i]->ptr, args.out_dtypes[i] = outs[i]->dtype;
    outputs += args.columns[i] = outs[i]->shape[1];
  }
  int64_t n = kvl__dim(c, "n"), each = form == KVL_LINEAR_SWIGLU ? 2 : 1;
  if (c->status >= 0 && n != each * outputs)
    kvl__call_fail(c, "out has %lld columns and weight %lld rows, expected %s",
                   (long long)outputs, (long long)n,
                   each == 2 ? "half as many columns as rows" : "as many columns as rows");
  for (int i = 0; i < parts; i++) {
    expect_apart(c, "out", outs[i], "x", x);
    expect_apart(c, "out", outs[i], "norm", norm);
    expect_apart(c, "out", outs[i], "weight", weight);
    expect_apart(c, "out", outs[i], "bias", bias);
    for (int j = 0; j < i; j++) expect_apart(c, "out", outs[i], "another out", outs[j]);
  }
  if (c->status < 0) return c->status;
  args.x = x->ptr;
  args.out = args.outs[0];
  args.weight = weight->ptr;
  args.norm = norm ? norm->ptr : NULL;
  args.bias = bias ? bias->ptr : NULL;
  args.rows = x->shape[0];
  args.n = n;
  args.k = x->shape[1];
  args.eps = (float)eps;
  args.form = form;
  args.frozen = weight->storage->is_frozen;
  args.dtype = x->dtype;
  args.norm_dtype = norm ? norm->dtype : x->dtype;
  args.out_dtype = outs[0]->dtype;
  join_parts(&args);
  args.workspace = kvl__call_workspace(c, KVL_OP_linear, &args);
  return KVL__LAUNCH(c, linear, args);
}

int kvl_linear(const kvl_tensor *x, const kvl_tensor *norm, double eps,
               const kvl_tensor *weight, const kvl_tensor *bias, int form,
               const kvl_tensor *out) {
  struct kvl__call c = {.op = "linear"};
  return linear(&c, x, norm, eps, weight, bias, form, &out, 1);
}

int kvl_linear_parts(const kvl_tensor *x, const kvl_tensor *norm, double eps,
                     const kvl_tensor *weight, const kvl_tensor *bias,
                     const kvl_tensor *const *outs, int parts) {
  struct kvl__call c = {.op = "linear_parts"};
  if (!outs || parts < 1 || parts > KVL_LINEAR_PARTS)
    return kvl__call_fail(&c, "outs has %d tensors, expected 1 to %d", outs ? parts : 0,
                          KVL_LINEAR_PARTS);
  return linear(&c, x, norm, eps, weight, bias, KVL_LINEAR_PLAIN, outs, parts);
}

static void expect_experts(struct kvl__call *c, const char *name, int64_t experts) {
  if (c->status >= 0 && (experts < 1 || experts > KVL_EXPERTS_MOST))
    kvl__call_fail(c, "%s has %lld experts, expected 1 to %d", name, (long long)experts,
                   KVL_EXPERTS_MOST);
}

int kvl_route(const kvl_tensor *logits, const kvl_tensor *bias, const kvl_router *router,
              const kvl_tensor *chosen, const kvl_tensor *weights) {
  struct kvl__call c = {.op = "route"};
  kvl__arg(&c, "logits", logits, KVL__FLOAT, "rows experts");
  kvl__arg(&c, "bias?", bias, KVL__F32, "experts");
  kvl__arg(&c, "chosen", chosen, KVL__I32, "rows columns");
  kvl__arg(&c, "weights", weights, KVL__F32, "rows columns");
  const int64_t experts = kvl__dim(&c, "experts"), columns = kvl__dim(&c, "columns");
  expect_experts(&c, "logits", experts);
  if (c.status >= 0 && !router) kvl__call_fail(&c, "router is NULL, expected a kvl_router");
  if (c.status < 0) return c.status;
  const kvl_tensor *const outs[] = {chosen, weights};
  for (int i = 0; i < 2; i++) {
    const char *name = i ? "weights" : "chosen";
    expect_apart(&c, name, outs[i], "logits", logits);
    expect_apart(&c, name, outs[i], "bias", bias);
  }
  expect_apart(&c, "weights", weights, "chosen", chosen);
  if (!isfinite(router->factor))
    kvl__call_fail(&c, "factor is %g, expected a finite number", (double)router->factor);
  const int groups = router->groups, open = router->open_groups, shared = router->shared;
  const int64_t active = columns - shared;
  if (groups < 1 || experts % groups)
    kvl__call_fail(&c, "groups is %d, expected a divisor of the %lld experts", groups,
                   (long long)experts);
  else if (open < 1 || open > groups)
    kvl__call_fail(&c, "open_groups is %d, expected 1 to groups = %d", open, groups);
  else if (shared < 0 || experts + shared > KVL_EXPERTS_MOST)
    kvl__call_fail(&c, "shared is %d, expected 0 to %lld: %d experts in all", shared,
                   (long long)(KVL_EXPERTS_MOST - experts), KVL_EXPERTS_MOST);
  else if (active < 1 || active > experts / groups * open)
    kvl__call_fail(&c,
                   "chosen has %lld columns, expected %d to %lld: the experts of open "
                   "groups, and %d shared ones",
                   (long long)columns, 1 + shared,
                   (long long)(experts / groups * open + shared), shared);
  if (c.status < 0) return c.status;
  struct kvl_route_args args = {logits->ptr,      bias ? bias->ptr : NULL,
                                chosen->ptr,      weights->ptr,
                                logits->shape[0], experts,
                                active,           *router,
                                logits->dtype};
  return KVL__LAUNCH(&c, route, args);
}

int kvl_experts(const kvl_tensor *x, const kvl_tensor *chosen, const kvl_tensor *weights,
                const kvl_tensor *gate_up, const kvl_tensor *down, int form,
                const kvl_tensor *out) {
  struct kvl__call c = {.op = "experts"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "rows k");
  kvl__arg(&c, "chosen", chosen, KVL__I32, "rows active");
  kvl__arg(&c, "weights", weights, KVL__F32, "rows active");
  kvl__arg(&c, "gate_up", gate_up, kvl__like(x), "experts both k");
  kvl__arg(&c, "down", down, kvl__like(x), "experts k inner");
  kvl__arg(&c, "out", out, kvl__like(x), "rows k");
  const int64_t experts = kvl__dim(&c, "experts"), inner = kvl__dim(&c, "inner");
  if (form != KVL_LINEAR_PLAIN && form != KVL_LINEAR_ADD)
    kvl__call_fail(&c, "form is %d, expected KVL_LINEAR_PLAIN or _ADD", form);
  if (c.status >= 0 && gate_up->shape[1] != 2 * inner)
    kvl__call_fail(&c,
                   "gate_up has %lld rows an expert and down %lld columns, expected twice "
                   "as many rows as columns",
                   (long long)gate_up->shape[1], (long long)inner);
  expect_experts(&c, "gate_up", experts);
  if (c.status >= 0 && chosen->count > INT32_MAX / 4)
    kvl__call_fail(&c, "chosen has %lld numbers, expected at most %d",
                   (long long)chosen->count, INT32_MAX / 4);
  expect_apart(&c, "out", out, "x", x);
  expect_apart(&c, "out", out, "chosen", chosen);
  expect_apart(&c, "out", out, "weights", weights);
  expect_apart(&c, "out", out, "gate_up", gate_up);
  expect_apart(&c, "out", out, "down", down);
  if (c.status < 0) return c.status;
  struct kvl_experts_args args = {x->ptr,    chosen->ptr, weights->ptr, gate_up->ptr,
                                  down->ptr, out->ptr,    x->shape[0],  chosen->shape[1],
                                  experts,   x->shape[1], inner,        NULL,
                                  form,      x->dtype};
  args.workspace = kvl__call_workspace(&c, KVL_OP_experts, &args);
  return KVL__LAUNCH(&c, experts, args);
}

static void expect_pairs(struct kvl__call *c, const kvl_tensor *inv_freq, int64_t first) {
  const int64_t dim = kvl__dim(c, "head_dim"), most = (dim - first) / 2;
  if (c->status >= 0 && (first < 0 || first > dim))
    kvl__call_fail(c, "first is %lld, expected 0 ... head_dim = %lld", (long long)first,
                   (long long)dim);
  if (c->status < 0 || inv_freq->count <= most) return;
  if (first == 0)
    kvl__call_fail(c, "inv_freq has %lld pairs, expected at most head_dim / 2 = %lld",
                   (long long)inv_freq->count, (long long)most);
  kvl__call_fail(c,
                 "inv_freq has %lld pairs, expected at most %lld: head_dim is %lld, and "
                 "numbers from %lld on turn",
                 (long long)inv_freq->count, (long long)most, (long long)dim,
                 (long long)first);
}

int kvl_rope(const kvl_tensor *x, const kvl_tensor *positions, const kvl_tensor *inv_freq,
             int64_t first) {
  struct kvl__call c = {.op = "rope"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "tokens heads head_dim");
  kvl__arg(&c, "positions", positions, KVL__I32, "tokens");
  kvl__arg(&c, "inv_freq", inv_freq, KVL__F32, "pairs");
  expect_pairs(&c, inv_freq, first);
  if (c.status < 0) return c.status;
  struct kvl_rope_args args = {x->ptr,          positions->ptr, inv_freq->ptr,
                               x->shape[0],     x->shape[1],    x->shape[2],
                               inv_freq->count, first,          x->dtype};
  return KVL__LAUNCH(&c, rope, args);
}

int kvl_rope_append(const kvl_tensor *q, const kvl_tensor *k, const kvl_tensor *v,
                    const kvl_tensor *positions, const kvl_tensor *inv_freq,
                    const kvl_tensor *places, const kvl_tensor *cache,
                    const kvl_format *format) {
  struct kvl__call c = {.op = "rope_append"};
  struct kvl_pages view = kvl__any_pages_arg(&c, "cache", cache, format,
                                             "blocks 2 kv_heads block_size head_dim");
  kvl__vector_arg(&c, "q", q, kvl__rows_of(view.codec), "tokens heads head_dim");
  kvl__vector_arg(&c, "k", k, kvl__like(q), "tokens kv_heads head_dim");
  kvl__values_arg(&c, v, format, kvl__like(q));
  kvl__arg(&c, "positions", positions, KVL__I32, "tokens");
  kvl__arg(&c, "inv_freq", inv_freq, KVL__F32, "pairs");
  kvl__arg(&c, "places", places, KVL__I64, "tokens");
  const int64_t first = format && format->is_shared ? format->value_dim : 0;
  expect_pairs(&c, inv_freq, first);
  if (c.status >= 0 && inv_freq->count > 128) /* as kernels have room for */
    kvl__call_fail(&c, "inv_freq has %lld pairs, expected at most 128",
                   (long long)inv_freq->count);
  if (c.status < 0) return c.status;
  struct kvl_rope_append_args args = {
      view,        q->ptr,      k->ptr,      v ? v->ptr : NULL, positions->ptr, inv_freq->ptr,
      places->ptr, q->shape[0], q->shape[1], inv_freq->count,   first,          q->dtype};
  return KVL__LAUNCH(&c, rope_append, args);
}

int kvl_silu_mul(const kvl_tensor *gate, const kvl_tensor *up, const kvl_tensor *out) {
  struct kvl__call c = {.op = "silu_mul"};
  kvl__arg(&c, "gate", gate, KVL__FLOAT, "rows dim");
  kvl__arg(&c, "up", up, kvl__like(gate), "rows dim");
  kvl__arg(&c, "out", out, kvl__like(gate), "rows dim");
  if (c.status < 0) return c.status;
  struct kvl_silu_mul_args args = {gate->ptr, up->ptr, out->ptr, gate->count, gate->dtype};
  return KVL__LAUNCH(&c, silu_mul, args);
}
