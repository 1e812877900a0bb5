/* Computes rows again where the tensor cores cannot leave V of a key out of one row of a
 * tile while another row needs it. A row gives keys that it does not see the weight 0, but
 * 0 * NaN and 0 * inf are NaN. So a prefill, and a decode with a hook, note the rows whose
 * sums are not finite, and these are computed again, key by key, without the keys that a
 * row does not see: by wgmma_combine where it runs anyway and there is no hook, else by the
 * kernel below.
 *
 * If all sums are finite, the kernel reads the notes and ends. Otherwise a warp takes a
 * row, and 32 keys at a time. If V is finite for the unseen keys that can share a tile with
 * the row, then the keys that the row sees are the cause, and the row stays as it is. Two
 * kinds of rows are computed without this check: with a hook, which may hide any key, and
 * beside an earlier attention, where a noted row was not written.
 *
 * Bytes     notes: tokens * heads
 * Tolerance 1e-5 relative, as paged_f32.cuh: P is not rounded */
#ifndef KVL_CUDA_PAGED_MEND_CUH
#define KVL_CUDA_PAGED_MEND_CUH

#include "args/attention.h"
#include "cuda/attention/listed.cuh"

namespace kvl {

constexpr int MEND_WARPS = 8, MEND_NOTES = 16;
/* A tile of a prefill has at most 192 tokens, and begins and ends within a tile of 128 keys. */
constexpr int MEND_REACH = 192 + 128;

/* A row of [tokens, heads] and what it sees. */
struct mend_row : query_sight {
  int64_t row;
  int head, kv_head;
  __device__ mend_row(const kvl_paged_attention_args &a, int64_t row_)
      : query_sight(a, row_ / a.heads), row(row_), head((int)(row - token * a.heads)),
        kv_head(head / (int)(a.heads / a.cache.kv_heads)) {}
};

/* Calls give(row) for each key of a source, from number `first` on; a warp's lanes get
 * different ones, and may get some that do not exist (index -1). */
template <class Keys, class F>
__device__ __forceinline__ void each_key(const Keys &keys, int first, F give) {
  const int lane = threadIdx.x % WARP;
#pragma unroll 1
  for (; first < keys.keys; first += WARP)
    give(first + lane < keys.keys ? keys.find(first + lane) : paged_row{0, -1, 0});
}
__device__ __forceinline__ int first_key(const paged_keys &keys) {
  return keys.a.selection ? 0 : keys.begin;
}

/* N numbers of a key's row of K or, `after` bytes further on, of V. */
template <class C, int N>
__device__ __forceinline__ void key_numbers(const kvl_pages &c, const paged_row &key,
                                            int64_t after, int dim, float (&x)[N]) {
  const char *const memory = (const char *)c.memory + after;
  if constexpr (same<C, f8_latent>) {
    load_latent(c.key, memory + key.offset, dim, x);
  } else {
    load_floats((const C *)(memory + key.offset) + dim, x);
    if constexpr (packs<C>) {
      const float scale = scale_at(memory + key.scales(c.key), dim);
#pragma unroll
      for (int e = 0; e < N; e++) x[e] *= scale;
    }
  }
}

/* Whether V has NaN or infinity at a key that the row does not see, but that may be in a tile
 * with keys that it sees. */
template <class C>
__device__ bool hides_poison(const kvl_paged_attention_args &a, const mend_row &r) {
  const int reach = MEND_REACH + a.cache.block_size;
  const paged_keys near(a, r.seq, r.kv_head, max(r.low - reach, 0),
                        (int)min((int64_t)r.length, (int64_t)r.at + reach));
  bool finite = true;
  each_key(near, first_key(near), [&](const paged_row &key) {
    if (key.index < 0 || r.sees(a, key.index)) return;
    for (int d = 0; d < a.cache.value.dim; d += 8) {
      float x[8];
      key_numbers<C>(a.cache, key, near.to_value(), d, x);
#pragma unroll
      for (int e = 0; e < 8; e++) finite = finite && x[e] * 0.f == 0.f;
    }
  });
  return __any_sync(ALL_LANES, !finite);
}

/* Computes a row again from a source's keys, number `first` and on, and writes it; a warp calls
 * it. MOST: numbers of a value. */
template <class T, class C, int MOST = 256, class H, class Keys>
__device__ void compute_row(const kvl_paged_attention_args &a, const mend_row &r,
                            const H &hook, const Keys &keys, int first) {
  constexpr int DIMS = MOST / WARP; /* of a lane, at most: dims lane, lane + 32, ... */
  const int lane = threadIdx.x % WARP, head_dim = a.cache.key.dim;
  const int value_dim = a.cache.value.dim;
  const T *const q = (const T *)a.q + r.row * head_dim;
  const score_rule rule(a);
  const float k_scale = a.cache.k_scale ? a.cache.k_scale[r.kv_head] : 1.f;
  const float slope = a.alibi ? a.alibi[r.head] * LOG2E : 0.f;
  float m = -INFINITY, l = 0.f, sums[DIMS] = {};
  each_key(keys, first, [&](const paged_row &key) {
    float s = -INFINITY;
    if (key.index >= 0 && r.sees(a, key.index)) {
      s = 0.f;
#pragma unroll 1
      for (int d = 0; d < head_dim; d += 8) {
        float x[8], y[8];
        load_floats(q + d, x);
        key_numbers<C>(a.cache, key, 0, d, y);
#pragma unroll
        for (int e = 0; e < 8; e++) s += x[e] * y[e];
      }
      s = rule(s * k_scale) + slope * (float)kvl__apart(key.index, r.at);
      if constexpr (H::ACTIVE) {
        const int group = (int)(a.heads / a.cache.kv_heads);
        const hook_row of = {r.seq,          a.cache.kv_heads, r.kv_head,
                             r.head % group, r.length,         r.at};
        s = hook(s, of, key.index);
        keep_score(hook, r.row, key.index, s);
      }
    }
    const float top = fmaxf(m, warp_max(s)), shift = finite_shift(top);
    const float down = exp2_fast(m - shift), weight = exp2_fast(s - shift);
    m = top;
    l = l * down + weight; /* of this lane's keys */
#pragma unroll
    for (int i = 0; i < DIMS; i++) sums[i] *= down;
#pragma unroll 1
    for (unsigned rest = __ballot_sync(ALL_LANES, s != -INFINITY); rest; rest &= rest - 1) {
      const int from = __ffs(rest) - 1;
      const paged_row row = {__shfl_sync(ALL_LANES, (long long)key.offset, from), 0,
                             __shfl_sync(ALL_LANES, key.token, from)};
      const float by = __shfl_sync(ALL_LANES, weight, from);
#pragma unroll
      for (int i = 0; i < DIMS; i++)
        if (i * WARP + lane < value_dim) {
          float x[1];
          key_numbers<C>(a.cache, row, keys.to_value(), i * WARP + lane, x);
          sums[i] += by * x[0];
        }
    }
  });
  row_end end = end_row(a, r.row, m, warp_sum(l));
  if (a.cache.v_scale) end.scale *= a.cache.v_scale[r.kv_head];
#pragma unroll
  for (int i = 0; i < DIMS; i++) {
    if (i * WARP + lane >= value_dim) break;
    const int64_t at = r.row * value_dim + i * WARP + lane;
    float x[1] = {sums[i]};
    finish(a, end, at, x);
    store_out(a, at, x);
  }
  if (a.lse && lane == 0) a.lse[r.row] = end.lse;
}

/* The same, for the keys in the blocks of the row's sequence or of its selection. */
template <class T, class C, int MOST = 256, class H>
__device__ __forceinline__ void compute_row(const kvl_paged_attention_args &a,
                                            const mend_row &r, const H &hook) {
  const paged_keys keys(a, r.seq, r.kv_head, r.low, min(r.limit + 1, r.length));
  compute_row<T, C, MOST>(a, r, hook, keys, first_key(keys));
}

/* notes: u8 [tokens, heads], 16-byte aligned, with room for a multiple of 16. */
template <class T, class C, int MOST = 256, class H>
__device__ __forceinline__ void mend_rows(const kvl_paged_attention_args &a,
                                          const uint8_t *notes, const H &hook) {
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x % WARP, warps = gridDim.x * MEND_WARPS;
  const int64_t rows = a.tokens * a.heads;
  /* A lane takes 16 notes. Neighbouring notes go to different warps, because neighbouring
   * rows often have to be computed again together. */
  for (int64_t base = blockIdx.x * MEND_WARPS + threadIdx.x / WARP; base * MEND_NOTES < rows;
       base += (int64_t)warps * WARP) {
    const int64_t first = (base + (int64_t)lane * warps) * MEND_NOTES;
    unsigned found = 0;
    if (first < rows) {
      const uint4 x = *(const uint4 *)(notes + first);
      if (x.x | x.y | x.z | x.w)
        for (int i = 0; i < MEND_NOTES && first + i < rows; i++)
          found |= (unsigned)(notes[first + i] != 0) << i;
    }
#pragma unroll 1
    for (unsigned lanes = __ballot_sync(ALL_LANES, found); lanes; lanes &= lanes - 1) {
      const int from = __ffs(lanes) - 1;
      const int64_t begin = (base + (int64_t)from * warps) * MEND_NOTES;
#pragma unroll 1
      for (unsigned rest = __shfl_sync(ALL_LANES, found, from); rest; rest &= rest - 1) {
        const mend_row r(a, begin + __ffs(rest) - 1);
        if constexpr (H::ACTIVE) {
          if (a.listed && r.seq >= 0) {
            const plain_divisor by = {(uint32_t)a.cache.block_size};
            compute_row<T, C, MOST>(a, r, hook, listed_keys(a, by, r.token, r.kv_head), 0);
            continue;
          }
        }
        if (r.seq >= 0 && (H::ACTIVE || a.prev_lse || hides_poison<C>(a, r)))
          compute_row<T, C, MOST>(a, r, hook);
      }
    }
  }
}

template <class T, class C, int MOST>
__global__ void __launch_bounds__(MEND_WARPS *WARP)
    paged_mend(const __grid_constant__ kvl_paged_attention_args a, const uint8_t *notes) {
  mend_rows<T, C, MOST>(a, notes, no_hook());
}

#ifndef __CUDACC_RTC__
/* How many thread blocks it has. */
inline int mend_blocks(const kvl_paged_attention_args &a, int sm_count) {
  const int64_t most = ceil_div(a.tokens * a.heads, MEND_NOTES * MEND_WARPS);
  return most < sm_count ? (int)most : sm_count;
}
/* Computes the rows again that are noted in the workspace. */
template <class T, class C, int MOST = 256>
int launch_mend(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  return launch_programmatic(paged_mend<T, C, MOST>, mend_blocks(a, q->sm_count),
                             MEND_WARPS * WARP, 0, q, a, (const uint8_t *)a.workspace);
}
#endif

}  // namespace kvl

#endif
