/* Selects the blocks to attend to: the first `sink`, the last `recent` and those whose hashes
 * are nearest to the hash of the mean query of their KV head's group; ascending.
 *
 *   q          f32 f16 bf16  [seqs, heads, head_dim]
 *   planes     f32           [bits, head_dim]
 *   hashes     u64           [blocks, kv_heads, words] or [.., block_size, words]
 *   tables     i32           [seqs, max_blocks]
 *   lens       i32           [seqs]
 *   selection  i32           [seqs, kv_heads or 1, max_selected]   -1 padded
 *   counts     i32           [seqs, kv_heads or 1]                 optional
 * The result is exactly that of hash_rows, score_hamming and select; ties to the lower index.
 * Each list may have a limit of its own.
 *
 * One team of up to 8 thread blocks (a cluster) makes the lists of one sequence for those KV
 * heads whose hashes share a 32-byte sector, so that every byte read is used. Each block
 * takes a stretch of the sequence.
 *   count   distances, whole numbers up to `bits`, go to shared memory, with a histogram of
 *           them for each list
 *   join    every block sends its histograms to the whole team, then finds the farthest
 *           distance that is taken, and how many of the blocks before its stretch are taken
 *   write   a warp has a part of one list's stretch, and a lane 8 neighbours of it; prefix
 *           sums over the blocks that are taken give their indices, so there is no sort
 * A stretch that does not fit shared memory is taken in windows, twice. No atomic decides an
 * order: histograms commute. The query is hashed while the first hashes are still loading.
 *
 * Bytes   hashes of every block, tables, 4 per selected block; limit: latency of the phases
 * Best    64 bits, 30%: [1 row, 8192 blocks] 9.2 us, [8 x 8, 8192] 13.1, [8 x 8, 65536] 34.8
 *         (an empty launch 3.1; H100 80GB HBM3, 2026-11-21, cold L2)
 * Source  UCM's GSA on-device; the fused kernel of its guide is only a sketch */
#include <algorithm>
#include <type_traits>

#include "args/select.h"
#include "cuda/select/hamming.cuh"
#include "cuda/select/nearest.cuh"
#include "cuda/select/query_hash.cuh"
#include "cuda/select/select_parts.cuh"

namespace kvl {
namespace {

constexpr int SELECT_THREADS = NEAREST_THREADS, WARPS = SELECT_THREADS / WARP,
              COPIES = NEAREST_COPIES;
constexpr int RUN = NEAREST_RUN;

/* BATCH: blocks that a lane has in flight; STEP: blocks that are side by side in a tile. */
template <class FORM> struct tile_of {
  static constexpr int BATCH = FORM::IS_TOKEN ? 1 : 4;
  static constexpr int STEP = SELECT_THREADS / FORM::READERS, BLOCKS = BATCH * STEP;
};
/* The type of a distance. Its largest value marks a block that cannot be chosen. */
template <class FORM>
using distance_of = std::conditional_t<FORM::WORDS == 0, uint16_t, uint8_t>;

/* The sizes of a call. */
struct hamming_shape {
  int team, lists;     /* blocks of a team; lists that it makes */
  int groups;          /* of lists, per sequence */
  int stretch, window; /* blocks that one takes; that fit its shared memory */
  int bins, q_words;   /* per list, a multiple of 4; of the queries' hashes */
  divisor block_size;
  size_t bytes_shared;
};

struct shared_memory {
  uint64_t barrier;
  uint32_t found[WARPS]; /* both_counts of each warp's part */
  union alignas(16) {
    query_hash<SELECT_THREADS>::rows x;
    int32_t places[WARPS][WARP * RUN]; /* what a warp writes together */
  };
};

template <class FORM>
__global__ void __launch_bounds__(SELECT_THREADS, 1)
    select_hamming_kernel(const __grid_constant__ kvl_select_hamming_args a,
                          const __grid_constant__ hamming_shape shape) {
  using tile = tile_of<FORM>;
  using distance = distance_of<FORM>;
  constexpr int N = tile::BATCH, EACH = FORM::EACH;
  constexpr uint32_t NO_RIVAL = (distance)~0u;
  extern __shared__ __align__(16) char memory[];
  const int team = shape.team, lists = shape.lists, bins = shape.bins;
  const int size = lists * bins, pitch = shape.window + 16;
  shared_memory &s = *(shared_memory *)memory;
  uint64_t *q = (uint64_t *)(memory + sizeof(s));
  uint32_t *mine = (uint32_t *)(q + shape.q_words), *counts = mine + COPIES * size;
  distance *kept = (distance *)(counts + (team > 1 ? team * size : 0)); /* [lists][pitch] */
  const int warp = threadIdx.x / WARP;
  const int reader = threadIdx.x % FORM::READERS, nth = threadIdx.x / FORM::READERS;
  const uint32_t group = blockIdx.x / (uint32_t)team;
  const int rank = (int)(blockIdx.x - group * team);
  const uint32_t list_heads = (uint32_t)a.selection_heads, groups = shape.groups;
  const uint32_t seq = group / groups;
  const bool is_shared = list_heads == 1; /* one list for all heads */
  const int head = (int)(group - seq * groups) * lists;
  const int heads = is_shared ? a.hashes.kv_heads : FORM::HEADS;
  const int32_t *table = a.tables + seq * a.max_blocks;

  wait_for_previous();
  const int length = load_now(a.lens + seq); /* first: everything else waits for it */
  const int begin = rank * shape.stretch;
  const int end = (int)min((int64_t)begin + shape.stretch, a.max_blocks);
  auto look_up = [&](int at, int(&block)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      const int b = at + j * tile::STEP + nth;
      block[j] = b < end ? table[b] : -1;
    }
  };
  hash_batch<FORM, N> batch;
  int block[N], tokens[N] = {};
  look_up(begin, block);
  query_hash<SELECT_THREADS> queries(a, seq * a.hashes.kv_heads + head, heads);
  queries.sum_groups(0, s.x);
  if (!FORM::IS_TOKEN) {
    batch.load(a.hashes, block, tokens, head);
    if (begin + tile::BLOCKS < end) look_up(begin + tile::BLOCKS, block);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < COPIES * size; i += SELECT_THREADS) mine[i] = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < shape.q_words; i += SELECT_THREADS) q[i] = 0;
  if (team > 1) {
    if (threadIdx.x == 0) {
      barrier_init(shared_address(&s.barrier), 1);
      barrier_init_done();
    }
    cluster_arrive();
  }

