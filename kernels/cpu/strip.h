/* Rows of codecs that pack numbers beside their scales (page.h), as f32. Rows of other codecs
 * are used where they lie, and nothing here is called for them. A group is a multiple of a
 * vector, and so is a row, so that a vector has one scale. */
#ifndef KVL_CPU_STRIP_H
#define KVL_CPU_STRIP_H

#include "cpu/vec.h"
#include "page.h"

/* Runs `call` with `D` bound to a codec as a constant: KVL_BY_CODEC for every codec that KV
 * memory may have, KVL_BY_PACKED for those that pack numbers. */
#define KVL_BY_PACKED(codec, call, others) \
  switch (codec) {                         \
    case KVL_CODEC_INT8: {                 \
      enum { D = KVL_CODEC_INT8 };         \
      call;                                \
    } break;                               \
    default: others;                       \
  }
#define KVL_BY_CODEC(codec, call) KVL_BY_PACKED(codec, call, KVL_BY_STORED(codec, call))

/* The dtype in which the rows of a codec are read: its own or, of packed ones, f32. */
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

/* Number `i` of a packed strip of `tokens` rows, and a vector of numbers from it on. */
static inline KVL_HOT float scale_packed(const void *strip, int64_t i, const int tokens,
                                         const int dim, const int codec) {
  const int group = kvl__group(codec), groups = (dim + group - 1) / group;
  const void *scales = (const char *)strip + (int64_t)tokens * dim;
  return f32_from_bf16(((const uint16_t *)scales)[i / dim * groups + i % dim / group]);
}
static inline KVL_HOT float f32_load_packed(const void *strip, int64_t i, const int tokens,
                                            const int dim, const int codec) {
  return ((const int8_t *)strip)[i] * scale_packed(strip, i, tokens, dim, codec);
}
static inline KVL_HOT vf vf_load_packed(const void *strip, int64_t i, const int tokens,
                                        const int dim, const int codec) {
  return vf_from_i8((const char *)strip + i) *
         vf_set(scale_packed(strip, i, tokens, dim, codec));
}

/* Numbers of a token's row from `d` on; lanes past `lanes` are 0 or what follows. */
static inline KVL_HOT vf vf_load_row(const struct kvl_strips *of, const char *strip,
                                     int64_t token, int d, int lanes, const int codec) {
  const char *row = strip + token * of->bytes_row;
  if (!kvl__packs(codec)) return vf_load_n(at_const(row, d, codec), lanes, codec);
  const char *scale = strip + of->scales + 2 * (token * of->groups + d / kvl__group(codec));
  return vf_from_i8(row + d) * vf_set(f32_from_bf16(*(const uint16_t *)scale));
}

/* Unpacks a row that begins at `numbers` and whose scales begin at `scales`. */
static inline KVL_HOT void unpack_row(const char *numbers, const char *scales, int dim,
                                      const int codec, float *out) {
  const int group = kvl__group(codec);
  for (int d = 0; d < dim; scales += 2) {
    const vf scale = vf_set(f32_from_bf16(*(const uint16_t *)scales));
    for (const int end = dim - d < group ? dim : d + group; d < end; d += VF)
      vf_store(out, d, vf_from_i8(numbers + d) * scale, KVL_DTYPE_F32);
  }
}

/* Packs a row of f32. A group's scale is its largest magnitude / 127 in bf16, rounded to
 * nearest, and a number is x * (1 / scale), rounded to the nearest whole one. A group with NaN
 * or infinity is NaN as a whole; one whose scale is below 2^-126 has zeros. */
static inline void pack_row(const float *x, int dim, int codec, void *numbers, void *scales) {
  const int group = kvl__group(codec);
  for (int d = 0; d < dim; scales = (char *)scales + 2) {
    const int end = dim - d < group ? dim : d + group;
    float most = 0, other = 0;
    for (int i = d; i < end; i++) {
      most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
      other += x[i] * 0;
    }
    const uint16_t scale = other == 0 ? bf16_from_f32(most / 127) : 0x7FC0;
    const float unit = f32_from_bf16(scale), by = unit >= 0x1p-126f ? 1 / unit : 0;
    memcpy(scales, &scale, 2);
    for (; d < end; d++) ((int8_t *)numbers)[d] = (int8_t)(by > 0 ? rintf(x[d] * by) : 0);
  }
}

#endif
