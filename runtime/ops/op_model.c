/* Transformer ops over the rows of tokens. Each function checks the shapes and launches a
 * kernel; kvlab.h describes the op. */
#include "ops/op_args.h"

int kvl_rmsnorm(const kvl_tensor *x, const kvl_tensor *residual, const kvl_tensor *weight,
                double eps, const kvl_tensor *out) {
  struct kvl__call c = {.op = "rmsnorm"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "rows dim");
  kvl__arg(&c, "residual?", residual, kvl__like(x), "rows dim");
  kvl__arg(&c, "weight", weight, kvl__like(x) | KVL__F32, "dim");
  kvl__arg(&c, "out", out, kvl__like(x), "rows dim");
  if (!(eps >= 0)) kvl__call_fail(&c, "eps is %g, expected >= 0", eps);
  if (c.status < 0) return c.status;
  struct kvl_rmsnorm_args args = {x->ptr,       residual ? residual->ptr : NULL,
                                  weight->ptr,  out->ptr,
                                  x->shape[0],  x->shape[1],
                                  (float)eps,   x->dtype,
                                  weight->dtype};
  return KVL__LAUNCH(&c, rmsnorm, args);
}

/* Whether two tensors share memory. */
static int overlaps(const kvl_tensor *a, const kvl_tensor *b) {
  const char *p = a->ptr, *q = b->ptr;
  return p < q + kvl_dtype_bytes(b->dtype) * b->count &&
         q < p + kvl_dtype_bytes(a->dtype) * a->count;
}
static void expect_apart(struct kvl__call *c, const kvl_tensor *out, const char *name,
                         const kvl_tensor *t) {
  if (c->status >= 0 && t && overlaps(out, t))
    kvl__call_fail(c, "out shares memory with %s, expected memory of its own", name);
}

int kvl_linear(const kvl_tensor *x, const kvl_tensor *norm, double eps,
               const kvl_tensor *weight, const kvl_tensor *bias, int form,
               const kvl_tensor *out) {
  struct kvl__call c = {.op = "linear"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "rows k");
  kvl__arg(&c, "norm?", norm, kvl__like(x) | KVL__F32, "k");
  kvl__arg(&c, "weight", weight, kvl__like(x), "n k");
  kvl__arg(&c, "bias?", bias, kvl__like(x), "n");
  kvl__arg(&c, "out", out, kvl__like(x) | KVL__F32, "rows outputs");
  if (form < KVL_LINEAR_PLAIN || form > KVL_LINEAR_SWIGLU)
    kvl__call_fail(&c, "form is %d, expected KVL_LINEAR_PLAIN, _ADD or _SWIGLU", form);
  if (norm && !(eps >= 0)) kvl__call_fail(&c, "eps is %g, expected >= 0", eps);
  int64_t n = kvl__dim(&c, "n"), outputs = kvl__dim(&c, "outputs");
  int64_t parts = form == KVL_LINEAR_SWIGLU ? 2 : 1;
  if (c.status >= 0 && n != parts * outputs)
    kvl__call_fail(&c, "out has %lld columns and weight %lld rows, expected %s",
                   (long long)outputs, (long long)n,
                   parts == 2 ? "half as many columns as rows" : "as many columns as rows");
  expect_apart(&c, out, "x", x);
  expect_apart(&c, out, "norm", norm);
  expect_apart(&c, out, "weight", weight);
  expect_apart(&c, out, "bias", bias);
  if (c.status < 0) return c.status;
  struct kvl_linear_args args = {.x = x->ptr,
                                 .weight = weight->ptr,
                                 .norm = norm ? norm->ptr : NULL,
                                 .bias = bias ? bias->ptr : NULL,
                                 .out = out->ptr,
                                 .rows = x->shape[0],
                                 .n = n,
                                 .k = x->shape[1],
                                 .eps = (float)eps,
                                 .form = form,
                                 .frozen = weight->storage->is_frozen,
                                 .dtype = x->dtype,
                                 .norm_dtype = norm ? norm->dtype : x->dtype,
                                 .out_dtype = out->dtype};
  args.workspace = kvl__call_workspace(&c, KVL_OP_linear, &args);
  return KVL__LAUNCH(&c, linear, args);
}

static void expect_pairs(struct kvl__call *c, const kvl_tensor *inv_freq) {
  int64_t most = kvl__dim(c, "head_dim") / 2;
  if (c->status >= 0 && inv_freq->count > most)
    kvl__call_fail(c, "inv_freq has %lld pairs, expected at most head_dim / 2 = %lld",
                   (long long)inv_freq->count, (long long)most);
}

int kvl_rope(const kvl_tensor *x, const kvl_tensor *positions, const kvl_tensor *inv_freq) {
  struct kvl__call c = {.op = "rope"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "tokens heads head_dim");
  kvl__arg(&c, "positions", positions, KVL__I32, "tokens");
  kvl__arg(&c, "inv_freq", inv_freq, KVL__F32, "pairs");
  expect_pairs(&c, inv_freq);
  if (c.status < 0) return c.status;
  struct kvl_rope_args args = {x->ptr,      positions->ptr, inv_freq->ptr,   x->shape[0],
                               x->shape[1], x->shape[2],    inv_freq->count, x->dtype};
  return KVL__LAUNCH(&c, rope, args);
}

int kvl_rope_append(const kvl_tensor *q, const kvl_tensor *k, const kvl_tensor *v,
                    const kvl_tensor *positions, const kvl_tensor *inv_freq,
                    const kvl_tensor *places, const kvl_tensor *cache,
                    const kvl_tensor *k_scale, const kvl_tensor *v_scale) {
  struct kvl__call c = {.op = "rope_append"};
  struct kvl_cache_view view = kvl__memory_arg(&c, "cache", cache, KVL__CACHE,
                                               "blocks 2 kv_heads block_size head_dim");
  kvl__vector_arg(&c, "q", q, kvl__rows_of(cache), "tokens heads head_dim");
  kvl__vector_arg(&c, "k", k, kvl__like(q), "tokens kv_heads head_dim");
  kvl__vector_arg(&c, "v", v, kvl__like(q), "tokens kv_heads head_dim");
  kvl__arg(&c, "positions", positions, KVL__I32, "tokens");
  kvl__arg(&c, "inv_freq", inv_freq, KVL__F32, "pairs");
  kvl__arg(&c, "places", places, KVL__I64, "tokens");
  kvl__scale_args(&c, &view, k_scale, v_scale);
  expect_pairs(&c, inv_freq);
  if (c.status < 0) return c.status;
  struct kvl_rope_append_args args = {
      view,        q->ptr,      k->ptr,      v->ptr,          positions->ptr, inv_freq->ptr,
      places->ptr, q->shape[0], q->shape[1], inv_freq->count, q->dtype};
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
