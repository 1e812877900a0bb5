/* Hashes vectors by random planes, on the tensor cores and yet exactly.
 *
 * args/select.h fixes the order of the sums. Half a warp computes one sum: lane p adds up
 * part p. For few vectors nothing else is needed: a thread block takes one word, and a warp
 * 8 of its bits.
 *
 * For many vectors a warp multiplies 32 vectors with 32 planes on the tensor cores. Both are
 * split into bf16 terms (vectors that are bf16 or f8e4m3 are one term). Such a sum may be
 * wrong by hash_error times |x| |plane|. If the sum is farther from 0 than that, its sign
 * is right; for the others, fewer than one in a thousand, the exact sum is computed.
 *
 * Source: Charikar 2002 (random hyperplanes). */
#ifndef KVL_CUDA_HASH_CUH
#define KVL_CUDA_HASH_CUH

#include "args/select.h"
#include "cuda/mma.cuh"
#include "cuda/programmatic.cuh"
#include "cuda/strip.cuh"

namespace kvl {

constexpr int HASH_PARTS = KVL_HASH_PARTS, HASH_CHUNKS = 256 / HASH_PARTS;

/* Loads dims p, p + 16, ... of a row; 0 past its end. */
__device__ __forceinline__ void hash_load(const float *row, int dim,
                                          float (&x)[HASH_CHUNKS]) {
  const int part = threadIdx.x % HASH_PARTS;
#pragma unroll
  for (int c = 0; c < HASH_CHUNKS; c++) {
    const int d = c * HASH_PARTS + part;
    x[c] = d < dim ? row[d] : 0.f;
  }
}

/* x . plane, for each half of a warp; all of its lanes get it. Whole warps call it. */
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

/* A vector to be hashed: the sum of `count` rows (0: zeros). `hash` NULL: no vector. scales:
 * those of the first row, if rows are packed. */
template <class T> struct hash_item {
  const T *rows;
  int count;
  uint64_t *hash;
  const __nv_bfloat16 *scales;
};

/* N numbers of row t from dim d on. */
template <class T, int N>
__device__ __forceinline__ void hash_numbers(const T *rows, const __nv_bfloat16 *scales,
                                             int64_t t, int dim, int d, float (&x)[N]) {
  load_floats(rows + t * dim + d, x);
  if constexpr (packs<T>) {
    const int groups = (dim + PACKED_GROUP - 1) / PACKED_GROUP;
    const float scale = __bfloat162float(scales[t * groups + d / PACKED_GROUP]);
#pragma unroll
    for (int e = 0; e < N; e++) x[e] *= scale;
  }
}

/* SOURCE has type, the T of its rows; IS_SUM, whether count may differ from 1; and at(v),
 * item number v. */
struct hash_call {
  const float *planes;
  int64_t vectors;
  int dim, bits;
};

/* ---- few vectors ----------------------------------------------------------------------- */

constexpr int HASH_FEW_THREADS = 8 * WARP;

template <class SOURCE>
__global__ void __launch_bounds__(HASH_FEW_THREADS)
    hash_few_kernel(const __grid_constant__ SOURCE source, const hash_call call) {
  constexpr int PAIRS = 4; /* of bits, per warp */
  __shared__ float x[256];
  const int dim = call.dim, word = blockIdx.y, warp = threadIdx.x / WARP;
  const int half = threadIdx.x % WARP / HASH_PARTS, bit = word * 64 + warp * 8;
  float plane[PAIRS][HASH_CHUNKS];
  let_next_start();
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < PAIRS; i++)
    if (bit < call.bits) hash_load(call.planes + (bit + 2 * i + half) * dim, dim, plane[i]);
  const auto item = source.at(blockIdx.x);
  if (!item.hash) return; /* the whole block returns */
  if (threadIdx.x < dim) {
    float sum = 0.f;
#pragma unroll 8
    for (int t = 0; t < item.count; t++) {
      float y[1];
      hash_numbers(item.rows, item.scales, t, dim, threadIdx.x, y);
      sum = t ? __fadd_rn(sum, y[0]) : y[0];
    }
    x[threadIdx.x] = sum;
  }
  __syncthreads();
  uint32_t byte = 0;
  if (bit < call.bits) {
    float y[HASH_CHUNKS];
    hash_load(x, dim, y);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const uint32_t is_positive = __ballot_sync(ALL_LANES, hash_sum(y, plane[i], dim) > 0.f);
      byte |= ((is_positive & 1) | (is_positive >> HASH_PARTS & 1) << 1) << 2 * i;
    }
  }
  if (threadIdx.x % WARP == 0) ((uint8_t *)(item.hash + word))[warp] = (uint8_t)byte;
}

