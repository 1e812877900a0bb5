/* out[i] = cond[i] ? a[i] : b[i].
 *   cond       u8         [count]
 *   a, b, out  any dtype  [count]   out may be a or b; instead of a or b, a number
 * Limit: read plus write bandwidth. */
#include "args/elementwise.h"
#include "cpu/convert.h"
#include "cpu/split.h"

/* ivdep is safe: out is a, or b, or overlaps neither, so no iteration depends on another. */
#define CHOOSE(T, from_a, from_b)                                   \
  do {                                                              \
    const T *x = a->a ? a->a : x_value, *y = a->b ? a->b : y_value; \
    T *out = a->out;                                                \
    (void)x, (void)y;                                               \
    _Pragma("GCC ivdep") for (int64_t i = begin; i < end; i++)      \
        out[i] = a->cond[i] ? (from_a) : (from_b);                  \
  } while (0)

#define WHERE(T)                             \
  do {                                       \
    T x0, y0;                                \
    memcpy(&x0, x_value, sizeof x0);         \
    memcpy(&y0, y_value, sizeof y0);         \
    if (a->a && a->b) CHOOSE(T, x[i], y[i]); \
    else if (a->a) CHOOSE(T, x[i], y0);      \
    else if (a->b) CHOOSE(T, x0, y[i]);      \
    else CHOOSE(T, x0, y0);                  \
  } while (0)

static int where_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_where_args *a = args;
  uint64_t x_bits[1] = {0}, y_bits[1] = {0};
  const void *x_value = x_bits, *y_value = y_bits;
  KVL_BY_ANY(a->dtype, {
    any_store(x_bits, 0, a->a_value, D);
    any_store(y_bits, 0, a->b_value, D);
  })
  switch (dtype_bytes(a->dtype)) {
    case 1: WHERE(uint8_t); break;
    case 2: WHERE(uint16_t); break;
    case 4: WHERE(uint32_t); break;
    default: WHERE(uint64_t);
  }
  return 0;
}

KVL_CPU_KERNEL(where) {
  const struct kvl_where_args *a = args;
  return kvl__split(a->count, KVL_GRAIN, where_piece, a);
}
