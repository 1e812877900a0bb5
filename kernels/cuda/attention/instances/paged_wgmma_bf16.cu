/* The kernels of paged_wgmma.cuh for q in bf16, over its own dtype. */
#include "args/attention.h"
#include "../wgmma_launch.cuh"

namespace kvl {

template <>
int launch_wgmma<__nv_bfloat16, void>(const kvl_paged_attention_args &a,
                                      const kvl_cuda_queue *q) {
  return with_wgmma_dim(a.cache, [&](auto dim) {
    return launch_wgmma_dim<__nv_bfloat16, void, dim.value>(a, q);
  });
}

}  // namespace kvl
