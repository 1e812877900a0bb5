/* Joins the partial softmaxes of items that paged_wgmma.cuh has divided; wgmma_plan.cuh says
 * where they are. One kernel serves all shapes and head_dims: it waits for memory. */
#include "args/attention.h"
#include "cuda/attention/combine_parts.cuh"
#include "cuda/attention/latent_memory.cuh"
#include "cuda/attention/paged_mend.cuh"
#include "cuda/attention/wgmma_launch.cuh"

namespace kvl {
namespace {

/* A warp takes some dims of a query row. The warp with the first dims computes the row
 * again if that is necessary (paged_mend.cuh); with a hook, it notes the row. After an
 * attention with few rows the kernel starts early, as paged_combine does, so what it does
 * before its wait costs nothing. */
template <class T, class C, int MOST>
__global__ void __launch_bounds__(COMBINE_WARPS *WARP, 4)
    wgmma_combine(const __grid_constant__ kvl_paged_attention_args a,
                  const __grid_constant__ wgmma_plan plan, int dim_lanes, bool hooked) {
#if KVL_SM90A
  const int D = a.cache.value.dim;
  let_next_start();
  const combine_lanes lanes(dim_lanes);
  const int pieces = (D / 4 + dim_lanes - 1) / dim_lanes;
  const int items = plan.entries * plan.lanes * plan.rows * pieces;
  for (int item = blockIdx.x * COMBINE_WARPS + threadIdx.x / WARP; item < items;
       item += gridDim.x * COMBINE_WARPS) {
    int rest = item / pieces;
    const bool is_first = item == rest * pieces;
    const int dim = lanes.dim(item - rest * pieces);
    const int r = rest % plan.rows;
    rest /= plan.rows;
    const int entry = rest / plan.lanes, to_lane = rest - entry * plan.lanes;
    /* Lengths may be read before the wait: the attention waited for them. */
    wgmma_work w(a, plan, entry);
    w.set_lane(a, plan, to_lane, plan.rows_most);
    const query_rows rows = w.rows();
    if (w.tokens == 0 || r >= rows.count) continue;
    wait_for_previous(); /* after the first time this costs nothing */
    const uint32_t total = plan.firsts[plan.entries], before = plan.firsts[entry];
    const uint32_t tiles = (plan.firsts[entry + 1] - before) / plan.groups();
    const int group = to_lane / plan.side, beside = to_lane - group * plan.side;
    const uint32_t shares = shares_used(plan, total), first = before + group * tiles;
    const int share = share_of(total, first, shares);
    const int count = share_of(total, first + tiles - 1, shares) - share + 1;
    const int64_t row = rows.token(r) * a.heads + rows.head(r);
    bool mends;
    if (count == 1) {
      mends = !hooked && is_first && plan.notes[row];
    } else {
      float m, sum, x[4];
      auto part = [&](int i) {
        return (uint32_t)(plan.part(share + i, beside, i == 0) * plan.rows + r);
      };
      join_parts(lanes, plan.out, plan.lse, D, dim, count, part, x, m, sum);
      mends = sum != sum && !a.listed;
      if (lanes.mine == 0 && dim < D && !mends)
        write_row(a, end_row(a, row, m, sum), row, dim, x);
      if (hooked && is_first && threadIdx.x % WARP == 0) plan.notes[row] = mends;
    }
    if (mends && is_first && !hooked) {
      const mend_row again(a, row);
      compute_row<T, C, MOST>(a, again, no_hook());
    }
  }
  wait_for_previous();
#endif
}

template <class T, class C, int MOST>
int launch_codec(const kvl_paged_attention_args &a, const wgmma_plan &plan, bool hooked,
                 const kvl_cuda_queue *q) {
  const int64_t items = (int64_t)plan.entries * plan.lanes;
  const int dim_lanes = combine_dim_lanes(plan.shares * plan.side / items + 2);
  const int64_t warps = items * plan.rows * ceil_div(a.cache.value.dim / 4, dim_lanes);
  const int64_t blocks = ceil_div(warps, COMBINE_WARPS), full = 4 * (int64_t)q->sm_count;
  const int status = prefer_shared<wgmma_combine<T, C, MOST>>(q);
  if (status < 0) return status;
  return launch_programmatic(wgmma_combine<T, C, MOST>,
                             (unsigned)(blocks < full ? blocks : full), COMBINE_WARPS * WARP,
                             0, q, a, plan, dim_lanes, hooked);
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
