/* The shared memory of a thread block of latent.cuh, its barriers, and the warps that fill it:
 * one finds the work, and three bring Q and keys. */
#ifndef KVL_CUDA_LATENT_MEMORY_CUH
#define KVL_CUDA_LATENT_MEMORY_CUH

#include "cuda/attention/wgmma_memory.cuh"

namespace kvl {

/* A tile of keys is 64 rows of up to 576 numbers, the first 512 of which are values, too.
 * ROWS_: rows of q, 64; with 16 or 32, the rows belong to one token, and are the columns of
 * products. F8_: pages are f8_latent (latent_convert.cuh). The names are those of
 * wgmma_shape, which has the same plan. D: numbers of a partial result. */
template <int ROWS_, bool F8_ = false> struct latent_shape {
  static constexpr int ROWS = ROWS_, D = 512, KEY_DIMS = 576, KEYS = 64, STAGES = 2;
  static constexpr bool FEW = ROWS < 64, BYTES = false, LATENTS = true, F8 = F8_;
  static constexpr int SHARES = 1, CONSUMERS = 2;
  /* Warps that bring keys. For f8_latent, all warps except the consumers convert. With few
   * rows they are two warpgroups; with many rows, products of 256 columns need more
   * registers than that would leave. */
  static constexpr int COPIERS = !F8 ? 2 : FEW ? 8 : 4;
  static constexpr int FINDER = F8 && FEW ? 15 : WORK_FINDER;
  static constexpr int THREADS = WARPGROUP * (CONSUMERS + (F8 && FEW ? 2 : 1));
  /* Few rows leave an SM registers for a thread block of wgmma_combine, as in wgmma_shape. */
  static constexpr int REGISTERS = FEW ? (F8 ? 104 : 128) : 168;
  static constexpr int TAKE = FEW ? (F8 ? 136 : 168) : (F8 ? 224 : 232);
  static constexpr int GIVE = F8 ? (FEW ? 72 : 56) : 40;
  /* A part is 64 numbers of all keys of a tile, or of all rows of Q: atoms of eight rows. */
  static constexpr int PARTS = KEY_DIMS / 64, PART_BYTES = KEYS * 128;
  static constexpr int TILE_BYTES = PARTS * PART_BYTES;
  static constexpr int Q_PART_BYTES = ROWS * 128, Q_BYTES = PARTS * Q_PART_BYTES;
  static constexpr int WEIGHTS_BYTES = ROWS * KEYS * 2;
  /* With few rows, partial scores, and later sums, are in shared memory, with a column for
   * each row. */
  static constexpr int COLUMN = KEYS + 4, PARTIAL_BYTES = FEW ? ROWS * COLUMN * 4 : 0;
  /* One KiB is for alignment: dynamic shared memory need not begin at an atom. */
  static constexpr int SHARED_BYTES = Q_BYTES + STAGES * TILE_BYTES + WEIGHTS_BYTES +
                                      CONSUMERS * PARTIAL_BYTES + 1024;
};

/* A tile is copied and freed in three pieces, in this order: LAST has the numbers behind
 * the values; pieces 0 and 1 have half of the values' numbers each, one for each consumer.
 * A piece has the parts of eight keys, then those of the next eight. */
constexpr int LATENT_PIECES = 3, LATENT_LAST = 2;
__host__ __device__ constexpr int latent_piece(int i) { return i == 0 ? LATENT_LAST : i - 1; }
__host__ __device__ constexpr int latent_part(int piece) { return piece * 4; } /* its first */
__host__ __device__ constexpr int latent_parts(int piece) {
  return piece == LATENT_LAST ? 1 : 4;
}
/* From one group of eight keys to the next; from a tile's start to a piece. */
__host__ __device__ constexpr int latent_group(int piece) {
  return latent_parts(piece) * 1024;
}
__host__ __device__ constexpr int latent_piece_at(int piece) { return piece * 4 * 64 * 128; }

#if KVL_SM90A

/* The layout: Q [PARTS, ROWS, 64], keys [STAGES, pieces, 8, parts of a piece, 8 keys, 64], and the
 * weights of a tile [ROWS, 64 keys], all in swizzled atoms; then partial scores. */
template <class shape> struct latent_memory {
  static constexpr int STAGES = shape::STAGES, SLOTS = 4, COPIERS = shape::COPIERS;
  static constexpr int CONSUMER_WARPS = 4 * shape::CONSUMERS;
  alignas(16) int indices[STAGES][shape::KEYS]; /* NO_KEYS: there is no such key */
  int2 spans[STAGES][COPIERS];                  /* the least and the greatest of them */
  /* What consumers tell each other of rows. Many: a number each. Few: by how much sums go down,
   * and at last maximum and sum of weights. */
  float told[2][shape::ROWS];
  wgmma_work work[SLOTS];
  static constexpr int PIECES = LATENT_PIECES * STAGES;
  alignas(8) uint64_t barriers[3 * PIECES + 2 + 2 * SLOTS];

  __device__ uint32_t q() const { return tiles(); }
  static __device__ constexpr uint32_t keys_at(int stage) { /* behind Q */
    return shape::Q_BYTES + stage * shape::TILE_BYTES;
  }
  __device__ uint32_t keys(int stage) const { return tiles() + keys_at(stage); }
  __device__ uint32_t weights() const { return keys(STAGES); }
  __device__ float *partial(int consumer) const {
    extern __shared__ char dynamic[];
    const uint32_t at = weights() + shape::WEIGHTS_BYTES + consumer * shape::PARTIAL_BYTES;
    return (float *)(dynamic + (at - shared_address(dynamic)));
  }
  __device__ int2 span(int s) const {
    int2 all = spans[s][0];
#pragma unroll
    for (int i = 1; i < COPIERS; i++) {
      const int2 one = spans[s][i];
      all = {min(all.x, one.x), max(all.y, one.y)};
    }
    return all;
  }
  __device__ uint32_t full(int s, int piece) const {
    return barrier(s * LATENT_PIECES + piece);
  }
  __device__ uint32_t empty(int s, int piece) const { return full(STAGES + s, piece); }
  /* Used instead of `full` while keys past the end are to be cleared. */
  __device__ uint32_t side(int s, int piece) const { return full(2 * STAGES + s, piece); }
  __device__ uint32_t q_full() const { return barrier(3 * PIECES); }
  __device__ uint32_t q_empty() const { return barrier(3 * PIECES + 1); }
  __device__ uint32_t work_full(int s) const { return barrier(3 * PIECES + 2 + s); }
  __device__ uint32_t work_empty(int s) const { return work_full(SLOTS + s); }

  __device__ void init(const wgmma_plan &plan) const {
    const int copiers = plan.box ? 1 : COPIERS;
    for (int s = 0; s < STAGES; s++)
      for (int piece = 0; piece < LATENT_PIECES; piece++) {
        /* Lanes arrive with their copies and, in the last piece, for what they have
         * written; the lanes of a warp that converts arrive together. */
        const int arrivals = plan.box || piece != latent_piece(LATENT_PIECES - 1) ? 1 : 2;
        barrier_init(full(s, piece), shape::F8 ? COPIERS : arrivals * copiers * WARP);
        barrier_init(empty(s, piece), CONSUMER_WARPS / 2); /* those of one consumer */
        barrier_init(side(s, piece), 1);
      }
    barrier_init(q_full(), (shape::F8 ? COPIERS : plan.box ? 2 : 1) * WARP);
    barrier_init(q_empty(), CONSUMER_WARPS);
    for (int i = 0; i < SLOTS; i++) {
      barrier_init(work_full(i), 1);
      /* One of the warps that convert finds the work. */
      const int others = shape::F8 ? COPIERS - 1 : 3;
      barrier_init(work_empty(i), (CONSUMER_WARPS + others) * WARP);
    }
    barrier_init_done();
  }
  /* As of wgmma_memory. */
  __device__ const wgmma_work &wait_work(uint32_t n) const {
    barrier_wait(work_full(n % SLOTS), n / SLOTS & 1);
    return work[n % SLOTS];
  }
  __device__ void work_done(uint32_t n) const { barrier_arrive(work_empty(n % SLOTS)); }
  /* A consumer's warp has read a piece. */
  __device__ __forceinline__ void release(int s, int piece) const {
    barrier_arrive_warp(empty(s, piece), threadIdx.x % WARP);
  }

private:
  __device__ uint32_t barrier(int i) const { return shared_address(barriers) + 8 * i; }
  static __device__ uint32_t tiles() {
    extern __shared__ char dynamic[];
    return (shared_address(dynamic) + 1023) & ~1023u;
  }
};

/* ---- producers ------------------------------------------------------------------------- */

/* Every warp but the finder waits here; then the next kernel may start. */
__device__ __forceinline__ void begin_beside_finder() {
  begin_after_others();
  let_next_start();
}

/* each_work, whose work begins with begin(w). Instructions that run for the first time come from
 * memory, so it is rehearsed while the first work is being found, with keys behind every list
 * and sequence: then begin reads nothing that earlier kernels may still write. (With a tree it
 * would read a length.) */
template <class shape, class B, class F>
__device__ __forceinline__ void each_rehearsed(const kvl_paged_attention_args &a,
                                               const latent_memory<shape> &memory, B begin,
                                               F f) {
  wgmma_work w = {};
  w.first_key = 1 << 30;
  for (uint32_t n = 0;; n++) {
    if (n > 0 || !a.tree) begin(w);
    if (n == 0) begin_beside_finder();
    else f(w);
    w = memory.wait_work(n);
    memory.work_done(n);
    if (w.tokens == 0) return;
  }
}

/* Copies the rows of Q for a piece of work, or one of `shares` equal shares of these rows. */
template <class T, class shape>
__device__ __forceinline__ void copy_queries(const kvl_paged_attention_args &a,
                                             latent_memory<shape> &memory,
                                             const wgmma_work &w, int share, int shares) {
  const int lane = threadIdx.x % WARP, pieces = a.cache.key.dim / 8, step = shares * 4;
  const query_rows rows = w.rows();
  int r = share * 4 + lane / 8, token = r / w.heads_each, head = r - token * w.heads_each;
#pragma unroll 1
  for (; r < shape::ROWS; r += step, head += step) {
    for (; head >= w.heads_each; head -= w.heads_each) token++;
    const bool has = r < rows.count;
    const int64_t row = has ? (w.token0 + token) * a.heads + w.head0 + head : 0;
    const T *const from = (const T *)a.q + row * a.cache.key.dim + lane % 8 * 8;
#pragma unroll
    for (int part = 0; part < shape::PARTS; part++)
      copy_async(memory.q() + part * shape::Q_PART_BYTES + swizzled<8>(r, lane % 8),
                 from + part * 64, has && part * 8 + lane % 8 < pieces);
  }
}

/* One of `shares` warps brings rows of Q. */
template <class T, class shape>
__device__ void bring_queries(const kvl_paged_attention_args &a, latent_memory<shape> &memory,
                              int share, int shares) {
  uint32_t step = 0;
  each_work(memory, [&](const wgmma_work &w) {
    barrier_wait(memory.q_empty(), (step++ & 1) ^ 1);
    copy_queries<T>(a, memory, w, share, shares);
    copy_commit();
    copy_wait<0>();
    fence_async();
    barrier_arrive(memory.q_full());
  });
}

/* The keys of a piece of work, by number: those of its table or selection, or listed
 * tokens. Finding them takes several steps that each wait for memory, so a warp works
 * several tiles ahead. */
struct latent_keys {
  const kvl_paged_attention_args &a;
  const wgmma_plan &plan;
  const int32_t *entries, *slots, *table; /* entries: a list or a selection, or NULL */
  int count;                              /* of entries */
  int begin, end;                         /* the indices that the work sees */
  int seq, length, tree;
  int64_t token;

