/* Scores of every block of every sequence: the shared part of score_minmax, score_mean and
 * score_max_qk.
 *
 * An item gets a score: it is a block with its summary rows, or a token with its K row. A
 * thread block takes `each` consecutive blocks of one (sequence, KV head). A tile is 16
 * items, the rows of an m16n8k16; the group's query heads are its 8 columns, and larger
 * groups take several passes over a tile. The bound by min and max is a matrix product too,
 * with q split by sign:
 *   sum_d max(q_d min_d, q_d max_d) = sum_d min(q_d, 0) min_d + max(q_d, 0) max_d.
 * score_mma.cuh has the products, which the kernels of expressions share. Many heads over
 * 16-bit rows have a kernel of their own on Hopper, score_wgmma.cuh.
 *
 * As in paged_decode.cuh each warp is its own pipeline of asynchronous copies. Thread blocks
 * for the same range of blocks and different KV heads are neighbours in the grid: what they
 * read is adjacent in memory.
 *
 * The maxima over tokens are joined in shared memory as ordered integers, so the result does
 * not depend on which comes first. */
#ifndef KVL_CUDA_SCORE_ROWS_CUH
#define KVL_CUDA_SCORE_ROWS_CUH

#include <algorithm>

#include "args/select.h"
#include "cuda/select/score_wgmma.cuh"
#include "cuda/strip.cuh"

namespace kvl {

/* by_tiles: the tiles of a block; SCORE_TILES only. */
template <class T, int D, score_kind KIND>
__global__ void __launch_bounds__(score_shape<T, D, KIND>::WARPS *WARP,
                                  score_shape<T, D, KIND>::BLOCKS)
    score_rows(const __grid_constant__ score_call a, int parts, int each, int terms,
               short_divisor by_tiles) {
  using shape = score_shape<T, D, KIND>;
  constexpr bool OF_TOKENS = KIND == SCORE_MAX_QK || KIND == SCORE_TILES;
  constexpr int STAGES = shape::STAGES, WARPS = shape::WARPS, ITEMS = shape::ITEMS;
  constexpr int PIECES = shape::PIECES, ROWS = shape::ROWS, N = WIDE<T>;
  extern __shared__ __align__(128) char shared[];
  const int group = (int)(a.heads / a.kv_heads), padded = (group + 7) / 8 * 8;
  const int head_dim = (int)a.head_dim, block_size = a.block_size;
  uint32_t *known = (uint32_t *)(shared + shape::RING_BYTES); /* bit i: item i of a tile */
  uint4 *q = (uint4 *)(shared + shape::SHARED_BYTES);         /* [terms][ROWS][padded][D] */
  float *unscale = (float *)(q + terms * ROWS * padded * (D / 8)); /* [padded] */
  uint32_t *best = (uint32_t *)(unscale + padded);                 /* [each][group] */

  const uint32_t kv_heads = (uint32_t)a.kv_heads;
  const uint32_t kv_head = blockIdx.x % kv_heads, range = blockIdx.x / kv_heads;
  const int64_t seq = range / parts, first = (int64_t)(range % parts) * each; /* block */
  const int blocks = (int)min((int64_t)each, a.max_blocks - first);
  const int32_t *table = a.tables + seq * a.max_blocks + first;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

  score_queries<T, D, KIND> queries = {a, seq * a.heads + kv_head * group, group, padded, {}};
  let_next_start();
  wait_for_previous();
  const int64_t length = a.lens[seq];
  queries.begin();
  /* Looks up the block of a tile, or of this lane's item in the tile, while the length is
   * still loading. */
  auto block_of = [&](int tile) {
    if constexpr (KIND == SCORE_TILES) return tile / by_tiles;
    const int item = tile * ITEMS + lane % ITEMS;
    return KIND == SCORE_MAX_QK ? item / block_size : item;
  };
  auto look = [&](int tile) {
    const int block = block_of(tile);
    return block < blocks ? table[block] : -1;
  };
  int ahead[STAGES - 1];
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) ahead[s] = look(warp + s * WARPS);

