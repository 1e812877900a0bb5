/* Flash attention over paged KV for Hopper: 16-bit q, a cache of q's dtype, f8e4m3 or int8,
 * head_dims up to 256, blocks of any size; several new tokens a sequence, or one of more than 16
 * query heads on a KV head. paged_decode.cuh and paged_prefill.cuh do everything else.
 * There are kernels for D = 64, 96, 128, 192 and 256 numbers; shorter rows are padded with
 * zeros.
 *
 * A thread block stays on its SM and takes item after item: query rows that share a KV head
 * (tokens with all heads of the group); wgmma_plan.cuh tells which. Its warpgroups are
 *   producers   one: a warp finds the work, ahead of the others; a warp brings K and another V
 *               through a ring of tiles of keys, with a copy for every block of the table;
 *               a warp brings Q of the next item while this one is computed
 *   consumers   two, with 64 rows each (one, if there are no more rows; three at head_dim 64,
 *               and without a bias at 96 and 128): S = Q K^T and O += P V by wgmma, and the
 *               softmax in between in registers
 *   copiers     one, if blocks are no multiple of 8 tokens or lie in host memory: two warps
 *               copy the rows of K and two those of V
 *   converters  one, over 8-bit numbers. It turns tiles of f8e4m3 into f16; then Q and P are
 *               f16, too, and Q is scaled by a power of two. It turns tiles of int8, which come
 *               with their scales, into q's dtype
 * Keys are taken from the last to the first, so the tiles with a causal mask come first and
 * the loop over the others has no mask.
 *
 * S of tile j and P V of tile j-1 are given to the tensor cores together, also when j
 * belongs to the next item; the softmax of j runs beside P V and the other consumer's
 * products. The softmax does not need the largest score: weights are relative to a
 * reference. An item's first tile sets the reference, which is raised only when a sum of
 * weights gets large.
 *
 * Over f8e4m3, T stands for both dtypes of q: a.dtype says which one it is.
 *
 * With a bias (ALiBi, a soft cap, a draft tree, a hook), final scores in base 2 are
 * computed before they become weights. For a run of keys that all rows see, which is nearly
 * every tile, bias and weights are computed at once.
 *
 * Flops     4 * head_dim * heads * seen pairs of row and key
 * Bytes     2 * keys * head_dim * element per item, from L2
 * Limit     tensor cores; with few rows memory
 * Tolerance P is rounded to q's dtype (over f8e4m3 to f16) before P V, as in paged_prefill.cuh;
 *           int8 times its scale is rounded to q's dtype, too. Soft caps: 7e-7 of a score, or
 *           2e-7 of the cap where scores are near the cap
 * Best      H200, 2026-11-22, short runs: bf16, 32/8 heads, head_dim 128, block 16,
 *           random tables, TFLOP/s; in brackets the version before on this machine:
 *             causal 4K  636   8K  690   16K  738 (636)   32K  677 (612)   cuDNN 584, 595
 *             4K x 32K  703 to 749 (655)   cuDNN 620
 *             4K over 16K, head_dim 64  525 (464)   96  620   128  741   192  785   256  720
 *           f8e4m3 460 (64), 569 (96), 676 to 685 (128), 665 (192), 443 (256)
 *           ALiBi 640 (267), soft cap 523 (220), a hook like ALiBi 570, f8e4m3 with ALiBi 585
 *           blocks of 1, 5, 12 tokens 560, 575, 550 (380, 445, 465); of 8 and more 730
 *           2 ... 32 tokens over 1 x 128K 140 to 149 us (1416), 128 tokens 390 us
 *           17 ... 64 heads a KV head, 16 x 8K 3660 to 3820 GB/s
 *           notes/20261122-wgmma.md has the versions
 *           2026-11-30, with three consumers, P5 alone: causal 4K 593 to 625, 16K 678, 32K
 *           706, 4K x 32K 734 (before: 595, 640, 655, 655); notes/20261130-prefill.md
 * Source    Shah et al. 2024 (FlashAttention-3): warp specialisation, softmax under P V;
 *           Dao et al. 2022: online softmax; Osama et al. 2023: stream-K. Results do not depend
 *           on thread timing.
 */
#ifndef KVL_CUDA_PAGED_WGMMA_CUH
#define KVL_CUDA_PAGED_WGMMA_CUH

#include "args/attention.h"
#include "cuda/programmatic.cuh"
#include "cuda/attention/wgmma_convert.cuh"
#include "cuda/attention/wgmma_state.cuh"

