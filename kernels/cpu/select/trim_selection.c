/* Shortens selections, in place, to the fewest blocks whose weights reach a share of their
 * sequence's total: top-p over blocks.
 *   weights    f32  [seqs, heads or 1, max_blocks]   a weight that is not > 0 counts as 0
 *   lens       i32  [seqs]
 *   selection  i32  [seqs, heads, max_selected]   ascending, -1 padded
 *   counts     i32  [seqs, heads]                 optional
 * The first `sink` and last `recent` blocks always stay, and their weights count. Of the
 * others the heaviest are kept, ties to the lower index, until `mass` of the sum over all of
 * the sequence's blocks is reached.
 *
 * Floats >= 0 have the order of their bits, so 31 halvings find the least weight to keep.
 * Sums are double.
 * Limit: reads the selected weights 34 times, from cache. */
#include "args/select.h"
#include "cpu/split.h"
#include "cpu/vec.h"

struct row {
  const float *weights;
  int32_t *selection;
  int64_t n;           /* entries */
  int64_t first, last; /* blocks [first, last) may be dropped, others stay */
};

static float weight(const struct row *r, int64_t block) {
  return r->weights[block] > 0 ? r->weights[block] : 0;
}
static int may_go(const struct row *r, int64_t block) {
  return block >= r->first && block < r->last;
}

/* The sum of the weights of droppable blocks that are at least the float with these bits. */
static double sum_from(const struct row *r, uint32_t bits) {
  double sum = 0;
  for (int64_t i = 0; i < r->n; i++) {
    int64_t block = r->selection[i];
    if (!may_go(r, block)) continue;
    float w = weight(r, block);
    if (f32_bits(w) >= bits) sum += w;
  }
  return sum;
}

/* Decides which of the droppable entries are kept: those heavier than *least, and the first
 * *ties of those that equal it. */
static void find_least(const struct row *r, double wanted, uint32_t *least, int64_t *ties) {
  *least = 0;
  *ties = r->n;
  if (sum_from(r, 0) <= wanted) return;
  for (uint32_t bit = 1u << 30; bit; bit >>= 1)
    if (sum_from(r, *least | bit) >= wanted) *least |= bit;
  double missing = (wanted - sum_from(r, *least + 1)) / f32_from_bits(*least);
  *ties = missing <= 0 ? 0 : missing < r->n ? (int64_t)ceil(missing) : r->n;
}

static int32_t trim_row(const struct row *r, double wanted) {
  uint32_t least;
  int64_t ties, count = 0;
  for (int64_t i = 0; i < r->n; i++)
    if (!may_go(r, r->selection[i])) wanted -= weight(r, r->selection[i]);
  find_least(r, wanted, &least, &ties);
  for (int64_t i = 0; i < r->n; i++) {
    int64_t block = r->selection[i];
    uint32_t bits = f32_bits(weight(r, block));
    if (may_go(r, block) && bits <= least && !(bits == least && ties-- > 0)) continue;
    r->selection[count++] = (int32_t)block;
  }
  for (int64_t i = count; i < r->n; i++) r->selection[i] = -1;
  return (int32_t)count;
}

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_trim_selection_args *a = args;
  for (int64_t i = begin; i < end; i++) {
    int64_t len = i64_max(0, a->lens[i / a->heads]);
    int64_t blocks = i64_min((len + a->block_size - 1) / a->block_size, a->max_blocks);
    const int64_t weight_row = a->weight_heads > 1 ? i : i / a->heads;
    struct row r = {.weights = a->weights + weight_row * a->max_blocks,
                    .selection = a->selection + i * a->max_selected,
                    .first = a->sink,
                    .last = blocks - a->recent};
    while (r.n < a->max_selected && r.selection[r.n] >= 0 && r.selection[r.n] < blocks) r.n++;
    double total = 0;
    for (int64_t b = 0; b < blocks; b++) total += weight(&r, b);
    int32_t count = (int32_t)r.n;
    if (a->mass < 1) count = trim_row(&r, a->mass * total);
    if (a->counts) a->counts[i] = count;
  }
  return 0;
}

KVL_CPU_KERNEL(trim_selection) {
  const struct kvl_trim_selection_args *a = args;
  return kvl__split(a->seqs * a->heads, kvl__grain_rows(32 * a->max_selected), rows_piece, a);
}