  const int64_t all = min((length + block_size - 1) / block_size, a.max_blocks);
  const int count = (int)max(min(all - first, (int64_t)blocks), (int64_t)0); /* valid */
  float *scores = a.scores + (seq * kv_heads + kv_head) * a.max_blocks + first;
  for (int b = count + threadIdx.x; b < blocks; b += WARPS * WARP) scores[b] = -INFINITY;
  if (count == 0) return;
  int items = count;
  if (OF_TOKENS) items = (int)min(length - first * block_size, (int64_t)count * block_size);
  const T *rows = (const T *)a.rows + kv_head * a.head_stride;
  const uint32_t stride = (uint32_t)a.block_stride;
  const uint32_t next_row = kv_heads * head_dim; /* from min to max */
  char *ring = shared + warp * STAGES * shape::TILE_BYTES;
  const uint32_t ring_at = shared_address(ring);
  known += warp * STAGES;
  const uint64_t once = read_once();

  auto fetch = [&](int stage, int tile, int physical) {
    const int item = tile * ITEMS + lane % ITEMS;
    const bool valid = item < items && physical >= 0 && physical < a.blocks;
    const uint32_t mask = __ballot_sync(ALL_LANES, valid);
    if (lane == 0) known[stage] = mask;
    /* Unknown blocks are not read; a tile of tokens has one block for all lanes. */
    if (KIND == SCORE_TILES ? mask == 0 : !valid) physical = 0;
    int token = 0; /* of the tile's first row, or of the item; counted within its block */
    if constexpr (KIND == SCORE_TILES) token = tile * ITEMS - block_of(tile) * block_size;
    if constexpr (KIND == SCORE_MAX_QK) token = item - block_of(tile) * block_size;
#pragma unroll
    for (int i = 0; i < ITEMS * PIECES / WARP; i++) {
      const int row = (i * WARP + lane) / PIECES, piece = (i * WARP + lane) % PIECES;
      const bool inside = piece * N < head_dim, has = (mask >> row & 1) && inside;
      uint32_t block = physical, at = token + row;
      if constexpr (KIND != SCORE_TILES) block = __shfl_sync(ALL_LANES, physical, row);
      if constexpr (KIND == SCORE_MAX_QK) at = __shfl_sync(ALL_LANES, token, row);
      const T *from = rows + (inside ? piece * N : 0) + (uint64_t)block * stride;
      if constexpr (OF_TOKENS) from += at * head_dim;
      const uint32_t to = ring_at + stage * shape::TILE_BYTES +
                          score_piece<PIECES>(row, piece) * 16;
      copy_async(to, from, has, once); /* otherwise zeros, so that no NaN gets in */
      if constexpr (ROWS == 2)
        copy_async(to + ITEMS * shape::ROW_BYTES, from + next_row, has, once);
    }
  };

#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    fetch(s, warp + s * WARPS, ahead[s]);
    copy_commit();
  }
  queries.finish(terms, q, unscale);
  if constexpr (OF_TOKENS)
    for (int i = threadIdx.x; i < count * group; i += WARPS * WARP)
      best[i] = order_key(-INFINITY);
  __syncthreads();

  const bool is_max = a.group == KVL_GROUP_MAX;
  const int row0 = lane / 4, column = lane % 4 * 2;
  int tile = warp, next = look(warp + (STAGES - 1) * WARPS);
  for (int stage = 0; tile * ITEMS < items;
       tile += WARPS, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    copy_wait<STAGES - 2>();
    __syncwarp(); /* all copies have arrived, and the last tile was read */
    fetch(stage == 0 ? STAGES - 1 : stage - 1, tile + (STAGES - 1) * WARPS, next);
    copy_commit();
    next = look(tile + STAGES * WARPS);

    const uint4 *at = (const uint4 *)(ring + stage * shape::TILE_BYTES);
    const uint32_t valid = known[stage] >> row0; /* bits 0 and 8: this lane's rows */
    float joined[2] = {is_max ? -INFINITY : 0.f, is_max ? -INFINITY : 0.f};
    auto take =
        [&](const float(&sums)[4],
            int h0) { /* of eight heads */
                      float c[4];
#pragma unroll
                      for (int i = 0; i < 4; i++) {
                        const int head = h0 + column + i % 2;
                        const bool has = valid >> i / 2 * 8 & 1;
                        c[i] = has ? sums[i] * unscale[head] : -INFINITY;
                        if (head < group)
                          joined[i / 2] = is_max ? fmaxf(joined[i / 2], c[i])
                                                 : joined[i / 2] + c[i];
                      }
                      if constexpr (
                          KIND == SCORE_TILES) { /* lanes of odd rows keep the second head */
                        const bool odd = row0 & 1;
                        const float first = fmaxf(c[0], c[2]), second = fmaxf(c[1], c[3]);
                        float keep = odd ? second : first;
                        const float give = odd ? first : second;
                        keep = fmaxf(keep, __shfl_xor_sync(ALL_LANES, give, 4));
                        keep = fmaxf(keep, __shfl_xor_sync(ALL_LANES, keep, 8));
                        keep = fmaxf(keep, __shfl_xor_sync(ALL_LANES, keep, 16));
                        const int head = h0 + column + odd;
                        if (lane < 8 && head < group)
                          atomicMax(&best[block_of(tile) * group + head], order_key(keep));
                      } else if constexpr (KIND == SCORE_MAX_QK) {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                          const int head = h0 + column + i % 2,
                                    item = tile * ITEMS + row0 + i / 2 * 8;
                          if (head < group && item < items)
                            atomicMax(&best[item / block_size * group + head],
                                      order_key(c[i]));
                        }
                      }
        };
    /* If there are many heads, four times eight of them read a tile's rows together. */
    int h0 = 0;
    constexpr int USED = (1 << ROWS) - 1, TOGETHER = 4;
