/* Applies rope to q in place and to k on its way into the cache, and appends v. One launch
 * replaces two of rope and one of append_kv, with the same bits.
 *
 *   q          f32 f16 bf16         [tokens, heads, head_dim]      in place
 *   k, v       like q               [tokens, kv_heads, head_dim]   not changed; v is none
 *                                   where values are the first numbers of their keys
 *   positions  i32                  [tokens]
 *   inv_freq   f32                  [pairs]    first + 2 * pairs <= head_dim
 *   places     i64                  [tokens]   block * block_size + offset; < 0 is skipped
 *   cache      f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   k_scale, v_scale  f32           [kv_heads] of an f8e4m3 cache; optional
 * q, k and v are f32 or of the cache's dtype; for f8e4m3 any float dtype. 16-byte aligned;
 * head_dim a multiple of 8 up to 256, of shared pages up to 576. k is rounded to its own
 * dtype before it is converted to the cache's. Pages of f8_latent: append_latent.cuh.
 *
 * Bytes   tokens * head_dim * (2 heads * element + 2 kv_heads * (element + element of
 *         cache)); k is read and written once less than by the three launches
 * Limit   memory; the launch for the tokens of a decode step
 * Best    32 and 8 heads x 128, bf16: 4096 tokens 35.7 us, 0.92 of the run's read bandwidth
 *         (three launches 46.9 us), to f8e4m3 35.4 us, 0.85; 16 tokens 6.2 us (12.7 us), an
 *         empty launch 3.0 (H100 80GB HBM3, 2026-11-21) */
#include "args/attention.h"
#include "args/linear.h"
#include "cuda/attention/append_latent.cuh"
#include "cuda/linear/rope.cuh"

KVL_CUDA_KERNEL(rope);

