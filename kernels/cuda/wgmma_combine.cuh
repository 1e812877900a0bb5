/* Joins the partial softmaxes of items that paged_wgmma.cuh has divided; wgmma_plan.cuh says
 * where they are. */
#ifndef KVL_CUDA_WGMMA_COMBINE_CUH
#define KVL_CUDA_WGMMA_COMBINE_CUH

#include "combine_parts.cuh"
#include "wgmma_plan.cuh"

namespace kvl {

/* A warp takes some dims of a query row. Beside work with few rows the kernel starts early, as
 * paged_combine does: what it runs before it waits costs nothing. */
template <class shape>
__global__ void __launch_bounds__(COMBINE_WARPS *WARP, 4)
    wgmma_combine(const __grid_constant__ kvl_paged_attention_args a,
                  const __grid_constant__ wgmma_plan plan, int dim_lanes) {
#if KVL_SM90A
  constexpr int D = shape::D;
  let_next_start();
  const combine_lanes lanes(dim_lanes);
  const int pieces = (D / 4 + dim_lanes - 1) / dim_lanes;
  const int items = plan.entries * plan.lanes * plan.rows * pieces;
  for (int item = blockIdx.x * COMBINE_WARPS + threadIdx.x / WARP; item < items;
       item += gridDim.x * COMBINE_WARPS) {
    int rest = item / pieces;
    const int dim = lanes.dim(item - rest * pieces);
    const int r = rest % plan.rows;
    rest /= plan.rows;
    const int entry = rest / plan.lanes, to_lane = rest - entry * plan.lanes;
    /* Lengths may be read before the wait: the attention waited for them. */
    wgmma_work w(a, plan, entry);
    w.set_lane<shape>(a, plan, to_lane);
    const query_rows rows = w.rows();
    if (w.tokens == 0 || r >= rows.count) continue;
    wait_for_previous(); /* after the first time this costs nothing */
    const uint32_t total = plan.firsts[plan.entries], before = plan.firsts[entry];
    const uint32_t tiles = (plan.firsts[entry + 1] - before) / plan.groups();
    const int group = to_lane / plan.side, beside = to_lane - group * plan.side;
    const uint32_t shares = shares_used(plan, total), first = before + group * tiles;
    const int share = share_of(total, first, shares);
    const int count = share_of(total, first + tiles - 1, shares) - share + 1;
    if (count == 1) continue;
    float m, sum, x[4];
    auto part = [&](int i) {
      return (uint32_t)(plan.part(share + i, beside, i == 0) * plan.rows + r);
    };
    join_parts(lanes, plan.out, plan.lse, D, dim, count, part, x, m, sum);
    const int64_t row = rows.token(r) * a.heads + rows.head(r);
    if (lanes.mine == 0 && dim < D) write_row(a, end_row(a, row, m, sum), row, dim, x);
  }
  wait_for_previous();
#endif
}

}  // namespace kvl

#endif
