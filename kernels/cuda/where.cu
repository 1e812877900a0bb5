/* out = cond ? a : b. Only bits are moved, so any dtype of the same size works.
 *   cond       u8   [count]   true when not 0
 *   a, b, out  any  [count]   elements of 1, 2, 4 or 8 bytes
 * Each result costs 1 byte of cond, 2 elements read and 1 written: a and b are both read, so
 * that loads stay wide.
 * Limit: memory bandwidth. */
#include "elementwise.cuh"

namespace {

template <class T> struct where_body {
  const uint8_t *cond;
  const T *a, *b;
  T *out;
  template <int N> __device__ void run(int64_t i) const {
    kvl::pack<uint8_t, N> c = kvl::load_pack<N>(cond + i);
    kvl::pack<T, N> x = kvl::load_pack<N>(a + i), y = kvl::load_pack<N>(b + i);
#pragma unroll
    for (int j = 0; j < N; j++) x.at[j] = c.at[j] ? x.at[j] : y.at[j];
    kvl::store_pack<N>(out + i, x);
  }
};

}  // namespace

KVL_CUDA_KERNEL(where) {
  const kvl_where_args *g = (const kvl_where_args *)args;
  if (g->bytes_element > 8) return KVL_ERR_UNSUPPORTED;
  KVL_CUDA_BY_BYTES(g->bytes_element, T, {
    where_body<T> f{g->cond, (const T *)g->a, (const T *)g->b, (T *)g->out};
    return kvl::each<kvl::WIDE<T>>(f, g->count, kvl::aligned16(g->cond, g->a, g->b, g->out),
                                   queue);
  })
  return KVL_OK;
}
