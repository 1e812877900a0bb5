/* out = a op b with NumPy's broadcasting; b is a tensor or a scalar.
 *   a, b  f32 f16 bf16 i32 i64        strides of 0 broadcast, the last dim's is 0 or 1
 *   out   like a; u8 for comparisons  [shape]   may be a or b of the same shape
 * A strip of each input is widened (floats to f32, whole numbers to i64) into a buffer that
 * stays in L1, so there is one loop per operation instead of one per operation, dtype and
 * broadcast. Contiguous f32 is used where it lies. Whole numbers wrap; their quotients are
 * truncated, and dividing by zero gives 0. A scalar is converted to f32 or i64 first. MAX
 * and MIN are NaN if either operand is. POW is the C library's for floats, a few ns each.
 * For whole numbers it wraps, and a negative exponent gives the quotient 1 / a^-b,
 * truncated. Limit: read plus write bandwidth in memory, about 3 L1 passes in cache. */
#include "args/elementwise.h"
#include "cpu/convert.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

enum { STRIP = 512 };

/* ---- arithmetic on a strip ---------------------------------------------------------- */

#define EACH(TYPE, expression) \
  for (int i = 0; i < n; i++) ((TYPE *)out)[i] = (TYPE)(expression)
#define EACH_VF(expression)                                        \
  for (int i = 0; i < n; i += VF) {                                \
    int left = vf_left(i, n);                                      \
    vf x = vf_load_n(a + i, left, KVL_DTYPE_F32);                  \
    vf y = vf_load_n(b + i, left, KVL_DTYPE_F32);                  \
    vf_store_n((float *)out + i, expression, left, KVL_DTYPE_F32); \
  }

/* out: f32, or u8 for comparisons. If f32, it may be a or b. */
static void floats(int op, const float *a, const float *b, int n, void *out) {
  switch (op) { /* ORDER kvl_binary_op */
    case KVL_BINARY_ADD: EACH_VF(x + y) break;
    case KVL_BINARY_SUB: EACH_VF(x - y) break;
    case KVL_BINARY_MUL: EACH_VF(x * y) break;
    case KVL_BINARY_DIV: EACH_VF(x / y) break;
    case KVL_BINARY_MAX: EACH_VF(vf_max_nan(x, y)) break;
    case KVL_BINARY_MIN: EACH_VF(vf_min_nan(x, y)) break;
    case KVL_BINARY_POW: EACH(float, powf(a[i], b[i])); break;
    case KVL_BINARY_EQ: EACH(uint8_t, a[i] == b[i]); break;
    case KVL_BINARY_NE: EACH(uint8_t, a[i] != b[i]); break;
    case KVL_BINARY_LT: EACH(uint8_t, a[i] < b[i]); break;
    case KVL_BINARY_LE: EACH(uint8_t, a[i] <= b[i]); break;
    case KVL_BINARY_GT: EACH(uint8_t, a[i] > b[i]); break;
    default: EACH(uint8_t, a[i] >= b[i]);
  }
}

static inline int64_t whole_divide(int64_t a, int64_t b) {
  if (b == 0) return 0;
  return b == -1 ? (int64_t)(0 - (uint64_t)a) : a / b; /* INT64_MIN / -1 wraps */
}

static int64_t whole_power(int64_t a, int64_t b) {
  uint64_t x = (uint64_t)a, r = 1;
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
  for (; b > 0; b >>= 1, x *= x)
    if (b & 1) r *= x;
  return (int64_t)r;
}

static void wholes(int op, const int64_t *a, const int64_t *b, int n, void *out) {
  const uint64_t *x = (const uint64_t *)a, *y = (const uint64_t *)b; /* unsigned, to wrap */
  switch (op) {                                                      /* ORDER kvl_binary_op */
    case KVL_BINARY_ADD: EACH(int64_t, x[i] + y[i]); break;
    case KVL_BINARY_SUB: EACH(int64_t, x[i] - y[i]); break;
    case KVL_BINARY_MUL: EACH(int64_t, x[i] * y[i]); break;
    case KVL_BINARY_DIV: EACH(int64_t, whole_divide(a[i], b[i])); break;
    case KVL_BINARY_MAX: EACH(int64_t, a[i] > b[i] ? a[i] : b[i]); break;
    case KVL_BINARY_MIN: EACH(int64_t, a[i] < b[i] ? a[i] : b[i]); break;
    case KVL_BINARY_POW: EACH(int64_t, whole_power(a[i], b[i])); break;
    case KVL_BINARY_EQ: EACH(uint8_t, a[i] == b[i]); break;
    case KVL_BINARY_NE: EACH(uint8_t, a[i] != b[i]); break;
    case KVL_BINARY_LT: EACH(uint8_t, a[i] < b[i]); break;
    case KVL_BINARY_LE: EACH(uint8_t, a[i] <= b[i]); break;
    case KVL_BINARY_GT: EACH(uint8_t, a[i] > b[i]); break;
    default: EACH(uint8_t, a[i] >= b[i]);
  }
}

/* ---- strips in and out -------------------------------------------------------------- */

/* Three strips: a, b and the result. */
union room {
  float f[3][STRIP];
  int64_t i[3][STRIP];
};

/* Fills `buffer` with n copies of x. */
static inline const float *spread(float x, float *buffer, int n) {
  for (int i = 0; i < n; i++) buffer[i] = x;
  return buffer;
}
static inline const int64_t *spread_whole(int64_t x, int64_t *buffer, int n) {
  for (int i = 0; i < n; i++) buffer[i] = x;
  return buffer;
}

