/* Flash attention over paged KV for Hopper: 16-bit q and cache, head_dim 64, 96, 128, 192 or
 * 256, blocks of a multiple of 8 tokens; several new tokens a sequence, or one of more than 32
 * query heads on a KV head. paged_decode.cuh and paged_prefill.cuh do everything else.
 *
 * A thread block stays on its SM and takes item after item: query rows that share a KV head
 * (tokens with all heads of the group); wgmma_plan.cuh tells which. Its warpgroups are
 *   consumers  two, with 64 rows each (one, if there are no more rows): S = Q K^T and O += P V
 *              by wgmma, and the softmax in between in registers
 *   producers  one: a warp finds the work, ahead of the others; a warp brings K and another V
 *              through a ring of tiles of keys, with a copy for every block of the table; a
 *              warp brings Q of the next item while this one is computed
 * Keys are taken from the last to the first, so the tiles with a causal mask come first and
 * the loop over the others has no mask.
 *
 * S of tile j and P V of tile j-1 are given to the tensor cores together, also when j belongs
 * to the next item; the softmax of j runs beside P V and the other consumer's products. It
 * does not need the largest score: weights are relative to a reference. An item's first tile
 * sets it, and it is raised only when a sum of weights gets large.
 *
 * Flops     4 * head_dim * heads * seen pairs of row and key
 * Bytes     2 * keys * head_dim * 2 per item, from L2
 * Limit     tensor cores; with few rows memory
 * Tolerance P is rounded to q's dtype before P V, as in paged_prefill.cuh
 * Best      H200, 2026-11-22, kernels/dev/prefill.cu: bf16, 32/8 heads, head_dim 128, block 16,
 *           random tables, TFLOP/s; in brackets the version before on this machine:
 *             causal 4K  636   8K  690   16K  738 (636)   32K  677 (612)   cuDNN 584, 595
 *             4K x 32K  703 to 749 (655)   cuDNN 620
 *             4K over 16K, head_dim 64  464   96  620   128  741   192  785   256  720
 *           2 ... 32 tokens over 1 x 128K 151 to 159 us (1416), 128 tokens 390 us
 *           17 ... 64 heads a KV head, 16 x 8K 3520 GB/s
 *           notes/20261122-wgmma.md has the versions
 * Source    Shah et al. 2024 (FlashAttention-3): warp specialisation, softmax under P V;
 *           Dao et al. 2022: online softmax; Osama et al. 2023: stream-K. Results do not depend
 *           on thread timing.
 */
#ifndef KVL_CUDA_PAGED_WGMMA_CUH
#define KVL_CUDA_PAGED_WGMMA_CUH

#include "launch.cuh"
#include "wgmma_combine.cuh"
#include "wgmma_convert.cuh"
#include "wgmma_state.cuh"

