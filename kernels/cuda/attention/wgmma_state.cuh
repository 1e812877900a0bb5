/* What a consumer of paged_wgmma.cuh holds in registers, and what it does with it: scores,
 * weights and sums of values of 64 rows, and writing the rows. */
#ifndef KVL_CUDA_WGMMA_STATE_CUH
#define KVL_CUDA_WGMMA_STATE_CUH

#include "args/attention.h"
#include "cuda/attention/hook.cuh"
#include "cuda/attention/wgmma_memory.cuh"

namespace kvl {

#if KVL_SM90A

/* A row whose weights sum up to more than this in one lane gets a new reference. f16 holds 15
 * times this. */
constexpr float WEIGHTS_MOST = 4096.f;
/* If a sum is larger than this, the scores are computed again. */
constexpr float WEIGHTS_LOST = 0x1p100f;

/* A thread's part of a consumer's state: two rows, with two of every eight columns; `product`
 * says which. s holds the scores of a tile, then its weights. T is the type of the
 * products: q's dtype or, over an f8e4m3 cache, f16. */
template <class T, class shape> struct wgmma_state {
  static constexpr int D = shape::D, KEYS = shape::KEYS;
  static constexpr int ROW_BYTES = 2 * shape::ATOM, IN_ATOM = shape::ATOM / 16;
  float s[KEYS / 2], out[D / 2];
  uint32_t p[KEYS / 16][4];
  float m[2], l[2]; /* reference (a score in base 2; -inf: none yet), sum of weights */

  __device__ __forceinline__ void scores(uint32_t q_at, uint32_t k_at) {
    const uint64_t q = matrix_at<ROW_BYTES>(q_at, 8 * ROW_BYTES);
    const uint64_t k = matrix_at<ROW_BYTES>(k_at, shape::GROUP_BYTES);
#pragma unroll
    for (int d = 0; d < D / 16; d++)
      product<T>(s, matrix_plus(q, d / IN_ATOM * 64 * ROW_BYTES + d % IN_ATOM * 32),
                 matrix_plus(k, d / IN_ATOM * shape::ATOM_BYTES + d % IN_ATOM * 32), d > 0);
    products_commit();
  }
  /* first: of a piece of work; whatever `out` held is overwritten. */
  __device__ __forceinline__ void values(uint32_t v_at, bool first) {
    const uint64_t v = matrix_at<ROW_BYTES>(v_at, shape::GROUP_BYTES, shape::ATOM_BYTES);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
      product<T>(out, p[k], matrix_plus(v, k * 2 * shape::GROUP_BYTES), k > 0 || !first);
    products_commit();
  }
  /* Turns scores into weights exp2(score - reference), and sums up this lane's. `scale` is
   * read from shared memory: if it were a constant of the kernel, ptxas would scale all
   * scores before it waits for the products, and spill. The store, which never happens,
   * keeps ptxas from waiting for the next products before this is done. */
  __device__ __forceinline__ void weigh(const float &scale_shared, float (&sum)[2]) {
    const float scale = load_late(scale_shared);
    const float shift[2] = {finite_shift(m[0]), finite_shift(m[1])};
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
      const int r = i / 2 & 1;
      s[i] = exp2_fast(s[i] * scale - shift[r]);
      sum[r] += s[i];
    }
    store_late_if_negative(scale_shared, sum[0] + sum[1]);
  }
  /* The key of s[i], counted from the lane's first. */
  static __device__ __forceinline__ int column(int i) { return i / 4 * 8 + (i & 1); }
  /* s[i] = f(i, s[i]) for one of the two rows. */
  template <class F> __device__ __forceinline__ void each(int row, F f) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 4 * n + 2 * row; i < 4 * n + 2 * row + 2; i++) s[i] = f(i, s[i]);
  }
  /* weigh with the weights exp2(exponent(i, s[i])). second: whether to weigh the
   * second rows, too; otherwise they keep their products, and their sum is 0. */
  template <class F>
  __device__ __forceinline__ void weigh_by(const float &shared, float (&sum)[2], bool second,
                                           F exponent) {
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (r == 0 || second)
        each(r, [&](int i, float s_) {
          const float weight = exp2_fast(exponent(i, s_));
          sum[r] += weight;
          return weight;
        });
    store_late_if_negative(shared, sum[0] + sum[1]);
  }
  /* The same for scores with a soft cap: cap * tanh(x) with x = s * by. |x| is at most
   * CAP_SMALL, or CAP_TINY if TINY is set. tanh is a polynomial, so it needs no exponential;
   * its relative error is 7e-7. rest(i) is added to score i. */
  template <bool TINY, class F>
  __device__ __forceinline__ void weigh_capped(const float &shared, float (&sum)[2],
                                               bool second, float by, float cap, F rest) {
    const float by2 = by * by, c1 = cap * by, by3 = c1 * by2, by5 = by3 * by2;
    const float by7 = by5 * by2, by9 = by7 * by2;
    const float c3 = by3 * (TINY ? -0.333245714f : -0.333296676f);
    const float c5 = by5 * (TINY ? 0.128764207f : 0.132682359f);
    const float c7 = by7 * -0.0502779161f, c9 = by9 * 0.0131057987f;
    weigh_by(shared, sum, second, [&](int i, float product) {
      const float y = product * product, high = TINY ? c5 : (c9 * y + c7) * y + c5;
      return product * ((high * y + c3) * y + c1) + rest(i);
    });
  }
  /* The size of the largest product; NaN does not count. */
  __device__ __forceinline__ float largest_size(bool second) const {
    float top[2] = {};
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (r == 0 || second)
#pragma unroll
        for (int i = 2 * r; i < KEYS / 2; i += i & 1 ? 3 : 1)
          top[i & 1] = fmaxf(top[i & 1], fabsf(s[i]));
    return fmaxf(top[0], top[1]);
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        p[k][i] = pack2(s[8 * k + 2 * i], s[8 * k + 2 * i + 1], T());
  }
  /* Has the lane's row r a sum that is not finite? See paged_mend.cuh. */
  __device__ __forceinline__ bool mends(int r) const {
    float all[4] = {}; /* side by side */
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) all[n % 2 * 2 + c] += out[4 * n + 2 * r + c];
    return !(warp_sum<4>((all[0] + all[1]) + (all[2] + all[3])) * 0.f == 0.f);
  }
  __device__ __forceinline__ float largest(int r) const {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) top[c] = fmaxf(top[c], s[4 * n + 2 * r + c]);
    return warp_max<4>(fmaxf(top[0], top[1]));
  }
  /* Takes the largest score as the reference of a row that has none. Such a row has no
   * weights yet. */
  __device__ __forceinline__ void refer(float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float top = largest(r) * scale;
      if (m[r] == -INFINITY) m[r] = top;
    }
  }
  __device__ __forceinline__ bool refers() const {
    return m[0] > -INFINITY && m[1] > -INFINITY;
  }
  /* Raises a row's reference by `up`, for all that was summed up so far. */
  __device__ __forceinline__ void raise(int r, float up) {
    const float down = exp2_fast(-up);
    m[r] += up;
    l[r] *= down;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) out[4 * n + 2 * r + c] *= down;
  }
  /* Brings weights that are large, but finite, down to 1. */
  __device__ __forceinline__ void lower(float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float up = ceilf(log2f(fmaxf(largest(r), 1.f))), down = exp2_fast(-up);
      raise(r, up);
      sum[r] *= down;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) s[4 * n + 2 * r + c] *= down;
    }
  }
};

