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