namespace kvl {

#if KVL_SM90A

/* A consumer's loop: an iteration gives the tensor cores the scores of a tile and the values
 * of the one before, also when the tile begins the next piece of work; then the piece before
 * it is written. After the last piece the scores are those of nothing. */
template <class T, class shape, bool BIASED, class H>
__device__ void attend(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                       const H &hook, wgmma_memory<shape> &memory, int consumer) {
  constexpr int D = shape::D, KEYS = shape::KEYS, STAGES = shape::STAGES;
  constexpr int QS = shape::Q_STAGES;
  const int warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP;
  /* This lane's rows of every product, and its first column. */
  const int r0 = consumer * 64 + warp * 16 + lane / 4, r1 = r0 + 8, pair = lane % 4 * 2;
  /* What x.s is multiplied with; with a bias, 1. */
  float &key_size = memory.scales[consumer * 4 + warp];
  const float &scale = shape::F8 && !BIASED ? key_size : memory.scale;
  constexpr int TURN = 1, BOTH = 2 * WARPGROUP; /* named barriers TURN, TURN + 1 */
  auto turn_begin = [&] {
    if (shape::TURNS) named_sync(TURN + consumer, BOTH);
  };
  auto turn_end = [&] {
    if (shape::TURNS) named_arrive(TURN + (consumer ^ 1), BOTH);
  };
  if (consumer == 1) turn_end(); /* consumer 0 goes first */

  wgmma_state<T, shape> x;
  wgmma_work w;
  uint32_t n = 0, step = 0, q_step = 0;
  const bool plain = a.out_dtype == a.dtype && !a.prev_lse;
  int left;      /* tiles of this piece without scores */
  int low, high; /* every row of the warp sees all of a tile within them */
  int2 span = {}; /* the present tile's */
  float slope[2]; /* ALiBi's, of the two rows, and the rows' positions */
  int own[2];
  auto begin = [&] {
    w = memory.wait_work(n);
    memory.work_done(n++);
    left = w.tiles;
    low = 0, high = INT_MAX;
    if (shape::F8) {
      __syncwarp();
      if (lane == 0)
        key_size = (BIASED ? 1.f : a.scale * LOG2E) * key_scale(a, w.kv_head).size;
      __syncwarp();
    }
    if (BIASED && a.alibi) {
      const query_rows rows = w.rows();
      slope[0] = a.alibi[rows.head(r0)] * LOG2E;
      slope[1] = a.alibi[rows.head(r1)] * LOG2E;
      own[0] = wgmma_sight(a, w, r0).at;
      own[1] = wgmma_sight(a, w, r1).at;
    }
    /* Rows that do not exist may see anything, and need no new reference. */
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
    high = warp_min(high);
    if (BIASED && a.tree) high = min(high, tree_begin(a, a.lens[w.seq]) - 1);
#pragma unroll
    for (int i = 0; i < D / 2; i++) x.out[i] = 0.f;
  };
  /* Turns products into scores in base 2. */
  auto bias = [&](int stage) {
    const int *position = memory.positions[stage];
    score_rule rule(a);
    if (shape::F8) rule.scale *= key_size;
    float by = rule.scale;
    if (a.soft_cap > 0.f) {
      by = 1.f;
      cap_scores(rule, x.s);
    }
    if (a.alibi) {
      const float apart = (float)(own[0] - own[1]);
      if (span.y - span.x == KEYS - 1) { /* one run of keys */
        const float first = (float)(span.x + pair - own[0]);
        const float bias0 = slope[0] * first, bias1 = slope[1] * (first + apart);
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
          const float along = (float)(i / 4 * 8 + (i & 1));
          x.s[i] = x.s[i] * by + (i & 2 ? slope[1] * along + bias1 : slope[0] * along + bias0);
        }
      } else {
#pragma unroll
        for (int g = 0; g < KEYS / 8; g++) {
          const int2 at = *(const int2 *)(position + 8 * g + pair);
          const float far0 = (float)(at.x - own[0]), far1 = (float)(at.y - own[0]);
          x.s[4 * g] = x.s[4 * g] * by + slope[0] * far0;
          x.s[4 * g + 1] = x.s[4 * g + 1] * by + slope[0] * far1;
          x.s[4 * g + 2] = x.s[4 * g + 2] * by + slope[1] * (far0 + apart);
          x.s[4 * g + 3] = x.s[4 * g + 3] * by + slope[1] * (far1 + apart);
        }
      }
    } else if (a.soft_cap == 0.f) {
#pragma unroll
      for (int i = 0; i < KEYS / 2; i++) x.s[i] *= by;
    }
    if constexpr (H::ACTIVE) {
      const hook_row of0 = row_for_hook(a, w, r0), of1 = row_for_hook(a, w, r1);
#pragma unroll
      for (int i = 0; i < KEYS / 2; i++) {
        const int at = position[i / 4 * 8 + pair + (i & 1)];
        x.s[i] = hook(x.s[i], i & 2 ? of1 : of0, at < of0.length ? at : 0);
      }
    }
  };
  auto mask = [&](int stage) {
    const int *position = memory.positions[stage];
    const wgmma_sight sight0(a, w, r0), sight1(a, w, r1);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
      const int at = position[i / 4 * 8 + pair + (i & 1)];
      if (!(i & 2 ? sight1 : sight0).sees(at)) x.s[i] = -INFINITY;
    }
    if (!BIASED || !a.tree) return;
    const int length = a.lens[w.seq], tree = tree_begin(a, length), last = w.tokens - 1;
    const int token0 = w.token0 + min(r0 / w.heads_each, last);
    const int token1 = w.token0 + min(r1 / w.heads_each, last);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
      const int at = position[i / 4 * 8 + pair + (i & 1)];
      if (at >= tree && at < length && !tree_shows(a, i & 2 ? token1 : token0, length, at))
        x.s[i] = -INFINITY;
    }
  };

  if (memory.wait_work(0).tokens == 0) return;
  begin();
  barrier_wait(memory.q_full(0), 0);
  barrier_wait(memory.k_full(0), 0);
  turn_begin();
  products_begin();
  x.scores(memory.q(0, consumer), memory.k(0));
  turn_end();
  products_wait<0>();
  settle(x.s);
  uint32_t k = 0;
  span = memory.spans[0];
  float sum[2];
  bool ready = false; /* every row of the warp has a reference */
  auto weigh = [&] {
    if (BIASED) bias(k);
    if (span.x < low || span.y > high) mask(k);
    barrier_arrive_warp(memory.k_empty(k), lane);
    if (--left == 0) barrier_arrive_warp(memory.q_empty(q_step % QS), lane);
    if (!ready) {
      x.refer(scale);
      ready = __all_sync(ALL_LANES, x.refers());
    }
    x.weigh(scale, sum);
  };
  weigh();
  for (;;) {
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
    k = ++step % STAGES;
    if (more) barrier_wait(memory.k_full(k), step / STAGES & 1);
    span = memory.spans[k];
    turn_begin();
    products_begin();
    x.scores(memory.q(q_step % QS, consumer), memory.k(k));
    barrier_wait(memory.v_full(v), v_parity);
    products_begin();
    x.values(memory.v(v));
    turn_end();
    products_wait<1>();
    settle(x.s);
    if (!ends) weigh();
    products_wait<0>();
    settle(x.out);
    barrier_arrive_warp(memory.v_empty(v), lane);
    if (ends) {
      if (plain && w.part < 0) {
        write_plain_rows<T>(a, w, x, memory.out(consumer * 4 + warp), r0 - lane / 4);
      } else {
        write_row_of_work<T>(a, plan, w, x, 0, r0);
        write_row_of_work<T>(a, plan, w, x, 1, r1);
      }
      if (!more) return;
      begin();
      ready = false;
      weigh();
    } else if (!__all_sync(ALL_LANES, fmaxf(sum[0], sum[1]) <= WEIGHTS_MOST)) {
      if (__all_sync(ALL_LANES, fmaxf(sum[0], sum[1]) <= WEIGHTS_LOST)) {
        x.lower(sum);
        continue;
      }
      scores_again<T, shape, BIASED>(a, w, left, r0, hook, x);
#pragma unroll
      for (int r = 0; r < 2; r++)
        x.raise(r, fmaxf(x.largest(r) * scale - finite_shift(x.m[r]), 0.f));
      x.weigh(scale, sum);
    }
  }
}