  __device__ latent_keys(const kvl_paged_attention_args &a_, const wgmma_plan &plan_)
      : a(a_), plan(plan_) {}
  __device__ __forceinline__ void begin_work(const wgmma_work &w) {
    const int64_t row = a.listed ? w.token0 : w.seq, heads = a.selection_heads;
    entries = a.listed ? a.listed : a.selection;
    count = (int)a.max_selected;
    if (entries) entries += (row * heads + (heads > 1 ? w.kv_head : 0)) * count;
    slots = a.slots;
    if (slots) slots += (row * a.slot_heads + (a.slot_heads > 1 ? w.kv_head : 0)) * count;
    table = a.tables + w.seq * a.max_blocks;
    /* A token before all windows is not a key here. A list belongs to one token, so a token
     * that it does not see is not a key either. */
    begin = window_begin(a, w.index0);
    end = a.listed && a.causal ? min(w.index0 + 1, w.length) : w.length;
    seq = w.seq, token = w.token0, length = a.tree ? a.lens[w.seq] : 0;
    tree = a.listed || !a.starts ? tree_begin(a, length) : INT_MAX;
  }
  __device__ __forceinline__ int entry_of(int key) const {
    return a.listed ? key : plan.by_block.quotient(key);
  }
  /* Loads a key's entry, without waiting for it. */
  __device__ __forceinline__ int ask(int key) const {
    const int entry = entry_of(key);
    return !entries ? entry : entry < count ? entries[entry] : -1;
  }
  /* Its index; -1: there is no such key. */
  __device__ __forceinline__ int index_of(int key, int said) const {
    int index = said;
    if (!a.listed) {
      const int block_size = a.cache.block_size;
      if (said < 0 || said >= a.max_blocks) return -1;
      index = said * block_size + (key - entry_of(key) * block_size);
    }
    if (index < begin || index >= end) return -1;
    return index < tree || tree_shows(a, token, length, index) ? index : -1;
  }
  /* Loads the number that says where the key lies, unchecked, without waiting for it: its
   * block or, for a listed token with a slot, block * block_size + offset. */
  __device__ __forceinline__ int said_of(int key, int index) const {
    if (index < 0) return -1;
    return slots ? slots[entry_of(key)] : table[plan.by_block.quotient(index)];
  }
  /* Its block, -1 if that does not exist, and its offset there. */
  __device__ __forceinline__ void locate(int index, int said, int *block, int *token) const {
    const bool is_place = slots && a.listed;
    const int at = max(is_place ? said : index, 0), in = (int)plan.by_block.quotient(at);
    *token = at - in * a.cache.block_size;
    *block = is_place && said >= 0 ? in : said;
    if (index < 0 || *block < 0 || *block >= a.cache.blocks) *block = -1;
  }
};

/* A lane's keys, `step` apart: the index, block and offset of the present key, and what is
 * known of the next two. */
struct latent_look_up {
  latent_keys keys;
  int key, step;
  int index, block, token; /* of this key; index NO_KEYS: there is none */
  int next, next_said;     /* of the next key: its index, and the number that says where it
                            * lies */
  int said;                /* the entry of the key after that */

