/* Flash attention of many query rows over paged KV for Hopper: 16-bit q and cache, head_dim
 * 64 or 128, blocks of a multiple of 8 tokens. paged_prefill.cuh does everything else.
 *
 * A thread block stays on its SM and takes item after item: 128 query rows that share a KV
 * head (128 / group tokens with all heads of the group). Its three warpgroups are
 *   consumers  two, with 64 rows each: S = Q K^T and O += P V by wgmma, and the softmax in
 *              between in registers
 *   producers  one: a warp brings K and another V through a ring of tiles of 128 keys, with a
 *              copy for every block of the table; for each consumer a warp brings Q of the
 *              next item while this one is computed
 * Keys are taken from the last to the first, so the tiles with a causal mask come first and
 * the loop over the others has no mask.
 *
 * S of tile j and P V of tile j-1 are given to the tensor cores together; the softmax of j
 * runs during the other consumer's products. It does not need the largest score: weights are
 * relative to a reference. An item's first tile sets it, and it is raised only when a sum of
 * weights gets large. A running maximum (64 comparisons and 4 shuffles per tile and thread)
 * took a quarter of the loop.
 *
 * Flops     4 * head_dim * heads * seen pairs of row and key
 * Bytes     2 * keys * head_dim * 2 per item, from L2: 5.6 TB/s at 16K
 * Limit     tensor cores, busy 79% of the time at 16K; under this load the GPU holds 1.66 of
 *           its 1.98 GHz
 * Tolerance P is rounded to q's dtype before P V, as in paged_prefill.cuh
 * Best      H100 80GB HBM3, 2026-11-21, kernels/dev/prefill.cu: bf16, 32/8 heads, head_dim
 *           128, block 16, random tables, TFLOP/s; next to it torch's cuDNN on contiguous K
 *           and V, before and after in the same run (bf16 GEMM 8192^3: 792):
 *             16K causal   702   cuDNN 660, 660     4K causal  490   cuDNN 519, 518
 *             32K causal   646   cuDNN 623, 617     8K causal  610   cuDNN 616, 617
 *             4K x 32K     707   cuDNN 695, 686     16 sequences of 2K, causal  416
 *             16K causal, block 256  661            head_dim 64, 16K  395   cuDNN 476, 465
 * Versions  16K causal, 32K causal, 4K x 32K not causal; TFLOP/s. Runs differ by 5% (clock)
 *   1  wgmma and TMA, specialised warps, one thread block per item     479  478  503
 *   2  1, S of the next tile started before P V; turns at the products 463  484  497
 *      with tiles of 176 keys                                          488  522  541
 *   3  2 on a fixed grid, separate warps for K and V, head by head     476  551  572
 *   4  3, the items of all heads ordered by length                     577  533  558
 *   5  4, descriptors in uniform registers, sums scaled only on a new
 *      maximum; no turns                                               618  574  623
 *      with turns 572 572 570; three stages 553 548 562; tiles of 176 keys 543 526 570
 *   6  5, no running maximum, Q in two stages                          719  647  685
 *      with turns 650 642 657; exponentials before the wait for the previous products, in
 *      their own registers (24 spilled) 565 576 551
 *   7  6 tidied; 16-byte stores                                        702  646  707
 * Source    Shah et al. 2024 (FlashAttention-3): warp specialisation, S before P V, turns;
 *           Dao et al. 2022: online softmax. Results do not depend on thread timing.
 */
#ifndef KVL_CUDA_PAGED_WGMMA_CUH
#define KVL_CUDA_PAGED_WGMMA_CUH

#include "launch.cuh"
#include "wgmma_work.cuh"

