/* out[o][i] = log of the sum over n of e^a[o][n][i].
 *   a    f32 f16 bf16       [outer, n, inner]
 *   out  like a, or f32     [outer, inner]
 * Two passes: the maximum m, then m + log sum e^(a - m). Sums of RUN terms are added in
 * double. Nothing, or only -inf, gives -inf; a +inf gives +inf; a NaN gives NaN.
 * Limit: the exponentials, about 20 operations an element; the second pass reads from L2 when
 * a row (for inner > 1, 4 * VF columns) fits there. */
#include "args/elementwise.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

enum { VECTORS = 4, COLUMNS = VECTORS * VF };

/* What is subtracted before e^: the maximum, unless it is infinite. */
static inline KVL_HOT float shift_of(float max) { return max - max == 0 ? max : 0; }

static void finish(const struct kvl_logsumexp_args *g, int64_t i, float shift, double sum) {
  f32_store(g->out, i, (float)(shift + log(sum)), g->out_dtype);
}

/* ---- inner == 1 --------------------------------------------------------------------- */

static inline KVL_HOT void rows(const struct kvl_logsumexp_args *g, int64_t begin,
                                int64_t end, const int dtype) {
  for (int64_t r = begin; r < end; r++) {
    const void *p = at_const(g->a, r * g->n, dtype);
    vf m = vf_set(-INFINITY);
    int64_t i = 0;
    for (; i + VF <= g->n; i += VF) m = vf_max(vf_load(p, i, dtype), m); /* ignores NaN */
    float max = vf_hmax(m);
    for (; i < g->n; i++) max = f32_load(p, i, dtype) > max ? f32_load(p, i, dtype) : max;
    const float shift = shift_of(max);
    double sum = 0;
    for (i = 0; g->n - i >= VF;) {
      vf s = {0};
      for (int64_t stop = i64_min(i + RUN * VF, g->n - VF + 1); i < stop; i += VF)
        s += vf_exp(vf_load(p, i, dtype) - shift);
      sum += vf_sum(s);
    }
    for (; i < g->n; i++) sum += exp((double)f32_load(p, i, dtype) - shift);
    finish(g, r, shift, sum);
  }
}

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_logsumexp_args *g = args;
  KVL_BY_FLOAT(g->dtype, rows(g, begin, end, D))
  return 0;
}

/* ---- columns: inner > 1 ------------------------------------------------------------- */

/* `vectors` vectors of columns, with `left` lanes in the last one, from element `first` on. */
static inline KVL_HOT void columns(const struct kvl_logsumexp_args *g, int64_t first,
                                   int left, const int vectors, int64_t out,
                                   const int dtype) {
  vf max[VECTORS], shift[VECTORS], s[VECTORS];
  double sum[COLUMNS] = {0};
  float lane[VF];
  for (int v = 0; v < vectors; v++) max[v] = vf_set(-INFINITY);
  for (int64_t r = 0; r < g->n; r++)
    for (int v = 0; v < vectors; v++) {
      const void *p = at_const(g->a, first + r * g->inner + v * VF, dtype);
      max[v] = vf_max(vf_load_n(p, left, dtype), max[v]);
    }
  for (int v = 0; v < vectors; v++)
    shift[v] = vf_pick((vi)(max[v] - max[v] == 0.0f), max[v], vf_set(0));
  for (int64_t r = 0; r < g->n;) {
    for (int v = 0; v < vectors; v++) s[v] = vf_set(0);
    for (int64_t stop = i64_min(g->n, r + RUN); r < stop; r++)
      for (int v = 0; v < vectors; v++) {
        const void *p = at_const(g->a, first + r * g->inner + v * VF, dtype);
        s[v] += vf_exp(vf_load_n(p, left, dtype) - shift[v]);
      }
    for (int v = 0; v < vectors; v++) {
      vf_store(lane, 0, s[v], KVL_DTYPE_F32);
      for (int i = 0; i < VF; i++) sum[v * VF + i] += lane[i];
    }
  }
  for (int v = 0; v < vectors; v++) {
    vf_store(lane, 0, shift[v], KVL_DTYPE_F32);
    for (int i = 0; i < left; i++) finish(g, out + v * VF + i, lane[i], sum[v * VF + i]);
  }
}

static int columns_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_logsumexp_args *g = args;
  int64_t tiles = (g->inner + COLUMNS - 1) / COLUMNS;
  for (int64_t t = begin; t < end; t++) {
    int64_t o = t / tiles, c = t % tiles * COLUMNS, stop = i64_min(g->inner, c + COLUMNS);
    int64_t first = o * g->n * g->inner, out = o * g->inner;
    if (stop - c == COLUMNS) {
      KVL_BY_FLOAT(g->dtype, columns(g, first + c, VF, VECTORS, out + c, D))
      continue;
    }
    for (; c < stop; c += VF)
      KVL_BY_FLOAT(g->dtype, columns(g, first + c, vf_left(c, stop), 1, out + c, D))
  }
  return 0;
}

KVL_CPU_KERNEL(logsumexp) {
  const struct kvl_logsumexp_args *g = args;
  if (g->inner == 1) return kvl__split(g->outer, kvl__grain_rows(4 * g->n), rows_piece, g);
  int64_t tiles = (g->inner + COLUMNS - 1) / COLUMNS;
  return kvl__split(g->outer * tiles, kvl__grain_rows(4 * g->n * COLUMNS), columns_piece, g);
}