/* The indices that a query row sees: `seen` of them, from `low` on. */
struct wgmma_sight {
  int at, low, seen;
  wgmma_sight() = default;
  /* token: r / w.heads_each */
  __device__ wgmma_sight(const kvl_paged_attention_args &a, const wgmma_work &w, int r,
                         int token)
      : at(w.index0 + token), low(window_begin(a, at)) {
    const int end = a.causal ? min(at + 1, w.length) : w.length;
    seen = r < w.tokens * w.heads_each ? max(0, end - low) : 0;
  }
  __device__ bool sees(int index) const { return (unsigned)(index - low) < (unsigned)seen; }
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

template <class shape>
__device__ __forceinline__ float value_scale(const kvl_paged_attention_args &a,
                                             const wgmma_work &w) {
  return shape::F8 && a.cache.v_scale ? a.cache.v_scale[w.kv_head] : 1.f;
}

/* Writes one of a lane's two rows, i, of a piece of work. Four lanes hold eight neighbours of
 * a row together. */
template <class M, class shape>
__device__ __forceinline__ void write_row_of_work(const kvl_paged_attention_args &a,
                                                  const wgmma_plan &plan, const wgmma_work &w,
                                                  const wgmma_state<M, shape> &x, int i,
                                                  int r) {
  constexpr int D = shape::D;
  const int lane = threadIdx.x % WARP, pair = lane % 4 * 2, head_dim = a.cache.value.dim;
  const query_rows rows = w.rows();
  const bool has = r < rows.count;
  const float sum = warp_sum<4>(x.l[i]), m = x.m[i];
  const bool mends = x.mends(i);
  const float v_scale = value_scale<shape>(a, w);
  if (w.part >= 0) {
    if (!has) return;
    const int64_t row = (int64_t)w.part * plan.rows + r;
    const float scale = sum == 0.f ? 0.f : v_scale / sum;
    if (pair == 0) plan.lse[row] = mends ? NAN : sum == 0.f ? -INFINITY : m + log2f(sum);
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      if (n * 8 < head_dim)
        *(float2 *)(plan.out + row * head_dim + n * 8 + pair) = make_float2(
            x.out[4 * n + 2 * i] * scale, x.out[4 * n + 2 * i + 1] * scale);
    return;
  }
  const int64_t row = rows.row(a, r);
  if (has && pair == 0) plan.notes[row] = mends;
  const bool writes = has && writes_row(a, mends);
  row_end end = {};
  if (writes) {
    end = end_row(a, row, m, sum);
    if (a.lse && pair == 0) a.lse[row] = end.lse;
    end.scale *= v_scale;
  }
  /* The lanes exchange their numbers, so that each lane gets one of the four runs of eight,
   * and writes 16 bytes at once. */
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
    const int dim = (n + lane % 4) * 8;
    const int64_t at = row * head_dim + dim;
    if (!writes || dim >= head_dim) continue;
    finish(a, end, at, y);
    store_out(a, at, y);
  }
}

