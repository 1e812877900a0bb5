/* Flash decoding for 16-bit q and a 16-bit or f8e4m3 cache, on the tensor cores.
 *
 * The teams of paged_split.cuh are warps of one thread block. Every warp is its own pipeline:
 * it walks over its tiles of KEYS keys, from sequence to sequence, and keeps the copies of
 * one or two tiles (K and V) in flight into its own ring in shared memory; those of the next
 * sequence follow directly. Up to 16 query heads of a group are the 16 rows of the mma, so K
 * and V are read once. A decode is bound by memory, so smaller groups waste nothing that
 * matters. At the end of a sequence the team joins its partial softmaxes through the memory
 * of the tiles that it just used.
 *
 * Much of a short decode is start and end, where a warp only runs one instruction after the
 * other. So the host does every division that it can, the loop over tiles has the code of
 * the look-up, the fetch and the end of a sequence once, and the start is before that loop,
 * with a look-up and a fetch of its own: it happens while the kernels ahead still run.
 *
 * K and V of f8e4m3 stay bytes until they are on their way to the tensor cores, see
 * paged.cuh. */
#ifndef KVL_CUDA_PAGED_DECODE_CUH
#define KVL_CUDA_PAGED_DECODE_CUH

#include <type_traits>

#include "args/attention.h"
#include "cuda/barrier.cuh"
#include "cuda/attention/hook.cuh"
#include "cuda/attention/paged_split.cuh"

