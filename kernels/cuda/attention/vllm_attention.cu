/* PagedAttention V1 and V2 as in vLLM: one query token per sequence, keys and values in
 * blocks that a table names. This is a baseline to read and to compare with; kvlab's own
 * kernel for the same work is paged_attention.cu.
 *
 *   q            f32 f16 bf16  [seqs, heads, head_dim]
 *   key_cache    C             [blocks, kv_heads, head_dim / x, block_size, x]
 *   value_cache  C             [blocks, kv_heads, head_dim, block_size]
 *   tables       i32           [seqs, max_blocks]
 *   lens         i32           [seqs]
 *   alibi        f32           [heads]   optional
 *   out          like q        [seqs, heads, head_dim]
 *   workspace    f32           [seqs, heads, partitions] twice, then [..., head_dim]: V2
 * C is q's dtype or f8e4m3; x = 16 / sizeof(C). 16-byte aligned.
 *
 * A thread block has 128 threads in four warps, and takes one query head of one sequence. It
 *   1  scores the keys: a warp takes a block of the table, a thread group one token. The
 *      scores go to shared memory, as the logits;
 *   2  turns them into weights, with a maximum and a sum over the thread block;
 *   3  adds up the values: a warp takes a block of the table again, a thread several rows of
 *      it (a row is one d of all tokens); then the lanes of a row are added, then the warps.
 * V1 keeps the logits of the whole sequence: grid (heads, seqs), 4 bytes of shared memory per
 * token. V2 cuts the sequence into partitions of 512 tokens with one thread block each: grid
 * (heads, seqs, partitions). Every partition leaves its maximum, its sum and its result, and
 * a second kernel weighs them. A partition has nothing to do with tensor parallelism.
 *
 * Bytes   2 * len * heads * head_dim elements: each head of a group reads the same K and V,
 *         so memory delivers 1 / group of it and the L2 the rest
 * Limit   V2: the L2, at 0.89 of its peak in 16 x 32K. V1: latency; 32K logits leave room for
 *         four warps on an SM, and the L2 is at 0.08
 * Best    H100 80GB HBM3, 2026-11-21, us; bf16, 32/8 heads, head_dim 128, block 16, random
 *         tables, L2 flushed, median of 30. vLLM's own kernels of the day before:
 *                     16 x 32K  1 x 32K  1 x 128K  8 x 4K  16 x 8K  64 x 4K
 *           V2            1159      101       325      97      312      590
 *           vLLM's V2     1313      111       365     107      343      663
 *           V1            9039     2255         -     296      627      665
 *           vLLM's V1    15596
 *         It is a fair stand-in for vLLM's kernels: V2 takes 0.88 to 0.91 of the time of
 *         vLLM's V2, and V1 less than that of vLLM's V1.
 * Tried   other orders of the loads; times of V1 and V2 for 16 x 32K. With the test for the
 *         last block of V inside the loop over its rows, as in vLLM: 10 036 and 1094. With
 *         all loads of a key, or of a block's rows, before the first is used, and that test
 *         before the loop: 3016 and 1023, so V1 waits for one load after the other. Not
 *         taken: it would no longer stand for vLLM's V1. The same in 48 registers, for more
 *         warps: it spills, V2 6301
 *
 * Differences from vLLM's kernels
 *   numbers     weights, products and sums are f32 (vLLM: weights and their products with V
 *               take q's dtype); results of partitions stay f32 (vLLM: q's dtype); the sum
 *               gets no + 1e-6
 *   f8e4m3      a scale multiplies a sum, not every element; a thread group loads x elements
 *               at once (vLLM: as many as are 16 bytes of q's dtype)
 *   no key      a token that is no key has the logit -inf, not 0; so has a broken table entry
 *   structure   V1 and V2 are one kernel. Block-sparse attention is left out.
 * Source  Kwon et al. 2023, arXiv:2309.06180; vllm-project/vllm, csrc/attention. */
#include <cfloat>

#include "args/attention.h"
#include "cuda/common.cuh"
#include "cuda/convert.cuh"

