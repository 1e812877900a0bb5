/* Attention over latents for Hopper: pages whose values are the first numbers of their keys, in
 * q's 16-bit dtype; keys of up to 576 numbers and values of up to 512, any number of heads, new
 * tokens and blocks. A key is read once for all heads of a KV head, 64 rows of q at a time.
 *
 * The work is that of wgmma_plan.cuh, and lists of tokens are a source of keys like tables and
 * selections. The first of three warpgroups brings Q and tiles of 64 keys
 * (latent_memory.cuh; for f8_latent latent_convert.cuh, which has a fourth warpgroup if
 * there are few rows). The other two are consumers with the same rows. There are two kinds
 * of consumers.
 *   many   64 rows: tokens with all heads. One consumer takes the even tiles of a piece of work,
 *          the other the odd ones: S = Q K^T and the softmax, and passes its weights to the
 *          other. Each adds up half of the values' numbers, 256 columns, for both tiles: O
 *          += P V. So S and the softmax are computed once, and the softmax of one tile runs
 *          beside products of the other. A new tile arrives piece by piece in the memory of
 *          pieces that were read.
 *   few    up to 16 or 32 heads of one token. A product has 64 rows, so here these are keys
 *          and numbers of values: S^T = K Q^T, O^T += V^T P^T, and no row is for nothing. Each
 *          computes S^T from half of the numbers. Both halves go to shared memory; then
 *          neighbouring threads have a row's keys.
 *
 * Flops     2 * (key_dim + value_dim) * heads * seen pairs of token and key
 * Bytes     keys * key_dim * element for every 64 rows, from L2 or memory
 * Limit     tensor cores from about 60 rows on, else memory
 * Tolerance as paged_wgmma.cuh: P is rounded to q's dtype
 * Source    Liu et al. 2024 (DeepSeek-V2: multi-head latent attention, absorbed); the cut of the
 *           output's columns over two warpgroups is FlashMLA's. Results do not depend on thread
 *           timing. */
#ifndef KVL_CUDA_LATENT_CUH
#define KVL_CUDA_LATENT_CUH

#include "cuda/attention/latent_convert.cuh"
#include "cuda/attention/wgmma_state.cuh"

