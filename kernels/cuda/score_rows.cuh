/* Scores of every block of every sequence: the shared part of score_minmax, score_mean and
 * score_max_qk.
 *
 * What is scored is an item: a block by its summary rows, or a token by its K row. A block
 * of threads takes `each` consecutive blocks of one (sequence, KV head). As in
 * paged_f32.cuh each of its warps is a pipeline of asynchronous copies of tiles, and a row
 * is spread over LANES lanes of 8 dims: a warp holds SIDE = 32 / LANES items side by side,
 * four times in a row, and joins the four sums per lane and head with 5 shuffles. Heads go
 * by in fours, whose chains of shuffles overlap. The group's queries lie in shared memory
 * as floats, padded with zero heads.
 *
 * Versions, 16 x 32K, block 16, bf16, group 4 and 8, microseconds of minmax, mean and
 * max_qk on an H100, 2026-11-20:
 *   1  rows loaded into registers, no pipeline (L2 left dirty)  103 131   57 72   1130 1511
 *   2  rings of copies, one head at a time, queries with bank
 *      conflicts, blocks of about 250 rows                       60  72   40 54    480  926
 *   3  this one: four heads at a time, one wave                  57  64   34 45    536  669
 *
 * Maxima of tokens meet in shared memory as ordered integers, whose maximum does not depend
 * on who comes first. */
#ifndef KVL_CUDA_SCORE_ROWS_CUH
#define KVL_CUDA_SCORE_ROWS_CUH

#include "paged.cuh"

