/* Appends to pages of f8_latent (page.h): append_kv, hot_append and rope_append of rows whose
 * value is kept in 8 bits. A warp takes a row, 128 numbers of its value at a time, which
 * share a scale. The result has the same bits as pack_row (cpu/strip.h).
 *
 * Bytes   tokens * kv_heads * (head_dim * element + 656 of 512 + 64 numbers)
 * Limit   memory; the launch for the tokens of a decode step */
#ifndef KVL_CUDA_APPEND_LATENT_CUH
#define KVL_CUDA_APPEND_LATENT_CUH

#include "cuda/attention/append_rows.cuh"
#include "cuda/mma.cuh"

namespace kvl {

/* Calls put(bytes into the row, word) for all words of a row; a warp calls it. rest(d) is
 * number d of the numbers behind the value, as f32. */
template <class From, class Rest, class Put>
__device__ __forceinline__ void pack_latent(const kvl_strips &of, const From *row, Rest rest,
                                            Put put) {
  constexpr int INFINITE = 0x7F800000, GROUP = 4 * WARP;
  const int lane = threadIdx.x % WARP;
#pragma unroll 1
  for (int first = 0; first < of.packed; first += GROUP) {
    const int d = first + 4 * lane;
    const bool inside = d < of.packed;
    pack<From, 4> x = {};
    if (inside) x = load_pack<4>(row + d);
    int most = 0; /* the order of magnitudes is that of their bits; NaN is above infinity */
#pragma unroll
    for (int e = 0; e < 4; e++)
      most = max(most, __float_as_int(to_float(x.at[e])) & 0x7FFFFFFF);
    most = warp_max(most);
    const float scale = most < INFINITE ? __fdiv_rn(__int_as_float(most), 448.f)
                                        : __int_as_float(0x7FC00000);
    const float by = scale >= 0x1p-126f ? __fdiv_rn(1.f, scale) : 0.f;
    pack<f8e4m3, 4> y;
#pragma unroll
    for (int e = 0; e < 4; e++)
      y.at[e] = convert<f8e4m3>(by > 0.f ? __fmul_rn(to_float(x.at[e]), by) : 0.f);
    if (inside) put(d, reinterpret_cast<const uint32_t &>(y));
    if (lane == 0) put(kvl__scale_in_row(&of, first), __float_as_uint(scale));
  }
  for (int d = of.packed + 2 * lane; d < of.dim; d += 2 * WARP)
    put(kvl__rest_in_row(&of, d), pack2(rest(d), rest(d + 1), __nv_bfloat16()));
}

/* A row of memory, or none. */
struct latent_to {
  char *row;
  __device__ latent_to(const kvl_pages &c, int64_t block, int head, int offset)
      : row(row_in<char>(c, c.key, block, head, offset)) {}
  __device__ void put(int at, uint32_t word) const {
    if (row) *(uint32_t *)(row + at) = word;
  }
};

/* Args: as of append_rows_kernel. */
template <class From, class Args>
__global__ void __launch_bounds__(APPEND_THREADS)
    append_latent_kernel(const __grid_constant__ Args a) {
  let_next_start();
  wait_for_previous();
  const int size = a.cache.block_size, heads = a.cache.kv_heads;
  const int64_t rows = a.tokens * heads, step = (int64_t)gridDim.x * (APPEND_THREADS / WARP);
  for (int64_t i = blockIdx.x * (APPEND_THREADS / WARP) + threadIdx.x / WARP; i < rows;
       i += step) {
    const int64_t token = quotient_of(i, heads);
    const int head = (int)(i - token * heads);
    const From *const row = (const From *)a.k + i * a.cache.key.dim;
    const token_place to(a.places[token], size);
    const latent_to cache(a.cache, to.block, head, to.offset);
    auto rest = [&](int d) { return to_float(row[d]); };
    if constexpr (same<Args, kvl_hot_append_args>) {
      const int part = size / (int)a.hot.each; /* tokens of a slot */
      const token_place in(a.places[token], part);
      const bool is_block = in.block >= 0 && in.block < a.hot.blocks;
      const int64_t slot = is_block ? a.hot.slot_of[head * a.hot.blocks + in.block] : -1;
      const token_place at(slot < 0 ? -1 : slot * part + in.offset, size);
      const token_place open(a.buffer.memory ? a.buffer_places[token] : -1, size);
      const latent_to hot(a.hot.memory, at.block, head, at.offset);
      const latent_to buffer(a.buffer, open.block, head, open.offset);
      pack_latent(a.cache.key, row, rest, [&](int at, uint32_t word) {
        hot.put(at, word);
        buffer.put(at, word);
        cache.put(at, word);
      });
    } else {
      pack_latent(a.cache.key, row, rest,
                  [&](int at, uint32_t word) { cache.put(at, word); });
    }
  }
}

template <class Args> int append_latent(const Args &a, const kvl_cuda_queue *q) {
  KVL_CUDA_BY_FLOAT(a.dtype, From, {
    return launch_programmatic(append_latent_kernel<From, Args>,
                               grid(a.tokens * a.cache.kv_heads * WARP, APPEND_THREADS, q),
                               APPEND_THREADS, 0, q, a);
  })
}

}  // namespace kvl

#endif
