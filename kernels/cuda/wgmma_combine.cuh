/* Joins the partial softmaxes of items that paged_wgmma.cuh has divided; wgmma_plan.cuh says
 * where they are. */
#ifndef KVL_CUDA_WGMMA_COMBINE_CUH
#define KVL_CUDA_WGMMA_COMBINE_CUH

#include "paged_split.cuh"
#include "wgmma_plan.cuh"

namespace kvl {

/* Joins the parts of divided items. A warp takes a query row; a thread block takes rows of one
 * item. */
constexpr int WGMMA_COMBINE_WARPS = 8;
template <class shape>
__global__ void __launch_bounds__(WGMMA_COMBINE_WARPS *WARP)
    wgmma_combine(const __grid_constant__ kvl_paged_attention_args a,
                  const __grid_constant__ wgmma_plan plan) {
#if KVL_SM90A
  constexpr int D = shape::D;
  const int lane = threadIdx.x % WARP;
  const int entry = blockIdx.x / plan.lanes, to_lane = blockIdx.x % plan.lanes;
  const int r = blockIdx.y * WGMMA_COMBINE_WARPS + threadIdx.x / WARP;
  wait_for_previous();
  const uint32_t total = plan.firsts[plan.entries];
  const uint32_t tiles = (plan.firsts[entry + 1] - plan.firsts[entry]) / plan.lanes;
  if (tiles == 0) return;
  const uint32_t shares = shares_used(plan, total);
  const uint32_t first = plan.firsts[entry] + to_lane * tiles;
  const int share = share_of(total, first, shares);
  const int count = share_of(total, first + tiles - 1, shares) - share + 1;
  if (count == 1) return;
  wgmma_work w(a, plan, entry);
  w.set_lane<shape>(a, plan, to_lane);
  const query_rows rows = w.rows();
  if (r >= rows.count) return;
  auto part = [&](int i) {
    return (int64_t)(share + i + (i == 0 ? plan.shares : 0)) * plan.rows + r;
  };
  constexpr int RUNS = (D + 4 * WARP - 1) / (4 * WARP);
  float m = -INFINITY, sum = 0.f, x[RUNS][4] = {};
  for (int base = 0; base < count; base += WARP) {
    const int mine = base + lane, here = min(count - base, WARP);
    const float lse = mine < count ? plan.lse[part(mine)] : -INFINITY;
    const float top = fmaxf(m, warp_max(lse)), shift = finite_shift(top);
    const float down = exp2_fast(m - shift), weight = exp2_fast(lse - shift);
    sum = sum * down + warp_sum(weight);
    m = top;
#pragma unroll
    for (int u = 0; u < RUNS; u++)
#pragma unroll
      for (int e = 0; e < 4; e++) x[u][e] *= down;
#pragma unroll 4
    for (int j = 0; j < here; j++) {
      const float by = __shfl_sync(ALL_LANES, weight, j);
      const float *y = plan.out + part(base + j) * D;
#pragma unroll
      for (int u = 0; u < RUNS; u++) {
        const int dim = (u * WARP + lane) * 4;
        if (dim >= D) continue;
        const float4 z = *(const float4 *)(y + dim);
        x[u][0] += by * z.x;
        x[u][1] += by * z.y;
        x[u][2] += by * z.z;
        x[u][3] += by * z.w;
      }
    }
  }
  const int64_t row = rows.token(r) * a.heads + rows.head(r);
  const row_end end = end_row(a, row, m, sum);
#pragma unroll
  for (int u = 0; u < RUNS; u++)
    if ((u * WARP + lane) * 4 < D) write_row(a, end, row, (u * WARP + lane) * 4, x[u]);
#endif
}

}  // namespace kvl

#endif
