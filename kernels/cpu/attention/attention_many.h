/* Attention for many rows (prefill). Its limit is multiply-adds.
 *
 * The lanes of a vector are rows. Scores are S^T = K Q^T, with Q transposed once per task.
 * The sums are O += P V, where P^T is used as the softmax left it. Both products multiply a
 * broadcast of one operand by vectors of the other, so neither K nor V is ever transposed,
 * and the softmax is elementwise. Panels of Q are so small that a panel, a tile of K and one
 * of V share the first-level cache. */
#ifndef KVL_CPU_ATTENTION_MANY_H
#define KVL_CPU_ATTENTION_MANY_H

#include "args/attention.h"
#include "cpu/attention/attention.h"
#include "cpu/attention/product.h"

/* A panel has as many rows as one strip of a product has lanes. */
enum { PANEL = PRODUCT_LANES };
_Static_assert(TASK_ROWS % PANEL == 0, "panels tile a task");

/* Transposes VF x VF numbers. from_row, to_row: the distance of rows. */
static inline KVL_HOT void turn(const float *from, int from_row, float *to, int to_row) {
  vf x[VF];
  for (int i = 0; i < VF; i++) x[i] = vf_load(from, i * from_row, KVL_DTYPE_F32);
  vf_transpose(x);
  for (int i = 0; i < VF; i++) vf_store(to, i * to_row, x[i], KVL_DTYPE_F32);
}

/* Has the hook change the scores of VF rows, one row at a time. What lies behind key n is moved
 * with them, and does not change. */
static void hook_lanes(const struct task *t, const struct key_tile *tile, int n, int row0,
                       float *s) {
  int32_t indices[TILE_KEYS];
  float rows[VF * TILE_KEYS] __attribute__((aligned(64)));
  for (int k = 0; k < TILE_KEYS; k++) indices[k] = tile->index[k < n ? k : n - 1];
  for (int k = 0; k < n; k += VF) turn(s + k * PANEL, PANEL, rows + k, TILE_KEYS);
  for (int i = 0; i < VF && row0 + i < t->rows; i++)
    hook_row(t, row0 + i, indices, n, rows + i * TILE_KEYS);
  for (int k = 0; k < n; k += VF) turn(rows + k, TILE_KEYS, s + k * PANEL, PANEL);
}
static void keep_lanes(const struct task *t, const struct key_tile *tile, int n, int row0,
                       const float *s) {
  for (int i = 0; i < VF && row0 + i < t->rows; i++) {
    float *kept = kept_scores(t, row0 + i);
    for (int k = 0; k < n; k++) kept[tile->index[k]] = s[k * PANEL + i];
  }
}

