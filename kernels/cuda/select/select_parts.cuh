/* The rule that says how much of a row is selected: what select.cu, select_short.cuh and
 * select_hamming.cu share. */
#ifndef KVL_CUDA_SELECT_PARTS_CUH
#define KVL_CUDA_SELECT_PARTS_CUH

#include "args/select.h"
#include "cuda/divide.cuh"

namespace kvl {

/* The blocks of a sequence of `length` tokens, max_blocks at most. */
__device__ __forceinline__ int blocks_of(int length, const divisor &block_size,
                                         int64_t max_blocks) {
  const uint32_t tokens = max(length, 0), whole = block_size.quotient(tokens);
  return (int)min(whole + (whole * block_size.by != tokens), (uint32_t)max_blocks);
}

/* What is to be chosen in a row. */
struct row_choice {
  int n, k, sink, recent; /* blocks: all, taken, and two kinds taken for certain */
  int high, wanted;       /* blocks sink ... high-1 compete for `wanted` entries */
  bool is_choice;

  template <class ARGS>
  __device__ __forceinline__ row_choice(const ARGS &a, int blocks, uint32_t seq,
                                        uint32_t head) {
    n = blocks;
    k = (int)min((int64_t)max(kvl__list_blocks(a.budget, &a.limits, seq, head, n), 0),
                 a.max_selected);
    sink = min(min(a.budget.sink, n), k);
    recent = min(min(a.budget.recent, n - sink), k - sink);
    high = n - recent, wanted = k - sink - recent;
    is_choice = wanted > 0 && wanted < high - sink;
  }
  /* Writes the entries of a list that need no choice, all but front ... k-recent-1. */
  __device__ __forceinline__ void write_certain(int32_t *list, int64_t max_selected,
                                                int front) const {
    const int gap = k - recent - front;
#pragma unroll 1
    for (int i = threadIdx.x; i < (int)max_selected - gap; i += blockDim.x) {
      const int place = i < front ? i : i + gap;
      list[place] = place < front ? place : place < k ? place - k + n : -1;
    }
  }
};

}  // namespace kvl

#endif
