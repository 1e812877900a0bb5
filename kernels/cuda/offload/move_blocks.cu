/* dst[to[i]] = src[from[i]] between two memories of one layer; either may be pinned host
 * memory. Moves whole blocks, or K and V of single KV heads.
 *
 *   src, dst  f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   from, to  i32  [seqs, lanes, n]   lanes 1: whole blocks; lanes kv_heads: one head each
 *   moved     i64  [1]                increased by the bytes copied; optional
 *   rows      1, or the tokens of a block. Then tokens move instead of blocks: number block *
 *             rows + offset of either side
 * 16-byte aligned. An entry that is -1 or out of range on either side is skipped. No block
 * may be written twice.
 * Exact.
 *
 * Bytes   those moved, once over the link; and for every piece a 32-byte sector of the lists,
 *         from L2
 * Limit   the link: 55 GB/s of a PCIe 5 x16 need 110 KB in flight at 2 us per read. A warp
 *         copies a piece of up to 4 KiB with eight 16-byte loads per lane before the first
 *         store, so 16 thread blocks have up to 384 KiB in flight and leave the other SMs
 *         alone; their 12K registers fit beside two blocks of paged_decode. Between two
 *         device memories the whole device copies.
 *
 * The lists are long and mostly padding, at the end of each row. Pieces are numbered so that
 * the list index varies slowest (list index, then sequence and lane, then part of the entry)
 * and are dealt to the warps of all blocks in turn, so valid pieces spread evenly whatever
 * their size. Every lane looks at a different piece; a warp checks 256 pieces with one wait.
 * Stores are plain: what is copied to the device is read next, from L2. */
#include "args/offload.h"
#include "cuda/elementwise.cuh"

