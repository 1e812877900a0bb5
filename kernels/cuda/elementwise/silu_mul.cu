/* out = gate / (1 + exp(-gate)) * up, computed in fp32.
 *   gate, up, out  f32 f16 bf16  [count]; out may be one of the inputs
 *
 * Bytes   3 * count * element
 * Limit   memory bandwidth
 * Best    bf16 [4096, 14336]: 112 us, 1.02 of the run's read bandwidth (the last writes are
 *         still in L2); with an IEEE division 130 us. f32 227 us, 1.01
 *         (H100 80GB HBM3, 2026-11-21) */
#include "args/elementwise.h"
#include "cuda/elementwise.cuh"
#include "cuda/elementwise/silu.cuh"

namespace {

template <class T> struct silu_mul_body {
  const T *gate, *up;
  T *out;
  template <int N> __device__ void run(int64_t i) const {
    float x[N], y[N];
    kvl::load_floats<N>(gate + i, x);
    kvl::load_floats<N>(up + i, y);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = kvl::silu<T>(x[j]) * y[j];
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
