/* Logits of an indexer for Hopper: f8e4m3 products by wgmma, for 32 or 64 heads. mqa_mma.cuh
 * does everything else.
 *
 * Tokens are the rows of a product (M) and heads of q its columns (N). So a thread holds many
 * heads of one token, and does relu, weights and most of the sum over heads by itself.
 *
 * A group is a few neighbouring rows of q that see a common range of tokens. With
 * contiguous keys a group has 256 columns, 128 for each of the two consumers (two results
 * of more columns do not fit the registers). Over index-K memory a group has rows of one
 * sequence, and the consumers share the tokens. The ranges of all groups, one after the
 * other, are cut into equal shares, one for each SM. An SM finds its share only from starts
 * and ends, which the host need not know. A thread block has
 *   consumers  two warpgroups. Each does two products of 64 tokens per tile of keys: while
 *              one is multiplied, relu and sums of the other are computed
 *   producers  one warp brings q, weights and ranges of items, one item ahead; another brings
 *              tiles of keys through a ring, by TMA (over index-K memory one copy per block)
 *
 * The sum over heads: a lane adds its two of every eight heads in order, as FMA of x + |x|
 * (FADD runs at full rate, FMNMX at half) and half of the weight; then a butterfly adds the
 * four lanes of a token. mqa_mma.cuh does the same, so the two differ only by the products.
 *
 * Flops     2 * heads * dim per element of the ranges
 * Bytes     4 (or 2) per element; over index-K memory dim + 4 per token and sequence
 * Limit     tensor cores: 256 cycles for 64 x 128 products of dim 128, and beside them 128
 *           issue slots of relu and sums per scheduler; over index-K memory: the memory
 * Tolerance 2e-4 of the sum of |terms|: the tensor cores keep about 14 bits
 * Best      H100 80GB HBM3, 2026-11-21: 64 heads of 128, f32;
 *           causal 2048 x 32K 1083 TFLOP/s, 4096 x 64K 1061 (GEMM 8192^3 1489); decode over
 *           blocks of 64, 64 x 64K 0.89 of R = 3082 GB/s, 16 x 32K 0.72
 * Versions  notes/20261121-mqa-logits.md
 * Source    DeepGEMM's sm90_fp8_mqa_logits: tokens as M, heads as N, one producer */
#ifndef KVL_CUDA_MQA_WGMMA_CUH
#define KVL_CUDA_MQA_WGMMA_CUH

#include "args/index.h"
#include "cuda/index/mqa_work.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {

#if KVL_SM90A

/* ---- consumers ------------------------------------------------------------------------- */

/* The token whose logits a lane writes, out of those of a product, and its scale. */
struct mqa_token {
  int at;
  float scale;
  bool known;
};

