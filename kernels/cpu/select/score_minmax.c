/* Quest's bound of q . k over each block: sum_d max(q_d * min_d, q_d * max_d).
 *   q        f32 f16 bf16         [seqs, heads, head_dim]
 *   summary  f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, head_dim]   min, then max
 *   scores   f32                  [seqs, kv_heads, max_blocks]      -inf past the last block
 * head_dim a multiple of 8 up to 256. Limit: read bandwidth, 2 rows of head_dim per block and
 * KV head. These are scattered, so the next ones are prefetched.
 * Best   Xeon (Sapphire Rapids), 16 cores, AVX-512, 2026-11-21, group 4, head_dim 128, blocks
 *        of 16 in random order, 16 x 32K tokens, relative to a read loop in the same run:
 *        bf16 182 of 347 GB/s (the last-level cache's; 0.52), f8e4m3 0.24; one thread 0.57,
 *        0.32
 * Source: Tang et al. 2024, arXiv:2406.10774. */
#include "cpu/select/scores.h"

KVL_CPU_KERNEL(score_minmax) {
  return score_summary(&((const struct kvl_score_minmax_args *)args)->by, 2);
}