namespace kvl {
namespace {

constexpr int EARLY_TOKENS = 64; /* of more, other blocks of an SM hide a block's start */

/* How many lanes share a head. Each takes N pairs, that is two packs of N numbers (low and
 * high), the same two packs of V, and its share of the dims past the pairs, of K and of V. */
template <int N> __host__ __device__ __forceinline__ int lanes_of(int pairs) {
  return pairs >= N ? pairs / N : 16;
}

/* A token's rows are its heads of q, then of k, then of v. Grid: tokens, runs of rows_block
 * rows. A thread loads its next row while it works on one, and its first row while the sines
 * are computed. For a few tokens the sines are computed while earlier kernels still run,
 * and the angles are checked again after the wait. */
template <int N, class From, class To>
__global__ void __launch_bounds__(ROPE_THREADS)
    rope_append_kernel(const __grid_constant__ kvl_rope_append_args a, int rows_block) {
  __shared__ rope_angles angles;
  const int pairs = (int)a.pairs, head_dim = a.cache.key.dim, kv_heads = a.cache.kv_heads;
  const int heads = (int)a.heads, lanes = lanes_of<N>(pairs), step = ROPE_THREADS / lanes;
  const int lane = (int)threadIdx.x % lanes, pair = lane * N;
  const int low = (int)a.first + pair, high = low + pairs, rest = head_dim - 2 * pairs;
  auto number = [&](int d) {
    return d < a.first ? d : d + 2 * pairs;
  }; /* that does not turn */
  const int64_t token = blockIdx.x;
  let_next_start();
  const bool early = a.tokens <= EARLY_TOKENS;
  if (early) angles.make((float)read_early(a.positions + token), a.inv_freq, pairs);
  wait_for_previous();
  const int64_t place = a.places[token];
  auto at = [&](int row) {
    if (row < heads) return (From *)a.q + (token * heads + row) * head_dim;
    const bool is_v = row >= heads + kv_heads;
    const int head = row - heads - (is_v ? kv_heads : 0);
    return (From *)(is_v ? a.v : a.k) + (token * kv_heads + head) * head_dim;
  };
  pack<From, N> x, y, next_x, next_y;
  auto load = [&](int row) {
    next_x = load_pack<N>(at(row) + low);
    next_y = load_pack<N>(at(row) + high);
  };
  int row = (int)blockIdx.y * rows_block + (int)threadIdx.x / lanes;
  int end = min((int)(blockIdx.y + 1) * rows_block, heads + kvl__strips(&a.cache));
  if ((int)threadIdx.x >= step * lanes) end = 0; /* these threads make no whole head */
  if (row < end && pairs) load(row);
  angles.make((float)read_early(a.positions + token), a.inv_freq, pairs, !early);
  const token_place to(place, a.cache.block_size);
  __syncthreads();
  for (; row < end; row += step) {
    x = next_x, y = next_y;
    if (row + step < end && pairs) load(row + step);
    if (row < heads + kv_heads && pairs) {
      float u[N], v[N];
#pragma unroll
      for (int e = 0; e < N; e++) u[e] = to_float(x.at[e]), v[e] = to_float(y.at[e]);
      angles.turn(u, v, pair);
#pragma unroll
      for (int e = 0; e < N; e++) {
        x.at[e] = from_float<From>(u[e]);
        y.at[e] = from_float<From>(v[e]);
      }
    }
    if (row < heads) {
      if (pairs) store_pack<N>(at(row) + low, x), store_pack<N>(at(row) + high, y);
      continue;
    }
    const int half = row >= heads + kv_heads, head = row - heads - half * kv_heads;
    To *cell = row_in<To>(a.cache, half ? a.cache.value : a.cache.key, to.block, head,
                          to.offset);
    if (!cell) continue;
    const float scale = head_scale<To>(half ? a.cache.v_scale : a.cache.k_scale, head);
    if (pairs) {
      store_pack<N>(cell + low, convert_pack<To>(x, scale));
      store_pack<N>(cell + high, convert_pack<To>(y, scale));
    }
    for (int d = pair; a.v && d < rest; d += lanes * N)
      store_pack<N>(cell + number(d),
                    convert_pack<To>(load_pack<N>(at(row) + number(d)), scale));
  }
  /* Most numbers of shared rows are not rotated, so all threads copy a share of them. */
  for (int i = (int)threadIdx.x * N; !a.v && blockIdx.y == 0 && i < kv_heads * rest;
       i += ROPE_THREADS * N) {
    const int head = i / rest, d = number(i % rest);
    To *cell = row_in<To>(a.cache, a.cache.key, to.block, head, to.offset);
    if (cell)
      store_pack<N>(cell + d, convert_pack<To>(load_pack<N>(at(heads + head) + d), 1.f));
  }
}

template <int N, class From, class To>
int start(const kvl_rope_append_args &a, const kvl_cuda_queue *q) {
  const int rows = (int)a.heads + kvl__strips(&a.cache);
  const int step = ROPE_THREADS / lanes_of<N>((int)a.pairs); /* few tokens: a block each */
  const int each = a.tokens < 4 * q->sm_count && rows <= 65535 * step ? step : rows;
  const dim3 grid((unsigned)a.tokens, (unsigned)((rows + each - 1) / each));
  return launch_programmatic(rope_append_kernel<N, From, To>, grid, ROPE_THREADS, 0, q, a,
                             each);
}

/* How many lanes take a row of packed numbers. */
__host__ __device__ constexpr int packed_lanes(int head_dim) {
  return head_dim <= 64 ? 8 : head_dim <= 128 ? 16 : 32;
}

/* The same where numbers are packed. A warp takes a row, or several side by side, and a
 * lane takes N neighbours of it, so that eight lanes share a group. A lane also loads the
 * partners of its numbers: N neighbours, or single numbers if `pairs` is no multiple of N. It
 * loads its next row while it works on one, and its first row before the sines. */
template <class From, class To>
__global__ void __launch_bounds__(ROPE_THREADS)
    rope_append_packed(const __grid_constant__ kvl_rope_append_args a, int rows_block) {
  constexpr int N = 8;
  __shared__ rope_angles angles;
  const int pairs = (int)a.pairs, head_dim = a.cache.key.dim, kv_heads = a.cache.kv_heads;
  const int heads = (int)a.heads, lanes = packed_lanes(head_dim);
  const int dim = (int)threadIdx.x % lanes * N, step = ROPE_THREADS / lanes;
  const int64_t token = blockIdx.x;
  let_next_start();
  const bool early = a.tokens <= EARLY_TOKENS, inside = dim < head_dim;
  if (early) angles.make((float)read_early(a.positions + token), a.inv_freq, pairs);
  wait_for_previous();
  const int end = min((int)(blockIdx.y + 1) * rows_block, heads + 2 * kv_heads);
  auto from_of = [&](int row) {
    if (row < heads) return (From *)a.q + (token * heads + row) * head_dim;
    const bool is_v = row >= heads + kv_heads;
    const int head = row - heads - (is_v ? kv_heads : 0);
    return (From *)(is_v ? a.v : a.k) + (token * kv_heads + head) * head_dim;
  };
  const bool loads_other = pairs % N == 0 && dim < 2 * pairs;
  pack<From, N> x, other, next = {}, next_other = {};
  auto load = [&](int row) {
    if (row >= end || !inside) return;
    next = load_pack<N>(from_of(row) + dim);
    if (loads_other && row < heads + kv_heads)
      next_other = load_pack<N>(from_of(row) + (dim < pairs ? dim + pairs : dim - pairs));
  };
  int first = (int)blockIdx.y * rows_block;
  load(first + (int)threadIdx.x / lanes);
  angles.make((float)read_early(a.positions + token), a.inv_freq, pairs, !early);
  const token_place to(a.places[token], a.cache.block_size);
  __syncthreads();
  for (; first < end; first += step) {
    const int row = first + (int)threadIdx.x / lanes;
    const bool is_q = row < heads, is_v = row >= heads + kv_heads, is = row < end && inside;
    x = next, other = next_other;
    load(row + step);
    if (is && !is_v) angles.turn_half(x, other, from_of(row), dim, pairs);
    __syncwarp(); /* q was read */
    if (is && is_q && dim < 2 * pairs) store_pack<N>(from_of(row) + dim, x);
    if (__all_sync(ALL_LANES, !is || is_q)) continue;
    const auto kept = pack_numbers<PACKED_GROUP / N>(x);
    if (!is || is_q) continue;
    const int head = row - heads - (is_v ? kv_heads : 0);
    const kvl_strips &of = is_v ? a.cache.value : a.cache.key;
    To *const cell = row_in<To>(a.cache, of, to.block, head, to.offset);
    if (!cell) continue;
    store_pack<N>(cell + dim, (const pack<To, N> &)kept);
    if (dim % PACKED_GROUP == 0)
      *scale_in(a.cache, of, to.block, head, to.offset, dim) = kept.scale;
  }
}
constexpr int MANY_TOKENS = 512;

/* The q of many tokens are rotated in a launch of their own. In rope_append_packed a lane
 * writes only one number of each of its pairs and has to load the other one as well. */
template <class From, class To>
int start_packed(kvl_rope_append_args a, const kvl_cuda_queue *q) {
  if (a.tokens >= MANY_TOKENS) {
    const kvl_rope_args of_q = {a.q,      a.positions, a.inv_freq,
                                a.tokens, a.heads,     a.cache.key.dim,
                                a.pairs,  a.first,     a.dtype};
    const int status = kvl_cuda_rope(&of_q, (void *)q);
    if (status < 0) return status;
    a.heads = 0;
  }
  const int rows = (int)a.heads + 2 * a.cache.kv_heads;
  const int step = ROPE_THREADS / packed_lanes(a.cache.key.dim);
  const int each = a.tokens < 4 * q->sm_count && rows <= 65535 * step ? step : rows;
  const dim3 grid((unsigned)a.tokens, (unsigned)((rows + each - 1) / each));
  return launch_programmatic(rope_append_packed<From, To>, grid, ROPE_THREADS, 0, q, a, each);
}

template <class From, class To>
int start(const kvl_rope_append_args &a, const kvl_cuda_queue *q) {
  if constexpr (packs<To>) {
    return start_packed<From, To>(a, q);
  } else {
    if (a.pairs % WIDE<From> == 0 && a.first % WIDE<From> == 0)
      return start<WIDE<From>, From, To>(a, q);
    if (a.pairs % 4 == 0 && a.first % 4 == 0) return start<4, From, To>(a, q);
    return start<1, From, To>(a, q);
  }
}

/* A token's rows are its heads of q, which are rotated in place, and then its heads of k.
 * Grid: tokens, runs of rows_block rows. */
template <class From>
__global__ void __launch_bounds__(ROPE_THREADS)
    rope_append_latent_kernel(const __grid_constant__ kvl_rope_append_args a,
                              int rows_block) {
  __shared__ rope_angles angles;
  const int pairs = (int)a.pairs, dim = a.cache.key.dim, kv_heads = a.cache.kv_heads;
  const int heads = (int)a.heads, first = (int)a.first, lane = threadIdx.x % WARP;
  const int64_t token = blockIdx.x;
  let_next_start();
  wait_for_previous();
  angles.make((float)a.positions[token], a.inv_freq, pairs);
  const token_place to(a.places[token], a.cache.block_size);
  __syncthreads();
  const int end = min((int)(blockIdx.y + 1) * rows_block, heads + kv_heads);
  for (int row = (int)blockIdx.y * rows_block + threadIdx.x / WARP; row < end;
       row += ROPE_THREADS / WARP) {
    const bool is_q = row < heads;
    From *const at = (From *)(is_q ? a.q : a.k) +
                     (is_q ? token * heads + row : token * kv_heads + row - heads) * dim;
    if (is_q) {
      for (int pair = lane; pair < pairs; pair += WARP) {
        float low[1] = {to_float(at[first + pair])};
        float high[1] = {to_float(at[first + pairs + pair])};
        angles.turn(low, high, pair);
        at[first + pair] = from_float<From>(low[0]);
        at[first + pairs + pair] = from_float<From>(high[0]);
      }
      continue;
    }
    const latent_to cache(a.cache, to.block, row - heads, to.offset);
    auto rest = [&](int d) {
      const int in = d - first, pair = in < pairs ? in : in - pairs;
      if (in >= 2 * pairs) return to_float(at[d]);
      float low[1] = {to_float(at[first + pair])};
      float high[1] = {to_float(at[first + pairs + pair])};
      angles.turn(low, high, pair);
      return to_float(from_float<From>(in < pairs ? low[0] : high[0]));
    };
    pack_latent(a.cache.key, at, rest, [&](int at, uint32_t word) { cache.put(at, word); });
  }
}

int rope_append_latent(const kvl_rope_append_args &a, const kvl_cuda_queue *q) {
  const int rows = (int)a.heads + a.cache.kv_heads, step = ROPE_THREADS / WARP;
  const int each = a.tokens < 4 * q->sm_count && rows <= 65535 * step ? step : rows;
  const dim3 grid((unsigned)a.tokens, (unsigned)((rows + each - 1) / each));
  KVL_CUDA_BY_FLOAT(a.dtype, From, {
    return launch_programmatic(rope_append_latent_kernel<From>, grid, ROPE_THREADS, 0, q, a,
                               each);
  })
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(rope_append) {
  using namespace kvl;
  const kvl_rope_append_args &a = *(const kvl_rope_append_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.tokens == 0 || a.heads + a.cache.kv_heads == 0) return KVL_OK;
  if (!aligned16(a.q, a.k, a.v, a.cache.memory))
    return kvl__cuda_check(cudaErrorMisalignedAddress);
  if (a.cache.codec == KVL_CODEC_F8_LATENT) return rope_append_latent(a, q);
  const int status = with_codec<void>(a.cache.codec, [&](auto of) -> int {
    using C = typename decltype(of)::C;
    if constexpr (same<C, void>) {
      KVL_CUDA_BY_FLOAT(a.cache.codec, To, {
        return a.dtype == a.cache.codec ? start<To, To>(a, q) : start<float, To>(a, q);
      })
    } else {
      KVL_CUDA_BY_FLOAT(a.dtype, From, { return (start<From, C>(a, q)); })
    }
  });
  return status < 0 ? status : kvl__cuda_launched();
}
