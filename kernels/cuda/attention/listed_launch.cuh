/* Attention over listed tokens (instances/listed.cu). */
#ifndef KVL_CUDA_LISTED_LAUNCH_CUH
#define KVL_CUDA_LISTED_LAUNCH_CUH

#include "cuda/common.cuh"
#include "hook.h"

namespace kvl {

int launch_listed(const kvl_hooked_attention_args &h, const kvl_cuda_queue *q);
/* Does the kernel for tensor cores take a call? */
bool lists_by_mma(const kvl_paged_attention_args &a, const kvl_cuda_queue *q);

}  // namespace kvl

#endif
