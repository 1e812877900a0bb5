/* Arguments of the ops of indexers: index-K memory, logits, and the best tokens.
 * Shapes, dtypes and meanings are those of runtime/kvlab.h; optional pointers may be NULL. */
#ifndef KVL_ARGS_INDEX_H
#define KVL_ARGS_INDEX_H

#include "base.h"

/* rotates: rows of 32, 64 or 128 numbers become dim^-0.5 * H x first, as of hadamard. With
 * weights, scales[r] becomes weights[r] * factor times the scale of row r. */
struct kvl_quantise_rows_args {
  const void *x;
  void *out;
  float *scales;
  const float *weights; /* optional */
  int64_t rows, dim;
  float factor;
  int32_t dtype; /* of x */
  int32_t is_ue8m0, rotates;
};

/* A row whose largest |x| is amax gets the scale max(amax, KVL_INDEX_AMAX_LEAST) / 448, with
 * is_ue8m0 rounded up to a power of two, and x / scale is rounded to f8e4m3. The bits of a
 * positive f32 rounded up to a power of two: */
#define KVL_UE8M0_BITS(bits) (((bits) + 0x007FFFFFu) & 0x7F800000u)
#define KVL_INDEX_AMAX_LEAST 1e-4f
/* The most numbers of a row that is rotated, and dim^-0.5 in f32. */
#define KVL_INDEX_DIM_MOST 128
#define KVL_INDEX_TURN(dim) ((float)(1.0 / sqrt((double)(dim))))
struct kvl_hadamard_args {
  const void *x;
  void *out;
  int64_t rows;
  float scale;
  int32_t dim, dtype; /* of x and out */
};

/* One layer's index-K memory, see runtime/kvlab.h. The key of block b and offset t begins at
 * byte b * block_size * (dim + 4) + t * dim, and its scale at byte b * block_size * (dim +
 * 4) + block_size * dim + 4 * t. */
struct kvl_index_view {
  uint8_t *memory;
  int64_t blocks;
  int32_t block_size, dim;
};
struct kvl_index_append_args {
  struct kvl_index_view cache;
  const void *k;
  const int64_t *places;
  int64_t n;
  int32_t dtype; /* of k */
  int32_t is_ue8m0, rotates;
};
struct kvl_index_gather_args {
  struct kvl_index_view cache;
  const int64_t *places;
  uint8_t *k;
  float *scales;
  int64_t n;
};
struct kvl_mqa_logits_args {
  const uint8_t *q, *k;
  const float *weights, *scales;
  const int32_t *starts, *ends;
  void *logits;
  int64_t rows, tokens, columns;
  int32_t heads, dim, dtype; /* of logits */
};
struct kvl_mqa_logits_paged_args {
  struct kvl_index_view cache;
  const uint8_t *q;
  const float *weights;
  const int32_t *tables, *lens;
  void *logits;
  int64_t sequences, each, max_blocks, columns; /* rows: sequences * each */
  int32_t heads, dtype;
};

/* How indices of tokens are transformed, see kvl_transform. */
struct kvl_transform_view {
  const int32_t *tables;       /* optional [sequences, width] */
  const int32_t *row_sequence; /* optional [rows] */
  const int32_t *offsets;      /* optional [rows] */
  int64_t sequences, width;
  int64_t rows_each; /* rows per sequence, if row_sequence is NULL */
  int32_t block_size;
};
struct kvl_topk_transform_args {
  const void *logits;    /* [rows, n] */
  const int32_t *starts; /* optional [rows] */
  const int32_t *lens;
  int32_t *out; /* [rows, k] */
  struct kvl_transform_view transform;
  int64_t rows, n, k;
  int32_t dtype;
};
struct kvl_transform_indices_args {
  const int32_t *indices; /* optional [rows, k] */
  const int32_t *lens;    /* [rows], without indices */
  int32_t *out;           /* [rows, k] */
  struct kvl_transform_view transform;
  int64_t rows, k;
};
struct kvl_topk_merge_args {
  const void *logits;    /* [rows, n]: columns first ... first + n - 1 */
  const int32_t *starts; /* optional [rows] */
  const int32_t *lens;
  const float *kept_values; /* [rows, k] */
  const int32_t *kept_indices;
  float *values; /* [rows, k] */
  int32_t *indices;
  int64_t rows, n, k, first;
  int32_t dtype;
};
struct kvl_ragged_places_args {
  const int32_t *tables;        /* [sequences, width] */
  const int32_t *starts, *ends; /* [sequences] */
  void *out;                    /* [n] */
  int64_t sequences, width, n;
  int32_t block_size, bytes_place;
};

/* The part of a tile that belongs to a row. The tile has the columns first ... first + n - 1.
 * `count` columns belong to the row, from column `begin` of the tile on; `before` columns of
 * the row lie before the tile. */
struct kvl_window {
  int64_t begin, count, before;
};
KVL_INLINE struct kvl_window kvl__window(int32_t start, int32_t len, int64_t first,
                                         int64_t n) {
  struct kvl_window w;
  int64_t from = start > 0 ? start : 0, to = from + (len > 0 ? len : 0);
  int64_t low = from - first, high = to - first;
  if (low < 0) low = 0;
  if (low > n) low = n;
  if (high > n) high = n;
  w.begin = low;
  w.count = high > low ? high - low : 0;
  w.before = from < first ? (to < first ? to : first) - from : 0;
  return w;
}

/* The transform of one row. */
struct kvl_row_transform {
  const int32_t *table;
  int64_t width;
  int32_t block_size; /* 0: offset is added */
  int32_t offset;
};
KVL_INLINE struct kvl_row_transform kvl__row_transform(const struct kvl_transform_view *t,
                                                       int64_t row) {
  struct kvl_row_transform r = {0, 0, 0, 0};
  if (t->tables) {
    int64_t s = t->row_sequence ? t->row_sequence[row] : row / t->rows_each;
    r.block_size = t->block_size;
    if (s >= 0 && s < t->sequences) r.table = t->tables + s * t->width, r.width = t->width;
  } else if (t->offsets) {
    r.offset = t->offsets[row];
  }
  return r;
}
KVL_INLINE int32_t kvl__transformed(struct kvl_row_transform t, int32_t index) {
  if (index < 0) return -1;
  if (t.block_size == 0) return index + t.offset;
  /* unsigned division is faster */
  uint32_t p = (uint32_t)index, size = (uint32_t)t.block_size;
  if ((int64_t)(p / size) >= t.width) return -1;
  int32_t block = t.table[p / size];
  return block < 0 ? -1 : block * t.block_size + (int32_t)(p % size);
}

#endif
