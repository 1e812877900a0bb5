/* out = gate / (1 + e^-gate) * up: the SwiGLU activation (Shazeer 2020).
 *   gate, up, out  f32 f16 bf16  [count]   out may be either input
 * Reads two elements and writes one for about 20 operations.
 * Limit: bandwidth in memory; the exponential in cache. */
#include "args/elementwise.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

static inline KVL_HOT void loop(const struct kvl_silu_mul_args *a, int64_t begin, int64_t end,
                                const int dtype) {
  for (int64_t i = begin; i < end; i += VF) {
    int left = vf_left(i, end);
    vf g = vf_load_n(at_const(a->gate, i, dtype), left, dtype);
    vf u = vf_load_n(at_const(a->up, i, dtype), left, dtype);
    vf_store_n(at(a->out, i, dtype), g * vf_sigmoid(g) * u, left, dtype);
  }
}

static int silu_mul_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_silu_mul_args *a = args;
  KVL_BY_FLOAT(a->dtype, loop(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(silu_mul) {
  const struct kvl_silu_mul_args *a = args;
  return kvl__split(a->count, KVL_GRAIN, silu_mul_piece, a);
}
