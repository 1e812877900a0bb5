/* What the thread blocks of paged_wgmma.cuh work on, in which order, and how the work is
 * divided.
 *
 * A tile of tokens is as many new tokens of a sequence as fill the query rows of all consumers
 * with the heads of one KV head's group. An item is such a tile for one KV head ("lane": a KV
 * head, or a part of a wider group) and the keys that it sees, in tiles of keys. There are two
 * ways to give items to thread blocks:
 *   whole    a thread block takes one item after the other. Long items come first; only as
 *            many KV heads are under way at once as the L2 holds. If these are all KV
 *            heads, the order is reversed in every round, so that every thread block gets
 *            long and short items; otherwise a counter says which thread block takes which
 *            item.
 *   divided  for fewer items, and for those that rounds of whole items leave. The tiles of keys
 *            of all these items, in order, are cut into equal shares, one for each thread
 *            block. An item within one share is finished there. The shares of other items
 *            leave partial softmaxes in the workspace, and wgmma_combine joins them in the
 *            order of shares. Items of few keys stay whole here, too: then partial results
 *            would take longer than SMs without work.
 * All sizes that the host does not know are read on the device, so a recorded launch serves
 * later steps. */
#ifndef KVL_CUDA_WGMMA_PLAN_CUH
#define KVL_CUDA_WGMMA_PLAN_CUH

#include "args/attention.h"
#include "cuda/block_scan.cuh"
#include "cuda/divide.cuh"
#include "cuda/hopper.cuh"
#include "cuda/programmatic.cuh"
#include "cuda/strip.cuh"
#include "cuda/attention/paged_output.cuh"

