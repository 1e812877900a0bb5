/* Rotating pairs, for rope and rope_append. The angle is the f32 product, as on a GPU; whole
 * turns are taken off in double, so that position 10^6 is as accurate as position 1. */
#ifndef KVL_CPU_ROPE_H
#define KVL_CPU_ROPE_H

#include "cpu/lanes.h"
#include "cpu/split.h"
#include "philox.h"

enum { STRIP = 128 };

/* sin and cos of n <= STRIP angles. */
static inline void sincos_strip(float position, const float *inv_freq, int n, float *s,
                                float *c) {
  const double round = 0x1.8p52; /* adding and subtracting it rounds to whole numbers */
  for (int i = 0; i < n; i++) {
    double turns = (double)(position * inv_freq[i]) * 0.15915494309189535;
    turns -= (turns + round) - round;             /* [-1/2, 1/2] */
    double quarter = (turns * 4 + round) - round; /* -2 ... 2 */
    float x = (float)((turns - quarter * 0.25) * 6.283185307179586);
    kvl__sincos_quarter(x, (int32_t)quarter, &s[i], &c[i]);
  }
}

static inline KVL_HOT void rotate(void *low, void *high, int n, const float *s,
                                  const float *c, const int dtype) {
  for (int i = 0; i < n; i += VF) {
    int left = vf_left(i, n);
    vf x = vf_load_n(at(low, i, dtype), left, dtype);
    vf y = vf_load_n(at(high, i, dtype), left, dtype);
    vf sin = vf_load(s, i, KVL_DTYPE_F32), cos = vf_load(c, i, KVL_DTYPE_F32);
    vf_store_n(at(low, i, dtype), x * cos - y * sin, left, dtype);
    vf_store_n(at(high, i, dtype), y * cos + x * sin, left, dtype);
  }
}

#endif
