/* The first half of a warp's work in paged_decode.cuh: it looks up where the keys of its
 * tiles lie, and copies their K and V into its ring in shared memory. It runs ahead of the
 * half that computes (decode_rows.cuh), from sequence to sequence. */
#ifndef KVL_CUDA_DECODE_COPIES_CUH
#define KVL_CUDA_DECODE_COPIES_CUH

#include <type_traits>

#include "args/attention.h"
#include "cuda/attention/hook.cuh"
#include "cuda/attention/paged_split.cuh"

namespace kvl {

/* Ring sizes: 192 KiB per thread block, one block per SM, or with small tiles 64 KiB; scales
 * come on top, and rows of 64 packed numbers take less. C is the type of the cache's
 * numbers. R is how many rows the kernel takes at once: 16 or, over packed numbers, 8 or
 * 16. Eight rows leave registers for more warps, with fewer stages each; with more warps,
 * less time is lost while a warp waits for its own results. */
template <int D, class C, int R = 16, tile_size TILES = TILES_HERE> struct decode_shape {
  static constexpr int BYTES = sizeof(C), NUMBERS = 16 / BYTES; /* per piece */
  static constexpr int PIECES = packs<C> ? D / NUMBERS : (D / NUMBERS + 7) / 8 * 8;
  static constexpr int KEYS = BYTES == 1 || D <= 64 ? 32 : 16, ROWS = R;
  static constexpr int TILE_BYTES = KEYS * PIECES * 16;
  static constexpr int GROUPS = packs<C> ? D / PACKED_GROUP
                                         : 0; /* scales of a row, at most */
  static constexpr int STAGE_BYTES = 2 * (TILE_BYTES + KEYS * GROUPS * 2);
  static constexpr bool LARGE = 2 * TILE_BYTES > 8192, MANY = R == 8 && !LARGE;
  static constexpr bool SMALL = TILES == SMALL_TILES;
  static constexpr int BLOCKS = 1, STAGES = SMALL || (MANY && D > 64) ? 2 : 3;
  static constexpr int WARPS = SMALL ? (LARGE ? 2 : 4) : LARGE ? 4 : MANY ? 12 : 8;
  static constexpr int TEAM = WARPS < 4 ? WARPS : 4, THREADS = WARPS * WARP;
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
  static constexpr int SHARED_BYTES = RING_BYTES + WARPS * STAGES * KEYS * 4;
  /* 192, or 128 with 12 warps, leaves enough of an SM's registers for paged_combine. */
  static constexpr int REGISTERS = LARGE ? 255 : MANY ? 128 : 192;
  static_assert(STAGE_BYTES >= ROWS * D * 4, "a stage takes the rows' sums");
};

/* The row of a tile in which a key lies. Packed keys 4 i + m are in rows 8 m + i: see
 * decode_packed.cuh. */
template <class C> __device__ __forceinline__ int tile_row(int key) {
  return packs<C> ? key % 4 * 8 + key / 4 : key;
}

/* What a lane looks up: eight keys of a tile, or one if block_size is no multiple of 8. */
struct key_run {
  long long offset; /* of the first, in bytes; of all of them if there is a block */
  int index;        /* of the first */
  unsigned seen;    /* bit i: key i is seen */
  int to_scales;    /* from the first to its scales, of packed keys */
};

template <int D, class C, class H, int R> struct decode_copies {
  using shape = decode_shape<D, C, R>;
  static constexpr int KEYS = shape::KEYS, PIECES = shape::PIECES, NUMBERS = shape::NUMBERS;
  static constexpr int KEYS_LOG = KEYS == 16 ? 4 : 5;
  static constexpr int SIDE = WARP / PIECES; /* rows that are copied side by side */

  const kvl_paged_attention_args &a;
  const split_place &place;
  split_plan plan;
  const int lane, kv_head;
  const uint32_t ring_at;
  int *const indices;  /* [STAGES, KEYS]: of the ring's keys; -1: not seen */
  const bool runs;     /* a lane looks up eight keys */
  const int log_batch; /* looked up at once: 32 runs of keys, which are 2^n tiles */
  const char *const cache;
  const int64_t to_value;
  const int head_dim, row_bytes;
  /* K and V are read once in a step. With a hook there is no hint: see read_once. */
  const std::conditional_t<H::ACTIVE, no_hint, uint64_t> once;

  uint32_t share_begin, share_end, ahead_begin, ahead; /* numbers of tiles */
  int ahead_seq, ahead_length, ahead_tiles;
  key_run now;
  paged_block found; /* this lane's run of the next batch */
  int now_tiles, next_tiles, now_tile;

  __device__ __forceinline__ decode_copies(const kvl_paged_attention_args &args,
                                           const split_place &place_, int *kept, int kv_head_,
                                           uint32_t ring, int *indices_)
      : a(args), place(place_), plan(args, place_, kept), lane(threadIdx.x % WARP),
        kv_head(kv_head_), ring_at(ring), indices(indices_),
        runs(packs<C> || args.cache.block_size % 8 == 0),
        log_batch(runs ? 8 - KEYS_LOG : 5 - KEYS_LOG), cache((const char *)args.cache.memory),
        to_value(kvl__to_value(&args.cache, kv_head_)), head_dim(args.cache.key.dim),
        row_bytes(args.cache.key.bytes_row), once(read_once()) {}

  __device__ __forceinline__ paged_keys keys_ahead() const {
    return paged_keys(a, ahead_seq, kv_head, window_begin(a, ahead_length - 1), ahead_length);
  }

  /* Finds the warp's share, and moves to just before its first tile. Returns the sequence
   * in which the share begins. */
  __device__ __forceinline__ int find_share(uint32_t share, int member, uint32_t &seq_begin) {
    plan.make();
    const bool has_share = share < plan.shares;
    share_begin = has_share ? plan.begin(share) : 0;
    share_end = has_share ? plan.begin(share + 1) : 0;
    ahead_seq = plan.find(share_begin, seq_begin);
    ahead_length = plan.length_of(ahead_seq), ahead_begin = seq_begin;
    ahead_tiles = plan.tiles(ahead_length);
    ahead = share_begin + member;
    now_tile = now_tiles = next_tiles = 0;
    found = {-1, -1, 0};
    return ahead_seq;
  }
  /* Makes the next batch the present one; this waits for its look-up. */
  __device__ __forceinline__ void take_batch() {
    const paged_keys keys = keys_ahead();
    const paged_row row = keys.row_of(found);
    const int64_t scales = packs<C> ? row.scales(a.cache.key) - row.offset : 0;
    now = {(long long)row.offset, row.index, keys.seen(row, runs ? 8 : 1), (int)scales};
    now_tiles = next_tiles;
    now_tile = next_tiles = 0;
  }
  /* Begins the look-up of the next batch. EARLY: the table may still change. */
  template <bool EARLY> __device__ __forceinline__ void look_up() {
    if (ahead >= share_end) return;
    while (ahead >= ahead_begin + ahead_tiles) {
      ahead_begin += ahead_tiles;
      ahead_length = plan.length_of(++ahead_seq);
      ahead_tiles = plan.tiles(ahead_length);
    }
    const uint32_t end = min(share_end, ahead_begin + ahead_tiles);
    const int tile = (int)(ahead - ahead_begin) + plan.first_tile(ahead_length);
    const int nth = lane >> (5 - log_batch), run = lane & ((WARP >> log_batch) - 1);
    const int key = (tile + (nth << place.team_shift)) * KEYS + (runs ? run * 8 : run);
    found = keys_ahead().template look_up<EARLY>(key, place.block.quotient(key));
    while (next_tiles < 1 << log_batch && ahead < end) {
      next_tiles++;
      ahead += place.team();
    }
  }
  /* Has the L2 fetch the first keys of the batch that was taken. */
  __device__ __forceinline__ void ask_ahead() const {
    if (lane >> (5 - log_batch) >= min(now_tiles, 2)) return;
    prefetch_bulk(cache + now.offset, 8 * row_bytes);
    prefetch_bulk(cache + now.offset + to_value, 8 * row_bytes);
    if constexpr (packs<C>) {
      const char *const scales = cache + now.offset + now.to_scales;
      prefetch_bulk(scales, 16 * a.cache.key.groups);
      prefetch_bulk(scales + to_value, 16 * a.cache.key.groups);
    }
  }

  /* Copies the next tile. */
  __device__ __forceinline__ void fetch(int stage) {
    if (now_tile == now_tiles) take_batch();
    const uint32_t to = ring_at + stage * shape::STAGE_BYTES;
    int *const where = indices + stage * KEYS;
    if (now_tiles > 0 && runs) {
      copy_runs(to, where);
      if constexpr (packs<C>) copy_scales(to + 2 * shape::TILE_BYTES);
    } else if (now_tiles > 0) {
      copy_keys(to, where);
    }
    if (now_tiles > 0) now_tile++;
    if (next_tiles == 0) look_up<false>(); /* last: it may wait for a selection */
  }
  /* Copies the scales of a tile's keys, [KEYS, groups], and those of its values behind them.
   * The scales of eight keys are 16 * groups bytes, and every lane copies 16 of them.
   * Scales become zeros only where none of the eight keys is seen. */
  __device__ __forceinline__ void copy_scales(uint32_t to) const {
    constexpr int GROUPS = shape::GROUPS;
    const int groups = GROUPS <= 2 ? GROUPS : a.cache.key.groups;
    const int run = lane / (2 * GROUPS), piece = lane % GROUPS;
    const bool is_value = lane / GROUPS % 2;
    const int source = now_tile * (KEYS / 8) + run;
    const char *from = cache + __shfl_sync(ALL_LANES, now.offset, source) +
                       __shfl_sync(ALL_LANES, now.to_scales, source) + piece * 16;
    const bool seen = __shfl_sync(ALL_LANES, now.seen, source) != 0;
    if (is_value) from += to_value;
    if (run < KEYS / 8 && piece < groups)
      copy_async(to + ((is_value * (KEYS / 8) + run) * groups + piece) * 16, from, seen,
                 once);
  }
  /* Both copy SIDE rows at a time. Rows that are not seen become zeros, so that no NaN gets
   * in. */
  __device__ __forceinline__ void copy_runs(uint32_t to, int *where) const {
    const int piece = lane % PIECES, side = lane / PIECES;
    const int own = now_tile * (KEYS / 8) + lane / 8; /* the run of key number `lane` */
    const int index = __shfl_sync(ALL_LANES, now.index, own);
    const unsigned own_seen = __shfl_sync(ALL_LANES, now.seen, own);
    if (lane < KEYS) where[lane] = own_seen >> lane % 8 & 1 ? index + lane % 8 : -1;
#pragma unroll
    for (int run = 0; run < KEYS / 8; run++) {
      const int source = now_tile * (KEYS / 8) + run;
      const char *k = cache + __shfl_sync(ALL_LANES, now.offset, source) + side * row_bytes +
                      piece * 16;
      unsigned seen = __shfl_sync(ALL_LANES, now.seen, source);
      seen = piece * NUMBERS < head_dim ? seen >> side : 0;
#pragma unroll
      for (int i = 0; i < 8; i += SIDE, k += SIDE * row_bytes) {
        const int row = tile_row<C>(run * 8 + i + side);
        const uint32_t at = to + tile_byte<PIECES>(row, piece);
        copy_async(at, k, seen >> i & 1, once);
        copy_async(at + shape::TILE_BYTES, k + to_value, seen >> i & 1, once);
      }
    }
  }
  __device__ __forceinline__ void copy_keys(uint32_t to, int *where) const {
    const int piece = lane % PIECES, side = lane / PIECES;
#pragma unroll 2
    for (int r = side; r < KEYS; r += SIDE) {
      const int source = now_tile * KEYS + r;
      const char *k = cache + __shfl_sync(ALL_LANES, now.offset, source) + piece * 16;
      const int index = __shfl_sync(ALL_LANES, now.index, source);
      unsigned seen = __shfl_sync(ALL_LANES, now.seen, source);
      if (piece == 0) where[r] = seen ? index : -1;
      if (piece * NUMBERS >= head_dim) seen = 0;
      const uint32_t at = to + tile_byte<PIECES>(r, piece);
      copy_async(at, k, seen, once);
      copy_async(at + shape::TILE_BYTES, k + to_value, seen, once);
    }
  }
};

}  // namespace kvl

#endif
