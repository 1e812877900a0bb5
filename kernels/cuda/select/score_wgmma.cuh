/* Scores of 16-bit rows for many query heads on a KV head, on Hopper: score_rows.cuh says what
 * is computed, and which calls come here.
 *
 * A product has 64 items as its rows and N heads as its columns. A thread block takes `each`
 * consecutive blocks of one (sequence, KV head), so that it splits its queries once: they lie
 * in shared memory as [terms][rows][parts of 64 dims][N][64], swizzled. Two to four
 * warpgroups each walk over tiles of 64 items, which come in chunks, 64 dims of one row of
 * every item (8 KiB), through a ring of the warpgroup's own. While a chunk is multiplied,
 * its threads begin to copy the one `stages - 1` later, and other warpgroups wait, add or
 * join. More heads than N take several passes over the thread block's items.
 *
 * The tensor cores truncate sums instead of rounding them. So a chain of sums is only one
 * chunk long (two if q has one term), begins with the smallest terms, and is added to other
 * chains in fp32.
 *
 * For 128 heads of 128 dims a chunk takes 256 cycles of the tensor cores for each term of q,
 * and 410 of memory at 4.6 TB/s on 132 SMs. */
#ifndef KVL_CUDA_SCORE_WGMMA_CUH
#define KVL_CUDA_SCORE_WGMMA_CUH

#include <algorithm>

#include "cuda/divide.cuh"
#include "cuda/hopper.cuh"
#include "cuda/programmatic.cuh"
#include "cuda/select/score_queries.cuh"

namespace kvl {

struct score_wgmma_plan {
  int parts, each;   /* thread blocks for a (sequence, KV head), and blocks of each */
  int terms, stages; /* of a number of q; of a ring, 2 ... 6 */
  int heads;         /* of a pass */
  divisor by_block;  /* divides by the block size */
};

/* Shared memory beside queries and rings, of which nvcc makes a multiple of 128 bytes. */
template <score_kind KIND, int N> struct alignas(128) score_wgmma_shared {
  static constexpr int BLOCKS = KIND == SCORE_MAX_QK ? 1024 : 1; /* of a thread block */
  uint32_t most[N]; /* the bits of the largest |q| of a head */
  float unscale[N];
  uint32_t best[BLOCKS]; /* the order_key of a block's score so far */
};
constexpr int SCORE_ITEMS = 64, SCORE_PART = 64, SCORE_CHUNK = SCORE_ITEMS * SCORE_PART * 2;
/* As many warpgroups as there are registers for: they wait in turn. */
template <int N> constexpr int SCORE_WARPGROUPS = N <= 64 ? 4 : N == 96 ? 3 : 2;

#if KVL_SM90A

/* Waits until at most `stages` - 2 of this thread's groups of copies are in flight. */
__device__ __forceinline__ void copy_wait_ring(int stages) {
  if (stages == 2) copy_wait<0>();
  else if (stages == 3) copy_wait<1>();
  else if (stages == 4) copy_wait<2>();
  else if (stages == 5) copy_wait<3>();
  else copy_wait<4>();
}

/* Splits queries head0 ... head0 + count - 1 of all heads into terms; the other columns become
 * zeros. All threads take part. */
template <class T, int ROWS, int N>
__device__ __forceinline__ void score_split_queries(const score_call &a, uint32_t to,
                                                    int64_t head0, int count, int terms,
                                                    uint32_t *most, float *unscale) {
  constexpr int THREADS = SCORE_WARPGROUPS<N> * WARPGROUP, TOGETHER = 4; /* loads in flight */
  const int head_dim = (int)a.head_dim, parts = (head_dim + SCORE_PART - 1) / SCORE_PART;
  const bool scaled = same<T, __half> && a.dtype != KVL_DTYPE_F16;
  auto each_piece = [&](auto f) {
    for (int i0 = threadIdx.x; i0 < parts * N * 8; i0 += TOGETHER * THREADS) {
      float x[TOGETHER][8];
#pragma unroll
      for (int j = 0; j < TOGETHER; j++) {
        const int i = i0 + j * THREADS, head = i / 8 % N;
        const int d = i / (8 * N) * SCORE_PART + i % 8 * 8;
        const bool inside = head < count && d < head_dim; /* past the last part neither */
        if (inside) load_any(a.q, a.dtype, (head0 + head) * head_dim + d, x[j]);
#pragma unroll
        for (int e = 0; e < 8; e++) x[j][e] = inside ? x[j][e] : 0.f;
      }
#pragma unroll
      for (int j = 0; j < TOGETHER; j++) {
        const int i = i0 + j * THREADS;
        if (i < parts * N * 8) f(x[j], i / 8 % N, i / (8 * N), i % 8);
      }
    }
  };
  if (same<T, __half>) {
    for (int h = threadIdx.x; h < N; h += THREADS) most[h] = 0;
    __syncthreads();
    if (scaled)
      each_piece([&](const float(&x)[8], int head, int, int) {
        float top = 0.f;
#pragma unroll
        for (int e = 0; e < 8; e++) top = fmaxf(top, fabsf(x[e]));
        atomicMax(&most[head], __float_as_uint(top));
      });
    __syncthreads();
    for (int h = threadIdx.x; h < N; h += THREADS)
      unscale[h] = 1.f / score_scale(__uint_as_float(most[h]));
  }
  each_piece([&](const float(&x)[8], int head, int part, int piece) {
    const float scale = same<T, __half> ? score_scale(__uint_as_float(most[head])) : 1.f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) { /* row 0, for min, has the negative numbers */
      float left[8];
#pragma unroll
      for (int e = 0; e < 8; e++)
        left[e] = ROWS == 1 || (x[e] < 0.f) == (r == 0) ? x[e] * scale : 0.f;
      for (int t = 0; t < terms; t++) {
        uint32_t term[4];
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          term[e / 2] = pack2(left[e], left[e + 1], T());
          const float2 rounded = unpack2(term[e / 2], T());
          left[e] -= rounded.x, left[e + 1] -= rounded.y;
        }
        store_shared(
            to + ((t * ROWS + r) * parts + part) * (N * 128) + tile_byte<8>(head, piece),
            make_uint4(term[0], term[1], term[2], term[3]));
      }
    }
  });
}