namespace kvl {

/* Which work a kernel is for.
 * MANY    anything else
 * PLAIN   the same without a bias, at head_dims 96 and 128 over 16-bit KV: the third consumer
 *         leaves a thread too few registers for a bias
 * FEW     divided work of at most 128 query rows an item (over 8 bits 64, and one consumer),
 *         without a bias, which waits for memory. Over 16-bit KV, at most 64 to 128 KiB are
 *         then in flight on an SM: with more, SMs that are near to the memory run ahead,
 *         and the others end later
 * HOOKED  the same with a hook, in decode: a consumer has more registers. The host need not
 *         know, for it has the tiles and the memory of FEW
 * BY_ROW  blocks that TMA cannot copy, by the rows of four more warps. Where there is no
 *         such kernel (over 8 bits, at head_dim 256), and with a hook, two of the producers
 *         do it. Over int8, where only memory of the host needs it, MANY is for boxes
 *         unless there is a hook */
enum wgmma_kind { WGMMA_MANY, WGMMA_PLAIN, WGMMA_FEW, WGMMA_HOOKED, WGMMA_BY_ROW };

/* C: what the cache holds; void: q's dtype. Four more warps turn tiles of 8-bit numbers into
 * what is multiplied: f8e4m3 into f16, int8 with its scales into q's dtype. */
template <int D_, class C_ = void, wgmma_kind KIND = WGMMA_MANY> struct wgmma_shape {
  using C = C_;
  template <class T> using cache = std::conditional_t<same<C, void>, T, C>; /* q is T */
  static constexpr int D = D_;
  static constexpr bool F8 = same<C, f8e4m3>, PACKED = packs<C>, BYTES = F8 || PACKED;
  static constexpr bool FEW = KIND == WGMMA_FEW || KIND == WGMMA_HOOKED;
  static constexpr bool BY_ROW = KIND == WGMMA_BY_ROW;
  static constexpr bool LATENTS = false; /* see latent.cuh */
  static constexpr bool LESS = FEW && !BYTES;
  static constexpr bool FOURTH = BYTES || BY_ROW;     /* a warpgroup more */
  static constexpr bool HAS_FEW = !BYTES || D <= 192; /* else it would be the same */
  static constexpr bool HAS_BY_ROW = !BYTES && D <= 192, BOXES = HAS_BY_ROW || PACKED;
  static_assert(!BY_ROW || HAS_BY_ROW, "no room for the copying warps");
  static constexpr bool HAS_BIAS = !FEW && KIND != WGMMA_PLAIN; /* where calls have one */
  static constexpr bool HAS_PLAIN = KIND == WGMMA_MANY && !BYTES && (D == 96 || D == 128);
  /* With a fourth warpgroup ptxas has 128 registers, too few for a product of 256 columns.
   * While a consumer computes weights, it gives the tensor cores nothing to do: three consumers
   * hide more of that than two, and more rows share the keys that come from the L2. */
  static constexpr int CONSUMERS = BYTES && (FEW || D > 192)                           ? 1
                                   : KIND == WGMMA_PLAIN || D == 64 && !FEW && !FOURTH ? 3
                                                                                       : 2;
  static constexpr int ROWS = 64 * CONSUMERS;
  static constexpr int COPIERS = BY_ROW ? 2 : 1; /* warps that copy K, and as many V */
  static constexpr int KEYS = KIND == WGMMA_PLAIN           ? (D == 96 ? 96 : 80)
                              : D > 192 || (LESS && D > 96) ? 64
                              : D > 128 || D == 96 && LESS  ? 96
                                                            : 128;
  static constexpr int Q_STAGES = FEW || D > 128 ? 1 : 2;
  static constexpr int OUT_WARP_BYTES = 16 * 128; /* of the rows that a warp writes */
  static constexpr int ROOM = (224 << 10) - 4 * CONSUMERS * OUT_WARP_BYTES -
                              Q_STAGES * ROWS * D * 2;
  static constexpr int FIT = ROOM / (4 * KEYS * D), FEWER = D < 128 ? 3 : 2;
  static constexpr int STAGES = LESS && FEWER < FIT ? FEWER : FIT;
  static constexpr int THREADS = WARPGROUP * (CONSUMERS + 1 + FOURTH);
  /* Leaves an SM registers for a thread block of wgmma_combine, which starts early then. */
  static constexpr bool JOIN_BESIDE = KIND == WGMMA_FEW && LESS && D <= 128;
  /* Registers of a thread at the start; then of a consumer's, and of any other. */
  static constexpr int REGISTERS = JOIN_BESIDE || THREADS > 384 ? 128
                                   : THREADS > 256              ? 168
                                                                : 255;
  static constexpr int TAKE = JOIN_BESIDE      ? 168
                              : CONSUMERS == 3 ? 160
                              : CONSUMERS == 1 ? 240
                              : D < 128        ? (FOURTH ? 208 : 216)
                              : FOURTH         ? 216
                                               : 232;
  static constexpr int GIVE = JOIN_BESIDE      ? 40
                              : CONSUMERS == 3 ? 32
                              : CONSUMERS == 1 ? 104
                              : D < 128        ? (FOURTH ? 48 : 72)
                                               : 40;
  /* An atom is eight rows of ATOM numbers, the unit of the swizzle; a row has PARTS atoms. */
  static constexpr int ATOM = D % 64 ? 32 : 64, PARTS = D / ATOM, ATOM_BYTES = 16 * ATOM;
  static constexpr int GROUPS = KEYS / 8; /* of eight keys */
  static constexpr int GROUP_BYTES = PARTS * ATOM_BYTES, TILE_BYTES = GROUPS * GROUP_BYTES;
  /* How many warps convert a tile of 8-bit numbers. Each warp's share of the bytes arrives
   * in the upper half of the memory that it will fill. */
  static constexpr int SHARES = PACKED ? 4 : F8 ? 2 : 1, SHARE_GROUPS = GROUPS / SHARES;
  static constexpr int SHARE_BYTES = TILE_BYTES / SHARES;
  static constexpr int CAME_GROUP_BYTES = BYTES ? GROUP_BYTES / 2 : GROUP_BYTES;
  static constexpr int CAME_ATOM_BYTES = CAME_GROUP_BYTES / PARTS;
  static __device__ __forceinline__ int came(int group) {
    if (!BYTES) return group * GROUP_BYTES;
    const int share = group / SHARE_GROUPS;
    return (2 * share + 1) * (SHARE_BYTES / 2) + group % SHARE_GROUPS * CAME_GROUP_BYTES;
  }
  /* bf16 scales: how many a packed key has, and the bytes of eight keys' and of a tile's. */
  static constexpr int SCALES = PACKED ? (D + PACKED_GROUP - 1) / PACKED_GROUP : 0;
  static constexpr int SCALES_GROUP_BYTES = 16 * SCALES;
  static constexpr int SCALES_BYTES = GROUPS * SCALES_GROUP_BYTES;
  static constexpr int Q_ROWS_BYTES = 64 * D * 2, Q_BYTES = CONSUMERS * Q_ROWS_BYTES;
  /* One KiB is for alignment: dynamic shared memory need not begin at an atom. */
  static constexpr int SHARED_BYTES = Q_STAGES * Q_BYTES + 2 * STAGES * TILE_BYTES +
                                      4 * CONSUMERS * OUT_WARP_BYTES +
                                      2 * STAGES * SCALES_BYTES + 1024;
};

constexpr int NO_KEYS = INT_MAX - 8; /* the index of keys that do not exist */

/* How TMA copies the cache: its rows, or all atoms of them but the last, and the last. */
struct wgmma_maps {
  CUtensorMap rows, last;
};

/* In which shares an item of divided work lies: the first, and how many. */
struct wgmma_cut {
  uint16_t share, count;
};

/* What the host works out. */
struct wgmma_plan {
  int box;    /* how many groups of eight keys one copy brings; 0: a copy brings 16 bytes */
  bool fills; /* a row has D numbers; else its last atom is copied by itself */
  int tokens_tile, lanes;
  int group;                       /* heads of a KV head, in subgroups */
  short_divisor heads, last_heads; /* of a whole subgroup, and of a KV head's last one */
  int consumers;                   /* that have work */
  divisor by_tile, by_block;       /* by tokens_tile and block_size */
  divisor by_subgroups, by_lanes, by_side;
  int entries;    /* tiles of tokens that there may be; some of them have no tokens */
  int divided;    /* the first so many entries; their items are divided, after all others */
  uint8_t *notes; /* of rows to mend */
  /* If items stay whole: the counter from which thread blocks take their next items, 0 at
   * first (NULL: every block's items are fixed); and how many lanes are under way at once. */
  int *counter;
  int section;
  /* Divided work: `side` lanes are processed side by side, each in at most so many shares of at
   * least so many tiles. The partial results have `rows` query rows each: first for the shares
   * in which an item continues, then for those in which it begins. */
  int side, shares, least, rows;
  float *out;      /* [2 * shares, side, rows, value dim] */
  float *lse;      /* [2 * shares, side, rows], in base 2 */
  wgmma_cut *cuts; /* [divided, lanes], of items with tokens */
  __host__ __device__ int groups() const { return lanes / side; }
  __host__ __device__ bool has_whole() const { return divided < entries; } /* items */
  int blocks(int sm_count) const {
    if (divided > 0) return shares * side;
    return (int64_t)entries * lanes < sm_count ? entries * lanes : sm_count;
  }
  /* The index of a partial result; starts: the item begins in the share. */
  __device__ int part(int share, int beside, bool starts) const {
    return (starts ? shares + share : share) * side + beside;
  }
};

/* The tiles of share c of n, which begins at tile total * c / n. (If only the first shares had
 * one tile more, tiles of tokens of one sequence would not read the same keys at the same
 * time.) */
struct share_tiles {
  uint32_t begin, end;
  __device__ __forceinline__ share_tiles(uint32_t total, uint32_t c, uint32_t n) {
    const uint32_t per = total / n, rest = total - per * n; /* 32 bits hold rest * c */
    const uint32_t before = rest * c / n;
    begin = per * c + before;
    end = begin + per + (rest * c - before * n + rest >= n);
  }
};
__device__ __forceinline__ uint32_t share_of(uint32_t total, uint32_t tile, uint32_t n) {
  return (uint32_t)((((uint64_t)tile + 1) * n + total - 1) / total) - 1;
}
__device__ __forceinline__ uint32_t shares_used(const wgmma_plan &plan, uint32_t total) {
  const uint32_t most = plan.least > 1 ? total / plan.least : total;
  return max(min(most, (uint32_t)plan.shares), 1u);
}

/* How many of 0 ... n-1 satisfy `holds`, which is true up to some index and false after it. A
 * warp calls it. */
template <class F> __device__ __forceinline__ int warp_prefix_count(int n, F holds) {
  const int lane = threadIdx.x % WARP;
  int low = 0;
  while (n > 0) {
    const int step = (n + WARP - 1) / WARP, end = min((lane + 1) * step, n);
    const bool whole = lane * step < n && holds(low + end - 1);
    const int full = min(__popc(__ballot_sync(ALL_LANES, whole)) * step, n);
    low += full;
    n = min(step - 1, n - full);
  }
  return low;
}

/* A piece of work: the rows of a tile of tokens for one KV head, and tiles of the keys that
 * they see. tokens 0: there is no more work. */
struct wgmma_work {
  int token0, tokens, index0;
  int kv_head, head0, heads_each, seq, length;
  int first_key; /* of tile 0; no row's window reaches further back */
  int tiles;     /* at least one, even if it has no keys */
  int part;      /* of the partial results; -1: the item is whole */

