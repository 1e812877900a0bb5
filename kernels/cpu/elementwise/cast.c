/* out = a in another dtype: any pair of f32 f16 bf16 i32 i64 u8, and f32 f16 bf16 to and
 * from f8e4m3. Floats round to nearest even; whole numbers truncate toward zero and
 * saturate; f8e4m3 saturates at 448. Whole numbers reach f16 and bf16 through f32.
 *   a, out  [count]
 * Limit: read plus write bandwidth between floats. */
#include "args/elementwise.h"
#include "cpu/convert.h"
#include "cpu/split.h"

static inline KVL_HOT int is_float(const int dtype) {
  return dtype == KVL_DTYPE_F32 || dtype == KVL_DTYPE_F16 || dtype == KVL_DTYPE_BF16;
}

static inline KVL_HOT int64_t whole_load(const void *p, int64_t i, const int dtype) {
  if (dtype == KVL_DTYPE_I32) return ((const int32_t *)p)[i];
  if (dtype == KVL_DTYPE_I64) return ((const int64_t *)p)[i];
  return ((const uint8_t *)p)[i];
}

static inline KVL_HOT void whole_store(void *p, int64_t i, int64_t x, const int dtype) {
  if (dtype == KVL_DTYPE_I32) ((int32_t *)p)[i] = i32_from_i64(x);
  else if (dtype == KVL_DTYPE_I64) ((int64_t *)p)[i] = x;
  else ((uint8_t *)p)[i] = u8_from_i64(x);
}

static inline KVL_HOT void loop(const void *restrict a, void *restrict out, int64_t begin,
                                int64_t end, const int from, const int to) {
  if (is_float(from) && is_float(to)) {
    for (int64_t i = begin; i < end; i += VF) {
      int left = vf_left(i, end);
      vf_store_n(at(out, i, to), vf_load_n(at_const(a, i, from), left, from), left, to);
    }
  } else if (is_float(from)) {
    for (int64_t i = begin; i < end; i++) any_store(out, i, f32_load(a, i, from), to);
  } else if (from == KVL_DTYPE_F8E4M3) {
    for (int64_t i = begin; i < end; i++)
      f32_store(out, i, f32_from_f8(((const uint8_t *)a)[i]), to);
  } else if (is_float(to)) {
    for (int64_t i = begin; i < end; i++) /* one rounding to f32, straight from the i64 */
      f32_store(out, i, (float)whole_load(a, i, from), to);
  } else {
    for (int64_t i = begin; i < end; i++) whole_store(out, i, whole_load(a, i, from), to);
  }
}

/* Expands `call` with `NAME` bound to a dtype as a constant: every dtype of a cast. */
#define BY_CAST(dtype, NAME, call)       \
  switch (dtype) { /* ORDER kvl_dtype */ \
    case KVL_DTYPE_F32: {                \
      enum { NAME = KVL_DTYPE_F32 };     \
      call;                              \
    } break;                             \
    case KVL_DTYPE_F16: {                \
      enum { NAME = KVL_DTYPE_F16 };     \
      call;                              \
    } break;                             \
    case KVL_DTYPE_BF16: {               \
      enum { NAME = KVL_DTYPE_BF16 };    \
      call;                              \
    } break;                             \
    case KVL_DTYPE_F8E4M3: {             \
      enum { NAME = KVL_DTYPE_F8E4M3 };  \
      call;                              \
    } break;                             \
    case KVL_DTYPE_I32: {                \
      enum { NAME = KVL_DTYPE_I32 };     \
      call;                              \
    } break;                             \
    case KVL_DTYPE_I64: {                \
      enum { NAME = KVL_DTYPE_I64 };     \
      call;                              \
    } break;                             \
    case KVL_DTYPE_U8: {                 \
      enum { NAME = KVL_DTYPE_U8 };      \
      call;                              \
    } break;                             \
    default: return KVL_ERR_UNSUPPORTED; \
  }

static int cast_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_cast_args *a = args;
  BY_CAST(a->from, FROM, BY_CAST(a->to, TO, loop(a->a, a->out, begin, end, FROM, TO)))
  return 0;
}

KVL_CPU_KERNEL(cast) {
  const struct kvl_cast_args *a = args;
  if (a->from == a->to) {
    if (a->count) memmove(a->out, a->a, (size_t)(a->count * dtype_bytes(a->to)));
    return 0;
  }
  if ((a->from == KVL_DTYPE_F8E4M3 && !is_float(a->to)) ||
      (a->to == KVL_DTYPE_F8E4M3 && !is_float(a->from)))
    return KVL_ERR_UNSUPPORTED;
  return kvl__split(a->count, KVL_GRAIN, cast_piece, a);
}
