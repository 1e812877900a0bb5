/* For starts[r] <= j < ends[r]:
 *   logits[r][j] = scales[j] * sum_h weights[r][h] * max(q[r][h] . k[j], 0)
 * The other columns keep what they had.
 *   q        f8e4m3  [rows, heads, dim]   heads 1 ... 64; dim 32, 64 or 128
 *   weights  f32     [rows, heads]
 *   k        f8e4m3  [tokens, dim]
 *   scales   f32     [tokens]
 *   starts, ends  i32  [rows]
 *   logits   f32 bf16  [rows, columns]
 * Source: DeepSeek-V3.2's lightning indexer; DeepGEMM's fp8_mqa_logits. */
#include "args/index.h"
#include "cuda/index/mqa_wgmma.cuh"

namespace kvl {
namespace {

template <int H, int D> using shape = mqa_shape<mqa_contiguous, H, D, 128 / H>;

template <int H> int launch(const mqa_contiguous &keys, const kvl_cuda_queue *q) {
  switch (keys.dim()) {
    case 32: return launch_mqa_wgmma<shape<H, 32>>(keys, keys.a.rows, q);
    case 64: return launch_mqa_wgmma<shape<H, 64>>(keys, keys.a.rows, q);
    default: return launch_mqa_wgmma<shape<H, 128>>(keys, keys.a.rows, q);
  }
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(mqa_logits) {
  using namespace kvl;
  const mqa_contiguous keys{*(const kvl_mqa_logits_args *)args};
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (keys.rows() == 0 || keys.columns() == 0) return KVL_OK;
  if (!mqa_wgmma_takes(keys, q)) return mqa_logits_mma(keys, q);
  return keys.a.heads == 32 ? launch<32>(keys, q) : launch<64>(keys, q);
}
