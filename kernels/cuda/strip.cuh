/* Numbers of KV memory as its codec stores them: C is the type of an element. If a codec
 * packs numbers beside their scales (page.h), an element is a number without its scale. */
#ifndef KVL_CUDA_STRIP_CUH
#define KVL_CUDA_STRIP_CUH

#include "cuda/convert.cuh"
#include "page.h"

namespace kvl {

struct int8 {
  int8_t bits;
};
__device__ __forceinline__ float to_float(int8 x) { return (float)x.bits; }

/* Rows of f8_latent: the first numbers in 8 bits, those behind them in bf16. */
struct f8_latent {
  f8e4m3 bits;
};

template <class C> constexpr bool packs = same<C, int8> || same<C, f8_latent>;
constexpr int PACKED_GROUP = 64; /* of int8 */

/* The type of the numbers that are read: C itself, or float of packed ones. */
template <class C> struct read_type { using type = C; };
template <> struct read_type<int8> { using type = float; };
template <> struct read_type<f8_latent> { using type = float; };

/* The scale of a row's numbers from `dim` on; the row's scales begin at `scales`. */
__device__ __forceinline__ float scale_at(const char *scales, int dim) {
  return __bfloat162float(((const __nv_bfloat16 *)scales)[dim / PACKED_GROUP]);
}

/* The scale of numbers of a packed row, from `dim` on. */
__device__ __forceinline__ float scale_of(const kvl_strips &of, const char *strip,
                                          int64_t token, int dim) {
  return scale_at(strip + of.scales + 2 * token * of.groups, dim);
}

/* N numbers of a row of f8_latent from `dim` on. */
template <int N>
__device__ __forceinline__ void load_latent(const kvl_strips &of, const char *row, int dim,
                                            float (&x)[N]) {
  if (dim < of.packed) {
    const float scale = *(const float *)(row + kvl__scale_in_row(&of, dim));
    load_floats((const f8e4m3 *)row + dim, x);
#pragma unroll
    for (int e = 0; e < N; e++) x[e] *= scale;
  } else {
    load_floats((const __nv_bfloat16 *)(row + kvl__rest_in_row(&of, dim)), x);
  }
}

/* N numbers of a token's row from `dim` on, which is a multiple of N. */
template <class C, int N>
__device__ __forceinline__ pack<typename read_type<C>::type, N> load_row(const kvl_strips &of,
                                                                         const char *strip,
                                                                         int64_t token,
                                                                         int dim) {
  if constexpr (same<C, f8_latent>) {
    pack<float, N> x;
    load_latent(of, strip + token * of.bytes_row, dim, x.at);
    return x;
  } else {
    const pack<C, N> raw = load_pack<N>((const C *)(strip + token * of.bytes_row) + dim);
    if constexpr (packs<C>) {
      const float scale = scale_of(of, strip, token, dim);
      pack<float, N> x;
#pragma unroll
      for (int e = 0; e < N; e++) x.at[e] = to_float(raw.at[e]) * scale;
      return x;
    } else {
      return raw;
    }
  }
}

#define KVL__ONE(...) +1
static_assert(0 KVL_CODECS(KVL__ONE) == 6,
              "with_codec and KVL_CUDA_BY_CODEC know six codecs");

/* The result of f with the element type of a codec, element<C>. Codecs whose numbers are
 * floats of 16 or 32 bits all have the element type Own. */
template <class C_> struct element { using C = C_; };
template <class Own, class F> auto with_codec(int codec, F f) {
  if (codec == KVL_CODEC_F8E4M3) return f(element<f8e4m3>());
  if (codec == KVL_CODEC_INT8) return f(element<int8>());
  return f(element<Own>());
}
/* The same for ops that also know values which are the first numbers of their keys. */
template <class Own, class F> auto with_any_codec(int codec, F f) {
  if (codec == KVL_CODEC_F8_LATENT) return f(element<f8_latent>());
  return with_codec<Own>(codec, f);
}

}  // namespace kvl

/* Runs the code with C the element type of a codec. */
#define KVL_CUDA_BY_CODEC(codec, C, ...)              \
  switch (codec) {                                    \
    case KVL_CODEC_F8E4M3: {                          \
      using C = kvl::f8e4m3;                          \
      __VA_ARGS__                                     \
    } break;                                          \
    case KVL_CODEC_INT8: {                            \
      using C = kvl::int8;                            \
      __VA_ARGS__                                     \
    } break;                                          \
    default: KVL_CUDA_BY_FLOAT(codec, C, __VA_ARGS__) \
  }

#endif
