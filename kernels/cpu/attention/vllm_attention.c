/* Attention of one query token per sequence over vLLM's cache layout.
 *   q            f32 f16 bf16  [seqs, heads, head_dim]
 *   key_cache    like q, or f8e4m3  [blocks, kv_heads, head_dim / x, block_size, x]
 *   value_cache  like key_cache     [blocks, kv_heads, head_dim, block_size]
 *   tables       i32  [seqs, max_blocks]
 *   lens         i32  [seqs]
 *   alibi        f32  [heads]   optional
 *   out          like q        [seqs, heads, head_dim]
 * x = 16 / bytes of an element of the caches; fp32 accumulation.
 *
 * V1 and V2 differ in the work that a thread block of a GPU takes. Here a core takes a head,
 * block by block, so one loop serves both. It is the online softmax of Milakov and Gimelshein
 * 2018. */
#include "args/attention.h"
#include "cpu/split.h"
#include "cpu/vec.h"

enum { HEAD_DIM_MAX = 256, BLOCK_SIZE_MAX = 32 };

/* q = scale * row `row` of the queries. */
static KVL_APART void load_row(const struct kvl_vllm_attention_args *a, int64_t row,
                               float scale, float *q) {
  const int dim = a->cache.head_dim;
  for (int d = 0; d < dim; d++) q[d] = scale * f32_load(a->q, row * dim + d, a->dtype);
}

/* Row `row` of the result: values / sum, or zeros if there was no key. */
static KVL_APART void store_row(const struct kvl_vllm_attention_args *a, int64_t row,
                                const float *values, float sum) {
  const float v_scale = a->cache.v_scale ? *a->cache.v_scale : 1;
  const int dim = a->cache.head_dim;
  for (int d = 0; d < dim; d++)
    f32_store(a->out, row * dim + d, sum == 0 ? 0 : values[d] * v_scale / sum, a->dtype);
}

static inline KVL_HOT void attend(const struct kvl_vllm_attention_args *a, int64_t row,
                                  const int dtype) {
  const struct kvl_vllm_view *c = &a->cache;
  const int x = 16 / kvl__float_bytes(dtype), step = x < VF ? x : VF, dim = c->head_dim;
  const int64_t seq = row / a->heads, head = row % a->heads, size = c->block_size;
  const int64_t len = i64_max(0, i64_min(a->lens[seq], a->max_blocks * size));
  const float slope = a->alibi ? a->alibi[head] : 0;
  const float scale = a->scale * (c->k_scale ? *c->k_scale : 1);
  float q[HEAD_DIM_MAX], values[HEAD_DIM_MAX] = {0}, weights[BLOCK_SIZE_MAX];
  float top = -INFINITY, sum = 0;
  load_row(a, row, scale, q);

  for (int64_t block = 0; block * size < len; block++) {
    const int64_t physical = a->tables[seq * a->max_blocks + block];
    if (physical < 0 || physical >= c->blocks) continue; /* an invalid entry has no keys */
    const int64_t kv_head = head / (a->heads / c->kv_heads);
    const int64_t slice = (physical * c->kv_heads + kv_head) * size * dim;
    const int tokens = (int)i64_min(size, len - block * size);
    const float before = top;
    for (int t = 0; t < tokens; t++) { /* x elements of a key lie together */
      vf qk = {0};
      for (int d = 0; d < dim; d += step) {
        int64_t at_k = slice + (d / x * size + t) * x + d % x;
        qk += vf_load_n(q + d, step, KVL_DTYPE_F32) *
              vf_load_n(at_const(c->keys, at_k, dtype), step, dtype);
      }
      weights[t] = vf_sum(qk) + slope * (float)(block * size + t - len + 1);
      top = weights[t] > top ? weights[t] : top;
    }
    const float keep = before == top ? 1 : expf(before - top);
    sum *= keep;
    for (int t = 0; t < tokens; t++) sum += weights[t] = expf(weights[t] - top);
    for (int d = 0; d < dim; d++) { /* the tokens of a row of V lie together */
      vf wv = {0};
      for (int t = 0; t < tokens; t += VF) {
        const int lanes = vf_left(t, tokens);
        wv += vf_load_n(weights + t, lanes, KVL_DTYPE_F32) *
              vf_load_n(at_const(c->values, slice + d * size + t, dtype), lanes, dtype);
      }
      values[d] = values[d] * keep + vf_sum(wv);
    }
  }
  store_row(a, row, values, sum);
}

static int attend_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_vllm_attention_args *a = args;
  for (int64_t row = begin; row < end; row++) KVL_BY_STORED(a->cache.dtype, attend(a, row, D))
  return 0;
}

KVL_CPU_KERNEL(vllm_attention) {
  const struct kvl_vllm_attention_args *a = args;
  int64_t work = a->max_blocks * a->cache.block_size * a->cache.head_dim;
  return kvl__split(a->seqs * a->heads, kvl__grain_rows(work), attend_piece, a);
}