namespace kvl {

enum score_kind { SCORE_MINMAX, SCORE_MEAN, SCORE_MAX_QK };

/* One call, whatever its kind. An item's row starts at
 *   block * block_stride + kv_head * head_stride + token in block * head_dim */
struct score_call {
  const void *q, *rows;
  const int32_t *tables, *lens;
  float *scores;
  int64_t seqs, heads, kv_heads, head_dim, max_blocks, blocks, block_stride, head_stride;
  int block_size, group, dtype, rows_dtype;
};

template <class T, int D, score_kind KIND> struct score_shape {
  static constexpr int WARPS = 4, STAGES = 3, ROWS = KIND == SCORE_MINMAX ? 2 : 1;
  static constexpr int LANES = D / 8, SIDE = WARP / LANES, BATCH = 4 * SIDE;
  static constexpr int ITEMS = ROWS == 2 ? BATCH : 2 * BATCH;   /* of a tile: 4 or 8 KiB */
  static constexpr int PIECES = D * (int)sizeof(T) / 16, NUMBERS = WIDE<T>;
  static constexpr int PER_LANE = PIECES / LANES;
  static constexpr int ROW_BYTES = PIECES * 16, STAGE_BYTES = ITEMS * ROWS * ROW_BYTES;
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
  static_assert(ITEMS <= WARP, "a lane looks up an item");
};

/* One dim's part of a score. Of min and max the one that q's sign asks for, picked without
 * a branch: q * it is the larger product. */
template <score_kind KIND>
__device__ __forceinline__ float score_term(float q, const float (&x)[8], const float (&y)[8],
                                            int e, float sum) {
  if constexpr (KIND != SCORE_MINMAX) return sum + q * x[e];
  else {
    uint32_t sign = (uint32_t)(__float_as_int(q) >> 31);
    uint32_t pick = (__float_as_uint(x[e]) & sign) | (__float_as_uint(y[e]) & ~sign);
    return sum + q * __uint_as_float(pick);
  }
}

template <class T, int D, score_kind KIND>
__global__ void __launch_bounds__(score_shape<T, D, KIND>::WARPS * WARP, 4)
score_rows(const __grid_constant__ score_call a, int parts, int each) {
  using shape = score_shape<T, D, KIND>;
  constexpr int STAGES = shape::STAGES, WARPS = shape::WARPS, ITEMS = shape::ITEMS;
  constexpr int LANES = shape::LANES, SIDE = shape::SIDE, PIECES = shape::PIECES;
  constexpr int ROWS = shape::ROWS, N = shape::NUMBERS, THREADS = WARPS * WARP;
  extern __shared__ __align__(128) char shared[];
  const int group = (int)(a.heads / a.kv_heads), head_dim = (int)a.head_dim;
  const int padded = (group + 3) / 4 * 4;
  float *q = (float *)(shared + shape::RING_BYTES);                 /* [padded][D] */
  uint32_t *best = (uint32_t *)(q + padded * D);                    /* [each][group] */

  const int64_t seq = blockIdx.x / parts, kv_head = blockIdx.y, length = a.lens[seq];
  const int64_t first = (int64_t)(blockIdx.x % parts) * each;       /* block */
  const int64_t all = min((length + a.block_size - 1) / a.block_size, a.max_blocks);
  const int blocks = (int)min((int64_t)each, a.max_blocks - first);
  const int count = (int)max(min(all - first, (int64_t)blocks), (int64_t)0);   /* valid */
  float *scores = a.scores + (seq * a.kv_heads + kv_head) * a.max_blocks + first;
  for (int b = count + threadIdx.x; b < blocks; b += THREADS) scores[b] = -INFINITY;
  if (count == 0) return;

  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int lane_key = lane % LANES, side = lane / LANES;
  const int per_block = KIND == SCORE_MAX_QK ? a.block_size : 1;    /* items */
  const int items = KIND == SCORE_MAX_QK
                        ? (int)min(length - first * a.block_size, (int64_t)count * per_block)
                        : count;
  const int32_t *table = a.tables + seq * a.max_blocks + first;
  const T *rows = (const T *)a.rows + kv_head * a.head_stride;
  char *ring = shared + warp * STAGES * shape::STAGE_BYTES;
  const uint32_t ring_at = shared_address(ring);

  auto find = [&](int tile) {   /* the item's row, or -1 */
    int item = tile * ITEMS + lane;
    if (lane >= ITEMS || item >= items) return -1ll;
    int block = item / per_block;
    int64_t physical = table[block];
    if (physical < 0 || physical >= a.blocks) return -1ll;
    int64_t token = item - block * per_block;
    return (long long)(physical * a.block_stride + token * head_dim);
  };
  auto fetch = [&](int stage, long long offset) {
    uint32_t to = ring_at + stage * shape::STAGE_BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < ITEMS * PIECES / WARP; i++) {
      int piece = (i * WARP + lane) % PIECES;
      long long at = __shfl_sync(ALL_LANES, offset, (i * WARP + lane) / PIECES);
      bool valid = at >= 0 && piece * N < head_dim;
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        copy_async(to + i * WARP * 16 + r * ITEMS * shape::ROW_BYTES,
                   valid ? rows + at + r * a.kv_heads * head_dim + piece * N : rows, valid);
    }
  };
  /* This lane's 8 dims are pieces lane_key, lane_key + LANES, ... of a row. */
  auto load_row = [&](const char *row, float (&x)[8]) {
#pragma unroll
    for (int p = 0; p < shape::PER_LANE; p++) {
      float part[N];
      load_floats((const T *)(row + (p * LANES + lane_key) * 16), part);
#pragma unroll
      for (int e = 0; e < N; e++) x[p * N + e] = part[e];
    }
  };

