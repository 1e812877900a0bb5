/* Attention over listed tokens on the tensor cores, for 16-bit q and a cache of q's dtype,
 * f8e4m3 or int8.
 *
 * A thread block takes one token of q, one KV head and up to 64 heads of its group, and walks
 * over its share of the list in tiles of KEYS tokens. K and V of a tile are rows of head_dim
 * numbers anywhere in memory. Neighbouring lanes copy a row, with asynchronous 16-byte
 * copies; two tiles (three for 64 dims of 16 bits) are in flight while one is computed.
 * Up to 16 heads are the rows of one mma, and four warps share a tile's keys. More heads take
 * more of these warps (MW of them along the heads), so that a group reads its tokens once
 * whatever its size. Tiles of 8-bit numbers have twice as many tokens, and so the same
 * number of bytes; they become f16 on their way to the tensor cores (paged.cuh).
 * listed_packed.cuh handles the scales of int8. Groups of up to eight heads over int8 have a
 * kernel of their own, listed_warps.cuh.
 *
 * The work on a tile is a chain that nothing hides: the barrier, copies of another tile,
 * two products and a softmax between them, in few warps. So a separate warp looks up the
 * keys of later tiles at the same time, unless that leaves too few registers. It passes the
 * offset of each key's row to the other warps, which read it before they need it. For 16
 * heads of 128 bf16 a tile takes about 245 instructions in each warp, and 140 in the
 * separate one.
 *
 * A token that the row may not see is copied as zeros. So the heads of a block, which see the
 * same tokens unless a hook hides some, get no NaN from others.
 *
 * The blocks of one KV head follow one another, row by row. Rows of a prompt share many
 * tokens, and K and V of these tokens fit the L2 for one KV head, but not for all heads. */
#ifndef KVL_CUDA_LISTED_MMA_CUH
#define KVL_CUDA_LISTED_MMA_CUH

#include <type_traits>

#include "cuda/attention/listed_packed.cuh"

