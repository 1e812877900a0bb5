/* Joins the partial softmaxes of query rows whose keys were cut over several shares; see
 * paged_split.cuh. */
#ifndef KVL_CUDA_PAGED_COMBINE_CUH
#define KVL_CUDA_PAGED_COMBINE_CUH

#include "paged_split.cuh"

namespace kvl {

/* A warp takes 4 * dim_lanes dims of one such row. It reads 32 / dim_lanes partial results
 * side by side, up to five in flight per lane, and then joins them across the lanes. On
 * devices that can, the kernel starts while the decode still runs (an SM has registers for
 * one block of it beside the decode's), works out what it has to join, and waits for the
 * decode. */
constexpr int COMBINE_WARPS = 8, COMBINE_AT_ONCE = 5;
__global__ void __launch_bounds__(COMBINE_WARPS *WARP, 4)
    paged_combine(const __grid_constant__ kvl_paged_attention_args a,
                  const __grid_constant__ split_place place, int dim_lanes) {
  __shared__ uint32_t sums[PLAN_CHUNKS];
  let_next_start();
  /* The lengths may be read before the wait: the decode kernel waited for them. */
  const split_plan plan(a, place, sums);
  const int lane = threadIdx.x % WARP, side = WARP / dim_lanes, mine = lane / dim_lanes;
  const int head_dim = a.cache.head_dim;
  /* A row that was cut is found by its sequence or, when there are more sequences than
   * shares, by the share in which its sequence begins. */
  const bool by_sequence = a.seqs <= place.shares;
  const int pieces = (head_dim / 4 + dim_lanes - 1) / dim_lanes;
  const int units = (int)place.units.by;
  const int items = (by_sequence ? (int)a.seqs : (int)plan.shares) * units * place.rows *
                    pieces;
  bool waited = false;
  for (int item = blockIdx.x * COMBINE_WARPS + threadIdx.x / WARP; item < items;
       item += gridDim.x * COMBINE_WARPS) {
    int rest = item / pieces;
    const int dim = (item - rest * pieces) * dim_lanes * 4 + lane % dim_lanes * 4;
    const int row = rest % place.rows;
    rest /= place.rows;
    const int unit = rest % units;
    int seq = rest / units;
    uint32_t first, share;
    if (by_sequence) {
      first = plan.first_of(seq);
      share = plan.share_of(first);
    } else {
      share = seq;
      seq = plan.find(plan.begin(share + 1) - 1, first);
      if (first < plan.begin(share)) continue;
    }
    const int count = (int)(plan.share_of(first + plan.tiles(a.lens[seq]) - 1) - share) + 1;
    const query_rows rows = unit_rows(place, seq, unit);
    if (count == 1 || row >= rows.count) continue;
    if (!waited) wait_for_previous();
    waited = true;

    float m = -INFINITY, sum = 0.f, x[4] = {};
    const bool has = dim < head_dim;
    for (int base = mine; base < count; base += COMBINE_AT_ONCE * side) {
      float lse[COMBINE_AT_ONCE];
      float4 y[COMBINE_AT_ONCE];
#pragma unroll
      for (int j = 0; j < COMBINE_AT_ONCE; j++) {
        const int i = base + j * side;
        const int64_t part = place.part(share + i, seq, a.seqs, unit, i == 0) * place.rows +
                             row;
        lse[j] = i < count ? place.lse[part] : -INFINITY;
        y[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (i < count && has) y[j] = *(const float4 *)(place.out + part * head_dim + dim);
      }
      float top = m;
#pragma unroll
      for (int j = 0; j < COMBINE_AT_ONCE; j++) top = fmaxf(top, lse[j]);
      const float shift = finite_shift(top), down = exp2_fast(m - shift);
      m = top;
      sum *= down;
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] *= down;
#pragma unroll
      for (int j = 0; j < COMBINE_AT_ONCE; j++) {
        const float weight = exp2_fast(lse[j] - shift);
        sum += weight;
        x[0] += weight * y[j].x;
        x[1] += weight * y[j].y;
        x[2] += weight * y[j].z;
        x[3] += weight * y[j].w;
      }
    }
    const float top = warp_max(m), down = exp2_fast(m - finite_shift(top));
    sum *= down;
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] *= down;
    for (int step = dim_lanes; step < WARP; step *= 2) {
      sum += __shfl_xor_sync(ALL_LANES, sum, step);
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] += __shfl_xor_sync(ALL_LANES, x[e], step);
    }
    if (mine == 0 && has) write_part(a, place, -1, rows, row, dim, x, top, sum, 1.f);
  }
  if (!waited) wait_for_previous();
}

}  // namespace kvl

#endif
