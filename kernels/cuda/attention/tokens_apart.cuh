/* A few new tokens of each sequence, as a decode of that many sequences: token t of a sequence is
 * the last one of a sequence with the same blocks. A decode divides the context among all SMs,
 * which a prefill without wgmma does not, but it reads the keys once for each token. */
#ifndef KVL_CUDA_TOKENS_APART_CUH
#define KVL_CUDA_TOKENS_APART_CUH

#include "args/attention.h"
#include "cuda/launch.cuh"

namespace kvl {

/* How long the sequences are, and their tables, for a decode of tokens. */
struct apart_tables {
  int32_t *lens;   /* [tokens]; 0 for tokens of no sequence */
  int32_t *tables; /* [tokens, max_blocks] */
};

/* Grid: tokens, pieces of a table. */
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    spread_tokens(const __grid_constant__ kvl_paged_attention_args a, apart_tables to) {
  const int64_t token = blockIdx.x;
  int low = 0, high = (int)a.seqs; /* the first sequence that begins after the token */
  while (low < high) {
    const int middle = (low + high) / 2;
    if (a.starts[middle] <= token) low = middle + 1;
    else high = middle;
  }
  const int seq = low - 1;
  const bool has = seq >= 0 && token < a.starts[seq + 1];
  if (threadIdx.x == 0 && blockIdx.y == 0)
    to.lens[token] = has ? max(0, a.lens[seq] - (a.starts[seq + 1] - (int)token) + 1) : 0;
  const int64_t at = (int64_t)blockIdx.y * THREADS + threadIdx.x;
  if (has && at < a.max_blocks)
    to.tables[token * a.max_blocks + at] = a.tables[seq * a.max_blocks + at];
}

/* The call of the decode; its workspace lies behind the tables. */
inline kvl_paged_attention_args apart_call(const kvl_paged_attention_args &a,
                                           apart_tables *to, size_t *bytes) {
  const size_t lens = (size_t)(a.tokens + 3) / 4 * 16;
  *bytes = lens + (size_t)(a.tokens * a.max_blocks + 3) / 4 * 16;
  to->lens = (int32_t *)a.workspace;
  to->tables = (int32_t *)((char *)a.workspace + lens);
  kvl_paged_attention_args b = a;
  b.starts = nullptr;
  b.seqs = a.tokens;
  b.lens = to->lens, b.tables = to->tables;
  b.workspace = (char *)a.workspace + *bytes;
  return b;
}

/* Is a call done so? A prefill gives each sequence as many thread blocks as it has KV heads. */
inline bool goes_apart(const kvl_paged_attention_args &a, int sm_count) {
  if (!a.starts || !a.causal || a.tree || a.selection || a.listed) return false;
  return a.tokens > a.seqs && a.tokens * a.cache.kv_heads * 2 <= sm_count;
}

inline int launch_spread(const kvl_paged_attention_args &a, const apart_tables &to,
                         const kvl_cuda_queue *q) {
  constexpr int THREADS = 256;
  const dim3 grid((unsigned)a.tokens, (unsigned)ceil_div(a.max_blocks, THREADS));
  spread_tokens<THREADS><<<grid, THREADS, 0, q->stream>>>(a, to);
  return kvl__cuda_launched();
}

}  // namespace kvl

#endif