namespace kvl {

/* C is the type of the cache's numbers. */
template <int D, int MW, class C, tile_size TILES = TILES_HERE> struct listed_shape {
  static constexpr bool IN_BYTES = sizeof(C) == 1;
  /* Scales of a row of packed numbers, at most; long ones have rows of q in shared memory. */
  static constexpr int GROUPS = packs<C> ? D / PACKED_GROUP : 0;
  static constexpr bool LONG = GROUPS > 2;
  static constexpr int WARPS = 4, KW = WARPS / MW; /* warps along the keys */
  static constexpr int PACKED_KEYS = LONG ? (MW == 1 ? 64 : 32) : 32 * KW;
  static constexpr int KEYS = GROUPS > 0 ? PACKED_KEYS : IN_BYTES && (D <= 128) ? 128 : 64;
  /* Whether there is one more warp, which only looks up keys. If so, a quarter of an SM has
   * three warps of two blocks, and a thread has 168 registers. */
  static constexpr bool APART = MW == 1 ? D <= 128 : D <= 64 && !IN_BYTES;
  static constexpr int THREADS = (WARPS + APART) * WARP;
  static constexpr int KEYS_WARP = KEYS / KW, ROWS = 16 * MW;
  static constexpr int NUMBERS = IN_BYTES ? 16 : 8; /* per piece */
  static constexpr int PIECES = (D / NUMBERS + 7) / 8 * 8, TILE_BYTES = KEYS * PIECES * 16;
  static constexpr int STAGES = !IN_BYTES && D <= 64 ? 4 : TILES == SMALL_TILES ? 2 : 3;
  static constexpr int BLOCKS = !IN_BYTES && D > 128 ? 1 : 2;
  static constexpr int WORDS = KEYS / WARP;
  /* How many tiles are looked up ahead, and for how many tiles there is room to store what
   * is known. */
  static constexpr int TOLD = !IN_BYTES && D <= 64 ? 5 : 4, SLOTS = LONG ? 5 : 8;
  /* Rows that are copied side by side, and how many rows of a tile a thread has a piece of. */
  static constexpr int SIDE = WARPS * WARP / PIECES, COPIES = KEYS / SIDE;
  static constexpr int RING_BYTES = STAGES * 2 * TILE_BYTES, SUMS_BYTES = WARPS * 16 * D * 4;
  static constexpr int USED_BYTES = RING_BYTES + (LONG ? ROWS * D * 2 : 0); /* with q */
  static constexpr int SHARED_BYTES = USED_BYTES > SUMS_BYTES ? USED_BYTES : SUMS_BYTES;
  static_assert(TOLD > STAGES && SLOTS > TOLD, "what is copied was looked up before");
  static constexpr bool FITS = TILES == LARGE_TILES || IN_BYTES || D <= 128;
};

/* ---- looking up and copying ------------------------------------------------------------- */

/* What a block knows about the tiles in the ring and some later ones, in a ring of entries. */
template <class shape> struct listed_tiles : listed_scales<shape> {
  static constexpr int SLOTS = shape::SLOTS;
  /* The row_place of key i * SIDE + side is at [side][i], in the order of the copies. */
  alignas(16) uint32_t rows[SLOTS][shape::SIDE][shape::COPIES];
  alignas(16) uint32_t seen[SLOTS][shape::WORDS]; /* bit i: the row sees key i */
  int index[SLOTS][shape::KEYS];
  static __device__ __forceinline__ int slot(int t) { return (unsigned)t % SLOTS; }
};

/* A warp that looks up tiles. A lane takes some keys of each tile, in three steps that each
 * wait for the previous one: their entries, their blocks, and the offsets of their rows,
 * which it passes to the others. Each step has STRIDE tiles of the block to wait for
 * memory. */
template <class shape> struct listed_look_up {
  static constexpr int N = shape::KEYS / WARP;
  static constexpr bool PACKS = shape::GROUPS > 0;
  static constexpr int TURNS = shape::APART ? 2 : 1, STRIDE = shape::APART ? 2 : shape::WARPS;
  const listed_keys<> &keys;
  listed_tiles<shape> &tiles;
  const int end;                       /* the tile after the last */
  const bool indices;                  /* are wanted */
  int token[TURNS][N], said[TURNS][N]; /* of the next tile in each of the two turns */
  int entry[TURNS][N];                 /* of the tile after the next */

  __device__ __forceinline__ listed_look_up(const listed_keys<> &keys_,
                                            listed_tiles<shape> &tiles_, int end_,
                                            bool indices_)
      : keys(keys_), tiles(tiles_), end(end_), indices(indices_) {}

  static __device__ __forceinline__ int key_of(int n) {
    return n * WARP + threadIdx.x % WARP;
  }

  /* Loads the entries of tile `t`, unless `t` is `end` or later. */
  static __device__ __forceinline__ void ask(const int32_t *list, int64_t keys, int end,
                                             int t, int (&entry)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int key = t * shape::KEYS + key_of(n);
      entry[n] = t < end && key < keys ? list[key] : -1;
    }
  }
  __device__ __forceinline__ void ask(int t, int (&entry_)[N]) const {
    ask(keys.list, keys.keys, end, t, entry_);
  }
  /* Waits for the entries of tile `t`, and loads their blocks. */
  __device__ __forceinline__ void look_up(int t, const int (&of)[N], int turn) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      token[turn][n] = keys.token_of(of[n]);
      said[turn][n] = keys.said_of(t * shape::KEYS + key_of(n), token[turn][n]);
    }
  }
  /* Waits for the blocks of tile `t`. */
  __device__ __forceinline__ void tell(int t, int turn) const {
    const int slot = tiles.slot(t);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int key = key_of(n), index = token[turn][n];
      int physical, offset;
      keys.locate(index, said[turn][n], &physical, &offset);
      const bool is = physical >= 0;
      const unsigned seen = __ballot_sync(ALL_LANES, is);
      tiles.rows[slot][key % shape::SIDE][key / shape::SIDE] = keys.template row_place<PACKS>(
          physical, offset);
      if constexpr (PACKS) tiles.copy_scales(keys, slot, key, physical, offset);
      if (indices) tiles.index[slot][key] = is ? index : -1;
      if (threadIdx.x % WARP == 0) tiles.seen[slot][n] = seen;
    }
  }
  /* Begins to look up this warp's tiles from `t` on. */
  __device__ __forceinline__ void begin(int t) {
    int first[TURNS][N];
#pragma unroll
    for (int i = 0; i < TURNS; i++) ask(t + i, first[i]);
#pragma unroll
    for (int i = 0; i < TURNS; i++) ask(t + STRIDE + i, entry[i]);
#pragma unroll
    for (int i = 0; i < TURNS; i++) look_up(t + i, first[i], i);
  }
  /* Passes on what is known about tile `t`, and takes the next steps for later tiles. */
  __device__ __forceinline__ void next(int t, int turn) {
    tell(t, turn);
    look_up(t + STRIDE, entry[turn], turn);
    ask(t + 2 * STRIDE, entry[turn]);
  }
};