#endif

/* BIASED: with ALiBi, a soft cap, a draft tree or a hook. */
template <class T, class shape, bool BIASED, class H>
__device__ __forceinline__ void wgmma_attention(const kvl_paged_attention_args &a,
                                                const CUtensorMap &map,
                                                const wgmma_plan &plan, const H &hook) {
#if KVL_SM90A
  __shared__ wgmma_memory<shape> memory;
  if (threadIdx.x == 0) {
    prefetch_map(&map);
    memory.init(plan, BIASED ? 1.f : a.scale * LOG2E);
  }
  __syncthreads();
  /* The tables are large, and a cold read of them would be the first thing to wait for. */
  const int64_t number = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (number * 32 < a.seqs * a.max_blocks) prefetch_l2(a.tables + number * 32);
  if (number * 32 < a.seqs) prefetch_l2(a.lens + number * 32);
  wait_for_previous();
  /* warp is the same in all lanes; the shuffle tells the compiler so. */
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), warpgroup = warp / 4;
  if (warpgroup > 0 && warpgroup <= shape::CONSUMERS) {
    registers_take<shape::TAKE>();
    attend<T, shape, BIASED>(a, plan, hook, memory, warpgroup - 1);
    return;
  }
  registers_give<shape::GIVE>();
  if constexpr (shape::F8) {
    if (warpgroup > 0) {
      if (warp % 4 < 2) convert_tiles<T, shape, false>(memory, warp % 2);
      else convert_tiles<T, shape, true>(memory, warp % 2);
      return;
    }
  }
  if (warp < 2 && plan.box == 0) {
    if (warp == 0) bring_rows<shape, false>(a, plan, memory);
    else bring_rows<shape, true>(a, plan, memory);
  } else if (warp == 0) bring_tiles<shape, false>(a, map, plan, memory);
  else if (warp == 1) bring_tiles<shape, true>(a, map, plan, memory);
  else if (warp == 2) bring_queries<T, shape>(a, memory);
  else find_work<shape>(a, plan, memory);
