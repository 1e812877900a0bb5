/* Writes new rows of K and V into paged memory, converted to its dtype; append_kv, hot_append
 * and rope_append share this. A piece of work is one half (K or V) of one KV head. Tokens
 * stay in order inside it, so that the last of two tokens with the same place wins. */
#ifndef KVL_CPU_APPEND_H
#define KVL_CPU_APPEND_H

#include "cpu/split.h"
#include "cpu/strip.h"

enum { ROW_MOST = 576 }; /* numbers of a row, at most */

struct append {
  struct kvl_pages to;
  const void *k, *v;
  const int64_t *places;  /* in `to`; if there is slot_of, in another memory */
  const int32_t *slot_of; /* [kv_heads, blocks] the block of `to` for each block there */
  int64_t tokens, blocks; /* blocks: of the memory that places belong to */
  int64_t each;           /* 1; or, if slot_of is by token, the tokens of a block */
  int32_t dtype;          /* of k and v */
};

/* The place in `to` that receives a token of this KV head; -1: none. */
static inline int64_t append_place(const struct append *a, int64_t head, int64_t token) {
  const int64_t size = a->to.block_size, place = a->places[token];
  if (place < 0 || place >= a->blocks * size) return -1;
  int64_t to = place;
  if (a->slot_of) {
    const int64_t part = size / a->each; /* tokens of a slot */
    const int64_t slot = a->slot_of[head * a->blocks * a->each + place / part];
    to = slot < 0 ? -1 : slot * part + place % part;
  }
  return to < a->to.blocks * size ? to : -1;
}

/* Divides instead of multiplying by 1 / scale, so that every device rounds alike. */
static inline KVL_HOT void convert_row(const void *from, void *to, int dim, float scale,
                                       const int dtype, const int to_dtype) {
  for (int d = 0; d < dim; d += VF) {
    int lanes = vf_left(d, dim);
    vf x = vf_load_n(at_const(from, d, dtype), lanes, dtype);
    if (scale != 1) x = x / scale;
    vf_store_n(at(to, d, to_dtype), x, lanes, to_dtype);
  }
}

/* Writes a token's row of dtype `dtype` into a strip, times 1 / scale. */
static inline KVL_HOT int append_row(const void *from, const struct kvl_strips *of,
                                     char *strip, int64_t token, float scale, int dtype,
                                     const int codec) {
  const int dim = of->dim;
  char *to = strip + token * of->bytes_row;
  if (kvl__packs(codec)) {
    float x[ROW_MOST + VF];
    KVL_BY_FLOAT(dtype, convert_row(from, x, dim, 1, D, KVL_DTYPE_F32))
    pack_row(of, x, codec, to, (char *)scales_of(of, strip, token));
  } else if (dtype == codec) {
    memcpy(to, from, (size_t)dim * kvl__float_bytes(codec));
  } else if (codec == KVL_DTYPE_F8E4M3) {
    KVL_BY_FLOAT(dtype, convert_row(from, to, dim, scale, D, codec))
  } else {
    convert_row(from, to, dim, 1, KVL_DTYPE_F32, codec);
  }
  return 0;
}

/* Pieces are (half, KV head). */
static inline KVL_HOT int append(const struct append *a, int64_t begin, int64_t end,
                                 const int codec) {
  const struct kvl_pages *to = &a->to;
  for (int64_t piece = begin; piece < end; piece++) {
    const int is_key = piece < to->kv_heads;
    const struct kvl_strips *strips = is_key ? &to->key : &to->value;
    const float *scales = is_key ? to->k_scale : to->v_scale;
    const int64_t head = piece % to->kv_heads;
    for (int64_t t = 0; t < a->tokens; t++) {
      const int64_t place = append_place(a, head, t);
      if (place < 0) continue;
      char *strip = (char *)to->memory +
                    kvl__strip_at(to, strips, place / to->block_size, head);
      const void *from = at_const(is_key ? a->k : a->v,
                                  (t * to->kv_heads + head) * strips->dim, a->dtype);
      int status = append_row(from, strips, strip, place % to->block_size,
                              scales ? scales[head] : 1, a->dtype, codec);
      if (status < 0) return status;
    }
  }
  return 0;
}

static int append_piece(const void *args, int64_t begin, int64_t end) {
  const struct append *a = args;
  KVL_BY_CODEC(a->to.codec, return append(a, begin, end, D))
  return 0;
}

static inline int append_run(const struct append *a, void *queue) {
  const struct kvl_pages *to = &a->to;
  if (a->tokens == 0 || to->kv_heads == 0) return 0;
  if (to->pinned) {
    int64_t rows = 0;
    for (int64_t head = 0; head < to->kv_heads; head++)
      for (int64_t t = 0; t < a->tokens; t++) rows += append_place(a, head, t) >= 0;
    kvl__link_bytes(queue, KVL_LINK_TO_HOST,
                    rows * kvl__bytes_token(&to->key) * (kvl__strips(to) / to->kv_heads));
  }
  return kvl__split(kvl__strips(to), kvl__grain_rows(a->tokens * to->key.dim), append_piece,
                    a);
}

#endif
