/* The blocks to attend to: the first `sink`, the last `recent` and the best of the rest.
 *   scores     f32  [seqs, selection_heads or 1, max_blocks]
 *   lens       i32  [seqs]
 *   selection  i32  [seqs, selection_heads, max_selected]   ascending, -1 padded
 *   counts     i32  [seqs, selection_heads]                 optional
 * n = ceil(len / block_size) blocks exist and up to k = kvl__list_blocks(...), at most
 * max_selected, are taken. If k is less than sink + recent, the sinks come first and then the
 * most recent ones. A block between them whose score is -inf or NaN is not eligible: it is
 * never taken, so fewer than k may be. Exact: ties go to the lower index.
 *
 * Scores are mapped to whole numbers of the same order, and a radix search from the top byte
 * down finds the k-th largest one. All larger ones are selected, and the first of those that
 * equal it. No sort, no workspace, O(n) for any input.
 * Limit: reads the scores 3 to 6 times, from cache. */
#include "args/select.h"
#include "cpu/split.h"
#include "cpu/vec.h"

/* The key of -inf. The keys of NaN and -inf, and no others, are not above it. */
#define KEY_LEAST 0x007FFFFFu

/* A larger score has a larger key. -0 has the key of 0; NaN has key 0, below -inf. */
static inline uint32_t score_key(float x) {
  uint32_t bits = f32_bits(x + 0.0f);
  if (x != x) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The k-th largest key, 1 <= k <= n; *ties becomes the number of equal keys among the k. */
static uint32_t kth_largest(const float *scores, int64_t n, int64_t k, int64_t *ties) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t counts[256] = {0};
    for (int64_t i = 0; i < n; i++) {
      uint32_t key = score_key(scores[i]);
      if ((key & mask) == prefix) counts[key >> shift & 255]++;
    }
    int digit = 255;
    for (; counts[digit] < k; digit--) k -= counts[digit];
    prefix |= (uint32_t)digit << shift;
    mask |= 255u << shift;
  }
  *ties = k;
  return prefix;
}

/* Writes up to k blocks and returns how many. */
static int32_t select_row(const float *scores, int32_t n, int32_t k, kvl_budget budget,
                          int64_t max_selected, int32_t *selection) {
  int32_t sink = budget.sink < k ? budget.sink : k;
  int32_t recent = budget.recent < k - sink ? budget.recent : k - sink;
  int32_t best = k - sink - recent, count = 0;
  for (int32_t i = 0; i < sink; i++) selection[count++] = i;
  if (best > 0) {
    int64_t ties;
    uint32_t least = kth_largest(scores + sink, n - sink - recent, best, &ties);
    if (least <= KEY_LEAST) least = KEY_LEAST, ties = 0; /* every eligible block */
    for (int32_t i = sink; i < n - recent; i++) {
      uint32_t key = score_key(scores[i]);
      if (key > least || (key == least && ties-- > 0)) selection[count++] = i;
    }
  }
  for (int32_t i = n - recent; i < n; i++) selection[count++] = i;
  for (int64_t i = count; i < max_selected; i++) selection[i] = -1;
  return count;
}

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_select_args *a = args;
  for (int64_t row = begin; row < end; row++) {
    const int64_t seq = row / a->selection_heads, head = row % a->selection_heads;
    int64_t len = a->lens[seq], score_row = a->score_heads > 1 ? row : seq;
    int64_t n = i64_min((len + a->block_size - 1) / a->block_size, a->max_blocks);
    int64_t k = n > 0 ? kvl__list_blocks(a->budget, &a->limits, seq, head, (int32_t)n) : 0;
    k = i64_max(0, i64_min(k, a->max_selected));
    int32_t count = select_row(a->scores + score_row * a->max_blocks, (int32_t)i64_max(0, n),
                               (int32_t)k, a->budget, a->max_selected,
                               a->selection + row * a->max_selected);
    if (a->counts) a->counts[row] = count;
  }
  return 0;
}

KVL_CPU_KERNEL(select) {
  const struct kvl_select_args *a = args;
  return kvl__split(a->seqs * a->selection_heads, kvl__grain_rows(4 * a->max_blocks),
                    rows_piece, a);
}
