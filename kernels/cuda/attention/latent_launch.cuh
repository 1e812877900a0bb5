/* The host's side of attention over latents; instances/latent.cu defines it. */
#ifndef KVL_CUDA_LATENT_LAUNCH_CUH
#define KVL_CUDA_LATENT_LAUNCH_CUH

#include "args/attention.h"
#include "cuda/launch.cuh"
#include "hook.h"

namespace kvl {

/* Whether values are the first numbers of keys. */
inline bool is_latent(const kvl_paged_attention_args &a) { return a.cache.value.begin == 0; }

int launch_latent(const kvl_hooked_attention_args &h, const kvl_cuda_queue *q);
/* The bytes of its workspace. */
size_t latent_bytes(const kvl_hooked_attention_args &h, int device, int sm_count);

}  // namespace kvl

#endif
