/* mqa_logits over index-K memory: row r looks at the first lens[r] tokens of its sequence.
 *   q        f8e4m3  [sequences * each, heads, dim]   heads 1 ... 64; dim 32, 64 or 128
 *   weights  f32     [sequences * each, heads]
 *   cache    u8      [blocks, block_size * (dim + 4)]
 *   tables   i32     [sequences, max_blocks]
 *   lens     i32     [sequences * each]
 *   logits   f32 bf16  [sequences * each, columns]   -inf for an entry that is no block
 * Source: DeepGEMM's fp8_paged_mqa_logits. */
#include "mqa_mma.cuh"

KVL_CUDA_KERNEL(mqa_logits_paged) {
  const kvl_mqa_logits_paged_args &a = *(const kvl_mqa_logits_paged_args *)args;
  return kvl::mqa_logits_mma(kvl::mqa_paged{a}, (const kvl_cuda_queue *)queue);
}
