/* Hashes vectors by random planes.
 *   x       f32 f16 bf16  [rows, head_dim]
 *   planes  f32           [bits, head_dim]
 *   hashes  u64           [rows, words]
 * Exact, because args/select.h fixes the order of the sums. Limit: arithmetic, `bits`
 * multiply-adds per element. Source: Charikar 2002. */
#include "args/select.h"
#include "cpu/select/hash.h"
#include "cpu/split.h"

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_hash_rows_args *a = args;
  const int dim = a->head_dim, words = (a->bits + 63) / 64;
  float x[HASH_DIM_MAX] __attribute__((aligned(64)));
  for (int64_t row = begin; row < end; row++) {
    KVL_BY_FLOAT(a->dtype, hash_take(x, at_const(a->x, row * dim, D), dim, 0, D))
    hash_vector(x, a->planes, dim, a->bits, a->hashes + row * words);
  }
  return 0;
}

KVL_CPU_KERNEL(hash_rows) {
  const struct kvl_hash_rows_args *a = args;
  return kvl__split(a->rows, kvl__grain_rows((int64_t)a->bits * a->head_dim / 8), rows_piece,
                    a);
}
