/* out = scale * H x for each row x, where H is the Walsh-Hadamard matrix in Sylvester's
 * order.
 *   x, out  f32 f16 bf16  [rows, dim]   dim a power of two up to 1024; out may be x
 * Takes f32 sums and differences of elements 1, 2, 4 ... dim / 2 apart, in this order, then
 * multiplies by scale. Exact: every device gives these bits.
 * Limit: log2(dim) additions per element. */
#include "args/index.h"
#include "cpu/index/quantise.h"
#include "cpu/split.h"

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_hadamard_args *a = args;
  for (int64_t row = begin; row < end; row++)
    KVL_BY_FLOAT(a->dtype, hadamard_row(at_const(a->x, row * a->dim, D),
                                        at(a->out, row * a->dim, D), a->dim, a->scale, D))
  return 0;
}

KVL_CPU_KERNEL(hadamard) {
  const struct kvl_hadamard_args *a = args;
  return kvl__split(a->rows, kvl__grain_rows(4 * a->dim), rows_piece, a);
}
