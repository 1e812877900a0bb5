/* The inside of a block store: what a backend provides, and what it gets from store.c. */
#ifndef KVL_STORE_H
#define KVL_STORE_H

#include <pthread.h>
#include <stdatomic.h>

#include "core/status.h"

/* The name that a record is filed under: the key's lo and hi and the part, as they lie in
 * memory. */
struct kvl__name {
  unsigned char bytes[20];
};

/* Every backend keeps this head in front of a record's bytes. */
struct kvl__head {
  uint32_t magic, version;
  uint64_t bytes;    /* of the block, which follows */
  uint64_t checksum; /* kvl__record_checksum */
};

/* The XXH3-64 of n bytes, seeded with the XXH3-64 of the name. */
uint64_t kvl__record_checksum(const struct kvl__name *name, const void *bytes, size_t n);

/* The functions of a kind of store. Their arguments are checked already. All but open and
 * close may run at the same time in many threads. */
struct kvl__store_backend {
  const char *scheme; /* "lmdb", of lmdb:PATH */
  const char *form;   /* how its URL looks, for messages */
  /* Opens the store. `rest` is the URL after "scheme:". It sets store->state. If it fails,
   * it leaves nothing behind. */
  int (*open)(kvl_store *store, const char *rest);
  void (*close)(kvl_store *store);
  /* Writes a record: `head`, followed by head->bytes bytes from `bytes`. It replaces an
   * older record of this name. Returns 1 if it was stored; 0 if not, after a call of
   * kvl__store_trouble; or a status. */
  int (*put)(kvl_store *store, const struct kvl__name *name, const struct kvl__head *head,
             const void *bytes);
  /* Passes the record to kvl__store_accept and returns its answer, or 0 if there is none.
   * Returns KVL__DAMAGED, too, for what is there under this name and is no record. */
  int (*get)(kvl_store *store, const struct kvl__name *name, void *out, size_t n);
  /* Sets found[i] to whether names[i] is there. */
  void (*find)(kvl_store *store, const struct kvl__name *names, int n, uint8_t *found);
  int (*remove)(kvl_store *store, const struct kvl__name *name);
  int (*sync)(kvl_store *store); /* NULL: nothing to do */
  /* Sets bytes_held and records, which are -1 before, as far as they are known. */
  void (*held)(kvl_store *store, kvl_store_stats *out);
};
extern const struct kvl__store_backend kvl__store_memory, kvl__store_lmdb, kvl__store_redis,
    kvl__store_rediss;

struct kvl_store {
  const struct kvl__store_backend *backend;
  void *state;      /* the backend's own */
  int64_t capacity; /* 0: no limit */
  int timeout_ms;
  atomic_int refs; /* one for the handle, one for each prefetcher */
  _Atomic int64_t hits, misses, puts, evictions, damaged, errors, bytes_read, bytes_written;
  pthread_mutex_t problem_lock;
  char problem[320];
};

/* Checks that the `bytes` bytes at `record` are a head and n bytes that were put under
 * this name, and copies the n bytes to `out`. Returns 1, or counts the damage and returns
 * KVL__DAMAGED, or 0 if another number of bytes was put, as from another cache. */
enum { KVL__DAMAGED = 2 };
int kvl__store_accept(kvl_store *store, const struct kvl__name *name, const void *record,
                      size_t bytes, void *out, size_t n);
/* Keeps the message, and adds one to `counter`: &store->damaged, &store->errors, or NULL, if
 * the trouble goes on and is counted already. */
void kvl__store_trouble(kvl_store *store, _Atomic int64_t *counter, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
