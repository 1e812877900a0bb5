/* The file of an lmdb store, for store_lmdb.c. All functions but kvl__lmdb_open return
 * LMDB's codes: 0, MDB_..., or an errno; or KVL__LMDB_CUT. */
#ifndef KVL_STORE_LMDB_H
#define KVL_STORE_LMDB_H

#include <lmdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "core/status.h"

enum { KVL__LMDB_CUT = -1 }; /* somebody has cut the file off while it was open */

/* What a code means. */
const char *kvl__lmdb_words(int code);

/* Totals over all records, stored in the tree `main`. */
struct kvl__lmdb_totals {
  uint32_t magic, version;
  uint64_t tick; /* of the latest use */
  int64_t bytes; /* of all blocks */
};

struct kvl__lmdb {
  MDB_env *env;
  MDB_dbi main, records, used, order;
  pthread_rwlock_t map;       /* transactions hold it to read, changes of the map to write */
  _Atomic int64_t bytes_seen; /* the longest that the file was; LMDB never makes it shorter */
  atomic_int is_cut;          /* somebody else did; no transaction begins any more */
  int map_failed; /* not 0: why changing the map failed; there is no map any more */
  dev_t device;
  ino_t inode;
  struct kvl__lmdb *next; /* in the list of open files */
  char path[];            /* absolute, without symbolic links */
};

/* Opens or creates a file. Returns 0, or 1 if it replaced a file that may have been torn
 * when the machine went down. Errors: INVALID if it is open in this process already;
 * NO_MEMORY; IO; FORMAT. */
int kvl__lmdb_open(const char *path, struct kvl__lmdb **out);
void kvl__lmdb_close(struct kvl__lmdb *l);
/* Writes everything that was committed to the disk. */
int kvl__lmdb_sync(struct kvl__lmdb *l);

/* If begin returns 0, it has started a transaction, which abort or commit ends. flags: 0
 * or MDB_RDONLY. */
int kvl__lmdb_begin(struct kvl__lmdb *l, unsigned flags, MDB_txn **txn);
void kvl__lmdb_abort(struct kvl__lmdb *l, MDB_txn *txn);
int kvl__lmdb_commit(struct kvl__lmdb *l, MDB_txn *txn);
/* Call this after MDB_MAP_FULL in a map of `full` bytes. It doubles the map, unless somebody
 * else already has. With full 0 it adopts the size that another process chose. */
int kvl__lmdb_grow(struct kvl__lmdb *l, size_t full);

MDB_val kvl__lmdb_val(const void *bytes, size_t n);
/* Copies the value of `key`, which must have exactly n bytes. It makes a copy because LMDB
 * does not align values. */
int kvl__lmdb_get(MDB_txn *txn, MDB_dbi tree, MDB_val key, void *out, size_t n);
int kvl__lmdb_put(MDB_txn *txn, MDB_dbi tree, MDB_val key, const void *bytes, size_t n);
int kvl__lmdb_totals(struct kvl__lmdb *l, MDB_txn *txn, struct kvl__lmdb_totals *out);
int kvl__lmdb_totals_put(struct kvl__lmdb *l, MDB_txn *txn,
                         const struct kvl__lmdb_totals *totals);

#endif
