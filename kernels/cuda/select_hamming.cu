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
 * Bytes   hashes of every block, tables, 4 a selected block; limit: latency of the phases,
 *         then sectors: 8 bytes of 32 are used of a 64-bit hash a block
 * Best    64 bits, 30%: [1 row, 8192 blocks] 12.7 us, [64, 8192] 14.9, [64, 65536] 61.9 (an
 *         empty launch 3.1; H100 80GB HBM3, 2026-11-21, cold L2, kernels/dev/hash.cu)
 * Source  UCM's GSA on-device; its guide's fused kernel is a sketch */
#include "hamming.cuh"
#include "hash.cuh"
#include "block_scan.cuh"
#include "team.cuh"

namespace kvl {
namespace {

constexpr uint32_t NO_RIVAL = 0xFFFF;   /* in place of a distance: not up for choice */
constexpr int THREADS = 512, WARPS = THREADS / WARP;
constexpr int COPIES = 4;               /* of the histogram: warps meet less often */
constexpr int QUERIES = 8;              /* hashed together */

/* Blocks that a lane has under way. */
template <class FORM> constexpr int batch_of =
    FORM::IS_TOKEN ? 1 : FORM::WORDS == 1 ? 16 : FORM::WORDS == 2 ? 8 : 4;

struct row_shape {
  int stretch;                          /* blocks that a warp takes, a multiple of a batch */
  int bins, q_words;                    /* words of the row's query hashes */
  bool is_kept;
  size_t bytes_shared;
};

struct shared_memory {
  float x[QUERIES][256];
  uint32_t nearer[WARPS], equal[WARPS];
};

/* Dim `at` of the sum of a group, in the order of its heads. Four at a time are asked for
 * before one is waited for. */
template <class T>
__device__ __forceinline__ float group_sum(const T *q, int group, int dim) {
  float sum = 0.f;
#pragma unroll 1
  for (int h = 0; h < group; h += 4) {
    T x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = q[(int64_t)min(h + i, group - 1) * dim];
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (h + i < group) sum = h + i > 0 ? __fadd_rn(sum, to_float(x[i])) : to_float(x[i]);
  }
  return sum;
}

/* The hashes of a row's queries. Its steps are apart so that memory is asked for everything
 * before anything is waited for. */
struct query_hash {
  static constexpr int BITS = THREADS / HASH_PARTS, AHEAD = 2;   /* AHEAD * BITS bits */
  const kvl_select_hamming_args &a;
  const int64_t head;                   /* the first of all KV heads of all sequences */
  const int heads, group, dim, part, first;
  float plane[AHEAD][HASH_CHUNKS];

  __device__ __forceinline__ query_hash(const kvl_select_hamming_args &args, int64_t head_,
                                        int heads_)
      : a(args), head(head_), heads(heads_),
        group((int)((uint32_t)args.heads / (uint32_t)args.hashes.kv_heads)),
        dim(args.head_dim), part(threadIdx.x % HASH_PARTS),
        first(threadIdx.x / HASH_PARTS) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load_plane(i * BITS + first, plane[i]);
  }
  __device__ __forceinline__ void load_plane(int bit, float (&to)[HASH_CHUNKS]) const {
    hash_load(a.planes + bit * dim, bit < a.bits ? dim : 0, to);
  }
  /* Sums of the groups of QUERIES heads from `from` on. */
  __device__ __forceinline__ void sum_groups(int from, float (*x)[256]) const {
#pragma unroll 1
    for (int g = threadIdx.x / 256; g < min(heads - from, QUERIES); g += THREADS / 256) {
      const int d = threadIdx.x % 256;
      const int64_t at = (head + from + g) * group * dim + d;
      if (d >= dim) continue;
      if (a.dtype == KVL_DTYPE_BF16)
        x[g][d] = group_sum((const __nv_bfloat16 *)a.q + at, group, dim);
      else if (a.dtype == KVL_DTYPE_F16)
        x[g][d] = group_sum((const __half *)a.q + at, group, dim);
      else x[g][d] = group_sum((const float *)a.q + at, group, dim);
    }
  }
  __device__ __forceinline__ void set(const float (&x)[HASH_CHUNKS],
                                      const float (&of)[HASH_CHUNKS], int bit,
                                      uint32_t *words) const {
    const bool is_positive = hash_sum(x, of, dim) > 0.f;
    if (is_positive && part == 0 && bit < a.bits) atomicOr(&words[bit / 32], 1u << bit % 32);
  }
  /* Into shared words, which are 0; x has the first QUERIES sums. Begins with a barrier, ends
   * with one. */
  __device__ __forceinline__ void finish(float (*x)[256], uint32_t *words) const {
#pragma unroll 1
    for (int from = 0; from < heads; from += QUERIES) {
      if (from > 0) sum_groups(from, x);
      __syncthreads();
#pragma unroll 1
      for (int g = 0; g < min(heads - from, QUERIES); g++, words += 2 * a.hashes.words) {
        float y[HASH_CHUNKS];
        hash_load(x[g], dim, y);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) set(y, plane[i], i * BITS + first, words);
#pragma unroll 1
        for (int bit = AHEAD * BITS + first; bit - first < a.bits; bit += BITS) {
          float of[HASH_CHUNKS];
          load_plane(bit, of);
          set(y, of, bit, words);
        }
      }
      __syncthreads();
    }
  }
};