#endif
}

template <class T, class shape, bool BIASED>
__global__ void __launch_bounds__(shape::THREADS, 1)
    paged_wgmma(const __grid_constant__ kvl_paged_attention_args a,
                const __grid_constant__ CUtensorMap map,
                const __grid_constant__ wgmma_plan plan) {
  wgmma_attention<T, shape, BIASED>(a, map, plan, no_hook());
}

/* ---- launch ---------------------------------------------------------------------------- */

/* Maps the cache as [blocks * 2 * kv_heads, block_size / 8, PARTS, 8, ATOM], so that a box of
 * `groups` times eight tokens arrives as [groups, PARTS] atoms; those of f8e4m3 are not
 * swizzled. Copies of single rows need no map. */
template <class T, class shape>
int map_cache(const kvl_cache_view &c, int groups, CUtensorMap *map) {
  if (groups == 0) {
    *map = {};
    return KVL_OK;
  }
  const cuuint64_t bytes = shape::F8 ? 1 : 2, bytes_row = c.head_dim * bytes;
  const cuuint64_t parts = shape::PARTS;
  const cuuint64_t dims[5] = {shape::ATOM, 8, parts, (cuuint64_t)c.block_size / 8,
                              (cuuint64_t)c.blocks * 2 * c.kv_heads};
  const cuuint64_t strides[4] = {bytes_row, bytes * shape::ATOM, 8 * bytes_row,
                                 c.block_size * bytes_row};
  const cuuint32_t box[5] = {shape::ATOM, 8, (cuuint32_t)parts, (cuuint32_t)groups, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult r = encode_map()(
      map,
      shape::F8                    ? CU_TENSOR_MAP_DATA_TYPE_UINT8
      : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      5, c.kv, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      shape::F8           ? CU_TENSOR_MAP_SWIZZLE_NONE
      : shape::ATOM == 64 ? CU_TENSOR_MAP_SWIZZLE_128B
                          : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? KVL_OK : kvl__cuda_check(cudaErrorInvalidValue);
}

inline int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }

inline bool is_hopper_device(int device) {
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major == 9;
}

/* Scores are masked before they are scaled, so the scale has to be positive. One new token
 * of at most 32 heads a KV head is for paged_decode.cuh. */
inline bool wgmma_takes(const kvl_paged_attention_args &a, int device) {
  const kvl_cache_view &c = a.cache;
  const int d = c.head_dim;
  return is_hopper_device(device) && (a.starts || a.tree || a.heads / c.kv_heads > 32) &&
         a.dtype != KVL_DTYPE_F32 && !c.pinned &&
         (c.dtype == a.dtype || c.dtype == KVL_DTYPE_F8E4M3) &&
         (d == 64 || d == 96 || d == 128 || d == 192 || d == 256) && c.blocks > 0 &&
         c.blocks * 2 * c.kv_heads <= INT_MAX &&
         (c.block_size % 8 == 0 ||
          c.blocks * 2 * c.kv_heads * c.block_size <= (int64_t)UINT32_MAX) &&
         a.scale > 1e-6f && encode_map();
}

/* About how many tiles of tokens a call has. */
inline int64_t busy_entries(const kvl_paged_attention_args &a, int tokens_tile) {
  const int64_t full = (a.tokens + tokens_tile - 1) / tokens_tile;
  return full > a.seqs ? full : a.seqs;
}
/* Do the new tokens of a sequence fill at most 64 query rows? */
inline bool few_rows(const kvl_paged_attention_args &a) {
  const int group = (int)(a.heads / a.cache.kv_heads);
  return group <= 64 && busy_entries(a, a.starts ? 64 / group : 1) == a.seqs;
}

/* Plans the work of a call; returns the bytes of its workspace, which must be 16-byte aligned
 * and may be NULL when only its size is asked for. */
template <class shape>
size_t plan_wgmma(const kvl_paged_attention_args &a, int sm_count, wgmma_plan &plan) {
  const int group = (int)(a.heads / a.cache.kv_heads);
  const int heads_each = group < shape::ROWS ? group : shape::ROWS;
  plan = {};
  plan.by_block = divisor(a.cache.block_size);
  /* A box of f8e4m3 lies in one half of a tile. */
  plan.box = a.cache.block_size % 8
                 ? 0
                 : common_divisor(a.cache.block_size, shape::KEYS / (1 + shape::F8)) / 8;
  plan.tokens_tile = a.starts ? shape::ROWS / heads_each : 1;
  plan.by_tile = divisor(plan.tokens_tile);
  plan.subgroups = (group + shape::ROWS - 1) / shape::ROWS;
  plan.lanes = a.cache.kv_heads * plan.subgroups;
  plan.entries = (int)(a.starts ? a.tokens / plan.tokens_tile + a.seqs : a.seqs);
  const int64_t busy = busy_entries(a, plan.tokens_tile);
  const int64_t room = (a.selection ? a.max_selected : a.max_blocks) * a.cache.block_size;
  if (busy * plan.lanes < 2 * sm_count || busy == a.seqs) {
    plan.shares = sm_count;
    /* The tiles of one sequence have the same keys: with whole shares for each of them, these
     * keys are read at about the same time. */
    if (a.seqs == 1 && busy <= sm_count / 4) plan.shares = sm_count / busy * busy;
    const int64_t tiles = plan.entries * (room / shape::KEYS + 1) * plan.lanes;
    if (tiles < plan.shares) plan.shares = (int)tiles;
    plan.rows = (int)(a.tokens < plan.tokens_tile ? a.tokens : plan.tokens_tile) * heads_each;
    /* A share reads at least 8 times the bytes of its partial result. */
    const int bytes = (shape::F8 ? 2 : 4) * shape::KEYS; /* a tile's, for one dim */
    plan.least = (8 * 4 * plan.rows + bytes - 1) / bytes;
    char *at = (char *)a.workspace;
    const size_t parts = (size_t)2 * plan.shares * plan.rows;
    plan.out = (float *)at;
    plan.lse = plan.out + parts * shape::D;
    plan.firsts = (uint32_t *)(plan.lse + parts);
    return parts * (shape::D + 1) * sizeof(float) + (plan.entries + 1) * sizeof(uint32_t);
  }
  /* As many KV heads at once as half of the L2 holds, if these are enough to do. */
  const int64_t bytes = room * shape::D * (shape::F8 ? 2 : 4), l2 = 25 << 20;
  int64_t section = l2 / (bytes > 0 ? bytes : 1) * plan.subgroups;
  const int64_t enough = (4 * sm_count + busy - 1) / busy;
  if (section < enough) section = enough;
  plan.section = (int)(section < plan.lanes ? section : plan.lanes);
  if (plan.section == plan.lanes) return 0;
  plan.counter = (int *)a.workspace;
  return sizeof(int);
}

/* Launches a call that is planned. start(grid, programmatic, map) launches the attention. */
template <class T, class shape, class F>
int launch_planned(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                   const kvl_cuda_queue *q, F start) {
  CUtensorMap map;
  int status = map_cache<T, shape>(a.cache, plan.box, &map);
  if (status < 0) return status;
  if (plan.shares > 0) {
    status = start(plan.shares, true, map);
    if (status < 0) return status;
    const dim3 grid(plan.entries * plan.lanes, ceil_div(plan.rows, WGMMA_COMBINE_WARPS));
    return launch_programmatic(wgmma_combine<shape>, grid, WGMMA_COMBINE_WARPS * WARP, 0, q,
                               a, plan);
  }
  if (plan.counter)
    status = kvl__cuda_check(cudaMemsetAsync(plan.counter, 0, sizeof(int), q->stream));
  if (status < 0) return status;
  const int64_t items = (int64_t)plan.entries * plan.lanes;
  return start(items < q->sm_count ? (int)items : q->sm_count, false, map);
}

template <class T, class shape, bool BIASED>
int launch_shape(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  constexpr auto kernel = paged_wgmma<T, shape, BIASED>;
  wgmma_plan plan;
  plan_wgmma<shape>(a, q->sm_count, plan);
  return launch_planned<T, shape>(a, plan, q, [&](int grid, bool programmatic,
                                                  const CUtensorMap &map) {
    int status = allow_shared<paged_wgmma<T, shape, BIASED>>(q, shape::SHARED_BYTES);
    if (status < 0) return status;
    if (programmatic)
      return launch_programmatic(kernel, grid, shape::THREADS, shape::SHARED_BYTES, q, a, map,
                                 plan);
    kernel<<<grid, shape::THREADS, shape::SHARED_BYTES, q->stream>>>(a, map, plan);
    return (int)KVL_OK;
  });
}

/* The result of f with a head_dim that wgmma_takes, as a constant. */
template <class F> auto with_wgmma_dim(int dim, F f) {
  if (dim == 64) return f(std::integral_constant<int, 64>());
  if (dim == 96) return f(std::integral_constant<int, 96>());
  if (dim == 128) return f(std::integral_constant<int, 128>());
  if (dim == 192) return f(std::integral_constant<int, 192>());
  return f(std::integral_constant<int, 256>());
}

/* The result of f with the shape for a call that wgmma_takes. */
template <int D, class F> auto with_wgmma_shape(const kvl_paged_attention_args &a, F f) {
  const bool f8 = a.cache.dtype == KVL_DTYPE_F8E4M3;
  if (few_rows(a))
    return f8 ? f(wgmma_shape<D, true, true>()) : f(wgmma_shape<D, true, false>());
  return f8 ? f(wgmma_shape<D, false, true>()) : f(wgmma_shape<D, false, false>());
}

/* The bytes of the workspace of a call that wgmma_takes. */
inline size_t wgmma_bytes(const kvl_paged_attention_args &a, int sm_count) {
  return with_wgmma_dim(a.cache.head_dim, [&](auto dim) {
    return with_wgmma_shape<dim.value>(a, [&](auto shape) {
      wgmma_plan plan;
      return plan_wgmma<decltype(shape)>(a, sm_count, plan);
    });
  });
}

template <class T, int D>
int launch_wgmma(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  return with_wgmma_shape<D>(a, [&](auto shape) {
    if (a.alibi || a.soft_cap > 0.f || a.tree)
      return launch_shape<T, decltype(shape), true>(a, q);
    return launch_shape<T, decltype(shape), false>(a, q);
  });
}

}  // namespace kvl

#endif
