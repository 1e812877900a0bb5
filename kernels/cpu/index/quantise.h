/* Rotates a row, and converts one to f8e4m3 with a scale of its own: for hadamard, quantise_rows
 * and index_append. */
#ifndef KVL_CPU_QUANTISE_H
#define KVL_CPU_QUANTISE_H

#include "args/index.h"
#include "cpu/vec.h"

enum { HADAMARD_DIM_MAX = 1024 };

static inline KVL_HOT void hadamard_row(const void *x, void *out, int dim, float scale,
                                        const int dtype) {
  float v[HADAMARD_DIM_MAX] __attribute__((aligned(64)));
  for (int d = 0; d < dim; d++) v[d] = f32_load(x, d, dtype);
  for (int apart = 1; apart < dim; apart *= 2)
    for (int first = 0; first < dim; first += 2 * apart)
      for (int d = first; d < first + apart; d++) {
        float a = v[d], b = v[d + apart];
        v[d] = a + b;
        v[d + apart] = a - b;
      }
  for (int d = 0; d < dim; d++) f32_store(out, d, v[d] * scale, dtype);
}

/* out = x / scale; returns the scale. Divides, so that every device rounds alike. */
static inline KVL_HOT float quantise_row(const void *x, uint8_t *out, int64_t dim,
                                         int is_ue8m0, const int dtype) {
  vf most = vf_set(KVL_INDEX_AMAX_LEAST);
  for (int64_t d = 0; d < dim; d += VF) {
    vf v = vf_load_n(at_const(x, d, dtype), vf_left(d, dim), dtype);
    most = vf_max((vf)((vi)v & 0x7FFFFFFF), most); /* a NaN does not change it */
  }
  float scale = vf_hmax(most) / 448;
  if (is_ue8m0) {
    uint32_t bits = KVL_UE8M0_BITS(f32_bits(scale));
    memcpy(&scale, &bits, 4);
  }
  for (int64_t d = 0; d < dim; d += VF) {
    int lanes = vf_left(d, dim);
    vf v = vf_load_n(at_const(x, d, dtype), lanes, dtype);
    vf_store_n(out + d, v / scale, lanes, KVL_DTYPE_F8E4M3);
  }
  return scale;
}

/* The same, of a row that is rotated first, and rounded to its dtype then, if `rotates`. */
static inline KVL_HOT float index_row(const void *x, uint8_t *out, int64_t dim, int rotates,
                                      int is_ue8m0, const int dtype) {
  float rotated[KVL_INDEX_DIM_MOST]; /* room for any dtype */
  if (!rotates) return quantise_row(x, out, dim, is_ue8m0, dtype);
  hadamard_row(x, rotated, (int)dim, KVL_INDEX_TURN(dim), dtype);
  return quantise_row(rotated, out, dim, is_ue8m0, dtype);
}

#endif
