/* Ops of an indexer: they quantise keys, store and read them, and compute the logits of
 * queries. Each function checks the shapes and launches a kernel; kvlab.h describes the
 * op. */
#include <math.h>

#include "args/index.h"
#include "ops/op_args.h"

enum { HEADS_MAX = 64 };

static int64_t rows_of(const kvl_tensor *t) {
  int64_t rows = 1;
  for (int i = 0; i < t->ndim - 1; i++) rows *= t->shape[i];
  return rows;
}

static void expect_dim(struct kvl__call *c) {
  int64_t dim = kvl__dim(c, "dim");
  if (c->status >= 0 && dim != 32 && dim != 64 && dim != 128)
    kvl__call_fail(c, "dim is %lld, expected 32, 64 or 128", (long long)dim);
}

/* Checks index-K memory. An argument that was checked before must have bound dim. */
static struct kvl_index_view cache_arg(struct kvl__call *c, const kvl_tensor *cache) {
  if (!kvl__vector_arg(c, "cache", cache, KVL__U8, "blocks bytes"))
    return (struct kvl_index_view){0};
  int64_t dim = kvl__dim(c, "dim"), bytes = cache->shape[1];
  if (bytes < dim + 4 || bytes % (dim + 4) || bytes / (dim + 4) > 4096) {
    kvl__call_fail(c,
                   "cache has blocks of %lld bytes, expected block_size * (dim + 4), where "
                   "block_size is 1 ... 4096 and dim + 4 is %lld",
                   (long long)bytes, (long long)dim + 4);
    return (struct kvl_index_view){0};
  }
  return (struct kvl_index_view){.memory = cache->ptr,
                                 .blocks = cache->shape[0],
                                 .dim = (int32_t)dim,
                                 .block_size = (int32_t)(bytes / (dim + 4))};
}

int kvl_quantise_rows(const kvl_tensor *x, int is_ue8m0, const kvl_tensor *out,
                      const kvl_tensor *scales) {
  struct kvl__call c = {.op = "quantise_rows"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "... dim");
  kvl__arg(&c, "out", out, KVL__F8, "... dim");
  kvl__arg(&c, "scales", scales, KVL__F32, "...");
  if (c.status < 0) return c.status;
  kvl_tensor row = *x;
  row.ndim--;
  kvl__expect_shape_of(&c, "out", out, "x", x);
  kvl__expect_shape_of(&c, "scales", scales, "x without its last dim", &row);
  if (c.status < 0) return c.status;
  struct kvl_quantise_rows_args args = {.x = x->ptr,
                                        .out = out->ptr,
                                        .scales = scales->ptr,
                                        .rows = rows_of(x),
                                        .dim = kvl__dim(&c, "dim"),
                                        .dtype = x->dtype,
                                        .is_ue8m0 = !!is_ue8m0};
  return KVL__LAUNCH(&c, quantise_rows, args);
}

int kvl_index_queries(const kvl_tensor *q, const kvl_tensor *weights, double factor,
                      int rotates, int is_ue8m0, const kvl_tensor *out,
                      const kvl_tensor *out_weights) {
  struct kvl__call c = {.op = "index_queries"};
  kvl__vector_arg(&c, "q", q, KVL__FLOAT, "rows heads dim");
  expect_dim(&c);
  kvl__arg(&c, "weights", weights, KVL__F32, "rows heads");
  kvl__vector_arg(&c, "out", out, KVL__F8, "rows heads dim");
  kvl__arg(&c, "out_weights", out_weights, KVL__F32, "rows heads");
  if (!isfinite(factor)) kvl__call_fail(&c, "factor is %g, expected a finite number", factor);
  if (c.status < 0) return c.status;
  struct kvl_quantise_rows_args args = {.x = q->ptr,
                                        .out = out->ptr,
                                        .scales = out_weights->ptr,
                                        .weights = weights->ptr,
                                        .rows = rows_of(q),
                                        .dim = kvl__dim(&c, "dim"),
                                        .factor = (float)factor,
                                        .dtype = q->dtype,
                                        .is_ue8m0 = !!is_ue8m0,
                                        .rotates = !!rotates};
  return KVL__LAUNCH(&c, quantise_rows, args);
}

int kvl_hadamard(const kvl_tensor *x, double scale, const kvl_tensor *out) {
  struct kvl__call c = {.op = "hadamard"};
  kvl__arg(&c, "x", x, KVL__FLOAT, "... dim");
  kvl__arg(&c, "out", out, kvl__like(x), "... dim");
  if (c.status < 0) return c.status;
  kvl__expect_shape_of(&c, "out", out, "x", x);
  int64_t dim = kvl__dim(&c, "dim");
  if (dim < 1 || dim > 1024 || (dim & (dim - 1)))
    kvl__call_fail(&c, "x has rows of %lld elements, expected a power of two up to 1024",
                   (long long)dim);
  if (!isfinite(scale)) kvl__call_fail(&c, "scale is %g, expected a finite number", scale);
  if (c.status < 0) return c.status;
  struct kvl_hadamard_args args = {x->ptr,       out->ptr,     rows_of(x),
                                   (float)scale, (int32_t)dim, x->dtype};
  return KVL__LAUNCH(&c, hadamard, args);
}

