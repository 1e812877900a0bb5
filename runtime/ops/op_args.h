/* Arguments that many ops share: KV memory, groups of heads, budgets. */
#ifndef KVL_OP_ARGS_H
#define KVL_OP_ARGS_H

#include "args/select.h"
#include "core/call.h"
#include "page.h"

/* Checks pages of one layer and returns a view of them. format NULL: the shape and the dtype
 * of memory say it. `shape` then names the dims of memory: a separate name for the blocks,
 * and "2 kv_heads block_size head_dim". */
struct kvl_pages kvl__pages_arg(struct kvl__call *c, const char *name,
                                const kvl_tensor *memory, const kvl_format *format,
                                const char *shape);
/* The same for ops that also know values which are the first numbers of their keys, or that
 * read keys alone. */
struct kvl_pages kvl__any_pages_arg(struct kvl__call *c, const char *name,
                                    const kvl_tensor *memory, const kvl_format *format,
                                    const char *shape);
/* The name of a codec. */
const char *kvl__codec_name(int codec);
/* Expects that two memories have pages of one format. */
void kvl__expect_same_pages(struct kvl__call *c, const char *name, const struct kvl_pages *p,
                            const struct kvl_pages *other);
/* Expects that heads is a multiple of kv_heads. */
void kvl__expect_groups(struct kvl__call *c);
void kvl__expect_block_size(struct kvl__call *c, int block_size);
void kvl__expect_budget(struct kvl__call *c, const kvl_budget *budget);
/* Checks the limits of lists, f32 or i32 [seqs or 1, selection_heads], which may be NULL. */
struct kvl_limits kvl__limits_arg(struct kvl__call *c, const kvl_tensor *limits);
/* Checks v, the values of new tokens, which is none where values are shared. */
void kvl__values_arg(struct kvl__call *c, const kvl_tensor *v, const kvl_format *format,
                     unsigned dtypes);
/* The dtypes that rows to be stored in pages may have, and queries over these pages: the
 * codec's own and f32, or f32, f16 and bf16 if the codec is no dtype of rows. */
unsigned kvl__rows_of(int codec);
/* The dtypes that keys and values may have when an op reads them as they are stored: the
 * codec's own, if rows may have it, and f32, f16 and bf16. */
unsigned kvl__read_of(int codec);
/* Expects a head_dim that the kernels support; where values may be the first numbers of their
 * keys, they support more. */
enum { KVL__HEAD_DIM_MAX = 256, KVL__LATENT_MAX = 576 };
void kvl__expect_head_dim(struct kvl__call *c, int most);

#endif
