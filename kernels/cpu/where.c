/* out[i] = cond[i] ? a[i] : b[i].
 *   cond       u8         [count]
 *   a, b, out  any dtype  [count]   out may be a or b
 * Limit: read plus write bandwidth. */
#include "cpu/split.h"
#include "cpu/vec.h"

/* ivdep is safe: out is a, or b, or overlaps neither, so no iteration depends on another. */
#define CHOOSE(T)                                                                          \
  do {                                                                                     \
    const T *x = a->a, *y = a->b;                                                          \
    T *out = a->out;                                                                       \
    _Pragma("GCC ivdep") for (int64_t i = begin; i < end; i++) out[i] = a->cond[i] ? x[i]  \
                                                                                   : y[i]; \
  } while (0)

static int where_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_where_args *a = args;
  switch (a->bytes_element) {
    case 1: CHOOSE(uint8_t); break;
    case 2: CHOOSE(uint16_t); break;
    case 4: CHOOSE(uint32_t); break;
    case 8: CHOOSE(uint64_t); break;
    default: return KVL_ERR_UNSUPPORTED;
  }
  return 0;
}

KVL_CPU_KERNEL(where) {
  const struct kvl_where_args *a = args;
  return kvl__split(a->count, KVL_GRAIN, where_piece, a);
}
