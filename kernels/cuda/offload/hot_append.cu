/* append_kv to three memories: the host tier, the slots of the hot cache that hold the
 * tokens' blocks, and a buffer of open blocks.
 *
 *   k, v     like cache or f32 (for f8e4m3: f32 f16 bf16)  [tokens, kv_heads, head_dim]
 *   places   i64                  [tokens]   of the host tier; < 0 is skipped
 *   cache    f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   memory   like cache           [slots, 2, kv_heads, block_size, head_dim]
 *   slot_of  i32                  [kv_heads, blocks]
 *   buffer   like cache           [buffer_blocks, 2, kv_heads, block_size, head_dim] optional
 *   k_scale, v_scale  f32         [kv_heads]   optional; of cache, memory and buffer alike
 * 16-byte aligned; head_dim is a multiple of 8, for f8e4m3 of 16. Exact (f32 rounds to
 * nearest even).
 *
 * Bytes   as append_kv, and up to as much again for memory
 * Limit   the link to the host where cache is pinned, in rows of head_dim elements */
#include "args/offload.h"
#include "cuda/attention/append_latent.cuh"

KVL_CUDA_KERNEL(hot_append) {
  const kvl_hot_append_args &a = *(const kvl_hot_append_args *)args;
  if (!kvl::aligned16(a.hot.memory.memory, a.buffer.memory))
    return kvl__cuda_check(cudaErrorMisalignedAddress);
  return kvl::append_rows(a, (const kvl_cuda_queue *)queue);
}
