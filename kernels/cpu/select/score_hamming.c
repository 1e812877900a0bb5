/* The score of a block is minus the number of bits in which its hash differs from the
 * query's. If there is a hash for every token, the nearest valid token of a block counts.
 *   q       u64  [seqs, kv_heads, words]
 *   hashes  u64  [blocks, kv_heads, words] or [blocks, kv_heads, block_size, words]
 *   scores  f32  [seqs, kv_heads or 1, max_blocks]   1: the best of all KV heads; blocks past
 *                                                    the last get -inf
 * Exact: whole numbers. Limit: read bandwidth.
 * Source: UCM's GSA on-device (XOR, count, the nearest token of a block, the nearest
 * head). */
#include "args/select.h"
#include "cpu/select/hamming.h"

enum { RUN_BLOCKS = 512 };

static int64_t runs_of(const struct kvl_score_hamming_args *a) {
  return (a->max_blocks + RUN_BLOCKS - 1) / RUN_BLOCKS;
}

static int runs_piece(const void *args, int64_t first, int64_t last) {
  const struct kvl_score_hamming_args *a = args;
  const int kv_heads = a->hashes.kv_heads, words = a->hashes.words;
  for (int64_t i = first; i < last; i++) {
    const int64_t row = i / runs_of(a), begin = i % runs_of(a) * RUN_BLOCKS;
    const int64_t seq = row / a->score_heads, head = row % a->score_heads;
    const int64_t stop = i64_min(begin + RUN_BLOCKS, a->max_blocks);
    const int64_t blocks = ((int64_t)a->lens[seq] + a->block_size - 1) / a->block_size;
    const int64_t end = i64_min(stop, i64_max(begin, blocks));
    struct hamming h = {&a->hashes,
                        a->q + (seq * kv_heads + head) * words,
                        a->tables + seq * a->max_blocks,
                        a->lens[seq],
                        (int)head,
                        a->block_size};
    uint16_t distance[RUN_BLOCKS];
    hamming_heads(h, a->score_heads == 1 ? kv_heads : 1, begin, end, distance);
    float *scores = a->scores + row * a->max_blocks;
    for (int64_t b = begin; b < stop; b++) {
      int is_none = b >= end || distance[b - begin] == HAMMING_NONE;
      scores[b] = is_none ? -INFINITY : -(float)distance[b - begin];
    }
  }
  return 0;
}

KVL_CPU_KERNEL(score_hamming) {
  const struct kvl_score_hamming_args *a = args;
  int64_t vectors = a->hashes.tokens * (a->hashes.kv_heads / i64_max(1, a->score_heads));
  return kvl__split(a->seqs * a->score_heads * runs_of(a),
                    kvl__grain_rows(RUN_BLOCKS * vectors * a->hashes.words), runs_piece, a);
}