namespace kvl {
namespace {

constexpr int THREADS = 128, WARPS = THREADS / WARP, PARTITION = 512;

/* Which thread reads what, in elements of the caches. */
template <class C_, int HEAD_DIM, int BLOCK_SIZE> struct shape {
  using C = C_;
  static constexpr int HEAD = HEAD_DIM, BLOCK = BLOCK_SIZE, SLICE = HEAD * BLOCK;
  /* Keys: x elements (16 bytes) of one token are contiguous, then x of the next token. A
   * thread group loads those of its token at once, so a warp reads a contiguous run of
   * memory: x elements of all tokens of the block. */
  static constexpr int X
  = WIDE<C>;
  static constexpr int GROUP = WARP / BLOCK; /* threads per token: 4, 2 or 1 */
  static constexpr int VEC = X
  / GROUP;                              /* elements that a thread loads at once */
  static constexpr int VECS = HEAD / X; /* loads per token */
  /* Values: the tokens of a row are contiguous; a few neighbouring lanes load a row. */
  static constexpr int V_VEC = X
  < BLOCK ? X : BLOCK;
  static constexpr int ROW_LANES = BLOCK / V_VEC;
  static constexpr int WARP_ROWS = WARP / ROW_LANES; /* rows that a warp loads at once */
  static constexpr int ROWS = (HEAD + WARP_ROWS - 1) / WARP_ROWS; /* per thread */
};

/* Tokens first ... end - 1 of a sequence, as one KV head sees them. */
struct part {
  const int32_t *table;
  int64_t blocks;
  int kv_heads, kv_head, first, end;
  /* Which slice of a cache's [blocks, kv_heads] has this block of the table; -1 if the table
   * is broken there. 64-bit, since a cache can have more than 2^31 elements. */
  __device__ int64_t slice(int block) const {
    int64_t physical = table[block];
    return physical < 0 || physical >= blocks ? -1 : physical * kv_heads + kv_head;
  }
};

/* What V2 keeps of each partition, in rows (seq, head). */
struct partials {
  float *top, *sum; /* [seqs * heads, count] */
  float *out;       /* [seqs * heads, count, head_dim] */
  int count;        /* partitions; 0: V1 */
};

__device__ int sequence_len(const kvl_vllm_attention_args &a, int seq) {
  int64_t room = a.max_blocks * a.cache.block_size;
  return (int)max((int64_t)0, min((int64_t)a.lens[seq], room));
}

/* logits[token - first] = q . k + slope * (token - newest) up to the end of the last block;
 * -inf where there is no key. Returns the largest that this thread saw. */
template <class S>
__device__ float score_keys(const part &p, const typename S::C *keys, const float *q,
                            float slope, int newest, float *logits) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int in_block = lane / S::GROUP; /* the token of this thread's group */
  const int in_group = lane % S::GROUP;
  float top = -FLT_MAX; /* finite, so that exp(-inf - top) is 0 even without any key */
  for (int block = p.first / S::BLOCK + warp; block * S::BLOCK < p.end; block += WARPS) {
    const int token = block * S::BLOCK + in_block;
    const int64_t slice = p.slice(block);
    float sums[S::VEC] = {};
    if (slice >= 0) {
      const auto *k = keys + slice * S::SLICE + in_block * S::X
      +in_group *S::VEC;
#pragma unroll
      for (int j = 0; j < S::VECS; j++) { /* dims from j * x + in_group * VEC on */
        float x[S::VEC];
        load_floats<S::VEC>(k + j * (S::BLOCK * S::X), x);
#pragma unroll
        for (int e = 0; e < S::VEC; e++)
          sums[e] += q[j * S::X + in_group * S::VEC + e] * x[e];
      }
    }
    float qk = 0;
#pragma unroll
    for (int e = 0; e < S::VEC; e++) qk += sums[e];
    qk = warp_sum<S::GROUP>(qk) + slope * (token - newest);
    if (slice < 0 || token >= p.end) qk = -INFINITY; /* whatever that memory holds */
    if (in_group == 0) logits[token - p.first] = qk;
    top = fmaxf(top, qk);
  }
  return top;
}

/* sums[warp][d] = the sum of weight * v over the blocks of that warp. sums may be the same
 * memory as weights. */
template <class S>
__device__ void add_values(const part &p, const typename S::C *values, float *weights,
                           float *sums) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int in_block = lane % S::ROW_LANES * S::V_VEC; /* the vector's first token */
  float sum[S::ROWS] = {};
  for (int block = p.first / S::BLOCK + warp; block * S::BLOCK < p.end; block += WARPS) {
    const int token = block * S::BLOCK + in_block;
    const int64_t slice = p.slice(block);
    if (slice < 0) continue;
    float weight[S::V_VEC];
    load_floats<S::V_VEC>(weights + token - p.first, weight);
#pragma unroll
    for (int i = 0; i < S::ROWS; i++) {
      const int d = lane / S::ROW_LANES + i * S::WARP_ROWS;
      if (d >= S::HEAD) break;
      float v[S::V_VEC];
      load_floats<S::V_VEC>(values + slice * S::SLICE + d * S::BLOCK + in_block, v);
      /* Past the end a weight is 0, but 0 * NaN is NaN: there V is replaced by 0. */
#pragma unroll
      for (int e = 0; e < S::V_VEC; e++)
        sum[i] += weight[e] * (token + e < p.end ? v[e] : 0.f);
    }
  }
#pragma unroll
  for (int i = 0; i < S::ROWS; i++) sum[i] = warp_sum<S::ROW_LANES>(sum[i]);
  __syncthreads(); /* all warps have read their weights */
#pragma unroll
  for (int i = 0; i < S::ROWS; i++) {
    const int d = lane / S::ROW_LANES + i * S::WARP_ROWS;
    if (d < S::HEAD && in_block == 0) sums[warp * S::HEAD + d] = sum[i];
  }
  __syncthreads();
}

