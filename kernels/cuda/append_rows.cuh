/* New tokens' rows of K and V scattered into the paged cache: what append_kv and hot_append
 * share. A thread moves 8 neighbours of k and the same 8 of v, so two loads are in flight
 * before a store, and a row is written by neighbouring threads, 16 bytes each. */
#ifndef KVL_CUDA_APPEND_ROWS_CUH
#define KVL_CUDA_APPEND_ROWS_CUH

#include <type_traits>

#include "common.cuh"

namespace kvl {

enum { APPEND_THREADS = 256 };

/* One dtype: bits stay. */
template <class To, class From>
__device__ __forceinline__ pack<To, 8> convert_pack(const pack<From, 8> &x) {
  if constexpr (std::is_same_v<From, To>) {
    return x;
  } else {
    pack<To, 8> out;
#pragma unroll
    for (int e = 0; e < 8; e++) out.at[e] = from_float<To>(to_float(x.at[e]));
    return out;
  }
}

/* Where a token goes: block -1 for a slot that is skipped. */
struct token_place {
  int64_t block;
  int offset;
  __device__ __forceinline__ token_place(int64_t slot, int block_size)
      : block(slot < 0 ? -1 : slot / block_size),
        offset((int)(slot - block * block_size)) {}
};

/* 8 neighbours of K and of V of a token in block `block`; nothing where there is no such
 * block. */
template <class To>
__device__ __forceinline__ void write_row(const kvl_cache_view &c, int64_t block, int offset,
                                          int head, int dim, const pack<To, 8> &k,
                                          const pack<To, 8> &v) {
  if (block < 0 || block >= c.blocks) return;   /* a broken slot must not fault */
  const int64_t half = (int64_t)c.kv_heads * c.block_size * c.head_dim;
  To *to = (To *)c.kv + 2 * block * half +
           ((int64_t)head * c.block_size + offset) * c.head_dim + dim;
  store_pack<8>(to, k);
  store_pack<8>(to + half, v);
}

/* Args: kvl_append_kv_args, or kvl_hot_append_args to write the hot cache too. */
template <class From, class To, class Args>
__global__ void __launch_bounds__(APPEND_THREADS)
append_rows_kernel(const __grid_constant__ Args a) {
  const int size = a.cache.block_size, pieces = a.cache.head_dim / 8;
  const int64_t row = (int64_t)a.cache.kv_heads * pieces, count = a.tokens * row;
  for (int64_t i = blockIdx.x * (int64_t)APPEND_THREADS + threadIdx.x; i < count;
       i += (int64_t)gridDim.x * APPEND_THREADS) {
    int64_t token = i / row;
    int in_row = (int)(i - token * row), head = in_row / pieces;
    int dim = (in_row - head * pieces) * 8;
    const token_place to(a.slots[token], size);
    pack<To, 8> k = convert_pack<To>(load_pack<8>((const From *)a.k + i * 8));
    pack<To, 8> v = convert_pack<To>(load_pack<8>((const From *)a.v + i * 8));
    if constexpr (std::is_same_v<Args, kvl_hot_append_args>) {
      const bool is_block = to.block >= 0 && to.block < a.hot.blocks;
      const int64_t hot = is_block ? a.hot.slot_of[head * a.hot.blocks + to.block] : -1;
      write_row(a.hot.memory, hot, to.offset, head, dim, k, v);
      if (a.buffer.kv) {
        const token_place open(a.buffer_slots[token], size);
        write_row(a.buffer, open.block, open.offset, head, dim, k, v);
      }
    }
    write_row(a.cache, to.block, to.offset, head, dim, k, v);
  }
}

template <class Args> int append_rows(const Args &a, const kvl_cuda_queue *q) {
  if (a.tokens == 0 || a.cache.kv_heads == 0) return KVL_OK;
  if (!aligned16(a.k, a.v, a.cache.kv)) return kvl__cuda_check(cudaErrorMisalignedAddress);
  int64_t pieces = a.tokens * a.cache.kv_heads * (a.cache.head_dim / 8);
  unsigned blocks = grid(pieces, APPEND_THREADS, q);
  KVL_CUDA_BY_FLOAT(a.cache.dtype, To, {
    if (a.dtype == a.cache.dtype)
      append_rows_kernel<To, To><<<blocks, APPEND_THREADS, 0, q->stream>>>(a);
    else append_rows_kernel<float, To><<<blocks, APPEND_THREADS, 0, q->stream>>>(a);
  })
  return kvl__cuda_launched();
}

}  // namespace kvl

#endif
