/* The k largest logits of each row's tokens, as indices, places or ragged indices.
 *   logits  f32 bf16  [rows, n]
 *   starts  i32       [rows]      optional: the column of a row's token 0
 *   lens    i32       [rows]
 *   out     i32       [rows, k]   ascending by index, -1 padded
 * Exact; ties go to the lower index, -inf and NaN are never taken. One team of blocks per
 * row finds the k (radix_select.cuh). All warps of the team read the row's own columns and
 * no others; of a row of at most k columns, one block lists the eligible ones. Places are
 * looked up at the end, all at once: in the order of a sparse bitmap a thread would wait for
 * one after the other (2 to 4 us more).
 *
 * Bytes  4 (2) * (tokens + k) a row, and tables. Limit: latency of the phases, see select.cu
 * Best   indices and places, f32, k 2048, cold L2 (an empty launch 3.1): [1,131072] 13.6
 *        and 16.4 us, [64,131072] 26.4 and 28.4, [64,2^20] 380 and 382; H100 80GB HBM3,
 *        2026-11-21 */
#include "args/index.h"
#include "cuda/select/radix_select.cuh"

namespace kvl {
namespace {

template <int EACH, int TEAM, int SAMPLES, class T>
__global__ void __launch_bounds__(TEAM_THREADS, EACH < 16 ? 2 : 1)
    topk_transform_rows(const __grid_constant__ kvl_topk_transform_args a,
                        const team_shape shape) {
  using search = radix_select<EACH, TEAM, SAMPLES, const T *>;
  extern __shared__ __align__(16) char memory[];
  const int64_t row = blockIdx.x / TEAM;
  wait_for_previous();
  const kvl_window w = kvl__window(a.starts ? a.starts[row] : 0, a.lens[row], 0, a.n);
  const uint32_t width = (uint32_t)w.count, k = (uint32_t)a.k;
  const kvl_row_transform t = kvl__row_transform(&a.transform, row);
  int32_t *out = a.out + row * a.k;
  const T *logits = (const T *)a.logits + row * a.n + w.begin;
  auto write_all = [&]() { /* no more than k are eligible */
                           uint32_t count = write_eligible(
                               logits, width, memory, [&](uint32_t place, uint32_t index) {
                                 out[place] = kvl__transformed(t, (int32_t)index);
                               });
                           for (uint32_t i = count + threadIdx.x; i < k; i += TEAM_THREADS)
                             out[i] = -1;
  };
  if (width <= k) {
    let_next_start();
    if (blockIdx.x % TEAM == 0) write_all();
    return;
  }
  search s(memory, logits, width, search::fitted(shape, width), true);
  let_next_start();
  if (!s.find(0, width, k, false)) return;
  if ((uint32_t)(s.edge >> 32) >= RANK_LEAST) {
    write_all();
    return;
  }
  kvl::opaque(out);
  s.write([&](uint32_t place, uint32_t index) { out[place] = (int32_t)index + t.offset; });
  if (t.block_size == 0) return;
  __syncthreads();
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < k; i += TEAM_THREADS)
    out[i] = kvl__transformed(t, out[i]);
}

template <class T> int launch(const kvl_topk_transform_args &a, const kvl_cuda_queue *q) {
  return with_team(a.rows, a.n, q, [&](auto t) {
    constexpr int EACH = t.EACH, TEAM = t.TEAM, SAMPLES = t.SAMPLES;
    constexpr auto kernel = topk_transform_rows<EACH, TEAM, SAMPLES, T>;
    team_shape shape = radix_select<EACH, TEAM, SAMPLES>::shape_of(a.n, a.k, 0, q);
    int status = allow_shared<kernel>(q, q->shared_optin);
    if (status < 0) return status;
    return launch_teams(kernel, TEAM, a.rows, TEAM_THREADS, shape.bytes_shared, q, a, shape);
  });
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(topk_transform) {
  const kvl_topk_transform_args &a = *(const kvl_topk_transform_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (a.rows == 0 || a.k == 0) return KVL_OK;
  if (a.dtype == KVL_DTYPE_BF16) return kvl::launch<__nv_bfloat16>(a, q);
  return kvl::launch<float>(a, q);
}