/* Turns the scores s[key][lane] of VF rows, from row0 on, into weights. */
static inline KVL_HOT void softmax_lanes(const struct task *t, const struct key_tile *tile,
                                         int n, int row0, float *s, struct sums *sums,
                                         float *keep) {
  const float cap = t->args->soft_cap;
  vi index, first;
  memcpy(&index, t->index + row0, sizeof index);
  memcpy(&first, t->first + row0, sizeof first);
  if (cap > 0)
    for (int k = 0; k < n; k++) {
      vf x = vf_load(s, k * PANEL, KVL_DTYPE_F32);
      vf_store(s, k * PANEL, cap * vf_tanh(x), KVL_DTYPE_F32);
    }
  if (t->args->alibi) {
    vf slope = vf_load(t->slope, row0, KVL_DTYPE_F32);
    vi query;
    for (int i = 0; i < VF; i++) query[i] = kvl__position(index[i]);
    for (int k = 0; k < n; k++) {
      vf far = __builtin_convertvector(kvl__position(tile->index[k]) - query, vf);
      vf x = vf_load(s, k * PANEL, KVL_DTYPE_F32);
      vf_store(s, k * PANEL, vf_fma(slope, far, x), KVL_DTYPE_F32);
    }
  }
  if (t->hooked && t->hooked->hook) hook_lanes(t, tile, n, row0, s);
  if (hides_keys(t, tile, n, t->first[row0 + VF - 1], t->index[row0])) {
    const int32_t tree = tree_begin(t);
    for (int k = 0; k < n; k++) {
      vf x = vf_load(s, k * PANEL, KVL_DTYPE_F32);
      vi hidden = tile->index[k] < first;
      if (t->args->causal) hidden |= tile->index[k] > index;
      vf_store(s, k * PANEL, vf_select(hidden, vf_set(-INFINITY), x), KVL_DTYPE_F32);
      for (int i = 0; tile->index[k] >= tree && i < VF && row0 + i < t->rows; i++)
        if (tree_hides(t, row0 + i, tile->index[k])) s[k * PANEL + i] = -INFINITY;
    }
  }
  if (t->hooked && t->hooked->scores) keep_lanes(t, tile, n, row0, s);

  vf before = vf_load(sums->top, row0, KVL_DTYPE_F32), top = before, other = before;
  int k = 0;
  for (; k + 2 <= n; k += 2) { /* two chains: a maximum takes several cycles */
    top = vf_max(top, vf_load(s, k * PANEL, KVL_DTYPE_F32));
    other = vf_max(other, vf_load(s, (k + 1) * PANEL, KVL_DTYPE_F32));
  }
  if (k < n) top = vf_max(top, vf_load(s, k * PANEL, KVL_DTYPE_F32));
  top = vf_max(top, other);
  vf shift = vf_select((vi)(top == vf_set(-INFINITY)), vf_set(0), top);
  vf worth = vf_exp(before - shift), sum = worth * vf_load(sums->sum, row0, KVL_DTYPE_F32);
  for (k = 0; k < n; k++) {
    vf p = vf_exp(vf_load(s, k * PANEL, KVL_DTYPE_F32) - shift);
    vf_store(s, k * PANEL, p, KVL_DTYPE_F32);
    sum += p;
  }
  vf_store(sums->top, row0, top, KVL_DTYPE_F32);
  vf_store(sums->sum, row0, sum, KVL_DTYPE_F32);
  vf_store(keep, 0, worth, KVL_DTYPE_F32);
}

struct many_scratch {
  float q[TASK_ROWS * HEAD_DIM_MAX] __attribute__((aligned(64))); /* [panel][d][row] */
  float k[TILE_KEYS * HEAD_DIM_MAX] __attribute__((aligned(64)));
  float v[TILE_KEYS * HEAD_DIM_MAX] __attribute__((aligned(64)));
  float s[TILE_KEYS * PANEL] __attribute__((aligned(64))); /* [key][row] */
  float keep[PANEL] __attribute__((aligned(64)));
};

/* n: of rows that are padded, so a multiple of VF. */
static int all_finite(const float *x, int n) {
  vf zero[4] = {{0}}; /* chains: an addition takes several cycles */
  int i = 0;
  for (; i + 4 * VF <= n; i += 4 * VF)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) zero[j] += vf_load(x, i + j * VF, KVL_DTYPE_F32) * 0.0f;
  for (; i < n; i += VF) zero[0] += vf_load(x, i, KVL_DTYPE_F32) * 0.0f;
  return vf_sum(zero[0] + zero[1] + (zero[2] + zero[3])) == 0;
}

/* Adds the values of a tile to a panel's sums, without keys of weight 0: V of a hidden key
 * may be NaN or infinite, and 0 times that is NaN. */
static __attribute__((noinline)) void add_seen_values(const struct many_scratch *m, int n,
                                                      int row0, int rows, int padded,
                                                      struct sums *sums) {
  for (int i = 0; i < rows; i++) {
    float *values = sums->values + (row0 + i) * padded;
    for (int d = 0; d < padded; d++) values[d] *= m->keep[i];
    for (int k = 0; k < n; k++) {
      const float p = m->s[k * PANEL + i];
      if (p == 0) continue;
      for (int d = 0; d < padded; d++) values[d] += p * m->v[k * padded + d];
    }
  }
}

