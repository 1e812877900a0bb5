/* Chooses the experts of each row, as kvl_route says.
 *   logits   f32 f16 bf16  [rows, experts]
 *   bias     f32           [experts], optional
 *   chosen   i32           [rows, active + shared]
 *   weights  f32           [rows, active + shared]
 * A warp takes a row. Choices are kept in shared memory as keys in the order of the numbers, 1
 * for NaN, and 0 for experts that can no longer be chosen.
 * Limit: a launch, and for many rows `active` passes over shared memory. */
#include "args/linear.h"
#include "cuda/programmatic.cuh"

namespace kvl {
namespace {

enum { ROUTE_WARPS = 4, FEW_EXPERTS = 512 };

/* The index of the largest of n keys, not all 0, and the first among equals. Each lane gets it. */
__device__ __forceinline__ int best_of(const uint32_t *keys, int n, int lane) {
  uint32_t most = 0;
  int at = n - 1;
  for (int i = lane; i < n; i += WARP)
    if (keys[i] > most) most = keys[i], at = i;
  const uint32_t all = __reduce_max_sync(ALL_LANES, most);
  return (int)__reduce_min_sync(ALL_LANES, (unsigned)(most == all ? at : n - 1));
}

/* Every score of the row, in the place of its logit. */
__device__ __forceinline__ void score_row(bool is_sigmoid, float *scores, int n, int lane) {
  if (is_sigmoid) {
    for (int e = lane; e < n; e += WARP) scores[e] = 1.f / (1.f + expf(-scores[e]));
    return;
  }
  float most = -INFINITY, sum = 0.f;
  for (int e = lane; e < n; e += WARP) most = fmaxf(most, scores[e]);
  most = warp_max(most);
  for (int e = lane; e < n; e += WARP) sum += scores[e] = expf(scores[e] - most);
  sum = warp_sum(sum);
  for (int e = lane; e < n; e += WARP) scores[e] /= sum;
}

/* Sets the keys of all experts to 0 but those of the best groups. worth: room for a key of
 * each group. */
__device__ __forceinline__ void close_groups(const kvl_router &router, uint32_t *keys,
                                             uint32_t *worth, int n, int lane) {
  const int groups = router.groups, each = n / groups;
  for (int i = lane; i < groups; i += WARP) {
    uint32_t best = 0, next = 0;
    for (int e = i * each; e < (i + 1) * each; e++) {
      next = max(next, min(best, keys[e]));
      best = max(best, keys[e]);
    }
    worth[i] = router.is_sigmoid && each > 1
                   ? 1 + order_key(order_value(best - 1) + order_value(next - 1))
                   : best;
  }
  __syncwarp();
  for (int i = 0; i < groups; i++) {
    int better = 0;
    for (int j = lane; j < groups; j += WARP)
      better += worth[j] > worth[i] || (j < i && worth[j] == worth[i]);
    if (warp_sum(better) < router.open_groups) continue;
    for (int e = i * each + lane; e < (i + 1) * each; e += WARP) keys[e] = 0;
  }
  __syncwarp();
}

/* WARPS rows at a time in a thread block; shared memory has scores and keys of each. */
template <class T>
__global__ void __launch_bounds__(ROUTE_WARPS *WARP)
    route(const __grid_constant__ kvl_route_args g) {
  extern __shared__ float route_memory[];
  const int n = (int)g.experts, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int64_t row = (int64_t)blockIdx.x * (blockDim.x / WARP) + warp;
  float *const scores = route_memory + 3 * n * warp;
  uint32_t *const keys = (uint32_t *)scores + n, *const worth = keys + n;
  let_next_start();
  wait_for_previous();
  if (row >= g.rows) return;
  const T *const logits = (const T *)g.logits + row * n;
  for (int e = lane; e < n; e += WARP) {
    scores[e] = to_float(logits[e]);
    keys[e] = __float_as_uint(g.bias ? g.bias[e] : 0.f);
  }
  __syncwarp();
  score_row(g.router.is_sigmoid, scores, n, lane);
  for (int e = lane; e < n; e += WARP)
    keys[e] = 1 + order_key(scores[e] + __uint_as_float(keys[e]));
  __syncwarp();
  if (g.router.open_groups < g.router.groups) close_groups(g.router, keys, worth, n, lane);
  float sum = 0.f;
  for (int j = 0; j < g.active; j++) {
    const int e = best_of(keys, n, lane);
    sum += scores[e];
    if (lane == 0) worth[j] = e, keys[e] = 0;
    __syncwarp();
  }
  const float by = g.router.is_normed ? sum + 1e-20f : 1.f; /* all of them may be 0 */
  const int64_t columns = g.active + g.router.shared;
  for (int64_t j = lane; j < columns; j += WARP) {
    const bool is_shared = j >= g.active;
    const int e = is_shared ? n + (int)(j - g.active) : (int)worth[j];
    g.chosen[row * columns + j] = e;
    g.weights[row * columns + j] = is_shared ? 1.f : scores[e] / by * g.router.factor;
  }
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(route) {
  const kvl_route_args &g = *(const kvl_route_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (g.rows == 0) return KVL_OK;
  const int warps = g.experts <= kvl::FEW_EXPERTS ? kvl::ROUTE_WARPS : 1;
  const size_t bytes = (size_t)(3 * warps * g.experts) * sizeof(float);
  int status = KVL_OK;
  KVL_CUDA_BY_FLOAT(g.dtype, T, {
    status = kvl::launch_programmatic(kvl::route<T>, kvl::ceil_div(g.rows, warps),
                                      warps * kvl::WARP, bytes, q, g);
  })
  return status;
}
