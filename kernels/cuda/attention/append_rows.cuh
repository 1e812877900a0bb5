/* Scatters the rows of K and V of new tokens into the paged cache: the shared part of
 * append_kv, hot_append and rope_append. A thread moves N neighbours of k and the same N of
 * v, so at least two loads are in flight before a store. Neighbouring threads write a row,
 * 16 bytes each; where numbers are packed, four threads share a group. */
#ifndef KVL_CUDA_APPEND_ROWS_CUH
#define KVL_CUDA_APPEND_ROWS_CUH

#include "args/offload.h"
#include "cuda/divide.cuh"
#include "cuda/elementwise.cuh"
#include "cuda/strip.cuh"

namespace kvl {

enum { APPEND_THREADS = 256 };

/* The scale of a KV head: an f8e4m3 cache holds k / scale, other caches have no scales. We
 * divide rather than multiply by 1 / scale, so that every device rounds alike. */
template <class To>
__device__ __forceinline__ float head_scale(const float *scales, int head) {
  if constexpr (same<To, f8e4m3>) return scales ? scales[head] : 1.f;
  else return 1.f;
}
/* N numbers as a row stores them; `scale` is used only for packed numbers. */
template <class To, int N> struct kept_pack : pack<To, N> { __nv_bfloat16 scale; };
/* Packs numbers; LANES neighbouring threads share a group, and whole warps call it. The
 * result has the same bits as pack_row (cpu/strip.h). */
template <int LANES, class From, int N>
__device__ __forceinline__ kept_pack<int8, N> pack_numbers(const pack<From, N> &x) {
  constexpr int INFINITE = 0x7F800000; /* NaN is above it */
  kept_pack<int8, N> out;
  int most = 0; /* magnitudes are in the order of their bits */
#pragma unroll
  for (int e = 0; e < N; e++)
    most = max(most, __float_as_int(to_float(x.at[e])) & 0x7FFFFFFF);
  most = warp_max<LANES>(most);
  const bool finite = most < INFINITE;
  out.scale = finite ? __float2bfloat16_rn(__fdiv_rn(__int_as_float(most), 127.f))
                     : __ushort_as_bfloat16(0x7FC0);
  const float unit = __bfloat162float(out.scale);
  const float by = unit >= 0x1p-126f ? __fdiv_rn(1.f, unit) : 0.f;
  const uint32_t keep = finite ? ~0u : 0u;
  uint32_t *const words = reinterpret_cast<uint32_t *>(out.at);
#pragma unroll
  for (int e = 0; e < N; e += 4) {
    uint32_t y[4]; /* the lowest byte of the shifted mantissa is the whole number */
#pragma unroll
    for (int i = 0; i < 4; i++)
      y[i] = __float_as_uint(__fadd_rn(__fmul_rn(to_float(x.at[e + i]), by), 12582912.f));
    const uint32_t low = __byte_perm(y[0], y[1], 0x0040),
                   high = __byte_perm(y[2], y[3], 0x0040);
    words[e / 4] = __byte_perm(low, high, 0x5410) & keep;
  }
  return out;
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

/* The same for numbers of a KV head, packed or not. */
template <class To, class From, int N>
__device__ __forceinline__ auto kept(const pack<From, N> &x, const float *scales, int head) {
  if constexpr (packs<To>) return pack_numbers<PACKED_GROUP / N>(x);
  else return convert_pack<To>(x, head_scale<To>(scales, head));
}
/* How many pieces of N numbers a row has for threads; packed rows are rounded up to whole
 * groups. */
template <class To, int N>
__host__ __device__ __forceinline__ int append_pieces(const kvl_pages &cache) {
  return packs<To> ? cache.key.groups * (PACKED_GROUP / N) : cache.key.dim / N;
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
/* The address of the scale for the numbers of a packed row from `dim` on. */
__device__ __forceinline__ __nv_bfloat16 *scale_in(const kvl_pages &c,
                                                   const kvl_strips &strips, int64_t block,
                                                   int head, int offset, int dim) {
  char *const strip = (char *)c.memory + kvl__strip_at(&c, &strips, block, head);
  return (__nv_bfloat16 *)(strip + strips.scales) + offset * strips.groups +
         dim / PACKED_GROUP;
}
template <class To, int N, class Kept>
__device__ __forceinline__ void write_row(const kvl_pages &c, int64_t block, int offset,
                                          int head, int dim, const Kept &k, const Kept &v) {
  To *const to = row_in<To>(c, c.key, block, head, offset);
  if (!to) return;
  store_pack<N>(to + dim, (const pack<To, N> &)k);
  if (c.value.begin == 0) return; /* values are numbers of keys */
  store_pack<N>(row_in<To>(c, c.value, block, head, offset) + dim, (const pack<To, N> &)v);
  if constexpr (packs<To>) {
    if (dim % PACKED_GROUP) return;
    *scale_in(c, c.key, block, head, offset, dim) = k.scale;
    *scale_in(c, c.value, block, head, offset, dim) = v.scale;
  }
}

/* Args: kvl_append_kv_args, or kvl_hot_append_args, which also writes the hot cache. */
template <int N, class From, class To, class Args>
__global__ void __launch_bounds__(APPEND_THREADS)
    append_rows_kernel(const __grid_constant__ Args a) {
  let_next_start();
  wait_for_previous();
  const int size = a.cache.block_size, head_dim = a.cache.key.dim;
  const int pieces = append_pieces<To, N>(a.cache), lane = threadIdx.x % WARP;
  const int64_t row = (int64_t)a.cache.kv_heads * pieces, count = a.tokens * row;
  /* Where numbers are packed, the lanes of a warp stay together. */
  for (int64_t i = blockIdx.x * (int64_t)APPEND_THREADS + threadIdx.x;
       (packs<To> ? i - lane : i) < count; i += (int64_t)gridDim.x * APPEND_THREADS) {
    int64_t token, in_row;
    divide(i, row, &token, &in_row);
    const int head = (int)in_row / pieces, dim = ((int)in_row - head * pieces) * N;
    const bool inside = !packs<To> || (i < count && dim < head_dim);
    const int64_t place = inside ? a.places[token] : -1;
    const int64_t from = packs<To> ? (token * a.cache.kv_heads + head) * head_dim + dim
                                   : i * N;
    pack<From, N> k_raw = {}, v_raw = {};
    if (inside) {
      k_raw = load_pack<N>((const From *)a.k + from);
      if (a.v) v_raw = load_pack<N>((const From *)a.v + from);
    }
    const token_place to(place, size);
    const auto k = kept<To>(k_raw, a.cache.k_scale, head);
    const auto v = kept<To>(v_raw, a.cache.v_scale, head);
    if (!inside) continue;
    if constexpr (same<Args, kvl_hot_append_args>) {
      const int part = size / (int)a.hot.each; /* tokens of a slot */
      const token_place in(place, part);
      const bool is_block = in.block >= 0 && in.block < a.hot.blocks;
      const int64_t hot = is_block ? a.hot.slot_of[head * a.hot.blocks + in.block] : -1;
      const token_place at(hot < 0 ? -1 : hot * part + in.offset, size);
      write_row<To, N>(a.hot.memory, at.block, at.offset, head, dim, k, v);
      if (a.buffer.memory) {
        const token_place open(a.buffer_places[token], size);
        write_row<To, N>(a.buffer, open.block, open.offset, head, dim, k, v);
      }
    }
    write_row<To, N>(a.cache, to.block, to.offset, head, dim, k, v);
  }
}

template <class From, class To, class Args>
int start_append(const Args &a, const kvl_cuda_queue *q) {
  constexpr int N = sizeof(To) == 1 ? 16 : 8; /* head_dim is a multiple of this */
  int64_t pieces = a.tokens * a.cache.kv_heads * append_pieces<To, N>(a.cache);
  return launch_programmatic(append_rows_kernel<N, From, To, Args>,
                             grid(pieces, APPEND_THREADS, q), APPEND_THREADS, 0, q, a);
}

template <class Args> int append_latent(const Args &a, const kvl_cuda_queue *q);

template <class Args> int append_rows(const Args &a, const kvl_cuda_queue *q) {
  if (a.tokens == 0 || a.cache.kv_heads == 0) return KVL_OK;
  if (!aligned16(a.k, a.v, a.cache.memory))
    return kvl__cuda_check(cudaErrorMisalignedAddress);
  if (a.cache.codec == KVL_CODEC_F8_LATENT) return append_latent(a, q);
  return with_codec<void>(a.cache.codec, [&](auto of) -> int {
    using C = typename decltype(of)::C;
    int status = KVL_OK;
    if constexpr (same<C, void>) {
      KVL_CUDA_BY_FLOAT(a.cache.codec, To, {
        if (a.dtype == a.cache.codec) status = start_append<To, To>(a, q);
        else status = start_append<float, To>(a, q);
      })
    } else {
      KVL_CUDA_BY_FLOAT(a.dtype, From, { status = start_append<From, C>(a, q); })
    }
    return status;
  });
}

}  // namespace kvl

#endif
