/* Sets rows of numbers in a memory, or adds to them, and saves the old numbers. See
 * kvl_update_rows in runtime/kvlab.h.
 * Limit: reads values and writes memory, and as much again if it saves old numbers or adds
 * to them. */
#include "args/evict.h"
#include "cpu/split.h"
#include "cpu/vec.h"

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_update_rows_args *a = args;
  for (int64_t r = begin; r < end; r++)
    for (int64_t i = 0; i < a->n; i++) kvl__update(a, r, i);
  return 0;
}

KVL_CPU_KERNEL(update_rows) {
  const struct kvl_update_rows_args *a = args;
  return kvl__split(a->rows, kvl__grain_rows(a->n), rows_piece, a);
}
