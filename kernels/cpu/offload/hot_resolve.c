/* Gives every selected block of the host tier a slot on the device and evicts others.
 *   selection        i32  [seqs, kv_heads or 1, n]   logical, -1 padded
 *   tables           i32  [seqs, max_blocks]
 *   each             1, or the tokens of a block of the tables; then read token for block
 *   slot_of          i32  [kv_heads, blocks]    changed; -1: the block has no slot
 *   block_of, order  i32  [kv_heads, slots]     changed; order: least recently used first
 *   priority         f32  [kv_heads, blocks]    optional
 *   slots            i32  [seqs, kv_heads, n]
 *   miss_from/to     i32  [kv_heads, seqs * n]  block and slot, -1 padded
 *   hit_/miss_...    i32  [seqs, kv_heads, n]   the hits and the misses of the selection, -1
 *                                               padded; optional
 *   ahead            i32  [kv_heads, slots]     changed; optional
 *   uses, age        f32  [kv_heads, blocks]    changed; optional; may be priority
 *
 * Every device computes the same arrays, whatever runs in parallel:
 * - Entries are taken in the order (sequence, index in the list). An entry that is -1 or out
 *   of range gets slot -1. An entry whose block has a slot at the start is a hit, however
 *   often the block is named. For any other block, the first entry that names it is a miss
 *   and takes the next index in the list of misses; further entries are not counted.
 * - Victims are slots that hold no selected block: free ones first, then those of the lowest
 *   priority (NaN is lowest of all), and among equals in the order of `order`. The misses
 *   receive the victims in the order in which these stand in `order`.
 * - After that, the slots that this call did not use come first in `order` and the used ones
 *   last, both in the order that they had.
 * - A slot that is filled has is_ahead in `ahead`. A hit clears it, unless this call is ahead
 *   itself; the slots that hits cleared are counted.
 * - For a block that gets a slot, uses becomes 1, or 0 if this call is ahead, and age 0.
 *   For a hit, uses grows by 1, unless this call is ahead, and age becomes 0. For any other
 *   block that keeps its slot, age grows by 1, unless this call is ahead.
 *
 * A KV head is one task and needs no memory of its own: while it runs, slot_of[block] is
 * mark(m) for the m-th miss, and block_of[slot] is mark(block) for a hit.
 * Limit: one walk over the slots. If there are misses, the radix search adds one more walk,
 * or four with priorities. */
#include "args/offload.h"
#include "cpu/select/radix.h"
#include "cpu/split.h"

struct lane { /* one KV head */
  const struct kvl_hot_resolve_args *args;
  int32_t *slot_of, *block_of, *order, *miss_from, *miss_to, *ahead;
  const float *priority;
  float *uses, *age;
  int64_t head, blocks, slots, misses, hits, evictions, foreseen;
};

/* A marked index is -2 or below, so it is neither an index nor -1, which means none. Marking
 * it again gives the index back. */
static inline int32_t mark(int32_t i) { return -2 - i; }
static inline int is_marked(int32_t i) { return i <= -2; }

static int64_t entry_row(const struct lane *l, int64_t seq) {
  return (seq * l->args->hot.memory.kv_heads + l->head) * l->args->n;
}

static int32_t entry_logical(const struct lane *l, int64_t seq, int64_t i) {
  const struct kvl_hot_resolve_args *a = l->args;
  int64_t head = a->selection_heads > 1 ? l->head : 0;
  return a->selection[(seq * a->selection_heads + head) * a->n + i];
}

/* Counts a block that was brought ahead and is now used. */
static void take_foreseen(struct lane *l, int32_t slot) {
  if (!l->ahead || l->args->is_ahead || l->ahead[slot] != 1) return;
  l->ahead[slot] = 0;
  l->foreseen++;
}

/* Counts a call for a block that it finds, before its slot is marked: once. */
static void count_use(const struct lane *l, int32_t block) {
  if (is_marked(l->block_of[l->slot_of[block]])) return;
  if (l->uses && !l->args->is_ahead) l->uses[block]++;
  if (l->age) l->age[block] = 0;
}

