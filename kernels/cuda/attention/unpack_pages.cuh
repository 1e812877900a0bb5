/* Copies the pages that a long prefill reads to the workspace, as pages that paged_wgmma.cuh reads
 * fastest: in memory of the device, in q's dtype, and with zeros behind each row up to a size that
 * the kernels have. A prefill of many query rows reads every key many times, so it takes less time
 * to do this once than on the way to every tile.
 *
 *   tables  i32            [seqs, max_blocks], of the workspace: the page that an entry became
 *   pages   f16 or bf16    [seqs * max_blocks] pages, one for each entry of the tables
 * Entries that no token sees become -1, and their pages are not written.
 *
 * Bytes     those of the keys and values, scales included, and those that they become; limit:
 *           memory, or the link */
#ifndef KVL_CUDA_UNPACK_PAGES_CUH
#define KVL_CUDA_UNPACK_PAGES_CUH

#include "args/attention.h"
#include "cuda/divide.cuh"
#include "cuda/elementwise.cuh"
#include "cuda/programmatic.cuh"
#include "cuda/strip.cuh"
#include "cuda/attention/paged.cuh"

namespace kvl {

constexpr int UNPACK_THREADS = 256;

/* What the workspace of such a prefill begins with. */
struct unpacked_place {
  kvl_pages pages;
  int32_t *tables;
  divisor pieces, block; /* of an unpacked row, eight numbers each; tokens of a block */
  size_t bytes;
};

/* The numbers of an unpacked row: a size that paged_wgmma.cuh has. */
inline int unpacked_row(int head_dim) {
  for (int d : {64, 96, 128, 192})
    if (head_dim <= d) return d;
  return 256;
}

inline unpacked_place place_unpacked(const kvl_paged_attention_args &a) {
  const kvl_pages &c = a.cache;
  const int row = unpacked_row(c.key.dim);
  const kvl_format format = {a.dtype, c.kv_heads, c.block_size, row, row};
  unpacked_place p = {};
  p.pages = kvl__pages(&format);
  p.pages.key.dim = p.pages.value.dim = c.key.dim;
  p.pages.memory = a.workspace;
  p.pages.blocks = a.seqs * a.max_blocks;
  p.tables = (int32_t *)((char *)a.workspace + p.pages.blocks * p.pages.bytes_page);
  p.pieces = divisor(row / 8);
  p.block = divisor(c.block_size);
  const size_t bytes = p.pages.blocks * sizeof(int32_t);
  p.bytes = p.pages.blocks * p.pages.bytes_page + (bytes + 15) / 16 * 16;
  return p;
}

/* The keys or the values of block `from`, as those of block `to` of the unpacked pages. C: of the
 * cache. */
template <class T, class C>
__device__ __forceinline__ void unpack_strips(const kvl_pages &cache,
                                              const kvl_strips &strips,
                                              const unpacked_place &place,
                                              const kvl_strips &to_strips, int64_t from,
                                              int64_t to) {
  const int pieces = place.pieces.by, block_size = place.block.by;
  const int all = cache.kv_heads * block_size * pieces;
#pragma unroll 4
  for (int i = threadIdx.x; i < all; i += UNPACK_THREADS) {
    const int row = place.pieces.quotient(i), dim = (i - row * pieces) * 8;
    const int head = place.block.quotient(row), token = row - head * block_size;
    const char *strip = (const char *)cache.memory +
                        kvl__strip_at(&cache, &strips, from, head);
    pack<T, 8> y = {};
    if (dim < strips.dim) {
      const auto x = load_row<C, 8>(strips, strip, token, dim);
#pragma unroll
      for (int e = 0; e < 8; e++) y.at[e] = convert<T>(x.at[e]);
    }
    T *row_to = (T *)((char *)place.pages.memory +
                      kvl__row_at(&place.pages, &to_strips, to, head, token));
    store_pack<8>(row_to + dim, y);
  }
}

/* A thread block takes one entry of the tables. */
template <class T, class C>
__global__ void __launch_bounds__(UNPACK_THREADS)
    unpack_pages(const __grid_constant__ kvl_paged_attention_args a,
                 const __grid_constant__ unpacked_place place) {
  let_next_start();
  wait_for_previous();
  const int entry = blockIdx.x, seq = entry / (int)a.max_blocks;
  const int first = (entry - seq * (int)a.max_blocks) * a.cache.block_size;
  const int length = a.lens[seq], oldest = length - (a.starts[seq + 1] - a.starts[seq]);
  const bool seen = first < length &&
                    first + a.cache.block_size > window_begin(a, max(oldest, 0));
  const int block = seen ? a.tables[entry] : -1;
  const bool there = block >= 0 && block < a.cache.blocks;
  if (threadIdx.x == 0) place.tables[entry] = there ? entry : -1;
  if (!there) return;
  unpack_strips<T, C>(a.cache, a.cache.key, place, place.pages.key, block, entry);
  unpack_strips<T, C>(a.cache, a.cache.value, place, place.pages.value, block, entry);
}

}  // namespace kvl

#endif
