/* The end of every paged attention kernel: joining partial softmaxes (maximum m in base 2,
 * denominator l, unnormalised sum of values) in a fixed order, joining the result to an
 * earlier attention, and writing rows. */
#ifndef KVL_CUDA_PAGED_OUTPUT_CUH
#define KVL_CUDA_PAGED_OUTPUT_CUH

#include "paged.cuh"

namespace kvl {

/* The query rows of one block of threads: heads_each heads of `head0`'s group for each
 * token from token0 on. Row r is one (token, head). */
struct query_rows {
  int64_t token0;
  int head0, heads_each, count;
  __device__ int64_t token(int r) const { return token0 + r / heads_each; }
  __device__ int head(int r) const { return head0 + r % heads_each; }
};

/* Where split `split` of `splits` leaves its rows: straight in the op's output when there
 * is one split, else in the workspace
 *   out  f32  [tokens, heads, splits, head_dim]   normalised
 *   lse  f32  [tokens, heads, splits]             base 2 */
struct split_place {
  float *out, *lse;
  int split, splits;
};
inline split_place workspace_place(const kvl_paged_attention_args &a, int splits) {
  float *w = (float *)a.workspace;
  int64_t rows = a.tokens * a.heads * splits;
  return {w, w + rows * a.cache.head_dim, 0, splits};
}

/* Eight neighbours of a row that starts at dim. */
__device__ __forceinline__ void store_out(const kvl_paged_attention_args &a, int64_t at,
                                          const float (&x)[8]) {
  if (a.out_dtype == KVL_DTYPE_F32) store_floats((float *)a.out + at, x);
  else if (a.out_dtype == KVL_DTYPE_F16) store_floats((__half *)a.out + at, x);
  else store_floats((__nv_bfloat16 *)a.out + at, x);
}

/* out = values * scale + prev_out * keep: a row's own sum of values and the attention before
 * it (keep 0: there is none, prev_out is not read); lse of both. */
struct row_end {
  float scale, keep, lse;
};
__device__ __forceinline__ row_end end_row(const kvl_paged_attention_args &a, int64_t row,
                                           float m, float sum) {
  const float lse2 = sum == 0.f ? -INFINITY : m + log2f(sum);
  row_end end = {sum == 0.f ? 0.f : 1.f / sum, 0.f, lse2 * LN2};
  const float prev = a.prev_lse ? a.prev_lse[row] : -INFINITY;
  if (prev == -INFINITY) return end;
  if (sum == 0.f) return {0.f, 1.f, prev};
  const float prev2 = prev * LOG2E, top = fmaxf(lse2, prev2);
  const float weight = exp2_fast(lse2 - top), weight_prev = exp2_fast(prev2 - top);
  const float both = weight + weight_prev;
  return {end.scale * (weight / both), weight_prev / both, (top + log2f(both)) * LN2};
}

/* Neighbours of out from `at` on. A thread reads its own part of prev_out before it writes
 * that part: out may be prev_out. */
template <int N>
__device__ __forceinline__ void finish(const kvl_paged_attention_args &a, const row_end &end,
                                       int64_t at, float (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) x[e] *= end.scale;
  if (end.keep == 0.f) return;
  float prev[N];
  load_floats(a.prev_out + at, prev);
#pragma unroll
  for (int e = 0; e < N; e++) x[e] += prev[e] * end.keep;
}

__device__ __forceinline__ void write_piece(const kvl_paged_attention_args &a,
                                            const split_place &place, int64_t row, int dim,
                                            float (&x)[8], float m, float sum) {
  if (place.splits == 1) {
    const row_end end = end_row(a, row, m, sum);
    const int64_t at = row * a.cache.head_dim + dim;
    finish(a, end, at, x);
    store_out(a, at, x);
    if (a.lse && dim == 0) a.lse[row] = end.lse;
  } else {
    int64_t at = row * place.splits + place.split;
    float inverse = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] *= inverse;
    store_floats(place.out + at * a.cache.head_dim + dim, x);
    if (dim == 0) place.lse[at] = sum == 0.f ? -INFINITY : m + log2f(sum);
  }
}

/* Join STATES partial softmaxes of every row, which lie in shared memory:
 *   sums    f32     [STATES, ROWS, D]
 *   states  (m, l)  [STATES, ROWS] */
template <int STATES, int ROWS, int D>
__device__ void finish_rows(const kvl_paged_attention_args &a, const query_rows &rows,
                            const split_place &place, const float *sums,
                            const float2 *states) {
  for (int i = threadIdx.x; i < rows.count * (D / 8); i += blockDim.x) {
    int r = i / (D / 8), dim = i % (D / 8) * 8;
    if (dim >= a.cache.head_dim) continue;
    float m = -INFINITY, sum = 0.f, x[8] = {};
    for (int s = 0; s < STATES; s++) m = fmaxf(m, states[s * ROWS + r].x);
    for (int s = 0; s < STATES; s++) {
      float2 state = states[s * ROWS + r];
      float weight = exp2_fast(state.x - finite_shift(m));
      sum += weight * state.y;
      float part[8];
      load_floats(sums + (s * ROWS + r) * D + dim, part);
#pragma unroll
      for (int e = 0; e < 8; e++) x[e] += weight * part[e];
    }
    write_piece(a, place, rows.token(r) * a.heads + rows.head(r), dim, x, m, sum);
  }
}

/* ---- joining the splits -------------------------------------------------------------- */

/* One block per (token, head): warp w adds splits w, w + 4, ..., then the warps are added
 * in order. Started while the split kernel ends (on devices that can): it waits for it. */
constexpr int COMBINE_WARPS = 4;
__global__ void __launch_bounds__(COMBINE_WARPS * WARP)
paged_combine(const __grid_constant__ kvl_paged_attention_args a,
              const __grid_constant__ split_place place) {
  __shared__ float sums[COMBINE_WARPS][256];
  __shared__ float weights_shared[COMBINE_WARPS];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  int64_t row = blockIdx.x;
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const float *lse = place.lse + row * place.splits;
  float m = -INFINITY;
  for (int s = lane; s < place.splits; s += WARP) m = fmaxf(m, lse[s]);
  m = warp_max(m);
  float shift = finite_shift(m), sum = 0.f, x[8] = {};
  int dim = lane * 8;
  for (int s = warp; s < place.splits; s += COMBINE_WARPS) {
    float weight = exp2_fast(lse[s] - shift), part[8];
    if (dim >= a.cache.head_dim) continue;   /* lane 0 always has a dim: it keeps the sum */
    load_floats(place.out + (row * place.splits + s) * a.cache.head_dim + dim, part);
    sum += weight;
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] += weight * part[e];
  }
  if (dim < a.cache.head_dim) store_floats(&sums[warp][dim], x);
  if (lane == 0) weights_shared[warp] = sum;
  __syncthreads();
  if (warp != 0 || dim >= a.cache.head_dim) return;
  sum = 0.f;
#pragma unroll
  for (int e = 0; e < 8; e++) x[e] = 0.f;
  for (int w = 0; w < COMBINE_WARPS; w++) {
    sum += weights_shared[w];
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] += sums[w][dim + e];
  }
  split_place final = {nullptr, nullptr, 0, 1};
  write_piece(a, final, row, dim, x, m, sum);
}

/* Lets the next kernel of the stream be scheduled; it still waits for this one to end. */
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace kvl

#endif