namespace kvl {

#if KVL_SM90A

/* A consumer: 64 query rows, its piece of work, and the loop over the tiles of keys. */
template <class T, class shape, bool BIASED, class H> struct wgmma_consumer {
  static constexpr int D = shape::D, KEYS = shape::KEYS, STAGES = shape::STAGES;
  static constexpr int QS = shape::Q_STAGES, CONSUMERS = shape::CONSUMERS;
  using M = std::conditional_t<shape::F8, __half, T>; /* is multiplied */

  const kvl_paged_attention_args &a;
  const wgmma_plan &plan;
  const H &hook;
  wgmma_memory<shape> &memory;
  const int consumer, warp, lane, pair; /* pair: this lane's first column of every eight */
  const int r0, r1;                     /* its rows of every product */
  const score_rule rule;
  wgmma_state<M, shape> x;
  wgmma_work w;
  /* The next piece of work; the present tile, and the present piece with queries. */
  uint32_t n = 0, step = BIASED ? ~0u : 0, q_step = step;
  int left;      /* tiles of this piece without scores */
  int low, high; /* every row of the warp sees all of a tile within them */
  int2 span;     /* the present tile's */
  bool exists;   /* a row of the warp */
  bool second;   /* the work on second rows of lanes is done */
  float sum[2];
  bool ready; /* every row of the warp has a reference */
  bool fresh; /* this piece has no sums of values yet */

  __device__ __forceinline__ wgmma_consumer(const kvl_paged_attention_args &a_,
                                            const wgmma_plan &plan_, const H &hook_,
                                            wgmma_memory<shape> &memory_, int consumer_)
      : a(a_), plan(plan_), hook(hook_), memory(memory_), consumer(consumer_),
        warp(threadIdx.x / WARP % 4), lane(threadIdx.x % WARP), pair(lane % 4 * 2),
        r0(first_row(consumer, warp) + next_row(lane / 4)), r1(r0 + SECOND_ROW), rule(a_) {}

  /* The factor of a product of f8e4m3, except for the factor in `rule`. */
  __device__ __forceinline__ float &key_size() const {
    return memory.scales[consumer * 4 + warp];
  }
  /* The factor of x.s; with a bias, 1. */
  __device__ __forceinline__ const float &scale() const {
    return shape::F8 && !BIASED ? key_size() : memory.scale;
  }
  __device__ __forceinline__ bool capped() const { return a.soft_cap > 0.f; }
  __device__ __forceinline__ hook_row of_hook(const wgmma_row &row) const {
    return {w.seq, a.cache.kv_heads, w.kv_head, row.head, a.lens[w.seq], row.at};
  }

  /* Stores in shared memory what a bias needs to know about this lane's rows. A row that
   * does not exist is replaced by the last row. */
  __device__ __forceinline__ void tell_rows() {
    __syncwarp();
    const query_rows rows = w.rows();
    const short_divisor heads = w.heads(plan);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = min(i ? r1 : r0, rows.count - 1), token = r / heads;
      const int head = w.head0 + r - token * w.heads_each;
      wgmma_row row = {a.alibi ? a.alibi[head] * LOG2E : 0.f, w.index0 + token, head};
      if (H::ACTIVE) row.head -= w.kv_head * (int)(a.heads / a.cache.kv_heads);
      if (lane % 4 == 0) memory.rows[i ? r1 : r0] = row;
    }
    __syncwarp();
  }
  __device__ __forceinline__ void begin_work() {
    w = memory.wait_work(n);
    memory.work_done(n++);
    left = w.tiles;
    low = 0, high = INT_MAX;
    ready = false;
    fresh = true;
    exists = first_row(consumer, warp) < w.tokens * w.heads_each;
    /* Left out only where no lane has a second row. At head_dim 64 three consumers lack the
     * registers for this branch: a hook took up to 1.28 times as long with it. */
    second = CONSUMERS == 3 ||
             first_row(consumer, warp) + SECOND_ROW < w.tokens * w.heads_each;
    if (shape::F8) {
      __syncwarp();
      if (lane == 0)
        key_size() = (BIASED ? 1.f : a.scale * LOG2E) * key_scale(a, w.kv_head).size *
                     memory.units[q_step % QS];
      __syncwarp();
    }
    if (BIASED) tell_rows();
    /* Rows that do not exist may see anything, and need no new reference. */
    const short_divisor heads = w.heads(plan);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = i ? r1 : r0;
      const bool has = r < w.tokens * w.heads_each;
      const wgmma_sight sight(a, w, r, r / heads);
      if (has) low = max(low, sight.low), high = min(high, sight.low + sight.seen - 1);
      x.m[i] = has ? -INFINITY : 0.f;
      x.l[i] = 0.f;
    }
    low = __reduce_max_sync(ALL_LANES, low);
    high = __reduce_min_sync(ALL_LANES, high);
    if (BIASED && a.tree) high = min(high, tree_begin(a, a.lens[w.seq]) - 1);
  }

  /* Turns the products of this lane's row r into scores in base 2. */
  __device__ __forceinline__ void bias_row(int stage, int r) {
    const int *index = memory.indices[stage] + pair;
    const float product = shape::F8 ? rule.scale * key_size() : rule.scale;
    const wgmma_row row = memory.rows[r ? r1 : r0];
    if (capped()) x.each(r, [&](int, float s) { return cap_score(product, rule.cap, s); });
    else x.each(r, [&](int, float s) { return s * product; });
    if (a.alibi)
      x.each(r, [&](int i, float s) {
        return s + row.slope * (float)kvl__apart(index[x.column(i)], row.at);
      });
    if constexpr (H::ACTIVE) {
      const hook_row of = of_hook(row);
      x.each(r, [&](int i, float s) {
        const int key = index[x.column(i)];
        return hook(s, of, key < of.length ? key : 0);
      });
    }
  }
  /* Computes scores and weights at once, for one run of keys that all rows see, with only a
   * hook or none. Then bias and exponentials do not wait for each other. */
  __device__ __forceinline__ void weigh_run(bool tiny) {
    const float late = load_late(shape::F8 ? key_size() : memory.scale);
    const float by = rule.scale * late;
    const float shift[2] = {finite_shift(x.m[0]), finite_shift(x.m[1])};
    if constexpr (H::ACTIVE) {
      const hook_row of[2] = {of_hook(memory.rows[r0]), of_hook(memory.rows[r1])};
      x.weigh_by(scale(), sum, second, [&](int i, float s) {
        const int r = i / 2 & 1, key = span.x + pair + x.column(i);
        return hook(s * by, of[r], key) - shift[r];
      });
    } else if (a.alibi) {
      const wgmma_row rows[2] = {memory.rows[r0], memory.rows[r1]};
      float first[2];
#pragma unroll
      for (int r = 0; r < 2; r++)
        first[r] = rows[r].slope * (float)kvl__apart(span.x + pair, rows[r].at) - shift[r];
      auto line = [&](int i) {
        const int r = i / 2 & 1;
        return rows[r].slope * (float)x.column(i) + first[r];
      };
      if (!capped())
        x.weigh_by(scale(), sum, second, [&](int i, float s) { return s * by + line(i); });
      else if (D > 64 && tiny) /* at head_dim 64 ptxas would spill */
        x.template weigh_capped<true>(scale(), sum, second, by, rule.cap, line);
      else x.template weigh_capped<false>(scale(), sum, second, by, rule.cap, line);
    } else if (capped()) {
      auto down = [&](int i) { return -shift[i / 2 & 1]; };
      if (tiny) x.template weigh_capped<true>(scale(), sum, second, by, rule.cap, down);
      else x.template weigh_capped<false>(scale(), sum, second, by, rule.cap, down);
    } else {
      x.weigh_by(scale(), sum, second,
                 [&](int i, float s) { return s * by - shift[i / 2 & 1]; });
    }
  }
  __device__ __forceinline__ void mask(int stage) {
    const int *index = memory.indices[stage];
    const short_divisor heads = w.heads(plan);
    const wgmma_sight sight0(a, w, r0, r0 / heads), sight1(a, w, r1, r1 / heads);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
      const int key = index[pair + x.column(i)];
      if (!(i & 2 ? sight1 : sight0).sees(key)) x.s[i] = -INFINITY;
    }
    if (!BIASED || !a.tree) return;
    const int length = a.lens[w.seq], tree = tree_begin(a, length), last = w.tokens - 1;
    const int token0 = w.token0 + min(r0 / heads, last);
    const int token1 = w.token0 + min(r1 / heads, last);
    uint64_t hidden = 0;
