/* The file of an lmdb store, for store_lmdb.c. Codes are LMDB's: 0, MDB_..., or an errno. */
#ifndef KVL_STORE_LMDB_H
#define KVL_STORE_LMDB_H

#include <lmdb.h>
#include <pthread.h>
#include <sys/types.h>

#include "core/status.h"

/* Of all records, in the tree `main`. */
struct kvl__lmdb_totals {
  uint32_t magic, version;
  uint64_t tick; /* of the newest use */
  int64_t bytes; /* of all blocks */
};

struct kvl__lmdb {
  MDB_env *env;
  MDB_dbi main, records, used, order;
  pthread_rwlock_t map; /* read: a transaction runs; write: the map changes */
  int map_failed;       /* a code: there is no map any more */
  dev_t device;
  ino_t inode;
  struct kvl__lmdb *next; /* in the list of open files */
  char path[];            /* without links, from the root */
};

/* Opens or creates a file. Returns 1 if there was a file that the machine had left torn,
 * else 0. Errors: INVALID if it is open in this process already; NO_MEMORY; IO; FORMAT. */
int kvl__lmdb_open(const char *path, struct kvl__lmdb **out);
void kvl__lmdb_close(struct kvl__lmdb *l);
/* What was committed is on the disk. */
int kvl__lmdb_sync(struct kvl__lmdb *l);

/* A transaction runs from a begin that returns 0 to its abort or commit. flags: 0 or
 * MDB_RDONLY. */
int kvl__lmdb_begin(struct kvl__lmdb *l, unsigned flags, MDB_txn **txn);
void kvl__lmdb_abort(struct kvl__lmdb *l, MDB_txn *txn);
int kvl__lmdb_commit(struct kvl__lmdb *l, MDB_txn *txn);
/* Call this after MDB_MAP_FULL in a map of `full` bytes. It doubles the map, unless somebody
 * else already has. With full 0 it takes over the size from another process. */
int kvl__lmdb_grow(struct kvl__lmdb *l, size_t full);

MDB_val kvl__lmdb_val(const void *bytes, size_t n);
/* Copies the value at `key`, of exactly n bytes; a copy, because LMDB does not align values.
 */
int kvl__lmdb_get(MDB_txn *txn, MDB_dbi tree, MDB_val key, void *out, size_t n);
int kvl__lmdb_put(MDB_txn *txn, MDB_dbi tree, MDB_val key, const void *bytes, size_t n);
int kvl__lmdb_totals(struct kvl__lmdb *l, MDB_txn *txn, struct kvl__lmdb_totals *out);
int kvl__lmdb_totals_put(struct kvl__lmdb *l, MDB_txn *txn,
                         const struct kvl__lmdb_totals *totals);

#endif
