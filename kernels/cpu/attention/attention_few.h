/* Attention for up to FEW_ROWS rows (decode). It reads K and V once, which is its limit.
 *
 * Rows of K and V are used where they lie, for several query heads at a time (dots.h). Blocks
 * are scattered, which defeats the hardware prefetcher at each border, so the keys of the
 * next tile are prefetched while this one is computed.
 *
 * paged_attention.c alone includes this file, and other kernels call its attend_few. */
#ifndef KVL_CPU_ATTENTION_FEW_H
#define KVL_CPU_ATTENTION_FEW_H

#include "cpu/attention/attention.h"

/* Lists the rows of the next tile in the order in which they are prefetched. It alternates
 * between STREAMS runs of keys: a block of 16 tokens is often a page, and the processor
 * follows several pages at once better than one after the other. Rows that the tile does not
 * have become `here`, a row that is loaded already. */
static void order_ahead(const struct key_tile *next, const char *here, const char **ahead) {
  enum { STREAMS = 4 };
  for (int i = 0; i < TILE_KEYS; i++) {
    int k = i % STREAMS * (TILE_KEYS / STREAMS) + i / STREAMS;
    ahead[i] = k < next->n ? next->k[k] : here;
  }
}

/* Turns scores[0 ... n) of task row r into weights. Returns the factor that the earlier sums
 * must be multiplied by. */
static float softmax_row(const struct task *t, int r, const struct key_tile *tile,
                         float *scores, struct sums *s) {
  int n = tile->n, n_vectors = dim_padded(n);
  const float cap = t->args->soft_cap;
  if (cap > 0)
    for (int k = 0; k < n; k += VF)
      vf_store(scores, k, cap * vf_tanh(vf_load(scores, k, KVL_DTYPE_F32)), KVL_DTYPE_F32);
  if (t->slope[r] != 0)
    for (int k = 0; k < n; k++)
      scores[k] += t->slope[r] * (float)kvl__apart(tile->index[k], t->index[r]);
  if (t->hooked && t->hooked->hook) hook_row(t, r, tile->index, n, scores);
  if (hides_keys(t, tile, n, t->first[r], t->index[r])) {
    int32_t last = t->args->causal ? t->index[r] : INT32_MAX, tree = tree_begin(t);
    for (int k = 0; k < n; k++)
      if (tile->index[k] > last || tile->index[k] < t->first[r] ||
          (tile->index[k] >= tree && tree_hides(t, r, tile->index[k])))
        scores[k] = -INFINITY;
  }
  if (t->hooked && t->hooked->scores) {
    float *kept = kept_scores(t, r);
    for (int k = 0; k < n; k++) kept[tile->index[k]] = scores[k];
  }
  for (int k = n; k < n_vectors; k++) scores[k] = -INFINITY;

  vf high = vf_set(s->top[r]), sum = {0};
  for (int k = 0; k < n; k += VF) high = vf_max(high, vf_load(scores, k, KVL_DTYPE_F32));
  float top = vf_hmax(high), shift = top == -INFINITY ? 0 : top;
  for (int k = 0; k < n; k += VF) {
    vf p = vf_exp(vf_load(scores, k, KVL_DTYPE_F32) - shift);
    vf_store(scores, k, p, KVL_DTYPE_F32);
    sum += p;
  }
  float keep = f32_exp(s->top[r] - shift);
  s->sum[r] = s->sum[r] * keep + vf_sum(sum);
  s->top[r] = top;
  return keep;
}

/* values[r][d ...] = values[r][d ...] * keep[r] + sum_k p[r][k] * v[k][d ...] for `rows` rows
 * and `vecs` vectors of d; a single vector may have fewer `lanes`. It also prefetches the
 * same part of the V rows of `ahead`. */
