/* The list of ops. Backends alone read it, so a new op recompiles no other kernel. */
#ifndef KVL_OPS_H
#define KVL_OPS_H

#include "kernel.h"

/* ORDER kvl_op */
#define KVL_OPS(X)     \
  X(fill)              \
  X(arange)            \
  X(random)            \
  X(cast)              \
  X(unary)             \
  X(binary)            \
  X(where)             \
  X(reduce)            \
  X(softmax)           \
  X(argmax)            \
  X(topk)              \
  X(matmul)            \
  X(linear)            \
  X(head_matmul)       \
  X(route)             \
  X(experts)           \
  X(gather_rows)       \
  X(scatter_rows)      \
  X(gather)            \
  X(rmsnorm)           \
  X(rope)              \
  X(silu_mul)          \
  X(append_kv)         \
  X(copy_blocks)       \
  X(read_blocks)       \
  X(paged_attention)   \
  X(merge_attention)   \
  X(block_minmax)      \
  X(block_mean)        \
  X(score_minmax)      \
  X(score_mean)        \
  X(score_max_qk)      \
  X(select)            \
  X(move_blocks)       \
  X(cut_selection)     \
  X(hot_resolve)       \
  X(hot_append)        \
  X(hot_drop)          \
  X(copy_tokens)       \
  X(replace)           \
  X(update_rows)       \
  X(scatter_scores)    \
  X(vllm_append)       \
  X(vllm_attention)    \
  X(rope_append)       \
  X(hash_rows)         \
  X(block_hash)        \
  X(score_hamming)     \
  X(select_hamming)    \
  X(scatter)           \
  X(trim_selection)    \
  X(quantise_rows)     \
  X(hadamard)          \
  X(index_append)      \
  X(index_gather)      \
  X(mqa_logits)        \
  X(mqa_logits_paged)  \
  X(topk_transform)    \
  X(transform_indices) \
  X(topk_merge)        \
  X(ragged_places)     \
  X(strided_copy)      \
  X(cumsum)            \
  X(logsumexp)         \
  X(draw)

enum kvl_op {
#define X(op) KVL_OP_##op,
  KVL_OPS(X)
#undef X
      KVL_OP_COUNT
};

#endif
