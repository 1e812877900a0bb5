/* Teams of thread blocks that work on one row. A team of several blocks is a thread-block
 * cluster. Before sm_90 there are no clusters: teams have one block, and these functions do
 * nothing. Teams are launched programmatically.
 *
 * Source    PTX ISA 8.0 and later: barrier.cluster, mapa, cp.async.bulk. */
#ifndef KVL_CUDA_TEAM_CUH
#define KVL_CUDA_TEAM_CUH

#include "cuda/barrier.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {

constexpr int TEAM_THREADS = 512; /* of one block */

/* The sizes of a call, the same for all of its rows. */
struct team_shape {
  uint32_t stretch;  /* elements of a row that a warp takes */
  uint32_t capacity; /* keys of a block's list, even */
  uint32_t words;    /* of the bitmap */
  uint32_t bytes_shared;
};

__device__ __forceinline__ void cluster_arrive() { /* orders no memory accesses */
  KVL_SM90("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  KVL_SM90("barrier.cluster.wait;" ::: "memory");
}
/* The address of p's counterpart in the shared memory of block `rank` of the cluster. */
__device__ __forceinline__ uint32_t place_in(int rank, const void *p) {
  uint32_t at = shared_address(p);
  KVL_SM90("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
  return at;
}
__device__ __forceinline__ uint32_t leader_at(const void *p) { return place_in(0, p); }
/* Sends bytes (a multiple of 16) to p's counterpart in the leader (block 0), whose barrier
 * counts them. */
__device__ __forceinline__ void send_to_leader(const void *p, uint32_t bytes, void *barrier) {
  KVL_SM90("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
           " [%0], [%1], %2, [%3];" ::"r"(leader_at(p)),
           "r"(shared_address(p)), "r"(bytes), "r"(leader_at(barrier))
           : "memory");
}
/* Makes the leader's barrier expect these bytes; the arrival orders no memory accesses. */
__device__ __forceinline__ void leader_expects(const void *barrier, uint32_t bytes) {
  KVL_SM90("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(
               leader_at(barrier)),
           "r"(bytes)
           : "memory");
}
/* Sends 16 bytes to the counterpart of `p` in block `rank`, whose barrier counts them. */
__device__ __forceinline__ void send_quad(int rank, const uint4 &x, void *p,
                                          uint64_t *barrier) {
  KVL_SM90("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
           " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(place_in(rank, p)),
           "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(place_in(rank, barrier))
           : "memory");
}

/* The largest team, of at most `most` blocks, of which the device runs `rows` at once with
 * every block on its own SM; 1 when no larger team fits. The kernel may ask for all shared
 * memory. */
template <auto kernel>
int largest_team(int64_t rows, int most, int threads, const kvl_cuda_queue *q) {
  int team = is_hopper(q) ? most : 1;
  while (team > 1 && clusters_at_once<kernel>(team, threads, q->shared_optin, q) < rows)
    team--;
  return team;
}

/* Launches one team of `team` blocks for each row. */
template <class... P, class... A>
int launch_teams(void (*kernel)(P...), int team, int64_t rows, int threads,
                 size_t bytes_shared, const kvl_cuda_queue *q, const A &...args) {
  return launch_clusters(kernel, team, dim3((unsigned)(rows * team)), threads, bytes_shared,
                         q, args...);
}

template <int EACH_, int TEAM_, int SAMPLES_> struct team {
  static constexpr int EACH = EACH_, TEAM = TEAM_, SAMPLES = SAMPLES_;
};

/* Calls f(team<...>()) with the team that suits rows of this width. */
template <class F> int with_team(int64_t rows, int64_t width, const kvl_cuda_queue *q, F f) {
  const int64_t blocks = is_hopper(q) ? q->sm_count / rows : 1; /* per row */
  if (width <= 2048) return f(team<4, 1, 1>());
  if (width <= 8192) return f(team<16, 1, 1>());
  if (blocks >= 8 && width <= 1 << 18) return f(team<16, 8, 2>());
  if (blocks >= 8) return f(team<16, 8, 8>());
  if (blocks >= 2) return f(team<16, 2, 4>());
  return f(team<16, 1, 4>());
}

}  // namespace kvl

#endif