  wgmma_work() = default;

  /* The tokens of an entry; every thread by itself. If the entry is a sequence's one new token,
   * the length of the sequence may be `known`; -1: it is to be read. */
  __device__ wgmma_work(const kvl_paged_attention_args &a, const wgmma_plan &plan, int entry,
                        int known = -1)
      : tokens(0), part(-1) {
    if (!a.starts) {
      token0 = seq = entry;
      tokens = 1;
      set_length(a, known < 0 ? a.lens[seq] : known, 1);
      return;
    }
    /* The tiles of sequence s have numbers from starts[s] / tokens_tile + s on. */
    int low = 0, high = (int)a.seqs;
    while (low < high) {
      const int middle = (low + high) / 2;
      if ((int)plan.by_tile.quotient(a.starts[middle]) + middle <= entry) low = middle + 1;
      else high = middle;
    }
    seq = low - 1;
    if (seq < 0) return;
    const int start = a.starts[seq], end = a.starts[seq + 1];
    token0 = start + (entry - ((int)plan.by_tile.quotient(start) + seq)) * plan.tokens_tile;
    if (token0 >= end) return;
    tokens = min(plan.tokens_tile, end - token0);
    set_length(a, a.lens[seq], end - token0);
  }
  /* The length of the sequence; token0 is the first of its newest `count` tokens. */
  __device__ void set_length(const kvl_paged_attention_args &a, int all, int count) {
    index0 = all - count;
    length = (int)min((int64_t)all, a.max_blocks * a.cache.block_size);
  }