/* A thread's part of the copies: a piece of every SIDE-th row. */
template <class shape> struct listed_copies {
  static constexpr int PIECES = shape::PIECES, SIDE = shape::SIDE, COPIES = shape::COPIES;
  static constexpr bool PACKS = shape::GROUPS > 0;
  const listed_tiles<shape> &tiles;
  const char *key, *value; /* this thread's piece of the cache's first rows */
  const uint32_t unit, to; /* of bytes, see row_place; in stage 0 */
  const int side;
  const bool inside;
  uint32_t rows[COPIES], seen[shape::WORDS]; /* of the next tile to copy */
  /* Whether this information is read while another tile is attended to, which takes more
   * registers. */
  static constexpr bool EARLY = shape::APART && shape::NUMBERS == 8;

  __device__ __forceinline__ listed_copies(const listed_keys<> &keys,
                                           const listed_tiles<shape> &tiles_, uint32_t ring)
      : tiles(tiles_), key((const char *)keys.a.cache.memory + keys.a.cache.key.begin +
                           threadIdx.x % PIECES * 16),
        value(key + keys.to_value()), unit(keys.row_unit<PACKS>()),
        to(ring + tile_byte<PIECES>(threadIdx.x / PIECES, threadIdx.x % PIECES)),
        side(threadIdx.x / PIECES),
        inside((int)(threadIdx.x % PIECES) * shape::NUMBERS < keys.a.cache.key.dim) {
    opaque(key);
    opaque(value);
  }

  /* Reads what was passed on about a tile before the last barrier. */
  __device__ __forceinline__ void read(int t) {
    const int slot = tiles.slot(t);
    const pack<uint32_t, COPIES> x = load_pack<COPIES>(tiles.rows[slot][side]);
    const pack<uint32_t, shape::WORDS> y = load_pack<shape::WORDS>(tiles.seen[slot]);
#pragma unroll
    for (int i = 0; i < COPIES; i++) rows[i] = x.at[i];
#pragma unroll
    for (int h = 0; h < shape::WORDS; h++) seen[h] = y.at[h];
  }
  /* A row of packed numbers may begin at any multiple of 16 bytes. If the L2 fetched the 128
   * or 256 bytes around it, half of them would belong to other rows; so it does not. */
  static __device__ __forceinline__ void copy(uint32_t to, const char *from, bool valid) {
    if constexpr (PACKS) copy_async_alone(to, from, valid);
    else copy_async(to, from, valid);
  }
  /* Copies that tile into a stage. */
  __device__ __forceinline__ void fetch(int stage) {
    uint32_t any = 0, own[shape::WORDS];
#pragma unroll
    for (int h = 0; h < shape::WORDS; h++) {
      any |= seen[h];
      own[h] = inside ? seen[h] >> side : 0;
    }
    if (any == 0) return;
    static_assert(WARP % SIDE == 0, "a copy's rows are of one word of seen");
    static_assert(SIDE % 4 == 0, "rows side by side have the same mix, or differ by 4 in it");
    const uint32_t at = to + stage * 2 * shape::TILE_BYTES;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      const bool valid = own[i * SIDE / WARP] >> (i * SIDE % WARP) & 1;
      const uint64_t from = (uint64_t)rows[i] * unit;
      const uint32_t k_at = (SIDE % 8 == 0 ? at : at ^ i % 2 * 64) + i * SIDE * PIECES * 16;
      copy(k_at, key + from, valid); /* else zeros: no NaN gets in, nothing is read */
      copy(k_at + shape::TILE_BYTES, value + from, valid);
    }
  }
};

