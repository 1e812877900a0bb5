/* The kernels of paged_wgmma.cuh for q in f16, over its own dtype. */
#include "args/attention.h"
#include "../wgmma_launch.cuh"

namespace kvl {

template <>
int launch_wgmma<__half, void>(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  return with_wgmma_dim(
      a.cache, [&](auto dim) { return launch_wgmma_dim<__half, void, dim.value>(a, q); });
}

}  // namespace kvl
