/* What the ops of index-K share: finding a place in memory, and quantising rows to f8e4m3
 * with a scale each. Keys and scales are aligned to 4 bytes, or to 16 when block_size is a
 * multiple of 4. */
#ifndef KVL_CUDA_INDEX_CUH
#define KVL_CUDA_INDEX_CUH

#include "args/index.h"
#include "cuda/convert.cuh"

namespace kvl {

struct index_place {
  uint8_t *key; /* nullptr: the place does not exist */
  float *scale;
};
__device__ __forceinline__ index_place index_at(const kvl_index_view &view, int64_t block,
                                                int offset) {
  if (block < 0 || block >= view.blocks) return {nullptr, nullptr};
  const int keys = view.block_size * view.dim;
  uint8_t *memory = view.memory + block * (keys + 4 * view.block_size);
  return {memory + offset * view.dim, (float *)(memory + keys) + offset};
}
__device__ __forceinline__ index_place index_of_place(const kvl_index_view &view,
                                                      int64_t place) {
  if (place < 0) return {nullptr, nullptr};
  const int64_t block = place / view.block_size;
  return index_at(view, block, (int)(place - block * view.block_size));
}

/* The scale of a row whose largest magnitude is `most`. */
__device__ __forceinline__ float row_scale(float most, int is_ue8m0) {
  const float scale = __fdiv_rn(most, 448.f);
  return is_ue8m0 ? __uint_as_float(KVL_UE8M0_BITS(__float_as_uint(scale))) : scale;
}

/* One warp computes out = x / scale, N neighbours per lane, and returns the scale. It divides
 * rather than multiplying by 1 / scale, so that every device rounds alike. */
template <int N, class T>
__device__ __forceinline__ float quantise_row(const T *x, uint8_t *out, int64_t dim,
                                              int is_ue8m0) {
  const int lane = threadIdx.x % WARP;
  float most = KVL_INDEX_AMAX_LEAST, v[N];
  for (int64_t i = lane * N; i < dim; i += WARP * N) {
    load_floats(x + i, v);
#pragma unroll
    for (int e = 0; e < N; e++) most = fmaxf(most, fabsf(v[e])); /* fmaxf ignores NaN */
  }
  const float scale = row_scale(warp_max(most), is_ue8m0);
  for (int64_t i = lane * N; i < dim; i += WARP * N) {
    load_floats(x + i, v);
    pack<f8e4m3, N> bytes;
#pragma unroll
    for (int e = 0; e < N; e++) bytes.at[e] = convert<f8e4m3>(__fdiv_rn(v[e], scale));
    store_pack<N>((f8e4m3 *)out + i, bytes);
  }
  return scale;
}

/* Sums and differences of numbers 1, 2, 4 ... apart of a run of `PER` * 32 numbers, of which a
 * lane has one of every 32: H x of each `across` or more of them. */
template <int PER>
__device__ __forceinline__ void hadamard_lanes(float (&v)[PER], int across) {
  const int lane = threadIdx.x % WARP;
  for (int apart = 1; apart < across; apart *= 2)
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const float other = __shfl_xor_sync(ALL_LANES, v[i], apart);
      v[i] = lane & apart ? other - v[i] : v[i] + other;
    }
#pragma unroll
  for (int apart = 1; apart < PER; apart *= 2)
#pragma unroll
    for (int i = 0; i < PER; i++) {
      if (i & apart) continue;
      const float low = v[i], high = v[i + apart];
      v[i] = low + high;
      v[i + apart] = low - high;
    }
}

/* quantise_row of a row of PER * 32 numbers that is rotated first, and rounded to T then. */
template <int PER, class T>
__device__ __forceinline__ float rotate_row(const T *x, uint8_t *out, int is_ue8m0) {
  const int lane = threadIdx.x % WARP;
  float most = KVL_INDEX_AMAX_LEAST, v[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) v[i] = to_float(x[i * WARP + lane]);
  hadamard_lanes(v, WARP);
#pragma unroll
  for (int i = 0; i < PER; i++) {
    v[i] = to_float(from_float<T>(v[i] * KVL_INDEX_TURN(PER * WARP)));
    most = fmaxf(most, fabsf(v[i])); /* fmaxf ignores NaN */
  }
  const float scale = row_scale(warp_max(most), is_ue8m0);
#pragma unroll
  for (int i = 0; i < PER; i++)
    ((f8e4m3 *)out)[i * WARP + lane] = convert<f8e4m3>(__fdiv_rn(v[i], scale));
  return scale;
}
/* A row of index-K memory, or of a query for it. */
template <int N, class T>
__device__ __forceinline__ float index_row(const T *x, uint8_t *out, int64_t dim, int rotates,
                                           int is_ue8m0) {
  if (!rotates) return quantise_row<N>(x, out, dim, is_ue8m0);
  if (dim == 32) return rotate_row<1>(x, out, is_ue8m0);
  if (dim == 64) return rotate_row<2>(x, out, is_ue8m0);
  return rotate_row<4>(x, out, is_ue8m0);
}

enum { QUANTISE_THREADS = 256 };

}  // namespace kvl

#endif