/* Attends from one panel of rows to the tile in m->k and m->v. */
static void attend_panel(const struct task *t, const struct key_tile *tile, int row0,
                         struct many_scratch *m, struct sums *sums) {
  int dim = t->args->cache.key.dim, padded = dim_padded(t->args->cache.value.dim);
  int rows = t->rows - row0 < PANEL ? t->rows - row0 : PANEL, vecs = (rows + VF - 1) / VF;
  int n = tile->n;
  if (!t->args->listed) { /* a walk over a list has only keys that its token sees */
    if (t->args->causal)  /* keys after the panel's last row are never computed */
      while (n > 0 && tile->index[n - 1] > t->index[row0 + rows - 1]) n--;
    if (n == 0 || tile->index[n - 1] < t->first[row0]) return;
  }
  multiply((struct product){.a = m->k,
                            .a_row = dim_padded(dim),
                            .a_step = 1,
                            .b = m->q + row0 * dim,
                            .b_row = PANEL,
                            .c = m->s,
                            .c_row = PANEL,
                            .depth = dim},
           n, vecs);
  for (int v = 0; v < vecs; v++)
    softmax_lanes(t, tile, n, row0 + v * VF, m->s + v * VF, sums, m->keep + v * VF);
  if ((t->hooked || hides_keys(t, tile, n, t->first[row0 + rows - 1], t->index[row0])) &&
      !all_finite(m->v, n * padded)) {
    add_seen_values(m, n, row0, rows, padded, sums);
    return;
  }
  for (int d = 0; d < padded; d += PANEL) {
    int left = (padded - d) / VF;
    multiply((struct product){.a = m->s,
                              .a_row = 1,
                              .a_step = PANEL,
                              .b = m->v + d,
                              .b_row = padded,
                              .c = sums->values + row0 * padded + d,
                              .c_row = padded,
                              .keep = m->keep,
                              .depth = n},
             rows, left < PRODUCT_VECS ? left : PRODUCT_VECS);
  }
}

static inline KVL_HOT void convert_rows(const struct key_tile *tile, int64_t offset, int dim,
                                        float *out, const int dtype) {
  int padded = dim_padded(dim);
  for (int k = 0; k < tile->n; k++, out += padded) {
    const char *x = tile->k[k] + offset;
    int d = 0;
    for (; d + VF <= dim; d += VF) vf_store(out, d, vf_load(x, d, dtype), KVL_DTYPE_F32);
    if (d < dim)
      vf_store(out, d, vf_load_n(at_const(x, d, dtype), VF / 2, dtype), KVL_DTYPE_F32);
  }
}

static void convert_tile(const struct kvl_strips *of, const struct key_tile *tile,
                         int64_t offset, float *out, int codec) {
  switch (codec) {
#define CASE(dtype) \
  case dtype: convert_rows(tile, offset, of->dim, out, dtype); break;
    CASE(KVL_DTYPE_F32)
    CASE(KVL_DTYPE_F16)
    CASE(KVL_DTYPE_BF16)
    CASE(KVL_DTYPE_F8E4M3)
#undef CASE
    default: unpack_tile(of, tile, NULL, offset, codec, out, dim_padded(of->dim));
  }
}

static void attend_many(const struct task *t, struct key_walk walk, struct sums *sums) {
  const struct kvl_paged_attention_args *a = t->args;
  int dim = a->cache.key.dim, value_dim = a->cache.value.dim;
  int panels = (t->rows + PANEL - 1) / PANEL;
  const float scale = query_scale(t);
  struct many_scratch m;
  memset(m.q, 0, (size_t)panels * PANEL * dim * sizeof(float));
  for (int i = 0; i < t->rows; i++) {
    int64_t row = (task_token(t, i) * a->heads + task_head(t, i)) * dim;
    float *q = m.q + i / PANEL * PANEL * dim + i % PANEL, x[HEAD_DIM_MAX];
    for (int d = 0; d < dim; d += VF)
      vf_store(
          x, d,
          scale * vf_load_n(at_const(a->q, row + d, a->dtype), vf_left(d, dim), a->dtype),
          KVL_DTYPE_F32);
    for (int d = 0; d < dim; d++) q[d * PANEL] = x[d];
  }
  sums_clear(sums, panels * PANEL, dim_padded(value_dim));
  struct key_tile tile;
  for (walk_tile(&walk, &tile); tile.n > 0; walk_tile(&walk, &tile)) {
    convert_tile(&a->cache.key, &tile, 0, m.k, a->cache.codec);
    convert_tile(&a->cache.value, &tile, walk.value, m.v, a->cache.codec);
    for (int row = 0; row < t->rows; row += PANEL) attend_panel(t, &tile, row, &m, sums);
  }
}

#endif
