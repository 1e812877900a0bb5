/* Chooses the experts of each row, as kvl_route says.
 *   logits   f32 f16 bf16  [rows, experts]
 *   bias     f32           [experts], optional
 *   chosen   i32           [rows, active + shared]
 *   weights  f32           [rows, active + shared]
 * Limit: the exponentials of a row, and `active` passes over its experts. */
#include "args/linear.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

/* Is a better than b? NaN is below every number. */
static int is_better(float a, float b) { return a > b || (b != b && a == a); }

/* The scores of a row's experts. */
static void score_row(const struct kvl_route_args *g, float *score) {
  const int64_t n = g->experts;
  if (g->router.is_sigmoid) {
    for (int64_t e = 0; e < n; e++) score[e] = 1.0f / (1.0f + expf(-score[e]));
    return;
  }
  float most = -INFINITY, sum = 0;
  for (int64_t e = 0; e < n; e++) most = is_better(score[e], most) ? score[e] : most;
  for (int64_t e = 0; e < n; e++) sum += score[e] = expf(score[e] - most);
  for (int64_t e = 0; e < n; e++) score[e] /= sum;
}

/* Closes all experts but those of the best groups. */
static void close_groups(const struct kvl_route_args *g, const float *choice,
                         uint8_t *is_closed) {
  const int64_t groups = g->router.groups, each = g->experts / groups;
  float worth[KVL_EXPERTS_MOST];
  for (int64_t i = 0; i < groups; i++) {
    float best = NAN, next = NAN;
    for (int64_t e = i * each; e < (i + 1) * each; e++) {
      if (is_better(choice[e], best)) next = best, best = choice[e];
      else if (is_better(choice[e], next)) next = choice[e];
    }
    worth[i] = g->router.is_sigmoid && each > 1 ? best + next : best;
  }
  for (int64_t i = 0; i < groups; i++) {
    int64_t better = 0;
    for (int64_t j = 0; j < groups; j++)
      better += is_better(worth[j], worth[i]) || (j < i && !is_better(worth[i], worth[j]));
    if (better >= g->router.open_groups) memset(is_closed + i * each, 1, (size_t)each);
  }
}

static void route_row(const struct kvl_route_args *g, int64_t row, float *score) {
  const int64_t n = g->experts;
  const int64_t shared = g->router.shared, columns = g->active + shared;
  int32_t *chosen = g->chosen + row * columns;
  float *weights = g->weights + row * columns, choice[KVL_EXPERTS_MOST], sum = 0;
  uint8_t is_closed[KVL_EXPERTS_MOST] = {0};
  score_row(g, score);
  for (int64_t e = 0; e < n; e++) choice[e] = g->bias ? score[e] + g->bias[e] : score[e];
  if (g->router.open_groups < g->router.groups) close_groups(g, choice, is_closed);
  for (int64_t j = 0; j < g->active; j++) {
    int64_t best = -1;
    for (int64_t e = 0; e < n; e++)
      if (!is_closed[e] && (best < 0 || is_better(choice[e], choice[best]))) best = e;
    is_closed[best] = 1;
    chosen[j] = (int32_t)best;
    sum += weights[j] = score[best];
  }
  const float by = g->router.is_normed ? sum + 1e-20f : 1.0f; /* all of them may be 0 */
  for (int64_t j = 0; j < g->active; j++) weights[j] = weights[j] / by * g->router.factor;
  for (int64_t j = 0; j < shared; j++)
    chosen[g->active + j] = (int32_t)(n + j), weights[g->active + j] = 1;
}

static inline KVL_HOT void rows(const struct kvl_route_args *g, int64_t begin, int64_t end,
                                const int dtype) {
  float score[KVL_EXPERTS_MOST];
  for (int64_t r = begin; r < end; r++) {
    for (int64_t e = 0; e < g->experts; e++)
      score[e] = f32_load(g->logits, r * g->experts + e, dtype);
    route_row(g, r, score);
  }
}

static int route_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_route_args *g = args;
  KVL_BY_FLOAT(g->dtype, rows(g, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(route) {
  const struct kvl_route_args *g = args;
  return kvl__split(g->rows, kvl__grain_rows(g->experts * (4 + g->active)), route_piece, g);
}
