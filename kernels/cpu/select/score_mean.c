/* q . mean of each block.
 *   q        f32 f16 bf16  [seqs, heads, head_dim]
 *   summary  f32 f16 bf16  [blocks, kv_heads, head_dim]
 *   scores   f32           [seqs, kv_heads, max_blocks]   -inf past the last block
 * head_dim a multiple of 8 up to 256. Limit: read bandwidth, a row of head_dim per block and
 * KV head.
 * Best   Xeon (Sapphire Rapids), 16 cores, AVX-512, 2026-11-21, group 4, head_dim 128, blocks
 *        of 16 in random order, 16 x 32K tokens, relative to a read loop in the same run:
 *        f32 228 of 435 GB/s (the last-level cache's; 0.53), one thread 0.67 */
#include "args/select.h"
#include "cpu/select/scores.h"

static int mean_piece(const void *args, int64_t begin, int64_t end) {
  score_items(args, begin, end, 0);
  return 0;
}

KVL_CPU_KERNEL(score_mean) {
  const struct kvl_score_mean_args *a = args;
  int64_t row = a->head_dim * kvl__float_bytes(a->summary_dtype);
  struct score s = {
      .q = a->q,
      .tables = a->tables,
      .lens = a->lens,
      .scores = a->scores,
      .seqs = a->seqs,
      .heads = a->heads,
      .kv_heads = a->kv_heads,
      .max_blocks = a->max_blocks,
      .blocks = a->blocks,
      .head_dim = (int32_t)a->head_dim,
      .block_size = a->block_size,
      .join = a->group,
      .dtype = a->dtype,
      .rows = a->summary,
      .bytes_block = a->kv_heads * row,
      .bytes_head = row,
      .rows_dtype = a->summary_dtype,
  };
  return score_run(&s, mean_piece);
}
