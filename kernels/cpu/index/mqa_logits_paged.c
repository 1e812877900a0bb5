/* mqa_logits over index-K memory: row r looks at the first lens[r] tokens of its sequence.
 *   q        f8e4m3  [sequences * each, heads, dim]   heads 1 ... 64; dim 32, 64 or 128
 *   weights  f32     [sequences * each, heads]
 *   cache    u8      [blocks, block_size * (dim + 4)]
 *   tables   i32     [sequences, max_blocks]
 *   lens     i32     [sequences * each]
 *   logits   f32 bf16  [sequences * each, columns]   -inf where the table names no block
 * Gives the same bits as mqa_logits, with its limit and tolerance. A tile of keys is
 * converted once for each sequence. Source: DeepGEMM's fp8_paged_mqa_logits. */
#include "args/index.h"
#include "cpu/index/index.h"
#include "cpu/index/mqa.h"

static int64_t longest(const struct kvl_mqa_logits_paged_args *a) {
  return i64_min(a->columns, a->max_blocks * a->cache.block_size);
}

static int64_t tiles_of(const struct kvl_mqa_logits_paged_args *a) {
  return (longest(a) + MQA_TOKENS - 1) / MQA_TOKENS;
}

static void take_tile(const struct kvl_mqa_logits_paged_args *a, int64_t sequence,
                      int64_t first, struct mqa_tile *tile) {
  const int32_t *table = a->tables + sequence * a->max_blocks;
  const int block_size = a->cache.block_size;
  for (int t = 0; t < MQA_TOKENS; t++) {
    const int64_t j = first + t, entry = j / block_size;
    struct index_place at = {0};
    if (entry < a->max_blocks) at = index_at(&a->cache, table[entry], j % block_size);
    mqa_take_key(tile, t, at.key, at.key ? *at.scale : 0, a->cache.dim);
  }
}

/* Pieces are (sequence, tile of keys). */
static int tile_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_mqa_logits_paged_args *a = args;
  const int64_t tiles = tiles_of(a);
  struct mqa_tile tile;
  struct mqa_row row;
  float logits[MQA_TOKENS] __attribute__((aligned(64)));
  for (int64_t piece = begin; piece < end; piece++) {
    const int64_t first = piece % tiles * MQA_TOKENS, sequence = piece / tiles;
    int has_tile = 0;
    for (int64_t r = sequence * a->each; r < (sequence + 1) * a->each; r++) {
      const int64_t to = i64_min(a->lens[r], longest(a));
      if (first >= to) continue;
      if (!has_tile) take_tile(a, sequence, first, &tile);
      has_tile = 1;
      mqa_take_row(&row, a->q + r * a->heads * a->cache.dim, a->weights + r * a->heads,
                   a->heads, a->cache.dim);
      mqa_multiply(&tile, &row, logits);
      mqa_store(&tile, logits, first, 0, to, a->logits, r * a->columns, a->dtype);
    }
  }
  return 0;
}

KVL_CPU_KERNEL(mqa_logits_paged) {
  const struct kvl_mqa_logits_paged_args *a = args;
  return kvl__split(a->sequences * tiles_of(a), 1, tile_piece, a);
}
