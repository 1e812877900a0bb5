/* Ops that turn the logits of tokens into the places of the best ones. Each function checks
 * the shapes and launches a kernel; kvlab.h describes the op. Lengths, tables and offsets
 * stay on the device, so their values are not checked here. */
#include "args/index.h"
#include "ops/op_args.h"

static struct kvl_transform_view transform_args(struct kvl__call *c, const kvl_transform *t,
                                                int64_t rows) {
  struct kvl_transform_view view = {.rows_each = 1};
  if (!t || c->status < 0) return view;
  if (kvl__arg(c, "tables?", t->tables, KVL__I32, "sequences width")) {
    view.tables = t->tables->ptr;
    view.sequences = kvl__dim(c, "sequences");
    view.width = kvl__dim(c, "width");
    view.block_size = t->block_size;
    kvl__expect_block_size(c, t->block_size);
    if (t->offsets)
      kvl__call_fail(c, "offsets are given beside tables, expected one of them");
    if (!t->row_sequence && view.sequences > 0) view.rows_each = rows / view.sequences;
    if (!t->row_sequence && view.rows_each * view.sequences != rows)
      kvl__call_fail(c, "%lld rows for %lld sequences, expected a multiple, or row_sequence",
                     (long long)rows, (long long)view.sequences);
  }
  if (t->row_sequence && !t->tables)
    kvl__call_fail(c, "row_sequence is given without tables");
  if (kvl__arg(c, "row_sequence?", t->row_sequence, KVL__I32, "rows"))
    view.row_sequence = t->row_sequence->ptr;
  if (kvl__arg(c, "offsets?", t->offsets, KVL__I32, "rows")) view.offsets = t->offsets->ptr;
  return view;
}

/* Columns and indices are i32 on the device. */
static void expect_columns(struct kvl__call *c, int64_t n) {
  if (c->status >= 0 && n > INT32_MAX)
    kvl__call_fail(c, "%lld columns, expected at most %d", (long long)n, INT32_MAX);
}

int kvl_topk_transform(const kvl_tensor *logits, const kvl_tensor *starts,
                       const kvl_tensor *lens, const kvl_transform *transform,
                       const kvl_tensor *out) {
  struct kvl__call c = {.op = "topk_transform"};
  kvl__arg(&c, "logits", logits, KVL__F32 | KVL__BF16, "rows n");
  kvl__arg(&c, "starts?", starts, KVL__I32, "rows");
  kvl__arg(&c, "lens", lens, KVL__I32, "rows");
  kvl__arg(&c, "out", out, KVL__I32, "rows k");
  int64_t rows = kvl__dim(&c, "rows"), n = kvl__dim(&c, "n");
  expect_columns(&c, n);
  struct kvl_topk_transform_args args = {.transform = transform_args(&c, transform, rows),
                                         .rows = rows,
                                         .n = n,
                                         .k = kvl__dim(&c, "k")};
  if (c.status < 0) return c.status;
  args.logits = logits->ptr;
  args.starts = starts ? starts->ptr : NULL;
  args.lens = lens->ptr;
  args.out = out->ptr;
  args.dtype = logits->dtype;
  return KVL__LAUNCH(&c, topk_transform, args);
}

int kvl_transform_indices(const kvl_tensor *indices, const kvl_tensor *lens,
                          const kvl_transform *transform, const kvl_tensor *out) {
  struct kvl__call c = {.op = "transform_indices"};
  if (!indices == !lens)
    kvl__call_fail(&c, "indices and lens are both %s, expected one of them",
                   indices ? "given" : "missing");
  kvl__arg(&c, "indices?", indices, KVL__I32, "rows k");
  kvl__arg(&c, "lens?", lens, KVL__I32, "rows");
  kvl__arg(&c, "out", out, KVL__I32, "rows k");
  int64_t rows = kvl__dim(&c, "rows");
  struct kvl_transform_indices_args args = {
      .transform = transform_args(&c, transform, rows), .rows = rows, .k = kvl__dim(&c, "k")};
  if (c.status < 0) return c.status;
  args.indices = indices ? indices->ptr : NULL;
  args.lens = lens ? lens->ptr : NULL;
  args.out = out->ptr;
  return KVL__LAUNCH(&c, transform_indices, args);
}

int kvl_topk_merge(const kvl_tensor *logits, int64_t first, const kvl_tensor *starts,
                   const kvl_tensor *lens, const kvl_tensor *kept_values,
                   const kvl_tensor *kept_indices, const kvl_tensor *values,
                   const kvl_tensor *indices) {
  struct kvl__call c = {.op = "topk_merge"};
  kvl__arg(&c, "logits", logits, KVL__F32 | KVL__BF16, "rows n");
  kvl__arg(&c, "starts?", starts, KVL__I32, "rows");
  kvl__arg(&c, "lens", lens, KVL__I32, "rows");
  kvl__arg(&c, "kept_values", kept_values, KVL__F32, "rows k");
  kvl__arg(&c, "kept_indices", kept_indices, KVL__I32, "rows k");
  kvl__arg(&c, "values", values, KVL__F32, "rows k");
  kvl__arg(&c, "indices", indices, KVL__I32, "rows k");
  if (c.status >= 0 && first < 0)
    kvl__call_fail(&c, "first is %lld, expected >= 0", (long long)first);
  if (c.status >= 0 && logits->count > 0 && values->count > 0 &&
      (values->ptr == kept_values->ptr || indices->ptr == kept_indices->ptr))
    kvl__call_fail(&c, "%s, expected another tensor",
                   values->ptr == kept_values->ptr ? "values is kept_values"
                                                   : "indices is kept_indices");
  int64_t n = kvl__dim(&c, "n"), k = kvl__dim(&c, "k");
  expect_columns(&c, first + n + k); /* a row of the search is what was kept, then the tile */
  if (c.status < 0) return c.status;
  struct kvl_topk_merge_args args = {logits->ptr,
                                     starts ? starts->ptr : NULL,
                                     lens->ptr,
                                     kept_values->ptr,
                                     kept_indices->ptr,
                                     values->ptr,
                                     indices->ptr,
                                     lens->count,
                                     n,
                                     k,
                                     first,
                                     logits->dtype};
  return KVL__LAUNCH(&c, topk_merge, args);
}

int kvl_ragged_places(const kvl_tensor *tables, int block_size, const kvl_tensor *starts,
                      const kvl_tensor *ends, const kvl_tensor *out) {
  struct kvl__call c = {.op = "ragged_places"};
  kvl__arg(&c, "tables", tables, KVL__I32, "sequences width");
  kvl__expect_block_size(&c, block_size);
  kvl__arg(&c, "starts", starts, KVL__I32, "sequences");
  kvl__arg(&c, "ends", ends, KVL__I32, "sequences");
  kvl__arg(&c, "out", out, KVL__I32 | KVL__I64, "n");
  if (c.status < 0) return c.status;
  struct kvl_ragged_places_args args = {tables->ptr,
                                        starts->ptr,
                                        ends->ptr,
                                        out->ptr,
                                        kvl__dim(&c, "sequences"),
                                        kvl__dim(&c, "width"),
                                        out->count,
                                        block_size,
                                        kvl_dtype_bytes(out->dtype)};
  return KVL__LAUNCH(&c, ragged_places, args);
}
