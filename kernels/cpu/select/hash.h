/* Hashes a vector by random planes. args/select.h fixes the order of the sums. */
#ifndef KVL_CPU_HASH_H
#define KVL_CPU_HASH_H

#include "args/select.h"
#include "cpu/vec.h"

enum { HASH_DIM_MAX = 256, HASH_VECS = KVL_HASH_PARTS / VF };

/* Lane p of the result is the sum of the parts p, p + VF, ... of x . plane. */
static inline KVL_HOT vf hash_parts(const float *x, const float *plane, int dim) {
  vf sum[HASH_VECS] = {0};
  for (int d = 0; d < dim; d += KVL_HASH_PARTS)
#pragma GCC unroll 4
    for (int v = 0; v < HASH_VECS; v++) {
      int at_dim = d + v * VF;
      if (at_dim >= dim) break;
      sum[v] += vf_load(x, at_dim, KVL_DTYPE_F32) *
                vf_load_n(plane + at_dim, vf_left(at_dim, dim), KVL_DTYPE_F32);
    }
  for (int half = HASH_VECS / 2; half > 0; half /= 2)
    for (int v = 0; v < half; v++) sum[v] += sum[v + half];
  return sum[0];
}

/* Bit i of the result: is lane i > 0? */
static inline KVL_HOT uint32_t vf_positive(vf x) {
  vi mask = (vi)(x > vf_set(0));
#if defined(KVL_ISA_AVX512)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(KVL_ISA_AVX2)
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < VF; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
#endif
}

/* Writes the hash of x as whole words. x has room for HASH_DIM_MAX floats. */
static inline void hash_vector(const float *x, const float *planes, int dim, int bits,
                               uint64_t *words) {
  memset(words, 0, (size_t)(bits + 63) / 64 * sizeof *words);
  for (int b = 0; b < bits; b += VF) { /* VF divides every number of bits */
    vf sums[VF];
    for (int i = 0; i < VF; i++)
      sums[i] = hash_parts(x, planes + (int64_t)(b + i) * dim, dim);
    words[b / 64] |= (uint64_t)vf_positive(vf_sum_lanes(sums)) << b % 64;
  }
}

/* x += row, or x = row. */
static inline KVL_HOT void hash_take(float *x, const void *row, int dim, int add,
                                     const int dtype) {
  for (int d = 0; d < dim; d += VF) {
    int lanes = vf_left(d, dim);
    vf y = vf_load_n(at_const(row, d, dtype), lanes, dtype);
    vf_store(x, d, add ? vf_load(x, d, KVL_DTYPE_F32) + y : y, KVL_DTYPE_F32);
  }
}

#endif
