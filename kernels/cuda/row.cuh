/* Ops over the rows of a matrix: a team of threads takes a row, or several blocks share each
 * of a few long rows.
 *
 * For short rows a team is a warp (half a warp for the shortest), otherwise a block. It reads
 * its row in packs of 16 bytes if every row starts on such a boundary. */
#ifndef KVL_CUDA_ROW_CUH
#define KVL_CUDA_ROW_CUH

#include "cuda/launch.cuh"

namespace kvl {

enum {
  ROW_THREADS = 256,
  ROW_SHORT = 1024, /* for rows of up to so many elements, a team is a warp */
  ROW_CHUNK = 4096, /* a row with fewer elements is not worth another block */
};

template <int THREADS> struct team {
  static constexpr int per_block = ROW_THREADS / THREADS;
  static __device__ __forceinline__ int rank() { return threadIdx.x % THREADS; }
  static __device__ __forceinline__ int64_t first_row() {
    return (int64_t)blockIdx.x * per_block + threadIdx.x / THREADS;
  }
  static __device__ __forceinline__ int64_t row_step() {
    return (int64_t)gridDim.x * per_block;
  }
  template <class V, class F> static __device__ __forceinline__ V reduce(V x, F f, V none) {
    if constexpr (THREADS <= WARP) {
      return warp_reduce<THREADS>(x, f); /* by all lanes: the teams of a warp stay together */
    } else {
      __shared__ V shared[WARP];
      return block_reduce(x, f, none, shared);
    }
  }
};

template <int N> struct width { static constexpr int value = N; };

/* Calls f(width<N>, i) for every pack i ... i + N - 1 of [begin, end), then f(width<1>, i)
 * for each element that is left. */
template <int N, class F>
__device__ __forceinline__ void walk(int64_t begin, int64_t end, int rank, int threads, F f) {
  int64_t packed = begin + (end - begin) / N * N;
  for (int64_t i = begin + (int64_t)rank * N; i < packed; i += (int64_t)threads * N)
    f(width<N>(), i);
  if constexpr (N > 1)
    for (int64_t i = packed + rank; i < end; i += threads) f(width<1>(), i);
}

/* Do packs of n elements fit rows of `length` at these addresses? */
template <class... P> bool wide_rows(int64_t rows, int64_t length, int n, P... p) {
  return aligned16(p...) && (rows == 1 || length % n == 0);
}

/* How a few long rows are cut so that the device is full: into `count` pieces of `length`
 * elements (a multiple of 16) each. All rows together have at most 8 * sm_count pieces. */
struct split {
  int64_t count, length;
};
inline split split_rows(int64_t rows, int64_t n, int sm_count) {
  if (rows == 0) return {1, n};
  int64_t want = (int64_t)sm_count * 8 / rows, most = n / ROW_CHUNK;
  if (want > most) want = most;
  if (want < 2 || rows > 65535) return {1, n};
  int64_t length = ((n + want - 1) / want + 15) / 16 * 16;
  return {(n + length - 1) / length, length};
}

/* Bytes of workspace when every piece has a result of `bytes`; 0 when rows stay whole. */
inline size_t bytes_of_pieces(const split &cut, int64_t rows, size_t bytes) {
  return cut.count > 1 ? (size_t)(cut.count * rows) * bytes : 0;
}

/* The number of thread blocks when every row has one team. */
template <int THREADS> unsigned team_grid(int64_t rows, const kvl_cuda_queue *q) {
  return grid(rows, team<THREADS>::per_block, q, 32);
}

}  // namespace kvl

#endif