#pragma unroll 4
    for (int i = 0; i < KEYS / 2; i++) {
      const int key = index[pair + x.column(i)];
      const bool hides = key >= tree && key < length &&
                         !tree_shows(a, i & 2 ? token1 : token0, length, key);
      hidden |= (uint64_t)hides << i;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
      if (hidden >> i & 1) x.s[i] = -INFINITY;
  }
  /* Turns the products with the keys of a stage into weights. The votes are outside of
   * branches, because after a vote inside a branch ptxas keeps no descriptors in uniform
   * registers. */
  template <bool MAY_FUSE> __device__ __forceinline__ void weigh(uint32_t k) {
    const bool masked = span.x < low || span.y > high;
    bool fused = false, tiny = false;
    if (BIASED && MAY_FUSE) {
      fused = exists && (!H::ACTIVE || (!capped() && !a.alibi)) && ready && !masked &&
              span.y - span.x == KEYS - 1;
      const float by = shape::F8 ? rule.scale * key_size() : rule.scale;
      if (capped()) {
        const float most = x.largest_size(second) * by;
        fused = fused && most <= CAP_SMALL && by < 1e4f; /* by^9 is a float */
        tiny = most <= CAP_TINY;
      }
      fused = __all_sync(ALL_LANES, fused);
      tiny = __all_sync(ALL_LANES, tiny);
    }
    if (BIASED && exists && !fused) { /* a row that does not exist needs none */
      bias_row(k, 0);
      if (second) bias_row(k, 1);
    }
    if (masked) mask(k);
    barrier_arrive_warp(memory.k_empty(k), lane);
    if (--left == 0) barrier_arrive_warp(memory.q_empty(q_step % QS), lane);
    if (!ready) {
      x.refer(scale());
      ready = __all_sync(ALL_LANES, x.refers());
    }
    if (BIASED && fused) weigh_run(tiny);
    else x.weigh(scale(), sum);
  }
  /* Raises references whose sums of weights became large. */
  __device__ __forceinline__ void check_weights() {
    if (__all_sync(ALL_LANES, fmaxf(sum[0], sum[1]) <= WEIGHTS_MOST)) return;
    if (__all_sync(ALL_LANES, fmaxf(sum[0], sum[1]) <= WEIGHTS_LOST)) {
      x.lower(sum);
      return;
    }
    scores_again<T, BIASED>(a, w, left, r0, hook, scale(), x);
#pragma unroll
    for (int r = 0; r < 2; r++)
      x.raise(r, fmaxf(x.largest(r) * scale() - finite_shift(x.m[r]), 0.f));
    x.weigh(scale(), sum);
  }
  __device__ __forceinline__ void write_work() {
    if (a.out_dtype == a.dtype && !a.prev_lse && w.part < 0) {
      write_plain_rows<T>(a, plan, w, x, memory.out(consumer * 4 + warp),
                          first_row(consumer, warp));
    } else {
      write_row_of_work(a, plan, w, x, 0, r0);
      write_row_of_work(a, plan, w, x, 1, r1);
    }
  }

  /* Before the first piece of work: a tile of no weights. */
  __device__ __forceinline__ void begin_nothing() {
    left = 0;
    fresh = true;
    sum[0] = sum[1] = x.l[0] = x.l[1] = 0.f;
#pragma unroll
    for (float &s : x.s) s = 0.f;
  }
  /* Weighs the first tile of the first piece of work; false if there is no work. */
  __device__ __forceinline__ bool begin_first() {
    if (memory.wait_work(0).tokens == 0) return false;
    barrier_wait(memory.q_full(0), 0);
    begin_work();
    barrier_wait(memory.k_full(0), 0);
    products_begin();
    x.scores(memory.q(0, consumer), memory.k(0));
    products_wait<0>();
    settle(x.s);
    span = memory.span(0);
    weigh<false>(0);
    return true;
  }
  /* An iteration gives the tensor cores the scores of a tile and the values of the previous
   * tile, also when the tile begins the next piece of work; then the previous piece is
   * written. After the last piece, the scores are of an empty tile. With a bias, the code
   * for weights is long; to have only one copy of it, the first values are of an empty
   * tile, too. */
  __device__ __forceinline__ void attend() {
    if (BIASED) begin_nothing();
    else if (!begin_first()) return;
    for (bool first = BIASED;; first = false) {
      x.l[0] += sum[0];
      x.l[1] += sum[1];
      x.pack();
      const uint32_t v = step % STAGES, v_parity = step / STAGES & 1;
      const bool ends = left == 0;
      bool more = true;
      if (ends) {
        more = memory.wait_work(n).tokens > 0;
        if (more) {
          q_step++;
          barrier_wait(memory.q_full(q_step % QS), q_step / QS & 1);
        }
      }
      const uint32_t k = ++step % STAGES;
      if (more) barrier_wait(memory.k_full(k), step / STAGES & 1);
      span = memory.span(k);
      products_begin();
      x.scores(memory.q(q_step % QS, consumer), memory.k(k));
      if (!first) barrier_wait(memory.v_full(v), v_parity);
      products_begin();
      x.values(memory.v(v), fresh);
      fresh = false;
      products_wait<1>();
      settle(x.s);
      /* The scores of the first tile of a piece become weights when the previous piece is
       * written. With a bias there is only one copy of that long code, for both kinds of
       * tiles. */
      if (!BIASED && !ends) weigh<false>(k);
      if (!BIASED || ends) {
        products_wait<0>();
        settle(x.out);
        if (!first) barrier_arrive_warp(memory.v_empty(v), lane);
      }
      if (ends) {
        if (!first) write_work();
        if (!more) return;
        begin_work();
      }
      if (BIASED || ends) weigh<BIASED>(k);
      if (BIASED) { /* even if it has already waited, because ptxas does not see that */
        products_wait<0>();
        settle(x.out);
        if (!ends) barrier_arrive_warp(memory.v_empty(v), lane);
      }
      if (!ends) check_weights();
    }
  }
};

