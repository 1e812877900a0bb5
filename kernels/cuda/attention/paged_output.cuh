/* The end of every paged attention kernel: it joins the partial softmaxes of a block's warps
 * (maximum m in base 2, denominator l, unnormalised sum of values) in a fixed order, joins
 * the result with an earlier attention, and writes the rows. */
#ifndef KVL_CUDA_PAGED_OUTPUT_CUH
#define KVL_CUDA_PAGED_OUTPUT_CUH

#include "args/attention.h"
#include "cuda/attention/paged.cuh"

namespace kvl {

/* The query rows of one thread block: for each token from token0 on, heads_each query heads
 * from `head0` on, all of one KV head's group. Row r is one (token, head). */
struct query_rows {
  int64_t token0;
  int head0, heads_each, count;
  __device__ int64_t token(int r) const { return token0 + r / heads_each; }
  __device__ int head(int r) const { return head0 + r % heads_each; }
  __device__ int64_t row(const kvl_paged_attention_args &a, int r) const { /* of q */
    return token(r) * a.heads + head(r);
  }
};

/* Finds the query rows of a thread block, at most ROWS: those of tile number `number`, for the
 * KV head and the subgroup of its heads that blockIdx.y gives. tile.seq is -1 when there are
 * none. */
struct query_block {
  int kv_head;
  query_tile tile;
  query_rows rows;
};
template <int ROWS>
__device__ __forceinline__ query_block find_queries(const kvl_paged_attention_args &a,
                                                    int64_t number, int subgroups) {
  query_block b;
  const int group = (int)(a.heads / a.cache.kv_heads);
  b.kv_head = blockIdx.y / subgroups;
  const int first = blockIdx.y % subgroups * ROWS, heads_each = min(group - first, ROWS);
  b.tile = find_tile(a, number, max(1, ROWS / group));
  b.rows = {b.tile.token0, b.kv_head * group + first, heads_each, b.tile.tokens * heads_each};
  return b;
}

/* Stores N neighbours of out from element `at` on. It does not use store_any, so that a.out
 * is read only here: held any longer, it would need a register that the kernels do not
 * have. */
template <int N>
__device__ __forceinline__ void store_out(const kvl_paged_attention_args &a, int64_t at,
                                          const float (&x)[N]) {
  if (a.out_dtype == KVL_DTYPE_F32) store_floats((float *)a.out + at, x);
  else if (a.out_dtype == KVL_DTYPE_F16) store_floats((__half *)a.out + at, x);
  else store_floats((__nv_bfloat16 *)a.out + at, x);
}

/* The final result of a row: out = values * scale + prev_out * keep, where values is the
 * row's own sum of values and prev_out the earlier attention (keep 0: there is none, and
 * prev_out is not read). lse is the log-sum-exp of both together. */
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

/* Computes the final result of N neighbours of out from element `at` on. A thread reads its
 * own part of prev_out before it writes that part, so out may be prev_out. */
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

/* A kernel's notes for paged_mend.cuh: one for each row of [tokens, heads], 1 if the row
 * has to be computed again. The notes are the first bytes of the workspace. */
__host__ __device__ inline size_t note_bytes(const kvl_paged_attention_args &a) {
  return (size_t)(a.tokens * a.heads + 15) / 16 * 16;
}
/* Whether a lane writes its part of a row now. If the result may overwrite prev_out, a row
 * that will be computed again must not be written yet. */
__device__ __forceinline__ bool writes_row(const kvl_paged_attention_args &a, bool mends) {
  return !mends || !a.prev_lse;
}

/* Joins STATES partial softmaxes of every row, which are in shared memory, and writes the
 * row:
 *   sums    f32     [STATES, ROWS, D]
 *   states  (m, l)  [STATES, ROWS] */
template <int STATES, int ROWS, int D>
__device__ void finish_rows(const kvl_paged_attention_args &a, const query_rows &rows,
                            float value_scale, const float *sums, const float2 *states) {
  for (int i = threadIdx.x; i < rows.count * (D / 8); i += blockDim.x) {
    int r = i / (D / 8), dim = i % (D / 8) * 8;
    if (dim >= a.cache.value.dim) continue;
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
    const int64_t row = rows.row(a, r);
    row_end end = end_row(a, row, m, sum);
    end.scale *= value_scale;
    finish(a, end, row * a.cache.value.dim + dim, x);
    store_out(a, row * a.cache.value.dim + dim, x);
    if (a.lse && dim == 0) a.lse[row] = end.lse;
  }
}

/* Writes four neighbours of a row of the op's output. */
__device__ __forceinline__ void write_row(const kvl_paged_attention_args &a,
                                          const row_end &end, int64_t row, int dim,
                                          float (&x)[4]) {
  const int64_t at = row * a.cache.value.dim + dim;
  finish(a, end, at, x);
  store_out(a, at, x);
  if (a.lse && dim == 0) a.lse[row] = end.lse;
}

}  // namespace kvl

#endif
