/* Ops that evict tokens. Each function checks the shapes and launches a kernel; kvlab.h
 * describes the op. */
#include "args/evict.h"
#include "ops/op_args.h"

/* Two memories between which tokens are copied. */
static void copy_args(struct kvl__call *c, const kvl_format *format, const char *src_name,
                      const kvl_tensor *src, struct kvl_pages *src_pages,
                      const char *dst_name, const kvl_tensor *dst,
                      struct kvl_pages *dst_pages) {
  *src_pages = kvl__any_pages_arg(c, src_name, src, format,
                                  "blocks_src 2 kv_heads block_size head_dim");
  *dst_pages = kvl__any_pages_arg(c, dst_name, dst, format,
                                  "blocks_dst 2 kv_heads block_size head_dim");
  kvl__expect_same_pages(c, dst_name, dst_pages, src_pages);
  if (src_pages->key.bytes_row != src_pages->value.bytes_row)
    kvl__call_fail(c, "%s has keys of %d bytes and values of %d, expected the same", src_name,
                   src_pages->key.bytes_row, src_pages->value.bytes_row);
}

int kvl_copy_tokens(const kvl_tensor *src, const kvl_tensor *from, const kvl_tensor *dst,
                    const kvl_tensor *to, const kvl_format *format) {
  struct kvl__call c = {.op = "copy_tokens"};
  struct kvl_copy_tokens_args args = {0};
  copy_args(&c, format, "src", src, &args.src, "dst", dst, &args.dst);
  kvl__arg(&c, "from", from, KVL__I64, "n");
  kvl__arg(&c, "to", to, KVL__I64, "n");
  if (c.status < 0) return c.status;
  args.from = from->ptr;
  args.to = to->ptr;
  args.n = kvl__dim(&c, "n");
  return KVL__LAUNCH(&c, copy_tokens, args);
}

int kvl_replace(const kvl_replacement *a) {
  if (!a) return kvl__missing(__func__, "call");
  struct kvl__call c = {.op = "replace"};
  struct kvl_replace_args args = {
      .block_size = a->block_size, .sink = a->sink, .recent = a->recent};
  kvl__arg(&c, "tables", a->tables, KVL__I32, "rows max_blocks");
  kvl__arg(&c, "lens", a->lens, KVL__I32, "rows");
  kvl__arg(&c, "now", a->now, KVL__I32, "rows");
  kvl__arg(&c, "firsts", a->firsts, KVL__I32, "rows 1");
  kvl__arg(&c, "positions", a->positions, KVL__F32, "1 cells");
  kvl__arg(&c, "wanted", a->wanted, KVL__I64, "rows");
  kvl__arg(&c, "index", a->index, KVL__I32, "rows");
  kvl__arg(&c, "replaced", a->replaced, KVL__F32, "rows");
  kvl__arg(&c, "places", a->places, KVL__I64, "rows");
  kvl__arg(&c, "blocks", a->blocks, KVL__I32, "rows");
  kvl__arg(&c, "block_tokens", a->block_tokens, KVL__I32, "rows");
  args.n = INT32_MAX;
  if (kvl__arg(&c, "score_firsts?", a->score_firsts, KVL__I32, "rows 1"))
    args.score_firsts = a->score_firsts->ptr;
  if (kvl__arg(&c, "scores?", a->scores, KVL__F32, a->score_firsts ? "1 n" : "rows n")) {
    args.scores = a->scores->ptr;
    args.n = kvl__dim(&c, "n");
  } else if (a->score_firsts) {
    kvl__call_fail(&c, "score_firsts is given without scores");
  }
  if (a->block_size < 1 || a->block_size > 4096)
    kvl__call_fail(&c, "block_size is %d, expected 1 ... 4096", a->block_size);
  if (a->sink < 0 || a->recent < 0)
    kvl__call_fail(&c, "sink is %d and recent %d, expected both >= 0", a->sink, a->recent);
  if (a->saved) {
    copy_args(&c, a->format, "cache", a->cache, &args.cache, "saved", a->saved, &args.saved);
    const int64_t room = args.saved.blocks * args.saved.block_size;
    if (c.status >= 0 && args.cache.block_size != a->block_size)
      kvl__call_fail(&c, "block_size is %d, expected that of cache, %d", a->block_size,
                     args.cache.block_size);
    if (c.status >= 0 && room < kvl__dim(&c, "rows"))
      kvl__call_fail(&c, "saved has room for %lld tokens, expected one for each of %lld rows",
                     (long long)room, (long long)kvl__dim(&c, "rows"));
  }
  if (c.status < 0) return c.status;
  args.positions = a->positions->ptr;
  args.firsts = a->firsts->ptr;
  args.now = a->now->ptr;
  args.lens = a->lens->ptr;
  args.tables = a->tables->ptr;
  args.wanted = a->wanted->ptr;
  args.index = a->index->ptr;
  args.replaced = a->replaced->ptr;
  args.places = a->places->ptr;
  args.blocks = a->blocks->ptr;
  args.block_tokens = a->block_tokens->ptr;
  args.rows = kvl__dim(&c, "rows");
  args.cells = kvl__dim(&c, "cells");
  args.max_blocks = kvl__dim(&c, "max_blocks");
  return KVL__LAUNCH(&c, replace, args);
}

int kvl_update_rows(const kvl_tensor *memory, const kvl_tensor *firsts,
                    const kvl_tensor *values, int is_add, const kvl_tensor *fresh,
                    double initial, const kvl_tensor *before) {
  struct kvl__call c = {.op = "update_rows"};
  struct kvl_update_rows_args args = {.is_add = is_add != 0, .initial = (float)initial};
  kvl__arg(&c, "memory", memory, KVL__F32, "1 cells");
  kvl__arg(&c, "firsts", firsts, KVL__I32, "rows 1");
  kvl__arg(&c, "values", values, KVL__F32, "rows n");
  if (kvl__arg(&c, "fresh?", fresh, KVL__I32, "rows 1")) args.fresh = fresh->ptr;
  if (kvl__arg(&c, "before?", before, KVL__F32, "rows n")) args.before = before->ptr;
  if (fresh && !is_add) kvl__call_fail(&c, "fresh is given without is_add");
  if (c.status < 0) return c.status;
  args.memory = memory->ptr;
  args.firsts = firsts->ptr;
  args.values = values->ptr;
  args.rows = kvl__dim(&c, "rows");
  args.n = kvl__dim(&c, "n");
  args.cells = kvl__dim(&c, "cells");
  return KVL__LAUNCH(&c, update_rows, args);
}