namespace kvl {

#if KVL_SM90A

/* The reference of a row's weights is a score, in base 2, that no score of the row has passed
 * by more than this: so it seldom changes. f16 holds 128 times such a weight. */
constexpr float LATENT_RISE = 9.f;

/* A consumer of many rows: 64 of q, and half of the values' columns. A thread has two rows,
 * with two of every eight columns; `product` says which. The weights of an even tile are
 * passed in memory of their own, those of an odd tile in the memory of the tile's last
 * piece. half: 0, the even tiles and the first columns, or 1. It is no constant: both consumers
 * run the same instructions, which have to come from memory only once.
 *
 * What runs once for a piece of work is short code: instructions that run for the first time
 * come from memory, which takes longer than what they do. */
template <class T, class shape, class H> struct latent_many {
  static constexpr int KEYS = shape::KEYS, COLUMNS = shape::D / 2, STEPS = KEYS / 16;
  static constexpr int BOTH = 2 * WARPGROUP;       /* threads of both consumers */
  static constexpr int EVEN = 1, ODD = 2, END = 3; /* barriers: weights are ready; the end */

  const kvl_paged_attention_args &a;
  const wgmma_plan &plan;
  const H &hook;
  latent_memory<shape> &memory;
  const int half, warp, lane, pair; /* pair: this lane's first column of every eight */
  const int r0, r1;                 /* its rows */
  const score_rule rule;
  const wgmma_work *w; /* in shared memory: registers are short */
  wgmma_sight sight[2];
  int low, high; /* every row of the warp sees all of a tile within them */
  float s[KEYS / 2], out[COLUMNS / 2];
  float m[2], l[2]; /* the reference; the sum of the weights of this consumer's tiles */
  latent_stage<shape> stage;

  __device__ __forceinline__ latent_many(const kvl_paged_attention_args &a_,
                                         const wgmma_plan &plan_, const H &hook_,
                                         latent_memory<shape> &memory_, int half_)
      : a(a_), plan(plan_), hook(hook_), memory(memory_), half(half_),
        warp(threadIdx.x / WARP % 4), lane(threadIdx.x % WARP), pair(lane % 4 * 2),
        r0(warp * 16 + lane / 4), r1(r0 + 8), rule(a_) {}

  /* The address of Q, which is the same in all lanes. The shuffle tells the compiler so, which
   * then neither keeps matrices in registers of lanes nor computes them ahead of their use. */
  __device__ __forceinline__ uint32_t q_of_all() const {
    return __shfl_sync(ALL_LANES, memory.q(), 0);
  }
  /* The products of this consumer's tile, piece by piece as it comes. */
  __device__ __forceinline__ void scores() {
    const uint32_t at = q_of_all();
    const uint64_t q = matrix_at(at, 1024);
#pragma unroll
    for (int i = 0; i < LATENT_PIECES; i++) {
      const int piece = latent_piece(i);
      const uint64_t k = matrix_at(at + memory.keys_at(half) + latent_piece_at(piece),
                                   latent_group(piece));
      barrier_wait(memory.full(half, piece), stage.phases >> half & 1);
      if (plan.box == 0) fence_async();
      products_begin();
#pragma unroll
      for (int d = 0; d < 4 * latent_parts(piece); d++) {
        const int part = latent_part(piece) + d / 4;
        product<T>(s, matrix_plus(q, part * shape::Q_PART_BYTES + d % 4 * 32),
                   matrix_plus(k, d / 4 * 1024 + d % 4 * 32), i + d > 0);
      }
      products_commit();
    }
    products_wait<0>();
    settle(s);
  }
  /* Turns products into scores in base 2, of keys that are seen. */
  __device__ __forceinline__ void finish_scores() {
    const int *const index = memory.indices[half] + pair;
    if (a.soft_cap > 0.f) {
#pragma unroll
      for (float &x : s) x = cap_score(rule.scale, rule.cap, x);
    } else {
#pragma unroll
      for (float &x : s) x *= rule.scale;
    }
    if (a.alibi) {
      const query_rows rows = w->rows();
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = min(i ? r1 : r0, rows.count - 1);
        const float slope = a.alibi[rows.head(r)] * LOG2E;
        const int at = w->index0 + r / w->heads_each;
#pragma unroll
        for (int j = 0; j < KEYS / 4; j++)
          s[j / 2 * 4 + 2 * i + j % 2] += slope *
                                          (float)kvl__apart(index[j / 2 * 8 + j % 2], at);
      }
    }
    if constexpr (H::ACTIVE) {
#pragma unroll
      for (int i = 0; i < 2; i++) change_row(i, index);
    }
    const int2 span = memory.span(half);
    if (span.x < low || span.y > high) mask(index);
  }
  /* Has the hook change the scores of the thread's row i. */
  __device__ __forceinline__ void change_row(int i, const int *index) {
    const int r = i ? r1 : r0;
    const hook_row of = row_for_hook(a, *w, r);
    const bool has = r < w->tokens * w->heads_each;
#pragma unroll
    for (int j = 0; j < KEYS / 4; j++) {
      const int key = index[j / 2 * 8 + j % 2];
      float &x = s[j / 2 * 4 + 2 * i + j % 2];
      x = hook(x, of, key < of.length ? key : 0);
      if (has && key < of.length) keep_score(hook, w->rows().row(a, r), key, x);
    }
  }
  __device__ __forceinline__ void mask(const int *index) {
    const int length = a.lens[w->seq], tree = tree_begin(a, length), last = w->tokens - 1;
    uint32_t hidden = 0; /* bit i: s[i] */
#pragma unroll 1
    for (int i = 0; i < KEYS / 2; i++) {
      const int key = index[i / 4 * 8 + (i & 1)], row = i / 2 & 1;
      bool sees = (row ? sight[1] : sight[0]).sees(key);
      if (sees && key >= tree)
        sees = tree_shows(a, w->token0 + min((row ? r1 : r0) / w->heads_each, last), length,
                          key);
      hidden |= (uint32_t)!sees << i;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
      if (hidden >> i & 1) s[i] = -INFINITY;
  }
  /* The reference for row r from this tile on, if it was `before`. */
  __device__ __forceinline__ float reference(int r, float before) const {
    float top = -INFINITY;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
      top = fmaxf(top, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
    top = warp_max<4>(top);
    return top > before + LATENT_RISE ? top : before;
  }
  /* The references from this tile on, which the other consumer is told. */
  __device__ __forceinline__ void set_references(float (&top)[2], const float (&before)[2]) {
    top[0] = reference(0, before[0]), top[1] = reference(1, before[1]);
    tell(top[0], top[1]);
  }
  /* Raises the reference of both rows, and all sums with it. */
  __device__ __forceinline__ void raise(const float (&top)[2]) {
    if (!__any_sync(ALL_LANES, top[0] != m[0] || top[1] != m[1])) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float down = exp2_fast(m[r] - finite_shift(top[r]));
      m[r] = top[r];
      l[r] *= down;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) {
        out[4 * n + 2 * r] *= down;
        out[4 * n + 2 * r + 1] *= down;
      }
    }
  }
  /* A number of each row, from one consumer to the other. */
  __device__ __forceinline__ void tell(float top0, float top1) {
    float *const told = memory.told[half];
    if (pair == 0) told[r0] = top0, told[r1] = top1;
  }
  __device__ __forceinline__ void hear(float (&x)[2]) const {
    const float *const told = memory.told[1 - half];
    x[0] = told[r0], x[1] = told[r1];
  }
  /* Turns scores into weights, sums them up and passes them to the other consumer. */
  __device__ __forceinline__ void weigh(const float (&top)[2], float (&sum)[2],
                                        uint32_t (&x)[STEPS][4]) {
    const float shift[2] = {finite_shift(top[0]), finite_shift(top[1])};
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
      s[i] = exp2_fast(s[i] - shift[i / 2 & 1]);
      sum[i / 2 & 1] += s[i];
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        x[k][i] = pack2(s[8 * k + 2 * i], s[8 * k + 2 * i + 1], T());
      store_matrices(weights_at(half, k), x[k]);
    }
  }
  /* The address of this lane's eight weights for 16 keys: the k-th 16 keys of a tile. */
  __device__ __forceinline__ uint32_t weights_at(int tile, int k) const {
    const uint32_t at = tile ? memory.keys(1) + latent_piece_at(LATENT_LAST)
                             : memory.weights();
    return at + swizzled<8>(warp * 16 + lane % 16, 2 * k + lane / 16);
  }
  __device__ __forceinline__ void take_weights(uint32_t (&x)[STEPS][4]) const {
#pragma unroll
    for (int k = 0; k < STEPS; k++) load_matrices(x[k], weights_at(1 - half, k));
  }
  /* Begins O += P V for a tile. */
  __device__ __forceinline__ void values(int tile, const uint32_t (&x)[STEPS][4]) {
    const uint64_t v = matrix_at(q_of_all() + memory.keys_at(tile) + latent_piece_at(half),
                                 latent_group(0), 1024);
    if (plan.box == 0) fence_async(); /* the other consumer may have waited for the tile */
    products_begin();
#pragma unroll
    for (int k = 0; k < STEPS; k++)
      product<T>(out, x[k], matrix_plus(v, k * 2 * latent_group(0)));
    products_commit();
  }
  __device__ __forceinline__ void values_done(int tile) {
    products_wait<0>();
    settle(out);
    memory.release(tile, half);
  }

  /* Two tiles, or a last single one. After the last tiles of a piece of work, Q is no longer
   * read. Each consumer has the weights of its own tile, and gets those of the other. */
  __device__ __forceinline__ void attend_pair(bool two, bool last) {
    const bool odd = half > 0;
    float top[2], sum[2];
    uint32_t x[STEPS][4]; /* weights of the tile whose values are next */
    if (two || !odd) scores();
    if (last) barrier_arrive_warp(memory.q_empty(), lane);
    if (!odd) memory.release(0, LATENT_LAST);
    if (two || !odd) finish_scores();
    if (odd) {
      named_sync(EVEN, BOTH);
      hear(top);
      take_weights(x);
      raise(top);
    } else {
      set_references(top, m);
      weigh(top, sum, x);
      named_arrive(EVEN, BOTH);
      raise(top);
      l[0] += sum[0], l[1] += sum[1];
    }
    values(0, x);
    uint32_t own[STEPS][4];
    if (odd && two) {
      set_references(top, top);
      weigh(top, sum, own);
      fence_async(); /* before another tile's last piece arrives there */
      named_arrive(ODD, BOTH);
    }
    values_done(0);
    if (!two) return;
    if (!odd) {
      named_sync(ODD, BOTH);
      hear(top);
      take_weights(own);
      memory.release(1, LATENT_LAST);
    }
    raise(top);
    if (odd) l[0] += sum[0], l[1] += sum[1];
    values(1, own);
    values_done(1);
  }

  /* Has the lane's row r a sum that is not finite? See paged_mend.cuh. */
  __device__ __forceinline__ bool mends(int r) const {
    float all = 0.f;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) all += out[4 * n + 2 * r] + out[4 * n + 2 * r + 1];
    return !(warp_sum<4>(all) * 0.f == 0.f);
  }
  /* Calls give(at, x, y) for the thread's two numbers of its first row in eight columns,
   * which are at a row's `at`. */
  template <class F> __device__ __forceinline__ void each_pair(F give) {
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) {
      const int at = half * COLUMNS + n * 8;
      if (at < a.cache.value.dim) give(at + pair, out[4 * n], out[4 * n + 1]);
    }
  }
  __device__ __forceinline__ void write_floats(float scale, float *to) {
    each_pair([=](int at, float x, float y) {
      *(float2 *)(to + at) = make_float2(x * scale, y * scale);
    });
  }
  /* Four lanes hold four runs of eight neighbours together; each writes one. */
  __device__ __forceinline__ void write_halves(bool writes, float scale, void *to) const {
    const bool is_f16 = a.out_dtype == KVL_DTYPE_F16;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n += 4) {
      float x[4]; /* two numbers each */
#pragma unroll
      for (int b = 0; b < 4; b++) {
        const float *const y = out + 4 * (n + b);
        const float y0 = y[0] * scale, y1 = y[1] * scale;
        x[b] = __uint_as_float(is_f16 ? pack2(y0, y1, __half())
                                      : pack2(y0, y1, __nv_bfloat16()));
      }
      turn_quad(x, lane);
      const int at = half * COLUMNS + (n + lane % 4) * 8;
      if (writes && at < a.cache.value.dim)
        *(float4 *)((char *)to + at * 2) = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
  /* Writes the thread's first row, which is row r of the tile. */
  __device__ __forceinline__ void write_row(int r, bool has, float sum, bool mended) {
    const int64_t row = w->rows().row(a, r), at = row * a.cache.value.dim;
    const bool first = has && half == 0 && pair == 0, writes = has && writes_row(a, mended);
    if (first) plan.notes[row] = mended;
    row_end end = {};
    if (writes) end = end_row(a, row, m[0], sum);
    if (writes && first && a.lse) a.lse[row] = end.lse;
    if (end.keep != 0.f) {
      each_pair([&](int column, float &x, float &y) {
        const float2 prev = *(const float2 *)(a.prev_out + at + column);
        x = x * end.scale + prev.x * end.keep;
        y = y * end.scale + prev.y * end.keep;
      });
      end.scale = 1.f;
    }
    if (a.out_dtype != KVL_DTYPE_F32) write_halves(writes, end.scale, (__half *)a.out + at);
    else if (writes) write_floats(end.scale, (float *)a.out + at);
  }
  __device__ __forceinline__ void write_part(int r, float sum, bool mended) {
    const int64_t row = (int64_t)w->part * plan.rows + r;
    if (half == 0 && pair == 0)
      plan.lse[row] = mended ? NAN : sum == 0.f ? -INFINITY : m[0] + log2f(sum);
    write_floats(sum == 0.f ? 0.f : 1.f / sum, plan.out + row * a.cache.value.dim);
  }
  __device__ __forceinline__ void write_work() {
    /* A row that has to be computed again is marked by the sign of its sum. */
    const bool checks = H::HIDES || !a.listed;
    bool mended[2] = {checks && mends(0), checks && mends(1)};
    float other[2];
#pragma unroll
    for (int r = 0; r < 2; r++) l[r] = warp_sum<4>(l[r]);
    named_sync(END, BOTH); /* what was passed has been read */
    tell(mended[0] ? -l[0] : l[0], mended[1] ? -l[1] : l[1]);
    named_sync(END, BOTH);
    hear(other);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      mended[r] = mended[r] || __float_as_int(other[r]) < 0;
      l[r] += fabsf(other[r]);
    }
    const int count = w->tokens * w->heads_each;
#pragma unroll 1
    for (int r = r0;; r = r1) {
      if (w->part < 0) write_row(r, r < count, l[0], mended[0]);
      else if (r < count) write_part(r, l[0], mended[0]);
      if (r == r1) break;
      /* The second row becomes the first, so that the code is half as long. */
      m[0] = m[1], l[0] = l[1], mended[0] = mended[1];
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++)
        out[4 * n] = out[4 * n + 2], out[4 * n + 1] = out[4 * n + 3];
    }
  }

  __device__ __forceinline__ void begin_work() {
    low = 0, high = INT_MAX;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sight[i] = wgmma_sight(a, *w, i ? r1 : r0, (i ? r1 : r0) / w->heads_each);
      if ((i ? r1 : r0) < w->tokens * w->heads_each)
        low = max(low, sight[i].low), high = min(high, sight[i].low + sight[i].seen - 1);
      m[i] = -INFINITY;
      l[i] = 0.f;
    }
    low = warp_max(low);
    high = warp_min(high);
    if (a.tree) high = min(high, tree_begin(a, a.lens[w->seq]) - 1);
