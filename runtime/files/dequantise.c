/* Turns blocks of quantised numbers into floats, as ggml's reference does: the same products
 * and sums in f32, so the results are equal to the last bit.
 * A block begins with its scale d (and minimum m), in f16; q are small whole numbers.
 *
 *   Q4_0 Q5_0 Q8_0   32 numbers  d * (q - 8), d * (q - 16), d * q
 *   Q4_1 Q5_1        32 numbers  d * q + m
 *   Q4_K            256 numbers  8 groups of 32, each (d * s) * q - (m * t); s and t have 6 bits
 *   Q6_K            256 numbers  16 groups of 16, each d * s * (q - 32); s has 8 bits
 *
 * Source: ggml-quants.c and ggml-common.h of ggml, and gguf-py's quants.py, with which
 * tools/gguf_goldens.py made what the spec compares with. */
#include "cpu/scalar.h"
#include "files/dequantise.h"

enum { BLOCK = 32, SUPER = 256 }; /* numbers of a block, and of one of the K types */

static inline uint16_t u16_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static inline uint32_t u32_at(const uint8_t *p) {
  return u16_at(p) | (uint32_t)u16_at(p + 2) << 16;
}
static inline float half_at(const uint8_t *p) { return f32_from_f16(u16_at(p)); }

/* ---- plain numbers --------------------------------------------------------------------- */

static void unpack_f32(const uint8_t *b, int64_t n, float *out) {
  memcpy(out, b, (size_t)n * sizeof *out);
}

static void unpack_f16(const uint8_t *b, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i++) out[i] = half_at(b + 2 * i);
}

static void unpack_bf16(const uint8_t *b, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i++) out[i] = f32_from_bf16(u16_at(b + 2 * i));
}

/* ---- blocks of 32 ---------------------------------------------------------------------- */

/* The low halves of 16 bytes are numbers 0 to 15, the high halves 16 to 31. */
static void unpack_q4_0(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 18, out += BLOCK) {
    float d = half_at(b);
    for (int i = 0; i < 16; i++) {
      out[i] = (float)((b[2 + i] & 15) - 8) * d;
      out[16 + i] = (float)((b[2 + i] >> 4) - 8) * d;
    }
  }
}

static void unpack_q4_1(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 20, out += BLOCK) {
    float d = half_at(b), m = half_at(b + 2);
    for (int i = 0; i < 16; i++) {
      out[i] = (float)(b[4 + i] & 15) * d + m;
      out[16 + i] = (float)(b[4 + i] >> 4) * d + m;
    }
  }
}

/* Bit i of `high` is the fifth bit of number i. */
static inline void unpack_fives(const uint8_t *q, uint32_t high, int less, float d, float m,
                                float *out) {
  for (int i = 0; i < 16; i++) {
    out[i] = (float)((int)((q[i] & 15u) | (high >> i & 1) << 4) - less) * d + m;
    out[16 + i] = (float)((int)((q[i] >> 4) | (high >> (16 + i) & 1) << 4) - less) * d + m;
  }
}

static void unpack_q5_0(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 22, out += BLOCK)
    unpack_fives(b + 6, u32_at(b + 2), 16, half_at(b), 0, out);
}

static void unpack_q5_1(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 24, out += BLOCK)
    unpack_fives(b + 8, u32_at(b + 4), 0, half_at(b), half_at(b + 2), out);
}

static void unpack_q8_0(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 34, out += BLOCK) {
    float d = half_at(b);
    for (int i = 0; i < BLOCK; i++) out[i] = (float)(int8_t)b[2 + i] * d;
  }
}

/* ---- blocks of 256 --------------------------------------------------------------------- */

/* Twelve bytes hold eight scales and eight minima of 6 bits. The scales of
 * groups 0 to 3 are the low 6 bits of bytes 0 to 3, and their minima those of bytes 4 to 7.
 * Bytes 8 to 11 have the lower 4 bits of the scale and of the minimum of groups 4 to 7. The
 * upper 2 bits are the top bits of bytes 0 to 3 (scales) and 4 to 7 (minima). */
static inline void group_scales(const uint8_t *s, int group, float *scale, float *minimum) {
  int a, b;
  if (group < 4) {
    a = s[group] & 63;
    b = s[group + 4] & 63;
  } else {
    a = (s[group + 4] & 15) | s[group - 4] >> 6 << 4;
    b = s[group + 4] >> 4 | s[group] >> 6 << 4;
  }
  *scale = (float)a;
  *minimum = (float)b;
}

