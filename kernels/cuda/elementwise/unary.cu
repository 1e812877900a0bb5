/* out = op(a), computed in fp32.
 *   a, out  f32 f16 bf16  [count]; out may be a
 * Reads and writes count elements.
 * Limit: memory bandwidth; the functions are the accurate ones (1-2 ulp). */
#include "args/elementwise.h"
#include "cuda/elementwise.cuh"

namespace {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float apply(int op, float x) {
  switch (op) { /* ORDER kvl_unary_op */
    case KVL_UNARY_NEG: return -x;
    case KVL_UNARY_ABS: return fabsf(x);
    case KVL_UNARY_EXP: return expf(x);
    case KVL_UNARY_LOG: return logf(x);
    case KVL_UNARY_SQRT: return sqrtf(x);
    case KVL_UNARY_RSQRT: return 1.0f / sqrtf(x);
    case KVL_UNARY_SIGMOID: return sigmoid(x);
    case KVL_UNARY_SILU: return x * sigmoid(x);
    case KVL_UNARY_TANH: return tanhf(x);
    case KVL_UNARY_FLOOR: return floorf(x);
    default: return x <= 0 ? 0.0f : x; /* relu; NaN stays */
  }
}

template <class T> struct unary_body {
  const T *a;
  T *out;
  int op;
  template <int N> __device__ void run(int64_t i) const {
    float x[N];
    kvl::load_floats<N>(a + i, x);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = apply(op, x[j]);
    kvl::store_floats<N>(out + i, x);
  }
};

}  // namespace

KVL_CUDA_KERNEL(unary) {
  const kvl_unary_args *g = (const kvl_unary_args *)args;
  KVL_CUDA_BY_FLOAT(g->dtype, T, {
    return kvl::each<kvl::WIDE<T>>(unary_body<T>{(const T *)g->a, (T *)g->out, g->op},
                                   g->count, kvl::aligned16(g->a, g->out), queue);
  })
  return KVL_OK;
}
