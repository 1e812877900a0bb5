/* Checking the arguments of an op and launching it: what every op_*.c is written with. */
#ifndef KVL_CALL_H
#define KVL_CALL_H

#include "core/allocator.h"

enum {
  KVL__F32 = 1 << KVL_DTYPE_F32, KVL__F16 = 1 << KVL_DTYPE_F16,
  KVL__BF16 = 1 << KVL_DTYPE_BF16, KVL__F8 = 1 << KVL_DTYPE_F8E4M3,
  KVL__I32 = 1 << KVL_DTYPE_I32, KVL__I64 = 1 << KVL_DTYPE_I64,
  KVL__U8 = 1 << KVL_DTYPE_U8, KVL__U64 = 1 << KVL_DTYPE_U64,
  KVL__FLOAT = KVL__F32 | KVL__F16 | KVL__BF16,
  KVL__CACHE = KVL__FLOAT | KVL__F8,   /* what KV memory may hold */
  KVL__ANY = 0xFF,
};

struct kvl__call {
  const char *op;
  kvl_device *device;
  int status;                    /* of the first failure */
  int dims, tensors;
  struct { const char *name; int length; int64_t size; } dim[16];
  kvl_storage *storage[24];
  kvl_storage *workspace;
};

/* Check one tensor against `dtypes` and a shape such as "tokens heads 2 head_dim": a name
 * binds its size on first use and must agree later; "..." takes any number of dims. A name
 * ending in '?' is optional. Returns 1 when t is there and right, else 0 (and the status
 * is set unless t was an absent option). After a failure, calls do nothing. */
int kvl__arg(struct kvl__call *call, const char *name, const kvl_tensor *t,
             unsigned dtypes, const char *shape);
/* The dtype of a tensor as a set; of NULL, every dtype (its own check complains). */
static inline unsigned kvl__like(const kvl_tensor *t) {
  return t ? 1u << t->dtype : KVL__ANY;
}
/* Size bound to a name; 0 when it was never bound. */
int64_t kvl__dim(const struct kvl__call *call, const char *name);
/* Set the failure of `call` unless it has one. Returns the status. */
int kvl__call_fail(struct kvl__call *call, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* t has the shape of `other`, which the words call other_name. */
void kvl__expect_shape_of(struct kvl__call *call, const char *name, const kvl_tensor *t,
                          const char *other_name, const kvl_tensor *other);
/* Workspace for these args, or NULL when the op wants none. Sets the status on failure. */
void *kvl__call_workspace(struct kvl__call *call, enum kvl_op op, const void *args);
/* Launch on the current stream; every tensor seen by kvl__arg is marked as used there. */
int kvl__launch(struct kvl__call *call, enum kvl_op op, const void *args, size_t size);
#define KVL__LAUNCH(call, op, args) kvl__launch(call, KVL_OP_##op, &(args), sizeof(args))

/* kvl__arg for memory that kernels read in vectors: a view may begin anywhere. */
int kvl__vector_arg(struct kvl__call *c, const char *name, const kvl_tensor *t,
                    unsigned dtypes, const char *shape);

#endif
