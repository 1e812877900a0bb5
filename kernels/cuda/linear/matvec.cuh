/* out = a @ b^T for the few rows of a decode step. A team of four warps takes a row of b at a
 * time and streams it through registers; the next batch of packs is always in flight.
 *   a    f16 bf16       [m, k]     m <= 2, k a multiple of 8; it fits the shared memory
 *   b    like a         [n, k]
 *   out  like a or f32  [m, n]
 * all 16-byte aligned. Consecutive teams are on different SMs, so that the device reads b
 * side by side. The launch is programmatic: while the previous kernel ends, a team asks the
 * L2 to prefetch its first row of b. That is a hint and no read, so it does not matter when b
 * was written, or by whom.
 * Limit: the bytes of b at memory bandwidth.
 * Measured: notes/20261122-linear.md. */
#ifndef KVL_CUDA_MATVEC_CUH
#define KVL_CUDA_MATVEC_CUH

#include "args/linear.h"
#include "cuda/barrier.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {

enum {
  MATVEC_ROWS = 2,      /* the most rows of a */
  MATVEC_THREADS = 512, /* one block an SM */
  MATVEC_TEAM = 4,      /* warps of a team */
  MATVEC_AHEAD = 8,     /* packs that a lane has in flight */
};

__device__ __forceinline__ void ask_l2_for(const void *p, uint32_t bytes) {
  KVL_SM90("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

/* sum[i] += a[i] . w over a lane's packs `first`, first + STRIDE, ... up to the row's end. */
template <int STRIDE, class T, int M>
__device__ __forceinline__ void add_products(const uint4 (&w)[MATVEC_AHEAD], const uint4 *a,
                                             int packs, int first, float (&sum)[M]) {
#pragma unroll
  for (int u = 0; u < MATVEC_AHEAD; u++) {
    const int p = first + u * STRIDE;
    if (p >= packs) break;
    const pack<T, 8> of_b = reinterpret_cast<const pack<T, 8> &>(w[u]);
#pragma unroll
    for (int i = 0; i < M; i++) {
      const pack<T, 8> of_a = load_pack<8>((const T *)(a + i * packs + p));
#pragma unroll
      for (int e = 0; e < 8; e++) sum[i] += to_float(of_b.at[e]) * to_float(of_a.at[e]);
    }
  }
}

/* The sum over a team's warps, valid in its first warp. All warps must call it equally
 * often. */
template <int M>
__device__ __forceinline__ void team_sum(float (&sum)[M], int team, int row) {
#pragma unroll
  for (int i = 0; i < M; i++) sum[i] = warp_sum(sum[i]);
  __shared__ float sums[2][MATVEC_THREADS / WARP][M]; /* used in turn: one barrier a row */
  const int lane = threadIdx.x % WARP, turn = row & 1;
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < M; i++) sums[turn][threadIdx.x / WARP][i] = sum[i];
  named_sync(team + 1, MATVEC_TEAM * WARP);
#pragma unroll
  for (int i = 0; i < M; i++)
    sum[i] = warp_sum(lane < MATVEC_TEAM ? sums[turn][team * MATVEC_TEAM + lane][i] : 0.f);
}

template <class T, class Out, int M>
__global__ void __launch_bounds__(MATVEC_THREADS, 1)
    matvec(const uint4 *a, const uint4 *b, Out *out, int64_t n, int packs) {
  extern __shared__ uint4 shared_a[]; /* [M, packs] */
  constexpr int STRIDE = MATVEC_TEAM * WARP, TEAMS = MATVEC_THREADS / STRIDE;
  constexpr int STEP = MATVEC_AHEAD * STRIDE;
  const int team = threadIdx.x / STRIDE, rank = threadIdx.x % STRIDE;
  const int64_t teams = (int64_t)gridDim.x * TEAMS;
  int64_t row = blockIdx.x + (int64_t)gridDim.x * team;
  let_next_start();
  if (rank == 0 && row < n) ask_l2_for(b + row * packs, packs * 16);
  wait_for_previous();
  uint4 now[MATVEC_AHEAD], next[MATVEC_AHEAD];
  auto load = [&](uint4(&to)[MATVEC_AHEAD], int64_t r, int first) {
    if (r >= n) return;
#pragma unroll
    for (int u = 0; u < MATVEC_AHEAD; u++)
      if (first + u * STRIDE < packs)
        to[u] = load_streaming(b + r * packs + first + u * STRIDE);
  };
  load(now, row, rank);
  for (int i = threadIdx.x; i < M * packs; i += MATVEC_THREADS) shared_a[i] = a[i];
  __syncthreads();
  for (int turn = 0; row < n; turn++, row += teams) {
    float sum[M] = {};
    for (int first = rank; first - rank < packs; first += STEP) {
      const bool ends = first - rank + STEP >= packs;
      load(next, ends ? row + teams : row, ends ? rank : first + STEP);
      add_products<STRIDE, T>(now, shared_a, packs, first, sum);
#pragma unroll
      for (int u = 0; u < MATVEC_AHEAD; u++) now[u] = next[u];
    }
    team_sum(sum, team, turn);
#pragma unroll
    for (int i = 0; i < M; i++)
      if (rank == i) out[i * n + row] = from_float<Out>(sum[i]);
  }
}

/* shared_optin: bytes of shared memory a block may ask for. */
inline bool takes_matvec(const kvl_matmul_args &g, int shared_optin) {
  return g.transpose_b && g.batch == 1 && g.m <= MATVEC_ROWS && g.k % 8 == 0 &&
         g.a_row == g.k && g.out_row == g.n &&
         (g.dtype == KVL_DTYPE_F16 || g.dtype == KVL_DTYPE_BF16) &&
         aligned16(g.a, g.b, g.out) && g.m * g.k * 2 <= shared_optin - 1024;
}

template <class T, class Out, int M>
int launch_matvec(const kvl_matmul_args &g, const kvl_cuda_queue *q) {
  constexpr auto kernel = matvec<T, Out, M>;
  constexpr int TEAMS = MATVEC_THREADS / WARP / MATVEC_TEAM;
  int status = allow_shared<kernel>(q, q->shared_optin - 1024);
  if (status != KVL_OK) return status;
  const int64_t blocks = (g.n + TEAMS - 1) / TEAMS;
  return launch_programmatic(kernel, (unsigned)(blocks < q->sm_count ? blocks : q->sm_count),
                             MATVEC_THREADS, (size_t)(g.m * g.k * 2), q, (const uint4 *)g.a,
                             (const uint4 *)g.b, (Out *)g.out, g.n, (int)(g.k / 8));
}
template <class T, class Out>
int launch_matvec(const kvl_matmul_args &g, const kvl_cuda_queue *q) {
  return g.m == 1 ? launch_matvec<T, Out, 1>(g, q) : launch_matvec<T, Out, 2>(g, q);
}
template <class T> int launch_matvec(const kvl_matmul_args &g, const kvl_cuda_queue *q) {
  return g.out_dtype == KVL_DTYPE_F32 ? launch_matvec<T, float>(g, q)
                                      : launch_matvec<T, T>(g, q);
}
inline int launch_matvec(const kvl_matmul_args &g, const kvl_cuda_queue *q) {
  return g.dtype == KVL_DTYPE_F16 ? launch_matvec<__half>(g, q)
                                  : launch_matvec<__nv_bfloat16>(g, q);
}

}  // namespace kvl

#endif
