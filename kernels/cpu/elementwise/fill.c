/* out[i] = value.
 *   out  any dtype  [count]
 * Writes every byte once. The value is converted once, then stored as a bit pattern. Dtypes
 * of one byte use memset, which a hostile build checks once instead of byte by byte.
 * Limit: write bandwidth. */
#include "args/elementwise.h"
#include "cpu/convert.h"
#include "cpu/split.h"

#define FILL(T)                                       \
  do {                                                \
    T *out = a->out, x;                               \
    memcpy(&x, pattern, sizeof x);                    \
    for (int64_t i = begin; i < end; i++) out[i] = x; \
  } while (0)

static int fill_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_fill_args *a = args;
  unsigned char pattern[8] = {0};
  KVL_BY_ANY(a->dtype, any_store(pattern, 0, a->value, D))
  switch (dtype_bytes(a->dtype)) {
    case 8: FILL(uint64_t); break;
    case 4: FILL(uint32_t); break;
    case 2: FILL(uint16_t); break;
    default: memset((char *)a->out + begin, pattern[0], (size_t)(end - begin));
  }
  return 0;
}

KVL_CPU_KERNEL(fill) {
  const struct kvl_fill_args *a = args;
  return kvl__split(a->count, 4 * KVL_GRAIN, fill_piece, a);
}
