/* out[r] = the index of the largest element of row r, and the lowest one among equals. NaN
 * never wins; a row of NaN gives 0.
 *   a    f32 f16 bf16  [rows, n]
 *   out  i32           [rows]
 * Two passes: the first finds the largest value, the second where it first stands.
 * Limit: read bandwidth, up to twice over the row. */
#include "cpu/lanes.h"
#include "cpu/split.h"

static inline KVL_HOT void rows(const struct kvl_argmax_args *g, int64_t begin, int64_t end,
                                const int dtype) {
  for (int64_t r = begin; r < end; r++) {
    const void *p = at_const(g->a, r * g->n, dtype);
    vf m = vf_set(-INFINITY);
    int64_t i = 0;
    for (; i + VF <= g->n; i += VF) m = vf_max(vf_load(p, i, dtype), m);
    float max = vf_hmax(m);
    for (; i < g->n; i++) max = f32_load(p, i, dtype) > max ? f32_load(p, i, dtype) : max;
    for (i = 0; i < g->n && f32_load(p, i, dtype) != max;) i++;
    g->out[r] = i < g->n ? (int32_t)i : 0;
  }
}

static int argmax_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_argmax_args *g = args;
  KVL_BY_FLOAT(g->dtype, rows(g, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(argmax) {
  const struct kvl_argmax_args *g = args;
  return kvl__split(g->rows, kvl__grain_rows(g->n), argmax_piece, g);
}