#pragma unroll 1
    for (; h0 + 8 * TOGETHER <= padded; h0 += 8 * TOGETHER) {
      float sums[TOGETHER][4];
      score_products<T, D, ROWS, USED, D, TOGETHER>(sums, at, q, h0 + row0, padded, terms);
#pragma unroll
      for (int g = 0; g < TOGETHER; g++) take(sums[g], h0 + 8 * g);
    }
#pragma unroll 1
    for (; h0 < group; h0 += 8) {
      float sums[1][4];
      score_products<T, D, ROWS>(sums, at, q, h0 + row0, padded, terms);
      take(sums[0], h0);
    }
    if constexpr (!OF_TOKENS) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int item = tile * ITEMS + row0 + i * 8;
        const float x = is_max ? warp_max<4>(joined[i]) : warp_sum<4>(joined[i]) / group;
        if (lane % 4 == 0 && item < items) scores[item] = x;
      }
    }
  }
  copy_wait<0>();
  if constexpr (OF_TOKENS) {
    __syncthreads();
    for (int b = threadIdx.x; b < count; b += WARPS * WARP) {
      float joined = is_max ? -INFINITY : 0.f;
#pragma unroll 4
      for (int h = 0; h < group; h++) {
        float score = order_value(best[b * group + h]);
        joined = is_max ? fmaxf(joined, score) : joined + score;
      }
      scores[b] = is_max ? joined : joined / group;
    }
  }
}

/* G times 16 summaries of 16-bit numbers in shared memory, each of ROWS rows, for many heads, or
 * heads whose queries do not fit beside them, as those of latents. The warps share the heads,
 * eight at a time, and load their queries as they multiply. A row of a tile takes a multiple of 8
 * pieces and 4 more, so that 8 lanes hit every bank once. */
__host__ __device__ __forceinline__ int wide_row(int head_dim) {
  return (head_dim / 8 + 7) / 8 * 8 + 4; /* in pieces of 16 bytes */
}
__device__ __forceinline__ uint32_t below_zero(uint32_t x, __nv_bfloat16) {
  const __nv_bfloat162 y = __hmin2_nan((const __nv_bfloat162 &)x, __nv_bfloat162());
  return (const uint32_t &)y;
}
__device__ __forceinline__ uint32_t below_zero(uint32_t x, __half) {
  const __half2 y = __hmin2_nan((const __half2 &)x, __half2());
  return (const uint32_t &)y;
}
__device__ __forceinline__ uint32_t above_zero(uint32_t x, __nv_bfloat16) {
  const __nv_bfloat162 y = __hmax2_nan((const __nv_bfloat162 &)x, __nv_bfloat162());
  return (const uint32_t &)y;
}
__device__ __forceinline__ uint32_t above_zero(uint32_t x, __half) {
  const __half2 y = __hmax2_nan((const __half2 &)x, __half2());
  return (const uint32_t &)y;
}
/* Eight neighbours of q, as T or, for a sum of three bf16 terms, as numbers of one term. */
template <class T, class Q> struct wide_queries {
  uint4 all;
  __device__ __forceinline__ wide_queries(const Q *q, bool inside) : all() {
    if (inside) all = *(const uint4 *)q;
  }
  /* Calls f(term) with the factor of row `r` of a summary. If there are two rows, the first
   * is the minimum, and its factor is the negative part. */
  template <int ROWS, class F> __device__ __forceinline__ void each_term(int r, F f) const {
    auto part = [&](uint32_t x) {
      if constexpr (ROWS == 1) return x;
      else return r == 0 ? below_zero(x, T()) : above_zero(x, T());
    };
    f(make_uint4(part(all.x), part(all.y), part(all.z), part(all.w)));
  }
};
template <> struct wide_queries<__nv_bfloat16, float> {
  float all[8] = {};
  __device__ __forceinline__ wide_queries(const float *q, bool inside) {
    if (inside) load_floats(q, all);
  }
  template <int ROWS, class F> __device__ __forceinline__ void each_term(int r, F f) const {
    float rest[2][4];
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float x = all[e]; /* NaN stays */
      rest[e / 4][e % 4] = ROWS == 1 ? x : r == 0 ? (x > 0.f ? 0.f : x) : (x < 0.f ? 0.f : x);
    }
#pragma unroll
    for (int t = 0; t < 3; t++) {
      const uint2 low = next_term(rest[0]), high = next_term(rest[1]);
      f(make_uint4(low.x, low.y, high.x, high.y));
    }
  }
};