  __device__ latent_look_up(const kvl_paged_attention_args &a, const wgmma_plan &plan)
      : keys(a, plan) {}
  __device__ __forceinline__ void begin_work(const wgmma_work &w, int first, int step_) {
    keys.begin_work(w);
    key = w.first_key + first - step_, step = step_;
    const int now = keys.ask(key + step), then = keys.ask(key + 2 * step);
    next = keys.index_of(key + step, now);
    next_said = keys.said_of(key + step, next);
    said = then;
    go_on();
    ask();
  }
  /* Waits for the next key. */
  __device__ __forceinline__ void go_on() {
    keys.locate(next, next_said, &block, &token);
    index = block >= 0 ? next : NO_KEYS;
    key += step;
  }
  /* Asks for what follows. */
  __device__ __forceinline__ void ask() {
    next = keys.index_of(key + step, said);
    next_said = keys.said_of(key + step, next);
    said = keys.ask(key + 2 * step);
  }
};

/* The stages of tiles: one after the other; but with many rows, an even tile of a piece of
 * work goes to the first stage. Counts phases of both. */
template <class shape> struct latent_stage {
  int now = 1;
  uint32_t phases = 0; /* bit s: the parity of stage s */
  __device__ __forceinline__ void next(int tile) { now = shape::FEW ? now ^ 1 : tile & 1; }
  __device__ __forceinline__ uint32_t parity() const { return phases >> now & 1; }
  __device__ __forceinline__ void done() { phases ^= 1u << now; }
};

/* Copies 16 bytes of row number `row` as copy_async does; writes zeros if it is negative, and
 * reads nothing. */
__device__ __forceinline__ void copy_row(uint32_t shared, const void *global, int row) {
  asm volatile("{\n.reg .pred none;\nsetp.lt.s32 none, %2, 0;\n"
               "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, none;\n}" ::"r"(shared),
               "l"(global), "r"(row)
               : "memory");
}

/* One of two warps that bring the rows of keys, 32 of each tile. A lane looks up one row,
 * and eight neighbouring lanes copy 128 bytes. Rows that do not exist become 0, and so do
 * the numbers past the end of a row. The two warps issue copies all the time that a tile takes,
 * so every instruction counts: rows are passed on by their number, in 32 bits. */
template <class shape>
__device__ void bring_latents(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                              latent_memory<shape> &memory, int share) {
  const int lane = threadIdx.x % WARP, r = lane / 8, at8 = lane % 8;
  const int pieces = a.cache.key.dim / 8; /* of 16 bytes, of a row */
  const int strips = kvl__strips(&a.cache);
  const uint32_t bytes_row = a.cache.key.bytes_row;
  const char *cache = (const char *)a.cache.memory + at8 * 16;
  asm("" : "+l"(cache)); /* one number for the compiler, which would add both every time */
  latent_stage<shape> stage;
  latent_look_up at(a, plan);
  int row; /* the number of this lane's; -1: there is none */
  /* Copies the rows of a piece to `to`, the first place of this lane. */
  auto copy = [&](int piece, uint32_t to, bool whole) {
#pragma unroll 2
    for (int first = 0; first < WARP; first += 8, to += latent_group(piece))
#pragma unroll
      for (int four = 0; four < 2; four++) {
        const int found = __shfl_sync(ALL_LANES, row, first + four * 4 + r);
        const char *const from = cache + (uint64_t)(uint32_t)found * bytes_row;
#pragma unroll
        for (int j = 0; j < latent_parts(piece); j++) {
          const int part = latent_part(piece) + j;
          copy_row((to ^ four * 64) + four * 512 + j * 1024, from + part * 128,
                   whole || part * 8 + at8 < pieces ? found : -1);
        }
      }
  };
  auto begin = [&](const wgmma_work &w) {
    at.begin_work(w, share * WARP + lane, shape::KEYS);
  };
  each_rehearsed(a, memory, begin, [&](const wgmma_work &w) {
    for (int tile = 0; tile < w.tiles; tile++) {
      const int index = at.index;
      row = at.block < 0 ? -1
                         : (at.block * strips + w.kv_head) * a.cache.block_size + at.token;
      stage.next(tile);
      const int s = stage.now;
#pragma unroll
      for (int i = 0; i < LATENT_PIECES; i++) {
        const int piece = latent_piece(i);
        const uint32_t full = memory.full(s, piece);
        const uint32_t to = memory.keys(s) + latent_piece_at(piece) +
                            share * 4 * latent_group(piece) + swizzled<8>(r, at8);
        barrier_wait(memory.empty(s, piece), stage.parity() ^ 1);
        if (i == LATENT_PIECES - 1) { /* all of the last tile here was read */
          memory.indices[s][share * WARP + lane] = index;
          const int2 span = {__reduce_min_sync(ALL_LANES, index),
                             __reduce_max_sync(ALL_LANES, index)};
          if (lane == 0) memory.spans[s][share] = span;
          barrier_arrive(full);
        }
        if (pieces == shape::KEY_DIMS / 8) copy(piece, to, true);
        else copy(piece, to, false);
        barrier_arrive_copied(full);
      }
      stage.done();
      at.go_on();
      at.ask();
    }
  });
}

/* The same by one warp, in boxes of eight keys and more: lane g looks up eight keys, and the
 * first lane of a box copies it. A box that does not exist lies outside of the map, and becomes
 * zeros; keys past the end of a sequence are cleared. */
template <class shape>
__device__ void bring_boxes(const kvl_paged_attention_args &a, const wgmma_maps &maps,
                            const wgmma_plan &plan, latent_memory<shape> &memory) {
  constexpr int GROUPS = shape::KEYS / 8;
  const int lane = threadIdx.x % WARP, g = lane % GROUPS, strips = kvl__strips(&a.cache);
  const int leader = g - g % plan.box, outside = (int)a.cache.blocks * strips;
  const bool leads = lane < GROUPS && g == leader;
  latent_stage<shape> stage;
  uint32_t sides = 0; /* bit s: the parity of the sides of stage s */
  latent_look_up at(a, plan);
  auto begin = [&](const wgmma_work &w) { at.begin_work(w, g * 8, shape::KEYS); };
  each_rehearsed(a, memory, begin, [&](const wgmma_work &w) {
    for (int tile = 0; tile < w.tiles; tile++) {
      const int index = at.index;
      const bool there = index != NO_KEYS, filled = there && index + 8 <= w.length;
      const int row = there ? at.block * strips + w.kv_head : outside;
      const int from = there ? at.token / 8 : 0;
      const bool copied = __shfl_sync(ALL_LANES, there, leader);
      const uint32_t clear = __ballot_sync(ALL_LANES, lane < GROUPS && copied && !filled);
      const int2 span = {__reduce_min_sync(ALL_LANES, index),
                         __reduce_max_sync(ALL_LANES, filled ? index + 7 : NO_KEYS)};
      stage.next(tile);
      const int s = stage.now;
#pragma unroll
      for (int i = 0; i < LATENT_PIECES; i++) {
        const int piece = latent_piece(i), parts = latent_parts(piece);
        const uint32_t full = memory.full(s, piece);
        const uint32_t arrive = clear ? memory.side(s, piece) : full;
        const uint32_t to = memory.keys(s) + latent_piece_at(piece);
        barrier_wait(memory.empty(s, piece), stage.parity() ^ 1);
        if (i == LATENT_PIECES - 1) { /* all of the last tile here was read */
          if (lane < GROUPS) {
            int *const indices = memory.indices[s] + 8 * lane;
#pragma unroll
            for (int j = 0; j < 8; j++)
              indices[j] = there && index + j < w.length ? index + j : NO_KEYS;
          }
          if (lane < 2) memory.spans[s][lane] = span;
        }
        if (lane == 0) barrier_arrive_expect(arrive, parts * shape::PART_BYTES);
        else barrier_arrive(full);
        __syncwarp();
        if (leads)
          copy_box_from(to + g * latent_group(piece),
                        piece == LATENT_LAST ? &maps.last : &maps.rows, latent_part(piece),
                        from, row, arrive);
        if (!clear) continue;
        barrier_wait(arrive, sides >> s & 1);
        for (uint32_t rest = clear; rest; rest &= rest - 1) {
          const int group = __ffs(rest) - 1, first = __shfl_sync(ALL_LANES, index, group);
          const int keys = first == NO_KEYS ? 0 : w.length - first;
          for (int i8 = keys * 8 + lane; i8 < 64; i8 += WARP)
            for (int part = 0; part < parts; part++)
              store_shared(to + group * latent_group(piece) + part * 1024 + i8 * 16,
                           make_uint4(0, 0, 0, 0));
        }
        fence_async();
        barrier_arrive_warp(full, lane);
      }
      if (clear) sides ^= 1u << s;
      stage.done();
      at.go_on();
      at.ask();
    }
  });
}

#endif

}  // namespace kvl

#endif
