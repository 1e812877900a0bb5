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
 * Source  UCM's GSA on-device */
#include "hamming.cuh"

namespace kvl {
namespace {

constexpr int THREADS = 256;

template <class FORM>
__global__ void __launch_bounds__(THREADS)
score_hamming_kernel(const __grid_constant__ kvl_score_hamming_args a, int64_t tiles) {
  const int lane = threadIdx.x % WARP;
  const int64_t item = (blockIdx.x * (int64_t)THREADS + threadIdx.x) / WARP;
  const int64_t head = item % a.score_heads, at = item / a.score_heads;
  const int64_t seq = at / tiles, b = at % tiles * WARP + lane;
  if (seq >= a.seqs) return;
  const kvl_hash_view &v = a.hashes;
  const int64_t size = a.block_size, first = b * size, left = a.lens[seq] - first;
  int block[1] = {-1}, tokens[1] = {(int)min(left, size)};
  if (b < a.max_blocks && left > 0) block[0] = a.tables[seq * a.max_blocks + b];
  const int heads = a.score_heads == 1 ? v.kv_heads : 1;
  const uint64_t *q = a.q + (seq * v.kv_heads + head) * v.words;
  uint32_t best = HAMMING_NONE;
  for (int h = 0; h < heads; h++, q += v.words) {
    hash_batch<FORM, 1> batch;
    uint32_t d[1];
    batch.load(v, block, tokens, (int)head + h);
    batch.distances(q, d);
    best = min(best, d[0]);
  }
  if (b < a.max_blocks)
    a.scores[(seq * a.score_heads + head) * a.max_blocks + b] =
        best == HAMMING_NONE ? -INFINITY : -(float)best;
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(score_hamming) {
  using namespace kvl;
  const kvl_score_hamming_args &a = *(const kvl_score_hamming_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const int64_t tiles = (a.max_blocks + WARP - 1) / WARP;
  const int64_t warps = a.seqs * a.score_heads * tiles, per_block = THREADS / WARP;
  if (warps == 0) return KVL_OK;
  const unsigned blocks = (unsigned)((warps + per_block - 1) / per_block);
  return with_form(a.hashes, [&](auto form) {
    score_hamming_kernel<decltype(form)><<<blocks, THREADS, 0, q->stream>>>(a, tiles);
    return kvl__cuda_launched();
  });
}
