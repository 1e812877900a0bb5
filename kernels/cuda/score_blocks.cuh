/* Scores of every block of every sequence from per-block summaries: the shared part of
 * score_minmax and score_mean.
 *
 * A block of threads takes 8 warps * 4 * SIDE consecutive blocks of one (sequence, KV head).
 * A summary row is spread over LANES lanes of 8 dims, so a warp holds SIDE = 32 / LANES
 * blocks side by side and four of them in a row: all its loads are in flight at once, and
 * the four sums per lane are joined with 5 shuffles. The group's queries lie in shared
 * memory as floats, HEADS at a time; the summaries stay in registers over all of them. */
#ifndef KVL_CUDA_SCORE_BLOCKS_CUH
#define KVL_CUDA_SCORE_BLOCKS_CUH

#include "paged.cuh"

namespace kvl {

constexpr int SCORE_THREADS = 256, SCORE_HEADS = 16;

/* Heads first ... first + n - 1 as floats [n][D], zeros past head_dim. */
template <int D>
__device__ void load_queries(const void *q, int dtype, int64_t first, int n, int head_dim,
                             float *shared) {
  for (int i = threadIdx.x; i < n * D; i += blockDim.x) {
    int h = i / D, d = i % D;
    shared[i] = d < head_dim ? load_any(q, dtype, (first + h) * head_dim + d) : 0.f;
  }
}

/* One dim's part of a score. ROWS 2: q * max where q >= 0, else q * min, which is the
 * larger of both; picked by q's sign bit without a branch. */
template <int ROWS>
__device__ __forceinline__ float score_term(float q, const float (&x)[ROWS][8], int e, float sum) {
  if constexpr (ROWS == 1) return sum + q * x[0][e];
  else {
    uint32_t sign = (uint32_t)(__float_as_int(q) >> 31);
    uint32_t pick = (__float_as_uint(x[0][e]) & sign) | (__float_as_uint(x[1][e]) & ~sign);
    return sum + q * __uint_as_float(pick);
  }
}

/* A: kvl_score_minmax_args (ROWS 2) or kvl_score_mean_args (ROWS 1). */
template <class A, class T, int ROWS, int LANES>
__global__ void __launch_bounds__(SCORE_THREADS, 2)
score_blocks(const __grid_constant__ A a, int tiles) {
  constexpr int D = LANES * 8, SIDE = WARP / LANES, EACH = 4 * SIDE;
  __shared__ __align__(16) float q[SCORE_HEADS * D];
  const int64_t seq = blockIdx.x / tiles, kv_head = blockIdx.y;
  const int lane = threadIdx.x % WARP, lane_key = lane % LANES, side = lane / LANES;
  const int64_t first = (int64_t)(blockIdx.x % tiles) * (SCORE_THREADS / WARP * EACH);
  const int64_t base = first + threadIdx.x / WARP * EACH + side;
  const int64_t count = min(((int64_t)a.lens[seq] + a.block_size - 1) / a.block_size, a.max_blocks);
  float *scores = a.scores + (seq * a.kv_heads + kv_head) * a.max_blocks;
  const int head_dim = (int)a.head_dim, dim = lane_key * 8;
  const int own = (lane & (LANES / 2) ? 2 : 0) + (lane & (LANES / 4) ? 1 : 0);
  const int64_t mine = base + own * SIDE;   /* the block this lane ends up with */
  const bool writes = lane_key % (LANES / 4) == 0 && mine < a.max_blocks;
  if (first >= count) {
    if (writes) scores[mine] = -INFINITY;
    return;
  }

  pack<T, 8> raw[4][ROWS] = {};
  const T *summary = (const T *)a.summary;
#pragma unroll
  for (int u = 0; u < 4; u++) {
    int64_t block = base + u * SIDE;
    if (block >= count || dim >= head_dim) continue;
    int64_t physical = a.tables[seq * a.max_blocks + block];
    if (physical < 0 || physical >= a.blocks) continue;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      raw[u][r] = load_pack<8>(
          summary + ((physical * ROWS + r) * a.kv_heads + kv_head) * head_dim + dim);
  }
  const int group = (int)(a.heads / a.kv_heads);
  const bool is_max = a.group == KVL_GROUP_MAX;
  float joined = is_max ? -INFINITY : 0.f;
  float x[4][ROWS][8];
#pragma unroll
  for (int u = 0; u < 4; u++)
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int e = 0; e < 8; e++) x[u][r][e] = to_float(raw[u][r].at[e]);

