/* Joins partial softmaxes: the shared part of paged_combine and wgmma_combine. */
#ifndef KVL_CUDA_COMBINE_PARTS_CUH
#define KVL_CUDA_COMBINE_PARTS_CUH

#include "cuda/attention/paged.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {

constexpr int COMBINE_WARPS = 8, COMBINE_AT_ONCE = 5;

/* How the lanes of a team of warps share the partial results of a row: they take 4 *
 * dim_lanes dims and read 32 / dim_lanes results side by side in each warp, up to five in
 * flight per lane. A team is one warp or, for many results, all warps of a block: one warp
 * would have to read them in short pieces. */
inline int combine_dim_lanes(int64_t parts, int team = 1) {
  int dim_lanes = WARP;
  while (dim_lanes > 1 && team * (WARP / dim_lanes) * COMBINE_AT_ONCE < parts) dim_lanes /= 2;
  return dim_lanes;
}
inline int combine_team(int64_t parts) {
  return combine_dim_lanes(parts) < 4 ? COMBINE_WARPS : 1;
}
struct combine_lanes {
  int dim_lanes, side, mine; /* side: results side by side; mine: this lane's, from 0 */
  __device__ explicit combine_lanes(int n, int team = 1)
      : dim_lanes(n), side(team * (WARP / n)),
        mine((team > 1 ? threadIdx.x : threadIdx.x % WARP) / n) {}
  /* The first of this lane's four dims in piece number `piece` of a row. */
  __device__ int dim(int piece) const {
    return (piece * dim_lanes + threadIdx.x % WARP % dim_lanes) * 4;
  }
};
/* Joins `count` partial results; number i is row part(i) of `out` [, head_dim] and `lse`. An SM
 * has only a few, so 32 bits are enough for their numbers. Calls give(dim, x, m, sum) for each
 * piece from `piece` to `end`: all lanes have the maximum and the sum of weights, and lanes with
 * mine == 0 their four dims. */
template <class F, class G>
__device__ __forceinline__ void join_parts(const combine_lanes &l, const float *out,
                                           const float *lse_of, int head_dim, int piece,
                                           int end, int count, F part, G give) {
  constexpr int MOST = COMBINE_AT_ONCE;
  const int step = MOST * l.side;
  float weight[MOST];
  float4 y[MOST];
  auto lse = [&](int base, int j) {
    const int i = base + j * l.side;
    return i < count ? lse_of[part(i)] : -INFINITY;
  };
  auto load = [&](int base, int dim) {
#pragma unroll
    for (int j = 0; j < MOST; j++) {
      const int i = base + j * l.side;
      y[j] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (i < count && dim < head_dim)
        y[j] = *(const float4 *)(out + part(i) * head_dim + dim);
    }
  };
  float m = -INFINITY;
#pragma unroll
  for (int j = 0; j < MOST; j++) weight[j] = lse(l.mine, j);
  load(l.mine, l.dim(piece));
#pragma unroll
  for (int j = 0; j < MOST; j++) m = fmaxf(m, weight[j]);
  for (int base = l.mine + step; base < count; base += step)
    for (int j = 0; j < MOST; j++) m = fmaxf(m, lse(base, j));
  m = warp_max(m);
  const float shift = finite_shift(m);
#pragma unroll
  for (int j = 0; j < MOST; j++) weight[j] = exp2_fast(weight[j] - shift);
#pragma unroll 1
  for (bool first = true; piece < end; piece++, first = false) {
    const int dim = l.dim(piece);
    if (!first) load(l.mine, dim);
    float x[4] = {}, sum = 0.f;
    auto add = [&](float by, const float4 &of) {
      sum += by;
      x[0] += by * of.x, x[1] += by * of.y, x[2] += by * of.z, x[3] += by * of.w;
    };
#pragma unroll
    for (int j = 0; j < MOST; j++) add(weight[j], y[j]);
    for (int base = l.mine + step; base < count; base += step) {
      load(base, dim);
#pragma unroll
      for (int j = 0; j < MOST; j++) add(exp2_fast(lse(base, j) - shift), y[j]);
    }
    for (int across = l.dim_lanes; across < WARP; across *= 2) {
      sum += __shfl_xor_sync(ALL_LANES, sum, across);
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] += __shfl_xor_sync(ALL_LANES, x[e], across);
    }
    give(dim, x, m, sum);
  }
}

/* What the warps of a team have found out about four dims of a row each. */
struct alignas(16) combine_room {
  float m[COMBINE_WARPS][WARP], sum[COMBINE_WARPS][WARP], x[COMBINE_WARPS][WARP][4];
};
/* Joins the results of the block's warps; the first warp's lanes get them. Lanes with the same
 * dims have the same. */
__device__ __forceinline__ void join_team(combine_room &room, float (&x)[4], float &m,
                                          float &sum) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  room.m[warp][lane] = m, room.sum[warp][lane] = sum;
  store_floats(room.x[warp][lane], x);
  __syncthreads();
  if (warp > 0) return;
  for (int i = 1; i < COMBINE_WARPS; i++) m = fmaxf(m, room.m[i][lane]);
  sum = x[0] = x[1] = x[2] = x[3] = 0.f;
  for (int i = 0; i < COMBINE_WARPS; i++) {
    const float weight = exp2_fast(room.m[i][lane] - finite_shift(m));
    float y[4];
    load_floats(room.x[i][lane], y);
    sum += weight * room.sum[i][lane];
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] += weight * y[e];
  }
}

}  // namespace kvl

#endif
