/* Copies the pages that a long prefill reads to the workspace, as pages that paged_wgmma.cuh reads
 * fastest: in memory of the device, in q's dtype, and with zeros behind each row up to a size that
 * the kernels have. A prefill of many query rows reads every key many times, so it takes less time
 * to do this once than on the way to every tile.
 *
 *   pages   f16 or bf16  [seqs * n] pages, one for each of the n entries of a sequence's table or
 *                        selection; if KV heads have selections or slots of their own, the strips
 *                        of a page are of other blocks
 *   places  i32          [seqs, lanes, n]: the page of an entry, or -1 if no token sees it; then
 *                        the page is not written. It takes the place of the tables or, with a
 *                        selection, of the slots. Lanes: KV heads, if they differ, or 1
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
  int32_t *places;
  int lanes, entries;    /* of a sequence */
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
  p.entries = (int)(a.selection ? a.max_selected : a.max_blocks);
  p.lanes = a.selection && (a.selection_heads > 1 || (a.slots && a.slot_heads > 1))
                ? c.kv_heads
                : 1;
  p.pages.blocks = a.seqs * p.entries;
  p.places = (int32_t *)((char *)a.workspace + p.pages.blocks * p.pages.bytes_page);
  p.pieces = divisor(row / 8);
  p.block = divisor(c.block_size);
  const size_t bytes = p.pages.blocks * p.lanes * sizeof(int32_t);
  p.bytes = p.pages.blocks * p.pages.bytes_page + (bytes + 15) / 16 * 16;
  return p;
}

/* The keys or the values of a lane in block `from`, as those of block `to` of the unpacked pages.
 * C: of the cache. */
template <class T, class C>
__device__ __forceinline__ void unpack_strips(const kvl_pages &cache,
                                              const kvl_strips &strips,
                                              const unpacked_place &place,
                                              const kvl_strips &to_strips, int lane,
                                              int64_t from, int64_t to) {
  const int pieces = place.pieces.by, block_size = place.block.by;
  const int heads = cache.kv_heads / place.lanes, all = heads * block_size * pieces;
#pragma unroll 4
  for (int i = threadIdx.x; i < all; i += UNPACK_THREADS) {
    const int row = place.pieces.quotient(i), dim = (i - row * pieces) * 8;
    const int nth = place.block.quotient(row), token = row - nth * block_size;
    const int head = lane * heads + nth;
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

/* A thread block takes an entry and a lane. */
template <class T, class C>
__global__ void __launch_bounds__(UNPACK_THREADS)
    unpack_pages(const __grid_constant__ kvl_paged_attention_args a,
                 const __grid_constant__ unpacked_place place) {
  let_next_start();
  wait_for_previous();
  const int n = place.entries, entry = blockIdx.x, seq = entry / n, i = entry - seq * n;
  const int lane = blockIdx.y, block_size = a.cache.block_size;
  auto in_list = [&](const int32_t *lists, int64_t heads) {
    return lists[(seq * heads + (heads > 1 ? lane : 0)) * n + i];
  };
  const int64_t block = a.selection ? in_list(a.selection, a.selection_heads) : i;
  const int64_t first = block * block_size, length = a.lens[seq];
  const int oldest = max((int)length - (a.starts[seq + 1] - a.starts[seq]), 0);
  const bool seen = block >= 0 && block < a.max_blocks && first < length &&
                    first + block_size > window_begin(a, oldest);
  const int from = !seen     ? -1
                   : a.slots ? in_list(a.slots, a.slot_heads)
                             : a.tables[seq * a.max_blocks + block];
  const bool there = from >= 0 && from < a.cache.blocks;
  if (threadIdx.x == 0) place.places[(seq * place.lanes + lane) * n + i] = there ? entry : -1;
  if (!there) return;
  unpack_strips<T, C>(a.cache, a.cache.key, place, place.pages.key, lane, from, entry);
  unpack_strips<T, C>(a.cache, a.cache.value, place, place.pages.value, lane, from, entry);
}

}  // namespace kvl

#endif