/* A lane has columns 2 (l%4) and + 1 of each eight, of two rows of a warp's 16. Returns the sum
 * over the first `count` columns of the largest of the rows below `rows`. */
template <int N>
__device__ __forceinline__ float sum_of_column_maxima(const float (&x)[N / 2], int count,
                                                      int rows) {
  const int lane = threadIdx.x % WARP;
  float most[N / 4];
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    const int at = i / 2 * 4 + i % 2;
    most[i] = fmaxf(lane / 4 < rows ? x[at] : -INFINITY,
                    lane / 4 + 8 < rows ? x[at + 2] : -INFINITY);
  }
  /* A lane keeps half of its columns, and gives the others to the lane `step` away. */
  int first = 0;
#pragma unroll
  for (int level = 0; level < 3; level++) {
    const int step = 16 >> level, half = N / 8 >> level;
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
      if (i == half) break;
      const float keep = upper ? most[half + i] : most[i];
      const float give = upper ? most[i] : most[half + i];
      most[i] = fmaxf(keep, __shfl_xor_sync(ALL_LANES, give, step));
    }
    first += upper ? half : 0;
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < N / 32; i++) {
    const int column = (first + i) / 2 * 8 + lane % 4 * 2 + (first + i) % 2;
    if (column < count) sum += most[i];
  }
  return warp_sum(sum);
}

#endif