/* ---- many vectors ---------------------------------------------------------------------- */

constexpr int HASH_THREADS = 4 * WARP, HASH_TILE = 64; /* vectors per step of a block */
/* An upper bound of a sum's error, relative to |x| |plane|: 2^-18 for each remainder of the
 * split (of x, of the planes, of their product), and 2^-23 for each of 17 terms that an mma
 * adds. */
__device__ __forceinline__ float hash_error(int dim, bool is_split) {
  return 3 * 0x1p-18f + (dim + 15) / 16 * (is_split ? 3 : 2) * 17 * 0x1p-23f;
}
constexpr float HASH_TINY = 1e-17f; /* squares of smaller numbers may vanish from |x| */

/* The length of a row of x or of planes: dims up to a multiple of 16, and 16 more, so that
 * lanes which read together never share a bank. */
__host__ __device__ inline int hash_pitch(int dim) { return (dim + 15) / 16 * 16 + 16; }

struct hash_tile { /* in shared memory, before x and the planes */
  const void *rows[HASH_TILE];
  const __nv_bfloat16 *scales[HASH_TILE];
  uint64_t *hash[HASH_TILE];
  int count[HASH_TILE];
  float length[64]; /* |plane|, scaled as its terms are */
};
inline size_t hash_tile_bytes(int dim) {
  return sizeof(hash_tile) + (size_t)hash_pitch(dim) * (HASH_TILE * 4 + 64 * 2 * 2);
}

/* Splits a word's planes into two bf16 terms [2][64], scaled to 1 ... 2 by powers of 2. */
__device__ __forceinline__ void hash_split_planes(const hash_call &call, int word,
                                                  hash_tile &tile, __nv_bfloat16 *terms) {
  const int lane = threadIdx.x % WARP, pitch = hash_pitch(call.dim);
#pragma unroll 4
  for (int b = threadIdx.x / WARP; b < 64; b += HASH_THREADS / WARP) {
    const bool is_there = word * 64 + b < call.bits;
    const float *plane = call.planes + (int64_t)(word * 64 + b) * call.dim;
    float4 y[2];
    float most = 0.f, square = 0.f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int d = (i * WARP + lane) * 4;
      y[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (is_there && d < call.dim) y[i] = *(const float4 *)(plane + d);
      most = fmaxf(fmaxf(most, fmaxf(fabsf(y[i].x), fabsf(y[i].y))),
                   fmaxf(fabsf(y[i].z), fabsf(y[i].w)));
    }
    /* 2^-e for most = 2^e * 1 ... 2. If there is no such e, hash_again computes the sums. */
    const float scale = __uint_as_float(0x7F000000u -
                                        (__float_as_uint(warp_max(most)) & 0x7F800000u));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int d = (i * WARP + lane) * 4;
      if (d >= pitch - 16) continue;
      float z[4] = {y[i].x * scale, y[i].y * scale, y[i].z * scale, y[i].w * scale};
      square = fmaf(z[0], z[0], fmaf(z[1], z[1], fmaf(z[2], z[2], fmaf(z[3], z[3], square))));
      *(uint2 *)(terms + b * pitch + d) = next_term(z);
      *(uint2 *)(terms + (64 + b) * pitch + d) = next_term(z);
    }
    square = warp_sum(square);
    if (lane == 0) tile.length[b] = sqrtf(square);
  }
}

