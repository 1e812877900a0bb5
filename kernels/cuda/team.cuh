/* Teams of blocks that work on one row: a thread-block cluster where there are several.
 * Before sm_90 there are no clusters; teams are of one block, and what is here does nothing.
 * Their launch is programmatic.
 *
 * Source    PTX ISA 8.0 and later: barrier.cluster, mapa, cp.async.bulk. */
#ifndef KVL_CUDA_TEAM_CUH
#define KVL_CUDA_TEAM_CUH

#include "paged.cuh"   /* shared_address, allow_shared */
#include "programmatic.cuh"

namespace kvl {

constexpr int TEAM_THREADS = 512;      /* of a block */

/* Sizes of a call, the same for all of its rows. */
struct team_shape {
  uint32_t stretch;                    /* elements of a row that a warp takes */
  uint32_t capacity;                   /* keys of a block's list, even */
  uint32_t words;                      /* of the bitmap */
  uint32_t bytes_shared;
};

__device__ __forceinline__ void cluster_arrive() {   /* orders nothing */
  KVL_SM90("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  KVL_SM90("barrier.cluster.wait;" ::: "memory");
}
/* The same place in the shared memory of the cluster's first block. */
__device__ __forceinline__ uint32_t leader_at(const void *p) {
  uint32_t at = shared_address(p);
  KVL_SM90("mapa.shared::cluster.u32 %0, %0, 0;" : "+r"(at));
  return at;
}
/* Send bytes (a multiple of 16) to the same place there; its barrier counts them. */
__device__ __forceinline__ void send_to_leader(const void *p, uint32_t bytes, void *barrier) {
  KVL_SM90("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
           " [%0], [%1], %2, [%3];"
           :: "r"(leader_at(p)), "r"(shared_address(p)), "r"(bytes), "r"(leader_at(barrier))
           : "memory");
}

template <int TEAM, class... P, class... A>
int launch_teams(void (*kernel)(P...), int64_t rows, int threads, size_t bytes_shared,
                 const kvl_cuda_queue *q, const A &...args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)(rows * TEAM));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes_shared;
  config.stream = q->stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {TEAM, 1, 1};
  config.attrs = attributes;
  config.numAttrs = !is_hopper(q) ? 0 : TEAM > 1 ? 2 : 1;
  return kvl__cuda_check(cudaLaunchKernelEx(&config, kernel, P(args)...));
}

template <int EACH_, int TEAM_, int SAMPLES_> struct team {
  static constexpr int EACH = EACH_, TEAM = TEAM_, SAMPLES = SAMPLES_;
};

/* Calls f(team<...>()) with the team that suits rows of that width. */
template <class F> int with_team(int64_t rows, int64_t width, const kvl_cuda_queue *q, F f) {
  const int64_t blocks = is_hopper(q) ? q->sm_count / rows : 1;   /* for a row */
  if (width <= 2048) return f(team<4, 1, 1>());
  if (width <= 8192) return f(team<16, 1, 1>());
  if (blocks >= 8 && width <= 1 << 18) return f(team<16, 8, 2>());
  if (blocks >= 8) return f(team<16, 8, 8>());
  if (blocks >= 2) return f(team<16, 2, 4>());
  return f(team<16, 1, 4>());
}

}  // namespace kvl

#endif
