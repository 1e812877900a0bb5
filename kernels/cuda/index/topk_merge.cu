/* Running top-k: merges a tile of logits with the k largest of the columns before it.
 *   logits          f32 bf16  [rows, n]   columns first ... first + n - 1 of the whole row
 *   starts, lens    i32       [rows]      the row's tokens, in columns of the whole row
 *   kept_values     f32       [rows, k]   of the columns before, ascending by index
 *   kept_indices  i32       [rows, k]
 *   values          f32       [rows, k]   of both together, padded with -inf
 *   indices       i32       [rows, k]   padded with -1
 * Exact: the kept numbers followed by the tile's are searched as one row, as in
 * topk_transform.cu; ties go to the lower index, -inf and NaN are never taken.
 *
 * Bytes  4 (2) * tokens + 16 k per row and tile. Limit: latency of the phases, see select.cu
 * Best   [64,2^20] f32, k 2048, in tiles of 131072: 373 us (the whole row at once: 380); in
 *        tiles of 32768: 739. H100 80GB HBM3, 2026-11-21 */
#include "args/index.h"
#include "cuda/select/radix_select.cuh"

namespace kvl {
namespace {

/* The kept numbers, then those of the tile. It is added to and indexed like a pointer. */
template <class T> struct joined_row {
  const float *kept;
  const T *tile; /* points so that tile[i] is number i of the joined row */
  int left;      /* how many of the kept numbers lie from here on */
  __device__ __forceinline__ float operator[](int i) const {
    return i < left ? kept[i] : to_float(tile[i]);
  }
  __device__ __forceinline__ joined_row operator+(uint32_t i) const {
    return {kept + i, tile + i, left - (int)i};
  }
};
template <class T> __device__ __forceinline__ void opaque(joined_row<T> &p) {
  kvl::opaque(p.kept);
  kvl::opaque(p.tile);
}
/* Loads N elements; nearly always all of them are on one side. */
template <int N, class T>
__device__ __forceinline__ void load_apart(float (&to)[N], const joined_row<T> &p) {
  if (p.left <= 0) kvl::load_apart(to, p.tile);
  else if (p.left > (N - 1) * WARP) kvl::load_apart(to, p.kept);
  else
#pragma unroll
    for (int j = 0; j < N; j++) to[j] = p[j * WARP];
}

template <int EACH, int TEAM, int SAMPLES, class T>
__global__ void __launch_bounds__(TEAM_THREADS, EACH < 16 ? 2 : 1)
    topk_merge_rows(const __grid_constant__ kvl_topk_merge_args a, const team_shape shape) {
  using search = radix_select<EACH, TEAM, SAMPLES, joined_row<T>>;
  extern __shared__ __align__(16) char memory[];
  const int64_t row = blockIdx.x / TEAM;
  wait_for_previous();
  const kvl_window w = kvl__window(a.starts ? a.starts[row] : 0, a.lens[row], a.first, a.n);
  const uint32_t k = (uint32_t)a.k, kept = (uint32_t)min(w.before, a.k);
  const uint32_t width = kept + (uint32_t)w.count, before = (uint32_t)w.before;
  const joined_row<T> numbers = {a.kept_values + row * a.k,
                                 (const T *)a.logits + row * a.n + w.begin - kept, (int)kept};
  const int32_t *kept_indices = a.kept_indices + row * a.k;
  float *values = a.values + row * a.k;
  int32_t *indices = a.indices + row * a.k;
  auto put = [&](uint32_t place, uint32_t column) {
    const int32_t own = (int32_t)(before + column - kept);
    values[place] = numbers[(int)column];
    indices[place] = column < kept ? kept_indices[column] : own;
  };
  auto write_all = [&]() { /* no more than k are eligible */
                           for (uint32_t i =
                                    write_eligible(numbers, width, memory, put) + threadIdx.x;
                                i < k; i += TEAM_THREADS)
                             values[i] = -INFINITY, indices[i] = -1;
  };
  if (width <= k) {
    let_next_start();
    if (blockIdx.x % TEAM == 0) write_all();
    return;
  }
  search s(memory, numbers, width, search::fitted(shape, width), true);
  let_next_start();
  if (!s.find(0, width, k, false)) return;
  if ((uint32_t)(s.edge >> 32) >= RANK_LEAST) {
    write_all();
    return;
  }
  s.write([&](uint32_t place, uint32_t column) { indices[place] = (int32_t)column; });
  /* The numbers are read after `write`, because inside it a thread would wait for each of
   * them. */
  __syncthreads();
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < k; i += TEAM_THREADS) put(i, (uint32_t)indices[i]);
}

template <class T> int launch(const kvl_topk_merge_args &a, const kvl_cuda_queue *q) {
  const int64_t most = a.n + (a.first > 0 ? a.k : 0);
  return with_team(a.rows, most, q, [&](auto t) {
    constexpr int EACH = t.EACH, TEAM = t.TEAM, SAMPLES = t.SAMPLES;
    constexpr auto kernel = topk_merge_rows<EACH, TEAM, SAMPLES, T>;
    team_shape shape = radix_select<EACH, TEAM, SAMPLES>::shape_of(most, a.k, 0, q);
    int status = allow_shared<kernel>(q, q->shared_optin);
    if (status < 0) return status;
    return launch_teams(kernel, TEAM, a.rows, TEAM_THREADS, shape.bytes_shared, q, a, shape);
  });
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(topk_merge) {
  const kvl_topk_merge_args &a = *(const kvl_topk_merge_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.rows == 0 || a.k == 0) return KVL_OK;
  if (a.dtype == KVL_DTYPE_BF16) return kvl::launch<__nv_bfloat16>(a, q);
  return kvl::launch<float>(a, q);
}
