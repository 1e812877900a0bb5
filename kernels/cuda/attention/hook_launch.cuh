/* The host's side of an attention kernel with a hook: finds the kernel in the library that
 * NVRTC compiled, and launches it. The kernel's name contains its shape, so that a library
 * which was compiled for another shape is refused. */
#ifndef KVL_CUDA_HOOK_LAUNCH_CUH
#define KVL_CUDA_HOOK_LAUNCH_CUH

#include <stdio.h>

#include "args/attention.h"
#include "cuda/attention/paged_mend.cuh"
#include "cuda/strip.cuh"
#include "cuda/driver.cuh"
#include "hook.h"
#include "cuda/launch.cuh"

namespace kvl {

template <class T> constexpr const char *type_name = "f32";
template <> inline constexpr const char *type_name<__half> = "f16";
template <> inline constexpr const char *type_name<__nv_bfloat16> = "bf16";
template <> inline constexpr const char *type_name<f8e4m3> = "f8";
template <> inline constexpr const char *type_name<int8> = "int8";
template <> inline constexpr const char *type_name<f8_latent> = "f8_latent";

/* The suffix of the name of a kernel for 16-bit queries. */
template <class C> constexpr const char *codec_suffix = "";
template <> inline constexpr const char *codec_suffix<f8e4m3> = "_f8";
template <> inline constexpr const char *codec_suffix<int8> = "_int8";
template <> inline constexpr const char *codec_suffix<f8_latent> = "_f8_latent";

/* What a kernel gets from a hook; the policy's struct has the same layout (print/cuda.lua). */
struct hook_argument {
  float *scores;
  int64_t room;
  uint64_t arguments[KVL_HOOK_ARGUMENTS_MAX / 8];
};

struct hook_kernel {
  char name[64];
  int grid_x, grid_y, threads, bytes_shared;
  bool programmatic;
  int cluster; /* thread blocks along x; 0 and 1: none */
  int grid_z = 1;
};

inline int hook_failed(CUresult error, const char *what) {
  return kvl_cuda::fail(KVL_ERR_DEVICE, "a hook's %s: %s", what, driver_words(error));
}

/* params: the kernel's parameters before the hook, one to three; the others are null. */
inline int launch_hooked(const kvl_hooked_attention_args &h, const hook_kernel &k,
                         const void *param0, const void *param1, const kvl_cuda_queue *q,
                         const void *param2 = nullptr) {
  const library_functions &f = the_driver();
  CUkernel kernel;
  CUresult error = f.get_kernel(&kernel, (CUlibrary)h.hook, k.name);
  if (error != CUDA_SUCCESS) return hook_failed(error, k.name);
  if (k.bytes_shared > SHARED_UNASKED) {
    error = f.set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, k.bytes_shared,
                            kernel, q->device);
    if (error != CUDA_SUCCESS) return hook_failed(error, "shared memory");
  }
  const kvl_paged_attention_args &a = h.base;
  hook_argument hook;
  hook.scores = h.scores;
  hook.room = a.max_blocks * a.cache.block_size;
  for (int i = 0; i < KVL_HOOK_ARGUMENTS_MAX / 8; i++) hook.arguments[i] = h.arguments[i];
  CUlaunchAttribute attributes[2] = {};
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attributes[0].value.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attributes[1].value.clusterDim = {(unsigned)k.cluster, 1, 1};
  CUlaunchConfig config = {};
  config.gridDimX = k.grid_x;
  config.gridDimY = k.grid_y;
  config.gridDimZ = k.grid_z;
  config.blockDimX = k.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = k.bytes_shared;
  config.hStream = q->stream;
  config.attrs = attributes;
  config.numAttrs = !k.programmatic || !is_hopper(q) ? 0 : k.cluster > 1 ? 2 : 1;
  void *params[] = {(void *)param0, param1 ? (void *)param1 : &hook,
                    param2 ? (void *)param2 : &hook, &hook};
  error = f.launch(&config, (CUfunction)kernel, params, nullptr);
  return error == CUDA_SUCCESS ? KVL_OK : hook_failed(error, "launch");
}

/* Computes the rows again that a kernel with a hook has noted in the workspace. C: the codec,
 * or void for that of T. */
template <class T, class C>
int launch_hooked_mend(const kvl_hooked_attention_args &h, const kvl_cuda_queue *q) {
  const uint8_t *notes = (const uint8_t *)h.base.workspace;
  hook_kernel k = {"", mend_blocks(h.base, q->sm_count), 1, MEND_WARPS * WARP, 0, true};
  snprintf(k.name, sizeof k.name, "mend_%s%s", type_name<T>, codec_suffix<C>);
  return launch_hooked(h, k, &h.base, &notes, q);
}

}  // namespace kvl

#endif
