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
/* Where the rows of an item are, and its partial results. The lengths may be read before the
 * kernel waits: the attention waited for them. */
struct combined_item {
  query_rows rows;
  int beside, share = 0, count = 1; /* its parts are in `count` shares, from `share` on */
  __device__ __forceinline__ combined_item(const kvl_paged_attention_args &a,
                                           const wgmma_plan &plan, int item) {
    const int entry = plan.by_lanes.quotient(item), lane = item - entry * plan.lanes;
    wgmma_work w(a, plan, entry);
    w.set_lane(plan, lane);
    rows = w.rows();
    beside = lane - (int)plan.by_side.quotient(lane) * plan.side;
    if (w.tokens == 0) rows.count = 0;
    wait_for_previous(); /* after the first time this costs nothing */
    if (rows.count == 0) return;
    const wgmma_cut cut = plan.cuts[item];
    share = cut.share, count = cut.count;
  }
  /* Joins some pieces of row r, and writes them. Returns whether the row has to be computed
   * again. room: of a team of all warps, of which the first writes; else NULL. */
  __device__ __forceinline__ bool join(const kvl_paged_attention_args &a,
                                       const wgmma_plan &plan, const combine_lanes &lanes,
                                       int64_t row, int r, int piece, int end, bool notes,
                                       combine_room *room) const {
    const int D = a.cache.value.dim;
    bool mends = false;
    auto part = [&](int i) {
      return (uint32_t)(plan.part(share + i, beside, i == 0) * plan.rows + r);
    };
    join_parts(lanes, plan.out, plan.lse, D, piece, end, count, part,
               [&](int dim, float(&x)[4], float m, float sum) {
                 if (room) join_team(*room, x, m, sum);
                 mends = sum != sum && (notes || !a.listed);
                 if (lanes.mine == 0 && dim < D && !mends)
                   write_row(a, end_row(a, row, m, sum), row, dim, x);
                 if (room) __syncthreads(); /* the first warp has read the others' results */
               });
    return mends;
  }
};
#endif

/* Not inlined, because that takes registers from the join. */
template <class T, class C, int MOST>
__device__ __noinline__ void compute_again(const kvl_paged_attention_args &a, int64_t row) {
  const mend_row noted(a, row);
  compute_row<T, C, MOST>(a, noted, no_hook());
}

/* How rows are divided: into pieces (combine_lanes), of which a warp or a team takes `each`
 * one after the other, a run. As few runs as fill the device: what a run begins with takes
 * more instructions than a piece. */
struct combine_cut {
  int dim_lanes, team, pieces, each, slices;
  divisor by_runs, by_rows; /* runs of a row; rows of an item */
};

/* A warp, or a team of all warps of a block, takes a run of a query row. The warp with the
 * first dims computes the row again if that is necessary (paged_mend.cuh), or notes the
 * row. After an attention with few rows the kernel starts early, as paged_combine
 * does, so what it does before its wait costs nothing.
 * BY_ITEM: a thread block has some rows of one item after the other, each item's in `slices`:
 * for many more rows than the device has warps, and for more items than shares. */
template <class T, class C, int MOST, bool BY_ITEM>
__global__ void __launch_bounds__(COMBINE_WARPS *WARP, 4)
    wgmma_combine(const __grid_constant__ kvl_paged_attention_args a,
                  const __grid_constant__ wgmma_plan plan,
                  const __grid_constant__ combine_cut cut, bool notes) {
#if KVL_SM90A
  __shared__ combine_room shared;
  let_next_start();
  combine_room *const room = !BY_ITEM && cut.team > 1 ? &shared : nullptr;
  const combine_lanes lanes(cut.dim_lanes, cut.team);
  const int runs = cut.by_runs.by, slices = cut.slices;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int items = plan.divided * plan.lanes;
  auto again = [&](int64_t row) { compute_again<T, C, MOST>(a, row); };
  auto join = [&](const combined_item &item, int64_t row, int r, int run) {
    const bool leads = run == 0 && (!room || warp == 0);
    const int begin = run * cut.each, end = min(begin + cut.each, cut.pieces);
    const bool mends = item.join(a, plan, lanes, row, r, begin, end, notes, room) && leads;
    if (notes && leads && lane == 0) plan.notes[row] = mends;
    return mends && !notes;
  };
  if constexpr (BY_ITEM) {
    const int rows_each = (plan.rows + slices - 1) / slices;
    for (int i = blockIdx.x; i < items * slices; i += gridDim.x) {
      const int of = i / slices, first = (i - of * slices) * rows_each;
      const combined_item item(a, plan, of);
      const int end = min(item.rows.count, first + rows_each), rows = end - first;
      const bool whole = item.count == 1;
      const int steps = whole ? (rows + WARP - 1) / WARP : rows * runs;
      for (int step = warp; step < steps; step += COMBINE_WARPS) {
        const int in = whole ? step : (int)cut.by_runs.quotient(step);
        const int r = first + (whole ? in * WARP : in);
        uint32_t rest; /* bit n: row r + n has to be computed again */
        if (whole)
          rest = __ballot_sync(
              ALL_LANES, !notes && r + lane < end && plan.notes[item.rows.row(a, r + lane)]);
        else rest = join(item, item.rows.row(a, r), r, step - in * runs);
        for (; rest; rest &= rest - 1) again(item.rows.row(a, r + __ffs(rest) - 1));
      }
    }
  } else {
    const int teams = room ? 1 : COMBINE_WARPS, stride = gridDim.x * teams;
    for (int i = blockIdx.x * teams + (room ? 0 : warp); i < items * plan.rows * runs;
         i += stride) {
      const int all = cut.by_runs.quotient(i), run = i - all * runs;
      const int of = cut.by_rows.quotient(all), r = all - of * plan.rows;
      const combined_item item(a, plan, of);
      if (r >= item.rows.count) continue;
      const int64_t row = item.rows.row(a, r);
      const bool noted = item.count > 1
                             ? join(item, row, r, run)
                             : !notes && run == 0 && (!room || warp == 0) && plan.notes[row];
      if (noted) again(row);
    }
  }
  wait_for_previous();
#endif
}

