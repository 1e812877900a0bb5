/* q . mean of each block.
 *   q        f32 f16 bf16  [seqs, heads, head_dim]
 *   summary  f32 f16 bf16  [blocks, kv_heads, head_dim]
 *   scores   f32           [seqs, kv_heads, max_blocks]   -inf past the last block
 * head_dim a multiple of 8 up to 256. Limit: read bandwidth, a row of head_dim per block and
 * KV head.
 * Best   Xeon (Sapphire Rapids), 16 cores, AVX-512, 2026-11-21, group 4, head_dim 128, blocks
 *        of 16 in random order, 16 x 32K tokens, relative to a read loop in the same run:
 *        f32 228 of 435 GB/s (the last-level cache's; 0.53), one thread 0.67 */
#include "cpu/select/scores.h"

KVL_CPU_KERNEL(score_mean) {
  return score_summary(&((const struct kvl_score_mean_args *)args)->by, 1);
}
