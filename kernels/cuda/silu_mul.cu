/* out = gate / (1 + exp(-gate)) * up, computed in fp32.
 *   gate, up, out  f32 f16 bf16  [count]; out may be one of the inputs
 * Reads 2 and writes 1 element a number.
 * Limit: memory bandwidth. */
#include "elementwise.cuh"

namespace {

template <class T> struct silu_mul_body {
  const T *gate, *up;
  T *out;
  template <int N> __device__ void run(int64_t i) const {
    float x[N], y[N];
    kvl::load_floats<N>(gate + i, x);
    kvl::load_floats<N>(up + i, y);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = x[j] / (1.0f + expf(-x[j])) * y[j];
    kvl::store_floats<N>(out + i, x);
  }
};

}  // namespace

KVL_CUDA_KERNEL(silu_mul) {
  const kvl_silu_mul_args *g = (const kvl_silu_mul_args *)args;
  KVL_CUDA_BY_FLOAT(g->dtype, T, {
    silu_mul_body<T> f{(const T *)g->gate, (const T *)g->up, (T *)g->out};
    return kvl::each<kvl::WIDE<T>>(f, g->count, kvl::aligned16(g->gate, g->up, g->out),
                                   queue);
  })
  return KVL_OK;
}
