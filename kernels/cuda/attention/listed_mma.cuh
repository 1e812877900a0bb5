/* Attention over listed tokens on the tensor cores, for 16-bit q and a cache of q's dtype
 * or f8e4m3.
 *
 * A thread block takes one token of q, one KV head and up to 64 heads of its group, and walks
 * over its share of the list in tiles of KEYS tokens. K and V of a tile are rows of head_dim
 * numbers anywhere in memory. Neighbouring lanes copy a row, with asynchronous 16-byte
 * copies; two tiles (three for 64 dims of 16 bits) are in flight while one is computed.
 * Meanwhile the threads look up the rows of the tiles after these. Up to 16 heads are the rows
 * of one mma, and the four warps share a tile's keys. More heads take more warps (MW of them
 * along the heads), so that a group reads its tokens once whatever its size. Tiles of f8e4m3
 * have twice the tokens, and so as many bytes; they become f16 on their way to the tensor cores
 * (paged.cuh).
 *
 * A token that the row may not see is copied as zeros. So the heads of a block, which see the
 * same tokens unless a hook hides some, get no NaN from others.
 *
 * The blocks of one KV head follow one another, row by row: the tokens that rows of a prompt
 * share fit the L2 for one head's K and V, but not for all heads'. */
#ifndef KVL_CUDA_LISTED_MMA_CUH
#define KVL_CUDA_LISTED_MMA_CUH

#include <type_traits>

#include "cuda/attention/listed.cuh"

