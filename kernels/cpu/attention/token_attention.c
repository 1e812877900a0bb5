/* out = softmax(scale * q k^T) v over the listed tokens of each row.
 *   q       f32 f16 bf16  [rows, heads, head_dim]
 *   cache   like q, or f8e4m3; any of them when q is f32
 *                         [blocks, 2, kv_heads, block_size, head_dim]
 *   places  i32           [rows, kv_heads or 1, k]
 *   out     like q, or f32  [rows, heads, head_dim]
 *   lse     f32           [rows, heads]   optional
 * Alignment: none. fp32 accumulation; 1e-5 of an f32 result against double.
 *
 * Bytes   2 k head_dim bytes(cache) per row and KV head, once for a group of up to FEW_ROWS
 * Limit   memory, which is read in scattered runs of head_dim elements
 *
 * The inner loop is that of paged decode (attention_few.h), for which each row is a sequence
 * of its own. Only the walk over the keys differs: it follows a list of tokens instead of
 * blocks. */
#include "args/attention.h"
#include "cpu/attention/attention.h"
#include "cpu/split.h"

/* Opens the walk over a row's list for a KV head. */
static struct key_walk open_list(const struct kvl_token_attention_args *a, int64_t row,
                                 int64_t kv_head) {
  const struct kvl_pages *c = &a->cache;
  const int64_t key = kvl__strip_at(c, &c->key, 0, kv_head);
  int64_t list = row * a->place_heads + (a->place_heads > 1 ? kv_head : 0);
  return (struct key_walk){
      .cache = (const char *)c->memory + key,
      .tokens = a->places + list * a->k,
      .blocks = c->blocks,
      .bytes_block = c->bytes_page,
      .bytes_token = c->key.bytes_row,
      .scales = c->key.scales,
      .bytes_scales = 2 * c->key.groups,
      .value = kvl__strip_at(c, &c->value, 0, kv_head) - key,
      .entry_end = a->k,
      .block_size = c->block_size,
  };
}

static void write_head(const struct kvl_token_attention_args *a, int64_t row, float unit,
                       const float *values, float top, float sum) {
  const int dim = a->cache.value.dim;
  for (int d = 0; d < dim; d += VF) {
    vf x = sum == 0 ? vf_set(0) : vf_load(values, d, KVL_DTYPE_F32) * (unit / sum);
    vf_store_n(at(a->out, row * dim + d, a->out_dtype), x, vf_left(d, dim), a->out_dtype);
  }
  if (a->lse) a->lse[row] = sum == 0 ? -INFINITY : top + logf(sum);
}

/* Attends for one row with up to FEW_ROWS heads of a KV head's group, from `first` on. */
static void attend_heads(const struct kvl_token_attention_args *a, int64_t row,
                         int64_t kv_head, int first) {
  const int group = (int)(a->heads / a->cache.kv_heads),
            padded = dim_padded(a->cache.value.dim);
  const struct kvl_paged_attention_args paged = {
      .cache = a->cache, .q = a->q, .heads = a->heads, .scale = a->scale, .dtype = a->dtype};
  struct task t = {.args = &paged,
                   .token = row,
                   .row = first,
                   .kv_head = (int)kv_head,
                   .group = group,
                   .rows = (int)i64_min(FEW_ROWS, group - first)};
  struct sums sums;
  KVL_CPU_NAME(attend_few)(&t, open_list(a, row, kv_head), &sums);
  const float unit = a->cache.v_scale ? a->cache.v_scale[kv_head] : 1;
  for (int i = 0; i < t.rows; i++)
    write_head(a, row * a->heads + task_head(&t, i), unit, sums.values + i * padded,
               sums.top[i], sums.sum[i]);
}

/* A task is a row and a KV head. Consecutive tasks share a row's list. */
static int attend_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_token_attention_args *a = args;
  const int64_t kv_heads = a->cache.kv_heads, group = a->heads / kv_heads;
  for (int64_t i = begin; i < end; i++)
    for (int64_t first = 0; first < group; first += FEW_ROWS)
      attend_heads(a, i / kv_heads, i % kv_heads, (int)first);
  return 0;
}

KVL_CPU_KERNEL(token_attention) {
  const struct kvl_token_attention_args *a = args;
  int64_t work = a->k * (a->cache.key.dim + a->cache.value.dim) *
                 (a->heads / a->cache.kv_heads);
  return kvl__split(a->rows * a->cache.kv_heads, kvl__grain_rows(work), attend_piece, a);
}