/* The histograms of all blocks of the team: counts [TEAM][bins]. Has barriers. */
template <int TEAM>
__device__ __forceinline__ void join_counts(uint32_t *mine, uint32_t *counts, int bins) {
  for (int i = threadIdx.x; i < bins; i += THREADS)
    for (int c = 1; c < COPIES; c++) mine[i] += mine[c * bins + i];
  __syncthreads();
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

/* The bin of the wanted-th of PARTS histograms, and how many of that bin belong to the wanted.
 * By every warp for itself. */
template <int PARTS>
__device__ __forceinline__ void find_edge(const uint32_t *counts, int bins, uint32_t wanted,
                                          uint32_t *edge, uint32_t *ties) {
  const int lane = threadIdx.x % WARP, each = (bins + WARP - 1) / WARP;
  const int from = min(lane * each, bins), to = min(from + each, bins);
  auto count_of = [&](int bin) {
    uint32_t sum = 0;
#pragma unroll
    for (int t = 0; t < PARTS; t++) sum += counts[t * bins + bin];
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

/* Writes the taken blocks of a batch, whose distances are d, in index order; moves the places
 * behind them. */
template <int N>
__device__ __forceinline__ void write_chosen(const uint32_t (&d)[N], uint32_t edge,
                                             uint32_t ties, int at, int32_t *places,
                                             uint32_t *nearer, uint32_t *equal) {
  const int lane = threadIdx.x % WARP;
  const unsigned before = (1u << lane) - 1;
  unsigned taken[N];
  uint32_t ties_before = *equal;
#pragma unroll
  for (int j = 0; j < N; j++) {
    const unsigned is_equal = __ballot_sync(ALL_LANES, d[j] == edge);
    const bool is_tie = d[j] == edge && ties_before + __popc(is_equal & before) < ties;
    taken[j] = __ballot_sync(ALL_LANES, d[j] < edge || is_tie);
    ties_before += __popc(is_equal);
  }
  int32_t *place = places + *nearer;
#pragma unroll
  for (int j = 0; j < N; j++) {
    if (taken[j] >> lane & 1) place[__popc(taken[j] & before)] = at + j * WARP + lane;
    place += __popc(taken[j]);
  }
  *nearer = (uint32_t)(place - places);
  *equal = ties_before;
}

template <class FORM, int TEAM>
__global__ void __launch_bounds__(THREADS, 1)
select_hamming_kernel(const __grid_constant__ kvl_select_hamming_args a,
                      const row_shape shape) {
  constexpr int N = batch_of<FORM>;
  extern __shared__ __align__(16) char memory[];
  shared_memory &s = *(shared_memory *)memory;
  uint64_t *q = (uint64_t *)(memory + sizeof(s));
  uint32_t *mine = (uint32_t *)(q + shape.q_words), *counts = mine + COPIES * shape.bins;
  uint16_t *kept = (uint16_t *)(counts + (TEAM > 1 ? TEAM * shape.bins : 0));
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int rank = TEAM > 1 ? blockIdx.x % TEAM : 0;
  const uint32_t row = blockIdx.x / TEAM, list_heads = (uint32_t)a.selection_heads;
  const uint32_t seq = row / list_heads;
  const int head = (int)(row % list_heads), heads = list_heads == 1 ? a.hashes.kv_heads : 1;
  const int32_t *table = a.tables + seq * a.max_blocks;
  kept += warp * shape.stretch + lane;

  wait_for_previous();
  int length;                           /* asked for first: what follows waits for it */
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(length) : "l"(a.lens + seq));
  const int begin = (rank * WARPS + warp) * shape.stretch;
  const int end = (int)min((int64_t)begin + shape.stretch, a.max_blocks);
  hash_batch<FORM, N> batch;
  int block[N], tokens[N] = {};
  auto look_up = [&](int at) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      const int b = at + j * WARP + lane;
      block[j] = b < end ? table[b] : -1;
    }
  };
  look_up(begin);
  const query_hash queries(a, seq * a.hashes.kv_heads + head, heads);
  queries.sum_groups(0, s.x);
  if (!FORM::IS_TOKEN) batch.load(a.hashes, block, tokens, head);
  for (int i = threadIdx.x; i < COPIES * shape.bins; i += THREADS) mine[i] = 0;
  for (int i = threadIdx.x; i < shape.q_words; i += THREADS) q[i] = 0;

  const uint32_t size = (uint32_t)a.block_size, all = max(length, 0);
  const int n = (int)min((int64_t)(all / size + (all % size != 0)), a.max_blocks);
  const int k = (int)min((int64_t)max(kvl__budget_blocks(a.budget, n), 0), a.max_selected);
  const int sink = min(min(a.budget.sink, n), k);
  const int recent = min(min(a.budget.recent, n - sink), k - sink);
  /* Blocks sink ... high-1 compete for `wanted` places. */
  const int high = n - recent, wanted = k - sink - recent;
  const bool is_choice = wanted > 0 && wanted < high - sink;
  queries.finish(s.x, (uint32_t *)q);
  let_next_start();

  int32_t *selection = a.selection + row * a.max_selected;
  uint32_t edge = 0, ties = 0, nearer = 0, equal = 0, d[N];
  const bool is_one = shape.stretch == N * WARP;   /* batch, whose distances stay in d */
#pragma unroll 1
  for (int pass = is_choice ? 0 : 3; pass < 3; pass++) {
#pragma unroll 1
    for (int at = begin; at < end; at += N * WARP) {
      if (pass == 0 || !(shape.is_kept || is_one)) {
        const bool is_there = !FORM::IS_TOKEN && pass == 0 && at == begin;
        if (!is_there) look_up(at);
#pragma unroll
        for (int j = 0; FORM::IS_TOKEN && j < N; j++)
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
          if (shape.is_kept && !is_one) kept[at - begin + j * WARP] = (uint16_t)d[j];
        }
      } else if (!is_one) {
#pragma unroll
        for (int j = 0; j < N; j++) d[j] = kept[at - begin + j * WARP];
      }
      if (pass == 0) {
        uint32_t *copy = mine + warp % COPIES * shape.bins;
#pragma unroll
        for (int j = 0; j < N; j++)
          if (d[j] != NO_RIVAL) atomicAdd(&copy[d[j]], 1u);
      } else if (pass == 1) {
#pragma unroll
        for (int j = 0; j < N; j++) nearer += d[j] < edge, equal += d[j] == edge;
      } else {                          /* places from nearer + min(equal, ties) on */
        write_chosen<N>(d, edge, ties, at, selection + sink, &nearer, &equal);
      }
    }
    if (pass == 0) {
      __syncthreads();
      if (TEAM > 1) join_counts<TEAM>(mine, counts, shape.bins);
      find_edge<(TEAM > 1 ? TEAM : COPIES)>(TEAM > 1 ? counts : mine, shape.bins, wanted,
                                            &edge, &ties);
    } else if (pass == 1) {
      nearer = __reduce_add_sync(ALL_LANES, nearer);
      equal = __reduce_add_sync(ALL_LANES, equal);
      if (lane == 0) s.nearer[warp] = nearer, s.equal[warp] = equal;
      __syncthreads();
      nearer = lane < warp ? s.nearer[lane] : 0;
      equal = lane < warp ? s.equal[lane] : 0;
#pragma unroll 1
      for (int r = 0; r < rank; r++)    /* of the blocks before */
#pragma unroll 1
        for (int bin = lane; bin <= (int)edge; bin += WARP)
          (bin < (int)edge ? nearer : equal) += counts[r * shape.bins + bin];
      nearer = __reduce_add_sync(ALL_LANES, nearer);
      equal = __reduce_add_sync(ALL_LANES, equal);
      nearer += min(equal, ties);
    }
  }
  if (rank == 0) {                      /* what was not up for choice */
    const int front = is_choice ? sink : sink + wanted, gap = k - recent - front;
#pragma unroll 1
    for (int i = threadIdx.x; i < (int)a.max_selected - gap; i += THREADS) {
      const int place = i < front ? i : i + gap;
      selection[place] = place < front ? place : place < k ? place - k + n : -1;
    }
    if (threadIdx.x == 0 && a.counts) a.counts[row] = k;
  }
  if (TEAM > 1 && is_choice) cluster_wait();   /* the others have read what they need */
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
  constexpr int unit = batch_of<FORM> * WARP;
  const int heads = a.selection_heads == 1 ? a.hashes.kv_heads : 1;
  row_shape shape;
  constexpr int together = TEAM * WARPS * unit;
  shape.stretch = (int)((a.max_blocks + together - 1) / together) * unit;
  shape.bins = a.bits + 2;
  shape.q_words = heads * a.hashes.words;
  shape.bytes_shared = sizeof(shared_memory) + 8 * (size_t)shape.q_words +
                       4 * (size_t)shape.bins * (COPIES + (TEAM > 1 ? TEAM : 0));
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
