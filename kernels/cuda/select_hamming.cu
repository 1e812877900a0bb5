/* The blocks to attend to: the first `sink`, the last `recent` and those whose hashes are
 * nearest to that of the mean query of their KV head's group; ascending.
 *
 *   q          f32 f16 bf16  [seqs, heads, head_dim]
 *   planes     f32           [bits, head_dim]
 *   hashes     u64           [blocks, kv_heads, words] or [.., block_size, words]
 *   tables     i32           [seqs, max_blocks]
 *   lens       i32           [seqs]
 *   selection  i32           [seqs, kv_heads or 1, max_selected]   -1 padded
 *   counts     i32           [seqs, kv_heads or 1]                 optional
 * What hash_rows, score_hamming and select give, exactly; ties to the lower index.
 *
 * A team of TEAM blocks a row (a cluster where there are several), a stretch of it a warp.
 * Three passes over the stretch, of which the first reads hashes and keeps the distances in
 * shared memory where they fit:
 *   count   a histogram of the distances, whole numbers up to `bits`
 *   place   the blocks of a team add up their histograms, every warp finds the farthest
 *           distance that is taken, and counts its own that are nearer or as far
 *   write   sums over the warps before make places: index order needs no sort
 * No atomic decides an order: histograms commute. The query is hashed while the first hashes
 * are on their way.
 *
 * Bytes   hashes of every block, tables, 4 a selected block; limit: latency of the phases */
#include "hamming.cuh"
#include "hash.cuh"
#include "block_scan.cuh"
#include "team.cuh"

