/* The types in which GGUF files store tensors. */
#ifndef KVL_DEQUANTISE_H
#define KVL_DEQUANTISE_H

#include <stdint.h>

/* A type: `values` numbers are stored together as a block of `bytes`. unpack writes the
 * numbers of n blocks to out; it is NULL for types that are only known by their size. */
struct kvl__stored {
  const char *name;
  int values, bytes;
  void (*unpack)(const uint8_t *blocks, int64_t n, float *out);
};

/* The type with ggml's number `type`; NULL for one that is not known. */
const struct kvl__stored *kvl__stored_type(uint32_t type);

/* out = x rounded to nearest even, as KVL_DTYPE_F16 or KVL_DTYPE_BF16. */
void kvl__round_floats(const float *x, int64_t n, int dtype, uint16_t *out);

#endif