  const int per = WARPS / lists, list = warp * lists / WARPS; /* warps per list; its list */
  const int blocks = blocks_of(length, shape.block_size, a.max_blocks);
  const row_choice row(a, blocks, seq, head + list); /* limits change only k and wanted */
  bool is_choice = row.is_choice;                    /* of any list */
  if (a.limits.of)
    for (int l = 0; l < lists; l++)
      is_choice |= row_choice(a, blocks, seq, head + l).is_choice;
  const int last = min(end, row.high);
  int32_t *selection = a.selection + ((int64_t)seq * list_heads + head) * a.max_selected;
  if (rank == 0) {
    for (int l = 0; l < lists; l++) {
      const row_choice of_list = a.limits.of ? row_choice(a, blocks, seq, head + l) : row;
      of_list.write_certain(selection + l * a.max_selected, a.max_selected,
                            is_choice ? row.sink : row.sink + of_list.wanted);
      if (threadIdx.x == 0 && a.counts) a.counts[seq * list_heads + head + l] = of_list.k;
    }
  }
  queries.finish(s.x, (uint32_t *)q);
  if (team > 1) cluster_wait();
  let_next_start();

  /* Takes the least distances over all heads; d has those of the first heads. */
  auto share = [&](int at, uint32_t(&d)[N * EACH]) {
    int here[N];
    look_up(at, here);
#pragma unroll 1
    for (int h = FORM::HEADS; h < heads; h += FORM::HEADS) {
      uint32_t of_head[N * EACH];
      batch.load(a.hashes, here, tokens, h);
      batch.distances(q + h * a.hashes.words, of_head);
#pragma unroll
      for (int i = 0; i < N * EACH; i++) d[i] = min(d[i], of_head[i]);
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
      uint32_t &least = d[j * EACH];
      least = min(least, d[j * EACH + EACH - 1]);
      if (FORM::READERS == 2) least = min(least, __shfl_xor_sync(ALL_LANES, least, 1));
    }
  };
  /* Puts the distances of the tile that begins at block `at` into the window from `from`. */
  auto keep = [&](const uint32_t(&d)[N * EACH], int at, int from, bool is_counted) {
    uint32_t *copy = mine + warp % COPIES * size;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int b = at + j * tile::STEP + nth, list = reader * EACH + i;
        if (list >= lists || b - from >= shape.window) continue;
        const bool is_rival = b >= row.sink && b < last;
        const uint32_t x = is_rival ? min(d[j * EACH + i], a.bits + 1u) : NO_RIVAL;
        kept[list * pitch + b - from] = (distance)x;
        if (is_rival && is_counted) atomicAdd(&copy[list * bins + x], 1u);
      }
  };

  const bool is_split = shape.window < shape.stretch;
  list_edge edge = {};
  list_before before = {};
