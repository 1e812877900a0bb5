/* The k first of each row of n in descending order (ascending for largest = 0), exactly;
 * ties to the lower index, NaN last, -0 ties with 0.
 *   a          f32  [rows, n]
 *   values     f32  [rows, k]   optional
 *   indices    i32  [rows, k]
 *   workspace  batch of rows: search state, histogram, keys; only for long rows or large k
 * A number and its index make one 64-bit key, smaller is earlier, no two are equal: so the
 * k first are the keys up to the k-th, found by a radix search of 11 bits at a time which
 * stops as soon as a digit's keys are all wanted (3 passes without ties). Those k are then
 * sorted by a bitonic network.
 * Rows that fill the device: a block searches and sorts one in shared memory. Few long
 * rows, or k above 4096: many blocks a row through the workspace. k above n / 2: no search,
 * all of the row is sorted.
 * Reads a up to 5 times without ties, from L2 where it fits.
 * Limit: bandwidth of those readings for a long row; launches and barriers otherwise.
 * Measured: 1 x 2^28, k 64: 1.36 ms; 64 x 32768, k 2048: 68 us; 1 x 131072, k 2048:
 * 103 us; 8 x 2048, k 128: 15 us; sorting 2^24: 10.8 ms (bytes alone: 78 steps, 7 ms).
 * H100 80GB HBM3, 2026-11-20. */
#include "bitonic.cuh"

namespace {

using kvl::sort_key;

enum {
  THREADS = kvl::SORT_THREADS, DIGIT = 11, BINS = 1 << DIGIT,
  ROW_LONG = 65536,            /* elements from which one block is too slow for a row */
  PIECE = 16384,               /* elements of a row that a block takes */
  BATCH_BYTES = 256 << 20,     /* workspace unless one row needs more */
};

__device__ __forceinline__ sort_key key_of(float x, int64_t index, bool largest) {
  uint32_t up = kvl::ordered(x), rank = x != x ? 0xFFFFFFFFu : largest ? ~up : up;
  return (sort_key)rank << 32 | (uint32_t)index;
}

/* ---- the search for the k-th key ------------------------------------------------- */

/* Of one row. `prefix` has the bits found; once done it is the k-th key, or the largest
 * with its digits so far, and those up to it are exactly the k wanted. */
struct search {
  sort_key prefix;
  uint32_t wanted, done, found, reserved;   /* found: keys collected */
};

/* Digits from the top: 11, 11 and 10 bits of the number, then those the index can have. */
struct digit {
  int shift, bits;
};
__host__ __device__ __forceinline__ bool next_digit(digit *d, int index_bits) {
  int left = d->shift > 32 ? d->shift - 32 : d->shift < 32 ? d->shift : index_bits;
  if (left == 0) return false;
  int base = d->shift > 32 ? 32 : 0;
  d->bits = left < DIGIT ? left : DIGIT;
  d->shift = base + left - d->bits;
  return true;
}
__device__ __forceinline__ bool has_prefix(sort_key key, sort_key prefix, digit d) {
  return (key ^ prefix) >> (d.shift + d.bits - 1) >> 1 == 0;   /* a shift by 64 in two */
}

__device__ __forceinline__ void count_digits(const float *row, int64_t begin, int64_t end,
                                             bool largest, sort_key prefix, digit d,
                                             uint32_t *count) {
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
    sort_key key = key_of(row[i], i, largest);
    if (has_prefix(key, prefix, d))
      atomicAdd(count + (key >> d.shift & ((1u << d.bits) - 1)), 1u);
  }
}

