/* What the files of runtime/ share: failure words, allocation, and the insides of devices,
 * streams and storage. */
#ifndef KVL_INTERNAL_H
#define KVL_INTERNAL_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend.h"

#ifdef KVL_DEBUG /* a caller's bug inside the library, never the world's doing */
#define KVL_CHECK(condition)                                                          \
  do {                                                                                \
    if (!(condition)) {                                                               \
      fprintf(stderr, "%s:%d: KVL_CHECK(%s)\n", __FILE__, __LINE__, #condition);      \
      abort();                                                                        \
    }                                                                                 \
  } while (0)
#else
#define KVL_CHECK(condition) ((void)0)
#endif

/* How many entries a container starts with, or holds: one or two in a hostile build, so that
 * growing and waiting happen all the time. */
#ifdef KVL_HOSTILE
#define KVL__ROOM(normal, hostile) (hostile)
#else
#define KVL__ROOM(normal, hostile) (normal)
#endif

/* Record the words of a failure and return `status`. */
int kvl__fail(int status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* malloc and realloc that record NO_MEMORY and honour kvl_fail_allocation. `what` names
 * the thing in the error. */
void *kvl__malloc(size_t bytes, const char *what);
void *kvl__realloc(void *p, size_t bytes, const char *what);
/* 1 when the allocation about to be made has been told to fail. */
int kvl__allocation_fails(void);

/* ---- device ------------------------------------------------------------------------ */

enum { KVL__STREAMS_MAX = 64, KVL__SIZE_CLASSES = 60 };

struct kvl_stream {
  kvl_device *device;
  void *queue;
  int id;                        /* index in device->streams */
};

struct kvl_event {
  kvl_device *device;
  void *mark;
  int recorded;
};

enum { KVL__UNCACHED = -1, KVL__LENT = -2, KVL__PINNED = -3 };   /* in place of a size class */

/* Memory under tensors. refs counts kvl_tensor handles; `used` has a bit for every stream
 * that launched work on it since it was allocated. While free it waits in the list of its
 * home stream, whose later work may take it without waiting. */
struct kvl_storage {
  kvl_device *device;
  kvl_graph *graph;              /* was allocated while it was recorded: stays with it */
  kvl_storage *graph_next;       /* in the list of its graph */
  void *ptr;
  size_t bytes;
  kvl_storage *next;             /* in a free list */
  uint64_t used;
  int refs, home, size_class;
};

struct kvl_device {
  const kvl_backend *backend;
  void *ctx;
  int opens, storages;           /* closed when both are 0 */
  int index;
  char name[24], description[160];
  kvl_stream *streams[KVL__STREAMS_MAX];
  kvl_stream *current;
  void *scratch_mark;            /* joins streams when storage is freed */
  kvl_graph *recording;          /* NULL: none */
  kvl_storage *free_lists[KVL__STREAMS_MAX][KVL__SIZE_CLASSES];
  kvl_device_stats stats;
};

/* An URGENT stream's work goes first where both could run. */
int kvl__stream_open(kvl_device *dev, enum kvl_queue_kind kind, kvl_stream **out);
/* A failure while a graph is recorded, of what needs the host: `what` cannot be in it. */
int kvl__not_recording(kvl_device *dev, const char *what);
/* Drops the device once nothing holds it. */
void kvl__device_unref(kvl_device *dev);
/* `status` with the driver's words after `doing`; words that are recorded stay where the
 * driver has none. */
int kvl__device_failed(kvl_device *dev, int status, const char *doing);

/* ---- allocator: stream-ordered, caching ----------------------------------------------- */

/* One reference on at least `bytes` bytes for the current stream. */
int kvl__storage_open(kvl_device *dev, size_t bytes, kvl_storage **out);
int kvl__storage_wrap(kvl_device *dev, void *memory, size_t bytes, kvl_storage **out);
int kvl__storage_open_pinned(kvl_device *dev, size_t bytes, int huge_pages,
                             kvl_storage **out);
void kvl__storage_unref(kvl_storage *s);
/* Hand the free memory of one stream (-1: of all) back to the device. */
void kvl__allocator_trim(kvl_device *dev, int stream);
/* Memory of a storage without references back to the device, at once. */
void kvl__storage_drop(kvl_storage *s);

/* ---- graph: the memory of a recorded step stays with it -------------------------------- */

/* A storage was allocated while dev->recording is set. */
void kvl__graph_keep(kvl_storage *s);
/* While a graph is recorded: 1 when it takes over the last reference of `s` until the end,
 * because s is older and work outside the recording may still use it. */
int kvl__graph_defers(kvl_storage *s);

/* ---- call: check the arguments of an op, then launch it ---------------------------------- */

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
/* KV memory of one layer; `shape` names its dims, the last four of which are
 * "2 kv_heads block_size head_dim". */
struct kvl_cache_view kvl__memory_arg(struct kvl__call *c, const char *name,
                                      const kvl_tensor *memory, unsigned dtypes,
                                      const char *shape);

/* The scales of an f8e4m3 cache; both may be NULL. */
void kvl__scale_args(struct kvl__call *c, struct kvl_cache_view *view,
                     const kvl_tensor *k_scale, const kvl_tensor *v_scale);
/* heads is a multiple of kv_heads. */
void kvl__expect_groups(struct kvl__call *c);
void kvl__expect_block_size(struct kvl__call *c, int block_size);
void kvl__expect_budget(struct kvl__call *c, const kvl_budget *budget);
/* The dtypes of rows that go into a cache, and of queries that read it: its own or f32; of
 * f8e4m3 every float. */
unsigned kvl__rows_of(const kvl_tensor *cache);

/* "bf16 [3, 4]" for messages. */
const char *kvl__tensor_words(const kvl_tensor *t, char *text, size_t size);

#endif
