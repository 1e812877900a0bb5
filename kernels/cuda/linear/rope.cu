/* Rotates the pairs (first + i, first + pairs + i) of each head by positions[t] * inv_freq[i],
 * in place; other numbers stay as they are.
 *   x          f32 f16 bf16  [tokens, heads, head_dim]
 *   positions  i32           [tokens]
 *   inv_freq   f32           [pairs]
 * A thread block computes the sines and cosines of one token once, in shared memory, and uses
 * them for all of its heads.
 *
 * Bytes   2 * tokens * heads * 2 * pairs * element
 * Limit   memory bandwidth; the launch for a few tokens
 * Best    bf16 [4096, 32, 128]: 22.4 us, 0.97 of the run's read bandwidth; 16 tokens 5.4 us,
 *         an empty launch 3.0 (H100 80GB HBM3, 2026-11-21)
 * Source  Su et al. 2021, the half-split form of Hugging Face */
#include "args/linear.h"
#include "cuda/linear/rope.cuh"

namespace kvl {
namespace {

/* An item is N pairs of one head. Grid: tokens, runs of items_block items. A thread loads its
 * next item while it rotates one, and its first item while the sines are computed. */
template <int N, class T>
__global__ void __launch_bounds__(ROPE_THREADS)
    rope_kernel(T *x, const int32_t *positions, const float *inv_freq, int heads,
                int head_dim, int pairs, int before, int items_block) {
  __shared__ rope_angles angles;
  let_next_start();
  wait_for_previous();
  T *token = x + (int64_t)blockIdx.x * heads * head_dim + before;
  const float position = (float)positions[blockIdx.x];
  for (int begin = 0; begin < pairs; begin += ROPE_PAIRS) {
    const int n = min(pairs - begin, (int)ROPE_PAIRS), packs = n / N;
    const int first = (int)blockIdx.y * items_block;
    const int end = min(first + items_block, heads * packs);
    pack<T, N> low, high;
    auto at = [&](int i) { return token + (i / packs * head_dim + begin + i % packs * N); };
    auto load = [&](int i) {
      low = load_pack<N>(at(i));
      high = load_pack<N>(at(i) + pairs);
    };
    int i = first + (int)threadIdx.x;
    if (i < end) load(i);
    angles.make(position, inv_freq + begin, n);
    __syncthreads();
    while (i < end) {
      float u[N], v[N];
#pragma unroll
      for (int e = 0; e < N; e++) u[e] = to_float(low.at[e]), v[e] = to_float(high.at[e]);
      T *to = at(i);
      const int pair = i % packs * N;
      i += ROPE_THREADS;
      if (i < end) load(i);
      angles.turn(u, v, pair);
      store_floats(to, u);
      store_floats(to + pairs, v);
    }
    __syncthreads(); /* the next pairs' sines overwrite these */
  }
}

template <int N, class T> int start(const kvl_rope_args *g, const kvl_cuda_queue *q) {
  const int64_t most = g->pairs < ROPE_PAIRS ? g->pairs : ROPE_PAIRS;
  const int64_t items = g->heads * (most / N);
  const int64_t each = rope_items_block(g->tokens, items, q);
  const dim3 grid((unsigned)g->tokens, (unsigned)((items + each - 1) / each));
  return launch_programmatic(rope_kernel<N, T>, grid, ROPE_THREADS, 0, q, (T *)g->x,
                             g->positions, g->inv_freq, (int)g->heads, (int)g->head_dim,
                             (int)g->pairs, (int)g->first, (int)each);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(rope) {
  using namespace kvl;
  const kvl_rope_args *g = (const kvl_rope_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (g->tokens == 0 || g->heads == 0 || g->pairs == 0) return KVL_OK;
  KVL_CUDA_BY_FLOAT(g->dtype, T, {
    constexpr int n = WIDE<T>;
    auto takes = [&](int n) {
      return g->pairs % n == 0 && g->head_dim % n == 0 && g->first % n == 0;
    };
    if (aligned16(g->x) && takes(n)) return start<n, T>(g, q);
    if (aligned16(g->x) && takes(4)) return start<4, T>(g, q);
    return start<1, T>(g, q);
  })
  return KVL_OK;
}
