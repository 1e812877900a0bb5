/* How a page of KV memory is laid out. Nothing else says it: C, CUDA and the kernels that
 * are printed from expressions find rows through this file.
 *
 * A page holds the keys and values of one block in one layer, as strips: one with the keys of
 * each KV head, then one with the values of each. A strip has a row for every token. In a
 * shared page a value is the first numbers of its key, so there are no strips of values.
 * Whatever moves a page as a whole sees bytes. base.h declares the structs. */
#ifndef KVL_PAGE_H
#define KVL_PAGE_H

#include "base.h"

/* Bytes of a row of `dim` numbers. */
KVL_INLINE int32_t kvl__bytes_row(int codec, int32_t dim) {
  return codec == KVL_CODEC_F32 ? 4 * dim : codec == KVL_CODEC_F8E4M3 ? dim : 2 * dim;
}

/* The layout of a format's pages; memory, blocks, pinned and the scales stay empty. */
KVL_INLINE struct kvl_pages kvl__pages(const kvl_format *f) {
  struct kvl_pages p = {0};
  p.kv_heads = f->kv_heads, p.block_size = f->block_size, p.codec = f->codec;
  p.key.dim = f->key_dim, p.value.dim = f->value_dim;
  p.key.bytes_row = kvl__bytes_row(f->codec, f->key_dim);
  p.key.bytes = (int64_t)f->block_size * p.key.bytes_row;
  p.bytes_page = f->kv_heads * p.key.bytes;
  p.value.bytes_row = p.key.bytes_row, p.value.bytes = p.key.bytes;
  if (f->is_shared) return p;
  p.value.begin = p.bytes_page;
  p.value.bytes_row = kvl__bytes_row(f->codec, f->value_dim);
  p.value.bytes = (int64_t)f->block_size * p.value.bytes_row;
  p.bytes_page += f->kv_heads * p.value.bytes;
  return p;
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

/* What moves of a page when it moves in `lanes` lanes, from the page's start: with one lane
 * half of the page, and with kv_heads lanes the keys or the values of one KV head. Run 1 is
 * empty where values are not stored apart. */
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

#endif