/* Brings the vectors of a tile, whose rows are known, to shared memory as f32. */
template <class SOURCE>
__device__ __forceinline__ void hash_stage(int dim, const hash_tile &tile, float *x) {
  using T = typename SOURCE::type;
  const int pitch = hash_pitch(dim), eights = (dim + 15) / 16 * 2;
  for (int i = threadIdx.x; i < HASH_TILE * eights; i += HASH_THREADS) {
    const int row = i / eights, d = i % eights * 8;
    const T *rows = (const T *)tile.rows[row];
    const int count = d < dim ? tile.count[row] : 0;
    float sum[8] = {};
    if (count > 0) hash_numbers(rows, tile.scales[row], 0, dim, d, sum);
    if (SOURCE::IS_SUM)
#pragma unroll 4
      for (int t = 1; t < count; t++) {
        float y[8];
        hash_numbers(rows, tile.scales[row], t, dim, d, y);
#pragma unroll
        for (int e = 0; e < 8; e++) sum[e] = __fadd_rn(sum[e], y[e]);
      }
    store_floats(x + row * pitch + d, *(const float(*)[4])sum);
    store_floats(x + row * pitch + d + 4, *(const float(*)[4])(sum + 4));
  }
}

/* The sums of 32 vectors with 32 planes: c[i][j] has rows 16 i + lane / 4 (+ 8) and planes
 * 8 j + 2 (lane % 4) (+ 1); length has |x| of the four rows. Of 16 dims lane % 4 = t holds
 * 4 t ... 4 t + 3, in vectors and planes alike: sums do not depend on this order. */
