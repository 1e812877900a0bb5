/* dst[to[i]] = src[from[i]] between two memories of one layer: whole blocks, or K and V of
 * single KV heads.
 *   src, dst  f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]   one dtype
 *   from, to  i32                  [seqs, lanes, n]   lanes: 1 for whole blocks, or
 *                                  kv_heads, and lane g is head g
 *   moved     i64                  [1]   the bytes copied are added to it; optional
 * An entry that is out of range (-1) on either side is skipped. Limit: read plus write
 * bandwidth. */
#include "cpu/split.h"
#include "cpu/vec.h"

/* Entry (s, g, i) moves two runs of bytes: half h of lane g of block b is run
 * (b * 2 + h) * lanes + g. */
static int64_t run_bytes(const struct kvl_move_blocks_args *a) {
  const struct kvl_cache_view *c = &a->src;
  return (int64_t)(c->kv_heads / a->lanes) * c->block_size * c->head_dim *
         kvl__float_bytes(c->dtype);
}

static int moves(const struct kvl_move_blocks_args *a, int64_t entry) {
  int64_t from = a->from[entry], to = a->to[entry];
  return from >= 0 && from < a->src.blocks && to >= 0 && to < a->dst.blocks;
}

/* Items are (entry, half). */
static int move_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_move_blocks_args *a = args;
  const int64_t bytes = run_bytes(a), lanes = a->lanes;
  for (int64_t item = begin; item < end; item++) {
    int64_t entry = item / 2, half = item % 2, lane = entry / a->n % lanes;
    if (!moves(a, entry)) continue;
    int64_t from = (a->from[entry] * 2LL + half) * lanes + lane;
    int64_t to = (a->to[entry] * 2LL + half) * lanes + lane;
    memcpy((char *)a->dst.kv + to * bytes, (const char *)a->src.kv + from * bytes,
           (size_t)bytes);
  }
  return 0;
}

KVL_CPU_KERNEL(move_blocks) {
  const struct kvl_move_blocks_args *a = args;
  int64_t entries = a->seqs * a->lanes * a->n, moved = 0;
  if (entries == 0) return 0;
  for (int64_t i = 0; i < entries; i++) moved += 2 * run_bytes(a) * moves(a, i);
  if (a->moved) __atomic_fetch_add(a->moved, moved, __ATOMIC_RELAXED);
  if (a->src.pinned && !a->dst.pinned) kvl__link_bytes(queue, KVL_LINK_TO_DEVICE, moved);
  if (a->dst.pinned && !a->src.pinned) kvl__link_bytes(queue, KVL_LINK_TO_HOST, moved);
  return kvl__split(2 * entries, kvl__grain_rows(run_bytes(a) / 4), move_piece, a);
}