namespace kvl {

/* Ring sizes: 192 KiB per thread block, one block per SM. */
template <int D, bool F8> struct decode_shape {
  static constexpr int BYTES = F8 ? 1 : 2, NUMBERS = 16 / BYTES; /* per piece */
  static constexpr int PIECES = (D / NUMBERS + 7) / 8 * 8;
  static constexpr int KEYS = F8 || D <= 64 ? 32 : 16, ROWS = 16;
  static constexpr int TILE_BYTES = KEYS * PIECES * 16, STAGE_BYTES = 2 * TILE_BYTES;
  static constexpr int BLOCKS = 1, STAGES = 3, WARPS = STAGE_BYTES > 8192 ? 4 : 8, TEAM = 4;
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
  static constexpr int SHARED_BYTES = RING_BYTES + WARPS * STAGES * KEYS * 4;
  /* 192 leaves enough of an SM's registers for paged_combine. */
  static constexpr int REGISTERS = STAGE_BYTES > 8192 ? 255 : 192;
  static_assert(STAGE_BYTES >= ROWS * D * 4, "a stage takes the rows' sums");
};

/* While a warp computes a tile it keeps one more in flight. It keeps two if its share has
 * more tiles per warp than this, which gains 0.5% there. Elsewhere two lose 3%: one tile
 * makes 64 KiB per SM; with 128 KiB the first tile is computed 3 us later, and some SMs run
 * ahead of the others. */
constexpr uint32_t LONG_SHARE = 96;

/* What a lane looks up: eight keys of a tile, or one if block_size is no multiple of 8. */
struct key_run {
  long long offset; /* of the first, in bytes; of all of them if there is a block */
  int position;     /* of the first */
  unsigned seen;    /* bit i: key i is seen */
};

template <class T, int D, bool F8, class H>
__device__ __forceinline__ void decode(const kvl_paged_attention_args &a,
                                       const split_place &place, const H &hook) {
  using shape = decode_shape<D, F8>;
  using M = std::conditional_t<F8, __half, T>; /* the type on the tensor cores */
  constexpr int STAGES = shape::STAGES, KEYS = shape::KEYS, PIECES = shape::PIECES;
  constexpr int NUMBERS = shape::NUMBERS, KEYS_LOG = KEYS == 16 ? 4 : 5;
  extern __shared__ __align__(128) char shared[];
  __shared__ uint32_t sums[PLAN_CHUNKS];
  __shared__ float2 states[shape::WARPS][shape::ROWS]; /* (m, l) of the warps' rows, */
  __shared__ int sums_at[shape::WARPS];                /* and the stages with their sums */
  __shared__ int lengths[shape::WARPS][WARP];          /* of up to 32 sequences */

  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int team = warp >> place.team_shift, member = warp - (team << place.team_shift);
  const int task = blockIdx.x * (shape::WARPS >> place.team_shift) + team;
  const uint32_t share = place.units.quotient(task);
  const int unit = task - (int)(share * place.units.by);
  const int kv_head = place.subgroups.quotient(unit);
  split_plan plan(a, place, sums);
  char *ring = shared + warp * STAGES * shape::STAGE_BYTES;
  const uint32_t ring_at = shared_address(ring);
  int *positions = (int *)(shared + shape::RING_BYTES) + warp * STAGES * KEYS;
  const int head_dim = a.cache.key.dim, row_bytes = a.cache.key.bytes_row;

  /* ---- looking up: 32 runs of keys at once, which are `batch` tiles -------------------- */
  const bool runs = a.cache.block_size % 8 == 0;
  const int log_batch = runs ? 8 - KEYS_LOG : 5 - KEYS_LOG;
  uint32_t share_begin, share_end, seq_begin, ahead_begin, ahead; /* numbers of tiles */
  int seq, length, tiles, ahead_seq, ahead_length, ahead_tiles;
  key_run now = {0, -1, 0};
  paged_block found = {-1, -1, 0}; /* this lane's run of the next batch */
  int now_tiles = 0, next_tiles = 0, now_tile = 0;
  const bool few = place.chunks == 1; /* sequences: up to 32 */
  auto length_of = [&](int s) { return few ? lengths[warp][s] : a.lens[s]; };
  auto keys_ahead = [&]() {
    return paged_keys(a, ahead_seq, kv_head, window_begin(a, ahead_length - 1), ahead_length);
  };
  /* Makes the next batch the present one; this waits for its look-up. */
  auto take_batch = [&]() {
    const paged_keys keys = keys_ahead();
    const paged_row row = keys.row_of(found);
    now = {(long long)row.offset, row.position, keys.seen(row, runs ? 8 : 1)};
    now_tiles = next_tiles;
    now_tile = next_tiles = 0;
  };
  /* Begins the look-up of the next batch; early: the table may still change. */
  auto look_up = [&](auto early) {
    if (ahead >= share_end) return;
    while (ahead >= ahead_begin + ahead_tiles) {
      ahead_begin += ahead_tiles;
      ahead_length = length_of(++ahead_seq);
      ahead_tiles = plan.tiles(ahead_length);
    }
    const uint32_t end = min(share_end, ahead_begin + ahead_tiles);
    const int tile = (int)(ahead - ahead_begin) + plan.first_tile(ahead_length);
    const int nth = lane >> (5 - log_batch), run = lane & ((WARP >> log_batch) - 1);
    const int key = (tile + (nth << place.team_shift)) * KEYS + (runs ? run * 8 : run);
    found = keys_ahead().template look_up<early.value>(key, place.block.quotient(key));
    while (next_tiles < 1 << log_batch && ahead < end) {
      next_tiles++;
      ahead += place.team();
    }
  };
  const char *cache = (const char *)a.cache.memory;
  const int64_t to_value = kvl__to_value(&a.cache, kv_head);
  /* K and V are read once in a step. With a hook there is no hint: see read_once. */
  const std::conditional_t<H::ACTIVE, no_hint, uint64_t> once = read_once();
  /* Copies the next tile, SIDE rows of a run at a time. */
  auto fetch = [&](int stage) {
    if (now_tile == now_tiles) take_batch();
    constexpr int SIDE = WARP / PIECES;
    const int piece = lane % PIECES, side = lane / PIECES;
    const uint32_t to = ring_at + stage * shape::STAGE_BYTES;
    int *const where = positions + stage * KEYS;
    if (now_tiles > 0 && runs) {
#pragma unroll
      for (int run = 0; run < KEYS / 8; run++) {
        const int source = now_tile * (KEYS / 8) + run;
        const char *k = cache + __shfl_sync(ALL_LANES, now.offset, source) +
                        side * row_bytes + piece * 16;
        const int position = __shfl_sync(ALL_LANES, now.position, source);
        unsigned seen = __shfl_sync(ALL_LANES, now.seen, source);
        if (lane < 8) where[run * 8 + lane] = seen >> lane & 1 ? position + lane : -1;
        seen = piece * NUMBERS < head_dim ? seen >> side : 0;
#pragma unroll
        for (int i = 0; i < 8; i += SIDE, k += SIDE * row_bytes) {
          const uint32_t at = to + tile_byte<PIECES>(run * 8 + i + side, piece);
          /* what is not seen becomes zeros, so that no NaN gets in */
          copy_async(at, k, seen >> i & 1, once);
          copy_async(at + shape::TILE_BYTES, k + to_value, seen >> i & 1, once);
        }
      }
    } else if (now_tiles > 0) {
#pragma unroll 2
      for (int r = side; r < KEYS; r += SIDE) {
        const int source = now_tile * KEYS + r;
        const char *k = cache + __shfl_sync(ALL_LANES, now.offset, source) + piece * 16;
        const int position = __shfl_sync(ALL_LANES, now.position, source);
        unsigned seen = __shfl_sync(ALL_LANES, now.seen, source);
        if (piece == 0) where[r] = seen ? position : -1;
        if (piece * NUMBERS >= head_dim) seen = 0;
        const uint32_t at = to + tile_byte<PIECES>(r, piece);
        copy_async(at, k, seen, once);
        copy_async(at + shape::TILE_BYTES, k + to_value, seen, once);
      }
    }
    if (now_tiles > 0) now_tile++;
    if (next_tiles == 0)
      look_up(std::false_type()); /* after the copies: it may wait for a selection */
  };

  /* ---- computing ----------------------------------------------------------------------- */
  const int row0 = lane / 4, row1 = row0 + 8; /* this lane's rows of every mma */
  const int pair = lane % 4 * 2;
  const score_rule rule(a);
  float slope0 = 0.f, slope1 = 0.f, scale0 = rule.scale, scale1 = rule.scale;
  float value_scale = 1.f;
  uint32_t q[D / 16][4];
  float out[D / 8][4], m0, m1, l0, l1;
  int used; /* the last tile's stage; -1: nothing of this sequence is computed yet */
  auto begin_sequence = [&]() {
    used = -1;
    m0 = m1 = -INFINITY;
    l0 = l1 = 0.f;
#pragma unroll
    for (int n = 0; n < D / 8; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.f;
    const query_rows rows = unit_rows(place, seq, unit);
    const T *const first = (const T *)a.q + (seq * a.heads + rows.head0) * head_dim;
    const T *const q0 = row0 < rows.count ? first + row0 * head_dim : nullptr;
    const T *const q1 = row1 < rows.count ? first + row1 * head_dim : nullptr;
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_query<F8>(q[k], q0, q1, k, head_dim);
    if (a.alibi) {
      slope0 = q0 ? a.alibi[rows.head0 + row0] * LOG2E : 0.f;
      slope1 = q1 ? a.alibi[rows.head0 + row1] * LOG2E : 0.f;
    }
    if constexpr (F8) {
      const int2 shift = rows_to_f16<T>(q);
      const float k_scale = a.cache.k_scale ? a.cache.k_scale[kv_head] : 1.f;
      scale0 = ldexpf(rule.scale * k_scale, -shift.x);
      scale1 = ldexpf(rule.scale * k_scale, -shift.y);
      if (a.cache.v_scale) value_scale = a.cache.v_scale[kv_head];
    }
  };

  /* ---- the start ----------------------------------------------------------------------- */
  /* While the kernels ahead still run, the share is found by lengths that may change. If only
   * a table lies between them and the keys, the first tile is looked up, too, and the L2 asked
   * for it. The guess is checked when its copies are under way. */
  constexpr bool BEGINS_LATE = D > 128 || F8; /* registers are short */
  const bool early_look_up = few && !a.selection && !a.slots;
#pragma unroll 1
  for (bool early = few;; early = false) {
    if (!early) wait_for_previous();
    plan.make();
    if (few) lengths[warp][lane] = plan.early;
    __syncwarp();
    const bool has_share = share < plan.shares;
    share_begin = has_share ? plan.begin(share) : 0;
    share_end = has_share ? plan.begin(share + 1) : 0;
    seq = ahead_seq = plan.find(share_begin, seq_begin);
    length = ahead_length = length_of(seq), ahead_begin = seq_begin;
    tiles = ahead_tiles = plan.tiles(length);
    ahead = share_begin + member;
    now_tile = now_tiles = next_tiles = 0;
    found = {-1, -1, 0};
    if (!early_look_up) wait_for_previous();
    look_up(std::true_type());
    const paged_block guess = found;
    take_batch();
    const bool ahead_of_wait = early && early_look_up && runs && now.position >= 0;
    if (ahead_of_wait && lane >> (5 - log_batch) < min(now_tiles, 2)) {
      prefetch_bulk(cache + now.offset, 8 * row_bytes);
      prefetch_bulk(cache + now.offset + to_value, 8 * row_bytes);
    }
    wait_for_previous(); /* after the first time this costs nothing */
    int length_now = 0, physical_now = guess.physical;
    if (early && lane < a.seqs) length_now = read_early(a.lens + lane);
    if (early && early_look_up && guess.position >= 0)
      physical_now = read_early(keys_ahead().table + place.block.quotient(guess.position));
    let_next_start(); /* after the wait: paged_combine reads the lengths */
    fetch(0);
    copy_commit();
    if constexpr (!BEGINS_LATE) begin_sequence();
    if (!early || !__any_sync(ALL_LANES, length_now != lengths[warp][lane] ||
                                             physical_now != guess.physical))
      break;
    copy_wait<0>();
    __syncwarp();
  }
  if (share >= plan.shares) return;

  /* ---- the tiles ----------------------------------------------------------------------- */
  /* The first tile is on its way. The first `depth` - 1 steps fetch, all others compute as
   * well. The compiler must not know this, or it would make a copy of the code for each kind. */
  uint32_t tile = share_begin + member;
  const uint32_t tiles_each = (share_end - share_begin) >> place.team_shift;
  const int depth = tiles_each > LONG_SHARE ? STAGES - 1 : 1;
  int stage = 0, fetch_stage = 1, step;
  bool fresh = BEGINS_LATE; /* nothing of this sequence is computed yet */
  asm volatile("mov.u32 %0, 1;" : "=r"(step));
  for (;;) {
    const uint32_t piece_end = min(share_end, seq_begin + tiles);
    if (fresh) begin_sequence();
    fresh = false;
    if (step < depth || tile < piece_end) {
      if (step >= depth) {
        if (depth == 1) copy_wait<0>();
        else copy_wait<STAGES - 2>();
      }
      __syncwarp(); /* all copies have arrived, and the last tile was read */
      fetch(fetch_stage);
      copy_commit();
      fetch_stage = fetch_stage + 1 == STAGES ? 0 : fetch_stage + 1;
      if (step < depth) {
        step++;
        continue;
      }
    }
    if (tile < piece_end) {
      const uint32_t k_at = ring_at + stage * shape::STAGE_BYTES;
      const uint32_t v_at = k_at + shape::TILE_BYTES;
      float s[KEYS / 8][4] = {}; /* 16 rows x keys 0-7, 8-15, ... */
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++)
#pragma unroll
        for (int k = 0; k < D / (2 * NUMBERS); k++) {
          uint32_t b[4];
          load_matrices(b, k_at + tile_byte<PIECES>(n * 16 + lane % 8 + lane / 16 * 8,
                                                    2 * k + lane / 8 % 2));
          if constexpr (F8) {
#pragma unroll
            for (int h = 0; h < 4; h++)
              mma(s[2 * n + h / 2], q[2 * k + h % 2], f8_to_f16(b[h]), f8_to_f16(b[h] >> 16),
                  M());
          } else {
            mma(s[2 * n], q[k], b[0], b[1], M());
            mma(s[2 * n + 1], q[k], b[2], b[3], M());
          }
        }
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) s[n][c] *= c < 2 ? scale0 : scale1;
      if (rule.cap != 0.f) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int c = 0; c < 4; c++) s[n][c] = rule.cap * tanh_fast(s[n][c]);
      }
      float top0 = m0, top1 = m1;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) {
        const int2 where = *(const int2 *)(positions + stage * KEYS + n * 8 + pair);
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const int key = c ? where.y : where.x;
          if (a.alibi) {
            s[n][c] += slope0 * (float)(key - length + 1);
            s[n][c + 2] += slope1 * (float)(key - length + 1);
          }
          if constexpr (H::ACTIVE) {
            const int at = max(key, 0), own = length - 1;
            const int group0 = (unit - kv_head * (int)place.subgroups.by) * place.rows;
            const int last = place.group - 1, kv_heads = a.cache.kv_heads;
            const hook_row of0 = {seq,    kv_heads, kv_head, min(group0 + row0, last),
                                  length, own};
            const hook_row of1 = {seq,    kv_heads, kv_head, min(group0 + row1, last),
                                  length, own};
            s[n][c] = hook(s[n][c], of0, at);
            s[n][c + 2] = hook(s[n][c + 2], of1, at);
            const query_rows rows = unit_rows(place, seq, unit);
            const int64_t row = (int64_t)seq * a.heads + rows.head0;
            if (key >= 0 && row0 < rows.count) keep_score(hook, row + row0, key, s[n][c]);
            if (key >= 0 && row1 < rows.count) keep_score(hook, row + row1, key, s[n][c + 2]);
          }
          s[n][c] = key < 0 ? -INFINITY : s[n][c];
          s[n][c + 2] = key < 0 ? -INFINITY : s[n][c + 2];
          top0 = fmaxf(top0, s[n][c]);
          top1 = fmaxf(top1, s[n][c + 2]);
        }
      }
      top0 = warp_max<4>(top0);
      top1 = warp_max<4>(top1);
      if (__any_sync(ALL_LANES, top0 > m0 || top1 > m1)) {
        const float down0 = exp2_fast(m0 - finite_shift(top0));
        const float down1 = exp2_fast(m1 - finite_shift(top1));
        m0 = top0;
        m1 = top1;
        l0 *= down0;
        l1 *= down1;
        scale_rows(out, down0, down1);
      }
      weigh_rows(s, finite_shift(m0), finite_shift(m1), l0, l1);
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++) {
        /* The scores already have the layout of the next mma's left operand. */
        const uint32_t p[4] = {pack2(s[2 * k][0], s[2 * k][1], M()),
                               pack2(s[2 * k][2], s[2 * k][3], M()),
                               pack2(s[2 * k + 1][0], s[2 * k + 1][1], M()),
                               pack2(s[2 * k + 1][2], s[2 * k + 1][3], M())};
#pragma unroll
        for (int n = 0; n < D / (2 * NUMBERS); n++) {
          uint32_t b[4];
          load_matrices_transposed(
              b, v_at + tile_byte<PIECES>(k * 16 + lane % 16, 2 * n + lane / 16));
          if constexpr (F8) {
#pragma unroll
            for (int h = 0; h < 2; h++) { /* a piece has keys 0-7 and 8-15 of 16 dims */
              const uint32_t x = __byte_perm(b[2 * h], 0, 0x3120);
              const uint32_t y = __byte_perm(b[2 * h + 1], 0, 0x3120);
              mma(out[4 * n + 2 * h], p, f8_to_f16(x), f8_to_f16(y), M());
              mma(out[4 * n + 2 * h + 1], p, f8_to_f16(x >> 16), f8_to_f16(y >> 16), M());
            }
          } else {
            mma(out[2 * n], p, b[0], b[1], M());
            mma(out[2 * n + 1], p, b[2], b[3], M());
          }
        }
      }
      used = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      tile += place.team();
      if (tile < piece_end) continue;
    }

    /* The sequence or the share ends here. */
    const query_rows rows = unit_rows(place, seq, unit);
    if constexpr (H::ACTIVE) { /* a head may hide what others see: see paged_mend.cuh */
      float all[2] = {};
#pragma unroll
      for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) all[c / 2] += out[n][c];
      l0 += all[0] * 0.f;
      l1 += all[1] * 0.f;
    }
    l0 = warp_sum<4>(l0);
    l1 = warp_sum<4>(l1);
    __syncwarp(); /* the last tile was read */
    if (lane % 4 == 0) {
      states[warp][row0] = make_float2(m0, l0);
      states[warp][row1] = make_float2(m1, l1);
      if (lane == 0) sums_at[warp] = warp * STAGES + used;
    }
    if (used >= 0) {
      float *const sums = (float *)(ring + used * shape::STAGE_BYTES);
      auto keep = [&](int row, int c) {
        if (row >= rows.count) return;
        float *const to = sums + row * D;
#pragma unroll
        for (int n = 0; n < D / 8; n++) { /* rotated, so that rows are in different banks */
          if constexpr (F8) {
            to[dim_of<F8>(n, 0) ^ row0 * 8] = out[n][c];
            to[dim_of<F8>(n, 1) ^ row0 * 8] = out[n][c + 1];
          } else { /* neighbours */
            *(float2 *)(to + (dim_of<F8>(n, 0) ^ row0 * 8)) = make_float2(out[n][c],
                                                                          out[n][c + 1]);
          }
        }
      };
      keep(row0, 0);
      keep(row1, 2);
    }
    named_sync(team + 1, place.team() * WARP);
    const bool starts = share_begin <= seq_begin, ends = seq_begin + tiles <= share_end;
    const int64_t own_part = starts && ends ? -1
                                            : place.part(share, seq, a.seqs, unit, starts);
