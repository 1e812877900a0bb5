/* The k first of each row of n, exactly, in descending order (ascending for largest = 0).
 * Ties go to the lower index, NaN comes last, -0 ties with 0. by_index: the same k in index
 * order.
 *   a          f32 i32  [rows, n]
 *   values     like a   [rows, k]   optional
 *   indices    i32      [rows, k]
 *   workspace  for a batch of rows: keys, and the state of the search; used for few long rows
 *              and for k above 4096 that are sorted
 * One team of thread blocks per row finds the k (radix_select.cuh) and sorts up to 4096 of
 * them in shared memory; more are sorted through the workspace (bitonic.cuh). When there are
 * few rows, of 2^22 numbers or more (2^20 for k above 4096), or when whole rows are sorted,
 * each row has many blocks (topk_many.cuh). Rows of i32 always go that way, whose keys hold every i32.
 * Bytes: 4 (n + k) per row, 8 with values; long rows and large k more.
 * Limit: latency of the phases, see select.cu.
 * Measured, by index and sorted, L2 flushed (an empty launch reads 3.1): [1,8192] k256 7.6
 * 7.8 us, [64,8192] k2048 10.8 12.3, [1,131072] k2048 13.9 14.8, [64,131072] k2048 26.3 27.6,
 * clustered (1 + 1e-3 N) 25.2 26.2; [64,32768] k2048 20.5 17.4 (before: 68). H100 80GB HBM3,
 * 2026-11-21, kernels/dev/topk.cu. H200, 2026-11-22: [64,2^20] k2048 113.5 96.2, [1,2^20]
 * k2048 44.6 27.6, [64,131072] with 8 values 47.4 46.9 (notes/20261122-topk.md). */
#include "args/select.h"
#include "cuda/select/radix_select.cuh"
#include "cuda/select/topk_many.cuh"

namespace kvl {
namespace {

/* How a team gives the k of a row: in index order, by rank, or as keys in index order that
 * are still to be sorted, `length` per row. */
enum order { BY_INDEX, BY_RANK, KEYS };

constexpr uint32_t CROWD = 256; /* the most keys of a bin that are compared with each other */

/* Calls emit(place, key) for the keys that `s` has found; places count from 0 in the keys'
 * order. The ranks' range is cut into equal bins; a key goes to its bin, behind the smaller
 * keys there. When a bin has too many keys, a bitonic network sorts all of them. */
template <class S, class F> __device__ __forceinline__ void write_sorted(S &search, F emit) {
  constexpr int THREADS = S::THREADS;
  auto &s = search.s;
  const uint32_t wanted = search.wanted;
  const sort_key edge = search.edge;
  sort_key *sorted = (sort_key *)search.bits;
  uint32_t least = RANK_NAN, most = 0;
  search.keys([&](sort_key key) {
    if (key <= edge) {
      least = min(least, (uint32_t)(key >> 32));
      most = max(most, (uint32_t)(key >> 32));
    }
  });
  search.range(&least, &most);
  const int shift = S::shift_of(most - least);
  auto bin_of = [&](sort_key key) { return ((uint32_t)(key >> 32) - least) >> shift; };
  search.keys([&](sort_key key) {
    if (key <= edge) atomicAdd(&s.count[bin_of(key)], 1u);
  });
  __syncthreads();
  uint4 &four = ((uint4 *)s.count)[threadIdx.x];
  const uint4 own = four;
  const uint32_t largest = max(max(own.x, own.y), max(own.z, own.w));
  const uint32_t at = search.warps_before(own.x + own.y + own.z + own.w);
  four = make_uint4(at, at + own.x, at + own.x + own.y, at + own.x + own.y + own.z);
  if (threadIdx.x == 0) s.sure = 0;
  if (__syncthreads_or(largest > CROWD)) {
    search.keys([&](sort_key key) {
      if (key <= edge) sorted[atomicAdd(&s.sure, 1u)] = key;
    });
    uint32_t length = 1;
    while (length < wanted) length *= 2;
    for (uint32_t i = wanted + threadIdx.x; i < length; i += THREADS)
      sorted[i] = ~(sort_key)0;
    __syncthreads();
    sort_shared(sorted, length, 0);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < wanted; i += THREADS) emit(i, sorted[i]);
    return;
  }
  search.keys([&](sort_key key) {
    if (key <= edge) sorted[atomicAdd(&s.count[bin_of(key)], 1u)] = key;
  });
  __syncthreads(); /* each counter is now the end of its bin */
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < wanted; i += THREADS) {
    const sort_key key = sorted[i];
    const uint32_t bin = bin_of(key), from = bin ? s.count[bin - 1] : 0, to = s.count[bin];
    uint32_t place = from;
#pragma unroll 1
    for (uint32_t j = from; j < to; j++) place += sorted[j] < key;
    emit(place, key);
  }
}

template <int EACH, int TEAM, int SAMPLES>
__global__ void __launch_bounds__(TEAM_THREADS, EACH < 16 ? 2 : 1)
    topk_rows(const __grid_constant__ kvl_topk_args g, const team_shape shape, order order,
              sort_key *keys, int64_t length) {
  extern __shared__ __align__(16) char memory[];
  const int64_t row = blockIdx.x / TEAM;
  const float *a = (const float *)g.a + row * g.n;
  wait_for_previous();
  radix_select<EACH, TEAM, SAMPLES> s(memory, a, (uint32_t)g.n, shape, g.largest);
  let_next_start();
  if (!s.find(0, (uint32_t)g.n, (uint32_t)g.k, order == BY_RANK)) return;
  int32_t *indices = g.indices + row * g.k;
  float *values = g.values ? (float *)g.values + row * g.k : nullptr;
  auto put = [&](uint32_t place, uint32_t index) {
    indices[place] = (int32_t)index;
    if (values) values[place] = a[index];
  };
  if (order == BY_INDEX) s.write(put);
  else if (order == BY_RANK)
    write_sorted(s, [&](uint32_t place, sort_key key) { put(place, (uint32_t)key); });
  else
    s.write([&](uint32_t place, uint32_t index) {
      keys[row * length + place] = s.key_of(a[index], index);
    });
}