static inline KVL_HOT void add_values(const float *p, const float *keep,
                                      const struct key_tile *tile, const char *const *ahead,
                                      int64_t value, int d, int padded, float *values,
                                      const int rows, const int vecs, const int lanes,
                                      const int dtype) {
  const int bytes = kvl__float_bytes(dtype);
  vf sum[DOT_ROWS_MAX][4], x[4];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < vecs; j++)
      sum[r][j] = keep[r] * vf_load(values, r * padded + d + j * VF, KVL_DTYPE_F32);
  for (int k = 0; k < tile->n; k++) {
    const char *v = tile->k[k] + value;
    prefetch_some(ahead[k] + value + d * bytes, vecs * VF * bytes);
#pragma GCC unroll 4
    for (int j = 0; j + 2 <= vecs; j += 2)
      vf_load_pair(at_const(v, d + j * VF, dtype), dtype, &x[j], &x[j + 1]);
    if (vecs == 1) x[0] = vf_load_n(at_const(v, d, dtype), lanes, dtype);
#pragma GCC unroll 4
    for (int j = 0; j < vecs; j++)
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++)
        sum[r][j] = vf_fma(vf_set(p[r * TILE_KEYS + k]), x[j], sum[r][j]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < vecs; j++)
      vf_store(values, r * padded + d + j * VF, sum[r][j], KVL_DTYPE_F32);
}

/* The same for all d: pairs of vectors, and then the rest of head_dim. */
static inline KVL_HOT void add_all_values(const float *p, const float *keep,
                                          const struct key_tile *tile,
                                          const char *const *ahead, int64_t value, int dim,
                                          float *values, const int rows, const int dtype) {
  enum { VECS = VF == 16 ? 4 : 2 };
  const int padded = dim_padded(dim);
  int d = 0;
  for (; d + VECS * VF <= dim; d += VECS * VF)
    add_values(p, keep, tile, ahead, value, d, padded, values, rows, VECS, VF, dtype);
  if (VECS > 2 && d + 2 * VF <= dim) {
    add_values(p, keep, tile, ahead, value, d, padded, values, rows, 2, VF, dtype);
    d += 2 * VF;
  }
  if (TAIL_LANES > 0 && d + VF <= dim) {
    add_values(p, keep, tile, ahead, value, d, padded, values, rows, 1, VF, dtype);
    d += VF;
  }
  if (TAIL_LANES > 0 && TAIL_LANES < (int)VF && d < dim)
    add_values(p, keep, tile, ahead, value, d, padded, values, rows, 1, TAIL_LANES, dtype);
}

/* Functions for one dtype, and the choice between them. */
typedef void add_function(const float *p, const float *keep, const struct key_tile *tile,
                          const char *const *ahead, int64_t value, int dim, float *values);