  int tile = warp;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    fetch(s, find(tile + s * WARPS));
    copy_commit();
  }
  /* Queries in the lanes' order, [2][LANES][4] a head: a lane reads its 8 dims as two
   * vectors, next to its neighbours'. */
  for (int i = threadIdx.x; i < padded * D; i += THREADS) {
    int h = i / D, e = i % 4 + i % D / (D / 2) * 4;
    int d = (e / N * LANES + i / 4 % LANES) * N + e % N;
    int64_t row = seq * a.heads + kv_head * group + h;
    q[i] = h < group && d < head_dim ? load_any(a.q, a.dtype, row * head_dim + d) : 0.f;
  }
  if (KIND == SCORE_MAX_QK)
    for (int i = threadIdx.x; i < count * group; i += THREADS) best[i] = order_key(-INFINITY);
  __syncthreads();

  const bool is_max = a.group == KVL_GROUP_MAX;
  const bool alone = per_block % shape::BATCH == 0;   /* a batch never spans two blocks */
  const int own = (lane & (LANES / 2) ? 2 : 0) + (lane & (LANES / 4) ? 1 : 0);
  long long next = find(tile + (STAGES - 1) * WARPS);
  for (int stage = 0; tile * ITEMS < items;
       tile += WARPS, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    copy_wait<STAGES - 2>();
    __syncwarp();   /* every lane's copies are in, and the last tile's readers are done */
    fetch(stage == 0 ? STAGES - 1 : stage - 1, next);
    copy_commit();
    next = find(tile + STAGES * WARPS);
#pragma unroll 1
    for (int batch = 0; batch < ITEMS; batch += shape::BATCH) {
      const char *at = ring + stage * shape::STAGE_BYTES + (batch + side) * shape::ROW_BYTES;
      float x[4][8], y[ROWS == 2 ? 4 : 1][8];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        load_row(at + u * SIDE * shape::ROW_BYTES, x[u]);
        if constexpr (ROWS == 2) load_row(at + (ITEMS + u * SIDE) * shape::ROW_BYTES, y[u]);
      }
      const int item = tile * ITEMS + batch + own * SIDE + side;   /* this lane's */
      const int block = min(item, items - 1) / per_block;
      float joined = is_max ? -INFINITY : 0.f;
      for (int h0 = 0; h0 < group; h0 += 4) {
        float score[4];
#pragma unroll
        for (int h = 0; h < 4; h++) {
          const float *from = q + (h0 + h) * D + lane_key * 4;
          float sums[4] = {}, low[4], high[4];
          load_floats(from, low);
          load_floats(from + D / 2, high);
#pragma unroll
          for (int e = 0; e < 8; e++)
#pragma unroll
            for (int u = 0; u < 4; u++)
              sums[u] = score_term<KIND>(e < 4 ? low[e % 4] : high[e % 4], x[u],
                                         y[ROWS == 2 ? u : 0], e, sums[u]);
          score[h] = sum_of_four<LANES>(sums, lane);
          if (KIND == SCORE_MAX_QK) score[h] = item < items ? score[h] : -INFINITY;
          else if (h0 + h < group)
            joined = is_max ? fmaxf(joined, score[h]) : joined + score[h];
        }
        if (KIND != SCORE_MAX_QK) continue;
        if (alone) {   /* the lane's one of the four heads, over all items of the batch */
          float most = max_of_four<LANES>(score, lane);
#pragma unroll
          for (int step = LANES; step < WARP; step *= 2)
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
          if (lane < LANES && lane % (LANES / 4) == 0 && h0 + own < group)
            atomicMax(&best[block * group + h0 + own], order_key(most));
        } else if (lane_key % (LANES / 4) == 0 && item < items) {
#pragma unroll
          for (int h = 0; h < 4; h++)
            if (h0 + h < group) atomicMax(&best[block * group + h0 + h], order_key(score[h]));
        }
      }
      if (KIND != SCORE_MAX_QK && lane_key % (LANES / 4) == 0 && item < items)
        scores[item] = is_max ? joined : joined / (float)group;
    }
  }
  copy_wait<0>();
  if (KIND != SCORE_MAX_QK) return;
  __syncthreads();
  for (int b = threadIdx.x; b < count; b += THREADS) {
    float joined = is_max ? -INFINITY : 0.f;
    for (int h = 0; h < group; h++) {
      float score = order_value(best[b * group + h]);
      joined = is_max ? fmaxf(joined, score) : joined + score;
    }
    scores[b] = is_max ? joined : joined / (float)group;
  }
}

/* Any head_dim, alignment and group: one warp an item's block. */
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
  const int64_t items = KIND == SCORE_MAX_QK
                            ? min((int64_t)a.block_size, length - block * a.block_size) : 1;
  float joined = is_max ? -INFINITY : 0.f;
  for (int h = 0; inside && h < group; h++) {
    const int64_t q = (seq * a.heads + kv_head * group + h) * a.head_dim;
    float score = -INFINITY;
    for (int64_t t = 0; t < items; t++) {
      const int64_t row = physical * a.block_stride + kv_head * a.head_stride + t * a.head_dim;
      float sum = 0.f;
      for (int64_t d = lane; known && d < a.head_dim; d += WARP) {
        float x[8], y[8];
        x[0] = load_any(a.rows, a.rows_dtype, row + d);
        if (KIND == SCORE_MINMAX)
          y[0] = load_any(a.rows, a.rows_dtype, row + a.kv_heads * a.head_dim + d);
        sum = score_term<KIND>(load_any(a.q, a.dtype, q + d), x, y, 0, sum);
      }
      sum = warp_sum(sum);
      score = KIND == SCORE_MAX_QK ? fmaxf(score, sum) : sum;
    }
    joined = is_max ? fmaxf(joined, score) : joined + score;
  }
  if (lane == 0)
    a.scores[(seq * a.kv_heads + kv_head) * a.max_blocks + block] =
        !inside ? -INFINITY : is_max ? joined : joined / (float)group;
}