#pragma unroll 1
  for (int pass = is_choice ? 0 : 2; pass < 2; pass++) {
#pragma unroll 1
    for (int from = begin; from < last; from += shape.window) {
      const int stop = min(from + shape.window, last);
      if (pass == 1 && is_split) __syncthreads(); /* the window may be overwritten */
      if (!FORM::IS_TOKEN && is_split && (pass == 1 || from > begin)) {
        look_up(from, block);
        batch.load(a.hashes, block, tokens, head);
        look_up(from + tile::BLOCKS, block);
      }
#pragma unroll 1
      for (int at = from; at < stop && (pass == 0 || is_split); at += tile::BLOCKS) {
        if (FORM::IS_TOKEN) {
          look_up(at, block);
#pragma unroll
          for (int j = 0; j < N; j++)
            tokens[j] = min(length - (at + j * tile::STEP + nth) * a.block_size,
                            a.block_size);
          batch.load(a.hashes, block, tokens, head);
        }
        uint32_t d[N * EACH];
        batch.distances(q, d);
        if (is_shared) share(at, d);
        if (!FORM::IS_TOKEN && at + tile::BLOCKS < stop) {
          batch.load(a.hashes, block, tokens, head);
          look_up(at + 2 * tile::BLOCKS, block);
        }
        keep(d, at, from, pass == 0);
      }
      if (pass == 0) continue;
      if (is_split) __syncthreads();
      write_list(kept + list * pitch, stop - from, edge, warp % per, per, from,
                 selection + list * a.max_selected + row.sink, before, s.found,
                 s.places[warp]);
    }
    if (pass == 1) break;
    share_counts(mine, counts, size, team, rank, &s.barrier);
    find_edge((team > 1 ? counts : mine) + list * bins, team > 1 ? team : COPIES, size, bins,
              rank, row.wanted, edge, before);
  }
}

template <class FORM> int launch(const kvl_select_hamming_args &a, const kvl_cuda_queue *q) {
  constexpr auto kernel = select_hamming_kernel<FORM>;
  constexpr int BLOCKS = tile_of<FORM>::BLOCKS;
  const bool is_shared = a.selection_heads == 1;
  hamming_shape shape;
  shape.block_size = divisor((uint32_t)a.block_size);
  shape.lists = is_shared ? 1 : FORM::HEADS;
  shape.groups = (int)(a.selection_heads / shape.lists);
  const int64_t groups = a.seqs * shape.groups;
  int status = allow_shared<kernel>(q, q->shared_optin);
  if (status < 0) return status;
  const int most = (int)std::min<int64_t>(a.max_blocks / 256, CLUSTER_MOST);
  shape.team = largest_team<kernel>(groups, std::max(most, 1), SELECT_THREADS, q);
  shape.stretch = (int)((a.max_blocks + shape.team * RUN - 1) / (shape.team * RUN)) * RUN;
  shape.bins = (a.bits + 2 + 3) / 4 * 4;
  shape.q_words = (is_shared ? a.hashes.kv_heads : FORM::HEADS) * a.hashes.words;
  shape.q_words += shape.q_words % 2;
  shape.bytes_shared = sizeof(shared_memory) + 8 * (size_t)shape.q_words +
                       4 * (size_t)shape.bins * shape.lists *
                           (COPIES + (shape.team > 1 ? shape.team : 0));
  const size_t bytes = sizeof(distance_of<FORM>) * shape.lists; /* per block */
  const int fit = (int)((q->shared_optin - shape.bytes_shared) / bytes) - 16;
  shape.window = shape.stretch <= fit ? shape.stretch : fit / BLOCKS * BLOCKS;
  shape.bytes_shared += bytes * (shape.window + 16);
  return launch_teams(kernel, shape.team, groups, SELECT_THREADS, shape.bytes_shared, q, a,
                      shape);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(select_hamming) {
  using namespace kvl;
  const kvl_select_hamming_args &a = *(const kvl_select_hamming_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.seqs * a.selection_heads == 0) return KVL_OK;
  return with_heads(a.hashes, [&](auto form) { return launch<decltype(form)>(a, q); });
}
