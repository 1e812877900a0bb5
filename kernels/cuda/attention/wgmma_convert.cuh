/* The warps of paged_wgmma.cuh that turn tiles of 8-bit numbers into 16-bit ones.
 *
 * f8e4m3 becomes f16, which is exact. Two warps take a tile of K, and two a tile of V: each
 * takes half of the keys. int8 times its scale is rounded once, to q's dtype, as a cache of that
 * dtype would hold it. That takes longer, so all four warps share each tile: K of a tile, then V
 * of the tile before, which is the order in which consumers need them and free their
 * memory.
 *
 * They need no memory of their own. A warp's share arrives in the upper half of the memory
 * that it will fill, as atoms [8, ATOM] of bytes. A step reads 512 bytes and writes the
 * 1024 bytes that they become, from the lowest on; what it overwrites was read in this step
 * or before.
 *
 * Budget    int8, head_dim 128: two consumers that reach 660 TFLOP/s take a tile of K and one of
 *           V, 128 keys each, in about 2900 cycles. Each scheduler has one of the four warps. A
 *           step turns 16 numbers a lane in 51 issue slots (16 prmt, 16 fma, 8 cvt, 4 xor; the
 *           rest are copies and scales); prmt, xor and cvt have half rate and take 56 cycles. A
 *           quarter of a tile has 8 steps. So a warp needs about 900 of 2900 issue slots, beside
 *           about 600 of the softmax, and hands a tile over about 600 cycles after it came. */
#ifndef KVL_CUDA_WGMMA_CONVERT_CUH
#define KVL_CUDA_WGMMA_CONVERT_CUH

#include "cuda/mma.cuh"
#include "cuda/attention/wgmma_memory.cuh"

namespace kvl {

#if KVL_SM90A

/* The address at which a lane works in a share that begins at `at`. In every step it takes
 * 16 numbers of a row, which become two of the row's swizzled pieces. */
template <class shape> struct convert_place {
  static constexpr int STEPS = shape::SHARE_BYTES / 1024, IN_ROW = shape::ATOM / 16;
  static constexpr int ATOMS = 512 / (8 * shape::ATOM); /* in a step */
  int row, atom, piece;
  uint32_t from, to;
  __device__ __forceinline__ explicit convert_place(uint32_t at) {
    const int lane = threadIdx.x % WARP;
    row = lane / IN_ROW % 8, atom = lane / (8 * IN_ROW), piece = lane % IN_ROW * 2;
    from = at + shape::SHARE_BYTES / 2 + lane * 16;
    to = at + atom * shape::ATOM_BYTES + swizzled<shape::ATOM / 8>(row, piece);
  }
  __device__ __forceinline__ uint4 load(int step) const {
    return load_shared(from + step * 512);
  }
  __device__ __forceinline__ void store(int step, uint4 low, uint4 high) const {
    __syncwarp(); /* the other lanes have read what this step overwrites */
    store_shared(to + step * 1024, low);
    store_shared((to ^ 16) + step * 1024, high);
  }
  /* The group of the share that a step's numbers belong to, and their atom in its rows. */
  __device__ __forceinline__ int group(int step) const {
    return (step * ATOMS + atom) / shape::PARTS;
  }
  __device__ __forceinline__ int part(int step) const {
    return (step * ATOMS + atom) % shape::PARTS;
  }
};

/* ---- f8e4m3 ---------------------------------------------------------------------------- */

/* CHANGED: signs are flipped, and rows of keys that do not exist become 0, by how many of
 * each eight exist. */
template <class shape, bool CHANGED>
__device__ __forceinline__ void convert_half(uint32_t at, const int8_t *kept,
                                             uint32_t signs) {
  using place = convert_place<shape>;
  const place mine(at);
  uint4 ahead[2] = {mine.load(0), mine.load(1)};
#pragma unroll(CHANGED ? 2 : place::STEPS)
  for (int i = 0; i < place::STEPS; i++) {
    uint4 x = ahead[i % 2];
    if (i + 2 < place::STEPS) ahead[i % 2] = mine.load(i + 2);
    if (CHANGED) {
      const uint32_t keep = mine.row < kept[mine.group(i)] ? ~0u : 0u;
      x.x = (x.x & keep) ^ signs;
      x.y = (x.y & keep) ^ signs;
      x.z = (x.z & keep) ^ signs;
      x.w = (x.w & keep) ^ signs;
    }
    const uint2 y0 = halves_of(x.x), y1 = halves_of(x.y);
    const uint2 y2 = halves_of(x.z), y3 = halves_of(x.w);
    mine.store(i, make_uint4(y0.x, y0.y, y1.x, y1.y), make_uint4(y2.x, y2.y, y3.x, y3.y));
  }
}

template <class shape>
__device__ void convert_tiles(const wgmma_memory<shape> &memory, bool V, int half) {
  constexpr int STAGES = shape::STAGES;
  const int lane = threadIdx.x % WARP;
  uint32_t step = 0;
  each_work<shape>(memory, [&](const wgmma_work &w) {
    for (int tile = 0; tile < w.tiles; tile++, step++) {
      const int s = step % STAGES;
      barrier_wait(memory.came(V, s), step / STAGES & 1);
      const uint32_t at = memory.tile(V, s) + half * shape::SHARE_BYTES;
      const uint32_t changes = memory.changes[V][s];
      const int8_t *const kept = &memory.kept[V][s][half * shape::SHARE_GROUPS];
      if (changes == CHANGE_NOTHING) convert_half<shape, false>(at, kept, 0);
      else convert_half<shape, true>(at, kept, changes);
      fence_async();
      barrier_arrive_warp(memory.full(V, s), lane);
    }
  });
}

/* ---- int8 ------------------------------------------------------------------------------ */

/* Four numbers times a scale, as T. The f32 with the bits 0x4700uu00 is 32768 + uu, and uu is
 * the number plus 128. An fma subtracts 32896 scales, which is exact, as the number times its
 * scale is: 8 bits times 8. Scales of LARGE_SCALE and more need two steps. */
constexpr float LARGE_SCALE = 0x1p112f;
template <class T, bool LARGE>
__device__ __forceinline__ uint2 scaled_of(uint32_t x, float scale, float minus) {
  x ^= 0x80808080u;
  float y[4];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float u = __uint_as_float(__byte_perm(x, 0x47, 0x4505 + 0x10 * e));
    y[e] = LARGE ? (u - 32896.f) * scale : fmaf(u, scale, minus);
  }
  return make_uint2(pack2(y[0], y[1], T()), pack2(y[2], y[3], T()));
}

