/* Divides the work of a decode, on the device.
 *
 * Every sequence is cut into tiles of keys. The tiles of all sequences, one sequence after
 * the other, are cut into equal shares. A unit is a group of query rows that share a KV head,
 * as many as the kernel takes at once; a sequence has `units` of them. A task is one share
 * for one unit. A team of warps does a task, and the team's warps take the tiles in turn.
 * Neighbouring teams do the units of the same share: they read the heads of the same blocks
 * at the same time, and these heads are neighbours in memory. Every thread block computes
 * the shares from the lengths alone. So ragged batches are balanced, the host need not know
 * the lengths, and a recorded launch serves later steps.
 *
 * When a sequence lies within one share, the team writes its rows. Otherwise the teams leave
 * partial softmaxes in the workspace. For the sequence that began before the share, a team
 * uses the share's part; for the one that begins in the share and continues after it, the
 * sequence's part (the share's second part, when there are more sequences than shares):
 *   out  f32  [shares + min(seqs, shares), units, rows, head_dim]   normalised
 *   lse  f32  [shares + min(seqs, shares), units, rows]             base 2
 * paged_combine.cuh joins them in the order of shares. */
#ifndef KVL_CUDA_PAGED_SPLIT_CUH
#define KVL_CUDA_PAGED_SPLIT_CUH

#include "args/attention.h"
#include "cuda/block_scan.cuh"
#include "cuda/divide.cuh"
#include "cuda/attention/paged_output.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {

struct split_place {
  float *out, *lse;
  uint8_t *notes;    /* of rows to mend, or NULL: with a hook and 16-bit queries */
  int shares, least; /* at most so many shares, of at least so many tiles each */
  int team_shift;    /* a team has 2^n warps */
  int group, rows;   /* query heads per KV head; rows per unit (some units have fewer) */
  divisor units, subgroups; /* units per sequence; per KV head */
  divisor block;            /* tokens per block */
  int most_keys;            /* the most that a sequence has: its table's room */
  int chunk, chunks;        /* sequences per chunk, which is summed up together */
  int tile_shift;           /* a tile has 2^n keys */
  __host__ __device__ int team() const { return 1 << team_shift; }
  __device__ bool is_few() const { return chunk == 1; }      /* each lane has one sequence */
  __device__ bool by_lane() const { return chunks <= WARP; } /* each lane has a chunk */
  /* starts: the sequence begins in the share */
  __device__ int64_t part(int64_t share, int64_t seq, int64_t seqs, int unit,
                          bool starts) const {
    if (starts) share = shares + (seqs <= shares ? seq : share);
    return share * units.by + unit;
  }
};

/* The rows of a unit of a sequence: neighbouring heads of one token. Row r has head
 * head0 + r. */
__device__ __forceinline__ query_rows unit_rows(const split_place &place, int64_t seq,
                                                int unit) {
  const int kv_head = place.subgroups.quotient(unit);
  const int first = (unit - kv_head * (int)place.subgroups.by) * place.rows;
  return {seq, kv_head * place.group + first, place.group,
          min(place.rows, place.group - first)};
}

/* For up to PLAN_LENGTHS sequences, a thread block stores the lengths, and each lane of a
 * warp has a chunk. More sequences are divided into at most PLAN_CHUNKS chunks of whole
 * warps. */
constexpr int PLAN_LENGTHS = 1024, PLAN_CHUNKS = 256;

/* Where every share lies. Tile numbers are 32-bit: 2^32 tiles would take a minute. A cold
 * start is slow because it is a long sequence of instructions, so the host does every
 * division that it can, and up to 32 sequences need no barrier. */
struct split_plan {
  const kvl_paged_attention_args &a;
  const split_place &place;
  int *kept;                  /* [PLAN_LENGTHS]: the lengths, or the tiles of every chunk */
  uint32_t shares, per, more; /* `more` of the shares have per + 1 tiles, the others per */
  uint32_t own;               /* the tiles of this lane's chunk */
  int early;                  /* the length of this lane's, of up to 32 sequences */

