/* A layer of experts: y[r] = sum of weights[r][j] * down[e] (silu(g) * u) over j, where e =
 * chosen[r][j], and g and u are the halves of gate_up[e] x[r]; then out = y or out += y.
 *   x, out   f32 f16 bf16  [rows, k]
 *   chosen   i32           [rows, active]
 *   weights  f32           [rows, active]
 *   gate_up  like x        [experts, 2 * inner, k]
 *   down     like x        [experts, k, inner]
 * The rows of each expert are collected, at most PANEL_ROWS at a time, and linear multiplies
 * them. Sums stay in f32 until all experts have been added.
 * Limit: that of linear, for the experts that were chosen.
 * Workspace: see room_of. */
#include "args/linear.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

enum { PANEL_ROWS = 256 };

kvl_kernel KVL_CPU_NAME(linear);
size_t KVL_CPU_WORKSPACE_NAME(linear)(const void *args);

/* Where things are in the workspace, in bytes: the rows of a panel, what lies between its two
 * products, and what the second one gives; the sums of all rows; for each expert where its
 * pairs begin, and the pairs r * active + j by expert; the workspace of linear. */
struct room {
  size_t h, between, y, sums, starts, pairs, linear, bytes;
};

static size_t take(size_t *bytes, int64_t count, int64_t element) {
  size_t at = *bytes;
  *bytes += ((size_t)count * (size_t)element + 63) / 64 * 64;
  return at;
}

/* The two products of an expert's rows, whose addresses come later. */
static struct kvl_linear_args product(const struct kvl_experts_args *g, int64_t rows,
                                      int is_up) {
  struct kvl_linear_args p = {.rows = rows,
                              .n = is_up ? 2 * g->inner : g->k,
                              .k = is_up ? g->k : g->inner,
                              .form = is_up ? KVL_LINEAR_SWIGLU : KVL_LINEAR_PLAIN,
                              .dtype = g->dtype,
                              .norm_dtype = g->dtype,
                              .out_dtype = is_up ? g->dtype : KVL_DTYPE_F32,
                              .parts = 1};
  p.columns[0] = is_up ? g->inner : g->k;
  return p;
}

static struct room room_of(const struct kvl_experts_args *g) {
  const int element = g->dtype == KVL_DTYPE_F32 ? 4 : 2;
  const int64_t pairs = g->rows * g->active, rows = i64_min(pairs, PANEL_ROWS);
  const struct kvl_linear_args up = product(g, rows, 1), down = product(g, rows, 0);
  const size_t by_up = KVL_CPU_WORKSPACE_NAME(linear)(&up);
  const size_t by_down = KVL_CPU_WORKSPACE_NAME(linear)(&down);
  struct room r = {0};
  r.h = take(&r.bytes, rows * g->k, element);
  r.between = take(&r.bytes, rows * g->inner, element);
  r.y = take(&r.bytes, rows * g->k, 4);
  r.sums = take(&r.bytes, g->rows * g->k, 4);
  r.starts = take(&r.bytes, g->experts + 1, 4);
  r.pairs = take(&r.bytes, pairs, 4);
  r.linear = take(&r.bytes, 1, i64_max((int64_t)by_up, (int64_t)by_down));
  return r;
}

KVL_CPU_WORKSPACE(experts) { return room_of(args).bytes; }

