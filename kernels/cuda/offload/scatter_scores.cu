/* Writes scores of logical blocks to the rows of the blocks themselves.
 *
 *   scores  f32  [seqs, kv_heads or 1, max_blocks]
 *   tables  i32  [seqs, max_blocks]         out of range: skipped
 *   out     f32  [kv_heads, blocks]         out[head][tables[s][b]] = scores[s][head][b]
 *
 * A thread takes a logical block of a head, for one sequence after the other, so that the last
 * one wins where they share a block.
 *
 * Bytes   12 * kv_heads * seqs * max_blocks, the stores scattered
 * Limit   the launch, except for long sequences; not measured */
#include "args/offload.h"
#include "cuda/elementwise.cuh"

namespace {

struct scores_body {
  kvl_scatter_scores_args a;
  template <int N> __device__ void run(int64_t i) const {
    int64_t head, b;
    kvl::divide(i, a.max_blocks, &head, &b);
    const int64_t row = a.heads > 1 ? head : 0;
    float *out = a.out + head * a.blocks;
    for (int64_t seq = 0; seq < a.seqs; seq++) {
      const int64_t block = a.tables[seq * a.max_blocks + b];
      if (block >= 0 && block < a.blocks)
        out[block] = a.scores[(seq * a.heads + row) * a.max_blocks + b];
    }
  }
};

}  // namespace

KVL_CUDA_KERNEL(scatter_scores) {
  const kvl_scatter_scores_args &a = *(const kvl_scatter_scores_args *)args;
  return kvl::each<1>(scores_body{a}, a.kv_heads * a.max_blocks, false, queue);
}
