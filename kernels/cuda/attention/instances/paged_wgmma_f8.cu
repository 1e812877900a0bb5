/* The kernels of paged_wgmma.cuh over f8e4m3, for q in f16 and bf16. */
#include "args/attention.h"
#include "../wgmma_launch.cuh"

namespace kvl {

template <>
int launch_wgmma<__half, f8e4m3>(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  return with_wgmma_dim(
      a.cache, [&](auto dim) { return launch_wgmma_dim<__half, f8e4m3, dim.value>(a, q); });
}

}  // namespace kvl
