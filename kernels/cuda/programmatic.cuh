/* Programmatic dependent launch: a kernel may start before the previous kernel of the stream
 * has ended. It calls wait_for_previous before it touches anything that others read or write.
 * Before that call it may set itself up, ask the L2 to prefetch its inputs (a hint, not a
 * read), and guess: it reads lengths, tables and positions with read_early, prepares what
 * follows from them, reads them again after the wait, and starts over if they have changed.
 * Before the wait it writes only its own shared memory, because earlier kernels may still
 * read memory that looks free, above all a workspace. So a kernel may let the next one
 * start before its own last reads. Every kernel must wait, or the kernel after it would not
 * wait for the kernels before it. tools/early_writes.lua checks both in the PTX of all
 * kernels.
 * In a chain of small kernels this hides a kernel's start behind the end of the previous
 * one.
 * The previous kernel decides how early the next one starts: when it calls let_next_start, or
 * when its blocks end. On devices before sm_90 this is a plain launch and the two calls do
 * nothing.
 * Source    PTX ISA 7.8: griddepcontrol; CUDA C++ Programming Guide, programmatic dependent
 *           launch. A graph records such launches as programmatic edges. */
#ifndef KVL_CUDA_PROGRAMMATIC_CUH
#define KVL_CUDA_PROGRAMMATIC_CUH

#include "cuda/launch.cuh"

namespace kvl {

/* Waits until the kernels before this one have ended; then their results may be read. */
__device__ __forceinline__ void wait_for_previous() {
  KVL_SM90("griddepcontrol.wait;" ::: "memory");
}
/* Lets blocks of the next kernel start beside this one's, once all of these have started. */
__device__ __forceinline__ void let_next_start() {
  KVL_SM90("griddepcontrol.launch_dependents;" ::: "memory");
}

/* Reads a number that kernels before this one may still write, for a guess. It bypasses the
 * L1, where later reads would find the old number. */
__device__ __forceinline__ int read_early(const int *p) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ float read_early(const float *p) {
  return __int_as_float(read_early((const int *)p));
}
/* Hints for the L2: they are no reads, and the address need not be readable. The second
 * asks for `bytes` at p, both multiples of 16. */
__device__ __forceinline__ void prefetch_l2(const void *p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
__device__ __forceinline__ void prefetch_bulk(const void *p, uint32_t bytes) {
  KVL_SM90("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
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
/* How many clusters of a kernel the device runs at once; 0 if it takes none. The answer depends
 * on the device: a cluster stays within one part of it, and the parts have unequal numbers of
 * SMs. An H200 takes 264 blocks of a kernel that puts two on an SM, but only 79 clusters of
 * three. The kernel must be allowed its shared memory, and always have the same. */
constexpr int CLUSTER_MOST = 8; /* blocks, on any device */
template <auto kernel>
int clusters_at_once(int cluster, int threads, int bytes_shared, const kvl_cuda_queue *q) {
  static int known[64][CLUSTER_MOST + 1]; /* 1 + the answer, per device */
  int &fit = known[q->device % 64][cluster];
  if (fit) return fit - 1;
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute;
  config.gridDim = dim3((unsigned)cluster), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes_shared;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {(unsigned)cluster, 1, 1};
  config.attrs = &attribute, config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess)
    count = 0, (void)cudaGetLastError();
  fit = count + 1;
  return count;
}
template <class... P, class... A>
int launch_programmatic(void (*kernel)(P...), dim3 grid, int threads, size_t bytes_shared,
                        const kvl_cuda_queue *q, const A &...args) {
  return launch_clusters(kernel, 1, grid, threads, bytes_shared, q, args...);
}
#endif

}  // namespace kvl

#endif
