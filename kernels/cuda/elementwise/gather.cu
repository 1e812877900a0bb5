/* out[r][j] = src[r][index[r][j]]; an index out of range gives zero.
 *   src    elements of 1, 2, 4 or 8 bytes  [rows, n]
 *   index  i32                             [rows, m]
 *   out    like src                        [rows, m]
 * For each result reads 4 bytes of index and one 32-byte sector of src, and writes one
 * element.
 * Limit: memory bandwidth in sectors; index is read, and out is written, coalesced. */
#include "args/elementwise.h"
#include "cuda/elementwise.cuh"

namespace {

template <class T> struct gather_body {
  const T *src;
  const int32_t *index;
  T *out;
  int64_t n, m;
  template <int N> __device__ void run(int64_t i) const {
    int64_t row, at, j = index[i];
    kvl::divide(i, m, &row, &at);
    out[i] = j >= 0 && j < n ? src[row * n + j] : T();
  }
};

}  // namespace

KVL_CUDA_KERNEL(gather) {
  const kvl_gather_args *g = (const kvl_gather_args *)args;
  KVL_CUDA_BY_BYTES(g->bytes_element, T, {
    gather_body<T> f{(const T *)g->src, g->index, (T *)g->out, g->n, g->m};
    return kvl::each<1>(f, g->rows * g->m, false, queue);
  })
  return KVL_OK;
}
