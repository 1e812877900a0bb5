/* Appends K and V to the host tier, to the slots that hold its blocks, and to a buffer.
 *   k, v     f32, or like cache (to f8e4m3: f32 f16 bf16)  [tokens, kv_heads, head_dim]
 *   places   i64                  [tokens]   of the host tier; < 0 is skipped
 *   cache    f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   memory   like cache           [slots, 2, kv_heads, block_size, head_dim]
 *   slot_of  i32                  [kv_heads, blocks], or tokens for blocks where a slot holds
 *                                 one
 *   buffer   like cache   optional  [buffer_blocks, 2, kv_heads, block_size, head_dim]
 *   k_scale, v_scale  f32         [kv_heads]   optional
 * Limit: read plus write bandwidth, and the link to the host tier. */
#include "args/offload.h"
#include "cpu/attention/append.h"

KVL_CPU_KERNEL(hot_append) {
  const struct kvl_hot_append_args *a = args;
  struct append row = {.to = a->cache,
                       .k = a->k,
                       .v = a->v,
                       .places = a->places,
                       .tokens = a->tokens,
                       .blocks = a->cache.blocks,
                       .dtype = a->dtype};
  int status = append_run(&row, queue);
  if (status >= 0 && a->buffer.memory) {
    struct append open = row;
    open.to = a->buffer;
    open.places = a->buffer_places;
    open.blocks = a->buffer.blocks;
    status = append_run(&open, queue);
  }
  row.to = a->hot.memory;
  row.each = a->hot.each;
  row.slot_of = a->hot.slot_of;
  return status < 0 ? status : append_run(&row, queue);
}
