/* Arguments of the ops that summarise, hash, score and select blocks.
 * Shapes, dtypes and meanings are those of runtime/kvlab.h; optional pointers may be NULL. */
#ifndef KVL_ARGS_SELECT_H
#define KVL_ARGS_SELECT_H

#include "page.h"

struct kvl_topk_args {
  const void *a; /* f32 or i32 */
  void *values;  /* optional, like a */
  int32_t *indices;
  int64_t rows, n, k;
  void *workspace;
  int32_t largest, by_index, dtype;
};
struct kvl_block_minmax_args {
  struct kvl_pages cache;
  const int32_t *blocks, *tokens;
  const int32_t *rows; /* of the summary; NULL: blocks */
  void *summary;
  int64_t n, summary_rows;
  int32_t summary_dtype; /* the cache's; of a codec that packs numbers any float */
};
struct kvl_block_mean_args {
  struct kvl_pages cache;
  const int32_t *blocks, *tokens;
  const int32_t *rows; /* of the summary; NULL: blocks */
  void *summary;
  int64_t n, summary_rows;
  int32_t summary_dtype;
};
struct kvl_score_summary {
  const void *q, *summary;
  const int32_t *tables, *lens;
  float *scores;
  int64_t seqs, heads, kv_heads, head_dim, max_blocks, blocks;
  int32_t block_size, group, dtype, summary_dtype;
};
struct kvl_score_minmax_args {
  struct kvl_score_summary by;
};
struct kvl_score_mean_args {
  struct kvl_score_summary by;
};
struct kvl_score_max_qk_args {
  struct kvl_pages cache;
  const void *q;
  const int32_t *tables, *lens;
  float *scores;
  int64_t seqs, heads, max_blocks;
  int32_t group, dtype;
};
/* A limit for each list of a sequence, used instead of the budget's ratio and blocks. */
struct kvl_limits {
  const void *of;   /* optional; i32 blocks or f32 ratios, [seqs or 1, selection_heads] */
  int64_t seq_step; /* from one sequence's to the next one's; 0: all have the same */
  int32_t are_ratios;
};
struct kvl_select_args {
  const float *scores;
  const int32_t *lens;
  int32_t *selection;
  int32_t *counts; /* optional */
  int64_t seqs, selection_heads, max_blocks, max_selected;
  int64_t score_heads; /* selection_heads, or 1: all lists have the same scores */
  struct kvl_limits limits;
  kvl_budget budget;
  void *workspace;
  int32_t block_size;
};
struct kvl_trim_selection_args {
  const float *weights;
  const int32_t *lens;
  int32_t *selection;
  int32_t *counts; /* optional */
  int64_t seqs, heads, max_blocks, max_selected;
  int64_t weight_heads; /* heads, or 1: all lists have the same weights */
  double mass;
  int32_t block_size, sink, recent;
};

/* A bit of a hash is the sign of a sum. Every device adds in the order given here, so that
 * all of them find the same bit. Products are rounded before they are added. Part p of
 * KVL_HASH_PARTS adds the products of dims p, p + 16, ... in this order; then parts p and
 * p + 8 are added, p and p + 4, p and p + 2, p and p + 1. To hash a mean of tokens, or of the
 * heads of a group, their sum is taken, in their order: dividing it by their number would not
 * change a sign. */
enum { KVL_HASH_PARTS = 16, KVL_HASH_BITS_MAX = 1024 };

/* If all KV heads share one list, select_hamming takes at most this many words of query
 * hashes, kv_heads * words. */
enum { KVL_HASH_QUERY_MAX = 2048 };
struct kvl_hash_rows_args {
  const void *x;
  const float *planes;
  uint64_t *hashes;
  int64_t rows;
  int32_t head_dim, bits, dtype;
};
struct kvl_block_hash_args {
  struct kvl_pages cache;
  const int32_t *blocks, *tokens;
  const int32_t *rows; /* of the hashes; NULL: blocks */
  const float *planes;
  uint64_t *hashes;
  int64_t n, summary_rows;
  int32_t bits, is_token; /* is_token: one hash per token */
};

/* Hashes [blocks, kv_heads, tokens, words]. tokens is 1, or block_size if every token has a
 * hash. */
struct kvl_hash_view {
  const uint64_t *hashes;
  int64_t blocks;
  int32_t kv_heads, tokens, words;
  int32_t is_token;
};
struct kvl_score_hamming_args {
  const uint64_t *q; /* [seqs, kv_heads, words] */
  struct kvl_hash_view hashes;
  const int32_t *tables, *lens;
  float *scores; /* [seqs, score_heads, max_blocks] */
  int64_t seqs, score_heads, max_blocks;
  int32_t block_size;
};
struct kvl_select_hamming_args {
  const void *q;
  const float *planes;
  struct kvl_hash_view hashes;
  const int32_t *tables, *lens;
  int32_t *selection;
  int32_t *counts; /* optional */
  int64_t seqs, heads, selection_heads, max_blocks, max_selected;
  struct kvl_limits limits;
  kvl_budget budget;
  int32_t block_size, head_dim, bits, dtype;
};

/* How many blocks of a sequence of n blocks may be selected: the only definition, for both
 * devices. */
KVL_INLINE int32_t kvl__budget_blocks(kvl_budget b, int32_t n) {
  int32_t k = b.blocks;
  if (b.ratio >= 0) {
    /* ceil, with room for the rounding error of ratio * n: 0.1 * 30 must be 3 */
    double x = b.ratio * n - 1e-9 * (n + 1);
    k = (int32_t)x;
    if (x > k) k++;
  }
  if (k < b.min_blocks) k = b.min_blocks;
  if (k < b.sink + b.recent) k = b.sink + b.recent;
  return k < n ? k : n;
}

/* The same for list `head` of a sequence, which may have a limit of its own. A limit that is
 * negative or NaN counts as 0. */
KVL_INLINE int32_t kvl__list_blocks(kvl_budget b, const struct kvl_limits *limits,
                                    int64_t seq, int64_t head, int32_t n) {
  if (limits->of) {
    const int64_t i = seq * limits->seq_step + head;
    if (limits->are_ratios) {
      /* less by half a unit of f32, because 0.1f * 30 must be 3 */
      const float ratio = ((const float *)limits->of)[i];
      b.ratio = ratio < 1 ? ratio * (1 - 0x1p-24) : 1;
      if (!(ratio >= 0)) b.ratio = 0;
    } else {
      b.ratio = -1;
      b.blocks = ((const int32_t *)limits->of)[i];
    }
  }
  return kvl__budget_blocks(b, n);
}

#endif