#pragma unroll
    for (float &x : out) x = 0.f;
  }
  __device__ __forceinline__ void attend() {
    for (uint32_t n = 0;; n++) {
      w = &memory.wait_work(n);
      if (w->tokens == 0) return;
      begin_work();
      barrier_wait(memory.q_full(), n & 1);
      for (int tile = 0; tile < w->tiles; tile += 2) {
        const bool two = tile + 1 < w->tiles;
        const bool last = tile + 2 >= w->tiles;
        attend_pair(two, last);
        stage.phases ^= two ? 3 : 1;
      }
      write_work();
      memory.work_done(n);
    }
  }
};

/* A consumer for few rows, up to 16 or 32 heads of one token. It multiplies with half of the
 * numbers of each key, and then with half of the numbers of each value. The scores have a
 * column for each row of q, and the threads of both consumers divide them: LANES neighbouring
 * threads share a column, and each of them takes EACH keys. */
template <class T, class shape, class H> struct latent_few {
  static constexpr int N = shape::ROWS, BOTH = 2 * WARPGROUP, LANES = BOTH / N;
  static constexpr int EACH = shape::KEYS / LANES, COLUMN = shape::COLUMN;
  static constexpr int STEPS = shape::KEY_DIMS / 32; /* of a consumer's products of keys */
  static constexpr int BLOCKS = shape::D / 128;      /* of 64 numbers of values, the same */

  const kvl_paged_attention_args &a;
  const wgmma_plan &plan;
  const H &hook;
  latent_memory<shape> &memory;
  const int half, warp, lane, pair;
  const int column, first; /* of the scores: this thread's, and its first key */
  const score_rule rule;
  wgmma_work w;
  float out[BLOCKS][N / 2], m, l;
  float slope; /* of ALiBi, in base 2 */
  latent_stage<shape> stage;

  __device__ __forceinline__ latent_few(const kvl_paged_attention_args &a_,
                                        const wgmma_plan &plan_, const H &hook_,
                                        latent_memory<shape> &memory_, int half_)
      : a(a_), plan(plan_), hook(hook_), memory(memory_), half(half_),
        warp(threadIdx.x / WARP % 4), lane(threadIdx.x % WARP), pair(lane % 4 * 2),
        column((int)(threadIdx.x - WARPGROUP) / LANES),
        first((int)threadIdx.x % LANES * EACH), rule(a_) {}

  /* The index of this thread's number x[i] of a product in a buffer of columns. */
  __device__ __forceinline__ int place(int i) const {
    return (i / 4 * 8 + pair + i % 2) * COLUMN + warp * 16 + lane / 4 + i / 2 % 2 * 8;
  }
  /* Multiplies with half of the numbers of each key, and leaves the products in shared
   * memory. */
  __device__ __forceinline__ void scores(uint32_t keys) {
    float s[N / 2];
    const uint64_t q = matrix_at(memory.q(), 1024);
    const uint64_t k = matrix_at(keys + latent_piece_at(half), latent_group(0));
    const uint64_t k_last = matrix_at(keys + latent_piece_at(LATENT_LAST),
                                      latent_group(LATENT_LAST));
    products_begin();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      /* This consumer's half of the numbers: one piece, and half of the last piece. */
      const bool last = i >= 16;
      const int part = last ? latent_part(LATENT_LAST) : latent_part(half) + i / 4;
      const int in_part = last ? half * 2 + i - 16 : i % 4;
      product<T>(s, matrix_plus(last ? k_last : k, (last ? 0 : i / 4 * 1024) + in_part * 32),
                 matrix_plus(q, part * shape::Q_PART_BYTES + in_part * 32), i > 0);
    }
    products_commit();
    products_wait<0>();
    settle(s);
    float *const to = memory.partial(half);
#pragma unroll
    for (int i = 0; i < N / 2; i++) to[place(i)] = s[i];
  }
  /* Has the hook change the score of this thread's row and a key. */
  __device__ __forceinline__ void change(float &score, int key) const {
    const hook_row of = row_for_hook(a, w, column);
    score = hook(score, of, key < of.length ? key : 0);
    if (column < w.heads_each && key < of.length)
      keep_score(hook, w.rows().row(a, column), key, score);
  }
  /* Turns this thread's products into weights in shared memory, and passes on the factor by
   * which the sums of its row shrink. */
  __device__ __forceinline__ void weigh(int stage, const wgmma_sight &sight) {
    float x[EACH];
    const float *const even = memory.partial(0) + column * COLUMN + first;
    const float *const odd = memory.partial(1) + column * COLUMN + first;
    const int *const index = memory.indices[stage] + first;
#pragma unroll
    for (int e = 0; e < EACH; e++) x[e] = even[e] + odd[e];
    if (a.soft_cap > 0.f) {
#pragma unroll
      for (int e = 0; e < EACH; e++) x[e] = cap_score(rule.scale, rule.cap, x[e]);
    } else {
#pragma unroll
      for (int e = 0; e < EACH; e++) x[e] *= rule.scale;
    }
    float top = m;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      if (a.alibi) x[e] += slope * (float)kvl__apart(index[e], w.index0);
      if constexpr (H::ACTIVE) change(x[e], index[e]);
      if (!sight.sees(index[e])) x[e] = -INFINITY;
      top = fmaxf(top, x[e]);
    }
    top = warp_max<LANES>(top);
    const float shift = finite_shift(top), down = exp2_fast(m - shift);
    m = top;
    l *= down;
