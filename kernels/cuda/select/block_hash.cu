/* Hashes of the keys of the given blocks: of each block's mean key, or of every key.
 *   cache   f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   blocks  i32                  [n]   physical; -1 is skipped
 *   rows    i32                  [n]   where the hashes go; NULL: blocks
 *   tokens  i32                  [n]   valid tokens; a mean over 0 tokens has the hash 0
 *   planes  f32                  [bits, head_dim]
 *   hashes  u64                  [rows, kv_heads, words] or [.., block_size, words]
 * Exact: args/select.h fixes the order of the sums; hash.cuh computes them.
 *
 * Bytes   the keys and their hashes; limit: latency of a tile's steps
 * Best    every token of 2048 blocks of 16, 8 heads x 128, bf16, 64 bits: 114 us; means 56
 *         us, of 16 blocks 9.9 (H100 80GB HBM3, 2026-11-21, cold L2)
 * Source  UCM's GSA on-device, which also hashes tokens where the keys are made */
#include "args/select.h"
#include "cuda/divide.cuh"
#include "cuda/select/hash.cuh"

namespace kvl {
namespace {

/* Numbers the vectors as (list entry, KV head), and as (entry, KV head, token) when every
 * token has a hash. */
template <class T, bool IS_TOKEN> struct block_keys {
  using type = T;
  static constexpr bool IS_SUM = !IS_TOKEN;
  kvl_block_hash_args a;
  __device__ hash_item<T> at(int64_t v) const {
    const kvl_pages &cache = a.cache;
    const int each = IS_TOKEN ? cache.block_size : 1;
    const int64_t pair = quotient_of(v, each), i = quotient_of(pair, cache.kv_heads);
    const int head = (int)(pair - i * cache.kv_heads), token = (int)(v - pair * each);
    const int64_t block = a.blocks[i], to = a.rows ? a.rows[i] : block;
    const int count = max(0, min(a.tokens[i], cache.block_size));
    if (block < 0 || block >= cache.blocks || to < 0 || to >= a.summary_rows ||
        (IS_TOKEN && token >= count))
      return {nullptr, 0, nullptr, nullptr};
    const kvl_strips &of = cache.key;
    const char *strip = (const char *)cache.memory + kvl__strip_at(&cache, &of, block, head);
    const int64_t hash = (to * cache.kv_heads + head) * each + token;
    return {(const T *)(strip + (int64_t)token * of.bytes_row), IS_TOKEN ? 1 : count,
            a.hashes + hash * ((a.bits + 63) / 64),
            (const __nv_bfloat16 *)(strip + of.scales) + token * of.groups};
  }
};

template <class T> int hash_keys(const kvl_block_hash_args &a, const kvl_cuda_queue *q) {
  hash_call call = {a.planes, a.n * a.cache.kv_heads, a.cache.key.dim, a.bits};
  if (!a.is_token) return hash_vectors(block_keys<T, false>{a}, call, q);
  call.vectors *= a.cache.block_size;
  return hash_vectors(block_keys<T, true>{a}, call, q);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(block_hash) {
  using namespace kvl;
  const kvl_block_hash_args &a = *(const kvl_block_hash_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  KVL_CUDA_BY_CODEC(a.cache.codec, T, { return hash_keys<T>(a, q); })
}
