/* What kernels/cuda/select/score_mma.cuh and kernels/cuda/strip.cuh use of mma.cuh and of what
 * that includes, on the CPU, for cuda_emulation.h. Copies into shared memory happen at once. */
#define KVL_CUDA_MMA_CUH
#define KVL_CUDA_CONVERT_CUH

#define KVL_HAS_INTS
#include "base.h"

struct __half {
  unsigned short bits;
  __half() = default;
  __half(float x) : bits(to_f16(x)) {}
};
struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) { /* to nearest even */
    const unsigned i = __float_as_uint(x);
    bits = x != x ? 0x7FFF : (unsigned short)((i + 0x7FFF + (i >> 16 & 1)) >> 16);
  }
};
struct uint2 {
  unsigned x, y;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline int max(int a, int b) { return a > b ? a : b; }

namespace kvl {

typedef unsigned uint32_t;
typedef unsigned short uint16_t;
constexpr int WARP = 32;
struct f8e4m3 {
  unsigned char bits;
};
template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) pack {
  T at[N];
};

static inline float to_float(float x) { return x; }
static inline float to_float(__half x) { return from_f16(x.bits); }
static inline float to_float(__nv_bfloat16 x) { return __uint_as_float(x.bits << 16); }
static inline float to_float(f8e4m3 x) {
  const int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  float y = ldexpf(exponent ? 8 + mantissa : 2 * mantissa, (exponent ? exponent : 0) - 10);
  if ((x.bits & 0x7F) == 0x7F) y = NAN;
  return x.bits & 0x80 ? -y : y;
}
template <class T> static inline T from_float(float x) { return T(x); }
static inline float __bfloat162float(__nv_bfloat16 x) { return to_float(x); }
template <int N, class T> static inline pack<T, N> load_pack(const T *p) {
  pack<T, N> x;
  memcpy(&x, p, sizeof x);
  return x;
}
template <int N, class T> static inline void store_pack(T *p, const pack<T, N> &x) {
  memcpy(p, &x, sizeof x);
}
template <int N> static inline void load_floats(const float *p, float (&x)[N]) {
  memcpy(x, p, sizeof x);
}
template <int LANES> static inline float warp_max(float x) {
  for (int step = LANES / 2; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}

/* Addresses of shared memory are offsets from where the kernel's begins. */
static inline unsigned shared_address(const void *p) {
  return (unsigned)((const char *)p - emulated_shared);
}
static inline void copy_async(unsigned to, const void *from, bool valid) {
  if (valid) memcpy(emulated_shared + to, from, 16);
  else memset(emulated_shared + to, 0, 16);
}
static inline void copy_commit() {}
template <int N> static inline void copy_wait() {}

template <class T> static inline unsigned pack2(float low, float high, T) {
  return T(low).bits | (unsigned)T(high).bits << 16;
}
static inline uint2 halves_of(unsigned x) {
  float y[4];
  for (int i = 0; i < 4; i++) y[i] = to_float(f8e4m3{(unsigned char)(x >> 8 * i)});
  return {pack2(y[0], y[1], __half()), pack2(y[2], y[3], __half())};
}
static inline uint2 next_term(float (&x)[4]) {
  typedef __nv_bfloat16 T;
  const uint2 term = {pack2(x[0], x[1], T()), pack2(x[2], x[3], T())};
  x[0] -= __uint_as_float(term.x << 16), x[1] -= __uint_as_float(term.x & 0xFFFF0000u);
  x[2] -= __uint_as_float(term.y << 16), x[3] -= __uint_as_float(term.y & 0xFFFF0000u);
  return term;
}

/* c[16 x 8] += a[16 x 16] b[16 x 8], as the lanes of a warp hold them: PTX's m16n8k16. */
template <class T>
static inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, T) {
  struct fragment {
    unsigned a[4], b[2];
  };
  static fragment all[2][EMULATED_MOST];
  emulated_thread *t = &emulated.thread[emulated.now];
  fragment *box = all[t->exchanges++ & 1];
  box[emulated.now] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulated_wait(AT_WARP);
  const int lane = emulated.now % 32;
  const fragment *of = box + (emulated.now - lane);
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 4; k++) {
      const fragment &row = of[lane / 4 * 4 + k],
                     &column = of[(lane % 4 * 2 + i % 2) * 4 + k];
      for (int half = 0; half < 2; half++)
        for (int e = 0; e < 2; e++) {
          T x, y;
          x.bits = (unsigned short)(row.a[i / 2 + 2 * half] >> 16 * e);
          y.bits = (unsigned short)(column.b[half] >> 16 * e);
          c[i] += to_float(x) * to_float(y);
        }
    }
}

}  // namespace kvl