namespace kvl {
namespace {

constexpr uint32_t NO_RIVAL = 0xFFFF;   /* in place of a distance: not up for choice */

template <class FORM> constexpr int threads_of = FORM::IS_TOKEN ? 512 : 1024;
/* Blocks that a lane has under way. */
template <class FORM> constexpr int batch_of =
    FORM::IS_TOKEN ? 1 : FORM::WORDS == 1 ? 8 : FORM::WORDS == 2 ? 4 : 2;

struct row_shape {
  int stretch;                          /* blocks that a warp takes, a multiple of a batch */
  int bins, q_words;                    /* words of the row's query hashes */
  bool is_kept;
  size_t bytes_shared;
};

template <int THREADS> struct shared_memory {
  float x[256];
  uint32_t nearer[THREADS / WARP], equal[THREADS / WARP];
};

/* Hashes of the group means of `heads` KV heads from `head` on, into shared words, which are
 * 0. Has barriers. */
template <int THREADS>
__device__ __forceinline__ void hash_queries(const kvl_select_hamming_args &a, int64_t seq,
                                             int head, int heads, float *x, uint32_t *words) {
  const int dim = a.head_dim, group = (int)(a.heads / a.hashes.kv_heads);
  const int part = threadIdx.x % HASH_PARTS, first = threadIdx.x / HASH_PARTS;
  for (int g = 0; g < heads; g++, words += 2 * a.hashes.words) {
    float plane[HASH_CHUNKS], y[HASH_CHUNKS];
    if (first < a.bits) hash_load(a.planes + first * dim, dim, plane);
    const int64_t row = seq * a.heads + (int64_t)(head + g) * group;
    if (threadIdx.x < dim) {
      const int64_t at = row * dim + threadIdx.x;
      float sum = 0.f;
#pragma unroll 4
      for (int h = 0; h < group; h++) {
        const int64_t i = at + (int64_t)h * dim;
        const float e = a.dtype == KVL_DTYPE_F32    ? ((const float *)a.q)[i]
                        : a.dtype == KVL_DTYPE_BF16 ? to_float(((const __nv_bfloat16 *)a.q)[i])
                                                    : to_float(((const __half *)a.q)[i]);
        sum = h > 0 ? __fadd_rn(sum, e) : e;
      }
      x[threadIdx.x] = sum;
    }
    __syncthreads();
    hash_load(x, dim, y);
#pragma unroll 1
    for (int bit = first; bit < a.bits; bit += THREADS / HASH_PARTS) {   /* whole warps */
      if (bit != first) hash_load(a.planes + bit * dim, dim, plane);
      if (hash_sum(y, plane, dim) > 0.f && part == 0)
        atomicOr(&words[bit / 32], 1u << bit % 32);
    }
    __syncthreads();
  }
}

/* Every block of the team sends its histogram to all: counts [TEAM][bins]. */
template <int TEAM, int THREADS>
__device__ __forceinline__ void join_counts(const uint32_t *mine, uint32_t *counts, int bins) {
  KVL_SM90("barrier.cluster.arrive.release;\n"
           "barrier.cluster.wait.acquire;" ::: "memory");
  for (int i = threadIdx.x; i < TEAM * bins; i += THREADS) {
    uint32_t count = 0, at = shared_address(mine + i % bins);
    KVL_SM90("mapa.shared::cluster.u32 %1, %1, %2;\n"
             "ld.shared::cluster.u32 %0, [%1];"
             : "=r"(count), "+r"(at) : "r"(i / bins) : "memory");
    counts[i] = count;
  }
  __syncthreads();
  cluster_arrive();                     /* mine is not read any more */
}

/* The bin of the wanted-th of the team, and how many of that bin belong to the wanted. By
 * every warp for itself. */
template <int TEAM>
__device__ __forceinline__ void find_edge(const uint32_t *counts, int bins, uint32_t wanted,
                                          uint32_t *edge, uint32_t *ties) {
  const int lane = threadIdx.x % WARP, each = (bins + WARP - 1) / WARP;
  const int from = min(lane * each, bins), to = min(from + each, bins);
  auto count_of = [&](int bin) {
    uint32_t sum = 0;
#pragma unroll
    for (int t = 0; t < TEAM; t++) sum += counts[t * bins + bin];
    return sum;
  };
  uint32_t sum = 0;
  for (int bin = from; bin < to; bin++) sum += count_of(bin);
  const uint32_t upto = (uint32_t)warp_scan((int)sum);
  uint32_t before = upto - sum, bin = (uint32_t)from;
  const bool is_mine = before < wanted && wanted <= upto;
  if (is_mine)
    for (uint32_t here; before + (here = count_of((int)bin)) < wanted; bin++) before += here;
  const int owner = __ffs(__ballot_sync(ALL_LANES, is_mine)) - 1;
  *edge = __shfl_sync(ALL_LANES, bin, owner);
  *ties = wanted - __shfl_sync(ALL_LANES, before, owner);
}

template <class FORM, int TEAM>
__global__ void __launch_bounds__(threads_of<FORM>, 1)
select_hamming_kernel(const __grid_constant__ kvl_select_hamming_args a,
                      const row_shape shape) {
  constexpr int THREADS = threads_of<FORM>, N = batch_of<FORM>, WARPS = THREADS / WARP;
  extern __shared__ __align__(16) char memory[];
  shared_memory<THREADS> &s = *(shared_memory<THREADS> *)memory;
  uint64_t *q = (uint64_t *)(memory + sizeof(s));
  uint32_t *mine = (uint32_t *)(q + shape.q_words), *counts = mine;
  uint16_t *kept = (uint16_t *)(mine + shape.bins * (TEAM > 1 ? TEAM + 1 : 1));
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int rank = TEAM > 1 ? blockIdx.x % TEAM : 0;
  const uint32_t row = blockIdx.x / TEAM, list_heads = (uint32_t)a.selection_heads;
  const int64_t seq = row / list_heads;
  const int head = (int)(row % list_heads), heads = list_heads == 1 ? a.hashes.kv_heads : 1;
  const int32_t *table = a.tables + seq * a.max_blocks;
  kept += warp * shape.stretch + lane;

  wait_for_previous();
  int length;                           /* asked for first: what follows waits for it */
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(length) : "l"(a.lens + seq));
  const int begin = (rank * WARPS + warp) * shape.stretch;
  const int end = (int)min((int64_t)begin + shape.stretch, a.max_blocks);
  hash_batch<FORM, N> batch;
  int block[N], tokens[N];
  auto look_up = [&](int at) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      const int b = at + j * WARP + lane;
      block[j] = b < end ? table[b] : -1;
    }
  };
  look_up(begin);
  if (!FORM::IS_TOKEN) batch.load(a.hashes, block, tokens, head);
  for (int i = threadIdx.x; i < shape.bins; i += THREADS) mine[i] = 0;
  for (int i = threadIdx.x; i < shape.q_words; i += THREADS) q[i] = 0;
  hash_queries<THREADS>(a, seq, head, heads, s.x, (uint32_t *)q);

  const uint32_t size = (uint32_t)a.block_size, all = max(length, 0);
  const int n = (int)min((int64_t)(all / size + (all % size != 0)), a.max_blocks);
  const int k = (int)min((int64_t)max(kvl__budget_blocks(a.budget, n), 0), a.max_selected);
  const int sink = min(min(a.budget.sink, n), k);
  const int recent = min(min(a.budget.recent, n - sink), k - sink);
  /* Blocks sink ... high-1 compete for `wanted` places. */
  const int high = n - recent, wanted = k - sink - recent;
  const bool is_choice = wanted > 0 && wanted < high - sink;
  let_next_start();

  int32_t *selection = a.selection + row * a.max_selected;
  if (rank == 0) {
    if (threadIdx.x == 0 && a.counts) a.counts[row] = k;
    for (int i = threadIdx.x; i < (is_choice ? sink : sink + wanted); i += THREADS)
      selection[i] = i;
    for (int i = threadIdx.x; i < recent; i += THREADS) selection[k - recent + i] = high + i;
    for (int i = k + threadIdx.x; i < (int)a.max_selected; i += THREADS) selection[i] = -1;
  }
  if (!is_choice) return;               /* the whole team */
  selection += sink;

  uint32_t edge = 0, ties = 0, nearer = 0, equal = 0;