/* Two numbers in q's dtype. This is T; over f8e4m3, the dtype is known only at run time. */
template <class T, class shape>
__device__ __forceinline__ uint32_t pack_rows(const kvl_paged_attention_args &a, float x,
                                              float y) {
  if (shape::F8 && a.dtype == KVL_DTYPE_BF16) return pack2(x, y, __nv_bfloat16());
  return pack2(x, y, T());
}

/* Writes a warp's sixteen rows, whose first is r, of whole work without an earlier attention:
 * in q's dtype, by way of shared memory, 64 (or 32) columns at a time. */
template <class T, class M, class shape>
__device__ __forceinline__ void write_plain_rows(const kvl_paged_attention_args &a,
                                                 const wgmma_plan &plan, const wgmma_work &w,
                                                 const wgmma_state<M, shape> &x, uint32_t at,
                                                 int r) {
  constexpr int D = shape::D, COLUMNS = shape::ATOM, PIECES = COLUMNS / 8;
  constexpr int ROWS = WARP / PIECES; /* that are stored at once */
  const int lane = threadIdx.x % WARP, head_dim = a.cache.value.dim;
  const int count = w.tokens * w.heads_each;
  const int64_t first_row = w.token0 * a.heads + w.head0;
  const short_divisor heads = w.heads(plan);
  auto from_first = [&](int r_) { return r_ / heads * ((int)a.heads - heads) + r_; };
  const float v_scale = value_scale<shape>(a, w);
  float sum[2], scale[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sum[i] = warp_sum<4>(x.l[i]);
    scale[i] = sum[i] == 0.f ? 0.f : __fdividef(1.f, sum[i]);
    if (shape::F8) scale[i] *= v_scale;
  }
  const bool mends[2] = {x.mends(0), x.mends(1)};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int own = r + next_row(lane / 4) + SECOND_ROW * i;
    const int64_t row = first_row + from_first(own);
    if (lane % 4 || own >= count) continue;
    plan.notes[row] = mends[i];
    if (a.lse) a.lse[row] = sum[i] == 0.f ? -INFINITY : (x.m[i] + log2f(sum[i])) * LN2;
  }
  /* This lane's pieces of rows begin here; -1: there is no such row. */
  const int pieces = head_dim / 8;
  uint4 *const out = (uint4 *)a.out + first_row * pieces + lane % PIECES;
  int to[16 / ROWS];
#pragma unroll
  for (int j = 0; j < 16 / ROWS; j++) {
    const int row = r + next_row(j * ROWS + lane / PIECES);
    to[j] = row < count ? from_first(row) * pieces : -1;
  }
#pragma unroll
  for (int c = 0; c < D / COLUMNS; c++) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < PIECES; n += 2) {
      const int i = 4 * (c * PIECES + n);
      float z[8];
#pragma unroll
      for (int e = 0; e < 8; e++) z[e] = x.out[i + e] * scale[e / 2 % 2];
      const uint32_t y[4] = {
          pack_rows<T, shape>(a, z[0], z[1]), pack_rows<T, shape>(a, z[2], z[3]),
          pack_rows<T, shape>(a, z[4], z[5]), pack_rows<T, shape>(a, z[6], z[7])};
      store_matrices(at + swizzled<PIECES>(lane % 16, n + lane / 16), y);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 16 / ROWS; j++) {
      const uint4 y = load_shared(at +
                                  swizzled<PIECES>(j * ROWS + lane / PIECES, lane % PIECES));
      if (to[j] >= 0 && c * PIECES + lane % PIECES < pieces) out[to[j] + c * PIECES] = y;
    }
  }
}

