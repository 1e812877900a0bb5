/* Arguments that many ops share: KV memory and its scales, groups of heads, budgets. */
#ifndef KVL_OP_ARGS_H
#define KVL_OP_ARGS_H

#include "core/call.h"

/* Checks KV memory of one layer and returns a view of it. `shape` names its dims, the last
 * four of which are "2 kv_heads block_size head_dim". */
struct kvl_cache_view kvl__memory_arg(struct kvl__call *c, const char *name,
                                      const kvl_tensor *memory, unsigned dtypes,
                                      const char *shape);

/* Checks the scales of an f8e4m3 cache and sets them in its view. Both may be NULL. */
void kvl__scale_args(struct kvl__call *c, struct kvl_cache_view *view,
                     const kvl_tensor *k_scale, const kvl_tensor *v_scale);
/* Expects that heads is a multiple of kv_heads. */
void kvl__expect_groups(struct kvl__call *c);
void kvl__expect_block_size(struct kvl__call *c, int block_size);
void kvl__expect_budget(struct kvl__call *c, const kvl_budget *budget);
/* The dtypes that rows for a cache and queries that read it may have: the cache's own and
 * f32; for an f8e4m3 cache f32, f16 and bf16. */
unsigned kvl__rows_of(const kvl_tensor *cache);
/* Expects a head_dim that the kernels support. */
void kvl__expect_head_dim(struct kvl__call *c);

#endif
