/* Rows in f8e4m3, each with a scale of its own.
 *   x       f32 f16 bf16  [rows, dim]
 *   out     f8e4m3        [rows, dim]   x / scale, saturating
 *   scales  f32           [rows]        max(amax, 1e-4) / 448; is_ue8m0: rounded up to 2^e
 *   weights f32           [rows]        optional: scales *= weights * factor
 * With `rotates`, x is rotated first, as by hadamard, and rounded to its dtype.
 * Exact: a division and a rounding. Limit: read bandwidth; a row is read twice, the second
 * time from L1. Source: DeepSeek's act_quant. */
#include "args/index.h"
#include "cpu/index/quantise.h"
#include "cpu/split.h"

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_quantise_rows_args *a = args;
  for (int64_t row = begin; row < end; row++) {
    const int64_t at = row * a->dim;
    KVL_BY_FLOAT(a->dtype,
                 a->scales[row] = index_row(at_const(a->x, at, D), (uint8_t *)a->out + at,
                                            a->dim, a->rotates, a->is_ue8m0, D))
    if (a->weights) a->scales[row] *= a->weights[row] * a->factor;
  }
  return 0;
}

KVL_CPU_KERNEL(quantise_rows) {
  const struct kvl_quantise_rows_args *a = args;
  return kvl__split(a->rows, kvl__grain_rows(a->dim), rows_piece, a);
}
