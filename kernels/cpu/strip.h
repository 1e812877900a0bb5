/* Rows of codecs that pack numbers beside their scales (page.h), as f32. Rows of other codecs
 * are used where they lie, and nothing here is called for them. A group is a multiple of a
 * vector, and so is a row, so that a vector has one scale. */
#ifndef KVL_CPU_STRIP_H
#define KVL_CPU_STRIP_H

#include "cpu/lanes.h"
#include "page.h"

/* Runs `call` with `D` bound to a codec as a constant: KVL_BY_CODEC for every codec that KV
 * memory may have, KVL_BY_PACKED for those that pack numbers. */
#define KVL_BY_PACKED(codec, call, others) \
  switch (codec) {                         \
    case KVL_CODEC_INT8: {                 \
      enum { D = KVL_CODEC_INT8 };         \
      call;                                \
    } break;                               \
    case KVL_CODEC_F8_LATENT: {            \
      enum { D = KVL_CODEC_F8_LATENT };    \
      call;                                \
    } break;                               \
    default: others;                       \
  }
#define KVL_BY_CODEC(codec, call) KVL_BY_PACKED(codec, call, KVL_BY_STORED(codec, call))

/* The dtype in which the rows of a codec are read: its own or, for packed numbers, f32. */
static inline KVL_HOT int rows_dtype(const int codec) {
  return kvl__packs(codec) ? KVL_DTYPE_F32 : codec;
}

static inline KVL_HOT vf vf_from_i8(const void *p) {
#if defined(KVL_ISA_AVX512)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
#elif defined(KVL_ISA_AVX2)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
#else
  const int8_t *x = p;
  return (vf){x[0], x[1], x[2], x[3]};
#endif
}

/* For a packed row, whose scales begin at `scales` if they lie behind all rows: how many of
 * its numbers have scales; the scale of number d; a vector of numbers before scaling. */
static inline KVL_HOT int scaled_numbers(const struct kvl_strips *of, const int codec) {
  return kvl__is_whole(codec) || of->dim < of->packed ? of->dim : of->packed;
}
static inline KVL_HOT float scale_of(const struct kvl_strips *of, const char *row,
                                     const char *scales, int d, const int codec) {
  if (kvl__is_whole(codec))
    return f32_from_bf16(((const uint16_t *)scales)[d / kvl__group(codec)]);
  return *(const float *)(row + kvl__scale_in_row(of, d));
}
static inline KVL_HOT vf vf_from_8_bits(const char *p, const int codec) {
  return kvl__is_whole(codec) ? vf_from_i8(p) : vf_load(p, 0, KVL_DTYPE_F8E4M3);
}

/* A vector of a packed row, from number d on, and one number. */
static inline KVL_HOT vf vf_load_numbers(const struct kvl_strips *of, const char *row,
                                         const char *scales, int d, int lanes,
                                         const int codec) {
  if (kvl__is_latent(codec) && d >= of->packed)
    return vf_load_n(row + kvl__rest_in_row(of, d), lanes, KVL_DTYPE_BF16);
  return vf_from_8_bits(row + d, codec) * vf_set(scale_of(of, row, scales, d, codec));
}
static inline KVL_HOT float f32_load_number(const struct kvl_strips *of, const char *row,
                                            const char *scales, int d, const int codec) {
  if (kvl__is_latent(codec) && d >= of->packed)
    return f32_load(row + kvl__rest_in_row(of, d), 0, KVL_DTYPE_BF16);
  const float x = kvl__is_whole(codec) ? (float)((const int8_t *)row)[d]
                                       : f32_load(row, d, KVL_DTYPE_F8E4M3);
  return x * scale_of(of, row, scales, d, codec);
}

/* The scales of a token's row. */
static inline const char *scales_of(const struct kvl_strips *of, const char *strip,
                                    int64_t token) {
  return strip + of->scales + 2 * token * of->groups;
}

/* Number `i` of a packed strip, and a vector of numbers from `i` on, for kernels that are
 * printed from expressions. values: the length of a value. */
