/* Converts numbers from one storage dtype to another. Conversions to floats round to nearest
 * even. Conversions to whole numbers truncate toward zero, saturate at the ends of the type,
 * and turn NaN into 0. */
#ifndef KVL_CPU_CONVERT_H
#define KVL_CPU_CONVERT_H

#include "cpu/vec.h"

/* ---- whole numbers ------------------------------------------------------------------ */

static inline int64_t i64_from_f64(double x) {
  return x >= 0x1p63 ? INT64_MAX : x < -0x1p63 ? INT64_MIN : x == x ? (int64_t)x : 0;
}
static inline uint64_t u64_from_f64(double x) {
  return x >= 0x1p64 ? UINT64_MAX : x > 0 ? (uint64_t)x : 0;
}
static inline int32_t i32_from_f64(double x) {
  return x >= 0x1p31 ? INT32_MAX : x < -0x1p31 ? INT32_MIN : x == x ? (int32_t)x : 0;
}
static inline uint8_t u8_from_f64(double x) {
  return x >= 255 ? 255 : x > 0 ? (uint8_t)(int32_t)x : 0;
}
static inline int32_t i32_from_i64(int64_t x) {
  return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (int32_t)x;
}
static inline uint8_t u8_from_i64(int64_t x) {
  return x > 255 ? 255 : x < 0 ? 0 : (uint8_t)x;
}

static inline int dtype_bytes(int dtype) {
  switch (dtype) { /* ORDER kvl_dtype */
    case KVL_DTYPE_I64:
    case KVL_DTYPE_U64: return 8;
    case KVL_DTYPE_F32:
    case KVL_DTYPE_I32: return 4;
    case KVL_DTYPE_F16:
    case KVL_DTYPE_BF16: return 2;
    default: return 1; /* f8e4m3 u8 */
  }
}

/* p[i] = x in any dtype; half precision is reached through f32. */
static inline KVL_HOT void any_store(void *p, int64_t i, double x, const int dtype) {
  switch (dtype) { /* ORDER kvl_dtype */
    case KVL_DTYPE_F8E4M3: ((uint8_t *)p)[i] = f8_from_f32((float)x); break;
    case KVL_DTYPE_I32: ((int32_t *)p)[i] = i32_from_f64(x); break;
    case KVL_DTYPE_I64: ((int64_t *)p)[i] = i64_from_f64(x); break;
    case KVL_DTYPE_U8: ((uint8_t *)p)[i] = u8_from_f64(x); break;
    case KVL_DTYPE_U64: ((uint64_t *)p)[i] = u64_from_f64(x); break;
    default: f32_store(p, i, (float)x, dtype);
  }
}

/* Expand `call` with `D` bound to a dtype as a constant: every dtype, for any_store. */
#define KVL_BY_ANY(dtype, call)          \
  switch (dtype) { /* ORDER kvl_dtype */ \
    case KVL_DTYPE_F8E4M3: {             \
      enum { D = KVL_DTYPE_F8E4M3 };     \
      call;                              \
    } break;                             \
    case KVL_DTYPE_I32: {                \
      enum { D = KVL_DTYPE_I32 };        \
      call;                              \
    } break;                             \
    case KVL_DTYPE_I64: {                \
      enum { D = KVL_DTYPE_I64 };        \
      call;                              \
    } break;                             \
    case KVL_DTYPE_U8: {                 \
      enum { D = KVL_DTYPE_U8 };         \
      call;                              \
    } break;                             \
    case KVL_DTYPE_U64: {                \
      enum { D = KVL_DTYPE_U64 };        \
      call;                              \
    } break;                             \
    default: KVL_BY_FLOAT(dtype, call)   \
  }

#endif
