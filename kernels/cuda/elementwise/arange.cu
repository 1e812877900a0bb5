/* out[i] = start + i * step, in double, then converted to out's dtype.
 *   out  any  [count]
 * Writes count elements.
 * Limit: write bandwidth; f64 arithmetic where that is slow. */
#include "args/elementwise.h"
#include "cuda/convert.cuh"
#include "cuda/elementwise.cuh"

namespace {

template <class T> struct arange_body {
  T *out;
  double start, step;
  template <int N> __device__ void run(int64_t i) const {
    kvl::pack<T, N> x;
#pragma unroll
    for (int j = 0; j < N; j++) /* two roundings, as on the CPU: no fused multiply-add */
      x.at[j] = kvl::convert<T>(__dadd_rn(start, __dmul_rn((double)(i + j), step)));
    kvl::store_pack<N>(out + i, x);
  }
};

}  // namespace

KVL_CUDA_KERNEL(arange) {
  const kvl_arange_args *g = (const kvl_arange_args *)args;
  KVL_CUDA_BY_ANY(g->dtype, T, {
    return kvl::each<kvl::WIDE<T>>(arange_body<T>{(T *)g->out, g->start, g->step}, g->count,
                                   kvl::aligned16(g->out), queue);
  })
  return KVL_OK;
}