  for (int h0 = 0; h0 < group; h0 += SCORE_HEADS) {
    const int heads = min(SCORE_HEADS, group - h0);
    if (h0) __syncthreads();   /* the last heads are read */
    load_queries<D>(a.q, a.dtype, seq * a.heads + kv_head * group + h0, heads, head_dim, q);
    __syncthreads();
    for (int h = 0; h < heads; h++) {
      float sums[4] = {}, part[8];
      load_floats(q + h * D + dim, part);
#pragma unroll
      for (int u = 0; u < 4; u++)
#pragma unroll
        for (int e = 0; e < 8; e++) sums[u] = score_term<ROWS>(part[e], x[u], e, sums[u]);
      float score = sum_of_four<LANES>(sums, lane);
      joined = is_max ? fmaxf(joined, score) : joined + score;
    }
  }
  if (!is_max) joined /= (float)group;
  if (writes) scores[mine] = mine < count ? joined : -INFINITY;
}

/* Any head_dim and alignment: one warp a block. */
template <class A, int ROWS>
__global__ void __launch_bounds__(SCORE_THREADS)
score_blocks_any(const __grid_constant__ A a, int tiles) {
  const int64_t seq = blockIdx.x / tiles, kv_head = blockIdx.y;
  const int lane = threadIdx.x % WARP, warps = SCORE_THREADS / WARP;
  const int64_t block = (int64_t)(blockIdx.x % tiles) * warps + threadIdx.x / WARP;
  if (block >= a.max_blocks) return;
  float *score = a.scores + (seq * a.kv_heads + kv_head) * a.max_blocks + block;
  const int64_t count = ((int64_t)a.lens[seq] + a.block_size - 1) / a.block_size;
  const int group = (int)(a.heads / a.kv_heads);
  const bool is_max = a.group == KVL_GROUP_MAX;
  float joined = is_max ? -INFINITY : 0.f;
  int64_t physical = block < count ? a.tables[seq * a.max_blocks + block] : -1;
  const bool known = physical >= 0 && physical < a.blocks;
  for (int h = 0; known && h < group; h++) {
    const int64_t row = (seq * a.heads + kv_head * group + h) * a.head_dim;
    float sum = 0.f;
    for (int64_t d = lane; d < a.head_dim; d += WARP) {
      float part = load_any(a.q, a.dtype, row + d), x[ROWS][8];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        x[r][0] = load_any(a.summary, a.summary_dtype,
                           ((physical * ROWS + r) * a.kv_heads + kv_head) * a.head_dim + d);
      sum = score_term<ROWS>(part, x, 0, sum);
    }
    sum = warp_sum(sum);
    joined = is_max ? fmaxf(joined, sum) : joined + sum;
  }
  if (!is_max) joined /= (float)group;
  if (lane == 0) *score = block < count ? (known ? joined : 0.f) : -INFINITY;
}

template <class T, int ROWS, int LANES, class A>
void launch_score_lanes(const A &a, const kvl_cuda_queue *q) {
  constexpr int EACH = SCORE_THREADS / LANES * 4;
  int64_t tiles = (a.max_blocks + EACH - 1) / EACH;
  dim3 grid((unsigned)(tiles * a.seqs), (unsigned)a.kv_heads);
  score_blocks<A, T, ROWS, LANES><<<grid, SCORE_THREADS, 0, q->stream>>>(a, (int)tiles);
}

template <int ROWS, class A> int launch_score_blocks(const A &a, const kvl_cuda_queue *q) {
  if (a.seqs == 0 || a.max_blocks == 0 || a.kv_heads == 0) return KVL_OK;
  if (a.head_dim % 8 || a.head_dim > 256 || !aligned16(a.summary)) {
    int64_t warps = SCORE_THREADS / WARP, tiles = (a.max_blocks + warps - 1) / warps;
    dim3 grid((unsigned)(tiles * a.seqs), (unsigned)a.kv_heads);
    score_blocks_any<A, ROWS><<<grid, SCORE_THREADS, 0, q->stream>>>(a, (int)tiles);
    return kvl__cuda_launched();
  }
  KVL_CUDA_BY_FLOAT(a.summary_dtype, T, {
    if (a.head_dim <= 64) launch_score_lanes<T, ROWS, 8>(a, q);
    else if (a.head_dim <= 128) launch_score_lanes<T, ROWS, 16>(a, q);
    else launch_score_lanes<T, ROWS, 32>(a, q);
  })
  return kvl__cuda_launched();
}

}  // namespace kvl

#endif
