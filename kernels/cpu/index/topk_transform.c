/* The k largest logits of each row's tokens, as indices, places or ragged indices.
 *   logits  f32 bf16  [rows, n]
 *   starts  i32       [rows]      optional: the column of a row's token 0
 *   lens    i32       [rows]
 *   out     i32       [rows, k]   in ascending order of indices, -1 padded
 * Exact: ties go to the lower index; -inf and NaN are never taken. A radix search finds
 * the k-th key (radix.h) if there are more than k tokens, and one more pass collects them.
 * Limit: the histogram of the first digit, about 1 ns an element. */
#include "args/index.h"
#include "cpu/select/radix.h"
#include "cpu/split.h"

static void best_of_row(const void *logits, int64_t n, int64_t k, int dtype,
                        struct kvl_row_transform t, int32_t *out) {
  const struct radix_run run = {logits, n, dtype};
  const uint32_t flip = 0xFFFFFFFFu;
  int64_t equals, found = 0;
  uint32_t last = radix_largest(&run, 1, n, k, &equals);
  RADIX_FIRST(run, flip, last, equals, out[found++] = kvl__transformed(t, (int32_t)i))
  while (found < k) out[found++] = -1;
}

static int topk_transform_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_topk_transform_args *g = args;
  for (int64_t r = begin; r < end; r++) {
    struct kvl_window w = kvl__window(g->starts ? g->starts[r] : 0, g->lens[r], 0, g->n);
    struct kvl_row_transform t = kvl__row_transform(&g->transform, r);
    best_of_row(at_const(g->logits, r * g->n + w.begin, g->dtype), w.count, g->k, g->dtype, t,
                g->out + r * g->k);
  }
  return 0;
}

KVL_CPU_KERNEL(topk_transform) {
  const struct kvl_topk_transform_args *g = args;
  if (g->k == 0) return 0;
  return kvl__split(g->rows, kvl__grain_rows(4 * g->n), topk_transform_piece, g);
}
