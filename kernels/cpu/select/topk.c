/* The first k of each row of n in descending order (ascending for largest = 0). Exact: ties
 * go to the lower index, NaN comes last, -0 equals 0. by_index: the same k in the order of
 * their indices.
 *   a        f32 i32  [rows, n]
 *   values   like a   [rows, k]   optional
 *   indices  i32      [rows, k]
 * A radix search finds the k-th key (radix.h). One more pass collects the indices of the
 * elements before it and of as many of its equals as fit. A radix sort from the top byte
 * down, in place (McIlroy, Bostic, McIlroy, "Engineering radix sort", 1993), orders them by
 * key and then by index. O(n + k) for any input, no workspace.
 * Limit: the histogram of the first digit, about 1 ns an element. */
#include "args/select.h"
#include "cpu/select/radix.h"
#include "cpu/split.h"

enum { FEW = 24 };

/* A row, and how its keys are made. */
struct row {
  const void *a;
  uint32_t flip;
  int dtype;
};

/* A number that orders by key, and then by index. */
static inline KVL_HOT uint64_t rank(struct row a, int32_t i) {
  uint32_t key = a.dtype == KVL_DTYPE_I32 ? radix_key_at(a.a, i, a.flip, KVL_DTYPE_I32)
                                          : radix_key_at(a.a, i, a.flip, KVL_DTYPE_F32);
  return (uint64_t)key << 32 | (uint32_t)i;
}

static void sort_few(struct row a, int32_t *index, int64_t n) {
  for (int64_t i = 1; i < n; i++) {
    int32_t moving = index[i];
    uint64_t r = rank(a, moving);
    int64_t j = i;
    for (; j > 0 && rank(a, index[j - 1]) > r; j--) index[j] = index[j - 1];
    index[j] = moving;
  }
}

/* Sorts by the bytes of the rank from `shift` down; those above are equal. */
static void sort(struct row a, int32_t *index, int64_t n, int shift) {
  uint32_t start[257], next[256];
  for (;; shift -= 8) {
    if (n <= FEW) {
      sort_few(a, index, n);
      return;
    }
    memset(start, 0, sizeof start);
    for (int64_t i = 0; i < n; i++) start[1 + (rank(a, index[i]) >> shift & 255)]++;
    if (start[1 + (rank(a, index[0]) >> shift & 255)] < n) break; /* not all alike */
  }
  for (int d = 0; d < 256; d++) start[d + 1] += start[d], next[d] = start[d];
  for (int d = 0; d < 256; d++)
    while (next[d] < start[d + 1]) { /* move the number here to where it belongs */
      int32_t moving = index[next[d]];
      for (int at; (at = rank(a, moving) >> shift & 255) != d;) {
        int32_t found = index[next[at]];
        index[next[at]++] = moving;
        moving = found;
      }
      index[next[d]++] = moving;
    }
  if (shift == 0) return;
  for (int d = 0; d < 256; d++) sort(a, index + start[d], start[d + 1] - start[d], shift - 8);
}

/* The first k of the row, in the order of their indices. */
static void collect(struct row a, int64_t n, int64_t k, int32_t *index) {
  const struct radix_run run = {a.a, n, a.dtype};
  int64_t before, found = 0;
  uint32_t last = radix_kth(&run, 1, k, a.flip, &before);
  int64_t equals = k - before;
  RADIX_FIRST(run, a.flip, last, equals, index[found++] = (int32_t)i)
}

static int topk_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_topk_args *g = args;
  uint32_t flip = g->largest ? 0xFFFFFFFFu : 0;
  uint32_t *values = g->values; /* moved as bits */
  for (int64_t r = begin; r < end; r++) {
    const uint32_t *numbers = (const uint32_t *)g->a + r * g->n;
    const struct row a = {numbers, flip, g->dtype};
    int32_t *index = g->indices + r * g->k;
    if (g->k < g->n) collect(a, g->n, g->k, index);
    else
      for (int64_t i = 0; i < g->n; i++) index[i] = (int32_t)i;
    if (!g->by_index) sort(a, index, g->k, 56);
    if (values)
      for (int64_t i = 0; i < g->k; i++) values[r * g->k + i] = numbers[index[i]];
  }
  return 0;
}

KVL_CPU_KERNEL(topk) {
  const struct kvl_topk_args *g = args;
  if (g->k == 0) return 0;
  return kvl__split(g->rows, kvl__grain_rows(4 * g->n), topk_piece, g);
}
