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
  float scale = __fdiv_rn(warp_max(most), 448.f);
  if (is_ue8m0) scale = __uint_as_float(KVL_UE8M0_BITS(__float_as_uint(scale)));
  for (int64_t i = lane * N; i < dim; i += WARP * N) {
    load_floats(x + i, v);
    pack<f8e4m3, N> bytes;
#pragma unroll
    for (int e = 0; e < N; e++) bytes.at[e] = convert<f8e4m3>(__fdiv_rn(v[e], scale));
    store_pack<N>((f8e4m3 *)out + i, bytes);
  }
  return scale;
}

enum { QUANTISE_THREADS = 256 };

}  // namespace kvl

#endif
