/* Turns indices of tokens into places or ragged indices; without indices, it takes all
 * lens[r] tokens of row r.
 *   indices  i32  [rows, k]   optional
 *   lens       i32  [rows]      read if indices is NULL
 *   out        i32  [rows, k]   -1 padded; may be indices
 * Limit: the bytes read and written. */
#include "args/index.h"
#include "cpu/split.h"
#include "cpu/vec.h"

static int transform_indices_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_transform_indices_args *g = args;
  for (int64_t r = begin; r < end; r++) {
    struct kvl_row_transform t = kvl__row_transform(&g->transform, r);
    for (int64_t i = 0; i < g->k; i++) {
      int64_t at = r * g->k + i;
      int32_t index = g->indices ? g->indices[at] : i < g->lens[r] ? (int32_t)i : -1;
      g->out[at] = kvl__transformed(t, index);
    }
  }
  return 0;
}

KVL_CPU_KERNEL(transform_indices) {
  const struct kvl_transform_indices_args *g = args;
  return kvl__split(g->rows, kvl__grain_rows(g->k), transform_indices_piece, g);
}
