/* dst[to[i]] = src[from[i]] between two memories of one layer: whole blocks, or K and V of
 * single KV heads.
 *   src, dst  f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]   one dtype
 *   from, to  i32                  [seqs, lanes, n]   lanes: 1 for whole blocks, or
 *                                  kv_heads, and lane g is head g
 *   moved     i64                  [1]   the bytes copied are added to it; optional
 * An entry that is out of range (-1) on either side is skipped. Limit: read plus write
 * bandwidth. */
#include "args/offload.h"
#include "cpu/split.h"
#include "cpu/vec.h"

/* Bytes that one entry moves, in one run or two. */
static int64_t entry_bytes(const struct kvl_move_blocks_args *a) {
  return kvl__run(&a->src, a->lanes, 0, 0).bytes + kvl__run(&a->src, a->lanes, 0, 1).bytes;
}

static int moves(const struct kvl_move_blocks_args *a, int64_t entry) {
  int64_t from = a->from[entry], to = a->to[entry];
  return from >= 0 && from < a->src.blocks && to >= 0 && to < a->dst.blocks;
}

/* Items are (entry, run). */
static int move_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_move_blocks_args *a = args;
  const int64_t page = a->src.bytes_page;
  for (int64_t item = begin; item < end; item++) {
    int64_t entry = item / 2;
    if (!moves(a, entry)) continue;
    struct kvl_run run = kvl__run(&a->src, a->lanes, entry / a->n % a->lanes, item % 2);
    memcpy((char *)a->dst.memory + a->to[entry] * page + run.begin,
           (const char *)a->src.memory + a->from[entry] * page + run.begin,
           (size_t)run.bytes);
  }
  return 0;
}

KVL_CPU_KERNEL(move_blocks) {
  const struct kvl_move_blocks_args *a = args;
  int64_t entries = a->seqs * a->lanes * a->n, moved = 0;
  if (entries == 0) return 0;
  for (int64_t i = 0; i < entries; i++) moved += entry_bytes(a) * moves(a, i);
  if (a->moved) __atomic_fetch_add(a->moved, moved, __ATOMIC_RELAXED);
  if (a->src.pinned && !a->dst.pinned) kvl__link_bytes(queue, KVL_LINK_TO_DEVICE, moved);
  if (a->dst.pinned && !a->src.pinned) kvl__link_bytes(queue, KVL_LINK_TO_HOST, moved);
  return kvl__split(2 * entries, kvl__grain_rows(entry_bytes(a) / 8), move_piece, a);
}
