/* out[r] = the index of the largest element of row r (the least for least = 1), and the lowest
 * one among equals. NaN never wins; a row of NaN gives 0.
 *   a    f32 f16 bf16 i32  [rows, n]
 *   out  i32               [rows]
 * Two passes: the first finds the value, the second where it first stands.
 * Limit: read bandwidth, up to twice over the row. */
#include "args/elementwise.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

static inline KVL_HOT void rows(const struct kvl_argmax_args *g, int64_t begin, int64_t end,
                                const int dtype) {
  const float sign = g->least ? -1.0f : 1.0f;
  for (int64_t r = begin; r < end; r++) {
    const void *p = at_const(g->a, r * g->n, dtype);
    vf m = vf_set(-INFINITY);
    int64_t i = 0;
    for (; i + VF <= g->n; i += VF) m = vf_max(vf_load(p, i, dtype) * sign, m);
    float max = vf_hmax(m);
    for (; i < g->n; i++) {
      float x = f32_load(p, i, dtype) * sign;
      max = x > max ? x : max;
    }
    for (i = 0; i < g->n && f32_load(p, i, dtype) * sign != max;) i++;
    g->out[r] = i < g->n ? (int32_t)i : 0;
  }
}

static void whole_rows(const struct kvl_argmax_args *g, int64_t begin, int64_t end) {
  const int32_t turn = g->least ? -1 : 0; /* ~x is in the opposite order of x */
  for (int64_t r = begin; r < end; r++) {
    const int32_t *p = (const int32_t *)g->a + r * g->n;
    int32_t max = INT32_MIN;
    int64_t i;
    for (i = 0; i < g->n; i++) max = (p[i] ^ turn) > max ? p[i] ^ turn : max;
    for (i = 0; (p[i] ^ turn) != max;) i++;
    g->out[r] = (int32_t)i;
  }
}

static int argmax_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_argmax_args *g = args;
  if (g->dtype == KVL_DTYPE_I32) whole_rows(g, begin, end);
  else KVL_BY_FLOAT(g->dtype, rows(g, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(argmax) {
  const struct kvl_argmax_args *g = args;
  return kvl__split(g->rows, kvl__grain_rows(g->n), argmax_piece, g);
}
