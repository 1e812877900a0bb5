/* out = softmax(scale * q k^T) v over the listed tokens of each row.
 *
 *   q      f32 f16 bf16  [rows, heads, head_dim]
 *   cache  pages of q's dtype, f8e4m3 or int8; any codec for f32 q
 *   places i32           [rows, kv_heads or 1, k]
 *   out    like q or f32 [rows, heads, head_dim]
 *   lse    f32           [rows, heads]   optional
 * q, cache and out are 16-byte aligned; head_dim is a multiple of 8 up to 256.
 *
 * Kernels   token_mma.cuh   16-bit q: tensor cores, asynchronous copies
 *           token_f32       f32 q, or int8: the inner loop of paged_f32.cuh over another list
 *                           of keys
 * Bytes     2 k head_dim element per row and KV head, once for all heads of the group; limit:
 *           memory for a few rows; L2 for the rows of a prompt, which share tokens
 * Tolerance as paged_attention.cu: 16-bit P is rounded to q's dtype
 * Best      32/8 heads, head_dim 128, k 2048, rows of their own tokens, L2 flushed; the share
 *           is of a plain read of as many bytes. H200, 2026-11-22: bf16 16 rows 39.3 us (0.87),
 *           64 rows 126 (0.97); f8e4m3 27.6 (0.70) and 77.3 (0.84), once 141 and 536; f32 79.2
 *           (0.81) and 279 (0.86), once 159 and 373. H100 80GB HBM3, 2026-11-21: 4096 rows of
 *           a prompt of 64K 4.8 ms, 7.1 TB/s from L2 (only reading takes 4.4).
 *           kernels/dev/token_attention.cu; notes/20261121-token-attention.md and
 *           notes/20261122-token-attention.md
 * Source    Dao et al. 2022 (online softmax); the lists are those of DeepSeek-V3.2's DSA */
#include "args/attention.h"
#include "cuda/attention/paged_f32.cuh"
#include "cuda/attention/token_mma.cuh"

namespace kvl {
namespace {

/* The keys for paged_f32.cuh: key i is the token at entry i of the list, with no position. */
struct listed_keys {
  const kvl_paged_attention_args &a;
  const token_lists &lists;
  const int32_t *list;
  int kv_head;

