/* Copies tokens within KV memory, or between two memories with pages of one format: token
 * to[i] = token from[i], keys and values of every KV head.
 *
 *   src, dst  [blocks, ...page]
 *   from, to  i64  [n]   places; an entry that is out of range on either side is skipped. No
 *                        token may be written twice, nor read and written
 *
 * Bytes   2 * n * bytes of a token
 * Limit   memory. A unit is up to 16 bytes of a row; neighbouring threads copy neighbouring
 *         units, four for each thread before the first store. Exact. */
#include "cuda/evict/token.cuh"

namespace kvl {
namespace {

constexpr int COPY_THREADS = 256, EACH = 4;

template <class U>
__global__ void __launch_bounds__(COPY_THREADS)
    copy_units(const __grid_constant__ kvl_copy_tokens_args a,
               const __grid_constant__ token_units l, int64_t count) {
  let_next_start();
  wait_for_previous();
  const int64_t first = (int64_t)blockIdx.x * COPY_THREADS * EACH + threadIdx.x;
  token_unit<U> units[EACH];
  U x[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int64_t i = first + e * COPY_THREADS;
    const uint32_t token = i < count ? l.each.quotient((uint32_t)i) : 0;
    units[e] = {};
    if (i < count)
      units[e] = find_unit<U>(a.src, a.from[token], a.dst, a.to[token], l,
                              (uint32_t)i - token * l.each.by);
    if (units[e].from) x[e] = *units[e].from;
  }
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (units[e].from) *units[e].to = x[e];
}

template <class U> int launch(const kvl_copy_tokens_args &a, void *queue) {
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const token_units l = units_of<U>(a.src);
  const int64_t each = l.each.by;
  kvl_copy_tokens_args part = a;
  for (int64_t at = 0; at < a.n; at += part.n) { /* 31 bits number units */
    part.n = a.n - at < INT32_MAX / each ? a.n - at : INT32_MAX / each;
    part.from = a.from + at, part.to = a.to + at;
    const int64_t count = part.n * each, blocks = ceil_div(count, COPY_THREADS * EACH);
    int status = launch_programmatic(copy_units<U>, (unsigned)blocks, COPY_THREADS, 0, q,
                                     part, l, count);
    if (status < 0) return status;
  }
  return KVL_OK;
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(copy_tokens) {
  using namespace kvl;
  const kvl_copy_tokens_args &a = *(const kvl_copy_tokens_args *)args;
  if (a.n == 0 || a.src.kv_heads == 0) return KVL_OK;
  return with_unit(a.src, a.dst, [&](auto unit) { return launch<decltype(unit)>(a, queue); });
}
