/* out = scale * H x for each row x, where H is the Walsh-Hadamard matrix in Sylvester's
 * order.
 *   x, out  f32 f16 bf16  [rows, dim]   dim a power of two up to 1024; out may be x
 * Takes f32 sums and differences of elements 1, 2, 4 ... dim / 2 apart, in this order, then
 * multiplies by scale. Exact: every device gives these bits.
 * Limit: log2(dim) additions per element. */
#include "args/index.h"
#include "cpu/split.h"
#include "cpu/vec.h"

enum { HADAMARD_DIM_MAX = 1024 };

static inline KVL_HOT void hadamard_row(const void *x, void *out, int dim, float scale,
                                        const int dtype) {
  float v[HADAMARD_DIM_MAX] __attribute__((aligned(64)));
  for (int d = 0; d < dim; d++) v[d] = f32_load(x, d, dtype);
  for (int apart = 1; apart < dim; apart *= 2)
    for (int first = 0; first < dim; first += 2 * apart)
      for (int d = first; d < first + apart; d++) {
        float a = v[d], b = v[d + apart];
        v[d] = a + b;
        v[d + apart] = a - b;
      }
  for (int d = 0; d < dim; d++) f32_store(out, d, v[d] * scale, dtype);
}

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