#pragma unroll 1
    for (int i = (member * WARP + lane) * 4; i < rows.count * D;
         i += place.team() * WARP * 4) {
      const int r = i / D, dim = i % D, first = warp - member;
      if (dim >= head_dim) continue;
      float m = -INFINITY, l = 0.f, x[4] = {};
#pragma unroll 1
      for (int w = first; w < first + place.team(); w++) m = fmaxf(m, states[w][r].x);
#pragma unroll 1
      for (int w = first; w < first + place.team(); w++) {
        const float2 state = states[w][r];
        if (state.y == 0.f) continue; /* it had no tile of this sequence, or no key */
        const float weight = exp2_fast(state.x - m);
        float part[4];
        load_floats((const float *)(shared + sums_at[w] * shape::STAGE_BYTES) + r * D +
                        (dim ^ (r & 7) * 8),
                    part);
        l += weight * state.y;
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] += weight * part[e];
      }
      write_part(a, place, own_part, rows, r, dim, x, m, l, value_scale);
    }
    if (piece_end == share_end) break;
    named_sync(team + 1, place.team() * WARP); /* the sums were read */
    seq_begin += tiles;
    length = length_of(++seq);
    tiles = plan.tiles(length);
    fresh = true;
  }
}

template <class T, int D, bool F8>
__global__ void __maxnreg__((decode_shape<D, F8>::REGISTERS))
    paged_decode(const __grid_constant__ kvl_paged_attention_args a,
                 const __grid_constant__ split_place place) {
  decode<T, D, F8>(a, place, no_hook());
}

}  // namespace kvl

#endif