  __device__ void set_lane(const wgmma_plan &plan, int lane) {
    const int subgroups = plan.by_subgroups.by;
    kv_head = plan.by_subgroups.quotient(lane);
    const int subgroup = lane - kv_head * subgroups;
    head0 = kv_head * plan.group + subgroup * plan.heads;
    heads_each = subgroup + 1 < subgroups ? plan.heads : plan.last_heads;
  }

  /* The tiles of a list, of which some may hold no keys. */
  template <class shape> static __device__ int list_tiles(const kvl_paged_attention_args &a) {
    return max(1, (int)((a.max_selected + shape::KEYS - 1) / shape::KEYS));
  }
  /* Finds the tiles of keys. A selection counts as if it were full; with set_lane and
   * `exact` a warp searches it. */
  template <class shape>
  __device__ void set_tiles(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                            bool exact) {
    if constexpr (shape::LATENTS) {
      if (a.listed) {
        first_key = 0;
        tiles = list_tiles<shape>(a);
        return;
      }
    }
    const int block_size = a.cache.block_size;
    int keys = max(0, min(length, a.causal ? index0 + tokens : INT_MAX));
    int skip = plan.by_block.quotient(window_begin(a, index0));
    if (a.selection) {
      const unsigned seen = plan.by_block.quotient(keys + block_size - 1), before = skip;
      const int32_t *selection = a.selection + (exact ? list(a) : 0);
      auto listed = [&](unsigned limit) {
        return warp_prefix_count((int)a.max_selected,
                                 [=](int i) { return (unsigned)selection[i] < limit; });
      };
      keys = (exact ? listed(seen) : (int)min((int64_t)seen, a.max_selected)) * block_size;
      skip = exact ? listed(before) : 0;
    }
    first_key = skip * block_size;
    tiles = max(1, (keys - first_key + shape::KEYS - 1) / shape::KEYS);
  }

