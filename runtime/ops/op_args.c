/* The checks of arguments that many ops share. */
#include "ops/op_args.h"

unsigned kvl__rows_of(const kvl_tensor *cache) {
  return kvl__like(cache) == KVL__F8 ? KVL__FLOAT : kvl__like(cache) | KVL__F32;
}

void kvl__expect_head_dim(struct kvl__call *c) {
  int64_t d = kvl__dim(c, "head_dim");
  if (c->status >= 0 && (d < 8 || d > 256 || d % 8))
    kvl__call_fail(c, "head_dim is %lld, expected a multiple of 8 from 8 to 256",
                   (long long)d);
}

struct kvl_cache_view kvl__memory_arg(struct kvl__call *c, const char *name,
                                      const kvl_tensor *memory, unsigned dtypes,
                                      const char *shape) {
  struct kvl_cache_view view = {0};
  if (!kvl__vector_arg(c, name, memory, dtypes, shape)) return view;
  int64_t d = kvl__dim(c, "head_dim"), size = kvl__dim(c, "block_size");
  kvl__expect_head_dim(c);
  if (size < 1 || size > 4096)
    kvl__call_fail(c, "block_size is %lld, expected 1 ... 4096", (long long)size);
  if (c->status >= 0 && memory->dtype == KVL_DTYPE_F8E4M3 && d % 16)
    kvl__call_fail(c, "head_dim is %lld, expected a multiple of 16 for an f8e4m3 %s",
                   (long long)d, name);
  return (struct kvl_cache_view){.kv = memory->ptr,
                                 .blocks = memory->shape[0],
                                 .kv_heads = (int32_t)memory->shape[2],
                                 .block_size = (int32_t)size,
                                 .head_dim = (int32_t)d,
                                 .dtype = memory->dtype,
                                 .pinned = kvl_tensor_is_pinned(memory)};
}

void kvl__scale_args(struct kvl__call *c, struct kvl_cache_view *view,
                     const kvl_tensor *k_scale, const kvl_tensor *v_scale) {
  int given = kvl__arg(c, "k_scale?", k_scale, KVL__F32, "kv_heads");
  given += kvl__arg(c, "v_scale?", v_scale, KVL__F32, "kv_heads");
  if (given && view->dtype != KVL_DTYPE_F8E4M3)
    kvl__call_fail(c, "%s_scale is given for a cache of %s, expected f8e4m3",
                   k_scale ? "k" : "v", kvl_dtype_name(view->dtype));
  if (c->status < 0) return;
  if (k_scale) view->k_scale = k_scale->ptr;
  if (v_scale) view->v_scale = v_scale->ptr;
}

void kvl__expect_groups(struct kvl__call *c) {
  int64_t heads = kvl__dim(c, "heads"), kv_heads = kvl__dim(c, "kv_heads");
  if (c->status >= 0 && (kv_heads < 1 || heads < 1 || heads % kv_heads))
    kvl__call_fail(c, "heads is %lld, expected 1 or more, a multiple of kv_heads = %lld",
                   (long long)heads, (long long)kv_heads);
}

void kvl__expect_block_size(struct kvl__call *c, int block_size) {
  if (block_size < 1 || block_size > 4096)
    kvl__call_fail(c, "block_size is %d, expected 1 ... 4096", block_size);
}

void kvl__expect_budget(struct kvl__call *c, const kvl_budget *b) {
  if (!b) {
    kvl__call_fail(c, "budget is missing");
    return;
  }
  if (!(b->ratio <= 1) || (b->ratio < 0 && b->blocks < 0))
    kvl__call_fail(c,
                   "budget is ratio %g, blocks %d, expected a ratio of 0 ... 1 or, with "
                   "a negative ratio, blocks >= 0",
                   b->ratio, b->blocks);
  if (b->min_blocks < 0 || b->sink < 0 || b->recent < 0)
    kvl__call_fail(c, "budget has min_blocks %d, sink %d, recent %d, expected >= 0",
                   b->min_blocks, b->sink, b->recent);
}
