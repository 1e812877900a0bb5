/* Paged attention for f32 queries (decode and prefill) over an f32, f16 or bf16 cache, in
 * fp32 on the FMA units: tf32 would lose 13 bits of q.
 *
 * One block of threads takes up to ROWS query rows that share a KV head: the heads of a
 * group, and in prefill several tokens of it. A key's row is spread over LANES = D / 8 lanes
 * with 8 dims each, so a warp holds 32 / LANES keys at once, four times in a row. As in
 * paged_decode.cuh each warp is its own pipeline of asynchronous copies; in decode the keys
 * are also split over blocks. */
#ifndef KVL_CUDA_PAGED_F32_CUH
#define KVL_CUDA_PAGED_F32_CUH

#include "paged_output.cuh"

namespace kvl {

template <class T, int D> struct f32_shape {
  static constexpr int WARPS = 4, STAGES = 3;
  static constexpr int LANES = D / 8, SIDE = WARP / LANES;    /* keys side by side */
  static constexpr int PIECES = D * (int)sizeof(T) / 16;      /* of a row */
  static constexpr int PER_LANE = PIECES / LANES, NUMBERS = WIDE<T>;
  static constexpr int KEYS = 8192 / (2 * PIECES * 16);       /* of a tile: 8 KiB with V */
  static constexpr int TILE_BYTES = KEYS * PIECES * 16, STAGE_BYTES = 2 * TILE_BYTES;
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
  static constexpr int SHARED_BYTES = RING_BYTES + WARPS * STAGES * KEYS * 4;
  static_assert(KEYS % (4 * SIDE) == 0 && KEYS <= WARP, "a tile is whole batches");
};

template <class T, int D, int ROWS>
__global__ void __launch_bounds__(f32_shape<T, D>::WARPS * WARP, 2)
paged_f32(const __grid_constant__ kvl_paged_attention_args a,
          const __grid_constant__ split_place place_, int subgroups) {
  using shape = f32_shape<T, D>;
  constexpr int STAGES = shape::STAGES, WARPS = shape::WARPS, KEYS = shape::KEYS;
  constexpr int PIECES = shape::PIECES, LANES = shape::LANES, SIDE = shape::SIDE;
  constexpr int N = shape::NUMBERS;
  extern __shared__ __align__(128) char shared[];
  __shared__ int row_position[ROWS], row_limit[ROWS];   /* the last key a row sees */
  __shared__ float row_slope[ROWS];

  split_place place = place_;
  place.split = blockIdx.x % place.splits;
  const int group = (int)(a.heads / a.cache.kv_heads), kv_head = blockIdx.y / subgroups;
  const int first = blockIdx.y % subgroups * ROWS, heads_each = min(group - first, ROWS);
  query_tile tile_q;
  if (a.starts) {
    tile_q = find_tile(a, blockIdx.x, max(1, ROWS / group));
    if (tile_q.seq < 0) return;
  } else {
    tile_q.seq = tile_q.token0 = blockIdx.x / place.splits;
    tile_q.tokens = 1;
    tile_q.position0 = a.lens[tile_q.seq] - 1;
  }
  const query_rows rows = {tile_q.token0, kv_head * group + first, heads_each,
                           tile_q.tokens * heads_each};
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int lane_key = lane % LANES, side = lane / LANES;
  const int head_dim = a.cache.head_dim, length = a.lens[tile_q.seq];
  if (threadIdx.x < ROWS) {
    int r = threadIdx.x, position = tile_q.position0 + r / heads_each;
    row_position[r] = position;
    row_limit[r] = r >= rows.count ? -1 : a.causal ? min(position, length - 1) : length - 1;
    row_slope[r] = a.alibi && r < rows.count ? a.alibi[rows.head(r)] * LOG2E : 0.f;
  }
  __syncthreads();

  const int last = tile_q.position0 + tile_q.tokens - 1;
  const paged_walk walk(a, tile_q.seq, kv_head, a.causal ? min(last + 1, length) : length);
  const int tiles = (walk.keys + KEYS - 1) / KEYS;
  const int tile_end = (int)((int64_t)tiles * (place.split + 1) / place.splits);
  int tile = (int)((int64_t)tiles * place.split / place.splits) + warp;

  char *ring = shared + warp * STAGES * shape::STAGE_BYTES;
  const uint32_t ring_at = shared_address(ring);
  int *positions = (int *)(shared + shape::RING_BYTES) + warp * STAGES * KEYS;
  const T *cache = (const T *)a.cache.kv;
  const int64_t to_value = walk.to_value();

  auto find = [&](int t) {
    paged_row none = {0, -1};
    return t < tile_end && lane < KEYS ? walk.find(t * KEYS + lane) : none;
  };
  auto fetch = [&](int stage, const paged_row &row) {
    uint32_t at_k = ring_at + stage * shape::STAGE_BYTES;
    long long offset = row.position < 0 ? -1 : (long long)row.offset;
#pragma unroll
    for (int i = 0; i < KEYS * PIECES / WARP; i++) {
      int r = (i * WARP + lane) / PIECES, piece = (i * WARP + lane) % PIECES;
      long long at = __shfl_sync(ALL_LANES, offset, r);
      bool valid = at >= 0 && piece * N < head_dim;
      const T *k = valid ? cache + at + piece * N : cache;
      copy_async(at_k + (i * WARP + lane) * 16, k, valid);
      copy_async(at_k + shape::TILE_BYTES + (i * WARP + lane) * 16,
                 valid ? k + to_value : cache, valid);
    }
    if (lane < KEYS) positions[stage * KEYS + lane] = row.position;
  };
  /* This lane's 8 dims are pieces lane_key, lane_key + LANES, ... of a row: neighbouring
   * lanes read neighbouring 16 bytes. */
  auto dim_of = [&](int e) { return (e / N * LANES + lane_key) * N + e % N; };
  auto load_row = [&](const char *tile_at, int key, float (&x)[8]) {
#pragma unroll
    for (int p = 0; p < shape::PER_LANE; p++) {
      float part[N];
      load_floats((const T *)(tile_at + (key * PIECES + p * LANES + lane_key) * 16), part);
#pragma unroll
      for (int e = 0; e < N; e++) x[p * N + e] = part[e];
    }
  };

#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    fetch(s, find(tile + s * WARPS));
    copy_commit();
  }
  float q[ROWS][8], out[ROWS][8] = {}, m[ROWS], l[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    m[r] = -INFINITY;
    l[r] = 0.f;
    const float *row = nullptr;
    if (r < rows.count)
      row = (const float *)a.q + (rows.token(r) * a.heads + rows.head(r)) * head_dim;
#pragma unroll
    for (int e = 0; e < 8; e++)
      q[r][e] = row && dim_of(e) < head_dim ? row[dim_of(e)] * (a.scale * LOG2E) : 0.f;
  }
  /* Of four scores, the one this lane ends up with. */
  const int own = (lane & (LANES / 2) ? 2 : 0) + (lane & (LANES / 4) ? 1 : 0);