template <bool IS_SPLIT>
__device__ __forceinline__ void hash_products(const float *x, const __nv_bfloat16 *terms,
                                              int dim, float (&c)[2][4][4],
                                              float (&length)[4]) {
  const int lane = threadIdx.x % WARP, group = lane / 4, t = lane % 4;
  const int pitch = hash_pitch(dim);
  x += group * pitch + 4 * t, terms += group * pitch + 4 * t;
#pragma unroll 2
  for (int d = 0; d < dim; d += 16) {
    uint32_t high[2][4], low[2][4];
#pragma unroll
    for (int r = 0; r < 4; r++) { /* rows group + 8 r */
      float y[4];
      load_floats(x + r * 8 * pitch + d, y);
      length[r] = fmaf(y[0], y[0], fmaf(y[1], y[1], length[r]));
      length[r] = fmaf(y[2], y[2], fmaf(y[3], y[3], length[r]));
      const uint2 first = next_term(y);
      high[r / 2][r % 2] = first.x, high[r / 2][r % 2 + 2] = first.y;
      if (IS_SPLIT) {
        const uint2 second = next_term(y);
        low[r / 2][r % 2] = second.x, low[r / 2][r % 2 + 2] = second.y;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint2 b = *(const uint2 *)(terms + 8 * j * pitch + d);
      const uint2 e = *(const uint2 *)(terms + (64 + 8 * j) * pitch + d);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        mma(c[i][j], high[i], e.x, e.y, __nv_bfloat16());
        if (IS_SPLIT) mma(c[i][j], low[i], b.x, b.y, __nv_bfloat16());
        mma(c[i][j], high[i], b.x, b.y, __nv_bfloat16());
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; r++) length[r] = sqrtf(warp_sum<4>(length[r]));
}

/* Computes the exact sum for the bits in `doubt` of each lane, whose sums are too near to 0.
 * x and planes point to the first row and the first plane. */
__device__ __forceinline__ uint32_t hash_again(uint32_t doubt, const float *x, int pitch,
                                               const float *planes, int dim) {
  const int lane = threadIdx.x % WARP;
  uint32_t bits = 0;
#pragma unroll 1
  for (unsigned lanes; (lanes = __ballot_sync(ALL_LANES, doubt)) != 0;) {
    const int owner = __ffs(lanes) - 1;
    const int bit = __shfl_sync(ALL_LANES, __ffs(doubt) - 1, owner);
    float y[HASH_CHUNKS], plane[HASH_CHUNKS];
    hash_load(x + owner / 4 * pitch, dim, y);
    hash_load(planes + bit * dim, dim, plane);
    const bool is_positive = hash_sum(y, plane, dim) > 0.f;
    if (lane == owner) {
      doubt &= doubt - 1;
      bits |= (uint32_t)is_positive << bit;
    }
  }
  return bits;
}

template <class SOURCE>
__global__ void __launch_bounds__(HASH_THREADS)
    hash_many_kernel(const __grid_constant__ SOURCE source, const hash_call call) {
  constexpr bool IS_SPLIT = SOURCE::IS_SUM || sizeof(typename SOURCE::type) == 4 ||
                            packs<typename SOURCE::type> ||
                            same<typename SOURCE::type, __half>;
  extern __shared__ __align__(16) char memory[];
  hash_tile &tile = *(hash_tile *)memory;
  const int dim = call.dim, pitch = hash_pitch(dim), word = blockIdx.y;
  float *x = (float *)(memory + sizeof(tile));
  __nv_bfloat16 *terms = (__nv_bfloat16 *)(x + HASH_TILE * pitch);
  const int lane = threadIdx.x % WARP, group = lane / 4, warp = threadIdx.x / WARP;
  const int first_row = warp / 2 * 32, first_bit = warp % 2 * 32;
  const bool is_there = word * 64 + first_bit < call.bits;
  hash_split_planes(call, word, tile, terms);
  for (int64_t v0 = blockIdx.x * (int64_t)HASH_TILE; v0 < call.vectors;
       v0 += (int64_t)gridDim.x * HASH_TILE) {
    if (threadIdx.x < HASH_TILE) {
      hash_item<typename SOURCE::type> item = {nullptr, 0, nullptr, nullptr};
      if (v0 + threadIdx.x < call.vectors) item = source.at(v0 + threadIdx.x);
      tile.rows[threadIdx.x] = item.rows, tile.hash[threadIdx.x] = item.hash;
      tile.scales[threadIdx.x] = item.scales;
      tile.count[threadIdx.x] = item.hash ? item.count : 0;
    }
    __syncthreads();
    hash_stage<SOURCE>(dim, tile, x);
    __syncthreads();
    float c[2][4][4] = {}, length[4] = {};
    const float *rows = x + first_row * pitch;
    const float *planes = call.planes + (int64_t)(word * 64 + first_bit) * dim;
    if (is_there) hash_products<IS_SPLIT>(rows, terms + first_bit * pitch, dim, c, length);
#pragma unroll
    for (int r = 0; r < 4; r++) { /* rows group + 8 r */
      uint32_t bits = 0, doubt = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int bit = i / 2 * 8 + lane % 4 * 2 + i % 2;
        const float sum = c[r / 2][i / 2][r % 2 * 2 + i % 2];
        const float error = fmaxf(
            hash_error(dim, IS_SPLIT) * length[r] * tile.length[first_bit + bit], HASH_TINY);
        const bool is_sure = fabsf(sum) > error && fabsf(sum) < 3e38f;
        bits |= (uint32_t)(is_sure && sum > 0.f) << bit;
        doubt |= (uint32_t)!is_sure << bit;
      }
      if (tile.count[first_row + group + 8 * r] == 0) doubt = 0; /* zeros have no bit */
      if (is_there) bits |= hash_again(doubt, rows + r * 8 * pitch, pitch, planes, dim);
      else bits = 0;
      bits |= __shfl_xor_sync(ALL_LANES, bits, 1);
      bits |= __shfl_xor_sync(ALL_LANES, bits, 2);
      uint64_t *hash = tile.hash[first_row + group + 8 * r];
      if (lane % 4 == 0 && hash) ((uint32_t *)(hash + word))[warp % 2] = bits;
    }
    __syncthreads();
  }
}

template <class SOURCE>
int hash_vectors(const SOURCE &source, const hash_call &call, const kvl_cuda_queue *q) {
  constexpr auto kernel = hash_many_kernel<SOURCE>;
  const unsigned words = (unsigned)(call.bits + 63) / 64;
  if (call.vectors == 0) return KVL_OK;
  if (call.vectors < 2048)
    return launch_programmatic(hash_few_kernel<SOURCE>, dim3((unsigned)call.vectors, words),
                               HASH_FEW_THREADS, 0, q, source, call);
  int status = allow_shared<kernel>(q, q->shared_optin);
  if (status < 0) return status;
  const unsigned tiles = grid(call.vectors, HASH_TILE, q, 3);
  kernel<<<dim3(tiles, words), HASH_THREADS, hash_tile_bytes(call.dim), q->stream>>>(source,
                                                                                     call);
  return kvl__cuda_launched();
}

}  // namespace kvl

#endif