namespace kvl {

#if KVL_SM90A

/* A lane whose sum of weights passes this asks for a new reference. f16 holds 15 times
 * this. */
constexpr float WEIGHTS_MOST = 4096.f;

/* A thread's part of a consumer's state: two rows, with two of every eight columns; `product`
 * says which. */
template <class T, class shape> struct wgmma_state {
  static constexpr int D = shape::D, KEYS = shape::KEYS;
  float s[KEYS / 2], out[D / 2];
  uint32_t p[KEYS / 16][4];
  float m[2], l[2]; /* reference (of unscaled scores), sum of weights */

  __device__ __forceinline__ void scores(uint32_t q_at, uint32_t k_at) {
    const uint64_t q = matrix_at(q_at, 1024), k = matrix_at(k_at, shape::GROUP_BYTES);
#pragma unroll
    for (int d = 0; d < D / 16; d++)
      product<T>(s, matrix_plus(q, d / 4 * 8192 + d % 4 * 32),
                 matrix_plus(k, d / 4 * 1024 + d % 4 * 32), d > 0);
    products_commit();
  }
  __device__ __forceinline__ void values(uint32_t v_at) {
    const uint64_t v = matrix_at(v_at, shape::GROUP_BYTES, 1024);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
      product<T>(out, p[k], matrix_plus(v, k * 2 * shape::GROUP_BYTES));
    products_commit();
  }
  /* Computes the weights p = exp2(score - reference) and this lane's sums of them. `scale` is
   * read from shared memory: if it were a constant of the kernel, ptxas would scale all
   * scores before it waits for the previous products, and spill. */
  __device__ __forceinline__ void weights(const float &scale_shared, float (&sum)[2]) {
    const float scale = load_late(scale_shared);
    const float shift[2] = {finite_shift(m[0]) * scale, finite_shift(m[1]) * scale};
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = i & 1;
        const float x = exp2_fast(s[8 * k + 2 * i] * scale - shift[r]);
        const float y = exp2_fast(s[8 * k + 2 * i + 1] * scale - shift[r]);
        sum[r] += x + y;
        p[k][i] = pack2(x, y, T());
      }
  }
  /* Raises the reference to the largest score so far. */
  __device__ __forceinline__ void raise(float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float top[2] = {m[r], m[r]};
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) top[c] = fmaxf(top[c], s[4 * n + 2 * r + c]);
      top[0] = warp_max<4>(fmaxf(top[0], top[1]));
      const float down = exp2_fast((m[r] - finite_shift(top[0])) * scale);
      m[r] = top[0];
      l[r] *= down;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) out[4 * n + 2 * r + c] *= down;
    }
  }
  __device__ __forceinline__ bool fits(const float (&sum)[2]) const {
    return sum[0] <= WEIGHTS_MOST && sum[1] <= WEIGHTS_MOST && m[0] > -INFINITY &&
           m[1] > -INFINITY;
  }
};

/* The positions that a query row sees: `seen` of them, from `low` on. */
struct wgmma_sight {
  int at, low, seen;
  __device__ wgmma_sight(const kvl_paged_attention_args &a, const wgmma_work &w, int r)
      : at(w.position0 + r / w.heads_each), low(window_begin(a, at)) {
    const int end = a.causal ? min(at + 1, w.length) : w.length;
    seen = r < w.tokens * w.heads_each ? max(0, end - low) : 0;
  }
  __device__ bool sees(int position) const {
    return (unsigned)(position - low) < (unsigned)seen;
  }
};

/* Four neighbouring lanes hold four numbers each. Lane q gets the q-th of each, in order. */
__device__ __forceinline__ void turn_quad(float (&x)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int b = 0; b < 4; b++) {
      if (b & bit) continue;
      const bool high = lane & bit;
      const float got = __shfl_xor_sync(ALL_LANES, high ? x[b] : x[b | bit], bit);
      x[b] = high ? got : x[b];
      x[b | bit] = high ? x[b | bit] : got;
    }
}

