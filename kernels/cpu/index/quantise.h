/* Converts a row to f8e4m3 with a scale of its own, for quantise_rows and index_append. */
#ifndef KVL_CPU_QUANTISE_H
#define KVL_CPU_QUANTISE_H

#include "args/index.h"
#include "cpu/vec.h"

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

#endif
