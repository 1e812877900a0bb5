/* out = softmax(scale * q k^T) v over the listed tokens of each row.
 *
 *   q      f32 f16 bf16  [rows, heads, head_dim]
 *   cache  like q or f8e4m3, any dtype for f32 q  [blocks, 2, kv_heads, block_size, head_dim]
 *   places i32           [rows, kv_heads or 1, k]
 *   out    like q or f32 [rows, heads, head_dim]
 *   lse    f32           [rows, heads]   optional
 * q, cache and out are 16-byte aligned; head_dim is a multiple of 8 up to 256.
 *
 * Kernels   token_mma.cuh   16-bit q: tensor cores, asynchronous copies
 *           token_f32       f32 q: the inner loop of paged_f32.cuh over another list of keys
 * Bytes     2 k head_dim element per row and KV head, once for all heads of the group; limit:
 *           memory for a few rows; L2 for the rows of a prompt, which share tokens
 * Tolerance as paged_attention.cu: 16-bit P is rounded to q's dtype
 * Best      H100 80GB HBM3, 2026-11-21, bf16, 32/8 heads, head_dim 128, k 2048, L2 flushed; R
 *           3094 GB/s: 64 rows of their own tokens 180 us, 0.96 R; 16 rows 53.5; 1 row 14.5;
 *           4096 rows of a prompt of 64K 4.8 ms, 7.1 TB/s from L2 (only reading takes 4.4).
 *           f8e4m3, 64 rows: 548 us, because it waits for its loads
 *           kernels/dev/token_attention.cu; notes/20261121-token-attention.md
 * Source    Dao et al. 2022 (online softmax); the lists are those of DeepSeek-V3.2's DSA */
#include "paged_f32.cuh"
#include "token_mma.cuh"

namespace kvl {
namespace {

/* The keys for paged_f32.cuh: key i is the token at entry i of the list, with no position. */
struct listed_keys {
  const kvl_paged_attention_args &a;
  const token_lists &lists;
  const int32_t *list;
  int64_t block_stride, head_offset;

  __device__ listed_keys(const kvl_paged_attention_args &args, const token_lists &of,
                         int64_t row, int kv_head)
      : a(args), lists(of), list(of.list(row, kv_head)) {
    head_offset = (int64_t)kv_head * a.cache.block_size * a.cache.head_dim;
    block_stride = 2 * (int64_t)a.cache.kv_heads * a.cache.block_size * a.cache.head_dim;
  }
  __device__ int64_t to_value() const { return block_stride / 2; }
  __device__ paged_row find(int key) const {
    const int place = key < lists.k ? list[key] : -1;
    if (place < 0 || place >= lists.all) return {0, -1};
    const uint32_t block = lists.block.quotient(place);
    const int64_t token = place - block * lists.block.by;
    return {block * block_stride + head_offset + token * a.cache.head_dim, 0};
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
  const int group = (int)(a.heads / a.cache.kv_heads), kv_head = blockIdx.y / lists.subgroups;
  const int first = blockIdx.y % lists.subgroups * ROWS, heads = min(group - first, ROWS);
  const query_rows rows = {blockIdx.x, kv_head * group + first, heads, heads};
  const int warp = threadIdx.x / WARP;
  wait_for_previous();
  sees[warp].set(a, rows, 0, INT_MAX);
  f32_state<C, D, ROWS> state;
  state.attend(listed_keys(a, lists, blockIdx.x, kv_head), rows, sees[warp], warp,
               (int)((lists.k + KEYS - 1) / KEYS), WARPS,
               shared + warp * shape::STAGES * shape::STAGE_BYTES,
               (int *)(shared + shape::RING_BYTES) + warp * shape::STAGES * KEYS);
  state.join();
  let_next_start();

  __syncthreads(); /* all warps are done with the ring, which now holds the states */
  float *sums = (float *)shared;
  float2 *states = (float2 *)(sums + WARPS * ROWS * D);
  static_assert(WARPS * ROWS * (D * 4 + 8) <= shape::RING_BYTES, "");
  state.store(sums + warp * ROWS * D, states + warp * ROWS);
  __syncthreads();
  finish_rows<WARPS, ROWS, D>(a, rows, a.cache.v_scale ? a.cache.v_scale[kv_head] : 1.f, sums,
                              states);
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
  using shape = token_shape<D, MW>;
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
  const int d = a.cache.head_dim;
  if (d <= 64) return launch_group<T, C, 64>(a, lists, q);
  if (d <= 128) return launch_group<T, C, 128>(a, lists, q);
  return launch_group<T, C, 256>(a, lists, q);
}

template <class T>
int launch_16bit(const kvl_paged_attention_args &a, const token_lists &lists,
                 const kvl_cuda_queue *q) {
  if (a.cache.dtype == KVL_DTYPE_F8E4M3) return launch_dim<T, f8e4m3>(a, lists, q);
  return launch_dim<T, T>(a, lists, q);
}

template <class C, int D>
int launch_f32(const kvl_paged_attention_args &a, token_lists lists,
               const kvl_cuda_queue *q) {
  using shape = f32_shape<C, D>;
  constexpr int ROWS = 8;
  lists.subgroups = ceil_div(a.heads / a.cache.kv_heads, ROWS);
  int status = allow_shared<token_f32<C, D, ROWS>>(q, shape::SHARED_BYTES);
  if (status < 0) return status;
  dim3 grid((unsigned)a.tokens, (unsigned)(a.cache.kv_heads * lists.subgroups));
  return launch_programmatic(token_f32<C, D, ROWS>, grid, shape::WARPS * WARP,
                             shape::SHARED_BYTES, q, a, lists);
}

template <class C>
int launch_f32_dim(const kvl_paged_attention_args &a, const token_lists &lists,
                   const kvl_cuda_queue *q) {
  const int d = a.cache.head_dim;
  if (d <= 64) return launch_f32<C, 64>(a, lists, q);
  if (d <= 128) return launch_f32<C, 128>(a, lists, q);
  return launch_f32<C, 256>(a, lists, q);
}

int launch(const kvl_token_attention_args &t, const kvl_cuda_queue *q) {
  if (t.rows == 0 || t.heads == 0) return KVL_OK;
  if (!aligned16(t.q, t.cache.kv, t.out)) return kvl__cuda_check(cudaErrorMisalignedAddress);
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
  if (t.dtype == KVL_DTYPE_BF16) return launch_16bit<__nv_bfloat16>(a, lists, q);
  if (t.dtype == KVL_DTYPE_F16) return launch_16bit<__half>(a, lists, q);
  if (t.cache.dtype == KVL_DTYPE_F8E4M3) return launch_f32_dim<f8e4m3>(a, lists, q);
  KVL_CUDA_BY_FLOAT(t.cache.dtype, C, return launch_f32_dim<C>(a, lists, q);)
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(token_attention) {
  return kvl::launch(*(const kvl_token_attention_args *)args, (const kvl_cuda_queue *)queue);
}
