/* Arguments of the ops that read and write KV memory, and of attention.
 * Shapes, dtypes and meanings are those of runtime/kvlab.h; optional pointers may be NULL. */
#ifndef KVL_ARGS_ATTENTION_H
#define KVL_ARGS_ATTENTION_H

#include "page.h"

struct kvl_append_kv_args {
  struct kvl_pages cache;
  const void *k, *v;
  const int64_t *places;
  int64_t tokens;
  int32_t dtype; /* of k and v */
};
struct kvl_rope_append_args {
  struct kvl_pages cache;
  void *q; /* changed in place; k and v stay as they are */
  const void *k, *v;
  const int32_t *positions;
  const float *inv_freq;
  const int64_t *places;
  int64_t tokens, heads; /* heads: of q */
  int64_t pairs, first;  /* number first + i and first + pairs + i are pair i */
  int32_t dtype;         /* of q, k and v */
};
struct kvl_copy_blocks_args {
  void *memory;
  const int32_t *src, *dst;
  int64_t blocks, bytes_block, n;
};
struct kvl_read_blocks_args {
  struct kvl_pages cache;
  const int32_t *blocks;
  void *k, *v; /* optional [n, kv_heads, block_size, head_dim] */
  int64_t n;
  int32_t dtype; /* of k and v */
};
struct kvl_paged_attention_args {
  struct kvl_pages cache;
  const void *q;
  const int32_t *tables;            /* [seqs, max_blocks] */
  const int32_t *lens;              /* [seqs] */
  const int32_t *starts;            /* optional [seqs + 1]; NULL: tokens == seqs */
  const int32_t *selection;         /* optional [seqs, selection_heads, max_selected] */
  const int32_t *listed;            /* optional [tokens, selection_heads, max_selected] */
  const int32_t *slots;             /* optional [seqs or, listed, tokens, slot_heads, ...] */
  const float *alibi;               /* optional [heads] */
  const float *prev_out, *prev_lse; /* optional: merged with the result */
  void *out;
  float *lse; /* optional [tokens, heads] */
  void *workspace;
  int64_t tokens, seqs, heads, max_blocks, max_selected, selection_heads, slot_heads;
  float scale, soft_cap;                    /* soft_cap 0: none */
  int32_t causal, window, dtype, out_dtype; /* window 0: none. dtype: of q */
  const uint64_t *tree;                     /* optional [tokens, tree_words] */
  int32_t tree_words;                       /* 0: no tree */
};
struct kvl_merge_attention_args {
  const void *out_a, *out_b;
  const float *lse_a, *lse_b;
  void *out;
  float *lse;             /* optional */
  int64_t rows, head_dim; /* rows = tokens * heads */
  int32_t dtype;
};

/* One layer's KV memory in vLLM's layout, see runtime/kvlab.h. In either cache, one KV head
 * of one block takes head_dim * block_size elements. Compute offsets in int64. */
struct kvl_vllm_view {
  void *keys, *values;
  const float *k_scale, *v_scale; /* optional [1], of an f8e4m3 cache */
  int64_t blocks;
  int32_t kv_heads, head_dim, block_size, dtype;
};
struct kvl_vllm_append_args {
  struct kvl_vllm_view cache;
  const void *k, *v;
  const int64_t *places;
  int64_t tokens;
  int32_t dtype; /* of k and v */
};
struct kvl_vllm_attention_args {
  struct kvl_vllm_view cache;
  const void *q;
  const int32_t *tables, *lens;
  const float *alibi; /* optional [heads] */
  void *out;
  void *workspace;
  int64_t seqs, heads, max_blocks;
  float scale;
  int32_t version, dtype; /* version: 1 or 2. dtype: of q and out */
};

#endif
