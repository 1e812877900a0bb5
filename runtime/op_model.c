/* Transformer ops that know nothing of paged memory. */
#include "internal.h"

int kvl_rmsnorm(const kvl_tensor *x, const kvl_tensor *residual, const kvl_tensor *weight,
                double eps, const kvl_tensor *out) {
  struct kvl__call c = {.op = "rmsnorm"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "rows dim");
  kvl__arg(&c, "residual?", residual, kvl__like(x), "rows dim");
  kvl__arg(&c, "weight", weight, kvl__like(x) | KVL__F32, "dim");
  kvl__arg(&c, "out", out, kvl__like(x), "rows dim");
  if (!(eps >= 0)) kvl__call_fail(&c, "eps is %g, expected >= 0", eps);
  if (c.status < 0) return c.status;
  struct kvl_rmsnorm_args args = {
    x->ptr, residual ? residual->ptr : NULL, weight->ptr, out->ptr, x->shape[0],
    x->shape[1], (float)eps, x->dtype, weight->dtype};
  return KVL__LAUNCH(&c, rmsnorm, args);
}

int kvl_rope(const kvl_tensor *x, const kvl_tensor *positions,
             const kvl_tensor *inv_freq) {
  struct kvl__call c = {.op = "rope"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "tokens heads head_dim");
  kvl__arg(&c, "positions", positions, KVL__I32, "tokens");
  kvl__arg(&c, "inv_freq", inv_freq, KVL__F32, "pairs");
  if (c.status >= 0 && inv_freq->count > x->shape[2] / 2)
    kvl__call_fail(&c, "inv_freq has %lld pairs, expected at most head_dim / 2 = %lld",
                   (long long)inv_freq->count, (long long)x->shape[2] / 2);
  if (c.status < 0) return c.status;
  struct kvl_rope_args args = {x->ptr, positions->ptr, inv_freq->ptr, x->shape[0],
                               x->shape[1], x->shape[2], inv_freq->count, x->dtype};
  return KVL__LAUNCH(&c, rope, args);
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