template <class T, class Q, score_kind KIND, int G>
__global__ void __launch_bounds__(256)
    score_rows_wide(const __grid_constant__ score_call a, int tiles) {
  constexpr int ROWS = KIND == SCORE_MINMAX ? 2 : 1, ITEMS = 16 * G, WARPS = 256 / WARP;
  extern __shared__ __align__(16) uint4 rows[]; /* [ROWS][ITEMS][row] */
  __shared__ float parts[WARPS][ITEMS];
  const int group = (int)(a.heads / a.kv_heads), head_dim = (int)a.head_dim;
  const int pieces = head_dim / 8, steps = (pieces + 3) / 4, row = wide_row(head_dim);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint32_t kv_head = blockIdx.x % (uint32_t)a.kv_heads;
  const uint32_t at = blockIdx.x / (uint32_t)a.kv_heads;
  const int64_t seq = at / tiles, first = (int64_t)(at % tiles) * ITEMS; /* block */
  let_next_start();
  wait_for_previous();
  const int64_t length = a.lens[seq];
  auto physical_of = [&](int item) {
    const int64_t block = first + item;
    const bool inside = block < a.max_blocks && block * a.block_size < length;
    const int physical = inside ? a.tables[seq * a.max_blocks + block] : -1;
    return physical >= 0 && physical < a.blocks ? physical : -1;
  };
  for (int i = threadIdx.x; i < ROWS * ITEMS * steps * 4; i += 256) {
    const int line = i / (steps * 4), piece = i - line * steps * 4;
    const int physical = physical_of(line % ITEMS);
    uint4 x = {};
    if (physical >= 0 && piece < pieces)
      x = *(const uint4 *)((const T *)a.rows + (int64_t)physical * a.block_stride +
                           (int64_t)(line / ITEMS) * a.kv_heads * head_dim +
                           kv_head * a.head_stride + piece * 8);
    rows[line * row + piece] = x;
  }
  __syncthreads();
  const bool is_max = a.group == KVL_GROUP_MAX;
  float joined[G][2];
#pragma unroll
  for (int g = 0; g < G; g++) joined[g][0] = joined[g][1] = is_max ? -INFINITY : 0.f;
  const uint4 *const x0 = rows + lane / 4 * row;
  for (int h0 = warp * 8; h0 < group; h0 += WARPS * 8) {
    const int mine = min(h0 + lane / 4, group - 1);
    const Q *const q = (const Q *)a.q + (seq * a.heads + kv_head * group + mine) * head_dim;
    /* The tensor cores truncate sums where they should round, so these are short. */
    float sums[G][2][4] = {}, all[G][4] = {};
#pragma unroll(G > 1 ? 1 : 4)
    for (int j = 0; j < steps; j++) {
      const int piece = lane % 4 + 4 * j;
      const wide_queries<T, Q> of(q + 8 * piece, piece < pieces);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        uint32_t a0[G][4], a1[G][4];
#pragma unroll
        for (int g = 0; g < G; g++) {
          const uint4 *const from = x0 + (r * ITEMS + 16 * g) * row + piece;
          const uint4 u = from[0], v = from[8 * row];
          a0[g][0] = u.x, a0[g][1] = v.x, a0[g][2] = u.y, a0[g][3] = v.y;
          a1[g][0] = u.z, a1[g][1] = v.z, a1[g][2] = u.w, a1[g][3] = v.w;
        }
        of.template each_term<ROWS>(r, [&](const uint4 &b) {
#pragma unroll
          for (int g = 0; g < G; g++) {
            mma(sums[g][0], a0[g], b.x, b.y, T());
            mma(sums[g][1], a1[g], b.z, b.w, T());
          }
        });
      }
      if (j % 4 < 3 && j + 1 < steps) continue;
#pragma unroll
      for (int g = 0; g < G; g++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          all[g][i] += sums[g][0][i] + sums[g][1][i];
          sums[g][0][i] = sums[g][1][i] = 0.f;
        }
    }
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float x = all[g][i];
        float &to = joined[g][i / 2];
        if (h0 + lane % 4 * 2 + i % 2 < group) to = is_max ? fmaxf(to, x) : to + x;
      }
  }