#pragma unroll 1
  for (int pass = 0; pass < 3; pass++) {
    const bool is_read = pass == 0 || !shape.is_kept;
#pragma unroll 1
    for (int at = begin; at < end; at += N * WARP) {
      uint32_t d[N];
      if (is_read) {
        const bool is_there = !FORM::IS_TOKEN && pass == 0 && at == begin;
        if (!is_there) look_up(at);
#pragma unroll
        for (int j = 0; j < N; j++)
          tokens[j] = min((int)all - (at + j * WARP + lane) * (int)size, (int)size);
#pragma unroll 1
        for (int h = 0; h < heads; h++) {
          uint32_t of_head[N];
          if (!is_there || h > 0) batch.load(a.hashes, block, tokens, head + h);
          batch.distances(q + h * a.hashes.words, of_head);
#pragma unroll
          for (int j = 0; j < N; j++) d[j] = h > 0 ? min(d[j], of_head[j]) : of_head[j];
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
          const int b = at + j * WARP + lane;
          d[j] = b >= sink && b < high ? min(d[j], shape.bins - 1u) : NO_RIVAL;
          if (pass == 0 && shape.is_kept) kept[at - begin + j * WARP] = (uint16_t)d[j];
        }
      } else {
#pragma unroll
        for (int j = 0; j < N; j++) d[j] = kept[at - begin + j * WARP];
      }
      if (pass == 0) {
#pragma unroll
        for (int j = 0; j < N; j++)
          if (d[j] != NO_RIVAL) atomicAdd(&mine[d[j]], 1u);
      } else if (pass == 1) {
#pragma unroll
        for (int j = 0; j < N; j++) nearer += d[j] < edge, equal += d[j] == edge;
      } else {
#pragma unroll
        for (int j = 0; j < N; j++) {   /* places from nearer + min(equal, ties) on */
          const unsigned before = (1u << lane) - 1;
          const unsigned is_equal = __ballot_sync(ALL_LANES, d[j] == edge);
          const bool is_tie = d[j] == edge && equal + __popc(is_equal & before) < ties;
          const unsigned is_taken = __ballot_sync(ALL_LANES, d[j] < edge || is_tie);
          if (is_taken >> lane & 1)
            selection[nearer + __popc(is_taken & before)] = at + j * WARP + lane;
          nearer += __popc(is_taken);
          equal += __popc(is_equal);
        }
      }
    }
    if (pass == 0) {
      __syncthreads();
      if (TEAM > 1) {
        counts = mine + shape.bins;
        join_counts<TEAM, THREADS>(mine, counts, shape.bins);
      }
      find_edge<TEAM>(counts, shape.bins, wanted, &edge, &ties);
    } else if (pass == 1) {
      nearer = __reduce_add_sync(ALL_LANES, nearer);
      equal = __reduce_add_sync(ALL_LANES, equal);
      if (lane == 0) s.nearer[warp] = nearer, s.equal[warp] = equal;
      __syncthreads();
      nearer = lane < warp ? s.nearer[lane] : 0;
      equal = lane < warp ? s.equal[lane] : 0;
      for (int i = lane; i < rank * shape.bins; i += WARP) {   /* of the blocks before */
        const uint32_t bin = i % shape.bins;
        nearer += bin < edge ? counts[i] : 0;
        equal += bin == edge ? counts[i] : 0;
      }
      nearer = __reduce_add_sync(ALL_LANES, nearer);
      equal = __reduce_add_sync(ALL_LANES, equal);
      nearer += min(equal, ties);
    }
  }
  if (TEAM > 1) cluster_wait();         /* the others have read what they need */
}