template <class T, class shape>
__device__ void attend(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                       wgmma_memory<shape> &memory, int consumer) {
  constexpr int D = shape::D, KEYS = shape::KEYS, STAGES = shape::STAGES;
  const int warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP;
  /* This lane's rows of every product, and its first column. */
  const int r0 = consumer * 64 + warp * 16 + lane / 4, r1 = r0 + 8, pair = lane % 4 * 2;
  const bool biased = a.alibi || a.soft_cap > 0.f;
  const float scale = a.scale * LOG2E;
  constexpr int TURN = 1, BOTH = 2 * WARPGROUP; /* named barriers TURN, TURN + 1 */
  auto turn_begin = [&] {
    if (shape::TURNS) named_sync(TURN + consumer, BOTH);
  };
  auto turn_end = [&] {
    if (shape::TURNS) named_arrive(TURN + (consumer ^ 1), BOTH);
  };
  if (consumer == 1) turn_end(); /* consumer 0 goes first */

  wgmma_state<T, shape> x;
  uint32_t step = 0, q_step = 0;
  each_work<shape>(a, plan, [&](const wgmma_work &w) {
    /* Every row of the warp sees all of a tile within low ... high. Rows that do not exist
     * may see anything, and need no new reference. */
    int low = 0, high = INT_MAX;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = i ? r1 : r0;
      const bool has = r < w.tokens * w.heads_each;
      const wgmma_sight sight(a, w, r);
      if (has) low = max(low, sight.low), high = min(high, sight.low + sight.seen - 1);
      x.m[i] = has ? -INFINITY : 0.f;
      x.l[i] = 0.f;
    }
    low = warp_max(low);
    high = biased ? -1 : warp_min(high);
#pragma unroll
    for (int i = 0; i < D / 2; i++) x.out[i] = 0.f;

    auto mask = [&](int stage) {
      const int *position = memory.positions[stage];
      const wgmma_sight sight0(a, w, r0), sight1(a, w, r1);
      if (biased) {
        const score_rule rule(a);
        const float back = 1.f / scale;
        const query_rows rows = w.rows();
        const float slope0 = a.alibi ? a.alibi[rows.head(r0)] * LOG2E : 0.f;
        const float slope1 = a.alibi ? a.alibi[rows.head(r1)] * LOG2E : 0.f;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
          const int at = position[i / 4] + pair + (i & 1);
          const int distance = at - (i & 2 ? sight1.at : sight0.at);
          x.s[i] = (rule(x.s[i]) + (i & 2 ? slope1 : slope0) * (float)distance) * back;
        }
      }
#pragma unroll
      for (int i = 0; i < KEYS / 2; i++) {
        const int at = position[i / 4] + pair + (i & 1);
        if (!(i & 2 ? sight1 : sight0).sees(at)) x.s[i] = -INFINITY;
      }
    };
    const uint32_t q_stage = q_step % shape::Q_STAGES;
    const uint32_t q_at = memory.q(q_stage, consumer);
    barrier_wait(memory.q_full(q_stage, consumer), q_step++ / shape::Q_STAGES & 1);
    {
      const uint32_t k = step % STAGES;
      barrier_wait(memory.k_full(k), step / STAGES & 1);
      const int2 span = memory.spans[k];
      turn_begin();
      products_begin();
      x.scores(q_at, memory.k(k));
      turn_end();
      products_wait<0>();
      settle(x.s);
      if (span.x < low || span.y > high) mask(k);
      barrier_arrive_warp(memory.k_empty(k), lane);
      x.raise(scale);
      x.weights(memory.scale, x.l);
    }
    for (int i = 1; i < w.tiles; i++) {
      const uint32_t v = step % STAGES, v_parity = step / STAGES & 1;
      const uint32_t k = ++step % STAGES;
      barrier_wait(memory.k_full(k), step / STAGES & 1);
      const int2 span = memory.spans[k];
      turn_begin();
      products_begin();
      x.scores(q_at, memory.k(k));
      barrier_wait(memory.v_full(v), v_parity);
      products_begin();
      x.values(memory.v(v));
      turn_end();
      products_wait<1>();
      settle(x.s);
      if (span.x < low || span.y > high) mask(k);
      barrier_arrive_warp(memory.k_empty(k), lane);
      products_wait<0>();
      settle(x.out);
      barrier_arrive_warp(memory.v_empty(v), lane);
      float sum[2];
      x.weights(memory.scale, sum);
      if (!__all_sync(ALL_LANES, x.fits(sum))) {
        x.raise(scale);
        x.weights(memory.scale, sum);
      }
      x.l[0] += sum[0];
      x.l[1] += sum[1];
    }
    barrier_arrive_warp(memory.q_empty(q_stage, consumer), lane);
    const uint32_t v = step % STAGES;
    barrier_wait(memory.v_full(v), step++ / STAGES & 1);
    products_begin();
    x.values(memory.v(v));
    products_wait<0>();
    settle(x.out);
    barrier_arrive_warp(memory.v_empty(v), lane);

    /* Four lanes hold eight neighbours of a row together. They exchange them, so that each
     * has one whole run of eight out of four, and writes 16 bytes at once. */
    const query_rows rows = w.rows();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float sum = warp_sum<4>(x.l[i]);
      const int r = i ? r1 : r0;
      const int64_t row = rows.token(r) * a.heads + rows.head(r);
      row_end end = {};
      if (r < rows.count) {
        end = end_row(a, row, x.m[i] * scale, sum);
        if (a.lse && pair == 0) a.lse[row] = end.lse;
      }
#pragma unroll
      for (int n = 0; n < D / 8; n += 4) {
        float even[4], odd[4], y[8];
#pragma unroll
        for (int b = 0; b < 4; b++) {
          even[b] = x.out[4 * (n + b) + 2 * i];
          odd[b] = x.out[4 * (n + b) + 2 * i + 1];
        }
        turn_quad(even, lane);
        turn_quad(odd, lane);
#pragma unroll
        for (int b = 0; b < 4; b++) y[2 * b] = even[b], y[2 * b + 1] = odd[b];
        const int64_t at = row * D + (n + lane % 4) * 8;
        if (r >= rows.count) continue;
        finish(a, end, at, y);
        store_out(a, at, y);
      }
    }
  });
}

