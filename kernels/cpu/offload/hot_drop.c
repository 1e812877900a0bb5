/* Forgets blocks of the host tier: their slots become free, for every KV head.
 *   blocks    i32  [n]                  out of range (-1) is skipped
 *   slot_of   i32  [kv_heads, blocks]
 *   block_of  i32  [kv_heads, slots]
 *   each      1, or the tokens of a block, which have slots of their own */
#include "args/offload.h"
#include "cpu/split.h"
#include "cpu/vec.h"

/* Pieces are KV heads. */
static int drop_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_hot_drop_args *a = args;
  const int64_t blocks = a->hot.blocks, slots = a->hot.slots;
  for (int64_t head = begin; head < end; head++) {
    int32_t *slot_of = a->hot.slot_of + head * blocks;
    for (int64_t i = 0; i < a->n * a->hot.each; i++) {
      int64_t block = a->blocks[i / a->hot.each] * a->hot.each + i % a->hot.each;
      if (block < 0 || block >= blocks || slot_of[block] < 0) continue;
      if (slot_of[block] < slots) a->hot.block_of[head * slots + slot_of[block]] = -1;
      slot_of[block] = -1;
    }
  }
  return 0;
}

KVL_CPU_KERNEL(hot_drop) {
  const struct kvl_hot_drop_args *a = args;
  return kvl__split(a->hot.memory.kv_heads, kvl__grain_rows(4 * a->n), drop_piece, a);
}
