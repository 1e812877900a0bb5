/* Ops over rows of a matrix: a team of threads to each row, or several blocks to each of
 * few long rows.
 *
 * A team is a warp for short rows (half of one for the shortest), else a block; it walks
 * its row in packs of 16 bytes where every row starts on such a boundary. */
#ifndef KVL_CUDA_ROW_CUH
#define KVL_CUDA_ROW_CUH

#include "launch.cuh"

namespace kvl {

enum {
  ROW_THREADS = 256,
  ROW_SHORT = 1024,  /* elements up to which a warp is the team */
  ROW_CHUNK = 32768, /* elements below which a row is not worth another block */
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
      return warp_reduce<THREADS>(x, f); /* of all lanes: teams of a warp stay together */
    } else {
      __shared__ V shared[WARP];
      return block_reduce(x, f, none, shared);
    }
  }
};

template <int N> struct width { static constexpr int value = N; };

/* f(width<N>, i) for packs i ... i + N - 1 of [begin, end), width<1> for what is left. */
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

/* How few long rows are cut: `count` pieces of `length` elements (a multiple of 16) each,
 * so that the device is full. There are at most 8 * sm_count pieces of all rows together. */
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

/* Bytes of workspace for a result of `bytes` from every piece; 0 where rows stay whole. */
inline size_t bytes_of_pieces(const split &cut, int64_t rows, size_t bytes) {
  return cut.count > 1 ? (size_t)(cut.count * rows) * bytes : 0;
}

/* Blocks for one team a row. */
template <int THREADS> unsigned team_grid(int64_t rows, const kvl_cuda_queue *q) {
  return grid(rows, team<THREADS>::per_block, q, 32);
}

}  // namespace kvl

#endif
