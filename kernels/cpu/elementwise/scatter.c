/* out[r][index[r][j]] = src[r][j], or += if `add`. An index out of range is skipped; no index
 * may come twice in one row.
 *   src    f32 i32   [rows, m]
 *   index  i32       [rows, m]
 *   out    like src  [rows, n]
 * Limit: latency if out is larger than the cache. */
#include "args/elementwise.h"
#include "cpu/split.h"
#include "cpu/vec.h"

#define SCATTER(T, ASSIGN)                                         \
  for (int64_t i = begin; i < end;) {                              \
    int64_t r = i / a->m, stop = i64_min(end, (r + 1) * a->m);     \
    T *out = (T *)a->out + r * a->n;                               \
    for (; i < stop; i++) {                                        \
      int64_t j = a->index[i];                                     \
      if (j >= 0 && j < a->n) out[j] ASSIGN((const T *)a->src)[i]; \
    }                                                              \
  }

static int scatter_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_scatter_args *a = args;
  if (!a->add) SCATTER(uint32_t, =)
  else if (a->dtype == KVL_DTYPE_F32) SCATTER(float, +=)
  else SCATTER(uint32_t, +=) /* wraps */
  return 0;
}

KVL_CPU_KERNEL(scatter) {
  const struct kvl_scatter_args *a = args;
  return kvl__split(a->rows * a->m, KVL_GRAIN, scatter_piece, a);
}