  paged_row next = find(tile + (STAGES - 1) * WARPS);
  for (int stage = 0; tile < tile_end;
       tile += WARPS, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    copy_wait<STAGES - 2>();
    __syncwarp();
    fetch(stage == 0 ? STAGES - 1 : stage - 1, next);
    copy_commit();
    next = find(tile + STAGES * WARPS);
    const char *k_tile = ring + stage * shape::STAGE_BYTES;
    const char *v_tile = k_tile + shape::TILE_BYTES;
#pragma unroll 1
    for (int batch = 0; batch < KEYS; batch += 4 * SIDE) {
      float p[ROWS][4], x[8];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        load_row(k_tile, batch + u * SIDE + side, x);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          float dot = 0.f;
#pragma unroll
          for (int e = 0; e < 8; e++) dot += q[r][e] * x[e];
          p[r][u] = dot;
        }
      }
      const int at = positions[stage * KEYS + batch + own * SIDE + side];
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float score = sum_of_four<LANES>(p[r], lane);
        score += row_slope[r] * (float)(at - row_position[r]);
        if (at < 0 || at > row_limit[r]) score = -INFINITY;
        float top = fmaxf(score, __shfl_xor_sync(ALL_LANES, score, LANES / 2));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, LANES / 4));
        top = fmaxf(top, m[r]);
        float shift = finite_shift(top), down = exp2_fast(m[r] - shift);
        float weight = exp2_fast(score - shift);
        m[r] = top;
        l[r] = l[r] * down + weight;   /* of this lane's scores alone */
#pragma unroll
        for (int e = 0; e < 8; e++) out[r][e] *= down;
#pragma unroll
        for (int u = 0; u < 4; u++)
          p[r][u] = __shfl_sync(ALL_LANES, weight, u / 2 * (LANES / 2) + u % 2 * (LANES / 4),
                                LANES);
      }
#pragma unroll
      for (int u = 0; u < 4; u++) {
        load_row(v_tile, batch + u * SIDE + side, x);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int e = 0; e < 8; e++) out[r][e] += p[r][u] * x[e];
      }
    }
  }
  let_next_start();

  copy_wait<0>();
  __syncthreads();   /* every warp is past its ring, which now takes the states */
  constexpr int STATES = WARPS * SIDE;
  static_assert(STATES * ROWS * (D * 4 + 8) <= shape::RING_BYTES, "");
  float *sums = (float *)shared;
  float2 *states = (float2 *)(sums + STATES * ROWS * D);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int state = (warp * SIDE + side) * ROWS + r;
    l[r] += __shfl_xor_sync(ALL_LANES, l[r], LANES / 2);
    l[r] += __shfl_xor_sync(ALL_LANES, l[r], LANES / 4);
    if (lane_key == 0) states[state] = make_float2(m[r], l[r]);
#pragma unroll
    for (int e = 0; e < 8; e++) sums[state * D + dim_of(e)] = out[r][e];
  }
  __syncthreads();
  finish_rows<STATES, ROWS, D>(a, rows, place, sums, states);
}

}  // namespace kvl

#endif