template <class S>
__global__ void __launch_bounds__(THREADS)
    vllm_attention(const __grid_constant__ kvl_vllm_attention_args a, partials to) {
  extern __shared__ __align__(16) float logits[];
  __shared__ __align__(16) float q[S::HEAD];
  __shared__ float reduce[WARP];
  const int head = blockIdx.x, seq = blockIdx.y, partition = blockIdx.z;
  const int len = sequence_len(a, seq);
  part p = {a.tables + seq * a.max_blocks,
            a.cache.blocks,
            a.cache.kv_heads,
            head / (int)(a.heads / a.cache.kv_heads),
            0,
            len};
  if (to.count > 0) {
    p.first = partition * PARTITION;
    p.end = min(p.first + PARTITION, len);
    if (p.first >= len) return; /* the second kernel knows the length, too */
  }
  const int64_t row = seq * a.heads + head;
  const float scale = a.scale * (a.cache.k_scale ? *a.cache.k_scale : 1.f);
  for (int d = threadIdx.x; d < S::HEAD; d += THREADS)
    q[d] = scale * load_any(a.q, a.dtype, row * S::HEAD + d);
  __syncthreads();

  const float slope = a.alibi ? a.alibi[head] : 0.f;
  float top = score_keys<S>(p, (const typename S::C *)a.cache.keys, q, slope, len - 1,
                            logits);
  /* The maximum of the thread block; its barrier also completes the logits. */
  top = block_max(top, reduce);
  float sum = 0;
  const int padded = (p.end - p.first + S::BLOCK - 1) / S::BLOCK * S::BLOCK;
  for (int i = threadIdx.x; i < padded; i += THREADS) {
    logits[i] = __expf(logits[i] - top);
    sum += logits[i];
  }
  sum = block_sum(sum, reduce);
  add_values<S>(p, (const typename S::C *)a.cache.values, logits, logits);

  const float v_scale = a.cache.v_scale ? *a.cache.v_scale : 1.f;
  for (int d = threadIdx.x; d < S::HEAD; d += THREADS) {
    float x = 0;
    for (int warp = 0; warp < WARPS; warp++) x += logits[warp * S::HEAD + d];
    x = sum == 0 ? 0.f : x * v_scale / sum;
    if (to.count > 0) to.out[(row * to.count + partition) * S::HEAD + d] = x;
    else store_any(a.out, a.dtype, row * S::HEAD + d, x);
  }
  if (to.count > 0 && threadIdx.x == 0) {
    to.top[row * to.count + partition] = top;
    to.sum[row * to.count + partition] = sum;
  }
}

/* out = the results of the partitions, each weighed by sum_j * exp(top_j - top), normalised.
 * Grid (heads, seqs). */
__global__ void __launch_bounds__(THREADS)
    vllm_reduce(const __grid_constant__ kvl_vllm_attention_args a, partials from) {
  extern __shared__ float weights[]; /* [partitions] */
  __shared__ float reduce[WARP];
  const int n = (sequence_len(a, blockIdx.y) + PARTITION - 1) / PARTITION;
  const int dim = a.cache.head_dim;
  const int64_t row = blockIdx.y * a.heads + blockIdx.x, first = row * from.count;
  float top = -FLT_MAX, sum = 0;
  for (int j = threadIdx.x; j < n; j += THREADS) top = fmaxf(top, from.top[first + j]);
  top = block_max(top, reduce);
  for (int j = threadIdx.x; j < n; j += THREADS) {
    weights[j] = from.sum[first + j] * __expf(from.top[first + j] - top);
    sum += weights[j];
  }
  sum = block_sum(sum, reduce);
  for (int d = threadIdx.x; d < dim; d += THREADS) {
    float x = 0;
    for (int j = 0; j < n; j++) x += weights[j] * from.out[(first + j) * dim + d];
    store_any(a.out, a.dtype, row * dim + d, sum == 0 ? 0.f : x / sum);
  }
}

/* ---- launch ------------------------------------------------------------------------- */

int64_t longest(const kvl_vllm_attention_args &a) {
  return a.max_blocks * a.cache.block_size;
}
int partition_count(const kvl_vllm_attention_args &a) {
  return a.version == 2 ? (int)((longest(a) + PARTITION - 1) / PARTITION) : 0;
}

