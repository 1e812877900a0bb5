/* Scatters the rows of K and V of new tokens into the paged cache: cache[place] = k, v. An
 * f8e4m3 cache gets k / k_scale and v / v_scale, saturated.
 *
 *   k, v   like cache or f32 (for f8e4m3: f32 f16 bf16)  [tokens, kv_heads, head_dim]; no v
 *          where values are the first numbers of keys
 *   places  i64                  [tokens]   block * block_size + offset; < 0 is skipped
 *   cache  f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   k_scale, v_scale  f32       [kv_heads]   optional
 * 16-byte aligned; head_dim is a multiple of 8, for f8e4m3 of 16. Exact (f32 rounds to
 * nearest even).
 *
 * Bytes   tokens * kv_heads * head_dim * 2 * (element of k + element of cache)
 * Limit   memory: reads are sequential, writes are whole rows of head_dim elements
 * Best    4096 tokens, 8 heads x 128: bf16 12.5 us, 0.87 of the run's read bandwidth; bf16 to
 *         f8e4m3 14.1 us, 0.58 (3.0 us of it are an empty launch, the rest is divisions)
 *         (H100 80GB HBM3, 2026-11-21) */
#include "args/attention.h"
#include "cuda/attention/append_latent.cuh"

KVL_CUDA_KERNEL(append_kv) {
  return kvl::append_rows(*(const kvl_append_kv_args *)args, (const kvl_cuda_queue *)queue);
}
