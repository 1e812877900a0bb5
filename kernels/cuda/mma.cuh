/* Products of 16-bit numbers on the tensor cores, one warp at a time (mma.sync, since sm_80),
 * and how their operands get there: asynchronous 16-byte copies into tiles of shared memory,
 * fragments loaded from these tiles, pairs of numbers in a register. hopper.cuh has the
 * products of a whole warpgroup.
 *
 * Source    PTX ISA 7.0 and later: cp.async, ldmatrix, mma. */
#ifndef KVL_CUDA_MMA_CUH
#define KVL_CUDA_MMA_CUH

#include "cuda/convert.cuh"

namespace kvl {

/* ---- tiles in shared memory ------------------------------------------------------------ */

/* Copies 16 bytes into shared memory, bypassing L1; writes zeros when `valid` is false. */
__device__ __forceinline__ void copy_async(uint32_t shared, const void *global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
/* The same with a hint, see read_once. */
__device__ __forceinline__ void copy_async(uint32_t shared, const void *global, bool valid,
                                           uint64_t hint) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
          shared),
      "l"(global), "r"(valid ? 16 : 0), "l"(hint)
      : "memory");
}
__device__ __forceinline__ void copy_async(uint32_t shared, const void *global, bool valid,
                                           no_hint) {
  copy_async(shared, global, valid);
}
/* The same, without having the L2 fetch the bytes around them. */
__device__ __forceinline__ void copy_async_alone(uint32_t shared, const void *global,
                                                 bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
/* The same for four bytes, which takes them through L1. */
__device__ __forceinline__ void copy_word_async(uint32_t shared, const void *global,
                                                bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most N of this thread's copy groups are in flight. */
template <int N> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* The offset of 16-byte piece `piece` of row `row` in a tile whose rows have PIECES pieces.
 * The low three bits are mixed with the row, so that eight rows of one column, which ldmatrix
 * reads at once, are in different banks. PIECES is a multiple of 8, or 4. */
template <int PIECES> __device__ __forceinline__ int tile_mix(int row) {
  return PIECES == 4 ? row / 2 % 4 : row & 7;
}
template <int PIECES> __device__ __forceinline__ uint32_t tile_byte(int row, int piece) {
  return (uint32_t)(row * PIECES + (piece ^ tile_mix<PIECES>(row))) * 16;
}
/* The pieces that a tile's row takes for up to D 16-bit numbers. */
template <int D> constexpr int TILE_PIECES = (D / 8 + 7) / 8 * 8;

/* ---- tensor cores ---------------------------------------------------------------------- */

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

/* c[16 x 8] += a[16 x 16] b[16 x 8], with fp32 sums. Lane l of a warp holds columns 2 (l%4)
 * and 2 (l%4) + 1 of two rows of c: c[0..1] of row l/4, c[2..3] of row l/4 + 8. */
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1, __half) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1, __nv_bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Transposes a matrix of 8 x 8 16-bit numbers, of which a lane has two neighbours: columns
 * 2 (l%4) and 2 (l%4) + 1 of row l/4. */
__device__ __forceinline__ uint32_t turn_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

/* ---- two numbers in a register --------------------------------------------------------- */

__device__ __forceinline__ uint32_t pack2(float low, float high, __half) {
  __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&x);
}
__device__ __forceinline__ uint32_t pack2(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&x);
}

__device__ __forceinline__ float2 unpack2(uint32_t x, __half) {
  return __half22float2(*reinterpret_cast<__half2 *>(&x));
}
__device__ __forceinline__ float2 unpack2(uint32_t x, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&x));
}

/* Splits four floats into a sum of bf16: returns the next term; x keeps the remainder. */
__device__ __forceinline__ uint2 next_term(float (&x)[4]) {
  const uint2 term = make_uint2(pack2(x[0], x[1], __nv_bfloat16()),
                                pack2(x[2], x[3], __nv_bfloat16()));
  x[0] -= __uint_as_float(term.x << 16);
  x[1] -= __uint_as_float(term.x & 0xFFFF0000u);
  x[2] -= __uint_as_float(term.y << 16);
  x[3] -= __uint_as_float(term.y & 0xFFFF0000u);
  return term;
}

/* Widens eight numbers of 8 bits to the 16-bit T, times a scale (except for f8e4m3). */
template <class T, class C>
__device__ __forceinline__ uint4 widen(const uint2 &eight, float scale) {
  if constexpr (same<C, f8e4m3>) {
    const uint2 low = halves_of(eight.x), high = halves_of(eight.y);
    auto to = [](uint32_t two) {
      if constexpr (same<T, __half>) return two;
      const float2 x = unpack2(two, __half());
      return pack2(x.x, x.y, T());
    };
    return make_uint4(to(low.x), to(low.y), to(high.x), to(high.y));
  } else {
    float x[8];
    load_floats((const C *)&eight, x);
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] *= scale;
    return make_uint4(pack2(x[0], x[1], T()), pack2(x[2], x[3], T()), pack2(x[4], x[5], T()),
                      pack2(x[6], x[7], T()));
  }
}

}  // namespace kvl

#endif
