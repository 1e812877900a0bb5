/* Turns indices of tokens into places or ragged indices. Without indices it takes all
 * lens[r] tokens of each row.
 *   indices  i32  [rows, k]   optional
 *   lens       i32  [rows]      used when there are no indices
 *   out        i32  [rows, k]   -1 padded; may be indices
 * Limit: the bytes read and written; the launch, for the few rows of a decode. */
#include "args/index.h"
#include "cuda/elementwise.cuh"

namespace {

struct transform_body {
  kvl_transform_indices_args g;
  template <int N> __device__ void run(int64_t at) const {
    int64_t row, i;
    kvl::divide(at, g.k, &row, &i);
    int32_t index = g.indices ? g.indices[at] : i < g.lens[row] ? (int32_t)i : -1;
    g.out[at] = kvl__transformed(kvl__row_transform(&g.transform, row), index);
  }
};

}  // namespace

KVL_CUDA_KERNEL(transform_indices) {
  const kvl_transform_indices_args &g = *(const kvl_transform_indices_args *)args;
  return kvl::each<1>(transform_body{g}, g.rows * g.k, false, queue);
}
