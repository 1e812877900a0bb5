/* The k first of each row of n in descending order (ascending for largest = 0), exactly;
 * ties to the lower index, NaN last, -0 ties with 0.
 *   a        f32  [rows, n]
 *   values   f32  [rows, k]   optional
 *   indices  i32  [rows, k]
 * A float becomes an unsigned key whose order is the order wanted. A radix search (digits
 * of 11, 11 and 10 bits) finds the k-th key; one more pass collects what lies before it,
 * in index order, and as many of its equals as fit; a stable radix sort, 8 bits at a time,
 * orders those k. O(n + k), no comparison sort, no worst case.
 * Workspace: 2k pairs of (key, index) for each part of the rows worked on at a time.
 * Limit: the histogram, about 1 ns an element; the search re-reads the row from cache. */
#include "cpu/split.h"
#include "cpu/vec.h"

struct item { uint32_t key, index; };

/* Parts the rows are dealt into, each with its own scratch; at most 64 MiB together. */
static int64_t parts(const struct kvl_topk_args *g) {
  int64_t room = (64 << 20) / i64_max(1, 2 * g->k * (int64_t)sizeof(struct item));
  int64_t useful = g->rows * g->n / KVL_GRAIN;
  return i64_max(1, i64_min(i64_min(g->rows, 32), i64_min(room, useful)));
}

size_t KVL_CPU_WORKSPACE(topk)(const void *args) {
  const struct kvl_topk_args *g = args;
  return (size_t)(parts(g) * 2 * g->k) * sizeof(struct item);
}

/* Smaller keys come first. flip is 0 for ascending, ~0 for descending order. */
static inline KVL_HOT uint32_t key_of(float x, uint32_t flip) {
  uint32_t i = f32_bits(x + 0.0f);                         /* -0 becomes 0 */
  uint32_t ascending = i ^ ((uint32_t)((int32_t)i >> 31) | 0x80000000u);
  return x == x ? ascending ^ flip : 0xFFFFFFFFu;
}

/* The k-th smallest key (k from 1); *before counts the keys below it. */
static uint32_t kth_key(const float *a, int64_t n, int64_t k, uint32_t flip,
                        int64_t *before) {
  static const int shift[] = {21, 10, 0}, bits[] = {11, 11, 10};
  uint32_t prefix = 0, count[2048];
  *before = 0;
  for (int pass = 0; pass < 3; pass++) {
    int known = shift[pass] + bits[pass];                  /* bits above are in prefix */
    uint32_t mask = (1u << bits[pass]) - 1;
    memset(count, 0, sizeof count);
    if (pass == 0)
      for (int64_t i = 0; i < n; i++) count[key_of(a[i], flip) >> 21]++;
    else
      for (int64_t i = 0; i < n; i++) {
        uint32_t key = key_of(a[i], flip);
        if (key >> known == prefix) count[key >> shift[pass] & mask]++;
      }
    uint32_t digit = 0;
    while (*before + count[digit] < k) *before += count[digit++];
    prefix = prefix << bits[pass] | digit;
  }
  return prefix;
}

/* The k first of the row, in index order. */
static void collect(const float *a, int64_t n, int64_t k, uint32_t flip, struct item *out) {
  int64_t before = n, found = 0;
  uint32_t last = k < n ? kth_key(a, n, k, flip, &before) : 0;
  int64_t equals = k - before;
  for (int64_t i = 0; i < n && found < k; i++) {
    uint32_t key = key_of(a[i], flip);
    if (k == n || key < last || (key == last && equals-- > 0))
      out[found++] = (struct item){key, (uint32_t)i};
  }
}

/* Stable; returns where the sorted items are: `a` or `b`. */
static struct item *sort(struct item *a, struct item *b, int64_t k) {
  uint32_t count[4][256] = {0};
  for (int64_t i = 0; i < k; i++)
    for (int digit = 0; digit < 4; digit++) count[digit][a[i].key >> 8 * digit & 255]++;
  for (int digit = 0; digit < 4; digit++) {
    if (count[digit][a[0].key >> 8 * digit & 255] == (uint32_t)k) continue;   /* all equal */
    uint32_t start = 0;
    for (int v = 0; v < 256; v++) {
      uint32_t c = count[digit][v];
      count[digit][v] = start;
      start += c;
    }
    for (int64_t i = 0; i < k; i++) b[count[digit][a[i].key >> 8 * digit & 255]++] = a[i];
    struct item *swap = a;
    a = b;
    b = swap;
  }
  return a;
}

static int topk_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_topk_args *g = args;
  uint32_t flip = g->largest ? 0xFFFFFFFFu : 0;
  int64_t count = parts(g);
  for (int64_t part = begin; part < end; part++) {
    struct item *scratch = (struct item *)g->workspace + part * 2 * g->k;
    for (int64_t r = g->rows * part / count; r < g->rows * (part + 1) / count; r++) {
      const float *a = g->a + r * g->n;
      collect(a, g->n, g->k, flip, scratch);
      const struct item *s = sort(scratch, scratch + g->k, g->k);
      for (int64_t i = 0; i < g->k; i++) g->indices[r * g->k + i] = (int32_t)s[i].index;
      if (g->values)
        for (int64_t i = 0; i < g->k; i++) g->values[r * g->k + i] = a[s[i].index];
    }
  }
  return 0;
}

KVL_CPU_KERNEL(topk) {
  const struct kvl_topk_args *g = args;
  if (g->rows == 0 || g->k == 0) return 0;
  return kvl__split(parts(g), 1, topk_piece, g);
}
