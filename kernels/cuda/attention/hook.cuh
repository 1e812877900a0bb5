/* The hook of an attention kernel (hook.h). Kernels are compiled without one (no_hook) and,
 * while the program runs, by NVRTC with the hook of a policy, a struct that
 * lua/kvlab/kernel/print/cuda.lua writes:
 *   ACTIVE            whether there is a hook
 *   HIDES, KEEPS      whether it changes scores, and so may hide keys; whether they are
 *                     stored
 *   scores, room      where: f32 [tokens, heads, room], by index
 *   operator()(score, row, index)   the new score; scores are in base 2 */
#ifndef KVL_CUDA_HOOK_CUH
#define KVL_CUDA_HOOK_CUH

#include "cuda/attention/paged.cuh"

namespace kvl {

/* The query row whose scores a hook changes; head is the one of its KV head's group. */
struct hook_row {
  int64_t seq;
  int kv_heads, kv_head, head, length, query_index;
};

struct no_hook {
  static constexpr bool ACTIVE = false, HIDES = false, KEEPS = false;
};

/* Stores the score of row `row` of [tokens, heads] and the key at `index`. */
template <class H>
__device__ __forceinline__ void keep_score(const H &hook, int64_t row, int index,
                                           float score) {
  if constexpr (H::KEEPS) hook.scores[row * hook.room + index] = score * LN2;
}

}  // namespace kvl

#endif