template <class T, score_kind KIND, int N>
__global__ void __launch_bounds__(SCORE_WARPGROUPS<N> *WARPGROUP, 1)
    score_wgmma(const __grid_constant__ score_call a,
                const __grid_constant__ score_wgmma_plan plan) {
#if KVL_SM90A
  constexpr bool OF_TOKENS = KIND == SCORE_MAX_QK, SCALED = same<T, __half>;
  constexpr int ROWS = KIND == SCORE_MINMAX ? 2 : 1, ITEMS = SCORE_ITEMS;
  constexpr int GROUPS = SCORE_WARPGROUPS<N>, THREADS = GROUPS * WARPGROUP;
  extern __shared__ char dynamic[];
  __shared__ score_wgmma_shared<KIND, N> other;
  const int group = (int)(a.heads / a.kv_heads), head_dim = (int)a.head_dim;
  const int parts = (head_dim + SCORE_PART - 1) / SCORE_PART, chunks = parts * ROWS;
  const int stages = plan.stages, block_size = a.block_size;
  const uint32_t kv_heads = (uint32_t)a.kv_heads;
  const uint32_t kv_head = blockIdx.x % kv_heads, range = blockIdx.x / kv_heads;
  const int64_t seq = range / plan.parts, first = (int64_t)(range % plan.parts) * plan.each;
  const int blocks = (int)min((int64_t)plan.each, a.max_blocks - first);
  const int32_t *const table = a.tables + seq * a.max_blocks + first;
  const int mine = threadIdx.x / WARPGROUP;
  const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP, lane = thread % WARP;
  const int term_bytes = chunks * (N * 128);
  const uint32_t q = (shared_address(dynamic) + 1023) & ~1023u;
  const uint32_t ring = q + plan.terms * term_bytes + mine * stages * SCORE_CHUNK;

  let_next_start();
  wait_for_previous();
  const int64_t length = a.lens[seq];
  const int64_t there = min((length + block_size - 1) / block_size, a.max_blocks);
  const int count = (int)max(min(there - first, (int64_t)blocks), (int64_t)0); /* valid */
  float *const scores = a.scores + (seq * kv_heads + kv_head) * a.max_blocks + first;
  for (int b = count + threadIdx.x; b < blocks; b += THREADS) scores[b] = -INFINITY;
  if (count == 0) return;
  int items = count;
  if (OF_TOKENS) items = (int)min(length - first * block_size, (int64_t)count * block_size);
  const bool is_max = a.group == KVL_GROUP_MAX;
  if (OF_TOKENS)
    for (int b = threadIdx.x; b < count; b += THREADS) other.best[b] = order_key(-INFINITY);

  auto block_of = [&](int item) {
    return OF_TOKENS ? (int)plan.by_block.quotient(item) : item;
  };
  auto look = [&](int item) { return item < items ? table[block_of(item)] : -1; };
  auto exists = [&](int physical) { return physical >= 0 && physical < a.blocks; };

  /* A thread copies piece `piece` of rows row0, row0 + 16, ... of a chunk. */
  constexpr int COPIES = ITEMS * 8 / WARPGROUP;
  const int piece = thread % 8, row0 = thread / 8;
  const uint4 *const rows = (const uint4 *)((const T *)a.rows + kv_head * a.head_stride);
  const uint32_t next_row = kv_heads * head_dim / 8; /* from min to max */
  const uint32_t block_pieces = (uint32_t)(a.block_stride / 8);
  constexpr uint32_t NO_ROW = ~0u;
  struct {
    int tile, chunk, stage;
    int ahead[COPIES];     /* the table's entries for the next tile */
    uint32_t from[COPIES]; /* where rows begin, in pieces; NO_ROW: it does not exist */
  } next;
  auto look_ahead = [&](int tile) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) next.ahead[i] = look(tile * ITEMS + row0 + 16 * i);
  };
  auto fetch = [&] {
    if (next.tile * ITEMS < items) {
      if (next.chunk == 0) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
          const int item = next.tile * ITEMS + row0 + 16 * i;
          uint32_t at = next.ahead[i] * block_pieces;
          if (OF_TOKENS) at += (item - block_of(item) * block_size) * (uint32_t)head_dim / 8;
          next.from[i] = exists(next.ahead[i]) ? at : NO_ROW;
        }
        look_ahead(next.tile + GROUPS);
      }
      const uint32_t in_row = next.chunk / ROWS * 8 + piece;
      const bool inside = in_row * 8 < head_dim;
      const uint32_t to = ring + next.stage * SCORE_CHUNK + tile_byte<8>(row0, piece);
      const uint32_t offset = in_row + next.chunk % ROWS * next_row;
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        const bool has = next.from[i] != NO_ROW && inside;
        copy_async(to + i * 16 * 128, rows + (has ? next.from[i] + offset : 0),
                   has); /* otherwise zeros, so that no NaN gets in */
      }
    }
    copy_commit();
    next.stage = next.stage + 1 == stages ? 0 : next.stage + 1;
    if (++next.chunk == chunks) next.chunk = 0, next.tile += GROUPS;
  };

  const int chain = plan.terms == 1 ? 2 : 1; /* chunks */
  for (int head0 = 0; head0 < group; head0 += plan.heads) {
    const int heads = min(plan.heads, group - head0);
    const bool last = head0 + heads == group;
    if (head0 > 0) __syncthreads(); /* the queries of the last pass were read */
    next.tile = mine, next.chunk = next.stage = 0;
    look_ahead(mine);
    for (int s = 0; s < stages - 1; s++) fetch();
    score_split_queries<T, ROWS, N>(a, q, seq * a.heads + kv_head * group + head0, heads,
                                    plan.terms, other.most, other.unscale);
    fence_async();
    __syncthreads();

    int stage = 0;
#pragma unroll 1
    for (int tile = mine; tile * ITEMS < items; tile += GROUPS) {
      const int item0 = tile * ITEMS + warp * 16; /* the warp's first */
      float all[N / 2], sums[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; i++) all[i] = 0.f;
      int of_chain = 0;
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; chunk++) {
        copy_wait_ring(stages);
        fence_async();
        named_sync(1 + mine, WARPGROUP); /* all have it, and have read the previous one */
        const uint64_t x = rows_at<128>(ring + stage * SCORE_CHUNK);
        const int matrix = chunk % ROWS * parts + chunk / ROWS;
        uint64_t y = rows_at<128>(q + (plan.terms - 1) * term_bytes + matrix * (N * 128));
        stage = stage + 1 == stages ? 0 : stage + 1;
        /* Each term has a group of its own: with one group for all terms, ptxas 13.0 put
         * fences between products, or serialised them. */
        bool add = of_chain > 0;
#pragma unroll 1
        for (int t = 0; t < plan.terms; t++) {
          products_begin();
#pragma unroll
          for (int k = 0; k < SCORE_PART / 16; k++)
            product<T>(sums, matrix_plus(x, 32 * k), matrix_plus(y, 32 * k), add || k > 0);
          products_commit();
          add = true;
          y = matrix_plus(y, -term_bytes);
        }
        fetch();
        products_wait<0>();
        settle(sums);
        if (++of_chain < chain && chunk + 1 < chunks) continue;
        of_chain = 0;
#pragma unroll
        for (int i = 0; i < N / 2; i++) all[i] += sums[i];
      }

      if constexpr (SCALED)
#pragma unroll
        for (int i = 0; i < N / 2; i++)
          all[i] *= other.unscale[i / 4 * 8 + lane % 4 * 2 + i % 2];
      const int known[2] = {look(item0 + lane / 4), look(item0 + lane / 4 + 8)};
      /* Adds the result of these heads to that of the previous passes. */
      auto give = [&](int block, float x, bool has) {
        if (head0 > 0) x = is_max ? fmaxf(scores[block], x) : scores[block] + x;
        if (!is_max && last) x /= group;
        scores[block] = has ? x : -INFINITY;
      };
      if (OF_TOKENS && !is_max) { /* blocks of 16, one for each warp */
        const float sum = sum_of_column_maxima<N>(all, heads, items - item0);
        if (lane == 0 && item0 < items) give(item0 / 16, sum, exists(known[0]));
      } else {
        const int columns = heads - lane % 4 * 2; /* column 8 n + e is a head if below */
        float joined[2] = {is_max ? -INFINITY : 0.f, is_max ? -INFINITY : 0.f};
        auto join = [&](auto f) {
#pragma unroll
          for (int i = 0; i < N / 2; i++)
            if (i / 4 * 8 + i % 2 < columns) joined[i / 2 % 2] = f(joined[i / 2 % 2], all[i]);
#pragma unroll
          for (float &x : joined) x = warp_reduce<4>(x, f);
        };
        if (is_max) join(max_op());
        else join(add_op());
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int item = item0 + lane / 4 + 8 * i;
          if (lane % 4 == 0 && item < items) {
            if constexpr (!OF_TOKENS) give(item, joined[i], exists(known[i]));
            else if (exists(known[i]))
              atomicMax(&other.best[block_of(item)], order_key(joined[i]));
          }
        }
      }
    }
  }
  if (OF_TOKENS && is_max) {
    __syncthreads();
    for (int b = threadIdx.x; b < count; b += THREADS) scores[b] = order_value(other.best[b]);
  }
