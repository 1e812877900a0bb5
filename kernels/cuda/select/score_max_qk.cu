/* The largest q . k over every block's valid tokens, read from the cache itself: the oracle
 * that summaries approximate. The result is the maximum or the mean over the group's heads.
 *
 *   q       f32 f16 bf16         [seqs, heads, head_dim]
 *   cache   f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   tables  i32                  [seqs, max_blocks]
 *   lens    i32                  [seqs]
 *   scores  f32                  [seqs, kv_heads, max_blocks]   -inf past the last block, and
 *                                for a table entry that is no block
 * On Hopper many heads over 16-bit rows have score_wgmma, if the result is a maximum or blocks
 * have 16 tokens.
 *
 * Bytes      tokens * kv_heads * head_dim * element
 * Limit      memory
 * Best       16 x 32K, block 16, 8 KV heads x 128: bf16, group 4 367 us, 0.95 of R = 3098
 *            GB/s, group 8 368 us; f8e4m3, group 4 192 us, 0.90
 *            (H100 80GB HBM3, 2026-11-21, L2 flushed, median of 30)
 * Tolerance  1e-5 of sum |q_d k_d|: the fp32 sums have another order */
#include "args/select.h"
#include "cuda/select/score_rows.cuh"

KVL_CUDA_KERNEL(score_max_qk) {
  const kvl_score_max_qk_args &a = *(const kvl_score_max_qk_args *)args;
  const kvl_pages &c = a.cache;
  const int bytes = kvl__bits(c.codec) / 8; /* of an element */
  return kvl::launch_score<kvl::SCORE_MAX_QK>(
      {a.q, (const char *)c.memory + c.key.begin, a.tables, a.lens, a.scores, a.seqs, a.heads,
       c.kv_heads, c.key.dim, a.max_blocks, c.blocks, c.bytes_page / bytes,
       c.key.bytes / bytes, c.block_size, a.group, a.dtype, c.codec, c.key},
      (const kvl_cuda_queue *)queue);
}
