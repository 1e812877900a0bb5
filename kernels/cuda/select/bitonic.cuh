/* Ascending bitonic sort of rows of unique 64-bit keys; a row's length is a power of two.
 * Chunks of SORT_CHUNK keys are sorted in shared memory. Longer rows are merged in steps
 * through device memory; every step reads and writes each key once, and 2^p keys take about
 * (p - 12)^2 / 2 steps.
 * Source: Batcher, "Sorting networks and their applications", 1968. */
#ifndef KVL_CUDA_BITONIC_CUH
#define KVL_CUDA_BITONIC_CUH

#include "cuda/elementwise.cuh"

namespace kvl {

typedef unsigned long long sort_key;
enum { SORT_THREADS = 512, SORT_CHUNK = 4096 };

__device__ __forceinline__ void exchange(sort_key *a, sort_key *b, bool up) {
  sort_key x = *a, y = *b;
  if (x > y == up) {
    *a = y;
    *b = x;
  }
}

/* The steps of one merge whose pairs are `stride` apart or closer, on `count` keys that begin
 * at index `base` of their row. Bit `size` of a key's index tells its run's direction. */
__device__ __forceinline__ void merge_shared(sort_key *keys, int count, int stride,
                                             int64_t base, int64_t size) {
  for (; stride > 0; stride /= 2) {
    for (int t = threadIdx.x; t < count / 2; t += SORT_THREADS) {
      int i = 2 * t - (t & (stride - 1));
      exchange(keys + i, keys + i + stride, ((base + i) & size) == 0);
    }
    __syncthreads();
  }
}

/* All threads of the block call it after a barrier; it ends with a barrier. */
__device__ __forceinline__ void sort_shared(sort_key *keys, int count, int64_t base) {
  for (int size = 2; size <= count; size *= 2)
    merge_shared(keys, count, size / 2, base, size);
}

/* One block per chunk. size 0 sorts the chunk; any other size does the steps of merge `size`
 * that stay inside it. */
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_chunk_kernel(sort_key *all, int chunk, int64_t row_length, int64_t size) {
  __shared__ sort_key keys[SORT_CHUNK];
  int64_t first = (int64_t)blockIdx.x * chunk, base = first & (row_length - 1);
  for (int i = threadIdx.x; i < chunk; i += SORT_THREADS) keys[i] = all[first + i];
  __syncthreads();
  if (size == 0) sort_shared(keys, chunk, base);
  else merge_shared(keys, chunk, chunk / 2, base, size);
  for (int i = threadIdx.x; i < chunk; i += SORT_THREADS) all[first + i] = keys[i];
}

struct sort_step_body {
  sort_key *all;
  int64_t row_length, size, stride;
  template <int N> __device__ void run(int64_t t) const {
    int64_t i = 2 * t - (t & (stride - 1));
    exchange(all + i, all + i + stride, (i & (row_length - 1) & size) == 0);
  }
};

/* Sorts `rows` rows of row_length keys, a power of two. */
inline int sort_rows(sort_key *all, int64_t rows, int64_t row_length, void *queue) {
  cudaStream_t stream = ((kvl_cuda_queue *)queue)->stream;
  int chunk = (int)(row_length < SORT_CHUNK ? row_length : SORT_CHUNK);
  unsigned chunks = (unsigned)(rows * (row_length / chunk));
  sort_chunk_kernel<<<chunks, SORT_THREADS, 0, stream>>>(all, chunk, row_length, 0);
  int status = kvl__cuda_launched();
  for (int64_t size = 2 * (int64_t)chunk; size <= row_length; size *= 2) {
    for (int64_t stride = size / 2; stride >= chunk && status == KVL_OK; stride /= 2)
      status = each<1>(sort_step_body{all, row_length, size, stride}, rows * row_length / 2,
                       false, queue);
    if (status < 0) break;
    sort_chunk_kernel<<<chunks, SORT_THREADS, 0, stream>>>(all, chunk, row_length, size);
    status = kvl__cuda_launched();
  }
  return status;
}

}  // namespace kvl

#endif
