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
#include "args/evict.h"
#include "cuda/elementwise.cuh"

namespace kvl {
namespace {

constexpr int THREADS = 256, EACH = 4;

/* A token has `strips` rows of `units` units, and behind them units of scales. */
struct layout {
  divisor units, strips; /* of all of a row: numbers, then scales */
  int32_t numbers;       /* units of them */
  int64_t count;
};

template <class U> struct unit {
  const U *from;
  U *to;
};

template <class U>
__device__ __forceinline__ unit<U> find(const kvl_copy_tokens_args &a, const layout &l,
                                        uint64_t i) {
  const uint32_t row = l.units.quotient((uint32_t)i), u = (uint32_t)i - row * l.units.by;
  const uint32_t token = l.strips.quotient(row), strip = row - token * l.strips.by;
  const int64_t from = a.from[token], to = a.to[token];
  const int size = a.src.block_size;
  if (from < 0 || from >= a.src.blocks * size || to < 0 || to >= a.dst.blocks * size)
    return {nullptr, nullptr};
  const bool is_value = strip >= (uint32_t)a.src.kv_heads;
  const kvl_strips &of = is_value ? a.src.value : a.src.key;
  const int head = (int)strip - (is_value ? a.src.kv_heads : 0);
  const int64_t row_bytes = u < (uint32_t)l.numbers ? of.bytes_row : 2 * of.groups;
  const int64_t at = u < (uint32_t)l.numbers
                         ? (int64_t)u * sizeof(U)
                         : of.scales + (int64_t)(u - l.numbers) * sizeof(U);
  const char *src = (const char *)a.src.memory +
                    kvl__strip_at(&a.src, &of, from / size, head) + from % size * row_bytes;
  char *dst = (char *)a.dst.memory + kvl__strip_at(&a.dst, &of, to / size, head) +
              to % size * row_bytes;
  return {(const U *)(src + at), (U *)(dst + at)};
}

template <class U>
__global__ void __launch_bounds__(THREADS)
    copy_units(const __grid_constant__ kvl_copy_tokens_args a,
               const __grid_constant__ layout l) {
  let_next_start();
  wait_for_previous();
  const int64_t first = (int64_t)blockIdx.x * THREADS * EACH + threadIdx.x;
  unit<U> units[EACH];
  U x[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int64_t i = first + e * THREADS;
    units[e] = i < l.count ? find<U>(a, l, (uint64_t)i) : unit<U>{nullptr, nullptr};
    if (units[e].from) x[e] = *units[e].from;
  }
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (units[e].from) *units[e].to = x[e];
}

template <class U> int launch(const kvl_copy_tokens_args &a, void *queue) {
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const kvl_strips &key = a.src.key;
  layout l = {};
  l.numbers = key.bytes_row / (int)sizeof(U);
  l.units = divisor(l.numbers + 2 * key.groups / (int)sizeof(U));
  l.strips = divisor(kvl__strips(&a.src));
  const int64_t each = (int64_t)l.units.by * l.strips.by;
  kvl_copy_tokens_args part = a;
  for (int64_t at = 0; at < a.n; at += part.n) { /* 31 bits number units */
    part.n = a.n - at < INT32_MAX / each ? a.n - at : INT32_MAX / each;
    part.from = a.from + at, part.to = a.to + at;
    l.count = part.n * each;
    const int64_t blocks = (l.count + THREADS * EACH - 1) / (THREADS * EACH);
    int status = launch_programmatic(copy_units<U>, (unsigned)blocks, THREADS, 0, q, part, l);
    if (status < 0) return status;
  }
  return KVL_OK;
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(copy_tokens) {
  using namespace kvl;
  const kvl_copy_tokens_args &a = *(const kvl_copy_tokens_args *)args;
  const kvl_strips &k = a.src.key, &v = a.src.value;
  if (a.n == 0 || a.src.kv_heads == 0) return KVL_OK;
  /* the largest unit that divides rows, scales and strips; keys and values have equal rows */
  const int64_t all = k.bytes_row | 2 * k.groups | v.bytes_row | a.src.bytes_page | k.bytes |
                      v.begin | k.scales;
  if (k.bytes_row != v.bytes_row) return kvl__cuda_check(cudaErrorInvalidValue);
  if (all % 16 == 0 && aligned16(a.src.memory, a.dst.memory)) return launch<uint4>(a, queue);
  if (all % 4 == 0) return launch<uint32_t>(a, queue);
  return launch<uint16_t>(a, queue);
}
