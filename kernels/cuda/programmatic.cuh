/* Programmatic dependent launch: a kernel may start before the previous kernel of the stream
 * has ended. It calls wait_for_previous before it touches anything that others read or write.
 * Before that call it may set itself up and ask the L2 to prefetch its inputs (a hint, not a
 * read). The previous kernel decides how early the next one starts: when it calls
 * let_next_start, or when its blocks end. On devices before sm_90 this is a plain launch and
 * the two calls do nothing.
 * Source    PTX ISA 7.8: griddepcontrol; CUDA C++ Programming Guide, programmatic dependent
 *           launch. A graph records such launches as programmatic edges. */
#ifndef KVL_CUDA_PROGRAMMATIC_CUH
#define KVL_CUDA_PROGRAMMATIC_CUH

#include "launch.cuh"

namespace kvl {

/* Waits until the kernels before this one have ended; then their results may be read. */
__device__ __forceinline__ void wait_for_previous() {
  KVL_SM90("griddepcontrol.wait;" ::: "memory");
}
/* Lets blocks of the next kernel start beside this one's, once all of these have started. */
__device__ __forceinline__ void let_next_start() {
  KVL_SM90("griddepcontrol.launch_dependents;" ::: "memory");
}

#ifndef __CUDACC_RTC__
/* A cluster is `cluster` neighbouring blocks along x; use 1 on devices before sm_90. */
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
#endif

}  // namespace kvl

#endif