/* ---- computing -------------------------------------------------------------------------- */

/* A warp's 16 rows of q, and their partial softmax over its keys. C is the type of the cache's
 * numbers: T, f8e4m3 or int8. */
template <class T, class C, int D, int MW> struct listed_warp {
  using shape = listed_shape<D, MW, C>;
  static constexpr bool IN_BYTES = shape::IN_BYTES, PACKS = packs<C>;
  using M = std::conditional_t<IN_BYTES, __half, T>; /* the type on the tensor cores */
  struct no_units {};
  static constexpr int KEYS_WARP = shape::KEYS_WARP, PIECES = shape::PIECES;
  static constexpr int PAIRS = D / shape::NUMBERS / 2;
  static constexpr int OWN = (KEYS_WARP + WARP - 1) / WARP; /* words of this warp's keys */
  static constexpr float SLACK = 8.f;
  static constexpr uint32_t EVERY = ~0u >> (WARP * OWN - KEYS_WARP);
  const listed_keys<> &keys;
  const int64_t row0;     /* of [tokens, heads]: the block's first */
  const int first, count; /* its head in the group, and how many there are */
  const score_rule rule;
  uint32_t q[D / 16][4];
  float scale0, scale1, slope0, slope1;
  float out[D / 8][4], m0, m1, l0, l1;
  std::conditional_t<PACKS, packed_units<D / PACKED_GROUP>, no_units> units; /* of out */
  uint32_t bits[OWN], any, every; /* of the next tile: see look */

  static __device__ int lane() { return threadIdx.x % WARP; }
  static __device__ int key0() { return threadIdx.x / WARP % shape::KW * KEYS_WARP; }
  /* This lane's rows of every mma. */
  static __device__ int own_row() { return threadIdx.x / WARP / shape::KW * 16 + lane() / 4; }

  __device__ listed_warp(const listed_keys<> &keys_, int64_t row0_, int first_, int count_)
      : keys(keys_), row0(row0_), first(first_), count(count_), rule(keys_.a) {
    const kvl_paged_attention_args &a = keys.a;
    const int r0 = own_row(), r1 = r0 + 8, head_dim = a.cache.key.dim;
    const T *const q0 = r0 < count ? (const T *)a.q + (row0 + r0) * head_dim : nullptr;
    const T *const q1 = r1 < count ? (const T *)a.q + (row0 + r1) * head_dim : nullptr;
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_query<IN_BYTES>(q[k], q0, q1, k, head_dim);
    scale0 = rule.scale * (a.cache.k_scale ? a.cache.k_scale[keys.kv_head] : 1.f);
    scale1 = scale0;
    if constexpr (IN_BYTES) {
      const int2 shift = rows_to_f16<T>(q);
      scale0 *= power_of_two(-shift.x);
      scale1 *= power_of_two(-shift.y);
    }
    if (shape::LONG && key0() == 0) {
#pragma unroll
      for (int k = 0; k < D / 16; k++)
        *kept(k) = make_uint4(q[k][0], q[k][1], q[k][2], q[k][3]);
    }
    const float *const slopes = a.alibi ? a.alibi + row0 % a.heads : nullptr;
    slope0 = slopes && r0 < count ? slopes[r0] * LOG2E : 0.f;
    slope1 = slopes && r1 < count ? slopes[r1] * LOG2E : 0.f;
#pragma unroll
    for (int n = 0; n < D / 8; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.f;
    m0 = m1 = -INFINITY;
    l0 = l1 = 0.f;
  }

  /* Where long rows of q lie for this lane, as operands: dims 16 k and on. */
  static __device__ uint4 *kept(int k) {
    extern __shared__ __align__(128) char shared[];
    return (uint4 *)(shared + shape::RING_BYTES) +
           (threadIdx.x / WARP / shape::KW * (D / 16) + k) * WARP + lane();
  }
  static __device__ __forceinline__ void load_kept(uint32_t (&x)[4], int k) {
    const uint4 y = *kept(k);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }

  /* Reads which of this warp's keys of a tile the row sees. */
  __device__ __forceinline__ void look(const listed_tiles<shape> &tiles, int t) {
    any = 0, every = EVERY;
#pragma unroll
    for (int w = 0; w < OWN; w++) {
      const int key = key0() + w * WARP;
      bits[w] = tiles.seen[tiles.slot(t)][key / WARP] >> key % WARP & EVERY;
      any |= bits[w];
      every &= bits[w];
    }
  }

  /* Turns products into scores: applies what depends on the index of the key. */
  template <class H>
  __device__ void bias(float (&s)[KEYS_WARP / 8][4], const int *index, const H &hook) {
    const kvl_paged_attention_args &a = keys.a;
    const query_sight &sight = keys.sight;
    const int pair = lane() % 4 * 2, r0 = own_row();
#pragma unroll
    for (int n = 0; n < KEYS_WARP / 8; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int key = index[key0() + n * 8 + pair + c], far = kvl__apart(key, sight.at);
        s[n][c] += slope0 * (float)far;
        s[n][c + 2] += slope1 * (float)far;
        if constexpr (H::ACTIVE) {
          const int last = first + count - 1;
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int r = r0 + 8 * half;
            const hook_row of = {sight.seq,    a.cache.kv_heads,
                                 keys.kv_head, min(first + r, last),
                                 sight.length, sight.at};
            float &score = s[n][c + 2 * half];
            score = hook(score, of, max(key, 0));
            if (key >= 0 && r < count) keep_score(hook, row0 + r, key, score);
          }
        }
      }
  }

  __device__ void mask(float (&s)[KEYS_WARP / 8][4]) const {
#pragma unroll
    for (int n = 0; n < KEYS_WARP / 8; n++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        if (!(bits[n / 4] >> (n % 4 * 8 + lane() % 4 * 2 + c) & 1))
          s[n][c] = s[n][c + 2] = -INFINITY;
  }

  /* Takes scores into the softmax; they become weights. The weights are relative to a row's
   * largest score, or to one that is up to SLACK less, so that most tiles need no
   * rescaling. */
  __device__ void weigh(float (&s)[KEYS_WARP / 8][4]) {
    float top0 = m0, top1 = m1;
#pragma unroll
    for (int n = 0; n < KEYS_WARP / 8; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        top0 = fmaxf(top0, s[n][c]);
        top1 = fmaxf(top1, s[n][c + 2]);
      }
    if (__any_sync(ALL_LANES, top0 > m0 + SLACK || top1 > m1 + SLACK)) {
      if constexpr (PACKS) {
        const float before0 = m0, before1 = m1;
        float none[1][4] = {};
        raise_maxima(ceilf(top0), ceilf(top1), m0, m1, l0, l1, none);
        units.lower(out, 0, m0 > before0 ? m0 - before0 : 0.f);
        units.lower(out, 1, m1 > before1 ? m1 - before1 : 0.f);
      } else {
        raise_maxima(top0, top1, m0, m1, l0, l1, out);
      }
    }
    weigh_rows(s, finite_shift(m0), finite_shift(m1), l0, l1);
  }

  /* Attends to tile `t` in stage `stage` of the ring, after a look. */
  template <class H>
  __device__ void attend(const listed_tiles<shape> &tiles, int t, int stage, uint32_t ring,
                         const H &hook) {
    if (any == 0) return;
    const uint32_t k_at = ring + stage * 2 * shape::TILE_BYTES;
    float s[KEYS_WARP / 8][4]; /* 16 rows x keys 0-7, 8-15, ... */
    const int slot = tiles.slot(t), groups = keys.a.cache.key.groups;
    if constexpr (PACKS) {
      auto get_q = [&](int k, uint32_t(&x)[4]) {
        if (shape::LONG) load_kept(x, k);
        else x[0] = q[k][0], x[1] = q[k][1], x[2] = q[k][2], x[3] = q[k][3];
      };
      packed_scores<C, PIECES, shape::GROUPS>(s, get_q, scale0, scale1, k_at, tiles, slot,
                                              key0(), groups);
    } else {
      tile_scores<C, M, PIECES, PAIRS>(s, q, 0, k_at, key0());
      scale_rows(s, scale0, scale1);
    }
    if (rule.cap != 0.f) {
#pragma unroll
      for (int n = 0; n < KEYS_WARP / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) s[n][c] = rule.cap * tanh_fast(s[n][c]);
    }
    if (H::ACTIVE || keys.a.alibi) bias(s, tiles.index[slot], hook);
    if (every != EVERY) mask(s);
    weigh(s);
    const uint32_t v_at = k_at + shape::TILE_BYTES;
    if constexpr (PACKS) {
      packed_values<C, PIECES>(out, units, s, v_at, tiles, slot, key0(), groups);
    } else { /* the scores already have the layout of the next mma's left operand */
      auto weights = [&](int k) {
        const float(&x)[4] = s[2 * k], (&y)[4] = s[2 * k + 1];
        return left_operand{{pack2(x[0], x[1], M()), pack2(x[2], x[3], M()),
                             pack2(y[0], y[1], M()), pack2(y[2], y[3], M())}};
      };
      tile_values<C, M, PIECES, PAIRS, KEYS_WARP / 8>(out, 0, v_at, key0(), weights);
    }
  }

  /* Stores the partial softmax for join_listed. The sums take the ring's place. */
  __device__ void store(float2 *states, float *sums) {
    const int at0 = lane() / 4, warp = threadIdx.x / WARP;
    if constexpr (PACKS) units.end(out);
    l0 = warp_sum<4>(l0);
    l1 = warp_sum<4>(l1);
    if (lane() % 4 == 0) {
      states[warp * 16 + at0] = make_float2(m0, l0);
      states[warp * 16 + at0 + 8] = make_float2(m1, l1);
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) { /* rotated, so that rows are in different banks */
        const int dim = dim_of<IN_BYTES>(n, c) ^ at0 * 8;
        sums[(warp * 16 + at0) * D + dim] = out[n][c];
        sums[(warp * 16 + at0 + 8) * D + dim] = out[n][c + 2];
      }
  }
};

/* What the computing warps do with the tiles of their block. Information about the first
 * shape::TOLD tiles was passed on before the first barrier. */
template <class W, class L, class H>
__device__ __forceinline__ void attend_tiles(W &rows, L &ahead, const listed_share &share,
                                             uint32_t ring, const H &hook) {
  using shape = typename W::shape;
  constexpr int STAGES = shape::STAGES;
  listed_copies<shape> copies(rows.keys, ahead.tiles, ring);
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    copies.read(share.begin + s);
    copies.fetch(s);
    copy_commit();
  }
  if (copies.EARLY) copies.read(share.begin + STAGES - 1);
  int stage = 0, turn = 0; /* turn: the warp that looks up a tile */
  for (int t = share.begin; t < share.end; t++) {
    if (copies.EARLY) rows.look(ahead.tiles, t);
    copy_wait<STAGES - 2>();
    __syncthreads(); /* tile t is complete, and tile t - 1 was read */
    if (!copies.EARLY) copies.read(t + STAGES - 1);
    copies.fetch(stage == 0 ? STAGES - 1 : stage - 1);
    copy_commit();
    if (copies.EARLY) copies.read(t + STAGES);
    if (!shape::APART) {
      if ((int)threadIdx.x / WARP == turn) ahead.next(t + shape::TOLD, 0);
      turn = (turn + 1) % shape::WARPS;
    }
    if (!copies.EARLY) rows.look(ahead.tiles, t);
    rows.attend(ahead.tiles, t, stage, ring, hook);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  if (shape::GROUPS > 0) copy_commit(); /* scales of tiles after the last */
  copy_wait<0>();
  if constexpr (H::ACTIVE) { /* a head may hide what others see: see paged_mend.cuh */
#pragma unroll
    for (auto &x : rows.out) {
      rows.l0 += (x[0] + x[1]) * 0.f;
      rows.l1 += (x[2] + x[3]) * 0.f;
    }
  }
}

/* The work of the warp that only looks up keys. It has the same barriers as attend_tiles. */
template <int TOLD, class L>
__device__ __forceinline__ void look_ahead(L &ahead, const listed_share &share) {
  auto next = [&](int t, int turn) {
    ahead.next(t + TOLD, turn);
    if constexpr (L::PACKS) { /* the scales of the next tile are there */
      copy_commit();
      copy_wait<TOLD - 1>();
    }
  };
  ahead.begin(share.begin + TOLD);
  __syncthreads();
  for (int t = share.begin; t < share.end; t++) {
    __syncthreads();
    next(t, 0);
    if (++t == share.end) break;
    __syncthreads();
    next(t, L::TURNS - 1);
  }
  if (L::PACKS) copy_wait<0>();
}

template <class T, class C, int D, int MW, class H>
__device__ __forceinline__ void listed(const kvl_paged_attention_args &a,
                                       const listed_plan &plan, const H &hook) {
  using of_warp = listed_warp<T, C, D, MW>;
  using shape = typename of_warp::shape;
  constexpr int WARPS = shape::WARPS, TOLD = shape::TOLD;
  static_assert(TOLD == WARPS || (shape::APART && TOLD == WARPS + 1),
                "every warp looks up one tile at first");
  extern __shared__ __align__(128) char shared[];
  __shared__ listed_tiles<shape> tiles;
  __shared__ float2 states[WARPS * 16]; /* (m, l) of the warps' rows */
  const int64_t token = plan.token();
  const int kv_head = plan.kv_head(), warp = threadIdx.x / WARP;

  ask_for_table(a, plan, token);
  wait_for_previous();
  listed_share share(plan, a.max_selected, shape::KEYS);
  int entries[shape::KEYS / WARP];
  listed_look_up<shape>::ask(listed_keys<>::list_of(a, token, kv_head), a.max_selected,
                             share.end, share.begin + warp, entries);
  const listed_keys<> keys(a, plan.block, token, kv_head);
  const int group = (uint32_t)a.heads / (uint32_t)a.cache.kv_heads;
  const int first = plan.subgroup() * shape::ROWS, count = min(group - first, shape::ROWS);
  const int64_t row0 = token * a.heads + kv_head * group + first;
  if (keys.keys == 0) share.end = share.begin;
  listed_look_up<shape> ahead(keys, tiles, share.end, H::ACTIVE || a.alibi);
  ahead.look_up(share.begin + warp, entries, 0);
  if (warp < WARPS) {
    of_warp rows(keys, row0, first, count);
    ahead.tell(share.begin + warp, 0);
    if (!shape::APART) ahead.begin(share.begin + warp + TOLD);
    __syncthreads();
    attend_tiles(rows, ahead, share, shared_address(shared), hook);
    let_next_start();
    __syncthreads(); /* the ring was read */
    rows.store(states, (float *)shared);
  } else {
    if (TOLD > WARPS) ahead.tell(share.begin + warp, 0);
    look_ahead<TOLD>(ahead, share);
    let_next_start();
    __syncthreads();
  }
  join_listed<shape::KW, 16, D, true, shape::THREADS>(
      a, plan, row0, count, states, (const float *)shared,
      a.cache.v_scale ? a.cache.v_scale[kv_head] : 1.f);
}

template <class T, class C, int D, int MW>
__global__ void __launch_bounds__(listed_shape<D, MW, C>::THREADS,
                                  listed_shape<D, MW, C>::BLOCKS)
    listed_mma(const __grid_constant__ kvl_paged_attention_args a,
               const __grid_constant__ listed_plan plan) {
  listed<T, C, D, MW>(a, plan, no_hook());
}

}  // namespace kvl

#endif