int kvl_index_append(const kvl_tensor *k, const kvl_tensor *places, int rotates, int is_ue8m0,
                     const kvl_tensor *cache) {
  struct kvl__call c = {.op = "index_append"};
  kvl__vector_arg(&c, "k", k, KVL__FLOAT, "n dim");
  expect_dim(&c);
  kvl__arg(&c, "places", places, KVL__I64, "n");
  struct kvl_index_view view = cache_arg(&c, cache);
  if (c.status < 0) return c.status;
  struct kvl_index_append_args args = {view,     k->ptr,     places->ptr, k->shape[0],
                                       k->dtype, !!is_ue8m0, !!rotates};
  return KVL__LAUNCH(&c, index_append, args);
}

int kvl_index_gather(const kvl_tensor *cache, const kvl_tensor *places, const kvl_tensor *k,
                     const kvl_tensor *scales) {
  struct kvl__call c = {.op = "index_gather"};
  kvl__vector_arg(&c, "k", k, KVL__F8, "n dim");
  expect_dim(&c);
  kvl__arg(&c, "places", places, KVL__I64, "n");
  kvl__arg(&c, "scales", scales, KVL__F32, "n");
  struct kvl_index_view view = cache_arg(&c, cache);
  if (c.status < 0) return c.status;
  struct kvl_index_gather_args args = {view, places->ptr, k->ptr, scales->ptr, k->shape[0]};
  return KVL__LAUNCH(&c, index_gather, args);
}

/* Checks q, weights and logits. Positions are i32, so logits have fewer than 2^31 columns. */
static void query_args(struct kvl__call *c, const kvl_tensor *q, const kvl_tensor *weights,
                       const kvl_tensor *logits) {
  kvl__vector_arg(c, "q", q, KVL__F8, "rows heads dim");
  expect_dim(c);
  int64_t heads = kvl__dim(c, "heads");
  if (c->status >= 0 && (heads < 1 || heads > HEADS_MAX))
    kvl__call_fail(c, "q has %lld heads, expected 1 ... %d", (long long)heads, HEADS_MAX);
  kvl__arg(c, "weights", weights, KVL__F32, "rows heads");
  if (kvl__arg(c, "logits", logits, KVL__F32 | KVL__BF16, "rows columns") &&
      logits->shape[1] > INT32_MAX)
    kvl__call_fail(c, "logits have %lld columns, expected fewer than 2^31",
                   (long long)logits->shape[1]);
}

int kvl_mqa_logits(const kvl_tensor *q, const kvl_tensor *weights, const kvl_tensor *k,
                   const kvl_tensor *scales, const kvl_tensor *starts, const kvl_tensor *ends,
                   const kvl_tensor *logits) {
  struct kvl__call c = {.op = "mqa_logits"};
  query_args(&c, q, weights, logits);
  kvl__vector_arg(&c, "k", k, KVL__F8, "tokens dim");
  kvl__arg(&c, "scales", scales, KVL__F32, "tokens");
  kvl__arg(&c, "starts", starts, KVL__I32, "rows");
  kvl__arg(&c, "ends", ends, KVL__I32, "rows");
  if (c.status < 0) return c.status;
  struct kvl_mqa_logits_args args = {.q = q->ptr,
                                     .k = k->ptr,
                                     .weights = weights->ptr,
                                     .scales = scales->ptr,
                                     .starts = starts->ptr,
                                     .ends = ends->ptr,
                                     .logits = logits->ptr,
                                     .rows = q->shape[0],
                                     .tokens = k->shape[0],
                                     .columns = logits->shape[1],
                                     .heads = (int32_t)q->shape[1],
                                     .dim = (int32_t)q->shape[2],
                                     .dtype = logits->dtype};
  return KVL__LAUNCH(&c, mqa_logits, args);
}

int kvl_mqa_logits_paged(const kvl_tensor *q, const kvl_tensor *weights,
                         const kvl_tensor *cache, const kvl_tensor *tables,
                         const kvl_tensor *lens, const kvl_tensor *logits) {
  struct kvl__call c = {.op = "mqa_logits_paged"};
  query_args(&c, q, weights, logits);
  struct kvl_index_view view = cache_arg(&c, cache);
  kvl__arg(&c, "tables", tables, KVL__I32, "sequences max_blocks");
  kvl__arg(&c, "lens", lens, KVL__I32, "rows");
  int64_t rows = kvl__dim(&c, "rows"), sequences = kvl__dim(&c, "sequences");
  if (c.status >= 0 && (sequences ? rows % sequences : rows))
    kvl__call_fail(&c, "q has %lld rows for %lld sequences, expected equally many for each",
                   (long long)rows, (long long)sequences);
  if (c.status < 0) return c.status;
  struct kvl_mqa_logits_paged_args args = {.cache = view,
                                           .q = q->ptr,
                                           .weights = weights->ptr,
                                           .tables = tables->ptr,
                                           .lens = lens->ptr,
                                           .logits = logits->ptr,
                                           .sequences = sequences,
                                           .each = sequences ? rows / sequences : 0,
                                           .max_blocks = tables->shape[1],
                                           .columns = logits->shape[1],
                                           .heads = (int32_t)q->shape[1],
                                           .dtype = logits->dtype};
  return KVL__LAUNCH(&c, mqa_logits_paged, args);
}