/* Returns elements offset, offset + stride, ... as f32, in `buffer` or where they lie. */
static inline KVL_HOT const float *widen(const void *p, int64_t offset, int64_t stride, int n,
                                         float *buffer, const int dtype) {
  if (stride == 0) return spread(f32_load(p, offset, dtype), buffer, n);
  if (dtype == KVL_DTYPE_F32) return (const float *)p + offset;
  for (int i = 0; i < n; i += VF)
    vf_store(buffer, i, vf_load_n(at_const(p, offset + i, dtype), vf_left(i, n), dtype),
             KVL_DTYPE_F32);
  return buffer;
}

static inline KVL_HOT void narrow(const float *strip, void *out, int64_t offset, int n,
                                  const int dtype) {
  for (int i = 0; i < n; i += VF)
    vf_store_n(at(out, offset + i, dtype), vf_load(strip, i, KVL_DTYPE_F32), vf_left(i, n),
               dtype);
}

static const int64_t *widen_whole(const void *p, int64_t offset, int64_t stride, int n,
                                  int64_t *buffer, int dtype) {
  const int32_t *narrow32 = (const int32_t *)p + offset;
  const int64_t *wide = (const int64_t *)p + offset;
  if (stride == 0) return spread_whole(dtype == KVL_DTYPE_I32 ? *narrow32 : *wide, buffer, n);
  if (dtype == KVL_DTYPE_I64) return wide;
  for (int i = 0; i < n; i++) buffer[i] = narrow32[i];
  return buffer;
}

static inline KVL_HOT int float_strip(const struct kvl_binary_args *g, int64_t ia, int64_t ib,
                                      int64_t io, int n, union room *room, const int dtype) {
  int last = g->ndim - 1;
  float *r = room->f[2];
  const float *x = widen(g->a, ia, g->a_stride[last], n, room->f[0], dtype);
  const float *y = g->b ? widen(g->b, ib, g->b_stride[last], n, room->f[1], dtype)
                        : spread((float)g->scalar, room->f[1], n);
  if (g->op >= KVL_BINARY_EQ) floats(g->op, x, y, n, (uint8_t *)g->out + io);
  else if (dtype == KVL_DTYPE_F32) floats(g->op, x, y, n, (float *)g->out + io);
  else floats(g->op, x, y, n, r), narrow(r, g->out, io, n, dtype);
  return 0;
}

static void whole_strip(const struct kvl_binary_args *g, int64_t ia, int64_t ib, int64_t io,
                        int n, union room *room) {
  int last = g->ndim - 1;
  int64_t *r = room->i[2];
  const int64_t *x = widen_whole(g->a, ia, g->a_stride[last], n, room->i[0], g->dtype);
  const int64_t *y = g->b ? widen_whole(g->b, ib, g->b_stride[last], n, room->i[1], g->dtype)
                          : spread_whole(i64_from_f64(g->scalar), room->i[1], n);
  if (g->op >= KVL_BINARY_EQ) {
    wholes(g->op, x, y, n, (uint8_t *)g->out + io);
  } else if (g->dtype == KVL_DTYPE_I64) {
    wholes(g->op, x, y, n, (int64_t *)g->out + io);
  } else {
    wholes(g->op, x, y, n, r);
    for (int i = 0; i < n; i++) ((int32_t *)g->out)[io + i] = (int32_t)r[i];
  }
}

/* Elements io ... io + n - 1 of out, in one row of the last dim. */
static __attribute__((noinline)) int strip(const struct kvl_binary_args *g, int64_t ia,
                                           int64_t ib, int64_t io, int n, union room *room) {
  if (g->dtype == KVL_DTYPE_I32 || g->dtype == KVL_DTYPE_I64)
    whole_strip(g, ia, ib, io, n, room);
  else KVL_BY_FLOAT(g->dtype, return float_strip(g, ia, ib, io, n, room, D))
  return 0;
}

/* ---- walking the shape -------------------------------------------------------------- */

static int binary_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_binary_args *g = args;
  union room room;
  int last = g->ndim - 1;
  int64_t at_dim[KVL_DIMS_MAX], rest = begin, ia = 0, ib = 0;
  for (int d = last; d >= 0; d--) {
    at_dim[d] = rest % g->shape[d];
    rest /= g->shape[d];
    ia += at_dim[d] * g->a_stride[d];
    ib += at_dim[d] * g->b_stride[d];
  }
  for (int64_t i = begin; i < end;) {
    int n = (int)i64_min(i64_min(STRIP, end - i), g->shape[last] - at_dim[last]);
    int status = strip(g, ia, ib, i, n, &room);
    if (status < 0) return status;
    i += n;
    at_dim[last] += n;
    ia += n * g->a_stride[last];
    ib += n * g->b_stride[last];
    for (int d = last; d > 0 && at_dim[d] == g->shape[d]; d--) { /* carry */
      ia += g->a_stride[d - 1] - at_dim[d] * g->a_stride[d];
      ib += g->b_stride[d - 1] - at_dim[d] * g->b_stride[d];
      at_dim[d] = 0;
      at_dim[d - 1]++;
    }
  }
  return 0;
}

KVL_CPU_KERNEL(binary) {
  const struct kvl_binary_args *g = args;
  return kvl__split(g->count, KVL_GRAIN, binary_piece, g);
}