template <class shape> struct mqa_consumer {
  static constexpr int H = shape::H, D = shape::D, N = shape::N, RQ = shape::RQ;
  const typename shape::Keys &keys;
  const mqa_plan &plan;
  mqa_memory<shape> &memory;
  const int index, lane; /* of the consumer; in the warp */
  const int own_token;   /* the token of a product whose logits this lane writes */
  mqa_item item;
  int q_stage;
  float halves[N / 4]; /* half of the weight, for each of this lane's columns */

  __device__ mqa_consumer(const typename shape::Keys &k, const mqa_plan &p,
                          mqa_memory<shape> &m, int i)
      : keys(k), plan(p), memory(m), index(i), lane(threadIdx.x % WARP),
        own_token(threadIdx.x / WARP % 4 * 16 + lane / 4 +
                  8 * (RQ == 1 ? lane >> 1 & 1 : lane & 1)) {}

  /* The first token of product `half` of this consumer in a tile, and its first column. */
  __device__ __forceinline__ int token0(int half) const {
    return (shape::PAGED ? index * 128 : 0) + half * 64;
  }
  __device__ __forceinline__ int column0() const { return shape::PAGED ? 0 : index * N; }

  __device__ __forceinline__ void take_item(int stage) {
    q_stage = stage;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
      const float2 two =
          *(const float2 *)&memory.halves[stage][column0() + 8 * n + lane % 4 * 2];
      halves[2 * n] = two.x, halves[2 * n + 1] = two.y;
    }
  }
  __device__ __forceinline__ void multiply(float (&d)[N / 2], int stage, int half) const {
    const uint64_t k = rows_at<D>(memory.k(stage) + token0(half) * D);
    const uint64_t q = rows_at<D>(memory.q(q_stage) + column0() * D);
    products_begin();
#pragma unroll
    for (int i = 0; i < D / 32; i++)
      product_f8(d, matrix_plus(k, i * 32), matrix_plus(q, i * 32), i > 0);
    products_commit();
  }
  __device__ __forceinline__ mqa_token token(int tile, int stage, int half) const {
    const int in_tile = token0(half) + own_token;
    mqa_token t = {item.begin + tile * shape::TOKENS + in_tile, 0.f, true};
    if constexpr (shape::PAGED) {
      t.scale = memory.scales[stage][in_tile];
      t.known = memory.known[stage] >> (in_tile >> plan.box_shift) & 1;
    } else {
      t.scale = keys.a.scales[min((int64_t)t.at, keys.a.tokens - 1)];
    }
    return t;
  }
  __device__ __forceinline__ void store(int row, const mqa_token &t, float sum) const {
    const int2 range = memory.ranges[q_stage][row];
    if (t.at < range.x || t.at >= range.y) return;
    const float logit = t.known ? sum * t.scale : -INFINITY;
    const int64_t to = (item.row0 + row) * keys.a.columns + t.at;
    if (keys.a.dtype == KVL_DTYPE_F32) ((float *)keys.a.logits)[to] = logit;
    else ((__nv_bfloat16 *)keys.a.logits)[to] = __float2bfloat16_rn(logit);
  }
  /* Does relu, weights and the sum over heads, and writes the logits. */
  __device__ __forceinline__ void finish(const float (&d)[N / 2], const mqa_token &t) const {
    constexpr int SUMS = RQ == 1 ? 2 : 4, ROWS = SUMS / 2; /* rows of q at a time */
#pragma unroll
    for (int row = 0; row < RQ; row += ROWS) {
      float sums[SUMS] = {}; /* [row of q, token l / 4 and the one 8 further on] */
#pragma unroll
      for (int n = 0; n < H / 8; n++)
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
          for (int i = 0; i < SUMS; i++) {
            const int column = (row + i / 2) * (H / 8) + n;
            const float x = d[4 * column + 2 * (i % 2) + c];
            sums[i] = fmaf(x + fabsf(x), halves[2 * column + c], sums[i]);
          }
      if constexpr (RQ == 1) {
        const bool high = lane & 2;
        float sum = high ? sums[1] : sums[0];
        sum += __shfl_xor_sync(ALL_LANES, high ? sums[0] : sums[1], 2);
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        if (lane % 2 == 0) store(row, t, sum);
      } else {
        const float sum = sum_of_four<4>(sums, lane);
        store((shape::PAGED ? 0 : index * RQ) + row + lane % 4 / 2, t, sum);
      }
    }
  }
};

/* Does two products per tile. The first is finished while the second is in flight, and the
 * second while the other consumer's are. (If a product stayed in flight over the loop's end,
 * ptxas would serialise all of them: C7514.) */
