/* q . mean for every block, then the maximum or the mean over the group's query heads.
 *
 *   q        f32 f16 bf16  [seqs, heads, head_dim]
 *   summary  f32 f16 bf16  [blocks, kv_heads, head_dim]
 *   tables   i32           [seqs, max_blocks]
 *   lens     i32           [seqs]
 *   scores   f32           [seqs, kv_heads, max_blocks]   -inf past the last block, and
 *                           for a table entry that is no block
 * Any head_dim works; multiples of 8 up to 256 in 16-byte aligned rows take the fast kernel.
 * On Hopper many heads over 16-bit rows have score_wgmma. What neither takes, such as longer
 * rows, has score_rows_wide for some dtypes.
 *
 * Bytes      valid blocks * kv_heads * head_dim * element
 * Limit      memory; at 67 MB start and end cost much: a plain read takes 25 us
 * Best       16 x 32K, block 16, bf16, 8 KV heads x 128: groups of 4 and 8 28.5 us, 0.76
 *            of R = 3098 GB/s (H100 80GB HBM3, 2026-11-21, L2 flushed, median of 30)
 * Tolerance  1e-5 of sum |q_d mean_d|: the fp32 sums have another order
 * Source     the block-mean (landmark) score of InfLLM, MoBA and NSA */
#include "cuda/select/score_rows.cuh"

KVL_CUDA_KERNEL(score_mean) {
  return kvl::launch_score_summary<kvl::SCORE_MEAN>(((const kvl_score_mean_args *)args)->by,
                                                    (const kvl_cuda_queue *)queue);
}