#endif

/* BIASED: with ALiBi, a soft cap, a draft tree or a hook. */
template <class T, class shape, bool BIASED, class H>
__device__ __forceinline__ void wgmma_attention(const kvl_paged_attention_args &a,
                                                const wgmma_maps &maps,
                                                const wgmma_plan &plan, const H &hook) {
#if KVL_SM90A
  __shared__ wgmma_memory<shape> memory;
  if (threadIdx.x == 0) {
    prefetch_map(&maps.rows);
    memory.init(plan, BIASED ? 1.f : a.scale * LOG2E);
  }
  ask_for_tables<int>(a);
  /* warp is the same in all lanes; the shuffle tells the compiler so. */
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), warpgroup = warp / 4;
  if (warp != WORK_FINDER) {
    begin_after_others();
    if (shape::JOIN_BESIDE || plan.divided == 0) let_next_start();
  }
  if (warpgroup > 0 && warpgroup <= shape::CONSUMERS) {
    wait_for_previous(); /* a second time it costs nothing; tools/early_writes.lua sees it */
    if (warpgroup > plan.consumers) return;
    registers_take<shape::TAKE>();
    wgmma_consumer<T, shape, BIASED, H>(a, plan, hook, memory, warpgroup - 1).attend();
    return;
  }
  registers_give<shape::GIVE>();
  if constexpr (shape::BYTES) {
    if (warpgroup > 0) {
      if constexpr (shape::PACKED) convert_packed<T, shape>(memory, warp % 4);
      else convert_tiles<shape>(memory, warp % 4 >= 2, warp % 2);
      return;
    }
  }
  if constexpr (shape::BY_ROW) {
    if (warpgroup > 0) bring_rows<shape>(a, plan, memory, warp % 2, warp % 4 / 2);
    else if (warp == 2) bring_queries<T, shape>(a, memory);
    else if (warp == WORK_FINDER) find_work<shape>(a, plan, memory);
    return;
  }
  constexpr bool BOXES = shape::BOXES && !H::ACTIVE; /* nothing else comes here */
  if (!BOXES && warp < 2 && plan.box == 0) {
    bring_rows<shape>(a, plan, memory, warp == 1, 0);
  } else if (warp == 0) bring_tiles<shape, false>(a, maps, plan, memory);
  else if (warp == 1) bring_tiles<shape, true>(a, maps, plan, memory);
  else if (warp == 2) bring_queries<T, shape>(a, memory);
  else find_work<shape>(a, plan, memory);
#endif
}

template <class T, class shape, bool BIASED>
__global__ void __maxnreg__(shape::REGISTERS)
    paged_wgmma(const __grid_constant__ kvl_paged_attention_args a,
                const __grid_constant__ wgmma_maps maps,
                const __grid_constant__ wgmma_plan plan) {
  wgmma_attention<T, shape, BIASED>(a, maps, plan, no_hook());
}

}  // namespace kvl

#endif