/* Marks the selected blocks: slots[...] becomes the slot of a hit or mark(m) of a miss. */
static void find(struct lane *l) {
  const struct kvl_hot_resolve_args *a = l->args;
  for (int64_t e = 0; e < a->seqs * a->n; e++) {
    int64_t seq = e / a->n, i = e % a->n, logical = entry_logical(l, seq, i);
    int32_t *slot = a->slots + entry_row(l, seq) + i;
    const int64_t each = a->hot.each, at = logical / each; /* each: 1, or a block's tokens */
    int64_t block = logical < 0 || at >= a->max_blocks
                        ? -1
                        : a->tables[seq * a->max_blocks + at] * each + logical % each;
    *slot = -1;
    if (block < 0 || block >= l->blocks || l->slot_of[block] >= l->slots) continue;
    if (l->slot_of[block] == -1) {
      l->miss_from[l->misses] = (int32_t)block;
      l->slot_of[block] = mark((int32_t)l->misses++);
    } else if (l->slot_of[block] >= 0) {
      if (l->uses || l->age) count_use(l, (int32_t)block);
      l->block_of[l->slot_of[block]] = mark((int32_t)block);
      take_foreseen(l, l->slot_of[block]);
      l->hits++;
    }
    *slot = l->slot_of[block];
  }
}

/* Candidates with smaller keys are taken first. */
static uint32_t victim_key(const struct lane *l, int32_t slot) {
  int32_t block = l->block_of[slot];
  if (block == -1) return 0;
  float priority = l->priority ? l->priority[block] : NAN;
  return priority == priority ? radix_key(priority, 0) : 1; /* -inf has a larger key */
}

static int is_candidate(const struct lane *l, int32_t slot) {
  return slot >= 0 && slot < l->slots && l->block_of[slot] >= -1 &&
         l->block_of[slot] < l->blocks;
}

/* The key of the last of `count` victims; *ties becomes the number of victims with it. */
static uint32_t last_victim(const struct lane *l, int64_t count, int64_t *ties) {
  uint32_t prefix = 0, mask = 0;
  int top = l->priority ? 24 : 0; /* without priorities the keys are 0 and 1 */
  for (int shift = top; shift >= 0; shift -= 8) {
    int64_t counts[256] = {0};
    for (int64_t i = 0; i < l->slots; i++) {
      if (!is_candidate(l, l->order[i])) continue;
      uint32_t key = victim_key(l, l->order[i]);
      if ((key & mask) == prefix) counts[key >> shift & 255]++;
    }
    int digit = 0;
    for (; digit < 255 && counts[digit] < count; digit++) count -= counts[digit];
    prefix |= (uint32_t)digit << shift;
    mask |= 255u << shift;
  }
  *ties = count;
  return prefix;
}

static void fill_slot(struct lane *l, int32_t slot, int32_t block) {
  if (l->block_of[slot] >= 0) {
    l->slot_of[l->block_of[slot]] = -1;
    l->evictions++;
  }
  l->block_of[slot] = block;
  l->slot_of[block] = slot;
  if (l->ahead) l->ahead[slot] = l->args->is_ahead;
  if (l->uses) l->uses[block] = !l->args->is_ahead;
  if (l->age) l->age[block] = 0;
}

/* Gives the victims to the misses and brings `order` up to date. The used slots are gathered
 * in miss_to; in the end it holds only the filled ones, in the order of their misses. */