  __device__ listed_keys(const kvl_paged_attention_args &args, const token_lists &of,
                         int64_t row, int head)
      : a(args), lists(of), list(of.list(row, head)), kv_head(head) {}
  __device__ int64_t to_value() const { return kvl__to_value(&a.cache, kv_head); }
  __device__ paged_row find(int key) const {
    const int place = key < lists.k ? list[key] : -1;
    if (place < 0 || place >= lists.all) return {0, -1, 0};
    const uint32_t block = lists.block.quotient(place);
    const uint32_t token = place - block * lists.block.by;
    return {kvl__row_at(&a.cache, &a.cache.key, block, kv_head, token), 0, (int)token};
  }
};

template <class C, int D, int ROWS>
__global__ void __launch_bounds__(f32_shape<C, D>::WARPS *WARP, 2)
    token_f32(const __grid_constant__ kvl_paged_attention_args a,
              const __grid_constant__ token_lists lists) {
  using shape = f32_shape<C, D>;
  constexpr int WARPS = shape::WARPS, KEYS = shape::KEYS;
  extern __shared__ __align__(128) char shared[];
  __shared__ f32_rows<ROWS> sees[WARPS];
  const int split = blockIdx.x % lists.splits;
  const int64_t token = blockIdx.x / lists.splits;
  const int group = (int)(a.heads / a.cache.kv_heads), kv_head = blockIdx.y / lists.subgroups;
  const int first = blockIdx.y % lists.subgroups * ROWS, heads = min(group - first, ROWS);
  const query_rows rows = {token, kv_head * group + first, heads, heads};
  const int warp = threadIdx.x / WARP;
  wait_for_previous();
  sees[warp].set(a, rows, 0, INT_MAX);
  f32_state<C, D, ROWS> state;
  state.attend(listed_keys(a, lists, token, kv_head), rows, sees[warp], split * WARPS + warp,
               (int)((lists.k + KEYS - 1) / KEYS), lists.splits * WARPS,
               shared + warp * shape::STAGES * shape::STAGE_BYTES,
               (int *)(shared + shape::RING_BYTES) + warp * shape::STAGES * KEYS);
  state.join();
  let_next_start();

  __syncthreads(); /* all warps are done with the ring, which now holds the states */
  float *sums = (float *)shared;
  float2 *states = (float2 *)(sums + WARPS * ROWS * D);
  static_assert(WARPS * ROWS * (D * 4 + 8) <= shape::RING_BYTES, "");
  state.store(sums + warp * ROWS * D, states + warp * ROWS);
  splits_sync(lists.splits);
  const float value_scale = a.cache.v_scale ? a.cache.v_scale[kv_head] : 1.f;
  for (int i = (split * WARPS * WARP + threadIdx.x) * 4; i < rows.count * D;
       i += lists.splits * WARPS * WARP * 4) {
    const int r = i / D, dim = i % D;
    if (dim >= a.cache.value.dim) continue;
    float m = -INFINITY, l = 0.f, x[4] = {};
    for (int s = 0; s < lists.splits; s++)
#pragma unroll
      for (int w = 0; w < WARPS; w++)
        m = fmaxf(m, shared_of(states, lists.splits, s)[w * ROWS + r].x);
    for (int s = 0; s < lists.splits; s++)
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float2 state_of = shared_of(states, lists.splits, s)[w * ROWS + r];
        const float weight = exp2_fast(state_of.x - finite_shift(m));
        float part[4];
        load_floats(shared_of(sums, lists.splits, s) + (w * ROWS + r) * D + dim, part);
        l += weight * state_of.y;
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] += weight * part[e];
      }
    const int64_t row = rows.token(r) * a.heads + rows.head(r);
    row_end end = end_row(a, row, m, l);
    end.scale *= value_scale;
    write_row(a, end, row, dim, x);
  }
  splits_sync(lists.splits); /* others may still read this block's memory */
}

/* How many thread blocks share a list: doubled as long as all of them are on the device at
 * once and each has two tiles. A GPU before Hopper has no clusters. */
int splits_of(const token_lists &lists, int64_t blocks, int tile, int at_once,
              const kvl_cuda_queue *q) {
  int splits = 1;
  if (!is_hopper(q)) return splits;
  while (splits < SPLITS_MAX && blocks * splits * 2 <= (int64_t)q->sm_count * at_once &&
         lists.k >= (int64_t)splits * 4 * tile)
    splits *= 2;
  return splits;
}

template <class T, class C, int D, int MW>
int launch_mma(const kvl_paged_attention_args &a, token_lists lists,
               const kvl_cuda_queue *q) {
  using shape = token_shape<D, MW, same<C, f8e4m3>>;
  const int group = (int)(a.heads / a.cache.kv_heads);
  lists.subgroups = ceil_div(group, shape::ROWS);
  const int64_t units = (int64_t)a.cache.kv_heads * lists.subgroups;
  lists.splits = splits_of(lists, a.tokens * units, shape::KEYS, shape::BLOCKS, q);
  constexpr auto kernel = token_mma<T, C, D, MW>;
  int status = allow_shared<kernel>(q, shape::SHARED_BYTES);
  if (status == KVL_OK) status = prefer_shared<kernel>(q);
  if (status < 0) return status;
  const dim3 grid((unsigned)(a.tokens * lists.splits), (unsigned)units);
  return launch_clusters(kernel, lists.splits, grid, shape::THREADS, shape::SHARED_BYTES, q,
                         a, lists);
}

template <class T, class C, int D>
int launch_group(const kvl_paged_attention_args &a, const token_lists &lists,
                 const kvl_cuda_queue *q) {
  const int64_t group = a.heads / a.cache.kv_heads;
  if (group <= 16) return launch_mma<T, C, D, 1>(a, lists, q);
  if (group <= 32) return launch_mma<T, C, D, 2>(a, lists, q);
  return launch_mma<T, C, D, 4>(a, lists, q);
}