#pragma unroll
    for (int e = 0; e < EACH; e++) l += x[e] = exp2_fast(x[e] - shift);
    uint32_t y[EACH / 2];
#pragma unroll
    for (int e = 0; e < EACH / 2; e++) y[e] = pack2(x[2 * e], x[2 * e + 1], T());
    const uint32_t at = memory.weights() + swizzled<8>(column, first / 8) + first % 8 * 2;
#pragma unroll
    for (int e = 0; e < EACH / 2; e += 2)
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + 4 * e), "r"(y[e]),
                   "r"(y[e + 1])
                   : "memory");
    if (first == 0) memory.told[0][column] = down;
  }
  __device__ __forceinline__ void values(uint32_t keys) {
    const float *const downs = memory.told[0];
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
      const float down0 = downs[8 * n + pair], down1 = downs[8 * n + pair + 1];
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        out[b][4 * n] *= down0, out[b][4 * n + 2] *= down0;
        out[b][4 * n + 1] *= down1, out[b][4 * n + 3] *= down1;
      }
    }
    const uint64_t p = matrix_at(memory.weights(), 1024);
    const uint64_t v = matrix_at(keys + latent_piece_at(half), latent_group(half));
    products_begin();
#pragma unroll
    for (int k = 0; k < shape::KEYS / 16; k++)
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
        product_turned<T>(out[b], matrix_plus(v, b * 1024 + k * 2 * latent_group(0)),
                          matrix_plus(p, k * 32));
    products_commit();
    products_wait<0>();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) settle(out[b]);
  }

  /* A hook may hide a key from one row and show it to another. A row has to be computed again
   * if its sums are not finite (paged_mend.cuh): the sign of its sum of weights says so. */
  __device__ __forceinline__ void mark_rows() const {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const int at = i / 2 * 4 + i % 2;
      float all = 0.f;
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) all += out[b][at] + out[b][at + 2];
      if (!(all * 0.f == 0.f))
        atomicOr((unsigned *)&memory.told[1][i / 2 * 8 + pair + i % 2], 1u << 31);
    }
  }
  /* Writes four neighbours of row r. */
  __device__ __forceinline__ void write(int r, int dim, float m_, float sum, float (&x)[4]) {
    const bool mends = H::HIDES && __float_as_int(sum) < 0;
    const int64_t row = w.rows().row(a, r);
    if (dim == 0) plan.notes[row] = mends;
    if (writes_row(a, mends)) write_row(a, end_row(a, row, m_, fabsf(sum)), row, dim, x);
  }
  /* Writes this thread's part of a partial result. What runs once is short code, and waits for
   * nobody. */
  __device__ __forceinline__ void write_part() {
    const float *const maxima = memory.told[0], *const sums = memory.told[1];
    const int D = a.cache.value.dim, dim = half * BLOCKS * 64 + warp * 16 + lane / 4;
    const int64_t first = (int64_t)w.part * plan.rows;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const int r = i / 2 * 8 + pair + i % 2, at = i / 2 * 4 + i % 2;
      if (r >= w.heads_each) continue;
      const float sum = fabsf(sums[r]), scale = sum == 0.f ? 0.f : 1.f / sum;
      float *const to = plan.out + (first + r) * D + dim;
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        if (dim + b * 64 < D) to[b * 64] = out[b][at] * scale;
        if (dim + b * 64 + 8 < D) to[b * 64 + 8] = out[b][at + 2] * scale;
      }
    }
    const int r = threadIdx.x % WARPGROUP;
    if (half > 0 || r >= w.heads_each) return;
    const float sum = sums[r];
    const bool mends = H::HIDES && __float_as_int(sum) < 0;
    plan.lse[first + r] = mends        ? NAN
                          : sum == 0.f ? -INFINITY
                                       : maxima[r] + log2f(fabsf(sum));
  }
  __device__ __forceinline__ void write_work() {
    const float *const maxima = memory.told[0], *const sums = memory.told[1];
    l = warp_sum<LANES>(l);
    named_sync(1, BOTH); /* the last tile's were read */
    if (first == 0) memory.told[0][column] = m, memory.told[1][column] = l;
    named_sync(1, BOTH);
    if constexpr (H::HIDES) {
      mark_rows();
      named_sync(1, BOTH);
    }
    if (w.part >= 0) {
      write_part();
      return named_sync(1, BOTH);
    }
    float *const rows = memory.partial(half);
    const int thread = threadIdx.x % WARPGROUP;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
      for (int i = 0; i < N / 2; i++) rows[place(i)] = out[b][i];
      named_sync(3 + half, WARPGROUP);
      for (int i = thread; i < w.heads_each * 16; i += WARPGROUP) {
        const int r = i / 16, at = i % 16 * 4, dim = (half * BLOCKS + b) * 64 + at;
        float x[4];
        load_floats(rows + r * COLUMN + at, x);
        if (dim < a.cache.value.dim) write(r, dim, maxima[r], sums[r], x);
      }
      named_sync(3 + half, WARPGROUP);
    }
    named_sync(1, BOTH);
  }

  __device__ __forceinline__ void attend() {
    for (uint32_t n = 0;; n++) {
      w = memory.wait_work(n);
      memory.work_done(n);
      if (w.tokens == 0) return;
      const wgmma_sight sight(a, w, 0, 0); /* of the one token */
      slope = a.alibi ? a.alibi[w.head0 + min(column, w.heads_each - 1)] * LOG2E : 0.f;
      m = -INFINITY;
      l = 0.f;
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (float &x : out[b]) x = 0.f;
      barrier_wait(memory.q_full(), n & 1);
      for (int tile = 0; tile < w.tiles; tile++) {
        stage.next(tile);
        const int at = stage.now;
        for (int piece = 0; piece < LATENT_PIECES; piece++)
          barrier_wait(memory.full(at, piece), stage.parity());
        if (plan.box == 0) fence_async();
        scores(memory.keys(at));
        if (tile == w.tiles - 1) barrier_arrive_warp(memory.q_empty(), lane);
        named_sync(1, BOTH);
        weigh(at, sight);
        fence_async();
        named_sync(2, BOTH);
        if (half == 0) memory.release(at, LATENT_LAST);
        values(memory.keys(at));
        memory.release(at, half);
        stage.done();
      }
      write_work();
    }
  }
};

