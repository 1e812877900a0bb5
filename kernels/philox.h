/* Philox4x32-10 in cuRAND's counter layout, and number transforms that give the same bits
 * on the CPU and on a GPU: every product-sum is an explicit fused multiply-add, and log,
 * sin and cos are our own polynomials rather than a library's.
 * Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
 *
 * Word j of block g of a seed: counter (g lo, g hi, 0, 0), key (seed lo, seed hi), that is
 * cuRAND's curand_init(seed, 0, 4 * g) followed by curand4. */
#ifndef KVL_PHILOX_H
#define KVL_PHILOX_H

#include <math.h>
#include <stdint.h>

#include "kernel.h"

#ifdef __CUDA_ARCH__
#define KVL_FMA(a, b, c) __fmaf_rn(a, b, c)
#define KVL_MUL(a, b) __fmul_rn(a, b)
#define KVL_ADD(a, b) __fadd_rn(a, b)
#define KVL_DIV(a, b) __fdiv_rn(a, b)
#define KVL_SQRT(a) __fsqrt_rn(a)
#else /* the CPU build has -ffp-contract=off */
#define KVL_FMA(a, b, c) fmaf(a, b, c)
#define KVL_MUL(a, b) ((a) * (b))
#define KVL_ADD(a, b) ((a) + (b))
#define KVL_DIV(a, b) ((a) / (b))
#define KVL_SQRT(a) sqrtf(a)
#endif

KVL_INLINE void kvl__philox(uint64_t seed, uint64_t block, uint32_t out[4]) {
  uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

/* (0, 1]: cuRAND's curand_uniform. */
KVL_INLINE float kvl__uniform(uint32_t x) {
  return KVL_FMA((float)x, 2.3283064365386963e-10f, 1.1641532182693481e-10f);
}

/* ln(u) for u in (0, 1], normal numbers only: u = m * 2^e, m in [sqrt(1/2), sqrt(2));
 * ln m = 2 atanh((m-1)/(m+1)). Absolute error below 2e-7 * max(1, |ln u|). */
KVL_INLINE float kvl__log(float u) {
  union {
    float f;
    uint32_t i;
  } x;
  x.f = u;
  int32_t e = (int32_t)(x.i >> 23) - 127;
  x.i = (x.i & 0x7FFFFFu) | 0x3F800000u;
  int32_t large = x.f > 1.41421354f; /* no branch, as in kvl__sincos_quarter */
  x.i -= (uint32_t)large << 23;
  e += large;
  float m = x.f;
  float r = KVL_DIV(KVL_ADD(m, -1.0f), KVL_ADD(m, 1.0f)), r2 = KVL_MUL(r, r);
  float p = KVL_FMA(r2, 0.222222222f, 0.285714286f);
  p = KVL_FMA(r2, p, 0.4f);
  p = KVL_FMA(r2, p, 0.666666687f);
  p = KVL_FMA(KVL_MUL(r2, r), p, KVL_MUL(2.0f, r));
  return KVL_FMA((float)e, 0.693147182f, p);
}

/* The number that a race adds to a score s, so that the index with the largest s +
 * kvl__race(u) is drawn with the chance softmax(s): -ln(-ln(1 - u)), Gumbel's distribution,
 * for u of kvl__uniform. Its largest numbers decide. They come from the smallest u, where
 * f32 is most precise; there -ln(1 - u) is u + u^2 / 2 + u^3 / 3 + u^4 / 4. Absolute error
 * below 3e-6. */
#define KVL_RACE_MOST 22.9f /* no larger than this */
KVL_INLINE float kvl__race(float u) {
  float small = KVL_FMA(u, 0.25f, 0.333333343f);
  small = KVL_FMA(u, small, 0.5f);
  small = KVL_FMA(KVL_MUL(u, u), small, u);
  float large = -kvl__log(KVL_ADD(1.0f, -u)); /* 88 for u = 1, never the smallest u */
  return -kvl__log(u < 0.015625f ? small : large);
}

/* sin and cos of x + quarter * pi / 2 for |x| <= pi / 4: Taylor, error below 1e-7. Without
 * branches, so that a compiler can make vectors of it. */
KVL_INLINE void kvl__sincos_quarter(float x, int32_t quarter, float *s, float *c) {
  float x2 = KVL_MUL(x, x);
  float a = KVL_FMA(x2, 2.75573192e-6f, -1.98412698e-4f);
  a = KVL_FMA(x2, a, 8.33333377e-3f);
  a = KVL_FMA(x2, a, -0.166666672f);
  a = KVL_FMA(KVL_MUL(x2, x), a, x);
  float b = KVL_FMA(x2, 2.48015876e-5f, -1.38888892e-3f);
  b = KVL_FMA(x2, b, 4.16666679e-2f);
  b = KVL_FMA(x2, b, -0.5f);
  b = KVL_FMA(x2, b, 1.0f);
  float s0 = quarter & 1 ? b : a, c0 = quarter & 1 ? a : b;
  *s = quarter & 2 ? -s0 : s0;
  *c = (quarter + 1) & 2 ? -c0 : c0;
}

/* sin and cos of 2 pi t for t in (0, 1]. */
KVL_INLINE void kvl__sincos_turn(float t, float *s, float *c) {
  int32_t octant = (int32_t)KVL_MUL(t, 8.0f); /* 0 ... 8 */
  int32_t quarter = (octant + 1) / 2;         /* nearest multiple of 1/4 */
  float x = KVL_MUL(KVL_FMA((float)quarter, -0.25f, t), 6.28318548f); /* |x| <= pi/4 */
  kvl__sincos_quarter(x, quarter, s, c);
}

/* Two standard normals from two words: Box and Muller 1958. */
KVL_INLINE void kvl__normal2(uint32_t x, uint32_t y, float *n0, float *n1) {
  float radius = KVL_SQRT(KVL_MUL(-2.0f, kvl__log(kvl__uniform(x))));
  float s, c;
  kvl__sincos_turn(kvl__uniform(y), &s, &c);
  *n0 = KVL_MUL(radius, s);
  *n1 = KVL_MUL(radius, c);
}

#endif
