/* Quest's upper bound of q . k for every block, from the block's elementwise min and max:
 *   sum_d max(q_d * min_d, q_d * max_d), then the max or mean over the group's query heads.
 *
 *   q        f32 f16 bf16         [seqs, heads, head_dim]
 *   summary  f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, head_dim]   min <= max
 *   tables   i32                  [seqs, max_blocks]
 *   lens     i32                  [seqs]
 *   scores   f32                  [seqs, kv_heads, max_blocks]   -inf past the last block,
 *                                 and for a table entry that is no block
 * Any head_dim works; multiples of 8 (f8e4m3: of 16) up to 256 in 16-byte aligned rows take
 * the fast kernel. On Hopper many heads over 16-bit rows have score_wgmma. What neither takes,
 * such as longer rows and queries that have no room in shared memory, has score_rows_wide for
 * some dtypes. Where min or max is infinite, the bound is NaN if a query has the other sign
 * there, and may be if q is split into terms.
 *
 * Bytes      valid blocks * kv_heads * 2 * head_dim * element
 * Limit      memory; at 134 MB start and end cost much: a plain read takes 47 us
 * Best       16 x 32K, block 16, 8 KV heads x 128, shares of R = 3098 GB/s: bf16, group 4
 *            52.0 us 0.83 (0.85 with tables in order, where neighbouring blocks are
 *            neighbours in memory), group 8 52.7 us 0.82, group 16 57.3 us 0.76; f8e4m3
 *            32.0 us 0.68; f32 133 us 0.65; bf16, 64 x 32K 193 us 0.90, 1 x 32K 9.0 us;
 *            an empty launch takes 3.0
 *            (H100 80GB HBM3, 2026-11-21, L2 flushed, median of 30)
 *            128 heads on a KV head: bf16 q 57.5 us, f32 q 88.7 (H200, 2026-11-27)
 * Flops      2 for each summary number and query head, in 16-bit mma
 * Tolerance  1e-5 of sum |q_d| max(|min_d|, |max_d|): the fp32 sums have another order
 * Source     Tang et al. 2024 (Quest), arXiv:2406.10774 */
#include "cuda/select/score_rows.cuh"

KVL_CUDA_KERNEL(score_minmax) {
  return kvl::launch_score_summary<kvl::SCORE_MINMAX>(
      ((const kvl_score_minmax_args *)args)->by, (const kvl_cuda_queue *)queue);
}
