/* Scatters the rows of K and V of new tokens into vLLM's cache layout.
 *
 *   k, v         like the caches or f32; f32 f16 bf16 for f8e4m3 [tokens, kv_heads, head_dim]
 *   places       i64  [tokens]   block * block_size + offset; < 0 is skipped
 *   key_cache    f32 f16 bf16 f8e4m3  [blocks, kv_heads, head_dim / x, block_size, x]
 *   value_cache  like key_cache       [blocks, kv_heads, head_dim, block_size]
 *   k_scale, v_scale  f32 [1]  of an f8e4m3 cache, which holds k / k_scale; optional
 * x = 16 / sizeof(element): 16 bytes of a key are contiguous, and one thread moves them. The
 * elements of a value are block_size apart: each one is a separate store. Exact, or one
 * rounding.
 *
 * Bytes   tokens * kv_heads * head_dim * 2 * (element of k + element of the caches); every
 *         element of v writes a whole 32-byte sector, unless tokens of a block come close
 *         together
 * Best    16384 tokens, bf16, 8 heads x 128: 326 us (412 GB/s) into consecutive blocks of 16,
 *         580 into scattered places (H100 80GB HBM3, 2026-11-21, L2 flushed, median of 30;
 *         kvlab's own layout takes 46). It waits for the stores of v
 * Source  reshape_and_cache of vllm-project/vllm, csrc/cache_kernels.cu. */
#include "args/attention.h"
#include "cuda/convert.cuh"
#include "cuda/launch.cuh"

namespace kvl {
namespace {

enum { ROW_THREADS = 256 };

/* Divides, as the CPU does, so that both round alike. */
template <class C, class From> __device__ C stored(From x, float scale) {
  if constexpr (same<C, f8e4m3>) return convert<C>(to_float(x) / scale);
  else return convert<C>(x);
}

template <class From, class C>
__global__ void __launch_bounds__(ROW_THREADS)
    vllm_append(const __grid_constant__ kvl_vllm_append_args a) {
  constexpr int X
  = WIDE<C>;
  const kvl_vllm_view &c = a.cache;
  const int size = c.block_size, pieces = c.head_dim / X;
  const int64_t row = (int64_t)c.kv_heads * pieces, count = a.tokens * row;
  const float k_scale = c.k_scale ? *c.k_scale : 1.f;
  const float v_scale = c.v_scale ? *c.v_scale : 1.f;
  for (int64_t i = blockIdx.x * (int64_t)ROW_THREADS + threadIdx.x; i < count;
       i += (int64_t)gridDim.x * ROW_THREADS) {
    const int64_t token = i / row, place = a.places[token], block = place / size;
    if (place < 0 || block >= c.blocks) continue; /* a bad place must not fault */
    const int in_row = (int)(i - token * row), head = in_row / pieces;
    const int piece = in_row - head * pieces, in_block = (int)(place - block * size);
    const int64_t slice = (block * c.kv_heads + head) * size * c.head_dim;
    const pack < From, X
    > k = load_pack < X
    > ((const From *)a.k + i * X);
    const pack < From, X
    > v = load_pack < X
    > ((const From *)a.v + i * X);
    pack < C, X
    > key;
#pragma unroll
    for (int e = 0; e < X; e++) key.at[e] = stored<C>(k.at[e], k_scale);
    store_pack < X
    > ((C *)c.keys + slice + (piece * size + in_block) * X, key);
    C *value = (C *)c.values + slice + piece * X
    *size + in_block;
#pragma unroll
    for (int e = 0; e < X; e++) value[e * size] = stored<C>(v.at[e], v_scale);
  }
}

template <class From, class C>
int launch(const kvl_vllm_append_args &a, const kvl_cuda_queue *q) {
  int64_t pieces = a.tokens * a.cache.kv_heads * (a.cache.head_dim / WIDE<C>);
  vllm_append<From, C><<<grid(pieces, ROW_THREADS, q), ROW_THREADS, 0, q->stream>>>(a);
  return kvl__cuda_launched();
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(vllm_append) {
  using namespace kvl;
  const kvl_vllm_append_args &a = *(const kvl_vllm_append_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.tokens == 0 || a.cache.kv_heads == 0) return KVL_OK;
  if (a.cache.dtype == KVL_DTYPE_F8E4M3) {
    KVL_CUDA_BY_FLOAT(a.dtype, From, return (launch<From, f8e4m3>(a, q));)
  }
  KVL_CUDA_BY_FLOAT(a.cache.dtype, C, {
    return a.dtype == a.cache.dtype ? launch<C, C>(a, q) : launch<float, C>(a, q);
  })
}
