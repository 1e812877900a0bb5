/* dst[to[i]] = src[from[i]] between two memories of one layer: whole blocks, or K and V of
 * single KV heads.
 *   src, dst  f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]   one dtype
 *   from, to  i32                  [seqs, lanes, n]   lanes: 1 for whole blocks, or
 *                                  kv_heads, and lane g is head g
 *   rows      1, or the tokens of a block. With 1, from and to name blocks. Otherwise they name
 *             single tokens, by block * rows + the token's number in the block
 *   moved     i64                  [1]   the bytes copied are added to it; optional
 * An entry that is out of range (-1) on either side is skipped. Limit: read plus write
 * bandwidth. */
#include "args/offload.h"
#include "cpu/split.h"
#include "cpu/vec.h"

/* Bytes that one entry moves, in one run or two. */
static int64_t entry_bytes(const struct kvl_move_blocks_args *a) {
  return (kvl__run(&a->src, a->lanes, 0, 0).bytes + kvl__run(&a->src, a->lanes, 0, 1).bytes) /
         a->rows;
}

static int moves(const struct kvl_move_blocks_args *a, int64_t entry) {
  int64_t from = a->from[entry], to = a->to[entry];
  return from >= 0 && from < a->src.blocks * a->rows && to >= 0 &&
         to < a->dst.blocks * a->rows;
}

/* Where a run of block `i` begins, or its row of token `i`. */
static int64_t run_at(const struct kvl_move_blocks_args *a, struct kvl_run run, int64_t i) {
  return i / a->rows * a->src.bytes_page + run.begin + i % a->rows * (run.bytes / a->rows);
}

/* Items are (entry, run). */
static int move_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_move_blocks_args *a = args;
  for (int64_t item = begin; item < end; item++) {
    int64_t entry = item / 2;
    if (!moves(a, entry)) continue;
    const struct kvl_run run = kvl__run(&a->src, a->lanes, entry / a->n % a->lanes, item % 2);
    memcpy((char *)a->dst.memory + run_at(a, run, a->to[entry]),
           (const char *)a->src.memory + run_at(a, run, a->from[entry]),
           (size_t)(run.bytes / a->rows));
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
