/* Copies rows of bytes from or to the rows that an index names.
 *
 * A body is a struct with `__device__ bool row(int64_t i, const char **from, char **to)`. It
 * returns whether row i is copied; from = NULL writes zeros. A row is copied in pieces of the
 * largest size, 16 bytes at most, that all addresses and the row's length allow. */
#ifndef KVL_CUDA_COPY_ROWS_CUH
#define KVL_CUDA_COPY_ROWS_CUH

#include "cuda/launch.cuh"

namespace kvl {

enum { COPY_THREADS = 256 };

/* A thread block has `wide` threads (a power of two) along a row; the others take further
 * rows. Grid: rows, parts of a row. */
template <class T, class F>
__global__ void __launch_bounds__(COPY_THREADS)
    copy_rows_kernel(F f, int64_t n, int64_t pieces, int wide) {
  int tall = COPY_THREADS / wide;
  int64_t first = (int64_t)blockIdx.y * wide + threadIdx.x % wide;
  int64_t step = (int64_t)gridDim.y * wide;
  for (int64_t i = (int64_t)blockIdx.x * tall + threadIdx.x / wide; i < n;
       i += (int64_t)gridDim.x * tall) {
    const char *from;
    char *to;
    if (!f.row(i, &from, &to)) continue;
    const T *__restrict__ src = (const T *)from;
    T *__restrict__ dst = (T *)to;
    if (src) {
#pragma unroll 4
      for (int64_t p = first; p < pieces; p += step) dst[p] = src[p];
    } else {
      for (int64_t p = first; p < pieces; p += step) dst[p] = T();
    }
  }
}

template <class F>
int copy_rows(const F &f, int64_t n, int64_t bytes_row, const void *src, const void *out,
              const kvl_cuda_queue *q) {
  if (n == 0 || bytes_row == 0) return KVL_OK;
  uintptr_t bits = (uintptr_t)src | (uintptr_t)out | (uintptr_t)bytes_row | 16;
  int size = (int)(bits & (~bits + 1)), wide = 1;
  int64_t pieces = bytes_row / size;
  while (wide < COPY_THREADS && wide < pieces) wide *= 2;
  unsigned down = grid(n, COPY_THREADS / wide, q);
  /* Few long rows get several blocks each, with at least 4 pieces per thread. */
  int64_t along = (pieces + wide * 4 - 1) / (wide * 4);
  int64_t want = ((int64_t)q->sm_count * 8 + down - 1) / down;
  if (along > want) along = want;
  if (along > 65535) along = 65535;
  KVL_CUDA_BY_BYTES(size, T, {
    copy_rows_kernel<T>
        <<<dim3(down, (unsigned)along), COPY_THREADS, 0, q->stream>>>(f, n, pieces, wide);
  })
  return kvl__cuda_launched();
}

}  // namespace kvl

#endif