namespace kvl {
namespace {

constexpr int MOVE_THREADS = 192, WARPS = MOVE_THREADS / WARP, LINK_BLOCKS = 16;
constexpr int EACH = 8, PIECE = EACH * WARP; /* in 16-byte words */
constexpr int AHEAD = 8;                     /* pieces that a lane looks at together */
constexpr int PARTS_MOST = 16;
constexpr int64_t ENTRIES_MOST = INT32_MAX / PARTS_MOST; /* 32 bits number pieces */

/* Lengths in 16-byte words. An entry is one run of `run` words or two that are `half` words
 * apart; each run is cut into `parts_run` parts of `part` words. There are entries * parts
 * pieces; the lists have seqs * lanes rows. */
struct layout {
  int64_t block, half, lane; /* lane: the distance from the run of one lane to that of the
                              * next */
  uint32_t run, part, pieces;
  divisor rows_block;                    /* how many entries a block has: its tokens, or 1 */
  divisor parts_run, parts, lanes, rows; /* skipping padding is mostly these divisions */
};

/* Source, destination and length; words 0 means nothing to copy. */
struct piece {
  const uint4 *from;
  uint4 *to;
  int words;
};

/* The index of piece p's entry in the lists. */
__device__ __forceinline__ int64_t entry_of(const layout &l, int64_t n, uint32_t p) {
  const uint32_t entry = l.parts.quotient(p), i = l.rows.quotient(entry);
  return (entry - i * l.rows.by) * n + i;
}

/* Piece p; its `from` must be in range. */
__device__ __forceinline__ piece find_piece(const kvl_move_blocks_args &a, const layout &l,
                                            uint32_t p) {
  const int64_t place = entry_of(l, a.n, p), from = a.from[place], to = a.to[place];
  if (to < 0 || to >= a.dst.blocks * a.rows) return {nullptr, nullptr, 0};
  const uint32_t entry = l.parts.quotient(p), part = p - entry * l.parts.by;
  const uint32_t lane = entry - l.lanes.quotient(entry) * l.lanes.by; /* lanes divides rows */
  const uint32_t run = l.parts_run.quotient(part);
  const uint32_t in_run = (part - run * l.parts_run.by) * l.part;
  const int64_t at = run * l.half + lane * l.lane + in_run;
  auto entry_at = [&](int64_t i) {
    const int64_t block = l.rows_block.quotient((uint32_t)i);
    return block * l.block + (i - block * l.rows_block.by) * l.run;
  };
  return {(const uint4 *)a.src.memory + entry_at(from) + at,
          (uint4 *)a.dst.memory + entry_at(to) + at, (int)min(l.part, l.run - in_run)};
}

/* Loads past L1 what is read only once. Volatile keeps the loads of a piece together. */
__device__ __forceinline__ uint4 load_once(const uint4 *p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

__device__ __forceinline__ void copy_piece(const piece &p, int lane) {
  const uint4 *from = p.from + lane;
  uint4 *to = p.to + lane;
#pragma unroll 1
  for (int left = p.words - lane; left > 0; left -= PIECE, from += PIECE, to += PIECE) {
    uint4 x[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (e * WARP < left) x[e] = load_once(from + e * WARP);
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (e * WARP < left) to[e * WARP] = x[e];
  }
}

__global__ void __launch_bounds__(MOVE_THREADS)
    move(const __grid_constant__ kvl_move_blocks_args a, const __grid_constant__ layout l) {
  __shared__ piece found[WARPS][WARP];
  __shared__ long long sums[WARP];
  const int lane = threadIdx.x % WARP;
  piece *queue = found[threadIdx.x / WARP];
  /* Neighbouring pieces go to different thread blocks. */
  const uint32_t warp = threadIdx.x / WARP * gridDim.x + blockIdx.x;
  const uint32_t warps = gridDim.x * WARPS;
  const int64_t sources = a.src.blocks * a.rows;
  uint32_t words = 0; /* of this lane's pieces */
  /* The next kernel may not start early: over the link a copy takes long, and blocks that
   * wait would take SMs from kernels of other streams. */
  wait_for_previous();
  for (uint32_t first = warp; first < l.pieces; first += warps * WARP * AHEAD) {
    unsigned valid = 0; /* bit w: this lane's piece of window w has a source */
#pragma unroll
    for (int w = 0; w < AHEAD; w++) {
      uint32_t p = first + (w * WARP + lane) * warps;
      int64_t from = p < l.pieces ? a.from[entry_of(l, a.n, p)] : -1;
      valid |= (unsigned)(from >= 0 && from < sources) << w;
    }
#pragma unroll 1
    for (unsigned any = __reduce_or_sync(ALL_LANES, valid); any; any &= any - 1) {
      const int w = __ffs(any) - 1;
      piece own = {nullptr, nullptr, 0};
      if (valid >> w & 1) own = find_piece(a, l, first + (w * WARP + lane) * warps);
      words += own.words;
      const unsigned has = __ballot_sync(ALL_LANES, own.words > 0);
      if (own.words > 0) queue[__popc(has & ((1u << lane) - 1))] = own;
      __syncwarp();
      for (int k = 0; k < __popc(has); k++) copy_piece(queue[k], lane);
      __syncwarp(); /* the queue is read before it is overwritten */
    }
  }
  if (!a.moved) return;
  const long long total = block_sum((long long)words, sums);
  if (threadIdx.x == 0 && total > 0)
    atomicAdd((unsigned long long *)a.moved, (unsigned long long)total * 16);
}

layout layout_of(const kvl_move_blocks_args &a) {
  const kvl_pages &c = a.src;
  layout l = {};
  const bool whole = a.lanes == 1 && a.rows == 1, has_values = c.value.begin > 0;
  l.half = c.value.begin / 16;
  l.block = c.bytes_page / 16;
  const int64_t run = whole ? l.block : c.key.bytes / 16 / a.rows,
                runs = whole || !has_values ? 1 : 2;
  int64_t most = PARTS_MOST / runs, pieces_run = (run + PIECE - 1) / PIECE;
  l.run = (uint32_t)run;
  l.lane = whole ? 0 : c.key.bytes / 16;
  l.rows_block = divisor((uint32_t)a.rows);
  l.part = (uint32_t)((pieces_run + most - 1) / most * PIECE);
  l.parts_run = divisor((l.run + l.part - 1) / l.part);
  l.parts = divisor(runs * l.parts_run.by);
  l.lanes = divisor(a.lanes);
  l.rows = divisor(a.seqs * a.lanes);
  l.pieces = (uint32_t)(a.seqs * a.lanes * a.n * l.parts.by);
  return l;
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(move_blocks) {
  using namespace kvl;
  const kvl_move_blocks_args &a = *(const kvl_move_blocks_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const int64_t entries = a.seqs * a.lanes * a.n;
  if (entries == 0 || a.src.kv_heads == 0) return KVL_OK;
  if (!aligned16(a.src.memory, a.dst.memory))
    return kvl__cuda_check(cudaErrorMisalignedAddress);
  if (entries > ENTRIES_MOST) return kvl__cuda_check(cudaErrorInvalidValue);
  const layout l = layout_of(a);
  unsigned blocks = grid(l.pieces, WARPS, q, 8);
  if ((a.src.pinned || a.dst.pinned) && blocks > LINK_BLOCKS) blocks = LINK_BLOCKS;
  return launch_programmatic(move, blocks, MOVE_THREADS, 0, q, a, l);
}
