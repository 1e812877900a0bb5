/* The score of every block of every sequence: minus the number of bits in which the block's
 * hash differs from the query's. With token hashes, the nearest valid token counts.
 *
 *   q       u64  [seqs, kv_heads, words]
 *   hashes  u64  [blocks, kv_heads, words] or [blocks, kv_heads, block_size, words]
 *   tables  i32  [seqs, max_blocks]
 *   lens    i32  [seqs]
 *   scores  f32  [seqs, kv_heads or 1, max_blocks]   1: the best of all KV heads; blocks past
 *                                                    the last get -inf
 * With token hashes a warp scores 32 blocks, one KV head at a time; neighbouring warps take
 * the other heads of the same blocks. With block hashes it scores a tile of blocks for all
 * heads that share a 32-byte sector at once. Exact.
 *
 * Bytes   hashes of every block, once; limit: memory
 * Best    16 x 32K tokens, 8 KV heads, 128 bits a token: 29.1 us, 0.76 of the run's read
 *         bandwidth; 8 x 65536 blocks, 8 KV heads, 64 bits a block: 24.2 us, 0.67
 *         (H100 80GB HBM3, 2026-11-21, cold L2)
 * Source  UCM's GSA on-device */
#include "args/select.h"
#include "cuda/select/hamming.cuh"

namespace kvl {
namespace {

constexpr int SCORE_THREADS = 256;

/* BATCH: blocks that a lane has in flight. TILE: blocks of a warp. */
template <class FORM> constexpr int BATCH = FORM::IS_TOKEN ? 1 : 4;
template <class FORM> constexpr int TILE = BATCH<FORM> *WARP / FORM::READERS;

/* heads: how many KV heads a warp takes, FORM::HEADS of them at once. */
template <class FORM>
__global__ void __launch_bounds__(SCORE_THREADS, 4)
    score_hamming_kernel(const __grid_constant__ kvl_score_hamming_args a, int64_t tiles,
                         int heads) {
  constexpr int N = BATCH<FORM>, EACH = FORM::EACH, SIDE = WARP / FORM::READERS;
  const kvl_hash_view &v = a.hashes;
  const int lane = threadIdx.x % WARP, parts = (v.kv_heads + heads - 1) / heads;
  const int reader = lane % FORM::READERS;
  const int64_t item = (blockIdx.x * (int64_t)SCORE_THREADS + threadIdx.x) / WARP;
  const int64_t seq = item / parts / tiles;
  const int64_t b = item / parts % tiles * TILE<FORM> + lane / FORM::READERS;
  const int first = (int)(item % parts) * heads, last = min(first + heads, v.kv_heads);
  if (seq >= a.seqs) return;
  let_next_start();
  wait_for_previous();
  int block[N], tokens[N];
#pragma unroll
  for (int j = 0; j < N; j++)
    block[j] = b + j * SIDE < a.max_blocks ? a.tables[seq * a.max_blocks + b + j * SIDE] : -1;
  const int64_t size = a.block_size, length = a.lens[seq];
#pragma unroll
  for (int j = 0; j < N; j++) {
    const int64_t left = length - (b + j * SIDE) * size;
    tokens[j] = (int)min(left, size);
    if (left <= 0) block[j] = -1;
  }
  const bool is_shared = a.score_heads == 1;
  auto put = [&](int64_t head, int j, uint32_t d) {
    if (b + j * SIDE < a.max_blocks)
      a.scores[(seq * a.score_heads + head) * a.max_blocks + b + j * SIDE] = d == HAMMING_NONE
                                                                                 ? -INFINITY
                                                                                 : -(float)d;
  };
  uint32_t best[N];
#pragma unroll
  for (int j = 0; j < N; j++) best[j] = HAMMING_NONE;
#pragma unroll 1
  for (int head = first; head < last; head += FORM::HEADS) {
    hash_batch<FORM, N> batch;
    uint32_t d[N * EACH];
    batch.load(v, block, tokens, head);
    batch.distances(a.q + (seq * v.kv_heads + head) * v.words, d);
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        best[j] = min(best[j], d[j * EACH + i]);
        if (!is_shared) put(head + reader * EACH + i, j, d[j * EACH + i]);
      }
  }
  if (!is_shared) return;
#pragma unroll
  for (int j = 0; j < N; j++) {
    if (FORM::READERS == 2) best[j] = min(best[j], __shfl_xor_sync(ALL_LANES, best[j], 1));
    if (reader == 0) put(0, j, best[j]);
  }
}

template <class FORM> int launch(const kvl_score_hamming_args &a, const kvl_cuda_queue *q) {
  const int64_t tiles = (a.max_blocks + TILE<FORM> - 1) / TILE<FORM>;
  const int64_t per_block = SCORE_THREADS / WARP, room = 4 * per_block * q->sm_count;
  const int kv_heads = a.hashes.kv_heads;
  /* All warps run at once where possible, so that a table is waited for only once. */
  int heads = a.score_heads == 1 ? kv_heads : FORM::HEADS;
  while (heads < kv_heads && a.seqs * tiles * ((kv_heads + heads - 1) / heads) > room)
    heads *= 2;
  const int64_t warps = a.seqs * tiles * ((kv_heads + heads - 1) / heads);
  const unsigned blocks = (unsigned)((warps + per_block - 1) / per_block);
  return launch_programmatic(score_hamming_kernel<FORM>, blocks, SCORE_THREADS, 0, q, a,
                             tiles, heads);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(score_hamming) {
  using namespace kvl;
  const kvl_score_hamming_args &a = *(const kvl_score_hamming_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.seqs * a.max_blocks * a.score_heads == 0) return KVL_OK;
  return with_heads(a.hashes, [&](auto form) { return launch<decltype(form)>(a, q); });
}