#endif
}

template <class T, score_kind KIND, int N>
int launch_score_wgmma(const score_call &a, const kvl_cuda_queue *q) {
  using shared = score_wgmma_shared<KIND, N>;
  constexpr int ROWS = KIND == SCORE_MINMAX ? 2 : 1, START = 6; /* tiles that a start costs */
  constexpr int GROUPS = SCORE_WARPGROUPS<N>;
  const int group = (int)(a.heads / a.kv_heads), passes = ceil_div(group, N);
  score_wgmma_plan plan = {};
  plan.terms = score_terms<T>(a.dtype);
  plan.heads = ceil_div(group, passes);
  plan.by_block = divisor(a.block_size);
  const int64_t q_bytes = (int64_t)plan.terms * ROWS * ceil_div(a.head_dim, SCORE_PART) * N *
                          128;
  const int most = q->shared_optin - (int)sizeof(shared);
  const int64_t chunks = (most - 1024 - q_bytes) / SCORE_CHUNK;
  if (chunks < 2 * GROUPS) {
    if constexpr (N > 32) return launch_score_wgmma<T, KIND, (N > 64 ? 64 : 32)>(a, q);
    return KVL_ERR_UNSUPPORTED;
  }
  plan.stages = (int)std::min<int64_t>(chunks / GROUPS, 6);

  const int64_t pairs = a.seqs * a.kv_heads;
  const int64_t per_block = KIND == SCORE_MAX_QK ? a.block_size : 1;
  const int64_t tiles = (a.max_blocks * per_block + SCORE_ITEMS - 1) / SCORE_ITEMS;
  int64_t least = INT64_MAX, each = 1; /* the time in tiles, and what a thread block takes */
  for (int waves = 1; waves <= 4; waves++) {
    const int64_t parts = std::clamp<int64_t>(waves * q->sm_count / pairs, 1, tiles);
    const int64_t mine = (tiles + parts - 1) / parts;
    const int64_t turns = ceil_div(mine, GROUPS) * GROUPS + START;
    const int64_t time = ceil_div(pairs * parts, q->sm_count) * turns;
    if (time < least) least = time, each = mine;
  }
  each = std::max<int64_t>(each * SCORE_ITEMS / per_block, 1);
  if (KIND == SCORE_MAX_QK) each = std::min<int64_t>(each, shared::BLOCKS);
  plan.each = (int)std::min(each, a.max_blocks);
  plan.parts = ceil_div(a.max_blocks, plan.each);
  int status = allow_shared<score_wgmma<T, KIND, N>>(q, most);
  if (status < 0) return status;
  return launch_programmatic(
      score_wgmma<T, KIND, N>, (unsigned)(plan.parts * pairs), GROUPS * WARPGROUP,
      1024 + q_bytes + (int64_t)GROUPS * plan.stages * SCORE_CHUNK, q, a, plan);
}

