/* out[o][j][i] = the sum of a[o][0][i] ... a[o][j][i].
 *   a, out  f32 f16 bf16 i32 i64  [outer, n, inner]   may be the same memory
 * Floats are added in double and every sum is rounded once, so the error does not grow with
 * n. Whole numbers wrap. After a NaN every sum is NaN.
 * inner == 1: a thread takes whole rows, and waits for each addition. inner > 1: threads share
 * tiles of COLUMNS columns.
 * Limit: the latency of an addition, about 1 ns a number; for columns read plus write
 * bandwidth. */
#include "args/elementwise.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

enum { COLUMNS = 64 };

static inline KVL_HOT void floats(const struct kvl_cumsum_args *g, int64_t first, int columns,
                                  const int dtype) {
  double sum[COLUMNS] = {0};
  for (int64_t j = 0; j < g->n; j++) {
    int64_t at = first + j * g->inner;
    for (int c = 0; c < columns; c++) {
      sum[c] += (double)f32_load(g->a, at + c, dtype);
      f32_store(g->out, at + c, (float)sum[c], dtype);
    }
  }
}

#define WHOLES(T, U)                       \
  do {                                     \
    const T *a = (const T *)g->a + first;  \
    T *out = (T *)g->out + first;          \
    U sum[COLUMNS] = {0};                  \
    for (int64_t j = 0; j < g->n; j++)     \
      for (int c = 0; c < columns; c++) {  \
        sum[c] += (U)a[j * g->inner + c];  \
        out[j * g->inner + c] = (T)sum[c]; \
      }                                    \
  } while (0)

static int cumsum_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_cumsum_args *g = args;
  int64_t tiles = (g->inner + COLUMNS - 1) / COLUMNS;
  for (int64_t t = begin; t < end; t++) {
    int64_t c0 = t % tiles * COLUMNS, first = t / tiles * g->n * g->inner + c0;
    int columns = (int)i64_min(COLUMNS, g->inner - c0);
    if (g->dtype == KVL_DTYPE_I32) WHOLES(int32_t, uint32_t);
    else if (g->dtype == KVL_DTYPE_I64) WHOLES(int64_t, uint64_t);
    else if (columns == 1) KVL_BY_FLOAT(g->dtype, floats(g, first, 1, D))
    else KVL_BY_FLOAT(g->dtype, floats(g, first, columns, D))
  }
  return 0;
}

KVL_CPU_KERNEL(cumsum) {
  const struct kvl_cumsum_args *g = args;
  if (g->n == 0) return 0;
  int64_t tiles = (g->inner + COLUMNS - 1) / COLUMNS;
  return kvl__split(g->outer * tiles, kvl__grain_rows(g->n * i64_min(COLUMNS, g->inner)),
                    cumsum_piece, g);
}