template <class shape>
__device__ void mqa_consume(const typename shape::Keys &keys, const mqa_plan &plan,
                            mqa_memory<shape> &memory, int index) {
  constexpr int STAGES = shape::STAGES;
  mqa_consumer<shape> c(keys, plan, memory, index);
  float even[shape::N / 2], odd[shape::N / 2];
  uint32_t step = 0;
  for (uint32_t q_step = 0;; q_step++) {
    const int q_stage = q_step % shape::Q_STAGES;
    barrier_wait(memory.q_full(q_stage), q_step / shape::Q_STAGES & 1);
    c.item = memory.items[q_stage];
    if (c.item.tiles == 0) return;
    c.take_item(q_stage);
    for (int tile = 0; tile < c.item.tiles; tile++, step++) {
      const int s = step % STAGES;
      barrier_wait(memory.k_full(s), step / STAGES & 1);
      const mqa_token first = c.token(tile, s, 0), second = c.token(tile, s, 1);
      c.multiply(even, s, 0);
      c.multiply(odd, s, 1);
      products_wait<1>();
      settle(even);
      c.finish(even, first);
      products_wait<0>();
      settle(odd);
      barrier_arrive_warp(memory.k_empty(s), c.lane);
      c.finish(odd, second);
    }
    barrier_arrive_warp(memory.q_empty(q_stage), c.lane);
  }
}

/* Asks the L2 to prefetch what is needed to find shares and look up keys. These are hints,
 * so they may come before the previous kernel has ended. A large table, most of which is
 * never read, is left out. */
__device__ __forceinline__ void mqa_ask(const mqa_contiguous &) {}
__device__ __forceinline__ void mqa_ask(const mqa_paged &keys) {
  constexpr int LINE = 128, MOST = 1 << 20;
  const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t lens = keys.rows() * 4, tables = keys.a.sequences * keys.a.max_blocks * 4;
  auto ask = [&](const void *p, int64_t bytes) {
    if (bytes > MOST) return;
    for (int64_t at = thread * LINE; at < bytes; at += (int64_t)gridDim.x * blockDim.x * LINE)
      asm volatile("prefetch.global.L2 [%0];" ::"l"((const char *)p + at));
  };
  ask(keys.a.lens, lens);
  ask(keys.a.tables, tables);
}

/* The work of one of the two producer warps. */
template <class shape>
__device__ __forceinline__ void mqa_produce(const typename shape::Keys &keys,
                                            const CUtensorMap &q_map,
                                            const CUtensorMap &k_map, const mqa_plan &plan,
                                            mqa_walk<shape> &walk, mqa_memory<shape> &memory,
                                            int warp) {
  if (warp == 0) {
    uint32_t step = 0;
    for (mqa_item w; walk.next(w);)
      mqa_bring_tiles<shape>(keys, k_map, plan, w, memory, step);
  } else {
    mqa_bring_items<shape>(keys, q_map, walk, memory);
  }
}

#endif

template <class shape>
__global__ void __launch_bounds__(shape::THREADS, 1)
    mqa_wgmma(const __grid_constant__ typename shape::Keys keys,
              const __grid_constant__ CUtensorMap q_map,
              const __grid_constant__ CUtensorMap k_map,
              const __grid_constant__ mqa_plan plan) {
#if KVL_SM90A
  __shared__ mqa_memory<shape> memory;
  if (threadIdx.x == 0) {
    prefetch_map(&q_map);
    prefetch_map(&k_map);
    memory.init();
  }
  mqa_ask(keys);
  let_next_start();
  __syncthreads();
  wait_for_previous();
  const bool is_few = plan.groups <= WARP;
  mqa_share share = {};
  if (!is_few) share = mqa_share::find<shape>(keys, plan, memory);
  /* warp is the same in all lanes; the shuffle tells the compiler so. */
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), warpgroup = warp / 4;
  if (warpgroup > 0) {
    registers_take<224>();
    mqa_consume<shape>(keys, plan, memory, warpgroup - 1);
    return;
  }
  registers_give<56>();
  if (warp > 1) return;
  if (is_few) {
    mqa_walk<shape> walk(keys, plan);
    mqa_produce<shape>(keys, q_map, k_map, plan, walk, memory, warp);
  } else {
    mqa_walk<shape> walk(keys, plan, share, memory);
    mqa_produce<shape>(keys, q_map, k_map, plan, walk, memory, warp);
  }