namespace kvl {

template <int D, int MW, bool F8> struct listed_shape {
  static constexpr int WARPS = 4, THREADS = WARPS * WARP, KEYS = F8 && D <= 128 ? 128 : 64;
  static constexpr int KW = WARPS / MW, KEYS_WARP = KEYS / KW, ROWS = 16 * MW;
  static constexpr int NUMBERS = F8 ? 16 : 8; /* per piece */
  static constexpr int PIECES = (D / NUMBERS + 7) / 8 * 8, TILE_BYTES = KEYS * PIECES * 16;
  static constexpr int STAGES = F8 || D > 64 ? 3 : 4, BLOCKS = !F8 && D > 128 ? 1 : 2;
  static constexpr int WORDS = KEYS / WARP;
  /* Whose turn it is to look up a tile, and how many tiles are looked up at first. */
  static constexpr int TURNS = THREADS / KEYS, TOLD = (STAGES + TURNS - 1) / TURNS * TURNS;
  static constexpr int SHARED_BYTES = STAGES * 2 * TILE_BYTES;
  static_assert(SHARED_BYTES >= WARPS * 16 * D * 4, "the ring takes the warps' sums");
};

/* ---- a tile's products ------------------------------------------------------------------
 * Every fragment is loaded from shared memory while the products of the one before it run:
 * a block has few warps, and none of them could hide that. */

/* s = q K for a warp's 8 N keys, which are rows `row` and on of a tile. */
template <bool F8, class M, int PIECES, int N, int K>
__device__ __forceinline__ void tile_scores(float (&s)[N][4], const uint32_t (&q)[K][4],
                                            uint32_t k_at, int row) {
  constexpr int STEPS = F8 ? K / 2 : K, KEYS16 = N / 2; /* steps over the dims */
  const int lane = threadIdx.x % WARP;
  uint32_t b[2][4];
  auto load = [&](int i) { /* step i / KEYS16 of keys 16 (i % KEYS16) and on */
                           load_matrices(
                               b[i % 2],
                               k_at + tile_byte<PIECES>(
                                          row + i % KEYS16 * 16 + lane % 8 + lane / 16 * 8,
                                          2 * (i / KEYS16) + lane / 8 % 2));
  };
  load(0);
#pragma unroll
  for (int i = 0; i < STEPS * KEYS16; i++) {
    if (i + 1 < STEPS * KEYS16) load(i + 1);
    const int k = i / KEYS16, n = i % KEYS16 * 2;
    const uint32_t(&x)[4] = b[i % 2];
    if constexpr (F8) {
      mma(s[n], q[2 * k], f8_to_f16(x[0]), f8_to_f16(x[0] >> 16), M());
      mma(s[n + 1], q[2 * k], f8_to_f16(x[2]), f8_to_f16(x[2] >> 16), M());
      mma(s[n], q[2 * k + 1], f8_to_f16(x[1]), f8_to_f16(x[1] >> 16), M());
      mma(s[n + 1], q[2 * k + 1], f8_to_f16(x[3]), f8_to_f16(x[3] >> 16), M());
    } else {
      mma(s[n], q[k], x[0], x[1], M());
      mma(s[n + 1], q[k], x[2], x[3], M());
    }
  }
}

/* out += P V, as add_values does, for V of f8e4m3. */
template <int PIECES, int KEYS8, int DIMS8>
__device__ __forceinline__ void tile_values_f8(float (&out)[DIMS8][4],
                                               const float (&s)[KEYS8][4], uint32_t v_at,
                                               int first) {
  constexpr int PAIRS = DIMS8 / 4; /* of pieces */
  const int lane = threadIdx.x % WARP;
  uint32_t b[2][4], p[4];
  auto load = [&](int i) { /* pieces 2 (i % PAIRS), + 1 of keys 16 (i / PAIRS) and on */
                           load_matrices_transposed(
                               b[i % 2],
                               v_at + tile_byte<PIECES>(first + i / PAIRS * 16 + lane % 16,
                                                        2 * (i % PAIRS) + lane / 16));
  };
  load(0);
#pragma unroll
  for (int i = 0; i < KEYS8 / 2 * PAIRS; i++) {
    if (i + 1 < KEYS8 / 2 * PAIRS) load(i + 1);
    const int k = i / PAIRS, n = i % PAIRS;
    if (n == 0) {
      p[0] = pack2(s[2 * k][0], s[2 * k][1], __half());
      p[1] = pack2(s[2 * k][2], s[2 * k][3], __half());
      p[2] = pack2(s[2 * k + 1][0], s[2 * k + 1][1], __half());
      p[3] = pack2(s[2 * k + 1][2], s[2 * k + 1][3], __half());
    }
#pragma unroll
    for (int h = 0; h < 2; h++) { /* a piece has keys 0-7 and 8-15 of 16 dims */
      const uint32_t x = __byte_perm(b[i % 2][2 * h], 0, 0x3120);
      const uint32_t y = __byte_perm(b[i % 2][2 * h + 1], 0, 0x3120);
      mma(out[4 * n + 2 * h], p, f8_to_f16(x), f8_to_f16(y), __half());
      mma(out[4 * n + 2 * h + 1], p, f8_to_f16(x >> 16), f8_to_f16(y >> 16), __half());
    }
  }
}

/* ---- copying ---------------------------------------------------------------------------- */

/* What a block knows of the tiles in the ring, and of some after them, by turns. */
template <class shape> struct listed_tiles {
  static constexpr int SLOTS = shape::TOLD < 4 ? 4 : 8; /* more than TOLD */
  long long offset[SLOTS][shape::KEYS];                 /* of a key's row, in bytes */
  uint32_t seen[SLOTS][shape::WORDS];                   /* bit i: the row sees key i */
  int index[SLOTS][shape::KEYS];
  static __device__ __forceinline__ int slot(int t) { return (unsigned)t % SLOTS; }
};

/* The block's copies. A thread looks up one key of a tile, in three steps that each wait for
 * the one before: its entry, its block, and where its row lies, which it tells the others.
 * Threads take TURNS, so that a step's memory has as many tiles to answer. */
template <class shape> struct listed_copies {
  const listed_keys<> &keys;
  listed_tiles<shape> &tiles;
  const int end; /* the tile after the last */
  const uint32_t ring;
  const int key, turn;
  const bool indices; /* are wanted */
  int token, block;   /* of this thread's key in the next tile of its turn */
  int entry;          /* in the tile after it */

  __device__ __forceinline__ listed_copies(const listed_keys<> &keys_,
                                           listed_tiles<shape> &tiles_, int end_,
                                           uint32_t ring_, bool indices_)
      : keys(keys_), tiles(tiles_), end(end_), ring(ring_),
        key((int)threadIdx.x % shape::KEYS), turn((int)threadIdx.x / shape::KEYS),
        indices(indices_) {}

  __device__ __forceinline__ bool mine(int t) const { return t % shape::TURNS == turn; }
  __device__ __forceinline__ int entry_in(int t) const {
    return t < end ? keys.entry_of(t * shape::KEYS + key) : -1;
  }
  /* Waits for an entry, and asks for its block. */
  __device__ __forceinline__ void look_up(int t, int of, int &token_, int &block_) const {
    token_ = keys.token_of(of);
    block_ = keys.block_of(t * shape::KEYS + key, token_);
  }
  __device__ __forceinline__ void tell(int t, int token_, int block_) {
    const int slot = tiles.slot(t);
    const paged_row row = keys.row_of(token_, block_);
    const unsigned seen = __ballot_sync(ALL_LANES, row.index >= 0);
    tiles.offset[slot][key] = (long long)row.offset;
    if (indices) tiles.index[slot][key] = row.index;
    if (key % WARP == 0) tiles.seen[slot][key / WARP] = seen;
  }

  /* Copies a tile, of which the others were told before the last barrier, into a stage. */
  __device__ __forceinline__ void fetch(int t, int stage) {
    constexpr int PIECES = shape::PIECES, SIDE = shape::THREADS / PIECES; /* rows at a time */
    const int slot = tiles.slot(t), piece = threadIdx.x % PIECES;
    uint32_t seen[shape::WORDS], any = 0;
#pragma unroll
    for (int h = 0; h < shape::WORDS; h++) any |= seen[h] = tiles.seen[slot][h];
    if (any == 0) return;
    const kvl_pages &pages = keys.a.cache;
    const bool inside = piece * shape::NUMBERS < pages.key.dim;
    const char *const cache = (const char *)pages.memory + piece * 16;
    const int64_t to_value = keys.to_value();
    const uint32_t k_at = ring + stage * 2 * shape::TILE_BYTES;
    const int side = threadIdx.x / PIECES; /* rows of a copy are of one word of seen */
    static_assert(WARP % SIDE == 0, "");
    long long offset[shape::KEYS / SIDE];
#pragma unroll
    for (int i = 0; i < shape::KEYS / SIDE; i++)
      offset[i] = tiles.offset[slot][i * SIDE + side];
#pragma unroll
    for (int i = 0; i < shape::KEYS / SIDE; i++) {
      const bool valid = seen[i * SIDE / WARP] >> (i * SIDE % WARP + side) & 1 && inside;
      const char *const k = cache + offset[i];
      const uint32_t to = k_at + tile_byte<PIECES>(i * SIDE + side, piece);
      copy_async(to, k, valid); /* else zeros: no NaN gets in, and nothing is read */
      copy_async(to + shape::TILE_BYTES, k + to_value, valid);
    }
  }

  /* Begins: STAGES - 1 tiles from `t` on. Their look-ups wait for memory together. */
  __device__ __forceinline__ void begin(int t) {
    constexpr int FIRST = shape::STAGES - 1, OWN = shape::TOLD / shape::TURNS;
    const int first = t + (turn + shape::TURNS - t % shape::TURNS) %
                              shape::TURNS; /* this thread's first tile */
    int entries[OWN + 1], tokens[OWN], blocks[OWN];
#pragma unroll
    for (int s = 0; s <= OWN; s++) entries[s] = entry_in(first + s * shape::TURNS);
    entry = entry_in(first + (OWN + 1) * shape::TURNS);
#pragma unroll
    for (int s = 0; s < OWN; s++)
      look_up(first + s * shape::TURNS, entries[s], tokens[s], blocks[s]);
    look_up(first + OWN * shape::TURNS, entries[OWN], token, block);
#pragma unroll
    for (int s = 0; s < OWN; s++) tell(first + s * shape::TURNS, tokens[s], blocks[s]);
    __syncthreads();
#pragma unroll
    for (int s = 0; s < FIRST; s++) {
      fetch(t + s, s);
      copy_commit();
    }
  }
  /* Copies tile `t` into a stage, and looks up the next ones. */
  __device__ __forceinline__ void next(int t, int stage) {
    fetch(t, stage);
    copy_commit();
    const int ahead = t + shape::TOLD - (shape::STAGES - 1);
    if (!mine(ahead)) return;
    tell(ahead, token, block);
    look_up(ahead + shape::TURNS, entry, token, block);
    entry = entry_in(ahead + 2 * shape::TURNS);
  }
};

/* ---- computing -------------------------------------------------------------------------- */

/* A warp's 16 rows of q, and their partial softmax over its keys. C is the cache's type: T or
 * f8e4m3. */
template <class T, class C, int D, int MW> struct listed_warp {
  static constexpr bool F8 = same<C, f8e4m3>;
  using shape = listed_shape<D, MW, F8>;
  using M = std::conditional_t<F8, __half, T>; /* the type on the tensor cores */
  static constexpr int KEYS_WARP = shape::KEYS_WARP, PIECES = shape::PIECES;
  static constexpr int OWN = (KEYS_WARP + WARP - 1) / WARP; /* words of this warp's keys */
  static constexpr uint32_t EVERY = ~0u >> (WARP * OWN - KEYS_WARP);
  const listed_keys<> &keys;
  const int64_t row0;     /* of [tokens, heads]: the block's first */
  const int first, count; /* its head in the group, and how many there are */
  const score_rule rule;
  uint32_t q[D / 16][4];
  float scale0, scale1, slope0, slope1;
  float out[D / 8][4], m0, m1, l0, l1;

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
    for (int k = 0; k < D / 16; k++) load_query<F8>(q[k], q0, q1, k, head_dim);
    scale0 = rule.scale * (a.cache.k_scale ? a.cache.k_scale[keys.kv_head] : 1.f);
    scale1 = scale0;
    if constexpr (F8) {
      const int2 shift = rows_to_f16<T>(q);
      scale0 *= power_of_two(-shift.x);
      scale1 *= power_of_two(-shift.y);
    }
    const float *const slopes = a.alibi ? a.alibi + row0 % a.heads : nullptr;
    slope0 = slopes && r0 < count ? slopes[r0] * LOG2E : 0.f;
    slope1 = slopes && r1 < count ? slopes[r1] * LOG2E : 0.f;
#pragma unroll
    for (int n = 0; n < D / 8; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.f;
    m0 = m1 = -INFINITY;
    l0 = l1 = 0.f;
  }

  /* Which of this warp's keys the row sees; false: none of them. */
  __device__ static bool look(const uint32_t (&seen)[shape::WORDS], uint32_t (&bits)[OWN],
                              bool &all) {
    uint32_t any = 0, every = EVERY;
#pragma unroll
    for (int w = 0; w < OWN; w++) {
      const int key = key0() + w * WARP;
      bits[w] = seen[key / WARP] >> key % WARP & EVERY;
      any |= bits[w];
      every &= bits[w];
    }
    all = every == EVERY;
    return any != 0;
  }

  /* Turns products into scores: what changes them by the index of their key. */
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

  __device__ void mask(float (&s)[KEYS_WARP / 8][4], const uint32_t (&bits)[OWN]) const {
#pragma unroll
    for (int n = 0; n < KEYS_WARP / 8; n++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        if (!(bits[n / 4] >> (n % 4 * 8 + lane() % 4 * 2 + c) & 1))
          s[n][c] = s[n][c + 2] = -INFINITY;
  }

  /* Takes scores into the softmax; they become weights. */
  __device__ void weigh(float (&s)[KEYS_WARP / 8][4]) {
    float top0 = m0, top1 = m1;
#pragma unroll
    for (int n = 0; n < KEYS_WARP / 8; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        top0 = fmaxf(top0, s[n][c]);
        top1 = fmaxf(top1, s[n][c + 2]);
      }
    raise_maxima(top0, top1, m0, m1, l0, l1, out);
    weigh_rows(s, finite_shift(m0), finite_shift(m1), l0, l1);
  }

  /* Attends to tile `t` in stage `stage` of the ring. */
  template <class H>
  __device__ void attend(const listed_tiles<shape> &tiles, int t, int stage, uint32_t ring,
                         const H &hook) {
    uint32_t bits[OWN];
    bool all;
    const int slot = tiles.slot(t);
    if (!look(tiles.seen[slot], bits, all)) return;
    const uint32_t k_at = ring + stage * 2 * shape::TILE_BYTES;
    float s[KEYS_WARP / 8][4] = {}; /* 16 rows x keys 0-7, 8-15, ... */
    tile_scores<F8, M, PIECES>(s, q, k_at, key0());
    scale_rows(s, scale0, scale1);
    if (rule.cap != 0.f) {
#pragma unroll
      for (int n = 0; n < KEYS_WARP / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) s[n][c] = rule.cap * tanh_fast(s[n][c]);
    }
    if (H::ACTIVE || keys.a.alibi) bias(s, tiles.index[slot], hook);
    if (!all) mask(s, bits);
    weigh(s);
    const uint32_t v_at = k_at + shape::TILE_BYTES;
    if constexpr (F8) tile_values_f8<PIECES>(out, s, v_at, key0());
    else add_values<T, PIECES>(out, s, v_at, key0(), lane());
  }

  /* Stores the partial softmax for join_listed. The sums take the ring's place. */
  __device__ void store(float2 *states, float *sums) {
    const int at0 = lane() / 4, warp = threadIdx.x / WARP;
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
        const int dim = dim_of<F8>(n, c) ^ at0 * 8;
        sums[(warp * 16 + at0) * D + dim] = out[n][c];
        sums[(warp * 16 + at0 + 8) * D + dim] = out[n][c + 2];
      }
  }
};

template <class T, class C, int D, int MW, class H>
__device__ __forceinline__ void listed(const kvl_paged_attention_args &a,
                                       const listed_plan &plan, const H &hook) {
  using of_warp = listed_warp<T, C, D, MW>;
  using shape = typename of_warp::shape;
  constexpr int STAGES = shape::STAGES;
  extern __shared__ __align__(128) char shared[];
  __shared__ listed_tiles<shape> tiles;
  __shared__ float2 states[shape::WARPS * 16]; /* (m, l) of the warps' rows */
  const int split = blockIdx.x % plan.splits;
  const int64_t token = blockIdx.x / plan.splits;
  const int kv_head = blockIdx.y / plan.subgroups;
  const int group = (int)(a.heads / a.cache.kv_heads);
  const int first = blockIdx.y % plan.subgroups * shape::ROWS;
  const int count = min(group - first, shape::ROWS);
  const int64_t row0 = token * a.heads + kv_head * group + first;
  const uint32_t ring = shared_address(shared);

  wait_for_previous();
  const listed_keys<> keys(a, plan.block, token, kv_head);
  const int tiles_all = (keys.keys + shape::KEYS - 1) / shape::KEYS;
  const int each = (tiles_all + plan.splits - 1) / plan.splits;
  const int begin = min(split * each, tiles_all), end = min(begin + each, tiles_all);
  listed_copies<shape> copies(keys, tiles, end, ring, H::ACTIVE || a.alibi);
  copies.begin(begin);
  of_warp rows(keys, row0, first, count);
  int stage = 0;
  for (int t = begin; t < end; t++, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    copy_wait<STAGES - 2>();
    __syncthreads(); /* tile t is complete, and the one before it was read */
    copies.next(t + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    rows.attend(tiles, t, stage, ring, hook);
  }
  copy_wait<0>();
  let_next_start();

  __syncthreads();           /* the ring was read */
  if constexpr (H::ACTIVE) { /* a head may hide what others see: see paged_mend.cuh */
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      rows.l0 += (rows.out[n][0] + rows.out[n][1]) * 0.f;
      rows.l1 += (rows.out[n][2] + rows.out[n][3]) * 0.f;
    }
  }
  rows.store(states, (float *)shared);
  join_listed<shape::KW, 16, D, true, shape::THREADS>(
      a, plan, row0, count, states, (const float *)shared,
      a.cache.v_scale ? a.cache.v_scale[kv_head] : 1.f);
}

template <class T, class C, int D, int MW>
__global__ void __launch_bounds__(listed_shape<D, MW, same<C, f8e4m3>>::THREADS,
                                  listed_shape<D, MW, same<C, f8e4m3>>::BLOCKS)
    listed_mma(const __grid_constant__ kvl_paged_attention_args a,
               const __grid_constant__ listed_plan plan) {
  listed<T, C, D, MW>(a, plan, no_hook());
}

}  // namespace kvl

#endif
