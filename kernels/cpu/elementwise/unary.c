/* out[i] = f(a[i]).
 *   a, out  f32 f16 bf16  [count]   may be the same memory
 * Relative error of exp, log, tanh and sigmoid below 4e-7 in f32; sqrt and floor are exact,
 * rsqrt rounds twice.
 * Limit: read plus write bandwidth in memory; arithmetic in cache. */
#include "args/elementwise.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

static inline KVL_HOT vf apply(vf x, const int op) {
  switch (op) { /* ORDER kvl_unary_op */
    case KVL_UNARY_NEG: return -x;
    case KVL_UNARY_ABS: return vf_abs(x);
    case KVL_UNARY_EXP: return vf_exp(x);
    case KVL_UNARY_LOG: return vf_log(x);
    case KVL_UNARY_SQRT: return vf_sqrt(x);
    case KVL_UNARY_RSQRT: return 1.0f / vf_sqrt(x);
    case KVL_UNARY_SIGMOID: return vf_sigmoid(x);
    case KVL_UNARY_SILU: return x * vf_sigmoid(x);
    case KVL_UNARY_TANH: return vf_tanh(x);
    case KVL_UNARY_FLOOR: return vf_floor(x);
    default: return vf_pick((vi)(x <= 0.0f), vf_set(0), x); /* relu keeps NaN */
  }
}

static inline KVL_HOT void loop(const struct kvl_unary_args *a, int64_t begin, int64_t end,
                                const int op, const int dtype) {
  for (int64_t i = begin; i < end; i += VF) {
    int left = vf_left(i, end);
    vf x = vf_load_n(at_const(a->a, i, dtype), left, dtype);
    vf_store_n(at(a->out, i, dtype), apply(x, op), left, dtype);
  }
}

#define CASE(op) \
  case op: KVL_BY_FLOAT(a->dtype, loop(a, begin, end, op, D)) break;

static int unary_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_unary_args *a = args;
  switch (a->op) { /* ORDER kvl_unary_op */
    CASE(KVL_UNARY_NEG)
    CASE(KVL_UNARY_ABS)
    CASE(KVL_UNARY_EXP)
    CASE(KVL_UNARY_LOG)
    CASE(KVL_UNARY_SQRT)
    CASE(KVL_UNARY_RSQRT)
    CASE(KVL_UNARY_SIGMOID)
    CASE(KVL_UNARY_SILU)
    CASE(KVL_UNARY_TANH)
    CASE(KVL_UNARY_RELU)
    CASE(KVL_UNARY_FLOOR)
    default: return KVL_ERR_UNSUPPORTED;
  }
  return 0;
}

KVL_CPU_KERNEL(unary) {
  const struct kvl_unary_args *a = args;
  return kvl__split(a->count, KVL_GRAIN, unary_piece, a);
}