/* Sum of x over the threads before this one. */
__device__ __forceinline__ uint32_t sum_before(uint32_t x) {
  __shared__ uint32_t warp_total[THREADS / kvl::WARP];
  int lane = threadIdx.x % kvl::WARP, warp = threadIdx.x / kvl::WARP;
  uint32_t sum = x;
  for (int step = 1; step < kvl::WARP; step *= 2) {
    uint32_t other = __shfl_up_sync(kvl::ALL_LANES, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == kvl::WARP - 1) warp_total[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; w++) sum += warp_total[w];
  __syncthreads();
  return sum - x;
}

/* Add to the prefix the digit in which the wanted-th key lies. `count` and `s` are shared;
 * called after a barrier, with one at the end. */
__device__ __forceinline__ void choose_digit(const uint32_t *count, digit d, search *s) {
  constexpr int own = BINS / THREADS;
  uint32_t at[own], sum = 0;
  for (int j = 0; j < own; j++) sum += at[j] = count[threadIdx.x * own + j];
  uint32_t wanted = s->wanted, before = sum_before(sum);   /* has barriers */
  if (before < wanted && wanted <= before + sum) {         /* true for one thread */
    int j = 0;
    while (wanted > before + at[j]) before += at[j++];
    s->wanted = wanted - before;
    s->done = at[j] == s->wanted;
    s->prefix |= (sort_key)(threadIdx.x * own + j) << d.shift;
    if (s->done) s->prefix |= ((sort_key)1 << d.shift) - 1;
  }
  __syncthreads();
}

/* Where to put this thread's key: one atomic for each warp, whose lanes must all come. */
__device__ __forceinline__ uint32_t append(uint32_t *count, bool take) {
  unsigned takers = __ballot_sync(kvl::ALL_LANES, take), lane = threadIdx.x % kvl::WARP;
  uint32_t first = 0;
  if (lane == 0 && takers) first = atomicAdd(count, __popc(takers));
  first = __shfl_sync(kvl::ALL_LANES, first, 0);
  return first + __popc(takers & ((1u << lane) - 1));
}

__device__ __forceinline__ void collect(const float *row, int64_t begin, int64_t end,
                                        bool largest, sort_key last, uint32_t *count,
                                        sort_key *out) {
  for (int64_t first = begin; first < end; first += THREADS) {
    int64_t i = first + threadIdx.x;
    sort_key key = i < end ? key_of(row[i], i, largest) : 0;
    bool take = i < end && key <= last;
    uint32_t place = append(count, take);
    if (take) out[place] = key;
  }
}

__device__ __forceinline__ void emit(const kvl_topk_args &g, int64_t row, int64_t j,
                                     sort_key key) {
  int32_t index = (int32_t)(uint32_t)key;
  g.indices[row * g.k + j] = index;
  if (g.values) g.values[row * g.k + j] = g.a[row * g.n + index];
}

/* ---- a block per row ------------------------------------------------------------- */

/* length: the power of two that is sorted; all of the row when n <= length. */
__global__ void __launch_bounds__(THREADS)
block_kernel(kvl_topk_args g, int length, int index_bits) {
  __shared__ sort_key keys[kvl::SORT_CHUNK];
  __shared__ uint32_t count[BINS];
  __shared__ search s;
  for (int64_t row = blockIdx.x; row < g.rows; row += gridDim.x) {
    const float *a = g.a + row * g.n;
    if (threadIdx.x == 0) s = {~(sort_key)0, (uint32_t)g.k, 1, 0, 0};
    if (threadIdx.x == 0 && g.n > length) s.prefix = s.done = 0;
    for (int i = threadIdx.x; i < length; i += THREADS) keys[i] = ~(sort_key)0;
    __syncthreads();
    for (digit d = {64, 0}; !s.done && next_digit(&d, index_bits);) {
      for (int i = threadIdx.x; i < BINS; i += THREADS) count[i] = 0;
      __syncthreads();
      count_digits(a, 0, g.n, g.largest, s.prefix, d, count);
      __syncthreads();
      choose_digit(count, d, &s);
    }
    collect(a, 0, g.n, g.largest, s.prefix, &s.found, keys);
    __syncthreads();
    kvl::sort_shared(keys, length, 0);
    for (int j = threadIdx.x; j < g.k; j += THREADS) emit(g, row, j, keys[j]);
    __syncthreads();   /* before the next row's keys */
  }
}

/* ---- many blocks per row: g.rows is the batch ------------------------------------ */

__global__ void __launch_bounds__(THREADS)
count_kernel(kvl_topk_args g, int pieces, digit d, const search *states, uint32_t *counts) {
  __shared__ uint32_t count[BINS];
  int64_t row = blockIdx.x / pieces, begin = (int64_t)(blockIdx.x % pieces) * PIECE;
  if (states[row].done) return;
  for (int i = threadIdx.x; i < BINS; i += THREADS) count[i] = 0;
  __syncthreads();
  count_digits(g.a + row * g.n, begin, min(g.n, begin + PIECE), g.largest,
               states[row].prefix, d, count);
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    if (count[i]) atomicAdd(counts + row * BINS + i, count[i]);
}

/* A block per row; leaves the counts at 0 for the next digit. */
__global__ void __launch_bounds__(THREADS)
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

/* all: nothing was searched, every key is collected. */
__global__ void __launch_bounds__(THREADS)
collect_kernel(kvl_topk_args g, int pieces, bool all, search *states, sort_key *keys,
               int64_t length) {
  int64_t row = blockIdx.x / pieces, begin = (int64_t)(blockIdx.x % pieces) * PIECE;
  sort_key last = all ? ~(sort_key)0 : states[row].prefix;
  collect(g.a + row * g.n, begin, min(g.n, begin + PIECE), g.largest, last,
          &states[row].found, keys + row * length);
}

struct emit_body {
  kvl_topk_args g;
  const sort_key *keys;
  int64_t length;
  template <int N> __device__ void run(int64_t i) const {
    int64_t row, j;
    kvl::divide(i, g.k, &row, &j);
    emit(g, row, j, keys[row * length + j]);
  }
};

/* ---- the way through ------------------------------------------------------------- */

struct plan {
  bool one_block;
  bool all;           /* no search */
  int64_t length;     /* of a row's keys, a power of two */
  int64_t batch;      /* rows at a time */
  size_t bytes_row;   /* of workspace */
};

int64_t power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

plan plan_of(const kvl_topk_args *g, int sm_count) {
  plan p = {};
  int64_t sorted = g->n <= 1024 || 2 * g->k > g->n ? g->n : g->k;
  p.all = sorted == g->n;
  p.length = power_of_two(sorted);
  p.one_block = p.length <= kvl::SORT_CHUNK && (g->n < ROW_LONG || g->rows >= sm_count);
  if (p.one_block) return p;
  p.bytes_row = sizeof(search) + BINS * sizeof(uint32_t) + p.length * sizeof(sort_key);
  p.batch = (int64_t)(BATCH_BYTES / p.bytes_row);
  if (p.batch < 1) p.batch = 1;
  if (p.batch > g->rows) p.batch = g->rows;
  return p;
}

int index_bits(int64_t n) {
  int bits = 0;
  while (((int64_t)1 << bits) < n) bits++;
  return bits;
}

int topk_batch(const kvl_topk_args &g, const plan &p, void *queue) {
  cudaStream_t stream = ((kvl_cuda_queue *)queue)->stream;
  search *states = (search *)g.workspace;
  uint32_t *counts = (uint32_t *)(states + g.rows);
  sort_key *keys = (sort_key *)(counts + g.rows * BINS);
  size_t bytes_clear = (size_t)((char *)keys - (char *)states);
  int pieces = (int)((g.n + PIECE - 1) / PIECE);
  unsigned blocks = (unsigned)(g.rows * pieces), rows = (unsigned)g.rows;
  int status = kvl__cuda_check(cudaMemsetAsync(states, 0, bytes_clear, stream));
  if (status == KVL_OK)   /* what is not collected sorts last */
    status = kvl__cuda_check(cudaMemsetAsync(
        keys, 0xFF, (size_t)(g.rows * p.length) * sizeof *keys, stream));
  for (digit d = {64, 0}; status == KVL_OK && !p.all && next_digit(&d, index_bits(g.n));) {
    count_kernel<<<blocks, THREADS, 0, stream>>>(g, pieces, d, states, counts);
    choose_kernel<<<rows, THREADS, 0, stream>>>(d, (uint32_t)g.k, states, counts);
    status = kvl__cuda_launched();
  }
  if (status < 0) return status;
  collect_kernel<<<blocks, THREADS, 0, stream>>>(g, pieces, p.all, states, keys, p.length);
  status = kvl__cuda_launched();
  if (status == KVL_OK) status = kvl::sort_rows(keys, g.rows, p.length, queue);
  if (status == KVL_OK)
    status = kvl::each<1>(emit_body{g, keys, p.length}, g.rows * g.k, false, queue);
  return status;
}

}  // namespace

KVL_CUDA_WORKSPACE(topk) {
  const kvl_topk_args *g = (const kvl_topk_args *)args;
  if (g->rows == 0 || g->k == 0) return 0;
  plan p = plan_of(g, sm_count);
  return p.one_block ? 0 : p.bytes_row * (size_t)p.batch;
}

KVL_CUDA_KERNEL(topk) {
  const kvl_topk_args *g = (const kvl_topk_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (g->rows == 0 || g->k == 0) return KVL_OK;
  plan p = plan_of(g, q->sm_count);
  if (p.one_block) {
    block_kernel<<<kvl::grid(g->rows, 1, q, 32), THREADS, 0, q->stream>>>(
        *g, (int)p.length, index_bits(g->n));
    return kvl__cuda_launched();
  }
  int status = KVL_OK;
  for (int64_t row = 0; row < g->rows && status == KVL_OK; row += p.batch) {
    kvl_topk_args part = *g;
    part.a += row * g->n;
    part.indices += row * g->k;
    if (part.values) part.values += row * g->k;
    part.rows = g->rows - row < p.batch ? g->rows - row : p.batch;
    status = topk_batch(part, p, queue);
  }
  return status;
}
