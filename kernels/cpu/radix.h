/* Floats in the order of whole numbers, and the k-th of them without sorting. */
#ifndef KVL_CPU_RADIX_H
#define KVL_CPU_RADIX_H

#include "cpu/lanes.h"

/* A key that is smaller the earlier x comes: ascending for flip 0, descending for flip ~0.
 * -0 ties with 0; NaN comes last either way. */
static inline KVL_HOT uint32_t radix_key(float x, uint32_t flip) {
  uint32_t i = f32_bits(x + 0.0f);                         /* -0 becomes 0 */
  uint32_t ascending = i ^ ((uint32_t)((int32_t)i >> 31) | 0x80000000u);
  return x == x ? ascending ^ flip : 0xFFFFFFFFu;
}

/* Is a key of a[0] ... a[VF - 1] within [low, high]? In signed order: top bits flipped. */
static inline KVL_HOT int radix_any(const float *a, uint32_t flip, uint32_t low,
                                    uint32_t high) {
  vf x = vf_load(a, 0, KVL_DTYPE_F32);
  vi i = (vi)(x + 0.0f), sign = (i >> 31) & 0x7FFFFFFF, nan = (vi)(x != x);
  vi key = ((i ^ sign ^ (int32_t)flip) & ~nan) | (nan & 0x7FFFFFFF);
  return vi_any((key >= (int32_t)(low ^ 0x80000000u)) &
                (key <= (int32_t)(high ^ 0x80000000u)));
}

/* Does `call` for every i in [0, n) whose key is within [low, high], and for some others:
 * they are passed over a vector at a time. */
#define RADIX_WITHIN(a, n, flip, low, high, call)                                     \
  for (int64_t first = 0; first < (n); first += VF) {                                 \
    if ((n) - first >= VF && !radix_any((a) + first, flip, low, high)) continue;      \
    for (int64_t i = first, stop = first + vf_left(first, n); i < stop; i++) { call; }\
  }

/* The k-th smallest key (1 <= k <= n); *before counts the keys below it. Digits of 11, 11
 * and 10 bits from the top: a histogram of those that share the digits found so far. */
static inline uint32_t radix_kth(const float *a, int64_t n, int64_t k, uint32_t flip,
                                 int64_t *before) {
  static const int shift[] = {21, 10, 0}, bits[] = {11, 11, 10};
  uint32_t low = 0, high = 0xFFFFFFFFu, count[2048];       /* where the k-th key is */
  *before = 0;
  for (int pass = 0; pass < 3; pass++) {
    uint32_t mask = (1u << bits[pass]) - 1, digit = 0;
    memset(count, 0, sizeof count);
    if (pass == 0)
      for (int64_t i = 0; i < n; i++) count[radix_key(a[i], flip) >> shift[0]]++;
    else
      RADIX_WITHIN(a, n, flip, low, high, {
        uint32_t key = radix_key(a[i], flip);
        if (key >= low && key <= high) count[key >> shift[pass] & mask]++;
      })
    while (*before + count[digit] < k) *before += count[digit++];
    low |= digit << shift[pass];
    high = low | ((1u << shift[pass]) - 1);
  }
  return low;
}

#endif