#pragma unroll
  for (int g = 0; g < G; g++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float x = is_max ? warp_max<4>(joined[g][i]) : warp_sum<4>(joined[g][i]);
      if (lane % 4 == 0) parts[warp][16 * g + lane / 4 + 8 * i] = x;
    }
  __syncthreads();
  const int item = threadIdx.x;
  if (item >= ITEMS || first + item >= a.max_blocks) return;
  float x = parts[0][item];
  for (int w = 1; w < WARPS; w++) x = is_max ? fmaxf(x, parts[w][item]) : x + parts[w][item];
  a.scores[(seq * a.kv_heads + kv_head) * a.max_blocks + first + item] = physical_of(item) < 0
                                                                             ? -INFINITY
                                                                         : is_max ? x
                                                                                  : x / group;
}

/* For any head_dim, alignment and group: one warp per block of the cache. */
template <score_kind KIND>
__global__ void __launch_bounds__(256)
    score_rows_any(const __grid_constant__ score_call a, int parts) {
  const int64_t seq = blockIdx.x / parts, kv_head = blockIdx.y, length = a.lens[seq];
  const int lane = threadIdx.x % WARP;
  const int64_t block = (int64_t)(blockIdx.x % parts) * (256 / WARP) + threadIdx.x / WARP;
  if (block >= a.max_blocks) return;
  const int group = (int)(a.heads / a.kv_heads);
  const bool is_max = a.group == KVL_GROUP_MAX, inside = block * a.block_size < length;
  const int64_t physical = inside ? a.tables[seq * a.max_blocks + block] : -1;
  const bool known = physical >= 0 && physical < a.blocks;
  constexpr bool OF_TOKENS = KIND == SCORE_MAX_QK || KIND == SCORE_TILES;
  const int64_t items = OF_TOKENS ? min((int64_t)a.block_size, length - block * a.block_size)
                                  : 1;
  const int64_t strip = physical * a.block_stride + kv_head * a.head_stride;
  auto load = [&](int64_t token, int64_t before,
                  int d) { /* `before`: numbers of other rows */
                           const char *const at = (const char *)a.rows + strip;
                           const int64_t in = token * a.head_dim + before + d;
                           float x[1];
                           if (a.rows_dtype == KVL_CODEC_F8_LATENT)
                             load_latent(a.strips, at + token * a.strips.bytes_row, d, x);
                           else if (a.rows_dtype == KVL_CODEC_INT8)
                             x[0] = load_row<int8, 1>(a.strips, at, token, d).at[0];
                           else if (a.rows_dtype == KVL_DTYPE_F8E4M3)
                             x[0] = to_float(((const f8e4m3 *)a.rows)[strip + in]);
                           else x[0] = load_any(a.rows, a.rows_dtype, strip + in);
                           return x[0];
  };
  float joined = is_max ? -INFINITY : 0.f;
  for (int h = 0; known && h < group; h++) {
    const int64_t q = (seq * a.heads + kv_head * group + h) * a.head_dim;
    float score = -INFINITY;
    for (int64_t t = 0; t < items; t++) {
      float sum = 0.f;
      for (int64_t d = lane; d < a.head_dim; d += WARP) {
        const float x = load_any(a.q, a.dtype, q + d);
        const bool high = KIND == SCORE_MINMAX && !(x < 0.f); /* max is the larger one */
        sum += x * load(t, high ? a.kv_heads * a.head_dim : 0, (int)d);
      }
      sum = warp_sum(sum);
      score = OF_TOKENS ? fmaxf(score, sum) : sum;
    }
    joined = is_max ? fmaxf(joined, score) : joined + score;
  }
  if (lane == 0)
    a.scores[(seq * a.kv_heads + kv_head) * a.max_blocks + block] = !known   ? -INFINITY
                                                                    : is_max ? joined
                                                                             : joined / group;
}