template <class T, class C, int MOST>
int launch_codec(const kvl_paged_attention_args &a, const wgmma_plan &plan, bool notes,
                 const kvl_cuda_queue *q) {
  const int64_t items = (int64_t)plan.divided * plan.lanes, full = 4 * (int64_t)q->sm_count;
  const int parts = plan.shares * plan.side, most = (int)(parts / items + 1);
  auto cut_for = [&](int team) {
    const int dim_lanes = combine_dim_lanes(most, team);
    const int pieces = ceil_div(a.cache.value.dim / 4, dim_lanes);
    return combine_cut{dim_lanes, team, pieces, pieces, 1, {}, divisor(plan.rows)};
  };
  const int64_t rows = items * plan.rows, warps = rows * cut_for(1).pieces;
  /* Rows of latents are long: then it wins to have more warps that find out the same. */
  const bool is_many = MOST <= 256 && warps > 3 * full * COMBINE_WARPS;
  auto launch = [&](auto kernel, combine_cut cut, int64_t blocks, int status) {
    if (status < 0) return status;
    return launch_programmatic(kernel, (unsigned)(blocks < full ? blocks : full),
                               COMBINE_WARPS * WARP, 0, q, a, plan, cut, notes);
  };
  /* Runs for so many warps or teams at once. */
  auto divide = [&](combine_cut &cut, int64_t at_once) {
    const int64_t each = (rows * cut.pieces + at_once - 1) / at_once;
    if (each < cut.pieces) cut.each = (int)each;
    cut.by_runs = divisor(ceil_div(cut.pieces, cut.each));
    return rows * cut.by_runs.by;
  };
  const bool by_item = items > parts || is_many;
  combine_cut cut = cut_for(by_item ? 1 : combine_team(most));
  const int64_t runs = divide(cut, full * COMBINE_WARPS / cut.team);
  if (!by_item)
    return launch(wgmma_combine<T, C, MOST, false>, cut,
                  ceil_div(runs, COMBINE_WARPS / cut.team),
                  prefer_shared<wgmma_combine<T, C, MOST, false>>(q));
  while (is_many && cut.slices * items < full && cut.slices * COMBINE_WARPS < plan.rows)
    cut.slices++;
  return launch(wgmma_combine<T, C, MOST, true>, cut, cut.slices * items,
                prefer_shared<wgmma_combine<T, C, MOST, true>>(q));
}
template <class T>
int launch_dtype(const kvl_paged_attention_args &a, const wgmma_plan &plan, bool notes,
                 const kvl_cuda_queue *q) {
  constexpr int LATENT = latent_shape<64>::D;
  if (a.cache.codec == KVL_CODEC_F8_LATENT)
    return launch_codec<T, f8_latent, LATENT>(a, plan, notes, q);
  if (!a.cache.value.begin) return launch_codec<T, T, LATENT>(a, plan, notes, q);
  return with_codec<T>(a.cache.codec, [&](auto of) {
    return launch_codec<T, typename decltype(of)::C, 256>(a, plan, notes, q);
  });
}

}  // namespace

int launch_wgmma_combine(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                         bool notes, const kvl_cuda_queue *q) {
  return a.dtype == KVL_DTYPE_BF16 ? launch_dtype<__nv_bfloat16>(a, plan, notes, q)
                                   : launch_dtype<__half>(a, plan, notes, q);
}

}  // namespace kvl
