/* Joins the partial softmaxes of items that paged_wgmma.cuh has divided; wgmma_plan.cuh says
 * where they are. One kernel serves all shapes and head_dims: it waits for memory. */
#include "args/attention.h"
#include "cuda/attention/combine_parts.cuh"
#include "cuda/attention/latent_memory.cuh"
#include "cuda/attention/paged_mend.cuh"
#include "cuda/attention/wgmma_launch.cuh"

namespace kvl {
namespace {

#if KVL_SM90A
/* The rows of an item, and where its partial results are. The lengths may be read before the
 * kernel waits: the attention waited for them. */
struct combined_item {
  query_rows rows;
  int beside, share = 0, count = 1; /* its parts are in `count` shares, from `share` on */
  __device__ __forceinline__ combined_item(const kvl_paged_attention_args &a,
                                           const wgmma_plan &plan, int item) {
    const int entry = item / plan.lanes, lane = item - entry * plan.lanes;
    wgmma_work w(a, plan, entry);
    w.set_lane(a, plan, lane, plan.rows_most);
    rows = w.rows();
    beside = lane % plan.side;
    if (w.tokens == 0) rows.count = 0;
    wait_for_previous(); /* after the first time this costs nothing */
    if (rows.count == 0) return;
    const wgmma_cut cut = plan.cuts[item];
    share = cut.share, count = cut.count;
  }
  /* Joins some dims of row r, and writes them. Returns whether the row has to be computed
   * again. room: of a team of all warps, of which the first writes; else NULL. */
  __device__ __forceinline__ bool join(const kvl_paged_attention_args &a,
                                       const wgmma_plan &plan, const combine_lanes &lanes,
                                       int r, int dim, bool hooked,
                                       combine_room *room) const {
    const int D = a.cache.value.dim;
    float m, sum, x[4];
    auto part = [&](int i) {
      return (uint32_t)(plan.part(share + i, beside, i == 0) * plan.rows + r);
    };
    join_parts(lanes, plan.out, plan.lse, D, dim, count, part, x, m, sum);
    if (room) join_team(*room, x, m, sum);
    const bool mends = sum != sum && (hooked || !a.listed);
    const int64_t row = rows.row(a, r);
    if (lanes.mine == 0 && dim < D && !mends)
      write_row(a, end_row(a, row, m, sum), row, dim, x);
    return mends;
  }
};
#endif

/* A warp, or a team of all warps of a block, takes some dims of a query row. The warp with
 * the first dims computes the row again if that is necessary (paged_mend.cuh); with a hook,
 * it notes the row. After an attention with few rows the kernel starts early, as
 * paged_combine does, so what it does before its wait costs nothing.
 * BY_ITEM: a thread block has some rows of one item after the other, each item's in `slices`:
 * for many more rows than the device has warps, and for more items than shares. */
template <class T, class C, int MOST, bool BY_ITEM>
__global__ void __launch_bounds__(COMBINE_WARPS *WARP, 4)
    wgmma_combine(const __grid_constant__ kvl_paged_attention_args a,
                  const __grid_constant__ wgmma_plan plan, int dim_lanes, int team,
                  int slices, bool hooked) {
#if KVL_SM90A
  __shared__ combine_room shared;
  let_next_start();
  combine_room *const room = !BY_ITEM && team > 1 ? &shared : nullptr;
  const combine_lanes lanes(dim_lanes, team);
  const int pieces = (a.cache.value.dim / 4 + dim_lanes - 1) / dim_lanes;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int items = plan.entries * plan.lanes;
  auto again = [&](int64_t row) {
    const mend_row noted(a, row);
    compute_row<T, C, MOST>(a, noted, no_hook());
  };
  auto join = [&](const combined_item &item, int r, int piece) {
    const bool leads = piece == 0 && (!room || warp == 0);
    const bool mends = item.join(a, plan, lanes, r, lanes.dim(piece), hooked, room) && leads;
    if (hooked && leads && lane == 0) plan.notes[item.rows.row(a, r)] = mends;
    return mends && !hooked;
  };
  if constexpr (BY_ITEM) {
    const int rows_each = (plan.rows + slices - 1) / slices;
    for (int i = blockIdx.x; i < items * slices; i += gridDim.x) {
      const int of = i / slices, first = (i - of * slices) * rows_each;
      const combined_item item(a, plan, of);
      const int end = min(item.rows.count, first + rows_each), rows = end - first;
      const bool whole = item.count == 1;
      const int steps = whole ? (rows + WARP - 1) / WARP : rows * pieces;
      for (int step = warp; step < steps; step += COMBINE_WARPS) {
        const int r = first + (whole ? step * WARP : step / pieces);
        uint32_t rest; /* bit n: row r + n has to be computed again */
        if (whole)
          rest = __ballot_sync(
              ALL_LANES, !hooked && r + lane < end && plan.notes[item.rows.row(a, r + lane)]);
        else rest = join(item, r, step % pieces);
        for (; rest; rest &= rest - 1) again(item.rows.row(a, r + __ffs(rest) - 1));
      }
    }
  } else {
    const int teams = COMBINE_WARPS / team, stride = gridDim.x * teams;
    for (int i = blockIdx.x * teams + warp / team; i < items * plan.rows * pieces;
         i += stride) {
      const int all = i / pieces, piece = i - all * pieces;
      const int of = all / plan.rows, r = all - of * plan.rows;
      const combined_item item(a, plan, of);
      if (r >= item.rows.count) continue;
      const bool noted = item.count > 1 ? join(item, r, piece)
                                        : !hooked && piece == 0 && warp % team == 0 &&
                                              plan.notes[item.rows.row(a, r)];
      if (noted) again(item.rows.row(a, r));
      if (room) __syncthreads(); /* the first warp has read the others' results */
    }
  }
  wait_for_previous();
#endif
}

template <class T, class C, int MOST>
int launch_codec(const kvl_paged_attention_args &a, const wgmma_plan &plan, bool hooked,
                 const kvl_cuda_queue *q) {
  const int64_t items = (int64_t)plan.entries * plan.lanes, full = 4 * (int64_t)q->sm_count;
  const int parts = plan.shares * plan.side, most = (int)(parts / items + 2);
  auto warps_of = [&](int dim_lanes) {
    return items * plan.rows * ceil_div(a.cache.value.dim / 4, dim_lanes);
  };
  const int64_t warps = warps_of(combine_dim_lanes(most));
  /* Rows of latents are long: then it wins to have more warps that find out the same. */
  const bool is_many = MOST <= 256 && warps > 3 * full * COMBINE_WARPS;
  int slices = 1;
  while (is_many && slices * items < full && slices * COMBINE_WARPS < plan.rows) slices++;
  auto launch = [&](auto kernel, int64_t blocks, int team, int status) {
    if (status < 0) return status;
    return launch_programmatic(kernel, (unsigned)(blocks < full ? blocks : full),
                               COMBINE_WARPS * WARP, 0, q, a, plan,
                               combine_dim_lanes(most, team), team, slices, hooked);
  };
  if (items > parts || is_many)
    return launch(wgmma_combine<T, C, MOST, true>, slices * items, 1,
                  prefer_shared<wgmma_combine<T, C, MOST, true>>(q));
  const int team = combine_team(most);
  const int64_t teams = warps_of(combine_dim_lanes(most, team));
  return launch(wgmma_combine<T, C, MOST, false>, ceil_div(teams, COMBINE_WARPS / team), team,
                prefer_shared<wgmma_combine<T, C, MOST, false>>(q));
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