#endif

template <class T, class shape>
__global__ void __launch_bounds__(shape::THREADS, 1)
    paged_wgmma(const __grid_constant__ kvl_paged_attention_args a,
                const __grid_constant__ CUtensorMap map,
                const __grid_constant__ wgmma_plan plan) {
#if KVL_SM90A
  __shared__ wgmma_memory<shape> memory;
  if (threadIdx.x == 0) {
    prefetch_map(&map);
    memory.init(a);
  }
  __syncthreads();
  /* warp is the same in all lanes; the shuffle tells the compiler so. */
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), warpgroup = warp / 4;
  if (warpgroup > 0) {
    registers_take<232>();
    attend<T, shape>(a, plan, memory, warpgroup - 1);
    return;
  }
  registers_give<40>();
  if (warp == 0) bring_tiles<shape, false>(a, map, plan, memory);
  else if (warp == 1) bring_tiles<shape, true>(a, map, plan, memory);
  else bring_queries<T, shape>(a, plan, memory, warp - 2);
#endif
}

/* ---- launch ---------------------------------------------------------------------------- */

/* Maps the cache as [blocks * 2 * kv_heads, block_size / 8, head_dim / 64, 8, 64], so that a
 * box of `groups` times eight tokens arrives as [groups, head_dim / 64] atoms. */
template <class T> int map_cache(const kvl_cache_view &c, int groups, CUtensorMap *map) {
  const cuuint64_t bytes_row = c.head_dim * 2;
  const cuuint64_t dims[5] = {64, 8, (cuuint64_t)c.head_dim / 64,
                              (cuuint64_t)c.block_size / 8,
                              (cuuint64_t)c.blocks * 2 * c.kv_heads};
  const cuuint64_t strides[4] = {bytes_row, 128, 8 * bytes_row, c.block_size * bytes_row};
  const cuuint32_t box[5] = {64, 8, (cuuint32_t)c.head_dim / 64, (cuuint32_t)groups, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult r = encode_map()(
      map,
      std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      5, c.kv, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? KVL_OK : kvl__cuda_check(cudaErrorInvalidValue);
}

inline int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }

/* Scores are masked before they are scaled, so the scale has to be positive. */
inline bool wgmma_takes(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  const kvl_cache_view &c = a.cache;
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, q->device);
  return major == 9 && a.starts && a.dtype != KVL_DTYPE_F32 && c.dtype == a.dtype &&
         !c.pinned && (c.head_dim == 64 || c.head_dim == 128) && c.block_size % 8 == 0 &&
         c.blocks > 0 && c.blocks * 2 * c.kv_heads <= INT_MAX && a.scale > 1e-6f &&
         encode_map();
}

template <class T, int D>
int launch_prefill_wgmma(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  using shape = wgmma_shape<D>;
  const int group = (int)(a.heads / a.cache.kv_heads);
  wgmma_plan plan;
  plan.box = common_divisor(a.cache.block_size, shape::KEYS) / 8;
  plan.tokens_tile = shape::ROWS / group > 1 ? shape::ROWS / group : 1;
  plan.subgroups = (group + shape::ROWS - 1) / shape::ROWS;
  plan.lanes = a.cache.kv_heads * plan.subgroups;
  plan.items = (int)(a.tokens / plan.tokens_tile + a.seqs) * plan.lanes;
  CUtensorMap map;
  int status = map_cache<T>(a.cache, plan.box, &map);
  if (status == KVL_OK) status = allow_shared<paged_wgmma<T, shape>>(q, shape::SHARED_BYTES);
  if (status < 0) return status;
  const int grid = plan.items < q->sm_count ? plan.items : q->sm_count;
  paged_wgmma<T, shape>
      <<<grid, shape::THREADS, shape::SHARED_BYTES, q->stream>>>(a, map, plan);
  return KVL_OK;
}

}  // namespace kvl

#endif