constexpr float CAP_SMALL = 0.75f, CAP_TINY = 0.25f; /* see weigh_capped */

/* A product as a capped score in base 2. tanh(x) = 1 - 2 / (exp(2 x) + 1) has an error of 2e-7;
 * a large cap needs a small relative error where tanh is small, too. */
__device__ __forceinline__ float cap_score(float by, float cap, float product) {
  const float x = product * by, y = x * x;
  const float small = x + x * y * (-1.f / 3 + y * (2.f / 15 + y * (-17.f / 315)));
  float part;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(exp2_fast(x * (2.f * LOG2E)) + 1.f));
  return cap * (fabsf(x) < 0.25f ? small : 1.f - 2.f * part);
}

/* Query row r for a hook; one that does not exist is the last that does. */
__device__ __forceinline__ hook_row row_for_hook(const kvl_paged_attention_args &a,
                                                 const wgmma_work &w, int r) {
  const query_rows rows = w.rows();
  const int own = min(r, rows.count - 1), group = (int)(a.heads / a.cache.kv_heads);
  return {w.seq,         a.cache.kv_heads,
          w.kv_head,     rows.head(own) - w.kv_head * group,
          a.lens[w.seq], w.index0 + own / w.heads_each};
}

/* Computes a tile's scores again, from global memory and without the tensor cores, because
 * their weights overflowed. The tile may have left shared memory. */
template <class T, bool BIASED, class H, class M, class shape>
__device__ __forceinline__ void scores_again(const kvl_paged_attention_args &a,
                                             const wgmma_work &w, int tile, int r0,
                                             const H &hook, float scale,
                                             wgmma_state<M, shape> &x) {
  using C = typename shape::template cache<T>;
  const query_rows rows = w.rows();
  const int head_dim = a.cache.key.dim, block_size = a.cache.block_size;
  const int pair = threadIdx.x % 4 * 2;
  const score_rule rule(a);
  float by = 1.f; /* the products that the consumer had (scaled for f8e4m3) are by * q k */
  if (shape::F8) {
    const key_scale key(a, w.kv_head);
    by = key.none ? 0.f : key.signs ? -key.size : key.size;
    if (!BIASED) by *= a.scale * LOG2E / scale;
  }
#pragma unroll 1
  for (int i = 0; i < shape::KEYS / 2; i++) {
    const int r = r0 + (i & 2 ? SECOND_ROW : 0);
    const int key = w.first_key + tile * shape::KEYS + i / 4 * 8 + pair + (i & 1);
    const int entry = key / block_size, token = key - entry * block_size;
    const wgmma_key at(a, w, entry, token);
    const wgmma_sight sight(a, w, r, r / w.heads_each);
    const int own = min(r, rows.count - 1), length = a.lens[w.seq];
    const C *k = (const C *)((const char *)a.cache.memory +
                             kvl__row_at(&a.cache, &a.cache.key, max(at.physical, 0),
                                         w.kv_head, token));
    const T *q = (const T *)a.q + rows.row(a, own) * head_dim;
    const bool is_bf16 = shape::F8 && a.dtype == KVL_DTYPE_BF16;
    float s = 0.f;
#pragma unroll 1
    for (int d = 0; d < head_dim; d++) {
      float x = to_float(k[d]);
      if constexpr (shape::PACKED) /* as the converters do */
        x = to_float(from_float<T>(
            x * scale_of(a.cache.key, kvl__keys_of(&a.cache, max(at.physical, 0), w.kv_head),
                         token, d)));
      s += (is_bf16 ? to_float(((const __nv_bfloat16 *)q)[d]) : to_float(q[d])) * x;
    }
    if (shape::F8) s *= by;
    if (BIASED) s = rule(s);
    if (BIASED && a.alibi)
      s += a.alibi[rows.head(own)] * LOG2E * (float)kvl__apart(at.index, sight.at);
    if constexpr (H::ACTIVE)
      s = hook(s, row_for_hook(a, w, r), at.index < length ? at.index : 0);
    bool seen = at.physical >= 0 & sight.sees(at.index);
    if (BIASED && a.tree && seen && at.index >= tree_begin(a, length))
      seen = tree_shows(a, rows.token(own), length, at.index);
    s = seen ? s : -INFINITY;
    /* Registers have no index at run time. */
#pragma unroll
    for (int j = 0; j < shape::KEYS / 2; j++) x.s[j] = j == i ? s : x.s[j];
  }
}

#endif

}  // namespace kvl

#endif
