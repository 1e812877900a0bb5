/* Rotate the pairs (i, i + pairs) of every head by positions[t] * inv_freq[i], in place:
 * the half-split form of Hugging Face; dims past 2 * pairs stay as they are.
 *   x          f32 f16 bf16  [tokens, heads, head_dim]
 *   positions  i32           [tokens]
 *   inv_freq   f32           [pairs]
 * The angle is the f32 product, as on a GPU; whole turns are taken off in double, so that
 * position 10^6 is as accurate as position 1. A token's sines and cosines are computed
 * once for all its heads.
 * Limit: read plus write bandwidth. Source: Su et al. 2021, arXiv:2104.09864. */
#include "cpu/lanes.h"
#include "cpu/split.h"
#include "philox.h"

enum { STRIP = 128 };

/* sin and cos of n <= STRIP angles. */
static void sincos_strip(float position, const float *inv_freq, int n, float *s, float *c) {
  const double round = 0x1.8p52;   /* adding and taking it away rounds to whole numbers */
  for (int i = 0; i < n; i++) {
    double turns = (double)(position * inv_freq[i]) * 0.15915494309189535;
    turns -= (turns + round) - round;                       /* [-1/2, 1/2] */
    double quarter = (turns * 4 + round) - round;           /* -2 ... 2 */
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

static inline KVL_HOT void tokens(const struct kvl_rope_args *a, int64_t begin, int64_t end,
                                  const int dtype) {
  float s[STRIP], c[STRIP];
  for (int64_t t = begin; t < end; t++)
    for (int64_t i = 0; i < a->pairs; i += STRIP) {
      int n = (int)i64_min(STRIP, a->pairs - i);
      sincos_strip((float)a->positions[t], a->inv_freq + i, n, s, c);
      for (int64_t h = 0; h < a->heads; h++) {
        int64_t first = (t * a->heads + h) * a->head_dim + i;
        rotate(at(a->x, first, dtype), at(a->x, first + a->pairs, dtype), n, s, c, dtype);
      }
    }
}

static int rope_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_rope_args *a = args;
  KVL_BY_FLOAT(a->dtype, tokens(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(rope) {
  const struct kvl_rope_args *a = args;
  return kvl__split(a->tokens, kvl__grain_rows(a->heads * a->pairs * 2), rope_piece, a);
}
