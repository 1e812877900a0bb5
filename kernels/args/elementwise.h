/* Arguments of the ops over plain tensors. Shapes, dtypes and meanings
 * are those of runtime/kvlab.h; optional pointers may be NULL. */
#ifndef KVL_ARGS_ELEMENTWISE_H
#define KVL_ARGS_ELEMENTWISE_H

#include "base.h"

struct kvl_fill_args {
  void *out;
  int64_t count;
  double value;
  int32_t dtype;
};
struct kvl_arange_args {
  void *out;
  int64_t count;
  double start, step;
  int32_t dtype;
};
struct kvl_random_args {
  void *out;
  int64_t count;
  uint64_t seed, offset;
  double a, b;
  int32_t kind, dtype;
};
struct kvl_cast_args {
  const void *a;
  void *out;
  int64_t count;
  int32_t from, to;
};
struct kvl_unary_args {
  const void *a;
  void *out;
  int64_t count;
  int32_t op, dtype;
};

/* out[i...] = a[i . a_stride] op b[i . b_stride]. Strides are in elements, and 0 broadcasts.
 * If b is NULL, the scalar takes its place. Adjacent dims are merged where the strides of
 * both operands allow it, so ndim is often 1. */
struct kvl_binary_args {
  const void *a, *b;
  void *out;
  double scalar;
  int64_t shape[KVL_DIMS_MAX], a_stride[KVL_DIMS_MAX], b_stride[KVL_DIMS_MAX];
  int64_t count;
  int32_t ndim, op, dtype, out_dtype;
};
struct kvl_where_args {
  const uint8_t *cond;
  const void *a, *b; /* NULL: the value, converted to dtype, takes its place */
  void *out;
  double a_value, b_value;
  int64_t count;
  int32_t dtype;
};

/* out[i . out_stride] = a[i . a_stride] for all i within shape. Strides are in elements; those
 * of `a` may be 0. No two i write to the same place. The last dim is the one along which out
 * is contiguous, or has the smallest stride. Among the others, the one along which `a` has the
 * smallest stride is the last but one. */
struct kvl_strided_copy_args {
  const void *a;
  void *out;
  int64_t shape[KVL_DIMS_MAX], a_stride[KVL_DIMS_MAX], out_stride[KVL_DIMS_MAX];
  int64_t count;
  int32_t ndim, bytes_element;
};

/* a [outer, n, inner] -> out [outer, inner] */
struct kvl_reduce_args {
  const void *a;
  void *out;
  int64_t outer, n, inner;
  void *workspace; /* here and below: of the size that kvl_backend's workspace() returns */
  int32_t op, dtype, out_dtype;
};
struct kvl_softmax_args {
  const void *a;
  void *out;
  int64_t rows, n;
  void *workspace;
  float scale;
  int32_t dtype, out_dtype;
};
struct kvl_argmax_args {
  const void *a;
  int32_t *out;
  int64_t rows, n;
  void *workspace;
  int32_t dtype, least; /* least: argmin */
};

struct kvl_draw_args {
  const float *scores;
  const int64_t *numbers; /* [rows, 2]: a seed, and the word that index 0 uses */
  int32_t *out;
  int64_t rows, n;
  void *workspace;
};

/* a [outer, n, inner] -> out of the same shape */
struct kvl_cumsum_args {
  const void *a;
  void *out;
  int64_t outer, n, inner;
  int32_t dtype;
};

/* a [outer, n, inner] -> out [outer, inner] */
struct kvl_logsumexp_args {
  const void *a;
  void *out;
  int64_t outer, n, inner;
  void *workspace;
  int32_t dtype, out_dtype;
};

/* A row is bytes_row bytes long. */
struct kvl_gather_rows_args {
  const void *src;
  const int32_t *index;
  void *out;
  int64_t n, rows, bytes_row; /* rows: of src */
};
struct kvl_scatter_rows_args {
  const void *src;
  const int32_t *index;
  void *out;
  int64_t n, rows, bytes_row; /* rows: of out */
  void *workspace;
};
struct kvl_gather_args {
  const void *src;
  const int32_t *index;
  void *out;
  int64_t rows, n, m;
  int32_t bytes_element;
};
struct kvl_scatter_args {
  const void *src;
  const int32_t *index;
  void *out;
  int64_t rows, n, m; /* m: of src */
  int32_t add, dtype;
};
struct kvl_silu_mul_args {
  const void *gate, *up;
  void *out;
  int64_t count;
  int32_t dtype;
};

#endif
