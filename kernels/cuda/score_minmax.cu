/* Quest's bound of q . k for every block, from the block's elementwise min and max:
 *   sum_d max(q_d * min_d, q_d * max_d), joined over the group's heads by max or mean.
 *
 *   q        f32 f16 bf16  [seqs, heads, head_dim]
 *   summary  f32 f16 bf16  [blocks, 2, kv_heads, head_dim]   min, max
 *   tables   i32           [seqs, max_blocks]
 *   lens     i32           [seqs]
 *   scores   f32           [seqs, kv_heads, max_blocks]      -inf past the last block
 * head_dim: any; a multiple of 8 up to 256 in 16-byte aligned rows takes the fast kernel.
 *
 * Bytes      valid blocks * kv_heads * 2 * head_dim * element; limit: memory
 * Best       16 x 32K, block 16, bf16, 8 KV heads x 128: group 4 56.5 us, 0.77 of the run's
 *            read bandwidth; group 8 63.9 us, 0.68
 *            (H100 80GB HBM3, 2026-11-20, L2 flushed, median of 30)
 * Flops      2 a summary number and query head
 * Tolerance  1e-5 of sum |q_d| max(|min_d|, |max_d|): fp32 sums in another order
 * Source     Tang et al. 2024 (Quest), arXiv:2406.10774 */
#include "score_rows.cuh"

KVL_CUDA_KERNEL(score_minmax) {
  return kvl::launch_score_summary<kvl::SCORE_MINMAX>(*(const kvl_score_minmax_args *)args,
                                                     (const kvl_cuda_queue *)queue);
}
