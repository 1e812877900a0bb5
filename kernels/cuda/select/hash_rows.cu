/* Hashes of vectors by random planes.
 *   x       f32 f16 bf16  [rows, head_dim]
 *   planes  f32           [bits, head_dim]
 *   hashes  u64           [rows, words]
 * Exact: args/select.h fixes the order of the sums; hash.cuh computes them. */
#include "args/select.h"
#include "cuda/select/hash.cuh"

namespace kvl {
namespace {

template <class T> struct plain_rows {
  using type = T;
  static constexpr bool IS_SUM = false;
  kvl_hash_rows_args a;
  __device__ hash_item<T> at(int64_t row) const {
    return {(const T *)a.x + row * a.head_dim, 1, a.hashes + row * ((a.bits + 63) / 64)};
  }
};

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(hash_rows) {
  using namespace kvl;
  const kvl_hash_rows_args &a = *(const kvl_hash_rows_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const hash_call call = {a.planes, a.rows, a.head_dim, a.bits};
  KVL_CUDA_BY_FLOAT(a.dtype, T, { return hash_vectors(plain_rows<T>{a}, call, q); })
}