#endif

template <class T, class shape, class H>
__device__ __forceinline__ void attend_latents(const kvl_paged_attention_args &a,
                                               const wgmma_maps &maps, const wgmma_plan &plan,
                                               const H &hook) {
#if KVL_SM90A
  __shared__ latent_memory<shape> memory;
  if (threadIdx.x == 0) {
    prefetch_map(&maps.rows);
    prefetch_map(&maps.last);
    memory.init(plan);
  }
  ask_for_tables<int64_t>(a);
  /* warp is the same in all lanes; the shuffle tells the compiler so. */
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), warpgroup = warp / 4;
  if (warpgroup == 1 || warpgroup == 2) {
    begin_beside_finder();
    registers_take<shape::TAKE>();
    if constexpr (shape::FEW)
      latent_few<T, shape, H>(a, plan, hook, memory, warpgroup - 1).attend();
    else latent_many<T, shape, H>(a, plan, hook, memory, warpgroup - 1).attend();
  } else {
    registers_give<shape::GIVE>();
    if constexpr (shape::F8) {
      if (warp != shape::FINDER) begin_beside_finder();
      latent_converter<T, shape>(a, plan, memory, warp < 4 ? warp : warp - 8).bring();
    } else if (warp == shape::FINDER) find_work(a, plan, memory);
    else if (plan.box == 0 && warp < 2) bring_latents(a, plan, memory, warp);
    else if (warp == 0) bring_boxes(a, maps, plan, memory);
    else {
      begin_beside_finder();
      bring_queries<T>(a, memory, 2 - warp, plan.box == 0 ? 1 : 2);
    }
  }
#endif
}

template <class T, class shape>
__global__ void __maxnreg__(shape::REGISTERS)
    latent_attention(const __grid_constant__ kvl_paged_attention_args a,
                     const __grid_constant__ wgmma_maps maps,
                     const __grid_constant__ wgmma_plan plan) {
  attend_latents<T, shape>(a, maps, plan, no_hook());
}

}  // namespace kvl

#endif