  /* What another lane of the warp has found out about its entry. */
  __device__ wgmma_work of_lane(int from) const {
    wgmma_work w;
    w.token0 = __shfl_sync(ALL_LANES, token0, from);
    w.tokens = __shfl_sync(ALL_LANES, tokens, from);
    w.index0 = __shfl_sync(ALL_LANES, index0, from);
    w.seq = __shfl_sync(ALL_LANES, seq, from);
    w.length = __shfl_sync(ALL_LANES, length, from);
    w.first_key = __shfl_sync(ALL_LANES, first_key, from);
    w.tiles = __shfl_sync(ALL_LANES, tiles, from);
    w.part = -1;
    return w;
  }

  __device__ int64_t list(const kvl_paged_attention_args &a) const {
    return (seq * a.selection_heads + (a.selection_heads > 1 ? kv_head : 0)) * a.max_selected;
  }
  __device__ int64_t slot_list(const kvl_paged_attention_args &a) const {
    return (seq * a.slot_heads + (a.slot_heads > 1 ? kv_head : 0)) * a.max_selected;
  }
  __device__ query_rows rows() const {
    return {token0, head0, heads_each, tokens * heads_each};
  }
  __device__ short_divisor heads(const wgmma_plan &plan) const { /* heads_each */
    return heads_each == plan.heads.by ? plan.heads : plan.last_heads;
  }
};

/* Finds a key by its entry in the table (or in the selection) and its token there: its
 * index, and its block in the cache. If there is no such key, they are NO_KEYS and -1. */
struct wgmma_key {
  int index, physical;
  /* No branch depends on the lane: after such a branch ptxas keeps nothing in uniform
   * registers. */
  __device__ wgmma_key(const kvl_paged_attention_args &a, const wgmma_work &w, int entry,
                       int token)
      : index(NO_KEYS), physical(-1) {
    if (a.max_blocks == 0 || (a.selection && a.max_selected == 0)) return;
    int block = entry;
    bool there = true;
    if (a.selection) {
      there = entry < a.max_selected;
      block = a.selection[w.list(a) + (there ? entry : 0)];
    }
    const int at = block * a.cache.block_size + token;
    there = there & (block >= 0) & (block < a.max_blocks) & (at < w.length);
    const int found = a.slots ? a.slots[w.slot_list(a) + (there ? entry : 0)]
                              : a.tables[w.seq * a.max_blocks + (there ? block : 0)];
    there = there & (found >= 0) & (found < a.cache.blocks);
    index = there ? at : NO_KEYS;
    physical = there ? found : -1;
  }
};

/* Calls give(work) for the whole items of this thread block, in order. A warp calls it. */
template <class shape, class F>
__device__ void each_item(const kvl_paged_attention_args &a, const wgmma_plan &plan, F give) {
  const int entries = plan.entries - plan.divided, items = entries * plan.lanes;
  const int grid = gridDim.x, in_section = entries * plan.section;
  auto give_item = [&](int item) {
    const int first = item / in_section * plan.section, i = item % in_section;
    const int lanes = min(plan.section, plan.lanes - first);
    wgmma_work w(a, plan, plan.entries - 1 - i / lanes);
    if (w.tokens == 0) return;
    w.set_lane(plan, first + i % lanes);
    w.set_tiles<shape>(a, plan, true);
    give(w);
  };
  if (!plan.counter) {
    for (int round = 0; round * grid < items; round++) {
      const int at = round & 1 ? grid - 1 - (int)blockIdx.x : blockIdx.x;
      if (round * grid + at < items) give_item(round * grid + at);
    }
    return;
  }
  for (int item = blockIdx.x; item < items;) {
    give_item(item);
    if (threadIdx.x % WARP == 0) item = grid + atomicAdd(plan.counter, 1);
    item = __shfl_sync(ALL_LANES, item, 0);
  }
}

/* How the thread blocks of divided work take items if all of them stay whole: in rounds,
 * every second one in the opposite order, and the last tokens of a sequence first, which have
 * the most keys. */
struct whole_items {
  int there = 0, items = 0; /* entries with tokens; items */
  int rounds = 0;           /* 0: items are cut */
  whole_items() = default;
  /* Items stay whole if the most tiles that a thread block would then have are no more than a
   * share has, plus what partial results take: about as long as 8 tiles, and 16 tiles for each
   * item that a share has on average. longest, shortest: tiles of an item. */
  __device__ whole_items(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                         int there_, int longest, int shortest, uint32_t total, int shares)
      : there(there_), items(there_ * plan.lanes) {
    const int grid = gridDim.x, per = total / shares;
    const int join = 8 * shares * plan.side + 16 * items;
    if ((longest - per) * grid > join) return;
    const int all = (items + grid - 1) / grid;
    const bool cuts = longest != shortest || (uint32_t)(per * shares) != total ||
                      per % longest;
    if (!cuts && per <= all * longest) return;
    int most = all * longest;
    if (all == 2 && a.seqs == 1) /* then lengths are evenly spread */
      most = max(longest, 2 * longest - 2 * grid * (longest - shortest) / items);
    if ((most - per) * grid <= join) rounds = all;
  }
};

/* Calls give(work) for the pieces of this thread block's share, until it returns false. A warp
 * calls it; its lanes look at 32 entries together. known: see wgmma_work. */
template <class shape, class F>
__device__ __forceinline__ void find_pieces(const kvl_paged_attention_args &a,
                                            const wgmma_plan &plan, int known, F give) {
  const int lane = threadIdx.x % WARP, groups = plan.groups();
  const int share = plan.by_side.quotient(blockIdx.x);
  const int beside = blockIdx.x - share * plan.side;
  wgmma_work w;
  uint32_t mine, upto; /* tiles in all lanes: of this entry; of the entries up to it */
  auto look = [&](int entries) {
    w.tokens = 0;
    if (entries + lane < plan.divided) w = wgmma_work(a, plan, entries + lane, known);
    if (w.tokens > 0) w.set_tiles<shape>(a, plan, false);
    mine = w.tokens > 0 ? w.tiles * groups : 0;
    upto = warp_scan(mine);
  };
  uint32_t total = 0;
  int there = 0, longest = 0, shortest = INT_MAX; /* entries with tokens; tiles of an item */
  for (int e = 0; e < plan.divided; e += WARP) {
    look(e);
    total += __shfl_sync(ALL_LANES, upto, WARP - 1);
    if constexpr (!shape::LATENTS) {
      there += __popc(__ballot_sync(ALL_LANES, w.tokens > 0));
      longest = __reduce_max_sync(ALL_LANES, w.tokens > 0 ? w.tiles : longest);
      shortest = __reduce_min_sync(ALL_LANES, w.tokens > 0 ? w.tiles : shortest);
    }
  }
  const int shares = shares_used(plan, total);
  whole_items whole;
  if (!shape::LATENTS && total > 0)
    whole = whole_items(a, plan, there, longest, shortest, total, shares);
  if (total == 0 || (share >= shares && whole.rounds == 0)) return;
  const share_tiles tiles(total, share, shares);
  uint32_t at = tiles.begin, before = 0;
  const uint32_t end = tiles.end;
  for (int e = 0, entries = 0; whole.rounds > 0 ? e < plan.divided : at < end; e += WARP) {
    if (plan.divided > WARP) look(e);
    const unsigned have = __ballot_sync(ALL_LANES, w.tokens > 0);
    const uint32_t here = before + __shfl_sync(ALL_LANES, upto, WARP - 1);
    for (int round = 0;; round++) {
      wgmma_work piece;
      int from, to_lane;  /* its item: the entry's lane of this warp, and the item's lane */
      bool begins = true; /* the item begins here */
      uint32_t last = 0;  /* tile of the item, if it is cut */
      if (whole.rounds > 0) {
        if (round == whole.rounds) break;
        const int back = round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        const int item = round * (int)gridDim.x + back,
                  nth_back = plan.by_lanes.quotient(item);
        const int nth = whole.there - 1 - nth_back - entries; /* of those in `have` */
        if (item >= whole.items || nth < 0 || nth >= __popc(have)) continue;
        unsigned rest = have;
        for (int i = 0; i < nth; i++) rest &= rest - 1;
        from = __ffs(rest) - 1;
        to_lane = item - nth_back * plan.lanes;
        piece = w.of_lane(from);
      } else {
        if (at >= end || at >= here) break;
        from = __ffs(__ballot_sync(ALL_LANES, before + upto > at)) - 1;
        piece = w.of_lane(from);
        const uint32_t first = before + __shfl_sync(ALL_LANES, upto - mine, from);
        const int group = groups > 1 ? (at - first) / piece.tiles : 0;
        const int begin = (at - first) - group * piece.tiles;
        const int count = min(piece.tiles - begin, (int)(end - at));
        to_lane = group * plan.side + beside;
        if (count < piece.tiles) piece.part = plan.part(share, beside, begin == 0);
        if (count < piece.tiles) last = at - begin + piece.tiles - 1;
        piece.first_key += begin * shape::KEYS;
        piece.tiles = count;
        at += count;
        begins = begin == 0;
      }
      piece.set_lane(plan, to_lane);
      if (!give(piece)) return;
      if (begins && lane == 0)
        plan.cuts[(e + from) * plan.lanes + to_lane] = {
            (uint16_t)share,
            (uint16_t)(last ? share_of(total, last, shares) - share + 1 : 1)};
    }
    before = here;
    entries += __popc(have);
  }
}

/* The block's memory is set up, and the kernels before this one have ended. */
__device__ __forceinline__ void begin_after_others() {
  __syncthreads();
  wait_for_previous();
}

/* each_piece for lists of one token for each sequence: all items have equally many tiles, so the
 * pieces need no search. */
template <class shape, class F>
__device__ void each_listed(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                            F give) {
  const uint32_t tiles = wgmma_work::list_tiles<shape>(a), groups = plan.groups();
  const uint32_t total = plan.divided * groups * tiles, shares = shares_used(plan, total);
  const uint32_t share = plan.by_side.quotient(blockIdx.x);
  const int beside = blockIdx.x - share * plan.side;
  if (share >= shares) return begin_after_others();
  const share_tiles mine(total, share, shares);
  wgmma_work w;
  for (uint32_t at = mine.begin; at < mine.end; at += w.tiles) {
    const uint32_t item = at / tiles, begin = at - item * tiles;
    const int entry = item / groups, lane = (item - entry * groups) * plan.side + beside;
    w.token0 = w.seq = entry, w.tokens = 1;
    w.first_key = begin * shape::KEYS, w.tiles = min(tiles - begin, mine.end - at);
    w.part = w.tiles < (int)tiles ? plan.part(share, beside, begin == 0) : -1;
    w.set_lane(plan, lane);
    if (at == mine.begin) begin_after_others();
    wait_for_previous(); /* a second time it costs nothing; tools/early_writes.lua sees it */
    w.set_length(a, max(a.lens[entry], 0), 1);
    give(w);
    if (begin == 0 && threadIdx.x % WARP == 0) {
      const uint32_t last = w.part < 0 ? share : share_of(total, at + tiles - 1, shares);
      plan.cuts[entry * plan.lanes + lane] = {(uint16_t)share, (uint16_t)(last - share + 1)};
    }
  }
}

/* Calls give(work) for the pieces of this thread block's share. A warp calls it, while the others
 * set up the block's memory and meet it at a barrier; or later, if the block has `begun`. To find
 * the first piece takes long, mostly because its instructions come from memory, so a decode
 * step of up to 32 sequences guesses: it finds the piece before it waits for earlier kernels,
 * and again if lengths have changed since. */
template <class shape, class F>
__device__ void each_piece(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                           bool begun, F give) {
  if constexpr (shape::LATENTS)
    if (a.listed && !a.starts) return each_listed<shape>(a, plan, give);
  const int lane = threadIdx.x % WARP;
  const bool has = lane < a.seqs;
  bool early = !begun && !a.starts && plan.divided <= WARP, found;
  int length = -1; /* of the lane's sequence; -1: not known */
  if (!early && !begun) begin_after_others();
  if (early && has) length = max(read_early(a.lens + lane), 0);
  /* Waits the first time, and says whether the guess was right. */
  auto holds = [&] {
    const int before = length;
    if (early) {
      begin_after_others();
      if (has) length = max(a.lens[lane], 0);
      early = false;
    }
    wait_for_previous(); /* a second time it costs nothing; tools/early_writes.lua sees it */
    return (bool)__all_sync(ALL_LANES, length == before);
  };
  do {
    found = true;
    find_pieces<shape>(a, plan, length, [&](const wgmma_work &w) {
      found = holds();
      if (found) give(w);
      return found;
    });
  } while (!found || !holds());
}

}  // namespace kvl

#endif
