/* Attention over listed tokens for f32 queries, and for calls that listed_mma.cuh does not
 * take: the inner loop of paged_f32.cuh over another source of keys. */
#ifndef KVL_CUDA_LISTED_F32_CUH
#define KVL_CUDA_LISTED_F32_CUH

#include "cuda/attention/listed.cuh"
#include "cuda/attention/paged_f32.cuh"

namespace kvl {

template <class C, int D, int ROWS, class H>
__device__ __forceinline__ void f32_listed(const kvl_paged_attention_args &a,
                                           const listed_plan &plan, const H &hook) {
  using shape = f32_shape<C, D>;
  constexpr int WARPS = shape::WARPS, KEYS = shape::KEYS;
  extern __shared__ __align__(128) char shared[];
  __shared__ f32_rows<ROWS> sees[WARPS];
  const int split = plan.split();
  const int64_t token = plan.token();
  const int group = (int)(a.heads / a.cache.kv_heads), kv_head = plan.kv_head();
  const int first = plan.subgroup() * ROWS, heads = min(group - first, ROWS);
  const query_rows rows = {token, kv_head * group + first, heads, heads};
  const int warp = threadIdx.x / WARP;
  wait_for_previous();
  const listed_keys<> keys(a, plan.block, token, kv_head);
  sees[warp].set(a, rows, keys.sight.at, keys.sight.length);
  f32_state<C, D, ROWS> state;
  state.attend(keys, rows, sees[warp], split * WARPS + warp, (keys.keys + KEYS - 1) / KEYS,
               plan.splits.by * WARPS, shared + warp * shape::STAGES * shape::STAGE_BYTES,
               (int *)(shared + shape::RING_BYTES) + warp * shape::STAGES * KEYS, hook,
               keys.sight.seq, keys.sight.length);
  state.join();
  let_next_start();

  __syncthreads(); /* all warps are done with the ring, which now holds the states */
  float *sums = (float *)shared;
  float2 *states = (float2 *)(sums + WARPS * ROWS * D);
  static_assert(WARPS * ROWS * (D * 4 + 8) <= shape::RING_BYTES, "");
  state.store(sums + warp * ROWS * D, states + warp * ROWS);
  join_listed<WARPS, ROWS, D, false, WARPS * WARP>(
      a, plan, token * a.heads + rows.head0, rows.count, states, sums,
      a.cache.v_scale ? a.cache.v_scale[kv_head] : 1.f);
}

template <class C, int D, int ROWS>
__global__ void __launch_bounds__(f32_shape<C, D>::WARPS *WARP, 2)
    listed_f32(const __grid_constant__ kvl_paged_attention_args a,
               const __grid_constant__ listed_plan plan) {
  f32_listed<C, D, ROWS>(a, plan, no_hook());
}

}  // namespace kvl

#endif