/* d, m, scales[12], q[128]: each 32 bytes of q are one group in the low halves, and the next
 * one in the high halves. */
static void unpack_q4_k(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 144) {
    float d = half_at(b), m = half_at(b + 2);
    const uint8_t *q = b + 16;
    for (int group = 0; group < 8; group++, out += 32) {
      float scale, minimum;
      group_scales(b + 4, group, &scale, &minimum);
      scale *= d;
      minimum *= m;
      int shift = group & 1 ? 4 : 0;
      for (int i = 0; i < 32; i++) out[i] = scale * (float)(q[i] >> shift & 15) - minimum;
      if (shift) q += 32;
    }
  }
}

/* low[128], high[64], scales[16], d. Half of a block is 128 numbers: four rows of 32, whose
 * low 4 bits are in 64 bytes and whose upper 2 bits are in 32 bytes. */
static void unpack_q6_k(const uint8_t *b, int64_t n, float *out) {
  for (; n > 0; n--, b += 210) {
    float d = half_at(b + 208);
    for (int half = 0; half < 2; half++, out += 128) {
      const uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
      const int8_t *scales = (const int8_t *)b + 192 + 8 * half;
      for (int row = 0; row < 4; row++)
        for (int i = 0; i < 32; i++) {
          int q = (low[32 * (row & 1) + i] >> (row & 2 ? 4 : 0) & 15) |
                  (high[i] >> 2 * row & 3) << 4;
          out[32 * row + i] = d * (float)scales[2 * row + i / 16] * (float)(q - 32);
        }
    }
  }
}

/* ---- the table ------------------------------------------------------------------------- */

/* By ggml's numbers. If a type has no unpack, a file with it can still be opened and its
 * other tensors read. */
static const struct kvl__stored types[] = {
    [0] = {"F32", 1, 4, unpack_f32},
    [1] = {"F16", 1, 2, unpack_f16},
    [2] = {"Q4_0", 32, 18, unpack_q4_0},
    [3] = {"Q4_1", 32, 20, unpack_q4_1},
    [6] = {"Q5_0", 32, 22, unpack_q5_0},
    [7] = {"Q5_1", 32, 24, unpack_q5_1},
    [8] = {"Q8_0", 32, 34, unpack_q8_0},
    [9] = {"Q8_1", 32, 36, NULL},
    [10] = {"Q2_K", 256, 84, NULL},
    [11] = {"Q3_K", 256, 110, NULL},
    [12] = {"Q4_K", 256, 144, unpack_q4_k},
    [13] = {"Q5_K", 256, 176, NULL},
    [14] = {"Q6_K", 256, 210, unpack_q6_k},
    [15] = {"Q8_K", 256, 292, NULL},
    [16] = {"IQ2_XXS", 256, 66, NULL},
    [17] = {"IQ2_XS", 256, 74, NULL},
    [18] = {"IQ3_XXS", 256, 98, NULL},
    [19] = {"IQ1_S", 256, 50, NULL},
    [20] = {"IQ4_NL", 32, 18, NULL},
    [21] = {"IQ3_S", 256, 110, NULL},
    [22] = {"IQ2_S", 256, 82, NULL},
    [23] = {"IQ4_XS", 256, 136, NULL},
    [24] = {"I8", 1, 1, NULL},
    [25] = {"I16", 1, 2, NULL},
    [26] = {"I32", 1, 4, NULL},
    [27] = {"I64", 1, 8, NULL},
    [28] = {"F64", 1, 8, NULL},
    [29] = {"IQ1_M", 256, 56, NULL},
    [30] = {"BF16", 1, 2, unpack_bf16},
    [34] = {"TQ1_0", 256, 54, NULL},
    [35] = {"TQ2_0", 256, 66, NULL},
    [39] = {"MXFP4", 32, 17, NULL},
};

void kvl__round_floats(const float *x, int64_t n, int dtype, uint16_t *out) {
  if (dtype == KVL_DTYPE_F16)
    for (int64_t i = 0; i < n; i++) out[i] = f16_from_f32(x[i]);
  else
    for (int64_t i = 0; i < n; i++) out[i] = bf16_from_f32(x[i]);
}

const struct kvl__stored *kvl__stored_type(uint32_t type) {
  return type < sizeof types / sizeof types[0] && types[type].name ? &types[type] : NULL;
}
