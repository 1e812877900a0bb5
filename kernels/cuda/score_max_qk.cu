/* The largest q . k of every block's valid tokens, read from the cache itself: the oracle
 * that summaries approximate. Joined over the group's heads by max or mean.
 *
 *   q       f32 f16 bf16  [seqs, heads, head_dim]
 *   cache   f32 f16 bf16  [blocks, 2, kv_heads, block_size, head_dim]   16-byte aligned
 *   tables  i32           [seqs, max_blocks]
 *   lens    i32           [seqs]
 *   scores  f32           [seqs, kv_heads, max_blocks]   -inf past the last block
 *
 * A block of threads takes whole blocks of about 256 tokens together. As in
 * score_blocks.cuh a row is spread over LANES lanes; a warp's pass is 8 * SIDE tokens, all
 * loads in flight. Maxima meet in shared memory as ordered integers, whose maximum does not
 * depend on who comes first.
 *
 * Bytes      tokens * kv_heads * head_dim * element; limit: memory (group <= 8), then FMA
 * Tolerance  1e-5 of sum |q_d k_d|: fp32 sums in another order */
#include "score_blocks.cuh"

namespace kvl {
namespace {

constexpr int TOKENS = 256, WARPS = SCORE_THREADS / WARP;

template <class T, int LANES>
__global__ void __launch_bounds__(SCORE_THREADS, 2)
score_max_qk(const __grid_constant__ kvl_score_max_qk_args a, int tiles, int each) {
  constexpr int D = LANES * 8, SIDE = WARP / LANES, QUAD = 4 * SIDE;
  __shared__ __align__(16) float q[SCORE_HEADS * D];
  __shared__ uint32_t best[TOKENS * SCORE_HEADS];   /* [each][heads at a time] */
  __shared__ float joined[TOKENS];
  const int size = a.cache.block_size, head_dim = a.cache.head_dim;
  const int64_t seq = blockIdx.x / tiles, kv_head = blockIdx.y, kv_heads = a.cache.kv_heads;
  const int64_t first = (int64_t)(blockIdx.x % tiles) * each;   /* block */
  const int64_t length = a.lens[seq], first_token = first * size;
  float *scores = a.scores + (seq * kv_heads + kv_head) * a.max_blocks + first;
  const int blocks = (int)min((int64_t)each, a.max_blocks - first);
  if (first_token >= length) {
    for (int b = threadIdx.x; b < blocks; b += SCORE_THREADS) scores[b] = -INFINITY;
    return;
  }
  const int tokens = (int)min(length - first_token, (int64_t)blocks * size);
  const int lane = threadIdx.x % WARP, lane_key = lane % LANES, side = lane / LANES;
  const int dim = lane_key * 8, warp = threadIdx.x / WARP;
  const int own = (lane & (LANES / 2) ? 2 : 0) + (lane & (LANES / 4) ? 1 : 0);
  const bool alone = size % QUAD == 0;   /* a quad of tokens never spans two blocks */
  const T *k = (const T *)a.cache.kv + kv_head * size * head_dim + dim;
  const int64_t stride = 2 * kv_heads * size * head_dim;
  const int32_t *table = a.tables + seq * a.max_blocks + first;
  const int group = (int)(a.heads / kv_heads);
  const bool is_max = a.group == KVL_GROUP_MAX;

  for (int b = threadIdx.x; b < blocks; b += SCORE_THREADS)
    joined[b] = is_max ? -INFINITY : 0.f;
  for (int h0 = 0; h0 < group; h0 += SCORE_HEADS) {
    const int heads = min(SCORE_HEADS, group - h0);
    __syncthreads();   /* the last heads' queries and maxima are read */
    load_queries<D>(a.q, a.dtype, seq * a.heads + kv_head * group + h0, heads, head_dim, q);
    for (int i = threadIdx.x; i < blocks * heads; i += SCORE_THREADS)
      best[i] = order_key(-INFINITY);
    __syncthreads();
    for (int t0 = warp * 2 * QUAD; t0 < tokens; t0 += WARPS * 2 * QUAD) {
      pack<T, 8> raw[8] = {};
#pragma unroll
      for (int u = 0; u < 8; u++) {
        int t = t0 + u * SIDE + side;
        if (t >= tokens || dim >= head_dim) continue;
        int block = t / size;
        int64_t physical = table[block];
        if (physical < 0 || physical >= a.cache.blocks) continue;
        raw[u] = load_pack<8>(k + physical * stride + (int64_t)(t - block * size) * head_dim);
      }
#pragma unroll
      for (int quad = 0; quad < 2; quad++) {
        float x[4][1][8];
#pragma unroll
        for (int u = 0; u < 4; u++)
#pragma unroll
          for (int e = 0; e < 8; e++) x[u][0][e] = to_float(raw[quad * 4 + u].at[e]);
        const int t = t0 + quad * QUAD + own * SIDE + side;   /* this lane's token */
        const int block = min(t, tokens - 1) / size;
        for (int h = 0; h < heads; h++) {
          float sums[4] = {}, part[8];
          load_floats(q + h * D + dim, part);
#pragma unroll
          for (int u = 0; u < 4; u++)
#pragma unroll
            for (int e = 0; e < 8; e++) sums[u] = score_term<1>(part[e], x[u], e, sums[u]);
          float score = sum_of_four<LANES>(sums, lane);
          if (t >= tokens) score = -INFINITY;
          if (alone) {
            score = warp_max(score);
            if (lane == 0) atomicMax(&best[block * heads + h], order_key(score));
          } else if (lane_key % (LANES / 4) == 0 && t < tokens) {
            atomicMax(&best[block * heads + h], order_key(score));
          }
        }
      }
    }
    __syncthreads();
    for (int b = threadIdx.x; b < blocks; b += SCORE_THREADS)
      for (int h = 0; h < heads; h++) {
        float score = order_value(best[b * heads + h]);
        joined[b] = is_max ? fmaxf(joined[b], score) : joined[b] + score;
      }
  }
  /* Each thread wrote its own `joined`. */
  for (int b = threadIdx.x; b < blocks; b += SCORE_THREADS) {
    float score = is_max ? joined[b] : joined[b] / (float)group;
    scores[b] = first_token + (int64_t)b * size < length ? score : -INFINITY;
  }
}

template <class T, int LANES>
void launch(const kvl_score_max_qk_args &a, const kvl_cuda_queue *q) {
  int each = a.cache.block_size < TOKENS ? TOKENS / a.cache.block_size : 1;
  int64_t tiles = (a.max_blocks + each - 1) / each;
  dim3 grid((unsigned)(tiles * a.seqs), a.cache.kv_heads);
  score_max_qk<T, LANES><<<grid, SCORE_THREADS, 0, q->stream>>>(a, (int)tiles, each);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(score_max_qk) {
  using namespace kvl;
  const kvl_score_max_qk_args &a = *(const kvl_score_max_qk_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.seqs == 0 || a.max_blocks == 0 || a.cache.kv_heads == 0) return KVL_OK;
  if (!aligned16(a.cache.kv)) return kvl__cuda_check(cudaErrorMisalignedAddress);
  KVL_CUDA_BY_FLOAT(a.cache.dtype, T, {
    if (a.cache.head_dim <= 64) launch<T, 8>(a, q);
    else if (a.cache.head_dim <= 128) launch<T, 16>(a, q);
    else launch<T, 32>(a, q);
  })
  return kvl__cuda_launched();
}
