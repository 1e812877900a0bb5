/* out = a converted to out's dtype, by the rules of kvl::convert.
 *   a, out  any pair of f32 f16 bf16 i32 i64 u8, and f32/f16/bf16 <-> f8e4m3  [count]
 * Reads and writes count elements.
 * Limit: memory bandwidth. */
#include "args/elementwise.h"
#include "cuda/convert.cuh"
#include "cuda/elementwise.cuh"

namespace {

template <class To, class From> struct cast_body {
  const From *a;
  To *out;
  template <int N> __device__ void run(int64_t i) const {
    kvl::pack<From, N> x = kvl::load_pack<N>(a + i);
    kvl::pack<To, N> y;
#pragma unroll
    for (int j = 0; j < N; j++) y.at[j] = kvl::convert<To>(x.at[j]);
    kvl::store_pack<N>(out + i, y);
  }
};

template <class To, class From> int cast(const kvl_cast_args *g, void *queue) {
  /* 16 bytes of the wider type, so that a pack of the narrower one has at least 2 bytes */
  constexpr int n = kvl::WIDE<To> < kvl::WIDE<From> ? kvl::WIDE<To> : kvl::WIDE<From>;
  return kvl::each<n>(cast_body<To, From>{(const From *)g->a, (To *)g->out}, g->count,
                      kvl::aligned16(g->a, g->out), queue);
}

template <class From> int cast_from(const kvl_cast_args *g, void *queue) {
  if constexpr (!kvl::same<From, kvl::f8e4m3>)
    KVL_CUDA_BY_NUMBER(g->to, T, return cast<T, From>(g, queue);)
  else KVL_CUDA_BY_FLOAT(g->to, T, return cast<T, From>(g, queue);)
  return KVL_OK;
}

}  // namespace

KVL_CUDA_KERNEL(cast) {
  const kvl_cast_args *g = (const kvl_cast_args *)args;
  if (g->from == KVL_DTYPE_F8E4M3) return cast_from<kvl::f8e4m3>(g, queue);
  if (g->to == KVL_DTYPE_F8E4M3)
    KVL_CUDA_BY_FLOAT(g->from, T, return cast<kvl::f8e4m3, T>(g, queue);)
  KVL_CUDA_BY_NUMBER(g->from, T, return cast_from<T>(g, queue);)
  return KVL_OK;
}