  /* How many tiles come before the first key that is seen. */
  __device__ int first_tile(int length) const {
    return a.selection ? 0 : window_begin(a, length - 1) >> place.tile_shift;
  }
  /* How many tiles follow; at least one, so that every row is written. A selection counts
   * as if it were full. */
  __device__ int tiles(int length) const {
    int keys = min(max(length, 0), place.most_keys);
    if (a.selection && keys > 0)
      keys = (int)min((int64_t)place.block.quotient(keys - 1) + 1, a.max_selected) *
             (int)place.block.by;
    const int end = (keys + (1 << place.tile_shift) - 1) >> place.tile_shift;
    return max(end - first_tile(length), 1);
  }

  /* The length of a sequence; all lanes of a warp call it. (With lengths in shared memory,
   * code by ptxas 13.0 read the next sequence's length in one kernel. So up to 32 lengths
   * are in registers; if there are more, a shuffle hides from ptxas how `seq` was
   * computed.) */
  __device__ __forceinline__ int length_of(int seq) const {
    return place.is_few() ? __shfl_sync(ALL_LANES, early, seq)
                          : many(__shfl_sync(ALL_LANES, seq, 0));
  }
  /* The length of one of more than 32 sequences. */
  __device__ __forceinline__ int many(int seq) const {
    return place.by_lane() ? kept[seq] : a.lens[seq];
  }
  /* The tiles of a chunk of whole warps; all lanes of a warp call it. */
  __device__ uint32_t chunk_tiles(int chunk) const {
    const int end = min((chunk + 1) * place.chunk, (int)a.seqs);
    uint32_t sum = 0;
#pragma unroll 1
    for (int s = chunk * place.chunk + threadIdx.x % WARP; s < end; s += WARP)
      sum += tiles(a.lens[s]);
    return __reduce_add_sync(ALL_LANES, sum);
  }

  /* `shared` has room for PLAN_LENGTHS numbers. */
  __device__ split_plan(const kvl_paged_attention_args &args, const split_place &place_,
                        int *shared)
      : a(args), place(place_), kept(shared) {}
  /* All threads of the block call this. For up to 32 sequences it has no barrier. For up to
   * PLAN_LENGTHS sequences the lengths may change: the plan belongs to the lengths that
   * were read. */
  __device__ void make() {
    const int lane = threadIdx.x % WARP, seqs = (int)a.seqs;
    uint32_t total = 0;
    early = 0;
    if (place.is_few()) {
      early = lane < seqs ? read_early(a.lens + lane) : 0;
      total = lane < seqs ? tiles(early) : 0;
    } else if (place.by_lane()) {
#pragma unroll 1
      for (int s = threadIdx.x; s < seqs; s += blockDim.x) kept[s] = read_early(a.lens + s);
      __syncthreads();
      const int end = min((lane + 1) * place.chunk, seqs);
#pragma unroll 1
      for (int s = lane * place.chunk; s < end; s++) total += tiles(kept[s]);
    } else {
      const int warps = blockDim.x / WARP;
#pragma unroll 1
      for (int c = threadIdx.x / WARP; c < place.chunks; c += warps) {
        const uint32_t sum = chunk_tiles(c);
        if (lane == 0) kept[c] = (int)sum;
      }
      __syncthreads();
#pragma unroll 1
      for (int c = lane; c < place.chunks; c += WARP) total += (uint32_t)kept[c];
    }
    own = total;
    total = __reduce_add_sync(ALL_LANES, total);
    shares = max(min(total / place.least, (uint32_t)place.shares), 1u);
    per = total / shares;
    more = total - per * shares;
  }

  /* Whether a length that this thread kept, of more than 32 and up to PLAN_LENGTHS sequences,
   * has changed. */
  __device__ bool is_old() const {
    bool old = false;
#pragma unroll 1
    for (int s = threadIdx.x; s < (int)a.seqs; s += blockDim.x)
      old |= read_early(a.lens + s) != kept[s];
    return old;
  }

