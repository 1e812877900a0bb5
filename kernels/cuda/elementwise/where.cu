/* out = cond ? a : b, where a number may take the place of a, of b, or of both.
 *   cond       u8   [count]   true when not 0
 *   a, b, out  any  [count]
 * Each result costs 1 byte of cond, 2 elements read and 1 written: a and b are both read, so
 * that loads stay wide. A number costs nothing.
 * Limit: memory bandwidth. */
#include "args/elementwise.h"
#include "cuda/convert.cuh"
#include "cuda/elementwise.cuh"

namespace {

template <class T> struct where_body {
  const uint8_t *cond;
  const T *a, *b; /* NULL: the number */
  T *out;
  double a_value, b_value;

  template <int N>
  static __device__ __forceinline__ kvl::pack<T, N> load(const T *p, int64_t i,
                                                         double value) {
    if (p) return kvl::load_pack<N>(p + i);
    const T one = kvl::convert<T>(value);
    kvl::pack<T, N> x;
#pragma unroll
    for (int j = 0; j < N; j++) x.at[j] = one;
    return x;
  }
  template <int N> __device__ void run(int64_t i) const {
    kvl::pack<uint8_t, N> c = kvl::load_pack<N>(cond + i);
    kvl::pack<T, N> x = load<N>(a, i, a_value), y = load<N>(b, i, b_value);
#pragma unroll
    for (int j = 0; j < N; j++) x.at[j] = c.at[j] ? x.at[j] : y.at[j];
    kvl::store_pack<N>(out + i, x);
  }
};

}  // namespace

KVL_CUDA_KERNEL(where) {
  const kvl_where_args *g = (const kvl_where_args *)args;
  KVL_CUDA_BY_ANY(g->dtype, T, {
    where_body<T> f{g->cond,     (const T *)g->a, (const T *)g->b,
                    (T *)g->out, g->a_value,      g->b_value};
    return kvl::each<kvl::WIDE<T>>(f, g->count, kvl::aligned16(g->cond, g->a, g->b, g->out),
                                   queue);
  })
  return KVL_OK;
}
