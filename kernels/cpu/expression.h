/* What the kernels that are generated from expressions (lua/kvlab/kernel/print/c.lua) call:
 * each operation and reduction, on single numbers and on vectors of them. The name says the
 * type: f32 i32 u32 u64 bool, vf vi vu for vectors. Bools are 0 or 1, and 0 or -1 in the
 * lanes of a vi.
 *
 * min and max of a number and NaN are the number. Whole numbers wrap around. Shifts count
 * modulo the width. x % 0 is 0 for whole numbers. */
#ifndef KVL_CPU_EXPRESSION_H
#define KVL_CPU_EXPRESSION_H

#include "cpu/lanes.h"
#include "cpu/split.h"
#include "cpu/strip.h"
#include "page.h"

typedef uint32_t vu __attribute__((vector_size(VF * 4), aligned(VF * 4)));

/* Calls a function of single numbers on every lane; the compiler makes vectors of what it
 * can. */
#define E_LANES_1(name, to, from, f)             \
  static inline KVL_HOT to name(from a) {        \
    to r;                                        \
    for (int i = 0; i < VF; i++) r[i] = f(a[i]); \
    return r;                                    \
  }
#define E_LANES_2(name, to, from, f)                   \
  static inline KVL_HOT to name(from a, from b) {      \
    to r;                                              \
    for (int i = 0; i < VF; i++) r[i] = f(a[i], b[i]); \
    return r;                                          \
  }

static inline KVL_HOT vi vi_set(int32_t x) { return (vi){0} + x; }
static inline KVL_HOT vu vu_set(uint32_t x) { return (vu){0} + x; }
static inline KVL_HOT vi vi_iota(int32_t first) {
  vi r;
  for (int i = 0; i < VF; i++) r[i] = first + i;
  return r;
}

/* ---- loads and stores ---------------------------------------------------------------- */

static inline KVL_HOT vf load_f32_vf(const float *p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}
static inline KVL_HOT vi load_i32_vi(const int32_t *p) {
  vi x;
  memcpy(&x, p, sizeof x);
  return x;
}
static inline KVL_HOT vu load_u32_vu(const uint32_t *p) {
  vu x;
  memcpy(&x, p, sizeof x);
  return x;
}
static inline KVL_HOT vi load_bool_vi(const uint8_t *p) {
  vi r;
  for (int i = 0; i < VF; i++) r[i] = -(p[i] != 0);
  return r;
}
static inline KVL_HOT void store_i32_vi(int32_t *p, vi x) { memcpy(p, &x, sizeof x); }
static inline KVL_HOT void store_u32_vu(uint32_t *p, vu x) { memcpy(p, &x, sizeof x); }
static inline KVL_HOT void store_bool_vi(uint8_t *p, vi x) {
  for (int i = 0; i < VF; i++) p[i] = (uint8_t)(x[i] & 1);
}

static inline KVL_HOT vf gather_f32_vf(const float *p, vi at) {
  vf r;
  for (int i = 0; i < VF; i++) r[i] = p[at[i]];
  return r;
}

/* ---- operations ------------------------------------------------------------------------ */

static inline KVL_HOT float max_f32(float a, float b) { return a > b || b != b ? a : b; }
static inline KVL_HOT float min_f32(float a, float b) { return a < b || b != b ? a : b; }
static inline KVL_HOT int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }
static inline KVL_HOT int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
static inline KVL_HOT uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline KVL_HOT uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline KVL_HOT uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }
static inline KVL_HOT uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
#if defined(KVL_ISA_AVX512)
static inline KVL_HOT vf max_vf(vf a, vf b) {
  return (vf)_mm512_range_ps((__m512)a, (__m512)b, 5);
}
static inline KVL_HOT vf min_vf(vf a, vf b) {
  return (vf)_mm512_range_ps((__m512)a, (__m512)b, 4);
}
#else
static inline KVL_HOT vf max_vf(vf a, vf b) { return vf_select(b != b, a, vf_max(a, b)); }
static inline KVL_HOT vf min_vf(vf a, vf b) { return vf_select(b != b, a, vf_min(a, b)); }
#endif
E_LANES_2(max_vi, vi, vi, max_i32)
E_LANES_2(min_vi, vi, vi, min_i32)
E_LANES_2(max_vu, vu, vu, max_u32)
E_LANES_2(min_vu, vu, vu, min_u32)