/* Writes the results from sorted keys; keys NULL: all elements in their order. */
struct put_body {
  kvl_topk_args g;
  const sort_key *keys;
  int64_t length;
  template <int N> __device__ void run(int64_t i) const {
    int64_t row, j;
    divide(i, g.k, &row, &j);
    int32_t index = (int32_t)(keys ? (uint32_t)keys[row * length + j] : j);
    g.indices[i] = index;
    if (g.values) /* as bits: f32 or i32 */
      ((uint32_t *)g.values)[i] = ((const uint32_t *)g.a)[row * g.n + index];
  }
};

/* ---- which way a call takes ------------------------------------------------------------ */

constexpr int64_t SORT_MOST = SORT_CHUNK; /* the most keys that a team sorts */
constexpr size_t BATCH_BYTES = 256 << 20; /* of workspace, unless one row needs more */

/* Does each row get many thread blocks? Yes for few long rows, and to sort whole rows. Such rows
 * are done one after the other, so from three rows on, one cluster for each row is faster. */
bool is_many(const kvl_topk_args &g, int sm_count, bool clusters) {
  if (g.dtype == KVL_DTYPE_I32) return g.k < g.n || !g.by_index;
  if (g.k == g.n) return !g.by_index && g.k > SORT_MOST;
  const int64_t long_row = !clusters ? 1 << 16 : g.k <= SORT_MOST ? 1 << 22 : 1 << 20;
  return g.n >= long_row && (clusters ? 48 : 4) * g.rows < sm_count;
}

int64_t power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

int64_t rows_batch(const kvl_topk_args &g) {
  int64_t rows = (int64_t)(BATCH_BYTES / many::bytes_row(power_of_two(g.k)));
  rows = rows < 1 ? 1 : rows > 1 << 24 ? 1 << 24 : rows;
  return rows < g.rows ? rows : g.rows;
}

int launch_rows(const kvl_topk_args &g, order order, sort_key *keys, int64_t length,
                const kvl_cuda_queue *q) {
  return with_team(g.rows, g.n, q, [&](auto t) {
    constexpr int EACH = t.EACH, TEAM = t.TEAM, SAMPLES = t.SAMPLES;
    constexpr auto kernel = topk_rows<EACH, TEAM, SAMPLES>;
    uint32_t sorted = order == BY_RANK ? (uint32_t)power_of_two(g.k) : 0;
    team_shape shape = radix_select<EACH, TEAM, SAMPLES>::shape_of(g.n, g.k, sorted, q);
    int status = allow_shared<kernel>(q, q->shared_optin);
    if (status < 0) return status;
    return launch_teams(kernel, TEAM, g.rows, TEAM_THREADS, shape.bytes_shared, q, g, shape,
                        order, keys, length);
  });
}

int topk_batch(const kvl_topk_args &g, bool is_many, const kvl_cuda_queue *q) {
  const int64_t length = power_of_two(g.k);
  void *queue = (void *)q;
  sort_key *keys = nullptr;
  int status = KVL_OK;
  if (is_many) {
    status = g.dtype == KVL_DTYPE_I32 ? many::sorted_keys<int32_t>(g, length, &keys, queue)
                                      : many::sorted_keys<float>(g, length, &keys, queue);
  } else if (g.by_index) {
    if (g.k < g.n) return launch_rows(g, BY_INDEX, nullptr, 0, q);
  } else if (g.k <= SORT_MOST) {
    return launch_rows(g, BY_RANK, nullptr, 0, q);
  } else {
    keys = (sort_key *)g.workspace;
    status = kvl__cuda_check(
        cudaMemsetAsync(keys, 0xFF, (size_t)(g.rows * length) * sizeof *keys, q->stream));
    if (status == KVL_OK) status = launch_rows(g, KEYS, keys, length, q);
    if (status == KVL_OK) status = sort_rows(keys, g.rows, length, queue);
  }
  if (status < 0) return status;
  return each<1>(put_body{g, keys, length}, g.rows * g.k, false, queue);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_WORKSPACE(topk) {
  const kvl_topk_args &g = *(const kvl_topk_args *)args;
  if (g.rows == 0 || g.k == 0) return 0;
  if (!kvl::is_many(g, sm_count, false) && (g.by_index || g.k <= kvl::SORT_MOST)) return 0;
  return kvl::many::bytes_row(kvl::power_of_two(g.k)) * (size_t)kvl::rows_batch(g);
}

KVL_CUDA_KERNEL(topk) {
  const kvl_topk_args &g = *(const kvl_topk_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  int status = KVL_OK;
  if (g.k == 0) return KVL_OK;
  const bool is_many = kvl::is_many(g, q->sm_count, kvl::is_hopper(q));
  const int64_t batch = kvl::rows_batch(g);
  for (int64_t row = 0; row < g.rows && status == KVL_OK; row += batch) {
    kvl_topk_args part = g;
    part.a = (const uint32_t *)g.a + row * g.n;
    part.indices += row * g.k;
    if (part.values) part.values = (uint32_t *)g.values + row * g.k;
    part.rows = g.rows - row < batch ? g.rows - row : batch;
    status = kvl::topk_batch(part, is_many, q);
  }
  return status;
}