#endif
}

/* ---- launch ---------------------------------------------------------------------------- */

/* Maps [planes, rows, D] bytes, planes `stride` bytes apart, in boxes of `box` rows. */
inline int map_bytes(const void *p, int D, int64_t rows, int64_t planes, int64_t stride,
                     int box, CUtensorMap *map) {
  const cuuint64_t dims[3] = {(cuuint64_t)D, (cuuint64_t)rows, (cuuint64_t)planes};
  const cuuint64_t strides[2] = {(cuuint64_t)D, (cuuint64_t)stride};
  const cuuint32_t boxes[3] = {(cuuint32_t)D, (cuuint32_t)box, 1}, steps[3] = {1, 1, 1};
  const CUresult r = encode_map()(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, (void *)p, dims,
                                  strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  D == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                  : D == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                            : CU_TENSOR_MAP_SWIZZLE_32B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? KVL_OK : kvl__cuda_check(cudaErrorInvalidValue);
}

inline int map_keys(const mqa_contiguous &keys, int tokens, mqa_plan *, CUtensorMap *map) {
  return map_bytes(keys.a.k, keys.a.dim, keys.a.tokens, 1, keys.a.tokens * keys.a.dim, tokens,
                   map);
}
inline int map_keys(const mqa_paged &keys, int, mqa_plan *plan, CUtensorMap *map) {
  const kvl_index_view &cache = keys.a.cache;
  plan->box_shift = 0; /* a block is whole boxes, and so is half of a consumer's tile */
  while (plan->box_shift < 6 && !(cache.block_size >> plan->box_shift & 1)) plan->box_shift++;
  return map_bytes(cache.memory, cache.dim, cache.block_size, cache.blocks,
                   (int64_t)cache.block_size * (cache.dim + 4), 1 << plan->box_shift, map);
}

/* Whether this kernel takes the call. In practice it depends only on heads and block size, so
 * that parts of a call give the same bits as the whole. */
inline bool mqa_takes(const mqa_contiguous &) { return true; }
inline bool mqa_takes(const mqa_paged &keys) {
  return keys.a.cache.block_size % 8 == 0 && keys.a.cache.blocks > 0;
}
template <class Keys> bool mqa_wgmma_takes(const Keys &keys, const kvl_cuda_queue *q) {
  return is_hopper_device(q->device) && (keys.a.heads == 32 || keys.a.heads == 64) &&
         mqa_takes(keys) && keys.rows() <= INT_MAX / 64 && encode_map();
}

/* rows: of q, per sequence or of all. Neither rows nor columns may be 0. */
template <class shape>
int launch_mqa_wgmma(const typename shape::Keys &keys, int64_t rows,
                     const kvl_cuda_queue *q) {
  mqa_plan plan = {};
  plan.rows = rows;
  plan.each = (plan.rows + shape::ROWS - 1) / shape::ROWS;
  plan.groups = keys.rows() / plan.rows * plan.each;
  CUtensorMap q_map, k_map;
  int status = map_bytes(keys.a.q, shape::D, keys.rows() * shape::H, 1,
                         keys.rows() * shape::H * shape::D, shape::COLUMNS, &q_map);
  if (status == KVL_OK) status = map_keys(keys, shape::TOKENS, &plan, &k_map);
  if (status == KVL_OK) status = allow_shared<mqa_wgmma<shape>>(q, shape::SHARED_BYTES);
  if (status < 0) return status;
  const int64_t units = (keys.columns() + 7 + shape::UNIT - 1) / shape::UNIT * plan.groups;
  const unsigned blocks = (unsigned)(units < q->sm_count ? units : q->sm_count);
  return launch_programmatic(mqa_wgmma<shape>, blocks, shape::THREADS, shape::SHARED_BYTES, q,
                             keys, q_map, k_map, plan);
}

}  // namespace kvl

#endif
