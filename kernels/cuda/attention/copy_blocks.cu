/* dst[i] = src[i] for whole blocks of the cache: K and V of every head.
 *
 *   src, dst  i32                  [n]   -1 is skipped; no block may be in both
 *   cache     f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 * 16-byte aligned.
 *
 * Bytes   2 * n * 2 * kv_heads * block_size * head_dim * element
 * Limit   memory. A block of the pool is one contiguous run; a thread block copies 16 KiB of
 *         it, with four 16-byte loads in flight per thread. Exact.
 * Best    1024 blocks of 64 KiB: 46.3 us, 0.94 of the run's read bandwidth; of 32 KiB 22.6
 *         us, 0.96 (H100 80GB HBM3, 2026-11-21) */
#include "args/attention.h"
#include "cuda/elementwise.cuh"

namespace kvl {
namespace {

constexpr int COPY_THREADS = 256, EACH = 4,
              PIECE = COPY_THREADS * EACH; /* in 16-byte words */

__global__ void __launch_bounds__(COPY_THREADS)
    copy(const __grid_constant__ kvl_copy_blocks_args a, int64_t words, int64_t pieces) {
  int64_t i = blockIdx.x / pieces, at = blockIdx.x % pieces * PIECE + threadIdx.x;
  int64_t from = a.src[i], to = a.dst[i];
  if (from < 0 || to < 0 || from >= a.blocks || to >= a.blocks) return;
  const uint4 *src = (const uint4 *)a.memory + from * words;
  uint4 *dst = (uint4 *)a.memory + to * words;
  uint4 x[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (at + e * COPY_THREADS < words) x[e] = src[at + e * COPY_THREADS];
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (at + e * COPY_THREADS < words) dst[at + e * COPY_THREADS] = x[e];
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(copy_blocks) {
  using namespace kvl;
  const kvl_copy_blocks_args &a = *(const kvl_copy_blocks_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const int64_t words = a.bytes_block / 16;
  int64_t pieces = (words + PIECE - 1) / PIECE;
  if (a.n * pieces == 0) return KVL_OK;
  if (!aligned16(a.memory)) return kvl__cuda_check(cudaErrorMisalignedAddress);
  copy<<<(unsigned)(a.n * pieces), COPY_THREADS, 0, q->stream>>>(a, words, pieces);
  return kvl__cuda_launched();
}