__device__ __forceinline__ float load_scale(uint32_t shared) {
  uint16_t x;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(shared) : "memory");
  return __uint_as_float((uint32_t)x << 16);
}

/* Converts a quarter of a tile. SPECIAL: some keys do not exist, or scales are large. Rows of
 * keys that do not exist are multiplied by 0. */
template <class T, class shape, bool SPECIAL>
__device__ __forceinline__ void convert_quarter(const convert_place<shape> &mine,
                                                uint4 (&ahead)[2], uint32_t scales,
                                                const int8_t *kept) {
  constexpr int STEPS = convert_place<shape>::STEPS;
  scales += mine.row * (2 * shape::SCALES);
  auto scale_of_step = [&](int i) {
    const int group = mine.group(i), dim = mine.part(i) * shape::ATOM;
    const float scale = load_scale(scales + group * shape::SCALES_GROUP_BYTES +
                                   dim / PACKED_GROUP * 2);
    return !SPECIAL || mine.row < kept[group] ? scale : 0.f;
  };
  float scales_ahead[2] = {scale_of_step(0), scale_of_step(1)};
#pragma unroll(SPECIAL ? 2 : STEPS)
  for (int i = 0; i < STEPS; i++) {
    const uint4 x = ahead[i % 2];
    const float scale = scales_ahead[i % 2], minus = -32896.f * scale;
    if (i + 2 < STEPS) ahead[i % 2] = mine.load(i + 2);
    if (i + 2 < STEPS) scales_ahead[i % 2] = scale_of_step(i + 2);
    const uint2 y0 = scaled_of<T, SPECIAL>(x.x, scale, minus);
    const uint2 y1 = scaled_of<T, SPECIAL>(x.y, scale, minus);
    const uint2 y2 = scaled_of<T, SPECIAL>(x.z, scale, minus);
    const uint2 y3 = scaled_of<T, SPECIAL>(x.w, scale, minus);
    mine.store(i, make_uint4(y0.x, y0.y, y1.x, y1.y), make_uint4(y2.x, y2.y, y3.x, y3.y));
  }
}

/* Whether a scale in this warp's quarter of the tile is large, or NaN. */
template <class shape> __device__ __forceinline__ bool has_large_scale(uint32_t scales) {
  constexpr int BYTES = shape::SHARE_GROUPS * shape::SCALES_GROUP_BYTES;
  bool large = false;
#pragma unroll
  for (int i = 0; i < BYTES; i += 2 * WARP)
    if (i + threadIdx.x % WARP * 2 < BYTES)
      large |= !(load_scale(scales + i + threadIdx.x % WARP * 2) < LARGE_SCALE);
  return __any_sync(ALL_LANES, large);
}

template <class T, class shape>
__device__ void convert_packed(const wgmma_memory<shape> &memory, int quarter) {
  constexpr int STAGES = shape::STAGES;
  const int lane = threadIdx.x % WARP;
  auto convert = [&](bool of_v, uint32_t tile) {
    const int s = tile % STAGES, group = quarter * shape::SHARE_GROUPS;
    barrier_wait(memory.came(of_v, s), tile / STAGES & 1);
    const convert_place<shape> mine(memory.tile(of_v, s) + quarter * shape::SHARE_BYTES);
    uint4 ahead[2] = {mine.load(0), mine.load(1)};
    const uint32_t scales = memory.tile_scales(of_v, s) + group * shape::SCALES_GROUP_BYTES;
    const int8_t *const kept = &memory.kept[of_v][s][group];
    const bool changed = memory.changes[of_v][s] != CHANGE_NOTHING;
    if (has_large_scale<shape>(scales) || changed)
      convert_quarter<T, shape, true>(mine, ahead, scales, kept);
    else convert_quarter<T, shape, false>(mine, ahead, scales, kept);
    fence_async();
    barrier_arrive_warp(memory.full(of_v, s), lane);
  };
  bool more = true;
  for (uint32_t tile = 0, known = 0, n = 0; more; tile++) {
    if (tile == known) {
      const wgmma_work &w = memory.wait_work(n);
      more = w.tokens > 0;
      known += w.tiles;
      memory.work_done(n++);
    }
    /* K of this tile, if there is one, and V of the one before. */
#pragma unroll 1
    for (int v = !more; v < (tile > 0 ? 2 : 1); v++) convert(v, tile - v);
  }
}

#endif

}  // namespace kvl

#endif
