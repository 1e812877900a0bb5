/* Floats in the order of whole numbers, and the k-th of them without sorting. */
#ifndef KVL_CPU_RADIX_H
#define KVL_CPU_RADIX_H

#include "cpu/vec.h"

/* A key that is smaller the earlier x comes: ascending for flip 0, descending for flip ~0.
 * -0 ties with 0; NaN comes last either way. */
static inline KVL_HOT uint32_t radix_key(float x, uint32_t flip) {
  uint32_t i = f32_bits(x + 0.0f);                         /* -0 becomes 0 */
  uint32_t ascending = i ^ ((uint32_t)((int32_t)i >> 31) | 0x80000000u);
  return x == x ? ascending ^ flip : 0xFFFFFFFFu;
}

/* counts[0] += how many keys have each value of the digit `bits` wide at `shift`, among those
 * whose bits above it are `prefix`. Neighbours count in different tables: floats crowd into a
 * few bins, and each increment of one bin would wait for the last. */
static inline void radix_count(const float *a, int64_t n, uint32_t flip, uint32_t prefix,
                               int shift, int bits, uint32_t counts[2][2048]) {
  uint32_t mask = (1u << bits) - 1;
  int above = shift + bits;
  memset(counts, 0, 2 * sizeof counts[0]);
  if (above == 32)
    for (int64_t i = 0; i < n; i++) counts[i & 1][radix_key(a[i], flip) >> shift]++;
  else
    for (int64_t i = 0; i < n; i++) {
      uint32_t key = radix_key(a[i], flip);
      if (key >> above == prefix) counts[i & 1][key >> shift & mask]++;
    }
  for (int i = 0; i < 1 << bits; i++) counts[0][i] += counts[1][i];
}

/* The k-th smallest key (1 <= k <= n); *before counts the keys below it. */
static inline uint32_t radix_kth(const float *a, int64_t n, int64_t k, uint32_t flip,
                                 int64_t *before) {
  static const int shift[] = {21, 10, 0}, bits[] = {11, 11, 10};
  uint32_t prefix = 0, counts[2][2048];
  *before = 0;
  for (int pass = 0; pass < 3; pass++) {
    radix_count(a, n, flip, prefix, shift[pass], bits[pass], counts);
    uint32_t digit = 0;
    while (*before + counts[0][digit] < k) *before += counts[0][digit++];
    prefix = prefix << bits[pass] | digit;
  }
  return prefix;
}

#endif
