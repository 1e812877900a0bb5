/* The blocks to attend to: the first `sink`, the last `recent` and those whose hashes are
 * nearest to that of the mean query of their KV head's group.
 *   q          f32 f16 bf16  [seqs, heads, head_dim]
 *   planes     f32           [bits, head_dim]
 *   hashes     u64           [blocks, kv_heads, words] or [.., block_size, words]
 *   selection  i32           [seqs, kv_heads or 1, max_selected]   ascending, -1 padded
 *   counts     i32           [seqs, kv_heads or 1]                 optional
 * Gives exactly the result of hash_rows, score_hamming and select. Distances are small whole
 * numbers, so a histogram of them finds the largest one that is taken; ties go to the lower
 * index.
 * Limit: read bandwidth. */
#include "args/select.h"
#include "cpu/select/hamming.h"
#include "cpu/select/hash.h"

/* How many distances are kept; those of a longer row are computed twice. */
enum { KEPT = 32768 };

/* Hashes the mean query of the group of each of `heads` KV heads, from `head` on. */
static inline KVL_HOT void hash_queries(const struct kvl_select_hamming_args *a, int64_t seq,
                                        int64_t head, int heads, uint64_t *words,
                                        const int dtype) {
  const int64_t group = a->heads / a->hashes.kv_heads;
  float x[HASH_DIM_MAX] __attribute__((aligned(64)));
  for (int64_t g = head; g < head + heads; g++, words += a->hashes.words) {
    for (int64_t h = 0; h < group; h++)
      hash_take(x, at_const(a->q, (seq * a->heads + g * group + h) * a->head_dim, dtype),
                a->head_dim, h > 0, dtype);
    hash_vector(x, a->planes, a->head_dim, a->bits, words);
  }
}

/* The blocks [begin, end) of a row, of which the `wanted` nearest are taken. */
struct race {
  struct hamming h;
  int heads;
  int64_t begin, end, wanted;
};

/* The largest distance that is taken; *ties becomes the number of blocks taken at it. */
static int farthest(const struct race *r, uint16_t *kept, int64_t *ties) {
  int64_t counts[HAMMING_NONE + 1] = {0}, left = r->wanted;
  for (int64_t at = r->begin; at < r->end; at += KEPT) {
    int64_t stop = i64_min(at + KEPT, r->end);
    hamming_heads(r->h, r->heads, at, stop, kept);
    for (int64_t i = 0; i < stop - at; i++) counts[kept[i]]++;
  }
  int distance = 0;
  while (counts[distance] < left) left -= counts[distance++];
  *ties = left;
  return distance;
}

static int32_t *take(const struct race *r, int32_t *selection) {
  uint16_t kept[KEPT];
  int64_t ties;
  int edge = farthest(r, kept, &ties);
  for (int64_t at = r->begin; at < r->end; at += KEPT) {
    int64_t stop = i64_min(at + KEPT, r->end);
    if (r->end - r->begin > KEPT) hamming_heads(r->h, r->heads, at, stop, kept);
    for (int64_t i = 0; i < stop - at; i++)
      if (kept[i] < edge || (kept[i] == edge && ties-- > 0)) *selection++ = (int32_t)(at + i);
  }
  return selection;
}

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_select_hamming_args *a = args;
  const int kv_heads = a->hashes.kv_heads, heads = a->selection_heads == 1 ? kv_heads : 1;
  for (int64_t row = begin; row < end; row++) {
    const int64_t seq = row / a->selection_heads, head = row % a->selection_heads;
    const int64_t len = i64_max(0, a->lens[seq]);
    const int64_t n = i64_min((len + a->block_size - 1) / a->block_size, a->max_blocks);
    const int64_t k = i64_min(kvl__list_blocks(a->budget, &a->limits, seq, head, (int32_t)n),
                              a->max_selected);
    const int64_t sink = i64_min(a->budget.sink, k);
    const int64_t recent = i64_min(a->budget.recent, k - sink);
    int32_t *selection = a->selection + row * a->max_selected, *last = selection + k;
    uint64_t q[KVL_HASH_QUERY_MAX];
    struct race r = {
        {&a->hashes, q, a->tables + seq * a->max_blocks, len, (int)head, a->block_size},
        heads,
        sink,
        n - recent,
        k - sink - recent};
    for (int64_t i = 0; i < sink; i++) *selection++ = (int32_t)i;
    if (r.wanted > 0) {
      KVL_BY_FLOAT(a->dtype, hash_queries(a, seq, head, heads, q, D))
      selection = take(&r, selection);
    }
    for (int64_t i = n - recent; i < n; i++) *selection++ = (int32_t)i;
    for (int64_t i = k; i < a->max_selected; i++) *last++ = -1;
    if (a->counts) a->counts[row] = (int32_t)k;
  }
  return 0;
}

KVL_CPU_KERNEL(select_hamming) {
  const struct kvl_select_hamming_args *a = args;
  int64_t vectors = a->hashes.tokens * (a->hashes.kv_heads / i64_max(1, a->selection_heads));
  return kvl__split(a->seqs * a->selection_heads,
                    kvl__grain_rows(a->max_blocks * (2 + vectors * a->hashes.words)),
                    rows_piece, a);
}