/* Blocks of a team for rows of so many bytes. */
int team_of(int64_t rows, int64_t bytes_row, const kvl_cuda_queue *q) {
  const int64_t blocks = is_hopper(q) ? q->sm_count / rows : 1;   /* for a row */
  if (bytes_row <= 128 << 10 || blocks < 2) return 1;
  return blocks < 8 ? 2 : 8;
}

template <class FORM, int TEAM>
int launch(const kvl_select_hamming_args &a, int64_t rows, const kvl_cuda_queue *q) {
  constexpr auto kernel = select_hamming_kernel<FORM, TEAM>;
  constexpr int THREADS = threads_of<FORM>, WARPS = THREADS / WARP;
  constexpr int unit = batch_of<FORM> * WARP;
  const int heads = a.selection_heads == 1 ? a.hashes.kv_heads : 1;
  row_shape shape;
  shape.stretch = (int)((a.max_blocks + TEAM * WARPS * unit - 1) / (TEAM * WARPS * unit)) * unit;
  shape.bins = a.bits + 2;
  shape.q_words = heads * a.hashes.words;
  shape.bytes_shared = sizeof(shared_memory<THREADS>) + 8 * (size_t)shape.q_words +
                       4 * (size_t)shape.bins * (TEAM > 1 ? TEAM + 1 : 1);
  const size_t bytes_kept = (size_t)WARPS * shape.stretch * 2;
  shape.is_kept = shape.bytes_shared + bytes_kept <= (size_t)q->shared_optin;
  if (shape.is_kept) shape.bytes_shared += bytes_kept;
  int status = allow_shared<kernel>(q, q->shared_optin);
  if (status < 0) return status;
  return launch_teams<TEAM>(kernel, rows, THREADS, shape.bytes_shared, q, a, shape);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(select_hamming) {
  using namespace kvl;
  const kvl_select_hamming_args &a = *(const kvl_select_hamming_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const int64_t rows = a.seqs * a.selection_heads;
  if (rows == 0) return KVL_OK;
  const int64_t heads = a.selection_heads == 1 ? a.hashes.kv_heads : 1;
  const int team = team_of(
      rows, a.max_blocks * heads * a.hashes.tokens * a.hashes.words * (int64_t)8, q);
  return with_form(a.hashes, [&](auto form) {
    using FORM = decltype(form);
    if (team == 8) return launch<FORM, 8>(a, rows, q);
    if (team == 2) return launch<FORM, 2>(a, rows, q);
    return launch<FORM, 1>(a, rows, q);
  });
}