/* Sorts the pairs by their expert: those of expert e are pairs[starts[e]] ... */
static void sort_pairs(const struct kvl_experts_args *g, int32_t *starts, int32_t *pairs) {
  const int64_t n = g->rows * g->active;
  memset(starts, 0, (size_t)(g->experts + 1) * sizeof *starts);
  for (int64_t i = 0; i < n; i++)
    if (g->chosen[i] >= 0 && g->chosen[i] < g->experts) starts[g->chosen[i] + 1]++;
  for (int64_t e = 0; e < g->experts; e++) starts[e + 1] += starts[e];
  for (int64_t i = 0; i < n; i++)
    if (g->chosen[i] >= 0 && g->chosen[i] < g->experts)
      pairs[starts[g->chosen[i]]++] = (int32_t)i;
  for (int64_t e = g->experts; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
}

/* Rows of one expert. */
struct panel {
  const struct kvl_experts_args *g;
  const int32_t *pairs;
  int64_t rows;
  char *h;
  const float *y;
  float *sums;
};

static int collect_piece(const void *args, int64_t begin, int64_t end) {
  const struct panel *p = args;
  const size_t bytes = (size_t)p->g->k * (p->g->dtype == KVL_DTYPE_F32 ? 4 : 2);
  for (int64_t i = begin; i < end; i++)
    memcpy(p->h + (size_t)i * bytes,
           (const char *)p->g->x + (size_t)(p->pairs[i] / p->g->active) * bytes, bytes);
  return 0;
}

/* Adds columns [begin, end) of what the expert gives. */
static int add_piece(const void *args, int64_t begin, int64_t end) {
  const struct panel *p = args;
  const int64_t k = p->g->k;
  for (int64_t i = 0; i < p->rows; i++) {
    const float weight = p->g->weights[p->pairs[i]], *y = p->y + i * k;
    float *sums = p->sums + p->pairs[i] / p->g->active * k;
    for (int64_t j = begin; j < end; j++) sums[j] += weight * y[j];
  }
  return 0;
}

static inline KVL_HOT void store(const struct panel *p, int64_t begin, int64_t end,
                                 const int dtype) {
  for (int64_t j = begin; j < end; j += VF) {
    const int left = vf_left(j, end);
    void *out = at(p->g->out, j, dtype);
    vf y = vf_load_n(p->sums + j, left, KVL_DTYPE_F32);
    if (p->g->form == KVL_LINEAR_ADD) y += vf_load_n(out, left, dtype);
    vf_store_n(out, y, left, dtype);
  }
}
static int store_piece(const void *args, int64_t begin, int64_t end) {
  const struct panel *p = args;
  KVL_BY_FLOAT(p->g->dtype, store(p, begin, end, D))
  return 0;
}

static int multiply(const struct panel *p, int64_t expert, const struct room *room,
                    void *queue) {
  const struct kvl_experts_args *g = p->g;
  const size_t matrix = (size_t)(g->k * g->inner) * (g->dtype == KVL_DTYPE_F32 ? 4 : 2);
  char *workspace = g->workspace;
  struct kvl_linear_args up = product(g, p->rows, 1), down = product(g, p->rows, 0);
  up.x = p->h, up.weight = (const char *)g->gate_up + 2 * matrix * (size_t)expert;
  down.x = up.out = workspace + room->between;
  down.weight = (const char *)g->down + matrix * (size_t)expert;
  down.out = workspace + room->y;
  up.outs[0] = up.out, down.outs[0] = down.out;
  up.workspace = down.workspace = workspace + room->linear;
  int status = KVL_CPU_NAME(linear)(&up, queue);
  return status < 0 ? status : KVL_CPU_NAME(linear)(&down, queue);
}

KVL_CPU_KERNEL(experts) {
  const struct kvl_experts_args *g = args;
  const int64_t count = g->rows * g->k;
  if (count == 0) return 0;
  const struct room room = room_of(g);
  char *workspace = g->workspace;
  int32_t *starts = (int32_t *)(workspace + room.starts);
  int32_t *pairs = (int32_t *)(workspace + room.pairs);
  struct panel p = {g,
                    NULL,
                    0,
                    workspace + room.h,
                    (const float *)(workspace + room.y),
                    (float *)(workspace + room.sums)};
  sort_pairs(g, starts, pairs);
  memset(p.sums, 0, (size_t)count * sizeof *p.sums);
  for (int64_t e = 0; e < g->experts; e++)
    for (int64_t i = starts[e]; i < starts[e + 1]; i += p.rows) {
      p.pairs = pairs + i;
      p.rows = i64_min(starts[e + 1] - i, PANEL_ROWS);
      int status = kvl__split(p.rows, kvl__grain_rows(g->k), collect_piece, &p);
      if (status >= 0) status = multiply(&p, e, &room, queue);
      if (status >= 0) status = kvl__split(g->k, kvl__grain_rows(p.rows), add_piece, &p);
      if (status < 0) return status;
    }
  return kvl__split(count, KVL_GRAIN, store_piece, &p);
}
