/* Joins the partial softmaxes of items that paged_wgmma.cuh has divided; wgmma_plan.cuh says
 * where they are. One kernel serves all shapes and head_dims: it waits for memory. */
#include "args/attention.h"
#include "cuda/attention/combine_parts.cuh"
#include "cuda/attention/latent_memory.cuh"
#include "cuda/attention/paged_mend.cuh"
#include "cuda/attention/wgmma_launch.cuh"

namespace kvl {
namespace {

/* `each` thread blocks have an item. Of a divided one, a warp takes some dims of a query row; the
 * warp with the first dims computes the row again if that is necessary (paged_mend.cuh); with a
 * hook, it notes the row. Of a whole item, noted rows are computed again. After an attention
 * with few rows the kernel starts early, as paged_combine does, so what it does before its wait
 * costs nothing. */
template <class T, class C, int MOST>
__global__ void __launch_bounds__(COMBINE_WARPS *WARP, 4)
    wgmma_combine(const __grid_constant__ kvl_paged_attention_args a,
                  const __grid_constant__ wgmma_plan plan, int each, int dim_lanes,
                  bool hooked) {
#if KVL_SM90A
  const int D = a.cache.value.dim, lane = threadIdx.x % WARP;
  let_next_start();
  const combine_lanes lanes(dim_lanes);
  const int pieces = (D / 4 + dim_lanes - 1) / dim_lanes;
  const int warp = blockIdx.x % each * COMBINE_WARPS + threadIdx.x / WARP;
  const int warps = each * COMBINE_WARPS;
  for (int item = blockIdx.x / each; item < plan.entries * plan.lanes;
       item += gridDim.x / each) {
    const int entry = item / plan.lanes, to_lane = item - entry * plan.lanes;
    /* Lengths may be read before the wait: the attention waited for them. */
    wgmma_work w(a, plan, entry);
    w.set_lane(a, plan, to_lane, plan.rows_most);
    const query_rows rows = w.rows();
    if (w.tokens == 0) continue;
    wait_for_previous(); /* after the first time this costs nothing */
    const uint32_t total = plan.firsts[plan.entries], before = plan.firsts[entry];
    const uint32_t tiles = (plan.firsts[entry + 1] - before) / plan.groups();
    const int group = to_lane / plan.side, beside = to_lane - group * plan.side;
    const uint32_t shares = shares_used(plan, total), first = before + group * tiles;
    const int share = share_of(total, first, shares);
    const int count = share_of(total, first + tiles - 1, shares) - share + 1;
    auto row_of = [&](int r) { return rows.token(r) * a.heads + rows.head(r); };
    const bool whole = count == 1;
    const int steps = !whole   ? rows.count * pieces
                      : hooked ? 0
                               : (rows.count + WARP - 1) / WARP;
    for (int i = warp; i < steps; i += warps) {
      uint32_t again; /* bit n: row r + n has to be computed again */
      int r = i * WARP;
      if (whole) {
        again = __ballot_sync(ALL_LANES,
                              r + lane < rows.count && plan.notes[row_of(r + lane)]);
      } else {
        r = i / pieces;
        const bool is_first = i == r * pieces;
        const int dim = lanes.dim(i - r * pieces);
        const int64_t row = row_of(r);
        float m, sum, x[4];
        auto part = [&](int p) {
          return (uint32_t)(plan.part(share + p, beside, p == 0) * plan.rows + r);
        };
        join_parts(lanes, plan.out, plan.lse, D, dim, count, part, x, m, sum);
        const bool mends = sum != sum && !a.listed;
        if (lanes.mine == 0 && dim < D && !mends)
          write_row(a, end_row(a, row, m, sum), row, dim, x);
        if (hooked && is_first && lane == 0) plan.notes[row] = mends;
        again = mends && is_first && !hooked;
      }
      for (; again; again &= again - 1) {
        const mend_row noted(a, row_of(r + __ffs(again) - 1));
        compute_row<T, C, MOST>(a, noted, no_hook());
      }
    }
  }
  wait_for_previous();
#endif
}

template <class T, class C, int MOST>
int launch_codec(const kvl_paged_attention_args &a, const wgmma_plan &plan, bool hooked,
                 const kvl_cuda_queue *q) {
  const int64_t items = (int64_t)plan.entries * plan.lanes, full = 4 * (int64_t)q->sm_count;
  const int dim_lanes = combine_dim_lanes(plan.shares * plan.side / items + 2);
  const int64_t warps = plan.rows * ceil_div(a.cache.value.dim / 4, dim_lanes);
  const int64_t most = ceil_div(warps, COMBINE_WARPS), fit = items < full ? full / items : 1;
  const int each = (int)(most < fit ? most : fit);
  const int status = prefer_shared<wgmma_combine<T, C, MOST>>(q);
  if (status < 0) return status;
  return launch_programmatic(wgmma_combine<T, C, MOST>,
                             (unsigned)((items < full ? items : full) * each),
                             COMBINE_WARPS * WARP, 0, q, a, plan, each, dim_lanes, hooked);
}
template <class T>
int launch_dtype(const kvl_paged_attention_args &a, const wgmma_plan &plan, bool hooked,
                 const kvl_cuda_queue *q) {
  constexpr int LATENT = latent_shape<64>::D;
  if (a.cache.codec == KVL_CODEC_F8_LATENT)
    return launch_codec<T, f8_latent, LATENT>(a, plan, hooked, q);
  if (!a.cache.value.begin) return launch_codec<T, T, LATENT>(a, plan, hooked, q);
  return with_codec<T>(a.cache.codec, [&](auto of) {
    return launch_codec<T, typename decltype(of)::C, 256>(a, plan, hooked, q);
  });
}

}  // namespace

int launch_wgmma_combine(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                         bool hooked, const kvl_cuda_queue *q) {
  return a.dtype == KVL_DTYPE_BF16 ? launch_dtype<__nv_bfloat16>(a, plan, hooked, q)
                                   : launch_dtype<__half>(a, plan, hooked, q);
}

}  // namespace kvl
