/* out[r][j] = src[r][index[r][j]]; an index out of range gives 0.
 *   src    2- or 4-byte elements  [rows, n]
 *   index  i32                    [rows, m]
 *   out    like src               [rows, m]
 * Limit: reading the index and writing out; latency if src is larger than the cache. */
#include "args/elementwise.h"
#include "cpu/split.h"
#include "cpu/vec.h"

#define GATHER(T)                                              \
  for (int64_t i = begin; i < end;) {                          \
    int64_t r = i / a->m, stop = i64_min(end, (r + 1) * a->m); \
    const T *src = (const T *)a->src + r * a->n;               \
    for (; i < stop; i++) {                                    \
      int64_t j = a->index[i];                                 \
      ((T *)a->out)[i] = j < 0 || j >= a->n ? 0 : src[j];      \
    }                                                          \
  }

static int gather_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_gather_args *a = args;
  switch (a->bytes_element) {
    case 1: GATHER(uint8_t) break;
    case 2: GATHER(uint16_t) break;
    case 4: GATHER(uint32_t) break;
    case 8: GATHER(uint64_t) break;
    default: return KVL_ERR_UNSUPPORTED;
  }
  return 0;
}

KVL_CPU_KERNEL(gather) {
  const struct kvl_gather_args *a = args;
  return kvl__split(a->rows * a->m, KVL_GRAIN, gather_piece, a);
}
