/* logits[r][j] = scales[j] * sum_h weights[r][h] * max(q[r][h] . k[j], 0) for
 * starts[r] <= j < ends[r]; other columns are not changed.
 *   q        f8e4m3  [rows, heads, dim]   heads 1 ... 64; dim 32, 64 or 128
 *   weights  f32     [rows, heads]
 *   k        f8e4m3  [tokens, dim]
 *   scales   f32     [tokens]
 *   starts, ends  i32  [rows]
 *   logits   f32 bf16  [rows, columns]
 * Products of f8e4m3 are exact in f32; the tolerance of the sums is 2e-6 of the sum of
 * |terms|.
 * Limit: arithmetic, 2 * heads * dim flops per element; a tile of keys is converted once for
 * every 16 rows.
 * Source: DeepSeek-V3.2's lightning indexer; DeepGEMM's fp8_mqa_logits. */
#include "args/index.h"
#include "cpu/index/mqa.h"

enum { ROWS = 16 }; /* that share a converted tile of keys */

static int64_t tiles_of(const struct kvl_mqa_logits_args *a) {
  return (i64_min(a->tokens, a->columns) + MQA_TOKENS - 1) / MQA_TOKENS;
}

/* Pieces are (rows, tile of keys). */
static int tile_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_mqa_logits_args *a = args;
  const int64_t most = i64_min(a->tokens, a->columns), tiles = tiles_of(a);
  struct mqa_tile tile;
  struct mqa_row row;
  float logits[MQA_TOKENS] __attribute__((aligned(64)));
  for (int64_t piece = begin; piece < end; piece++) {
    const int64_t first = piece % tiles * MQA_TOKENS, row0 = piece / tiles * ROWS;
    int has_tile = 0;
    for (int64_t r = row0; r < i64_min(a->rows, row0 + ROWS); r++) {
      const int64_t from = i64_max(a->starts[r], 0), to = i64_min(a->ends[r], most);
      if (i64_max(from, first) >= i64_min(to, first + MQA_TOKENS)) continue;
      for (int t = 0; !has_tile && t < MQA_TOKENS; t++) {
        const int64_t j = i64_min(first + t, most - 1); /* past the last: never stored */
        mqa_take_key(&tile, t, a->k + j * a->dim, a->scales[j], a->dim);
      }
      has_tile = 1;
      mqa_take_row(&row, a->q + r * a->heads * a->dim, a->weights + r * a->heads, a->heads,
                   a->dim);
      mqa_multiply(&tile, &row, logits);
      mqa_store(&tile, logits, first, from, to, a->logits, r * a->columns, a->dtype);
    }
  }
  return 0;
}

KVL_CPU_KERNEL(mqa_logits) {
  const struct kvl_mqa_logits_args *a = args;
  return kvl__split((a->rows + ROWS - 1) / ROWS * tiles_of(a), 1, tile_piece, a);
}