template <class T, class C>
int launch_dim(const kvl_paged_attention_args &a, const token_lists &lists,
               const kvl_cuda_queue *q) {
  const int d = a.cache.key.dim;
  if (d <= 64) return launch_group<T, C, 64>(a, lists, q);
  if (d <= 128) return launch_group<T, C, 128>(a, lists, q);
  return launch_group<T, C, 256>(a, lists, q);
}

template <class T>
int launch_16bit(const kvl_paged_attention_args &a, const token_lists &lists,
                 const kvl_cuda_queue *q) {
  if (a.cache.codec == KVL_DTYPE_F8E4M3) return launch_dim<T, f8e4m3>(a, lists, q);
  return launch_dim<T, T>(a, lists, q);
}

template <class C, int D, int ROWS>
int launch_f32(const kvl_paged_attention_args &a, token_lists lists,
               const kvl_cuda_queue *q) {
  using shape = f32_shape<C, D>;
  lists.subgroups = ceil_div(a.heads / a.cache.kv_heads, ROWS);
  const int64_t units = (int64_t)a.cache.kv_heads * lists.subgroups;
  lists.splits = splits_of(lists, a.tokens * units, shape::KEYS * shape::WARPS, 2, q);
  constexpr auto kernel = token_f32<C, D, ROWS>;
  int status = allow_shared<kernel>(q, shape::SHARED_BYTES);
  if (status == KVL_OK) status = prefer_shared<kernel>(q);
  if (status < 0) return status;
  const dim3 grid((unsigned)(a.tokens * lists.splits), (unsigned)units);
  return launch_clusters(kernel, lists.splits, grid, shape::WARPS * WARP, shape::SHARED_BYTES,
                         q, a, lists);
}

template <class C, int D>
int launch_f32_group(const kvl_paged_attention_args &a, const token_lists &lists,
                     const kvl_cuda_queue *q) {
  if (a.heads / a.cache.kv_heads <= 4) return launch_f32<C, D, 4>(a, lists, q);
  return launch_f32<C, D, 8>(a, lists, q);
}

template <class C>
int launch_f32_dim(const kvl_paged_attention_args &a, const token_lists &lists,
                   const kvl_cuda_queue *q) {
  const int d = a.cache.key.dim;
  if (d <= 64) return launch_f32_group<C, 64>(a, lists, q);
  if (d <= 128) return launch_f32_group<C, 128>(a, lists, q);
  return launch_f32_group<C, 256>(a, lists, q);
}

int launch(const kvl_token_attention_args &t, const kvl_cuda_queue *q) {
  if (t.rows == 0 || t.heads == 0) return KVL_OK;
  if (!aligned16(t.q, t.cache.memory, t.out))
    return kvl__cuda_check(cudaErrorMisalignedAddress);
  /* As a decode, with the fields that the inner loops read. */
  kvl_paged_attention_args a = {};
  a.cache = t.cache;
  a.q = t.q;
  a.out = t.out;
  a.lse = t.lse;
  a.tokens = a.seqs = t.rows;
  a.heads = t.heads;
  a.scale = t.scale;
  a.dtype = t.dtype;
  a.out_dtype = t.out_dtype;
  const token_lists lists = {t.places,
                             t.k,
                             t.place_heads,
                             t.cache.blocks * t.cache.block_size,
                             divisor(t.cache.block_size),
                             1,
                             1};
  if (kvl__packs(t.cache.codec)) return launch_f32_dim<int8>(a, lists, q);
  if (t.dtype == KVL_DTYPE_BF16) return launch_16bit<__nv_bfloat16>(a, lists, q);
  if (t.dtype == KVL_DTYPE_F16) return launch_16bit<__half>(a, lists, q);
  KVL_CUDA_BY_CODEC(t.cache.codec, C, return launch_f32_dim<C>(a, lists, q);)
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(token_attention) {
  return kvl::launch(*(const kvl_token_attention_args *)args, (const kvl_cuda_queue *)queue);
}
