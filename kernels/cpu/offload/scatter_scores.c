/* Writes scores of logical blocks to the rows of the blocks themselves.
 *   scores  f32  [seqs, kv_heads or 1, max_blocks]
 *   tables  i32  [seqs, max_blocks]         out of range: skipped
 *   out     f32  [kv_heads, blocks]         out[head][tables[s][b]] = scores[s][head][b]
 * The last sequence that has a block wins. */
#include "args/offload.h"
#include "cpu/split.h"
#include "cpu/vec.h"

/* Pieces are KV heads. */
static int scores_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_scatter_scores_args *a = args;
  for (int64_t head = begin; head < end; head++) {
    float *out = a->out + head * a->blocks;
    for (int64_t seq = 0; seq < a->seqs; seq++) {
      const float *scores = a->scores +
                            (seq * a->heads + (a->heads > 1 ? head : 0)) * a->max_blocks;
      const int32_t *table = a->tables + seq * a->max_blocks;
      for (int64_t b = 0; b < a->max_blocks; b++)
        if (table[b] >= 0 && table[b] < a->blocks) out[table[b]] = scores[b];
    }
  }
  return 0;
}

KVL_CPU_KERNEL(scatter_scores) {
  const struct kvl_scatter_scores_args *a = args;
  return kvl__split(a->kv_heads, kvl__grain_rows(12 * a->seqs * a->max_blocks), scores_piece,
                    a);
}