/* Takes many heads, or terms of them, over 16-bit rows on Hopper; fails for other calls. */
template <score_kind KIND>
int launch_score_wgmma(const score_call &a, const kvl_cuda_queue *q) {
  const bool half = a.rows_dtype == KVL_DTYPE_F16;
  /* Rows are found by a 32-bit number of pieces. */
  if (!is_hopper_device(q->device) || a.blocks * (a.block_stride / 8) >> 32 ||
      (!half && a.rows_dtype != KVL_DTYPE_BF16) || a.head_dim % 8 ||
      !aligned16(a.rows, a.q) || a.head_stride % 8 || a.block_stride % 8 ||
      (KIND == SCORE_MAX_QK && a.group != KVL_GROUP_MAX && a.block_size != 16))
    return KVL_ERR_UNSUPPORTED;
  const int64_t group = a.heads / a.kv_heads;
  const int terms = half ? score_terms<__half>(a.dtype) : score_terms<__nv_bfloat16>(a.dtype);
  const int few = a.head_dim > 128 ? 16 : KIND == SCORE_MAX_QK && terms == 1 ? 15 : 24;
  if (group * terms <= few) return KVL_ERR_UNSUPPORTED;
  auto by_heads = [&](auto x) {
    using T = decltype(x);
    if (group <= 32) return launch_score_wgmma<T, KIND, 32>(a, q);
    if (group <= 64) return launch_score_wgmma<T, KIND, 64>(a, q);
    return group <= 96 ? launch_score_wgmma<T, KIND, 96>(a, q)
                       : launch_score_wgmma<T, KIND, 128>(a, q);
  };
  return half ? by_heads(__half()) : by_heads(__nv_bfloat16());
}

}  // namespace kvl

#endif
