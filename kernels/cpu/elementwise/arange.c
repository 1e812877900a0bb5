/* out[i] = start + i * step, in double with two roundings, then converted to out's dtype.
 *   out  any dtype  [count]
 * Limit: write bandwidth; for whole numbers, the conversions. */
#include "args/elementwise.h"
#include "cpu/convert.h"
#include "cpu/split.h"

static inline KVL_HOT void arange_loop(const struct kvl_arange_args *a, int64_t begin,
                                       int64_t end, const int dtype) {
  for (int64_t i = begin; i < end; i++)
    any_store(a->out, i, a->start + (double)i * a->step, dtype);
}

static int arange_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_arange_args *a = args;
  KVL_BY_ANY(a->dtype, arange_loop(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(arange) {
  const struct kvl_arange_args *a = args;
  return kvl__split(a->count, KVL_GRAIN, arange_piece, a);
}
