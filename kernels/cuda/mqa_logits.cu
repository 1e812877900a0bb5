/* logits[r][j] = scales[j] * sum_h weights[r][h] * max(q[r][h] . k[j], 0) for starts[r] <= j <
 * ends[r]; other columns stay.
 *   q        f8e4m3  [rows, heads, dim]   heads 1 ... 64; dim 32, 64 or 128
 *   weights  f32     [rows, heads]
 *   k        f8e4m3  [tokens, dim]
 *   scales   f32     [tokens]
 *   starts, ends  i32  [rows]
 *   logits   f32 bf16  [rows, columns]
 * Source: DeepSeek-V3.2's lightning indexer; DeepGEMM's fp8_mqa_logits. */
#include "mqa_mma.cuh"

KVL_CUDA_KERNEL(mqa_logits) {
  const kvl_mqa_logits_args &a = *(const kvl_mqa_logits_args *)args;
  return kvl::mqa_logits_mma(kvl::mqa_contiguous{a}, (const kvl_cuda_queue *)queue);
}