static void replace(struct lane *l) {
  const int64_t room = l->args->seqs * l->args->n;
  int64_t ties = 0, kept = 0, used = 0, filled = 0;
  uint32_t last = l->misses > 0 ? last_victim(l, l->misses, &ties) : 0;
  for (int64_t i = 0; i < l->slots; i++) {
    int32_t slot = l->order[i];
    int takes = 0, hit = slot >= 0 && slot < l->slots && is_marked(l->block_of[slot]);
    if (filled < l->misses && is_candidate(l, slot)) {
      uint32_t key = victim_key(l, slot);
      takes = key < last || (key == last && ties-- > 0);
    }
    if (takes) fill_slot(l, slot, l->miss_from[filled++]);
    if ((takes || hit) && used < room) l->miss_to[used++] = slot;
    else l->order[kept++] = slot;
  }
  filled = 0;
  for (int64_t i = 0; i < used; i++) {
    int32_t slot = l->miss_to[i];
    l->order[kept + i] = slot;
    if (is_marked(l->block_of[slot])) l->block_of[slot] = mark(l->block_of[slot]);
    else l->miss_to[filled++] = slot;
  }
  for (int64_t m = filled; m < room; m++) {
    if (m < l->misses) l->slot_of[l->miss_from[m]] = -1; /* no slot is left */
    l->miss_from[m] = l->miss_to[m] = -1;
  }
  if (!l->age || l->args->is_ahead) return;
  for (int64_t i = 0; i < kept; i++) {
    int32_t slot = l->order[i];
    if (is_candidate(l, slot) && l->block_of[slot] >= 0) l->age[l->block_of[slot]]++;
  }
}

/* Lists the hits (is_miss 0) or the misses of a row, in their order. */
static void part(const struct lane *l, int64_t seq, int is_miss, int32_t *logical,
                 int32_t *slots) {
  const struct kvl_hot_resolve_args *a = l->args;
  const int64_t row = entry_row(l, seq);
  int64_t count = 0;
  for (int64_t i = 0; i < a->n; i++) {
    int32_t slot = a->slots[row + i];
    if (slot == -1 || is_marked(slot) != is_miss) continue;
    logical[row + count] = entry_logical(l, seq, i);
    slots[row + count++] = is_miss ? l->miss_to[mark(slot)] : slot;
  }
  for (; count < a->n; count++) logical[row + count] = slots[row + count] = -1;
}

static void lane_run(struct lane *l) {
  const struct kvl_hot_resolve_args *a = l->args;
  find(l);
  replace(l);
  for (int64_t seq = 0; seq < a->seqs; seq++) {
    if (a->hit_logical) {
      part(l, seq, 0, a->hit_logical, a->hit_slots);
      part(l, seq, 1, a->miss_logical, a->miss_slots);
    }
    int32_t *slots = a->slots + entry_row(l, seq);
    for (int64_t i = 0; i < a->n; i++)
      if (is_marked(slots[i])) slots[i] = l->miss_to[mark(slots[i])];
  }
}

static int lanes_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_hot_resolve_args *a = args;
  const struct kvl_hot_view *hot = &a->hot;
  const int64_t slots = hot->slots, room = a->seqs * a->n;
  for (int64_t head = begin; head < end; head++) {
    struct lane l = {.args = a,
                     .head = head,
                     .blocks = hot->blocks,
                     .slots = slots,
                     .slot_of = hot->slot_of + head * hot->blocks,
                     .block_of = hot->block_of + head * slots,
                     .order = hot->order + head * slots,
                     .miss_from = a->miss_from + head * room,
                     .miss_to = a->miss_to + head * room,
                     .priority = hot->priority ? hot->priority + head * hot->blocks : NULL,
                     .ahead = hot->ahead ? hot->ahead + head * slots : NULL,
                     .uses = hot->uses ? hot->uses + head * hot->blocks : NULL,
                     .age = hot->age ? hot->age + head * hot->blocks : NULL};
    lane_run(&l);
    __atomic_fetch_add(&hot->counters[0], l.hits, __ATOMIC_RELAXED);
    __atomic_fetch_add(&hot->counters[1], l.misses, __ATOMIC_RELAXED);
    __atomic_fetch_add(&hot->counters[2], l.evictions, __ATOMIC_RELAXED);
    __atomic_fetch_add(&hot->counters[4], l.foreseen, __ATOMIC_RELAXED);
  }
  return 0;
}

KVL_CPU_KERNEL(hot_resolve) {
  const struct kvl_hot_resolve_args *a = args;
  if (a->seqs * a->n == 0) return 0;
  return kvl__split(a->hot.memory.kv_heads, kvl__grain_rows(8 * a->hot.slots), lanes_piece,
                    a);
}
