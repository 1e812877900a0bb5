/* Checks the arguments of an op and launches it. Every op_*.c is written with these
 * functions. */
#ifndef KVL_CALL_H
#define KVL_CALL_H

#include "core/allocator.h"

enum {
  KVL__F32 = 1 << KVL_DTYPE_F32,
  KVL__F16 = 1 << KVL_DTYPE_F16,
  KVL__BF16 = 1 << KVL_DTYPE_BF16,
  KVL__F8 = 1 << KVL_DTYPE_F8E4M3,
  KVL__I32 = 1 << KVL_DTYPE_I32,
  KVL__I64 = 1 << KVL_DTYPE_I64,
  KVL__U8 = 1 << KVL_DTYPE_U8,
  KVL__U64 = 1 << KVL_DTYPE_U64,
  KVL__FLOAT = KVL__F32 | KVL__F16 | KVL__BF16,
  KVL__CACHE = KVL__FLOAT | KVL__F8, /* what KV memory may hold */
  KVL__ANY = 0xFF,
};

struct kvl__call {
  const char *op;
  kvl_device *device;
  int status; /* of the first failure */
  int dims, tensors;
  struct {
    const char *name;
    int length;
    int64_t size;
  } dim[16];
  kvl_storage *storage[24];
  kvl_storage *workspace;
};

/* Checks one tensor against `dtypes` and a shape such as "tokens heads 2 head_dim". A name
 * binds its size on first use and must agree later; "..." takes any number of dims. An
 * argument whose name ends in '?' is optional. Returns 1 if t is present and right.
 * Otherwise it returns 0 and sets the status, unless t is an absent optional argument. After
 * a failure, later calls do nothing. */
int kvl__arg(struct kvl__call *call, const char *name, const kvl_tensor *t, unsigned dtypes,
             const char *shape);
/* The dtype of a tensor as a set. For NULL it is the set of all dtypes, because the tensor's
 * own check reports that it is missing. */
static inline unsigned kvl__like(const kvl_tensor *t) {
  return t ? 1u << t->dtype : KVL__ANY;
}
/* Binds the first word of `shape` to a size, or fails if it is bound to another. `name` is
 * the argument that has it. */
void kvl__bind(struct kvl__call *call, const char *name, const char *shape, int64_t size);
/* Size bound to a name; 0 when it was never bound. */
int64_t kvl__dim(const struct kvl__call *call, const char *name);
/* Sets the failure of `call`, unless it has one. Returns the status. */
int kvl__call_fail(struct kvl__call *call, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Checks that t has the shape of `other`, which messages call other_name. */
void kvl__expect_shape_of(struct kvl__call *call, const char *name, const kvl_tensor *t,
                          const char *other_name, const kvl_tensor *other);
/* The workspace for these args, or NULL if the op wants none. Sets the status on failure. */
void *kvl__call_workspace(struct kvl__call *call, enum kvl_op op, const void *args);
/* Launches on the current stream. Every tensor that kvl__arg saw is marked as used there. */
int kvl__launch(struct kvl__call *call, enum kvl_op op, const void *args, size_t size);
#define KVL__LAUNCH(call, op, args) kvl__launch(call, KVL_OP_##op, &(args), sizeof(args))

/* kvl__arg for memory that kernels read in vectors. It checks the alignment, because a view
 * may begin anywhere. */
int kvl__vector_arg(struct kvl__call *c, const char *name, const kvl_tensor *t,
                    unsigned dtypes, const char *shape);

#endif
