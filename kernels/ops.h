/* The ops, and how they are launched. Nothing here knows tensors, Lua or allocation.
 *
 * Every op has a struct of arguments in kernels/args/, one file for each family of ops: raw
 * pointers and sizes, which the runtime checks before it calls a launcher. Kernels of a family
 * lie in the folder of its name, so a change of its arguments recompiles that folder.
 *
 * A launcher is `int name(const void *args, void *queue)`. args points to the op's struct,
 * which is copied before an asynchronous start. queue belongs to the backend: CUDA passes a
 * struct kvl_cuda_queue *, the CPU a struct kvl_cpu_job *. A launcher returns 0 or a negative
 * kvl_status.
 *   CPU   kvl_cpu_<op>_<isa>   kernels/cpu/<family>/<op>.c, compiled once per instruction set
 *   CUDA  kvl_cuda_<op>        kernels/cuda/<family>/<op>.cu; attention/instances/ has those of
 *                              its templates that take minutes to compile
 * Any count may be 0; the op then launches nothing. */
#ifndef KVL_OPS_H
#define KVL_OPS_H

#include "base.h"

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

typedef int kvl_kernel(const void *args, void *queue);

/* What a CPU kernel reports about its run: the bytes that it moved over the link, per
 * direction, so that an emulated link can model their time. A kernel adds to the counts; most
 * kernels move nothing. */
enum { KVL_LINK_TO_DEVICE, KVL_LINK_TO_HOST };
struct kvl_cpu_job {
  int64_t bytes_link[2];
};

#endif
