/* Running top-k: joins a tile of logits to the k largest of the columns before it.
 *   logits          f32 bf16  [rows, n]   columns first ... first + n - 1 of the whole row
 *   starts, lens    i32       [rows]      the row's tokens, in columns of the whole row
 *   kept_values     f32       [rows, k]   of the columns before, indices ascending
 *   kept_indices  i32       [rows, k]
 *   values          f32       [rows, k]   of those and the tile; -inf, -1 padded
 *   indices       i32       [rows, k]
 * The kept values and the row's part of the tile are two runs of one row, in the order of
 * indices. They are searched as in topk_transform: ties to the lower index, -inf and
 * NaN never taken, so padding is never taken either. Limit: as there, for n + k numbers. */
#include "args/index.h"
#include "cpu/select/radix.h"
#include "cpu/split.h"

static int topk_merge_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_topk_merge_args *g = args;
  const uint32_t flip = 0xFFFFFFFFu;
  for (int64_t r = begin; r < end; r++) {
    struct kvl_window w = kvl__window(g->starts ? g->starts[r] : 0, g->lens[r], g->first,
                                      g->n);
    const struct radix_run runs[2] = {
        {g->kept_values + r * g->k, i64_min(w.before, g->k), KVL_DTYPE_F32},
        {at_const(g->logits, r * g->n + w.begin, g->dtype), w.count, g->dtype}};
    const int32_t *kept = g->kept_indices + r * g->k;
    float *values = g->values + r * g->k;
    int32_t *indices = g->indices + r * g->k;
    int64_t equals, found = 0;
    uint32_t last = radix_largest(runs, 2, runs[0].n + runs[1].n, g->k, &equals);
    RADIX_FIRST(runs[0], flip, last, equals, {
      values[found] = f32_load(runs[0].a, i, D);
      indices[found++] = kept[i];
    })
    RADIX_FIRST(runs[1], flip, last, equals, {
      values[found] = f32_load(runs[1].a, i, D);
      indices[found++] = (int32_t)(w.before + i);
    })
    for (; found < g->k; found++) values[found] = -INFINITY, indices[found] = -1;
  }
  return 0;
}

KVL_CPU_KERNEL(topk_merge) {
  const struct kvl_topk_merge_args *g = args;
  if (g->k == 0) return 0;
  return kvl__split(g->rows, kvl__grain_rows(4 * (g->n + g->k)), topk_merge_piece, g);
}
