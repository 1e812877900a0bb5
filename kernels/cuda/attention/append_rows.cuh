/* Scatters the rows of K and V of new tokens into the paged cache: the shared part of
 * append_kv, hot_append and rope_append. A thread moves N neighbours of k and the same N of
 * v, so at least two loads are in flight before a store. Neighbouring threads write a row, 16
 * bytes each. */
#ifndef KVL_CUDA_APPEND_ROWS_CUH
#define KVL_CUDA_APPEND_ROWS_CUH

#include "args/offload.h"
#include "cuda/convert.cuh"
#include "cuda/divide.cuh"
#include "cuda/elementwise.cuh"

namespace kvl {

enum { APPEND_THREADS = 256 };

/* The scale of a KV head: an f8e4m3 cache holds k / scale, other caches have no scales. We
 * divide rather than multiply by 1 / scale, so that every device rounds alike. */
template <class To>
__device__ __forceinline__ float head_scale(const float *scales, int head) {
  if constexpr (same<To, f8e4m3>) return scales ? scales[head] : 1.f;
  else return 1.f;
}
template <class To, class From, int N>
__device__ __forceinline__ pack<To, N> convert_pack(const pack<From, N> &x, float scale) {
  if constexpr (same<From, To>) { /* the bits stay as they are */
    return x;
  } else {
    pack<To, N> out;
#pragma unroll
    for (int e = 0; e < N; e++) {
      float value = to_float(x.at[e]);
      out.at[e] = convert<To>(same<To, f8e4m3> ? __fdiv_rn(value, scale) : value);
    }
    return out;
  }
}

/* Where a token goes; block is -1 when it is skipped. */
struct token_place {
  int64_t block;
  int offset;
  __device__ __forceinline__ token_place(int64_t place, int block_size)
      : block(place < 0 ? -1 : quotient_of(place, block_size)),
        offset((int)(place - block * block_size)) {}
};

/* A token's row of K or V in block `block`; NULL when there is no such block: a bad place
 * must not fault. */
template <class To>
__device__ __forceinline__ To *row_in(const kvl_pages &c, const kvl_strips &strips,
                                      int64_t block, int head, int offset) {
  if (block < 0 || block >= c.blocks) return nullptr;
  return (To *)((char *)c.memory + kvl__row_at(&c, &strips, block, head, offset));
}
template <class To, int N>
__device__ __forceinline__ void write_row(const kvl_pages &c, int64_t block, int offset,
                                          int head, int dim, const pack<To, N> &k,
                                          const pack<To, N> &v) {
  To *const to = row_in<To>(c, c.key, block, head, offset);
  if (!to) return;
  store_pack<N>(to + dim, k);
  store_pack<N>(row_in<To>(c, c.value, block, head, offset) + dim, v);
}

/* Args: kvl_append_kv_args, or kvl_hot_append_args, which also writes the hot cache. */
template <int N, class From, class To, class Args>
__global__ void __launch_bounds__(APPEND_THREADS)
    append_rows_kernel(const __grid_constant__ Args a) {
  let_next_start();
  wait_for_previous();
  const int size = a.cache.block_size, pieces = a.cache.key.dim / N;
  const int64_t row = (int64_t)a.cache.kv_heads * pieces, count = a.tokens * row;
  for (int64_t i = blockIdx.x * (int64_t)APPEND_THREADS + threadIdx.x; i < count;
       i += (int64_t)gridDim.x * APPEND_THREADS) {
    int64_t token, in_row;
    divide(i, row, &token, &in_row);
    const int head = (int)in_row / pieces, dim = ((int)in_row - head * pieces) * N;
    const int64_t place = a.places[token];
    const pack<From, N> k_raw = load_pack<N>((const From *)a.k + i * N);
    const pack<From, N> v_raw = load_pack<N>((const From *)a.v + i * N);
    const token_place to(place, size);
    const pack<To, N> k = convert_pack<To>(k_raw, head_scale<To>(a.cache.k_scale, head));
    const pack<To, N> v = convert_pack<To>(v_raw, head_scale<To>(a.cache.v_scale, head));
    if constexpr (same<Args, kvl_hot_append_args>) {
      const bool is_block = to.block >= 0 && to.block < a.hot.blocks;
      const int64_t hot = is_block ? a.hot.slot_of[head * a.hot.blocks + to.block] : -1;
      write_row(a.hot.memory, hot, to.offset, head, dim, k, v);
      if (a.buffer.memory) {
        const token_place open(a.buffer_places[token], size);
        write_row(a.buffer, open.block, open.offset, head, dim, k, v);
      }
    }
    write_row(a.cache, to.block, to.offset, head, dim, k, v);
  }
}

template <class From, class To, class Args>
int start_append(const Args &a, const kvl_cuda_queue *q) {
  constexpr int N = sizeof(To) == 1 ? 16 : 8; /* head_dim is a multiple of this */
  int64_t pieces = a.tokens * a.cache.kv_heads * (a.cache.key.dim / N);
  return launch_programmatic(append_rows_kernel<N, From, To, Args>,
                             grid(pieces, APPEND_THREADS, q), APPEND_THREADS, 0, q, a);
}

template <class Args> int append_rows(const Args &a, const kvl_cuda_queue *q) {
  if (a.tokens == 0 || a.cache.kv_heads == 0) return KVL_OK;
  if (!aligned16(a.k, a.v, a.cache.memory))
    return kvl__cuda_check(cudaErrorMisalignedAddress);
  int status = KVL_OK;
  if (a.cache.codec == KVL_DTYPE_F8E4M3) {
    KVL_CUDA_BY_FLOAT(a.dtype, From, { status = start_append<From, f8e4m3>(a, q); })
  } else {
    KVL_CUDA_BY_FLOAT(a.cache.codec, To, {
      if (a.dtype == a.cache.codec) status = start_append<To, To>(a, q);
      else status = start_append<float, To>(a, q);
    })
  }
  return status;
}

}  // namespace kvl

#endif