static inline float mod_f32(float a, float b) { return a - floorf(a / b) * b; }
static inline int32_t mod_i32(int32_t a, int32_t b) {
  if (b == 0 || b == -1) return 0;
  int32_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
static inline uint32_t mod_u32(uint32_t a, uint32_t b) { return b ? a % b : 0; }
static inline uint64_t mod_u64(uint64_t a, uint64_t b) { return b ? a % b : 0; }
E_LANES_2(mod_vf, vf, vf, mod_f32)
E_LANES_2(mod_vi, vi, vi, mod_i32)
E_LANES_2(mod_vu, vu, vu, mod_u32)

static inline int32_t abs_i32(int32_t a) { return a < 0 ? -a : a; }
E_LANES_1(abs_vi, vi, vi, abs_i32)
static inline float sigmoid_f32(float a) { return 1 / (1 + expf(-a)); }
E_LANES_2(pow_vf, vf, vf, powf)

static inline KVL_HOT vi where_vi(vi c, vi a, vi b) { return (c & a) | (~c & b); }
static inline KVL_HOT vu where_vu(vi c, vu a, vu b) { return ((vu)c & a) | (~(vu)c & b); }
static inline int32_t popcount_u32(uint32_t x) { return __builtin_popcount(x); }
static inline int32_t popcount_u64(uint64_t x) { return __builtin_popcountll(x); }
E_LANES_1(popcount_vu, vi, vu, popcount_u32)

static inline int32_t i32_from_f32(float x) {
  return x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : x == x ? (int32_t)x : 0;
}
static inline uint32_t u32_from_f32(float x) {
  return x >= 0x1p32f ? UINT32_MAX : x > 0 ? (uint32_t)x : 0;
}
E_LANES_1(vi_from_vf, vi, vf, i32_from_f32)
E_LANES_1(vu_from_vf, vu, vf, u32_from_f32)
static inline KVL_HOT vf vf_from_vi(vi a) { return __builtin_convertvector(a, vf); }
static inline KVL_HOT vf vf_from_vu(vu a) { return __builtin_convertvector(a, vf); }

/* ---- reductions ------------------------------------------------------------------------ */

/* log(sum(exp(x))) as the largest x so far and the sum of exp(x - largest). */
struct lse {
  float most, sum;
};
struct vlse {
  vf most, sum;
};
static inline void lse_add(struct lse *s, float x) {
  float d = x == s->most ? 0 : x - s->most, e = expf(-fabsf(d));
  s->sum = d > 0 ? s->sum * e + 1 : s->sum + e;
  s->most = d > 0 ? x : s->most;
}
static inline KVL_HOT void vlse_add(struct vlse *s, vf x) {
  vf d = vf_select(x == s->most, vf_set(0), x - s->most), e = vf_exp(-vf_abs(d));
  vi up = d > vf_set(0);
  s->sum = vf_select(up, s->sum * e + 1, s->sum + e);
  s->most = vf_select(up, x, s->most);
}
static inline float lse_end(struct lse s) { return s.most + logf(s.sum); }
static inline float vlse_end(struct vlse s) {
  float most = vf_hmax(s.most), sum = 0;
  if (most == -INFINITY) return vf_sum(s.sum) == vf_sum(s.sum) ? most : NAN;
  for (int i = 0; i < VF; i++)
    sum += s.most[i] == most ? s.sum[i] : s.sum[i] * expf(s.most[i] - most);
  return most + logf(sum);
}

struct arg {
  float best;
  int32_t at;
};
struct varg {
  vf best;
  vi at;
};
static inline void arg_add(struct arg *s, float x, int32_t i) {
  if (x > s->best || (s->at < 0 && x == x)) *s = (struct arg){x, i};
}
static inline KVL_HOT void varg_add(struct varg *s, vf x, vi i) {
  vi take = (x > s->best) | ((s->at < 0) & (x == x));
  s->best = vf_select(take, x, s->best);
  s->at = where_vi(take, i, s->at);
}
static inline int32_t varg_end(struct varg s) {
  struct arg r = {-INFINITY, -1};
  for (int i = 0; i < VF; i++)
    if (s.at[i] >= 0 &&
        (r.at < 0 || s.best[i] > r.best || (s.best[i] == r.best && s.at[i] < r.at)))
      r = (struct arg){s.best[i], s.at[i]};
  return r.at;
}

static inline float hmin_vf(vf a) { return -vf_hmax(-a); }
#define E_ACROSS(name, type, from, f)                    \
  static inline type name(from a) {                      \
    type r = a[0];                                       \
    for (int i = 1; i < VF; i++) r = (type)(f(r, a[i])); \
    return r;                                            \
  }
#define E_ADD(a, b) ((a) + (b))
#define E_OR(a, b) ((a) | (b))
#define E_AND(a, b) ((a) & (b))
E_ACROSS(sum_across_vi, int32_t, vi, E_ADD)
E_ACROSS(sum_across_vu, uint32_t, vu, E_ADD)
E_ACROSS(max_across_vi, int32_t, vi, max_i32)
E_ACROSS(max_across_vu, uint32_t, vu, max_u32)
E_ACROSS(min_across_vi, int32_t, vi, min_i32)
E_ACROSS(min_across_vu, uint32_t, vu, min_u32)
E_ACROSS(or_across_vi, int, vi, E_OR)
E_ACROSS(and_across_vi, int, vi, E_AND)

/* ---- rows ------------------------------------------------------------------------------ */

/* Prefetches the cache lines of a row that is needed soon. */
static inline KVL_HOT void soon(const void *row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)row + b, 0, 2);
}

#endif
