/* Copies the keys and values of some blocks out of their pages, as the codec gives them,
 * without scales by KV head.
 *   cache   pages of any codec
 *   blocks  i32                  [n]   out of range (-1): zeros
 *   k, v    like cache, f32, f16 or bf16  [n, kv_heads, block_size, head_dim]   optional
 * Alignment: 16 bytes. A thread reads 8 or 16 neighbouring numbers.
 * Bytes   n * kv_heads * block_size * head_dim * (element of cache + element of k), and the
 *         same for v; limit: memory */
#include "args/attention.h"
#include "cuda/divide.cuh"
#include "cuda/elementwise.cuh"
#include "cuda/strip.cuh"

namespace kvl {
namespace {

constexpr int READ_THREADS = 256;

/* Piece i of what goes to `out`. */
template <class From, class To, int N>
__device__ __forceinline__ void read_piece(const kvl_read_blocks_args &a,
                                           const kvl_strips &strips, To *out, int64_t i) {
  const kvl_pages &c = a.cache;
  int64_t row, piece, strip, token, entry, head;
  divide(i, strips.dim / N, &row, &piece);
  divide(row, c.block_size, &strip, &token);
  divide(strip, c.kv_heads, &entry, &head);
  const int64_t block = a.blocks[entry];
  pack<To, N> x = {};
  if (block >= 0 && block < c.blocks) {
    const char *strip = (const char *)c.memory + kvl__strip_at(&c, &strips, block, head);
    const auto raw = load_row<From, N>(strips, strip, token, (int)piece * N);
#pragma unroll
    for (int e = 0; e < N; e++) {
      if constexpr (same<From, To>) x.at[e] = raw.at[e];
      else x.at[e] = convert<To>(to_float(raw.at[e]));
    }
  }
  store_pack<N>(out + i * N, x);
}

template <class From, class To, int N>
__global__ void __launch_bounds__(READ_THREADS)
    read(const __grid_constant__ kvl_read_blocks_args a, int64_t keys, int64_t all) {
  let_next_start();
  wait_for_previous();
  for (int64_t i = blockIdx.x * (int64_t)READ_THREADS + threadIdx.x; i < all;
       i += (int64_t)gridDim.x * READ_THREADS) {
    if (i < keys) read_piece<From, To, N>(a, a.cache.key, (To *)a.k, i);
    else read_piece<From, To, N>(a, a.cache.value, (To *)a.v, i - keys);
  }
}

template <class From, class To>
int start(const kvl_read_blocks_args &a, const kvl_cuda_queue *q) {
  constexpr bool BYTES = sizeof(From) == 1 && !same<From, f8_latent>;
  constexpr int N = BYTES ? 16 : 8; /* head_dim is a multiple of this */
  const int64_t rows = a.n * a.cache.kv_heads * a.cache.block_size;
  const int64_t keys = a.k ? rows * (a.cache.key.dim / N) : 0;
  const int64_t all = keys + (a.v ? rows * (a.cache.value.dim / N) : 0);
  if (all == 0) return KVL_OK;
  return launch_programmatic(read<From, To, N>, grid(all, READ_THREADS, q), READ_THREADS, 0,
                             q, a, keys, all);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(read_blocks) {
  using namespace kvl;
  const kvl_read_blocks_args &a = *(const kvl_read_blocks_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (!aligned16(a.k, a.v, a.cache.memory))
    return kvl__cuda_check(cudaErrorMisalignedAddress);
  if (a.dtype == KVL_DTYPE_F8E4M3) return start<f8e4m3, f8e4m3>(a, q); /* the cache's own */
  if (a.cache.codec == KVL_CODEC_F8_LATENT)
    KVL_CUDA_BY_FLOAT(a.dtype, To, { return (start<f8_latent, To>(a, q)); })
  KVL_CUDA_BY_CODEC(a.cache.codec, From,
                    {KVL_CUDA_BY_FLOAT(a.dtype, To, { return start<From, To>(a, q); })})
}