  /* The first tile of a share. Shares differ by at most one tile; if their number is a
   * multiple of the number of sequences, and these are equally long, each sequence begins
   * with a share. */
  __device__ uint32_t begin(uint32_t share) const {
    return share * per + share * more / shares;
  }
  /* The last share that does not begin after a tile. */
  __device__ uint32_t share_of(uint32_t tile) const {
    return (uint32_t)quotient_of(((int64_t)tile + 1) * shares - 1, per * shares + more);
  }

  /* The first i >= at for which `before` plus the values up to i exceeds `tile`; before
   * becomes the sum of the values in front of i. All lanes of the warp call it. */
  template <class F>
  __device__ int first_past(int at, int end, uint32_t tile, uint32_t &before, F value) const {
    const int lane = threadIdx.x % WARP;
    for (;; at += WARP) {
      const uint32_t sum = warp_scan(at + lane < end ? value(at + lane) : 0u);
      const unsigned past = __ballot_sync(ALL_LANES, before + sum > tile);
      const int last = past ? __ffs(past) - 1 : WARP;
      if (last > 0) before += __shfl_sync(ALL_LANES, sum, last - 1);
      if (past || at + WARP >= end) return at + last;
    }
  }
  /* The number of tiles of a chunk. Lane c of a warp may ask for chunks c, 32 + c, ... */
  __device__ uint32_t sum_of(int chunk) const {
    return place.by_lane() ? own : (uint32_t)kept[chunk];
  }
  /* The sequence of a tile; `first` becomes the number of the sequence's first tile. */
  __device__ int find(uint32_t tile, uint32_t &first) const {
    first = 0;
    const int chunk = first_past(0, place.chunks, tile, first,
                                 [&](int c) { return sum_of(c); });
    if (place.is_few()) return chunk;
    return first_past(chunk * place.chunk, min((chunk + 1) * place.chunk, (int)a.seqs), tile,
                      first, [&](int s) { return (uint32_t)tiles(many(s)); });
  }
  /* The first tile of a sequence. */
  __device__ uint32_t first_of(int seq) const {
    const int lane = threadIdx.x % WARP, chunk = seq / place.chunk;
    uint32_t sum = 0;
#pragma unroll 1
    for (int c = lane; c < chunk; c += WARP) sum += sum_of(c);
#pragma unroll 1
    for (int s = chunk * place.chunk + lane; s < seq; s += WARP) sum += tiles(many(s));
    return __reduce_add_sync(ALL_LANES, sum);
  }
};

/* Writes four neighbours of row r of a task, from its sum of values, its maximum and its
 * denominator. With part < 0 the sequence lies within the share, and this is its result;
 * otherwise the partial result is normalised and goes to the workspace. */
__device__ __forceinline__ void write_part(const kvl_paged_attention_args &a,
                                           const split_place &place, int64_t part,
                                           const query_rows &rows, int r, int dim,
                                           float (&x)[4], float m, float sum,
                                           float value_scale) {
  if (part < 0) {
    const int64_t row = rows.token0 * a.heads + rows.head0 + r;
    if (place.notes) { /* see paged_mend.cuh */
      if (dim == 0) place.notes[row] = sum != sum;
      if (!writes_row(a, sum != sum)) return;
    }
    row_end end = end_row(a, row, m, sum);
    end.scale *= value_scale;
    write_row(a, end, row, dim, x);
  } else {
    const int64_t row = part * place.rows + r;
    const float scale = sum == 0.f ? 0.f : value_scale / sum;
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] *= scale;
    store_floats(place.out + row * a.cache.value.dim + dim, x);
    if (dim == 0) place.lse[row] = sum == 0.f ? -INFINITY : m + log2f(sum);
  }
}

}  // namespace kvl

#endif
