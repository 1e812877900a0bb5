/* Barriers for some of a block's threads: mbarriers in shared memory, which count arrivals
 * and copied bytes, with the copy that they count; and the block's numbered barriers.
 *
 * An mbarrier is 8 bytes and is named by its 32-bit address in shared memory. It exists from
 * sm_90 on; before that these functions do nothing.
 *
 * Source    PTX ISA 8.0 and later: mbarrier, cp.async.bulk, barrier. */
#ifndef KVL_CUDA_BARRIER_CUH
#define KVL_CUDA_BARRIER_CUH

#include "cuda/common.cuh"

namespace kvl {

/* A barrier's phase ends when `count` arrivals and all expected bytes are in. A wait names
 * the parity of its phase: 0 for the first. Waiting for parity 1 on a new barrier returns at
 * once. */
__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  KVL_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
/* Call it after the inits, before a __syncthreads or a cluster's barrier, so that copies see
 * the barriers too. */
__device__ __forceinline__ void barrier_init_done() {
  KVL_SM90("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  KVL_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* One arrival for the whole warp, once all of its lanes are here. */
__device__ __forceinline__ void barrier_arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}
/* The bytes may come before they are expected. */
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
  KVL_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
           : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 1;
  do {
    KVL_SM90("{\n"
             ".reg .pred p;\n"
             "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
             "selp.u32 %0, 1, 0, p;\n"
             "}"
             : "=r"(done)
             : "r"(barrier), "r"(parity)
             : "memory");
  } while (!done);
}
/* Whether the phase with this parity is over. Does not wait. */
__device__ __forceinline__ bool barrier_passed(uint32_t barrier, uint32_t parity) {
  uint32_t done = 1;
  KVL_SM90("{\n"
           ".reg .pred p;\n"
           "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
           "selp.u32 %0, 1, 0, p;\n"
           "}"
           : "=r"(done)
           : "r"(barrier), "r"(parity)
           : "memory");
  return done;
}

/* Copies `bytes` contiguous bytes to shared memory; the count and both addresses are
 * multiples of 16. The barrier counts the bytes. */
__device__ __forceinline__ void copy_bytes(uint32_t shared, const void *from, int bytes,
                                           uint32_t barrier) {
  KVL_SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
           " [%0], [%1], %2, [%3];" ::"r"(shared),
           "l"(from), "r"(bytes), "r"(barrier)
           : "memory");
}
/* Arrives when all of this thread's asynchronous 16-byte copies so far have arrived, without
 * waiting for them. It orders nothing else that the thread wrote. Code that waits for it
 * must call fence_async before wgmma reads the copies. */
__device__ __forceinline__ void barrier_arrive_copied(uint32_t barrier) {
  KVL_SM90("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/* Orders this thread's writes to shared memory before wgmma and copies that start after the
 * next barrier. */
__device__ __forceinline__ void fence_async() {
  KVL_SM90("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Barrier `id` (1 ... 15) of `threads` threads. */
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Arrives there without waiting. */
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace kvl

#endif
