/* out[i] = value, converted to out's dtype.
 *   out  any  [count]
 * Writes count elements.
 * Limit: write bandwidth. */
#include "args/elementwise.h"
#include "cuda/convert.cuh"
#include "cuda/elementwise.cuh"

namespace {

template <class T> struct fill_body {
  T *out;
  double value;
  template <int N> __device__ void run(int64_t i) const {
    kvl::pack<T, N> x;
#pragma unroll
    for (int j = 0; j < N; j++) x.at[j] = kvl::convert<T>(value);
    kvl::store_pack<N>(out + i, x);
  }
};

}  // namespace

KVL_CUDA_KERNEL(fill) {
  const kvl_fill_args *g = (const kvl_fill_args *)args;
  KVL_CUDA_BY_ANY(g->dtype, T, {
    return kvl::each<kvl::WIDE<T>>(fill_body<T>{(T *)g->out, g->value}, g->count,
                                   kvl::aligned16(g->out), queue);
  })
  return KVL_OK;
}
