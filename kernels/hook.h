/* Hooks of paged attention: code that was compiled at run time and changes the scores of
 * query rows, between q k and the softmax (lua/kvlab/kernel/print/c.lua, print/cuda.lua).
 *
 * The score of a row and a key is what the softmax sees: scaled, capped, with ALiBi added. A
 * hook adds to it, and makes it -inf for a key that the row is not to see. Keys that the row
 * does not see anyway (causal, window) may have any score before the hook. */
#ifndef KVL_HOOK_H
#define KVL_HOOK_H

#include "args/attention.h"
#include "kernel.h"

enum { KVL_HOOK_ARGUMENTS_MAX = 192 }; /* bytes of a hook's own arguments */

/* The arguments of the op paged_attention. Kernels without a hook get `base` alone. */
struct kvl_hooked_attention_args {
  struct kvl_paged_attention_args base;
  /* What the backend's code_hook gives: on the CPU a kvl_hook, in CUDA a CUlibrary with the
   * attention kernel of this shape. NULL: there is no hook. */
  void *hook;
  /* Optional f32 [tokens, heads, max_blocks * block_size]: the final scores by the index
   * of their key; -inf for a key that the hook hides. For a key that the row does not see
   * (not selected, outside of the window, after the row) the entry may be written or left
   * as it is. */
  float *scores;
  int32_t only_keeps; /* the hook changes no score */
  uint64_t arguments[KVL_HOOK_ARGUMENTS_MAX / 8];
};

/* On the CPU, a hook is called for one query row and up to 64 keys. */
struct kvl_hook_row {
  int64_t seq;
  int32_t kv_heads, kv_head, head; /* head: of the KV head's group */
  int32_t length, query_index;
};
/* Changes scores[0 ... n - 1], whose keys have these indices. Both arrays can be read, and
 * scores written, up to the next multiple of 16. */
typedef void kvl_hook(const void *arguments, const struct kvl_hook_row *row,
                      const int32_t *indices, int n, float *scores);

#endif
