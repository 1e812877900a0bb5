/* out[r] = e^(scale a[r] - max) / sum for rows of n; fp32 inside.
 *   a    f32 f16 bf16  [rows, n]
 *   out  f32 f16 bf16  [rows, n]   may be a when the dtypes are equal
 * Three passes over a row: max, sum, result. The exponential is computed twice, so that no
 * room for a row in f32 is needed. Sums of RUN terms are added in double. A row of -inf gives
 * zeros; a row with a NaN or a +inf is NaN.
 * Limit: the exponentials, about 40 operations an element, while a row fits L2. */
#include "args/elementwise.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

static inline KVL_HOT float row_max(const void *a, int64_t first, int64_t n, float scale,
                                    const int dtype) {
  vf m = vf_set(-INFINITY);
  int64_t i = 0;
  for (; i + VF <= n; i += VF) m = vf_max(vf_load(a, first + i, dtype) * scale, m);
  float max = vf_hmax(m);
  for (; i < n; i++) {
    float x = f32_load(a, first + i, dtype) * scale;
    max = x > max ? x : max;
  }
  return max;
}

static inline KVL_HOT double row_sum(const void *a, int64_t first, int64_t n, float scale,
                                     float shift, const int dtype) {
  double sum = 0;
  int64_t i = 0;
  while (n - i >= VF) {
    vf s = {0};
    for (int64_t end = i64_min(i + RUN * VF, n - VF + 1); i < end; i += VF)
      s += vf_exp(vf_load(a, first + i, dtype) * scale - shift);
    sum += vf_sum(s);
  }
  for (; i < n; i++) sum += f32_exp(f32_load(a, first + i, dtype) * scale - shift);
  return sum;
}

static inline KVL_HOT void rows(const struct kvl_softmax_args *g, int64_t begin, int64_t end,
                                const int dtype) {
  for (int64_t r = begin; r < end; r++) {
    int64_t first = r * g->n;
    float max = row_max(g->a, first, g->n, g->scale, dtype); /* NaN is ignored here */
    float shift = max == -INFINITY ? 0 : max;
    double sum = row_sum(g->a, first, g->n, g->scale, shift, dtype);
    float share = sum == 0 ? 0 : (float)(1 / sum); /* and comes out here */
    for (int64_t i = 0; i < g->n; i += VF) {
      int left = vf_left(i, g->n);
      vf x = vf_load_n(at_const(g->a, first + i, dtype), left, dtype);
      vf p = vf_exp(x * g->scale - shift) * share;
      vf_store_n(at(g->out, first + i, g->out_dtype), p, left, g->out_dtype);
    }
  }
}

static int softmax_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_softmax_args *g = args;
  KVL_BY_FLOAT(g->dtype, rows(g, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(softmax) {
  const struct kvl_softmax_args *g = args;
  return kvl__split(g->rows, kvl__grain_rows(4 * g->n), softmax_piece, g);
}