#define FUNCTION(name, rows, type)                                                           \
  static KVL_APART void name(const float *p, const float *keep, const struct key_tile *tile, \
                             const char *const *ahead, int64_t value, int dim,               \
                             float *values) {                                                \
    add_all_values(p, keep, tile, ahead, value, dim, values, rows, KVL_DTYPE_##type);        \
  }
#define FUNCTIONS(type)          \
  FUNCTION(add1_##type, 1, type) \
  FUNCTION(add2_##type, 2, type) \
  FUNCTION(add4_##type, 4, type)
FUNCTIONS(F32)
FUNCTIONS(F16)
FUNCTIONS(BF16)
FUNCTIONS(F8E4M3)

static add_function *add_function_of(int rows, int dtype) {
#define CHOOSE(type) rows == 1 ? add1_##type : rows == 2 ? add2_##type : add4_##type
  switch (dtype) {
    case KVL_DTYPE_F32: return CHOOSE(F32);
    case KVL_DTYPE_F16: return CHOOSE(F16);
    case KVL_DTYPE_BF16: return CHOOSE(BF16);
    default: return CHOOSE(F8E4M3);
  }
#undef CHOOSE
}

/* Does one of `rows` rows give one of n keys the weight 0? */
static int some_are_zero(const float *p, int n, int rows) {
  int zero = 0;
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < n; k++) zero |= p[r * TILE_KEYS + k] == 0;
  return zero;
}

/* The tile without the keys to which a row gives the weight 0, because their V may be NaN;
 * the other weights become neighbours. */
static struct key_tile without_zeros(const struct key_tile *tile, float *p) {
  struct key_tile seen;
  seen.n = 0;
  for (int k = 0; k < tile->n; k++) {
    seen.k[seen.n] = tile->k[k];
    p[seen.n] = p[k];
    seen.n += p[k] != 0;
  }
  return seen;
}

/* A tile of a codec that packs numbers, as f32. */
struct unpacked {
  float k[TILE_KEYS * HEAD_DIM_MAX] __attribute__((aligned(64)));
  float v[TILE_KEYS * HEAD_DIM_MAX] __attribute__((aligned(64)));
};

/* Takes 1, 2 or 4 rows at a time. room: NULL for codecs that do not pack. */
static KVL_APART void attend_tiles(const struct task *t, struct key_walk walk, struct sums *s,
                                   struct unpacked *room) {
  const int dim = t->args->cache.key.dim, padded = dim_padded(dim);
  const int value_dim = t->args->cache.value.dim, value_padded = dim_padded(value_dim);
  const int codec = t->args->cache.codec, dtype = rows_dtype(codec);
  const int rows = dot_rows(t->rows);
  const struct kvl_pages *c = &t->args->cache;
  const int64_t value = room && walk.value ? (char *)room->v - (char *)room->k : walk.value;
  const int all = (t->rows + rows - 1) / rows * rows;
  add_function *add = add_function_of(rows, dtype), *add_row = add_function_of(1, dtype);
  float q[FEW_ROWS * HEAD_DIM_MAX] __attribute__((aligned(64)));
  float p[FEW_ROWS * TILE_KEYS] __attribute__((aligned(64)));
  float keep[FEW_ROWS] = {0}, scale = query_scale(t);
  struct key_tile tiles[2], *now = tiles, *next = tiles + 1;
  const char *ahead[TILE_KEYS];

  memset(q, 0, (size_t)all * padded * sizeof *q);
  for (int i = 0; i < t->rows; i++)
    load_query(t->args->q, task_token(t, i) * t->args->heads + task_head(t, i), dim, scale,
               t->args->dtype, dtype, q + i * padded);
  sums_clear(s, all, value_padded);

  walk_tile(&walk, now);
  for (int k = 0; k < now->n; k++) {
    prefetch(now->k[k], 0, walk.bytes_token);
    prefetch(now->k[k] + walk.value, 0, walk.bytes_token);
  }
  while (now->n > 0) {
    walk_tile(&walk, next);
    if (room) {
      unpack_tile(&c->key, now, next, 0, codec, room->k, padded);
      if (value) unpack_tile(&c->value, now, next, walk.value, codec, room->v, padded);
      for (int k = 0; k < now->n; k++) now->k[k] = (const char *)(room->k + k * padded);
      for (int k = 0; k < TILE_KEYS; k++) ahead[k] = now->k[0];
    } else {
      order_ahead(next, now->k[0], ahead);
    }
    for (int k = now->n; k % VF; k++) {
      now->k[k] = now->k[now->n - 1];
      now->index[k] = now->index[now->n - 1];
    }
    const struct dots scores = {.q = q,
                                .x = now->k,
                                .soon = ahead,
                                .out = p,
                                .out_row = TILE_KEYS,
                                .rows = t->rows,
                                .keys = now->n,
                                .dim = dim,
                                .dtype = dtype};
    KVL_CPU_NAME(dots)(&scores);
    for (int r = 0; r < t->rows; r++) keep[r] = softmax_row(t, r, now, p + r * TILE_KEYS, s);
    for (int r = 0; r < all; r += rows) {
      float *pr = p + r * TILE_KEYS;
      float *values = s->values + r * value_padded;
      if (!some_are_zero(pr, now->n, t->rows - r < rows ? t->rows - r : rows)) {
        add(pr, keep + r, now, ahead, value, value_dim, values);
        continue;
      }
      for (int i = 0; i < rows && r + i < t->rows; i++) {
        const struct key_tile seen = without_zeros(now, pr + i * TILE_KEYS);
        add_row(pr + i * TILE_KEYS, keep + r + i, &seen, ahead, value, value_dim,
                values + i * value_padded);
      }
    }
    struct key_tile *done = now;
    now = next;
    next = done;
  }
  for (int r = 0; r < t->rows; r++)
    restore_row(s->values + r * value_padded, value_dim, dtype);
}

static KVL_APART void attend_unpacked(const struct task *t, struct key_walk walk,
                                      struct sums *s) {
  struct unpacked room;
  attend_tiles(t, walk, s, &room);
}

void KVL_CPU_NAME(attend_few)(const struct task *t, struct key_walk walk, struct sums *s) {
  if (kvl__packs(t->args->cache.codec)) attend_unpacked(t, walk, s);
  else attend_tiles(t, walk, s, NULL);
}

#endif
