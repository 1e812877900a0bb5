/* mqa_logits over index-K memory: row r sees the first lens[r] tokens of its sequence.
 *   q        f8e4m3  [sequences * each, heads, dim]   heads 1 ... 64; dim 32, 64 or 128
 *   weights  f32     [sequences * each, heads]
 *   cache    u8      [blocks, block_size * (dim + 4)]
 *   tables   i32     [sequences, max_blocks]
 *   lens     i32     [sequences * each]
 *   logits   f32 bf16  [sequences * each, columns]   -inf for a table entry that is no block
 * Source: DeepGEMM's fp8_paged_mqa_logits. */
#include "args/index.h"
#include "cuda/index/mqa_wgmma.cuh"

namespace kvl {
namespace {

template <int H, int RQ> int launch(const mqa_paged &keys, const kvl_cuda_queue *q) {
  switch (keys.dim()) {
    case 32: return launch_mqa_wgmma<mqa_shape<mqa_paged, H, 32, RQ>>(keys, keys.a.each, q);
    case 64: return launch_mqa_wgmma<mqa_shape<mqa_paged, H, 64, RQ>>(keys, keys.a.each, q);
    default: return launch_mqa_wgmma<mqa_shape<mqa_paged, H, 128, RQ>>(keys, keys.a.each, q);
  }
}
template <int H> int launch_rows(const mqa_paged &keys, const kvl_cuda_queue *q) {
  return keys.a.each == 1 ? launch<H, 1>(keys, q) : launch<H, 128 / H>(keys, q);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(mqa_logits_paged) {
  using namespace kvl;
  const mqa_paged keys{*(const kvl_mqa_logits_paged_args *)args};
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (keys.rows() == 0 || keys.columns() == 0) return KVL_OK;
  if (!mqa_wgmma_takes(keys, q)) return mqa_logits_mma(keys, q);
  return keys.a.heads == 32 ? launch_rows<32>(keys, q) : launch_rows<64>(keys, q);
}
