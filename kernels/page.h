/* How a page of KV memory is laid out. Only this file knows it: C, CUDA and the kernels
 * that are printed from expressions find rows through it.
 *
 * A page holds the keys and values of one block in one layer, as strips: one with the keys of
 * each KV head, then one with the values of each. A strip has a row of numbers for every
 * token, and pages of int8 have the scales of each behind all rows. In a shared page a value
 * is the first numbers of its key, so there are no strips of values. A row of f8_latent has
 * the value in 8 bits, then its scales, then the other numbers of the key in bf16. Code
 * that moves a page as a whole sees only bytes. base.h declares the structs. */
#ifndef KVL_PAGE_H
#define KVL_PAGE_H

#include "base.h"

/* The codecs: X(number in base.h, name, kind, bits of a number, group). A group is how many
 * neighbours in a row share a scale that multiplies them; 0: numbers have no scales. Kinds:
 *   FLOATS  numbers like those of a dtype
 *   WHOLE   packed, whole numbers; the bf16 scales lie behind all rows of a strip
 *   LATENT  a value packed in f8e4m3, f32 scales, then the other numbers of the key in bf16
 * What is packed has 8 bits. */
#define KVL_CODECS(X)               \
  X(F32, "f32", FLOATS, 32, 0)      \
  X(F16, "f16", FLOATS, 16, 0)      \
  X(BF16, "bf16", FLOATS, 16, 0)    \
  X(F8E4M3, "f8e4m3", FLOATS, 8, 0) \
  X(INT8, "int8", WHOLE, 8, 64)     \
  X(F8_LATENT, "f8_latent", LATENT, 8, 128)

