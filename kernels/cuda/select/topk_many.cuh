/* topk of rows of i32, and of rows of f32 that are too long for one team: many thread blocks per row, through the
 * workspace. A number and its index make one 64-bit key; a smaller key comes earlier, and
 * no two keys are equal. So the first k are the keys up to the k-th. A radix search of 11
 * bits at a time finds the k-th key, and stops as soon as all keys of a digit are wanted (3
 * passes without ties). The k keys are collected in any order and sorted by a bitonic
 * network, or only by their index. Reads a up to 5 times without ties.
 * Measured: 1 x 2^28, k 64: 1.36 ms; sorting 2^24: 10.8 ms (bytes alone: 78 steps, 7 ms).
 * H100 80GB HBM3, 2026-11-20. */
#ifndef KVL_CUDA_TOPK_MANY_CUH
#define KVL_CUDA_TOPK_MANY_CUH

#include "args/select.h"
#include "cuda/select/bitonic.cuh"
#include "cuda/block_scan.cuh"

namespace kvl {
namespace many {

enum {
  THREADS = SORT_THREADS,
  DIGIT = 11,
  BINS = 1 << DIGIT,
  PIECE = 16384, /* elements of a row that a thread block takes */
};

__device__ __forceinline__ sort_key key_of(int32_t x, int64_t index, bool largest) {
  uint32_t up = (uint32_t)x ^ 0x80000000u, rank = largest ? ~up : up;
  return (sort_key)rank << 32 | (uint32_t)index;
}
__device__ __forceinline__ sort_key key_of(float x, int64_t index, bool largest) {
  uint32_t up = order_key(x), rank = x != x ? 0xFFFFFFFFu : largest ? ~up : up;
  return (sort_key)rank << 32 | (uint32_t)index;
}

/* ---- the search for the k-th key ------------------------------------------------- */

/* The search in one row. `prefix` has the bits that were found. When done, it is the k-th
 * key, or the largest key with the digits so far: exactly the k wanted keys are up to it. */
struct search {
  sort_key prefix;
  uint32_t wanted, done, found, reserved; /* found: how many keys were collected */
};

/* The digits from the top: 11, 11 and 10 bits of the number, then those an index can have. */
struct digit {
  int shift, bits;
};
inline bool next_digit(digit *d, int index_bits) {
  int left = d->shift > 32 ? d->shift - 32 : d->shift < 32 ? d->shift : index_bits;
  if (left == 0) return false;
  int base = d->shift > 32 ? 32 : 0;
  d->bits = left < DIGIT ? left : DIGIT;
  d->shift = base + left - d->bits;
  return true;
}
__device__ __forceinline__ bool has_prefix(sort_key key, sort_key prefix, digit d) {
  return (key ^ prefix) >> (d.shift + d.bits - 1) >> 1 == 0; /* two steps for a shift by 64 */
}

template <class T>
__device__ __forceinline__ void count_digits(const T *row, int64_t begin, int64_t end,
                                             bool largest, sort_key prefix, digit d,
                                             uint32_t *count) {
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
    sort_key key = key_of(row[i], i, largest);
    if (has_prefix(key, prefix, d))
      atomicAdd(count + (key >> d.shift & ((1u << d.bits) - 1)), 1u);
  }
}

/* The sum of x over the threads before this one. */
__device__ __forceinline__ uint32_t sum_before(uint32_t x) {
  __shared__ uint32_t warp_total[THREADS / WARP];
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint32_t sum = warp_scan(x);
  if (lane == WARP - 1) warp_total[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; w++) sum += warp_total[w];
  __syncthreads();
  return sum - x;
}

/* Adds the digit of the wanted-th key to the prefix. `count` and `s` are shared. Call it
 * after a barrier; it ends with one. */
__device__ __forceinline__ void choose_digit(const uint32_t *count, digit d, search *s) {
  constexpr int own = BINS / THREADS;
  uint32_t at[own], sum = 0;
  for (int j = 0; j < own; j++) sum += at[j] = count[threadIdx.x * own + j];
  uint32_t wanted = s->wanted, before = sum_before(sum); /* has barriers */
  if (before < wanted && wanted <= before + sum) {       /* true for one thread */
    int j = 0;
    while (wanted > before + at[j]) before += at[j++];
    s->wanted = wanted - before;
    s->done = at[j] == s->wanted;
    s->prefix |= (sort_key)(threadIdx.x * own + j) << d.shift;
    if (s->done) s->prefix |= ((sort_key)1 << d.shift) - 1;
  }
  __syncthreads();
}

/* The index for this thread's key: one atomic per warp, all of whose lanes must call it. */
__device__ __forceinline__ uint32_t append(uint32_t *count, bool take) {
  unsigned takers = __ballot_sync(ALL_LANES, take), lane = threadIdx.x % WARP;
  uint32_t first = 0;
  if (lane == 0 && takers) first = atomicAdd(count, __popc(takers));
  first = __shfl_sync(ALL_LANES, first, 0);
  return first + __popc(takers & ((1u << lane) - 1));
}

/* by_index: only the index is stored, so that the keys sort by it. */
template <class T>
__device__ __forceinline__ void collect(const T *row, int64_t begin, int64_t end,
                                        bool largest, bool by_index, sort_key last,
                                        uint32_t *count, sort_key *out) {
  for (int64_t first = begin; first < end; first += THREADS) {
    int64_t i = first + threadIdx.x;
    sort_key key = i < end ? key_of(row[i], i, largest) : 0;
    bool take = i < end && key <= last;
    uint32_t place = append(count, take);
    if (take) out[place] = by_index ? (uint32_t)key : key;
  }
}

/* ---- kernels: g.rows is the rows of a batch ------------------------------------------ */

template <class T>
__global__ void __launch_bounds__(THREADS)
    count_kernel(kvl_topk_args g, int pieces, digit d, const search *states,
                 uint32_t *counts) {
  __shared__ uint32_t count[BINS];
  int64_t row = blockIdx.x / pieces, begin = (int64_t)(blockIdx.x % pieces) * PIECE;
  if (states[row].done) return;
  for (int i = threadIdx.x; i < BINS; i += THREADS) count[i] = 0;
  __syncthreads();
  count_digits((const T *)g.a + row * g.n, begin, min(g.n, begin + PIECE), g.largest,
               states[row].prefix, d, count);
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    if (count[i]) atomicAdd(counts + row * BINS + i, count[i]);
}

/* One thread block per row; leaves the counts at 0 for the next digit. */
static __global__ void __launch_bounds__(THREADS)
    choose_kernel(digit d, uint32_t k, search *states, uint32_t *counts) {
  __shared__ uint32_t count[BINS];
  __shared__ search s;
  if (states[blockIdx.x].done) return;
  if (threadIdx.x == 0) {
    s = states[blockIdx.x];
    if (d.shift + d.bits == 64) s.wanted = k;
  }
  for (int i = threadIdx.x; i < BINS; i += THREADS) {
    count[i] = counts[(int64_t)blockIdx.x * BINS + i];
    counts[(int64_t)blockIdx.x * BINS + i] = 0;
  }
  __syncthreads();
  choose_digit(count, d, &s);
  if (threadIdx.x == 0) states[blockIdx.x] = s;
}

/* all: there was no search, and every key is collected. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    collect_kernel(kvl_topk_args g, int pieces, bool all, search *states, sort_key *keys,
                   int64_t length) {
  int64_t row = blockIdx.x / pieces, begin = (int64_t)(blockIdx.x % pieces) * PIECE;
  sort_key last = all ? ~(sort_key)0 : states[row].prefix;
  collect((const T *)g.a + row * g.n, begin, min(g.n, begin + PIECE), g.largest, g.by_index,
          last, &states[row].found, keys + row * length);
}

inline int index_bits(int64_t n) {
  int bits = 0;
  while (((int64_t)1 << bits) < n) bits++;
  return bits;
}

inline size_t bytes_row(int64_t length) {
  return sizeof(search) + BINS * sizeof(uint32_t) + length * sizeof(sort_key);
}

/* Sorts the k keys of g.rows rows, `length` (a power of two) per row. *keys is in the
 * workspace. */
template <class T>
int sorted_keys(const kvl_topk_args &g, int64_t length, sort_key **keys, void *queue) {
  cudaStream_t stream = ((kvl_cuda_queue *)queue)->stream;
  const bool all = g.k == g.n;
  search *states = (search *)g.workspace;
  uint32_t *counts = (uint32_t *)(states + g.rows);
  *keys = (sort_key *)(counts + g.rows * BINS);
  int pieces = (int)((g.n + PIECE - 1) / PIECE);
  unsigned blocks = (unsigned)(g.rows * pieces), rows = (unsigned)g.rows;
  int status = kvl__cuda_check(
      cudaMemsetAsync(states, 0, (size_t)((char *)*keys - (char *)states), stream));
  if (status == KVL_OK) /* unused keys sort last */
    status = kvl__cuda_check(
        cudaMemsetAsync(*keys, 0xFF, (size_t)(g.rows * length) * sizeof **keys, stream));
  for (digit d = {64, 0}; status == KVL_OK && !all && next_digit(&d, index_bits(g.n));) {
    count_kernel<T><<<blocks, THREADS, 0, stream>>>(g, pieces, d, states, counts);
    choose_kernel<<<rows, THREADS, 0, stream>>>(d, (uint32_t)g.k, states, counts);
    status = kvl__cuda_launched();
  }
  if (status < 0) return status;
  collect_kernel<T><<<blocks, THREADS, 0, stream>>>(g, pieces, all, states, *keys, length);
  status = kvl__cuda_launched();
  return status < 0 ? status : sort_rows(*keys, g.rows, length, queue);
}

}  // namespace many
}  // namespace kvl

#endif