static inline KVL_HOT kvl_strips strips_of(int tokens, int dim, int values, const int codec) {
  const kvl_format f = {.codec = codec, .block_size = tokens, .value_dim = values};
  return kvl__strips_of(&f, dim, 0);
}
static inline KVL_HOT float f32_load_packed(const void *strip, int64_t i, const int tokens,
                                            const int dim, const int values,
                                            const int codec) {
  const kvl_strips of = strips_of(tokens, dim, values, codec);
  return f32_load_number(&of, (const char *)strip + i / dim * of.bytes_row,
                         scales_of(&of, strip, i / dim), (int)(i % dim), codec);
}
static inline KVL_HOT vf vf_load_packed(const void *strip, int64_t i, const int tokens,
                                        const int dim, const int values, const int codec) {
  const kvl_strips of = strips_of(tokens, dim, values, codec);
  return vf_load_numbers(&of, (const char *)strip + i / dim * of.bytes_row,
                         scales_of(&of, strip, i / dim), (int)(i % dim), VF, codec);
}

/* Numbers of a token's row from `d` on; lanes past `lanes` are 0 or what follows. */
static inline KVL_HOT vf vf_load_row(const struct kvl_strips *of, const char *strip,
                                     int64_t token, int d, int lanes, const int codec) {
  const char *row = strip + token * of->bytes_row;
  if (!kvl__packs(codec)) return vf_load_n(at_const(row, d, codec), lanes, codec);
  return vf_load_numbers(of, row, scales_of(of, strip, token), d, lanes, codec);
}

/* Unpacks a row. */
static inline KVL_HOT void unpack_row(const struct kvl_strips *of, const char *row,
                                      const char *scales, const int codec, float *out) {
  const int group = kvl__group(codec), scaled = scaled_numbers(of, codec);
  int d = 0;
  while (d < scaled) {
    const vf scale = vf_set(scale_of(of, row, scales, d, codec));
    for (const int end = scaled - d < group ? scaled : d + group; d < end; d += VF)
      vf_store(out, d, vf_from_8_bits(row + d, codec) * scale, KVL_DTYPE_F32);
  }
  for (; d < of->dim; d += VF)
    vf_store(out, d, vf_load_numbers(of, row, scales, d, vf_left(d, of->dim), codec),
             KVL_DTYPE_F32);
}

/* The scale of a group of numbers: their largest magnitude divided by `most`, or NaN if one of
 * them is NaN or infinite. */
static inline KVL_HOT float group_scale(const float *x, int n, float most) {
  vf largest = {0}, other = {0};
  for (int d = 0; d < n; d += VF) {
    const vf v = vf_load_n(x + d, vf_left(d, n), KVL_DTYPE_F32);
    largest = vf_max(largest, vf_abs(v));
    other += v * 0.0f;
  }
  return vf_sum(other) == 0 ? vf_hmax(largest) / most : NAN;
}

/* Packs a row of f32. For int8, a group's scale is its largest magnitude / 127 in bf16,
 * rounded to nearest, and x is stored as x * (1 / scale), rounded to the nearest whole
 * number. For f8_latent, the scale is the largest magnitude / 448 in f32, and x is stored
 * as x * (1 / scale) in f8e4m3. A group with NaN or infinity is NaN as a whole; a group
 * whose scale is below 2^-126 is stored as zeros. */
static inline KVL_HOT void pack_row(const struct kvl_strips *of, const float *x, int codec,
                                    char *row, char *scales) {
  const int group = kvl__group(codec), scaled = scaled_numbers(of, codec);
  const int is_whole = kvl__is_whole(codec);
  for (int d = 0; d < scaled;) {
    const int begin = d, end = scaled - d < group ? scaled : d + group;
    float scale = group_scale(x + d, end - d, is_whole ? 127 : 448);
    if (is_whole) {
      const uint16_t stored = bf16_from_f32(scale);
      ((uint16_t *)scales)[begin / group] = stored, scale = f32_from_bf16(stored);
    } else {
      memcpy(row + kvl__scale_in_row(of, begin), &scale, 4);
    }
    const float by = scale >= 0x1p-126f ? 1 / scale : 0;
    for (; d < end; d += VF) {
      const int left = vf_left(d, end);
      const vf v = vf_load_n(x + d, left, KVL_DTYPE_F32), y = by > 0 ? v * by : (vf){0};
      /* 1.5 * 2^23 has no bits below 1: adding it rounds y */
      vi_store_bytes(row + d, is_whole ? (vi)(y + 0x1.8p23f) : vf_to_f8(y), left);
    }
    d = end;
  }
  for (int d = scaled; d < of->dim; d++)
    f32_store(row + kvl__rest_in_row(of, d), 0, x[d], KVL_DTYPE_BF16);
}

#endif