/* each: how many blocks a thread block takes; with 0, this function chooses. */
template <class T, int D, score_kind KIND>
int launch_score_dim(const score_call &a, const kvl_cuda_queue *q, int64_t each = 0) {
  using shape = score_shape<T, D, KIND>;
  constexpr bool OF_TOKENS = KIND == SCORE_MAX_QK || KIND == SCORE_TILES;
  const int64_t group = a.heads / a.kv_heads, padded = (group + 7) / 8 * 8;
  const int64_t per_block = OF_TOKENS ? a.block_size : 1;
  const int terms = score_terms<typename score_type<T>::type>(a.dtype);
  int64_t bytes = shape::SHARED_BYTES + terms * shape::ROWS * padded * D * 2 + padded * 4;
  if (each == 0) {
    /* One wave of thread blocks, but at least four tiles each. With tokens at most 64 tiles
     * each: more waves balance better. */
    int64_t fit = q->shared_optin / (bytes + 1024); /* per SM */
    int64_t ranges = std::min<int64_t>(shape::BLOCKS, std::max<int64_t>(fit, 1)) *
                     q->sm_count / (a.seqs * a.kv_heads);
    each = (a.max_blocks + (ranges > 1 ? ranges : 1) - 1) / (ranges > 1 ? ranges : 1);
    each = std::max(each, (4 * shape::ITEMS + per_block - 1) / per_block);
    if (OF_TOKENS) each = std::min(each, (64 * shape::ITEMS + per_block - 1) / per_block);
  }
  if (each > a.max_blocks) each = a.max_blocks;
  if (OF_TOKENS) { /* the part that grows with `each`: at most 8 KiB of maxima */
    int64_t most = 2048 / (group > 0 ? group : 1);
    if (each > most) each = most > 0 ? most : 1;
    bytes += each * group * 4;
  }
  const int64_t parts = (a.max_blocks + each - 1) / each;
  if (bytes > q->shared_optin) return KVL_ERR_UNSUPPORTED;
  int status = allow_shared<score_rows<T, D, KIND>>(q, q->shared_optin);
  if (status < 0) return status;
  const unsigned grid = (unsigned)(parts * a.seqs * a.kv_heads);
  const short_divisor by_tiles(KIND == SCORE_TILES ? a.block_size / shape::ITEMS : 1);
  return launch_programmatic(score_rows<T, D, KIND>, grid, shape::WARPS * WARP, bytes, q, a,
                             (int)parts, (int)each, terms, by_tiles);
}

template <class T, score_kind KIND>
int launch_score_of(const score_call &a, const kvl_cuda_queue *q) {
  if (a.head_dim % WIDE<T> || a.head_dim % 8 || a.head_dim > 256 || !aligned16(a.rows, a.q) ||
      a.block_stride >> 32)
    return KVL_ERR_UNSUPPORTED;
  if (a.head_dim <= 64) return launch_score_dim<T, 64, KIND>(a, q);
  if (a.head_dim <= 128) return launch_score_dim<T, 128, KIND>(a, q);
  return launch_score_dim<T, 256, KIND>(a, q);
}
template <score_kind KIND> int launch_score_of(const score_call &a, const kvl_cuda_queue *q) {
  if (a.rows_dtype == KVL_DTYPE_BF16) return launch_score_of<__nv_bfloat16, KIND>(a, q);
  if (a.rows_dtype == KVL_DTYPE_F16) return launch_score_of<__half, KIND>(a, q);
  if (a.rows_dtype == KVL_DTYPE_F32) return launch_score_of<float, KIND>(a, q);
  if constexpr (KIND != SCORE_MEAN) /* a mean is never f8 */
    if (a.rows_dtype == KVL_DTYPE_F8E4M3) return launch_score_of<f8e4m3, KIND>(a, q);
  return KVL_ERR_UNSUPPORTED;
}

