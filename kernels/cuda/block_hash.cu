/* Hashes of the keys of some blocks, of their mean or of each of them.
 *   cache   f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   blocks  i32                  [n]   physical; -1 is skipped
 *   rows    i32                  [n]   of the hashes; NULL: blocks
 *   tokens  i32                  [n]   valid tokens; the mean of none has the hash 0
 *   planes  f32                  [bits, head_dim]
 *   hashes  u64                  [rows, kv_heads, words] or [rows, kv_heads, block_size, words]
 * A warp a hash. Exact: the sums are fixed, see kernels.h.
 * Source  UCM's GSA on-device: hashes of tokens are made where keys are */
#include "hash.cuh"

namespace kvl {
namespace {

constexpr int THREADS = 256;

template <class T>
__global__ void __launch_bounds__(THREADS)
block_hash_kernel(const __grid_constant__ kvl_block_hash_args a, int64_t vectors) {
  const kvl_cache_view &cache = a.cache;
  const int dim = cache.head_dim, words = (a.bits + 63) / 64;
  const int each = a.is_token ? cache.block_size : 1;   /* hashes of an (entry, KV head) */
  const int64_t warps = (int64_t)gridDim.x * (THREADS / WARP);
  for (int64_t v = (blockIdx.x * (int64_t)THREADS + threadIdx.x) / WARP; v < vectors;
       v += warps) {
    const int64_t pair = v / each, i = pair / cache.kv_heads;
    const int head = (int)(pair - i * cache.kv_heads), token = (int)(v - pair * each);
    const int64_t block = a.blocks[i], to = a.rows ? a.rows[i] : block;
    const int count = max(0, min(a.tokens[i], cache.block_size));
    if (block < 0 || block >= cache.blocks || to < 0 || to >= a.summary_rows) continue;
    if (a.is_token && token >= count) continue;
    const T *k = (const T *)cache.kv +
                 ((2 * block * cache.kv_heads + head) * cache.block_size + token) * dim;
    float x[HASH_CHUNKS];
    if (a.is_token || count > 0) hash_load(k, dim, x);
    else for (float &e : x) e = 0.f;
    for (int t = 1; !a.is_token && t < count; t++) {
      float y[HASH_CHUNKS];
      hash_load(k + (int64_t)t * dim, dim, y);
#pragma unroll
      for (int c = 0; c < HASH_CHUNKS; c++) x[c] = __fadd_rn(x[c], y[c]);
    }
    uint64_t *hash = a.hashes + ((to * cache.kv_heads + head) * each + token) * words;
    hash_store(x, a.planes, dim, a.bits, hash);
  }
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(block_hash) {
  using namespace kvl;
  const kvl_block_hash_args &a = *(const kvl_block_hash_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const int64_t vectors = a.n * a.cache.kv_heads * (a.is_token ? a.cache.block_size : 1);
  if (vectors == 0) return KVL_OK;
  const unsigned blocks = grid(vectors, THREADS / WARP, q);
  if (a.cache.dtype == KVL_DTYPE_F8E4M3)
    block_hash_kernel<f8e4m3><<<blocks, THREADS, 0, q->stream>>>(a, vectors);
  else
    KVL_CUDA_BY_FLOAT(a.cache.dtype, T, {
      block_hash_kernel<T><<<blocks, THREADS, 0, q->stream>>>(a, vectors);
    })
  return kvl__cuda_launched();
}
