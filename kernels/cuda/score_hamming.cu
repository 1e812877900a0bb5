/* A score of every block of every sequence: minus the bits in which its hash differs from the
 * query's; of token hashes, of the nearest valid token's.
 *
 *   q       u64  [seqs, kv_heads, words]
 *   hashes  u64  [blocks, kv_heads, words] or [blocks, kv_heads, block_size, words]
 *   tables  i32  [seqs, max_blocks]
 *   lens    i32  [seqs]
 *   scores  f32  [seqs, kv_heads or 1, max_blocks]   1: the best of all KV heads; blocks past
 *                                                    the last get -inf
 * A warp scores 32 blocks, the KV heads of the same blocks next to each other. Exact.
 *
 * Bytes   hashes of every block, once; limit: memory
 * Best    16 x 32K tokens, 8 KV heads, 128 bits a token: 29.3 us, 0.75 of the run's read
 *         bandwidth (H100 80GB HBM3, 2026-11-21, cold L2, kernels/dev/hash.cu)
 * Source  UCM's GSA on-device */
#include "hamming.cuh"

namespace kvl {
namespace {

constexpr int SCORE_THREADS = 256;

/* heads: KV heads that a warp takes, one after the other. */
template <class FORM>
__global__ void __launch_bounds__(SCORE_THREADS, 4)
score_hamming_kernel(const __grid_constant__ kvl_score_hamming_args a, int64_t tiles,
                     int heads) {
  const kvl_hash_view &v = a.hashes;
  const int lane = threadIdx.x % WARP, parts = (v.kv_heads + heads - 1) / heads;
  const int64_t item = (blockIdx.x * (int64_t)SCORE_THREADS + threadIdx.x) / WARP;
  const int64_t seq = item / parts / tiles, b = item / parts % tiles * WARP + lane;
  const int first = (int)(item % parts) * heads, last = min(first + heads, v.kv_heads);
  if (seq >= a.seqs) return;
  const bool is_inside = b < a.max_blocks;
  int block[1] = {is_inside ? a.tables[seq * a.max_blocks + b] : -1};
  const int64_t size = a.block_size, left = a.lens[seq] - b * size;
  const int tokens[1] = {(int)min(left, size)};
  if (left <= 0) block[0] = -1;
  const bool is_shared = a.score_heads == 1;
  const uint64_t *q = a.q + (seq * v.kv_heads + first) * v.words;
  const int64_t list = seq * a.score_heads + (is_shared ? 0 : first);
  float *scores = a.scores + list * a.max_blocks + b;
  uint32_t best = HAMMING_NONE;
#pragma unroll 1
  for (int head = first; head < last; head++, q += v.words) {
    hash_batch<FORM, 1> batch;
    uint32_t d[1];
    batch.load(v, block, tokens, head);
    batch.distances(q, d);
    best = is_shared ? min(best, d[0]) : d[0];
    if (is_shared && head + 1 < last) continue;
    if (is_inside) *scores = best == HAMMING_NONE ? -INFINITY : -(float)best;
    scores += a.max_blocks;
  }
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(score_hamming) {
  using namespace kvl;
  const kvl_score_hamming_args &a = *(const kvl_score_hamming_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const int64_t tiles = (a.max_blocks + WARP - 1) / WARP;
  const int64_t per_block = SCORE_THREADS / WARP, room = 4 * per_block * q->sm_count;
  const int kv_heads = a.hashes.kv_heads;
  if (a.seqs * tiles * a.score_heads == 0) return KVL_OK;
  /* All warps at once where that is possible: a table is then waited for but once. */
  int heads = a.score_heads == 1 ? kv_heads : 1;
  while (heads < kv_heads && a.seqs * tiles * ((kv_heads + heads - 1) / heads) > room)
    heads *= 2;
  const int64_t warps = a.seqs * tiles * ((kv_heads + heads - 1) / heads);
  const unsigned blocks = (unsigned)((warps + per_block - 1) / per_block);
  return with_form(a.hashes, [&](auto form) {
    constexpr auto kernel = score_hamming_kernel<decltype(form)>;
    kernel<<<blocks, SCORE_THREADS, 0, q->stream>>>(a, tiles, heads);
    return kvl__cuda_launched();
  });
}