/* Asks for dynamic shared memory, beside the `fixed` bytes that a kernel has anyway. */
template <class K>
int allow_dynamic(K *kernel, int64_t bytes, int64_t fixed, const kvl_cuda_queue *q,
                  const char *words, int64_t tokens) {
  if (bytes + fixed > q->shared_optin)
    return kvl_cuda::fail(
        KVL_ERR_UNSUPPORTED,
        "%s: %lld tokens (max_blocks * block_size) need %lld bytes of shared memory, but a "
        "thread block has only %lld",
        words, (long long)tokens, (long long)bytes, (long long)(q->shared_optin - fixed));
  if (bytes + fixed <= 48 << 10) return KVL_OK;
  return kvl__cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

template <class C, int HEAD, int BLOCK>
int launch_shape(const kvl_vllm_attention_args &a, const partials &to,
                 const kvl_cuda_queue *q) {
  if constexpr (HEAD % WIDE<C>) {
    return KVL_ERR_UNSUPPORTED;
  } else {
    auto *kernel = vllm_attention<shape<C, HEAD, BLOCK>>;
    int64_t tokens = to.count ? PARTITION : longest(a), sums = WARPS * HEAD;
    int64_t bytes = (tokens > sums ? tokens : sums) * (int64_t)sizeof(float);
    int status = allow_dynamic(kernel, bytes, (HEAD + WARP) * 4, q, "V1", tokens);
    if (status < 0) return status;
    dim3 grid((unsigned)a.heads, (unsigned)a.seqs, to.count ? to.count : 1);
    kernel<<<grid, THREADS, bytes, q->stream>>>(a, to);
    return KVL_OK;
  }
}

template <class C, int HEAD>
int launch_head(const kvl_vllm_attention_args &a, const partials &to,
                const kvl_cuda_queue *q) {
  switch (a.cache.block_size) {
    case 8: return launch_shape<C, HEAD, 8>(a, to, q);
    case 16: return launch_shape<C, HEAD, 16>(a, to, q);
    case 32: return launch_shape<C, HEAD, 32>(a, to, q);
    default: return KVL_ERR_UNSUPPORTED;
  }
}

template <class C>
int launch(const kvl_vllm_attention_args &a, const partials &to, const kvl_cuda_queue *q) {
  switch (a.cache.head_dim) {
    case 32: return launch_head<C, 32>(a, to, q);
    case 64: return launch_head<C, 64>(a, to, q);
    case 80: return launch_head<C, 80>(a, to, q);
    case 96: return launch_head<C, 96>(a, to, q);
    case 112: return launch_head<C, 112>(a, to, q);
    case 120: return launch_head<C, 120>(a, to, q);
    case 128: return launch_head<C, 128>(a, to, q);
    case 192: return launch_head<C, 192>(a, to, q);
    case 256: return launch_head<C, 256>(a, to, q);
    default: return KVL_ERR_UNSUPPORTED;
  }
}

partials place_partials(const kvl_vllm_attention_args &a) {
  const int count = partition_count(a);
  if (count == 0) return {};
  const int64_t n = a.seqs * a.heads * count;
  float *first = (float *)a.workspace;
  return {first, first + n, first + 2 * n, count};
}

int launch_reduce(const kvl_vllm_attention_args &a, const partials &from,
                  const kvl_cuda_queue *q) {
  if (from.count == 0) return KVL_OK;
  /* A multiple of four: the compiler reads four weights before it checks their number. */
  const int64_t bytes = (from.count + 3) / 4 * 4 * (int64_t)sizeof(float);
  int status = allow_dynamic(vllm_reduce, bytes, WARP * 4, q, "V2", longest(a));
  if (status < 0) return status;
  dim3 grid((unsigned)a.heads, (unsigned)a.seqs);
  vllm_reduce<<<grid, THREADS, bytes, q->stream>>>(a, from);
  return KVL_OK;
}

}  // namespace
}  // namespace kvl

KVL_CUDA_WORKSPACE(vllm_attention) {
  const kvl_vllm_attention_args &a = *(const kvl_vllm_attention_args *)args;
  return (size_t)(a.seqs * a.heads * kvl::partition_count(a)) * (a.cache.head_dim + 2) *
         sizeof(float);
}

KVL_CUDA_KERNEL(vllm_attention) {
  const kvl_vllm_attention_args &a = *(const kvl_vllm_attention_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.seqs == 0 || a.heads == 0) return KVL_OK;
  const kvl::partials p = kvl::place_partials(a);
  int status = KVL_ERR_UNSUPPORTED;
  if (a.cache.dtype == KVL_DTYPE_F8E4M3) status = kvl::launch<kvl::f8e4m3>(a, p, q);
  else KVL_CUDA_BY_FLOAT(a.cache.dtype, C, status = kvl::launch<C>(a, p, q);)
  if (status >= 0) status = kvl::launch_reduce(a, p, q);
  return status < 0 ? status : kvl__cuda_launched();
}
