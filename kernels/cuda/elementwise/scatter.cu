/* out[r][index[r][j]] = src[r][j], or += src[r][j]. An index out of range is skipped. No
 * index may occur twice in a row.
 *   src    f32 i32   [rows, m]
 *   index  i32       [rows, m]
 *   out    like src  [rows, n]
 * For each element reads 8 bytes and writes one 32-byte sector of out (add: also reads it).
 * Limit: memory bandwidth in sectors; src and index are read coalesced. */
#include "args/elementwise.h"
#include "cuda/elementwise.cuh"

namespace {

template <class T, bool ADD> struct scatter_body {
  const T *src;
  const int32_t *index;
  T *out;
  int64_t n, m;
  template <int N> __device__ void run(int64_t i) const {
    int64_t row, at, j = index[i];
    kvl::divide(i, m, &row, &at);
    if (j < 0 || j >= n) return;
    T *to = out + row * n + j;
    *to = ADD ? *to + src[i] : src[i];
  }
};

template <class T, bool ADD> int launch(const kvl_scatter_args &a, void *queue) {
  scatter_body<T, ADD> f{(const T *)a.src, a.index, (T *)a.out, a.n, a.m};
  return kvl::each<1>(f, a.rows * a.m, false, queue);
}

}  // namespace

KVL_CUDA_KERNEL(scatter) {
  const kvl_scatter_args &a = *(const kvl_scatter_args *)args;
  if (!a.add) return launch<uint32_t, false>(a, queue);
  if (a.dtype == KVL_DTYPE_F32) return launch<float, true>(a, queue);
  return launch<uint32_t, true>(a, queue);
}
