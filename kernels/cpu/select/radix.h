/* Maps floats to whole numbers of the same order, and finds the k-th one without sorting. */
#ifndef KVL_CPU_RADIX_H
#define KVL_CPU_RADIX_H

#include "cpu/lanes.h"

/* The key of x, which is smaller the earlier x comes: in ascending order for flip 0, in
 * descending order for flip ~0. -0 equals 0; NaN comes last in both. */
static inline KVL_HOT uint32_t radix_key(float x, uint32_t flip) {
  uint32_t i = f32_bits(x + 0.0f); /* -0 becomes 0 */
  uint32_t ascending = i ^ ((uint32_t)((int32_t)i >> 31) | 0x80000000u);
  return x == x ? ascending ^ flip : 0xFFFFFFFFu;
}

/* The key of a[i], f32, bf16 or i32. */
static inline KVL_HOT uint32_t radix_key_at(const void *a, int64_t i, uint32_t flip,
                                            const int dtype) {
  if (dtype == KVL_DTYPE_I32) return (((const uint32_t *)a)[i] ^ 0x80000000u) ^ flip;
  return radix_key(f32_load(a, i, dtype), flip);
}

/* Descending keys from this one on are those of -inf and NaN, which are not eligible. */
#define RADIX_NONE 0xFF800000u

/* Whether the key of one of a[i] ... a[i + VF - 1] is within [low, high]. Keys are compared as
 * signed numbers, with their top bits flipped. */
static inline KVL_HOT int radix_any(const void *a, int64_t i, uint32_t flip, uint32_t low,
                                    uint32_t high, const int dtype) {
  vf x = vf_load(a, i, dtype == KVL_DTYPE_I32 ? KVL_DTYPE_F32 : dtype);
  vi bits = (vi)(x + 0.0f), sign = (bits >> 31) & 0x7FFFFFFF, nan = (vi)(x != x);
  vi key = ((bits ^ sign ^ (int32_t)flip) & ~nan) | (nan & 0x7FFFFFFF);
  if (dtype == KVL_DTYPE_I32) key = (vi)x ^ (int32_t)flip;
  return vi_any((key >= (int32_t)(low ^ 0x80000000u)) &
                (key <= (int32_t)(high ^ 0x80000000u)));
}

/* Runs `call` for every i in [0, n) whose key is within [low, high], with the key in `key`.
 * Others are skipped a vector at a time. */
#define RADIX_WITHIN(a, n, flip, low, high, dtype, call)                             \
  for (int64_t first_ = 0; first_ < (n); first_ += VF) {                             \
    if ((n)-first_ >= VF && !radix_any(a, first_, flip, low, high, dtype)) continue; \
    for (int64_t i = first_, stop_ = first_ + vf_left(first_, n); i < stop_; i++) {  \
      const uint32_t key = radix_key_at(a, i, flip, dtype);                          \
      if (key - (low) <= (high) - (low)) { call; }                                   \
    }                                                                                \
  }

/* Consecutive numbers, f32, bf16 or i32. Several runs, one after another, form a longer row. */
struct radix_run {
  const void *a;
  int64_t n;
  int dtype;
};

/* Expand `call` with `D` bound to the run's dtype as a constant. */
#define RADIX_BY_DTYPE(run, call)            \
  if ((run).dtype == KVL_DTYPE_BF16) {       \
    enum { D = KVL_DTYPE_BF16 };             \
    call;                                    \
  } else if ((run).dtype == KVL_DTYPE_I32) { \
    enum { D = KVL_DTYPE_I32 };              \
    call;                                    \
  } else {                                   \
    enum { D = KVL_DTYPE_F32 };              \
    call;                                    \
  }

enum { RADIX_BINS = 2048 };

static inline KVL_HOT void radix_count(const void *a, int64_t n, uint32_t flip, uint32_t low,
                                       uint32_t high, int shift, uint32_t *count,
                                       const int dtype) {
  const uint32_t mask = RADIX_BINS - 1;
  if (low == 0 && high == 0xFFFFFFFFu)
    for (int64_t i = 0; i < n; i++) count[radix_key_at(a, i, flip, dtype) >> shift & mask]++;
  else RADIX_WITHIN(a, n, flip, low, high, dtype, count[(key - low) >> shift & mask]++)
}

/* The k-th smallest key of all runs; 1 <= k <= the number of elements. *before becomes the
 * number of keys below it. Three passes find its digits from the top, of 11, 11 and 10 bits:
 * each pass makes a histogram of the keys that share the digits found so far. */
static inline uint32_t radix_kth(const struct radix_run *runs, int n_runs, int64_t k,
                                 uint32_t flip, int64_t *before) {
  static const int shifts[] = {21, 10, 0};
  uint32_t low = 0, high = 0xFFFFFFFFu, count[RADIX_BINS]; /* where the k-th key is */
  *before = 0;
  for (int pass = 0; pass < 3; pass++) {
    uint32_t digit = 0;
    int shift = shifts[pass];
    memset(count, 0, sizeof count);
    for (int r = 0; r < n_runs; r++)
      RADIX_BY_DTYPE(runs[r],
                     radix_count(runs[r].a, runs[r].n, flip, low, high, shift, count, D))
    while (*before + count[digit] < k) *before += count[digit++];
    low |= digit << shift;
    high = low | ((1u << shift) - 1);
  }
  return low;
}

/* The key up to which the k largest eligible numbers of all runs are taken; *equals becomes
 * how many numbers with this very key are taken. `all` is the number of elements. */
static inline uint32_t radix_largest(const struct radix_run *runs, int n_runs, int64_t all,
                                     int64_t k, int64_t *equals) {
  int64_t before = 0;
  uint32_t last = all > k ? radix_kth(runs, n_runs, k, 0xFFFFFFFFu, &before) : RADIX_NONE;
  *equals = last < RADIX_NONE ? k - before : all;
  return last < RADIX_NONE ? last : RADIX_NONE - 1;
}

/* Runs `call` for every i of a run whose key is below `last`, and for those whose key equals
 * `last`, until `equals` of these are taken. `equals` is an int64_t that counts down. */
#define RADIX_FIRST(run, flip, last, equals, call)                      \
  RADIX_BY_DTYPE(run, RADIX_WITHIN((run).a, (run).n, flip, 0u, last, D, \
                                   if (key < (last) || (equals)-- > 0) { call; }))

#endif