template <class T, int D, score_kind KIND>
int launch_score_dim(const score_call &a, const kvl_cuda_queue *q) {
  using shape = score_shape<T, D, KIND>;
  int64_t group = a.heads / a.kv_heads, per_block = KIND == SCORE_MAX_QK ? a.block_size : 1;
  /* Blocks a block of threads takes: one wave of four blocks of threads an SM, but two full
   * turns of its rings or more. */
  int64_t least = (2 * shape::WARPS * shape::ITEMS + per_block - 1) / per_block;
  int64_t parts = 4 * (int64_t)q->sm_count / (a.seqs * a.kv_heads);
  int64_t each = (a.max_blocks + (parts > 1 ? parts : 1) - 1) / (parts > 1 ? parts : 1);
  if (each < least) each = least;
  if (each > a.max_blocks) each = a.max_blocks;
  int64_t bytes = shape::RING_BYTES + (group + 3) / 4 * 4 * D * 4;
  if (KIND == SCORE_MAX_QK) {   /* at most 16 KiB of maxima, as far as it depends on `each` */
    int64_t most = 4096 / (group > 0 ? group : 1);
    if (each > most) each = most > 0 ? most : 1;
    bytes += each * group * 4;
  }
  parts = (a.max_blocks + each - 1) / each;
  if (bytes > q->shared_optin) return KVL_ERR_UNSUPPORTED;
  int status = allow_shared<score_rows<T, D, KIND>>(q, q->shared_optin);
  if (status < 0) return status;
  dim3 grid((unsigned)(parts * a.seqs), (unsigned)a.kv_heads);
  score_rows<T, D, KIND><<<grid, shape::WARPS * WARP, bytes, q->stream>>>(a, (int)parts,
                                                                       (int)each);
  return KVL_OK;
}

template <score_kind KIND> int launch_score(const score_call &a, const kvl_cuda_queue *q) {
  if (a.seqs == 0 || a.max_blocks == 0 || a.kv_heads == 0) return KVL_OK;
  int status = KVL_ERR_UNSUPPORTED;
  if (a.head_dim % 8 == 0 && a.head_dim > 0 && a.head_dim <= 256 && aligned16(a.rows)) {
    KVL_CUDA_BY_FLOAT(a.rows_dtype, T, {
      if (a.head_dim <= 64) status = launch_score_dim<T, 64, KIND>(a, q);
      else if (a.head_dim <= 128) status = launch_score_dim<T, 128, KIND>(a, q);
      else status = launch_score_dim<T, 256, KIND>(a, q);
    })
  }
  if (status == KVL_ERR_UNSUPPORTED) {
    int64_t parts = (a.max_blocks + 256 / WARP - 1) / (256 / WARP);
    dim3 grid((unsigned)(parts * a.seqs), (unsigned)a.kv_heads);
    score_rows_any<KIND><<<grid, 256, 0, q->stream>>>(a, (int)parts);
    status = KVL_OK;
  }
  return status < 0 ? status : kvl__cuda_launched();
}

/* The rows of a summary [blocks, ROWS, kv_heads, head_dim]. */
template <score_kind KIND, class A>
int launch_score_summary(const A &a, const kvl_cuda_queue *q) {
  int64_t row = a.kv_heads * a.head_dim, rows = KIND == SCORE_MINMAX ? 2 : 1;
  return launch_score<KIND>({a.q, a.summary, a.tables, a.lens, a.scores, a.seqs, a.heads,
                             a.kv_heads, a.head_dim, a.max_blocks, a.blocks, rows * row,
                             a.head_dim, a.block_size, a.group, a.dtype, a.summary_dtype}, q);
}

}  // namespace kvl

#endif
