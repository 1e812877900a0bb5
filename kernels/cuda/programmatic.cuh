/* Programmatic dependent launch: a kernel may start under the end of the one before it in the
 * stream. It calls wait_for_previous before it touches anything that others read or write;
 * before that it may set itself up and ask the L2 for what it will read (a hint, not a read).
 * The one before decides how early: with let_next_start, or when its blocks end. On devices
 * before sm_90 this is a plain launch and the two calls do nothing.
 *
 * Source    PTX ISA 7.8: griddepcontrol; CUDA C++ Programming Guide, programmatic dependent
 *           launch. A graph records such launches as programmatic edges. */
#ifndef KVL_CUDA_PROGRAMMATIC_CUH
#define KVL_CUDA_PROGRAMMATIC_CUH

#include "launch.cuh"

namespace kvl {

/* The kernels before have ended, and their results may be read, from here on. */
__device__ __forceinline__ void wait_for_previous() {
  KVL_SM90("griddepcontrol.wait;" ::: "memory");
}
/* The next kernel's blocks may be placed beside this one's, once all of these are placed. */
__device__ __forceinline__ void let_next_start() {
  KVL_SM90("griddepcontrol.launch_dependents;" ::: "memory");
}

/* Clusters are `cluster` neighbouring blocks along x; 1 on devices before sm_90. */
template <class... P, class... A>
int launch_clusters(void (*kernel)(P...), int cluster, dim3 grid, int threads,
                    size_t bytes_shared, const kvl_cuda_queue *q, const A &...args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes_shared;
  config.stream = q->stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {(unsigned)cluster, 1, 1};
  config.attrs = attributes;
  config.numAttrs = !is_hopper(q) ? 0 : cluster > 1 ? 2 : 1;
  return kvl__cuda_check(cudaLaunchKernelEx(&config, kernel, P(args)...));
}
template <class... P, class... A>
int launch_programmatic(void (*kernel)(P...), dim3 grid, int threads, size_t bytes_shared,
                        const kvl_cuda_queue *q, const A &...args) {
  return launch_clusters(kernel, 1, grid, threads, bytes_shared, q, args...);
}

}  // namespace kvl

#endif
