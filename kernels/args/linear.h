/* Arguments of products, norms and rotations. Shapes, dtypes and meanings
 * are those of runtime/kvlab.h; optional pointers may be NULL. */
#ifndef KVL_ARGS_LINEAR_H
#define KVL_ARGS_LINEAR_H

#include "base.h"

/* Batch strides, and steps from one row of a or out to the next, are in elements. With a stride of
 * 0, all batches share a or b. adds: the product is added to what out has; only kernels that call
 * others set it. */
struct kvl_matmul_args {
  const void *a, *b;
  void *out;
  int64_t batch, m, n, k, a_stride, b_stride, out_stride, a_row, out_row;
  void *workspace;
  int32_t transpose_b, adds, dtype, out_dtype;
};

/* A matrix for each head. Rows of x have k numbers for it, and rows of out n; the `rest` numbers
 * behind them are copied. */
struct kvl_head_matmul_args {
  const void *x, *w;
  void *out;
  int64_t tokens, heads, k, n, rest;
  void *workspace;
  int32_t transpose_w, frozen, dtype; /* frozen: as of kvl_linear_args, of w */
};

/* The products alone, as a call of matmul whose batch are the heads. */
static inline struct kvl_matmul_args kvl__head_products(
    const struct kvl_head_matmul_args *g) {
  struct kvl_matmul_args p;
  p.a = g->x, p.b = g->w, p.out = g->out, p.workspace = g->workspace;
  p.batch = g->heads, p.m = g->tokens, p.n = g->n, p.k = g->k;
  p.a_stride = g->k + g->rest, p.out_stride = g->n + g->rest, p.b_stride = g->k * g->n;
  p.a_row = g->heads * p.a_stride, p.out_row = g->heads * p.out_stride;
  p.transpose_b = g->transpose_w, p.adds = 0;
  p.dtype = p.out_dtype = g->dtype;
  return p;
}

/* norm may be f32 beside 16-bit rows, and so may out. form is a kvl_linear_form; a plain one
 * may have several parts: outs[i] [rows, columns[i]] takes the next columns[i] of the result,
 * in out_dtypes[i]; out and out_dtype are the first of them. frozen: no work that is under way
 * writes the weight. */
enum { KVL_LINEAR_PARTS = 5 };
struct kvl_linear_args {
  const void *x, *weight;
  const void *norm, *bias; /* optional */
  void *out;
  int64_t rows, n, k; /* n: rows of weight */
  void *workspace;
  float eps;
  int32_t form, frozen, dtype, norm_dtype, out_dtype, parts;
  void *outs[KVL_LINEAR_PARTS];
  int64_t columns[KVL_LINEAR_PARTS];
  int32_t out_dtypes[KVL_LINEAR_PARTS];
};

/* The i-th part as a call of its own. */
static inline struct kvl_linear_args kvl__linear_part(const struct kvl_linear_args *g,
                                                      int i) {
  struct kvl_linear_args part = *g;
  int64_t before = 0, element = g->dtype == KVL_DTYPE_F32 ? 4 : 2;
  if (g->parts == 1) return part;
  for (int j = 0; j < i; j++) before += g->columns[j];
  part.weight = (const char *)g->weight + before * g->k * element;
  if (g->bias) part.bias = (const char *)g->bias + before * element;
  part.n = g->columns[i];
  part.out = g->outs[i];
  part.out_dtype = g->out_dtypes[i];
  part.parts = 1;
  return part;
}
enum { KVL_EXPERTS_MOST = 4096 };
struct kvl_route_args {
  const void *logits;
  const float *bias; /* optional */
  int32_t *chosen;
  float *weights;
  int64_t rows, experts, active; /* active: without the router's shared ones */
  struct kvl_router router;
  int32_t dtype;
};
/* inner: the numbers between the two matrices of an expert. form: as of kvl_linear_args, but
 * SwiGLU. */
struct kvl_experts_args {
  const void *x;
  const int32_t *chosen;
  const float *weights;
  const void *gate_up, *down;
  void *out;
  int64_t rows, active, experts, k, inner;
  void *workspace;
  int32_t form, dtype;
};
struct kvl_rmsnorm_args {
  const void *x;
  void *residual; /* optional, in place */
  const void *weight;
  void *out;
  int64_t rows, dim, row; /* row: elements from one row to the next, of x, residual and out */
  float eps;
  int32_t dtype, weight_dtype;
  const void *bias; /* of a LayerNorm, like weight: the mean of a row is subtracted first */
};
struct kvl_rope_args {
  void *x;
  const int32_t *positions;
  const float *inv_freq;
  int64_t tokens, heads, head_dim, pairs, first;
  int32_t dtype;
};

#endif
