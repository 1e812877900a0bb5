/* The warps of paged_wgmma.cuh that turn tiles of an f8e4m3 cache into f16, which is exact. Two
 * warps take a tile of K, and two a tile of V: each takes half of the keys.
 *
 * They need no memory of their own. A half tile arrives in the upper half of its room, as
 * atoms [8, ATOM] of bytes. A step reads 512 bytes and writes their 1024, from the lowest on;
 * what it overwrites was read in this step or before. */
#ifndef KVL_CUDA_WGMMA_CONVERT_CUH
#define KVL_CUDA_WGMMA_CONVERT_CUH

#include "cuda/attention/wgmma_memory.cuh"

namespace kvl {

#if KVL_SM90A

/* A half tile, at `at`. A lane has 16 numbers of a row in every step, which become two of its
 * swizzled pieces. */
template <class shape, bool V, bool CHANGED>
__device__ __forceinline__ void convert_half(const wgmma_memory<shape> &memory, int s,
                                             int half, uint32_t at, uint32_t signs) {
  constexpr int STEPS = shape::TILE_BYTES / 2 / 1024, IN_ROW = shape::ATOM / 16;
  constexpr int ATOMS = 512 / (8 * shape::ATOM); /* in a step */
  const int lane = threadIdx.x % WARP, row = lane / IN_ROW % 8, atom = lane / (8 * IN_ROW);
  const uint32_t from = at + shape::TILE_BYTES / 4 + lane * 16;
  const uint32_t to = at + atom * shape::ATOM_BYTES +
                      swizzled<shape::ATOM / 8>(row, lane % IN_ROW * 2);
  uint4 ahead[2] = {load_shared(from), load_shared(from + 512)};
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    uint4 x = ahead[i % 2];
    if (i + 2 < STEPS) ahead[i % 2] = load_shared(from + (i + 2) * 512);
    if (CHANGED) {
      const int group = half * (shape::GROUPS / 2) + (i * ATOMS + atom) / shape::PARTS;
      const uint32_t keep = row < memory.kept[V][s][group] ? ~0u : 0u;
      x.x = (x.x & keep) ^ signs;
      x.y = (x.y & keep) ^ signs;
      x.z = (x.z & keep) ^ signs;
      x.w = (x.w & keep) ^ signs;
    }
    const uint2 y0 = halves_of(x.x), y1 = halves_of(x.y);
    const uint2 y2 = halves_of(x.z), y3 = halves_of(x.w);
    __syncwarp(); /* the other lanes have read what this step overwrites */
    store_shared(to + i * 1024, make_uint4(y0.x, y0.y, y1.x, y1.y));
    store_shared((to ^ 16) + i * 1024, make_uint4(y2.x, y2.y, y3.x, y3.y));
  }
}

template <class shape, bool V>
__device__ void convert_tiles(const wgmma_memory<shape> &memory, int half) {
  constexpr int STAGES = shape::STAGES;
  const int lane = threadIdx.x % WARP;
  uint32_t step = 0;
  each_work<shape>(memory, [&](const wgmma_work &w) {
    for (int tile = 0; tile < w.tiles; tile++, step++) {
      const int s = step % STAGES;
      barrier_wait(memory.came(V, s), step / STAGES & 1);
      const uint32_t at = memory.tile(V, s) + half * (shape::TILE_BYTES / 2);
      const uint32_t changes = memory.changes[V][s];
      if (changes == CHANGE_NOTHING) convert_half<shape, V, false>(memory, s, half, at, 0);
      else convert_half<shape, V, true>(memory, s, half, at, changes);
      fence_async();
      barrier_arrive_warp(V ? memory.v_full(s) : memory.k_full(s), lane);
    }
  });
}

#endif

}  // namespace kvl

#endif
