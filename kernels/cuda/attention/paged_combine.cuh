/* Joins the partial softmaxes of query rows whose keys were cut over several shares; see
 * paged_split.cuh. */
#ifndef KVL_CUDA_PAGED_COMBINE_CUH
#define KVL_CUDA_PAGED_COMBINE_CUH

#include "args/attention.h"
#include "cuda/attention/combine_parts.cuh"
#include "cuda/attention/paged_split.cuh"

namespace kvl {

/* A warp takes some dims of a row. On devices that can, the kernel starts while the decode
 * still runs (an SM has registers for one block of it beside the decode's), works out what it
 * has to join, and waits for the decode. */
__global__ void __launch_bounds__(COMBINE_WARPS *WARP, 4)
    paged_combine(const __grid_constant__ kvl_paged_attention_args a,
                  const __grid_constant__ split_place place, int dim_lanes) {
  __shared__ int kept[PLAN_LENGTHS];
  let_next_start();
  /* The lengths may be read before the wait: the decode kernel waited for them. */
  split_plan plan(a, place, kept);
  plan.make();
  const combine_lanes lanes(dim_lanes);
  const int head_dim = a.cache.value.dim;
  /* A row that was cut is found by its sequence or, when there are more sequences than
   * shares, by the share in which its sequence begins. */
  const bool by_sequence = a.seqs <= place.shares;
  const int pieces = (head_dim / 4 + dim_lanes - 1) / dim_lanes;
  const int units = (int)place.units.by;
  const int items = (by_sequence ? (int)a.seqs : (int)plan.shares) * units * place.rows *
                    pieces;
  for (int item = blockIdx.x * COMBINE_WARPS + threadIdx.x / WARP; item < items;
       item += gridDim.x * COMBINE_WARPS) {
    int rest = item / pieces;
    const int piece = item - rest * pieces;
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
    const int count = (int)(plan.share_of(first + plan.tiles(plan.length_of(seq)) - 1) -
                            share) +
                      1;
    const query_rows rows = unit_rows(place, seq, unit);
    if (count == 1 || row >= rows.count) continue;
    const uint32_t first_part = place.part(share, seq, a.seqs, unit, true) * place.rows + row;
    const uint32_t part0 = (share * units + unit) * place.rows + row;
    const uint32_t step = units * place.rows;
    auto part = [&](int i) { return i > 0 ? part0 + i * step : first_part; };
    wait_for_previous(); /* after the first time this costs nothing */

    join_parts(lanes, place.out, place.lse, head_dim, piece, piece + 1, count, part,
               [&](int dim, float(&x)[4], float m, float sum) {
                 if (lanes.mine == 0 && dim < head_dim)
                   write_part(a, place, -1, rows, row, dim, x, m, sum, 1.f);
               });
  }
  wait_for_previous();
}

}  // namespace kvl

#endif
