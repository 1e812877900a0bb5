/* Hashes of vectors by random planes: the sums that kernels.h fixes, on half a warp. Lane p of
 * a half has part p. */
#ifndef KVL_CUDA_HASH_CUH
#define KVL_CUDA_HASH_CUH

#include "convert.cuh"

namespace kvl {

constexpr int HASH_PARTS = KVL_HASH_PARTS, HASH_CHUNKS = 256 / HASH_PARTS;

/* Dims p, p + 16, ... of a row that begins at `row`; 0 past its end. */
template <class T>
__device__ __forceinline__ void hash_load(const T *row, int dim, float (&x)[HASH_CHUNKS]) {
  const int part = threadIdx.x % HASH_PARTS;
#pragma unroll
  for (int c = 0; c < HASH_CHUNKS; c++) {
    const int d = c * HASH_PARTS + part;
    x[c] = d < dim ? to_float(row[d]) : 0.f;
  }
}

/* x . plane, in every lane. By whole warps. */
__device__ __forceinline__ float hash_sum(const float (&x)[HASH_CHUNKS],
                                          const float (&plane)[HASH_CHUNKS], int dim) {
  float sum = 0.f;
#pragma unroll
  for (int c = 0; c < HASH_CHUNKS; c++)
    if (c * HASH_PARTS < dim) sum = __fadd_rn(sum, __fmul_rn(x[c], plane[c]));
#pragma unroll
  for (int step = HASH_PARTS / 2; step > 0; step /= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, step));
  return sum;
}

/* 32 bits of the hash of x, which both halves of the warp have, by planes from `planes` on. */
__device__ __forceinline__ uint32_t hash_bits(const float (&x)[HASH_CHUNKS],
                                              const float *planes, int dim) {
  const int half = threadIdx.x % WARP / HASH_PARTS;
  uint32_t word = 0;
#pragma unroll 4
  for (int bit = 0; bit < 32; bit += 2) {
    float plane[HASH_CHUNKS];
    hash_load(planes + (bit + half) * dim, dim, plane);
    const uint32_t is_positive = __ballot_sync(ALL_LANES, hash_sum(x, plane, dim) > 0.f);
    word |= ((is_positive & 1) | (is_positive >> HASH_PARTS & 1) << 1) << bit;
  }
  return word;
}

/* The hash of x, by a warp. */
__device__ __forceinline__ void hash_store(const float (&x)[HASH_CHUNKS], const float *planes,
                                           int dim, int bits, uint64_t *words) {
  for (int b = 0; b < bits; b += 64) {
    uint64_t word = hash_bits(x, planes + b * dim, dim);
    if (b + 32 < bits) word |= (uint64_t)hash_bits(x, planes + (b + 32) * dim, dim) << 32;
    if (threadIdx.x % WARP == 0) words[b / 64] = word;
  }
}

}  // namespace kvl

#endif