enum { KVL__FLOATS = 1, KVL__WHOLE, KVL__LATENT }; /* 0: no codec */
#define KVL__KIND_OF(number, name, kind, bits, group) \
  +(codec == KVL_CODEC_##number) * KVL__##kind
#define KVL__BITS_OF(number, name, kind, bits, group) +(codec == KVL_CODEC_##number) * bits
#define KVL__GROUP_OF(number, name, kind, bits, group) +(codec == KVL_CODEC_##number) * group
KVL_INLINE int kvl__kind(int codec) { return KVL_CODECS(KVL__KIND_OF); }
KVL_INLINE int kvl__bits(int codec) { return KVL_CODECS(KVL__BITS_OF); }
KVL_INLINE int kvl__group(int codec) { return KVL_CODECS(KVL__GROUP_OF); }
KVL_INLINE int kvl__packs(int codec) { return kvl__group(codec) > 0; }
KVL_INLINE int kvl__is_whole(int codec) { return kvl__kind(codec) == KVL__WHOLE; }
KVL_INLINE int kvl__is_latent(int codec) { return kvl__kind(codec) == KVL__LATENT; }

/* Within a row of f8_latent: bytes to the scale (f32) of the number `dim` of a value, and to
 * the number `dim` of a key behind the value (bf16). Scales take a multiple of 16 bytes. */
KVL_INLINE int32_t kvl__scale_in_row(const kvl_strips *of, int32_t dim) {
  return of->packed + dim / 128 * 4;
}
KVL_INLINE int32_t kvl__rest_in_row(const kvl_strips *of, int32_t dim) {
  return of->packed + (of->packed + 511) / 512 * 16 + (dim - of->packed) * 2;
}

/* The strips of one format whose rows have `dim` numbers, from `begin` on. */
KVL_INLINE kvl_strips kvl__strips_of(const kvl_format *f, int32_t dim, int64_t begin) {
  const int bits = kvl__bits(f->codec), group = kvl__group(f->codec);
  kvl_strips s = {0};
  s.begin = begin, s.dim = dim, s.bytes_row = dim * bits / 8;
  if (kvl__is_latent(f->codec)) {
    s.packed = f->value_dim;
    s.bytes_row = kvl__rest_in_row(&s, dim);
  }
  s.bytes = (int64_t)f->block_size * s.bytes_row;
  if (!kvl__is_whole(f->codec)) return s;
  s.scales = (int32_t)s.bytes, s.groups = (dim + group - 1) / group;
  s.bytes += (int64_t)f->block_size * s.groups * 2;
  return s;
}

/* The layout of a format's pages; memory, blocks, pinned and the scales stay empty. */
KVL_INLINE struct kvl_pages kvl__pages(const kvl_format *f) {
  struct kvl_pages p = {0};
  p.kv_heads = f->kv_heads, p.block_size = f->block_size, p.codec = f->codec;
  p.key = kvl__strips_of(f, f->key_dim, 0);
  p.bytes_page = f->kv_heads * p.key.bytes;
  p.value = p.key, p.value.dim = f->value_dim;
  if (f->is_shared) return p;
  p.value = kvl__strips_of(f, f->value_dim, p.bytes_page);
  p.bytes_page += f->kv_heads * p.value.bytes;
  return p;
}

/* Bytes of one token in a strip, scales included. */
KVL_INLINE int64_t kvl__bytes_token(const struct kvl_strips *of) {
  return of->bytes_row + 2 * of->groups;
}

/* Bytes from the start of the memory to a strip, and to a token's row. */
KVL_INLINE int64_t kvl__strip_at(const struct kvl_pages *p, const struct kvl_strips *of,
                                 int64_t block, int64_t kv_head) {
  return block * p->bytes_page + of->begin + kv_head * of->bytes;
}
KVL_INLINE int64_t kvl__row_at(const struct kvl_pages *p, const struct kvl_strips *of,
                               int64_t block, int64_t kv_head, int64_t token) {
  return kvl__strip_at(p, of, block, kv_head) + token * of->bytes_row;
}

/* The keys, or the values, of a block and KV head. */
KVL_INLINE const char *kvl__keys_of(const struct kvl_pages *p, int64_t block,
                                    int64_t kv_head) {
  return (const char *)p->memory + kvl__strip_at(p, &p->key, block, kv_head);
}
KVL_INLINE const char *kvl__values_of(const struct kvl_pages *p, int64_t block,
                                      int64_t kv_head) {
  return (const char *)p->memory + kvl__strip_at(p, &p->value, block, kv_head);
}

/* From a key's row to its value's, where rows of both are equally long. */
KVL_INLINE int64_t kvl__to_value(const struct kvl_pages *p, int64_t kv_head) {
  return p->value.begin - p->key.begin + kv_head * (p->value.bytes - p->key.bytes);
}

/* Strips of one page, and the number of a strip in it, where all are equally long. */
KVL_INLINE int32_t kvl__strips(const struct kvl_pages *p) {
  return p->value.begin ? 2 * p->kv_heads : p->kv_heads;
}
KVL_INLINE int32_t kvl__strip(const struct kvl_pages *p, int is_value, int32_t kv_head) {
  return is_value && p->value.begin ? p->kv_heads + kv_head : kv_head;
}

/* The runs of a page that one lane moves, from the page's start: with one lane each run is
 * half of the page, and with kv_heads lanes it is the keys or the values of one KV head.
 * Run 1 is empty if values are not stored separately. */
struct kvl_run {
  int64_t begin, bytes;
};
KVL_INLINE struct kvl_run kvl__run(const struct kvl_pages *p, int64_t lanes, int64_t lane,
                                   int64_t run) {
  const struct kvl_strips *of = run ? &p->value : &p->key;
  const int64_t strips = run && !p->value.begin ? 0 : p->kv_heads / lanes;
  struct kvl_run r = {of->begin + lane * of->bytes, strips * of->bytes};
  return r;
}

/* A token has two numbers. Its index is its number among the tokens that its sequence holds:
 * tables, selections, lists, causality, draft trees and stored scores use it. Its position
 * is its number in the text: rotations, windows, ALiBi and hooks use it. A sequence holds
 * the whole of its text, so the two are the same, but only these functions rely on that. */
KVL_INLINE int32_t kvl__position(int32_t index) { return index; }
/* The first index whose position is at least `position`. */
KVL_INLINE int32_t kvl__first_index(int32_t position) { return position; }
/* How many positions a key lies after a query; both are given by their indices. */
KVL_INLINE int32_t kvl__apart(int32_t key, int32_t query) {
  return kvl__position(key) - kvl__position(query);
}
/* The first index that a query sees through a window, which is 0 if there is none. */
KVL_INLINE int32_t kvl__window_begin(int32_t window, int32_t query) {
  const int32_t position = kvl__position(query);
  return window > 0 && window <= position ? kvl__first_index(position + 1 - window) : 0;
}

#endif