template <class T, class Q, score_kind KIND, int G>
int launch_score_wide(const score_call &a, const kvl_cuda_queue *q) {
  constexpr int ROWS = KIND == SCORE_MINMAX ? 2 : 1;
  if (a.head_dim % 8 || !aligned16(a.rows, a.q) || a.head_stride % 8 || a.block_stride % 8)
    return KVL_ERR_UNSUPPORTED;
  constexpr int MOST = 80 * 1024, ITEMS = 16 * G;
  const int64_t bytes = (int64_t)ROWS * ITEMS * wide_row((int)a.head_dim) * 16;
  const int64_t tiles = (a.max_blocks + ITEMS - 1) / ITEMS,
                blocks = tiles * a.seqs * a.kv_heads;
  if constexpr (G > 1)
    if (a.head_dim > 256 || bytes > MOST || blocks < 2 * q->sm_count)
      return launch_score_wide<T, Q, KIND, G / 2>(a, q);
  if (bytes > MOST) return KVL_ERR_UNSUPPORTED;
  int status = allow_shared<score_rows_wide<T, Q, KIND, G>>(q, MOST);
  if (status < 0) return status;
  return launch_programmatic(score_rows_wide<T, Q, KIND, G>, (unsigned)blocks, 256,
                             (size_t)bytes, q, a, (int)tiles);
}

/* A mean, or least and greatest numbers, for many heads. */
template <score_kind KIND>
int launch_score_wide(const score_call &a, const kvl_cuda_queue *q) {
  constexpr int G = 4;
  if (a.rows_dtype == KVL_DTYPE_BF16 && a.dtype == KVL_DTYPE_BF16)
    return launch_score_wide<__nv_bfloat16, __nv_bfloat16, KIND, G>(a, q);
  if (a.rows_dtype == KVL_DTYPE_BF16 && a.dtype == KVL_DTYPE_F32)
    return launch_score_wide<__nv_bfloat16, float, KIND, G>(a, q);
  if (a.rows_dtype == KVL_DTYPE_F16 && a.dtype == KVL_DTYPE_F16)
    return launch_score_wide<__half, __half, KIND, G>(a, q);
  return KVL_ERR_UNSUPPORTED;
}

template <score_kind KIND> int launch_score(const score_call &a, const kvl_cuda_queue *q) {
  if (a.seqs == 0 || a.max_blocks == 0 || a.kv_heads == 0) return KVL_OK;
  int status = KVL_ERR_UNSUPPORTED;
  if constexpr (KIND != SCORE_TILES) status = launch_score_wgmma<KIND>(a, q);
  if constexpr (KIND == SCORE_MAX_QK)
    if (status == KVL_ERR_UNSUPPORTED && a.block_size % 16 == 0)
      return launch_score<SCORE_TILES>(a, q);
  if (status == KVL_ERR_UNSUPPORTED) status = launch_score_of<KIND>(a, q);
  if constexpr (KIND == SCORE_MEAN || KIND == SCORE_MINMAX)
    if (status == KVL_ERR_UNSUPPORTED) status = launch_score_wide<KIND>(a, q);
  if (status == KVL_ERR_UNSUPPORTED) {
    int64_t parts = (a.max_blocks + 256 / WARP - 1) / (256 / WARP);
    dim3 grid((unsigned)(parts * a.seqs), (unsigned)a.kv_heads);
    score_rows_any<KIND><<<grid, 256, 0, q->stream>>>(a, (int)parts);
    status = KVL_OK;
  }
  return status < 0 ? status : kvl__cuda_launched();
}

/* Scores by the rows of a summary [blocks, ROWS, kv_heads, head_dim]. */
template <score_kind KIND>
int launch_score_summary(const kvl_score_summary &a, const kvl_cuda_queue *q) {
  int64_t row = a.kv_heads * a.head_dim, rows = KIND == SCORE_MINMAX ? 2 : 1;
  return launch_score<KIND>({a.q, a.summary, a.tables, a.lens, a.scores, a.seqs, a.heads,
                             a.kv_heads, a.head_dim, a.max_blocks, a.blocks, rows * row,
                             a.head_dim, a.block_size, a.group, a.dtype, a.summary_dtype},
                            q);
}

}  // namespace kvl

#endif
