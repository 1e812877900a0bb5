/* lmdb:PATH: records in a file, by LMDB. Readers do not wait for writers and copy from the
 * memory map. Writers take turns, across processes too. A transaction changes these four
 * trees together:
 *
 *   records  name -> kvl__head and the block
 *   used     name -> struct use: the tick of the last use, the bytes of the block
 *   order    tick -> name: the least recently used first
 *   main     "kvlab" -> kvl__lmdb_totals
 *
 * To record that it used a record, a get would have to write. Instead it notes the name in
 * memory. The next put, or the TOUCHES-th get, writes these notes to the file. So the
 * order of use is right to within TOUCHES gets, and a killed process loses its notes.
 * store_lmdb_file.c says what survives a kill and a power failure. */
#include "store/store.h"
#include "store/store_lmdb.h"

enum { TOUCHES = KVL__ROOM(256, 4) };

struct use {
  uint64_t tick;
  int64_t bytes;
};

/* The names of records that gets have used, not yet written to the file. */
struct touches {
  int count;
  struct kvl__name names[TOUCHES];
};

struct lmdb {
  struct kvl__lmdb *file;
  pthread_mutex_t touch_lock;
  struct touches touches;
};

/* ---- transactions --------------------------------------------------------------------- */

/* A write transaction, with the arguments and results of its body. */
struct work {
  kvl_store *store;
  struct kvl__lmdb *file;
  MDB_txn *txn;
  struct kvl__lmdb_totals totals;
  const struct kvl__name *name;
  const struct kvl__head *head;
  const void *bytes;
  int64_t evicted;
  struct touches touches;
};

static MDB_val val_of(const struct kvl__name *name) {
  return kvl__lmdb_val(name, sizeof *name);
}

/* Runs body(w) and stores the totals that it changed, in one transaction. If the map is
 * too small, it makes the map larger and starts again. */
static int write_all(struct work *w, int (*body)(struct work *)) {
  struct kvl__lmdb *file = w->file;
  for (;;) {
    MDB_envinfo info;
    struct kvl__lmdb_totals before;
    w->evicted = 0;
    int code = kvl__lmdb_begin(file, 0, &w->txn);
    if (code) return code;
    mdb_env_info(file->env, &info);
    code = kvl__lmdb_totals(file, w->txn, &before);
    w->totals = before;
    if (!code) code = body(w);
    if (!code && memcmp(&before, &w->totals, sizeof before))
      code = kvl__lmdb_totals_put(file, w->txn, &w->totals);
    if (code) kvl__lmdb_abort(file, w->txn);
    else code = kvl__lmdb_commit(file, w->txn);
    if (code == MDB_MAP_FULL) code = kvl__lmdb_grow(file, info.me_mapsize);
    else return code;
    if (code) return code;
  }
}

static int trouble(kvl_store *store, const char *doing, int code) {
  kvl__store_trouble(store, &store->errors, "lmdb store: %s: %s: %s",
                     ((struct lmdb *)store->state)->file->path, doing, kvl__lmdb_words(code));
  return 0;
}

/* ---- what transactions do -------------------------------------------------------------- */

static int ignore_missing(int code) { return code == MDB_NOTFOUND ? 0 : code; }

/* Marks a record, whose block has `bytes` bytes, as used now by giving it a new tick. */
static int use_now(struct work *w, const struct kvl__name *name, int64_t bytes) {
  struct use use = {++w->totals.tick, bytes};
  MDB_val key = kvl__lmdb_val(&use.tick, sizeof use.tick), value = val_of(name);
  int code = mdb_put(w->txn, w->file->order, &key, &value, MDB_APPEND);
  if (code) return code;
  return kvl__lmdb_put(w->txn, w->file->used, val_of(name), &use, sizeof use);
}

/* Writes the notes of gets to the file. */
static int file_touches(struct work *w) {
  for (int i = 0; i < w->touches.count; i++) {
    const struct kvl__name *name = &w->touches.names[i];
    struct use use;
    MDB_val tick = kvl__lmdb_val(&use.tick, sizeof use.tick);
    int code = kvl__lmdb_get(w->txn, w->file->used, val_of(name), &use, sizeof use);
    if (code == MDB_NOTFOUND) continue;
    if (!code) code = ignore_missing(mdb_del(w->txn, w->file->order, &tick, NULL));
    if (!code) code = use_now(w, name, use.bytes);
    if (code) return code;
  }
  return 0;
}

/* Removes the record from all trees. */
static int take_out(struct work *w, const struct kvl__name *name) {
  struct use use;
  MDB_val key = val_of(name), tick = kvl__lmdb_val(&use.tick, sizeof use.tick);
  int code = kvl__lmdb_get(w->txn, w->file->used, key, &use, sizeof use);
  if (code) return code;
  code = ignore_missing(mdb_del(w->txn, w->file->order, &tick, NULL));
  if (!code) code = mdb_del(w->txn, w->file->used, &key, NULL);
  if (!code) code = ignore_missing(mdb_del(w->txn, w->file->records, &key, NULL));
  w->totals.bytes -= use.bytes;
  return code;
}

static int evict_oldest(struct work *w) {
  MDB_cursor *cursor;
  MDB_val tick, value;
  struct kvl__name name;
  int code = mdb_cursor_open(w->txn, w->file->order, &cursor);
  if (code) return code;
  code = mdb_cursor_get(cursor, &tick, &value, MDB_FIRST);
  if (!code && value.mv_size != sizeof name) code = MDB_CORRUPTED;
  if (!code) memcpy(&name, value.mv_data, sizeof name);
  mdb_cursor_close(cursor);
  if (!code) code = take_out(w, &name);
  w->evicted++;
  return code;
}

static int put_body(struct work *w) {
  MDB_val key = val_of(w->name);
  MDB_val value = {sizeof *w->head + w->head->bytes, NULL};
  int64_t n = (int64_t)w->head->bytes;
  int code = ignore_missing(take_out(w, w->name));
  if (!code) code = file_touches(w);
  while (!code && w->store->capacity && w->totals.bytes + n > w->store->capacity)
    code = evict_oldest(w);
  if (!code) code = mdb_put(w->txn, w->file->records, &key, &value, MDB_RESERVE);
  if (code) return code;
  memcpy(value.mv_data, w->head, sizeof *w->head);
  if (n > 0) memcpy((char *)value.mv_data + sizeof *w->head, w->bytes, (size_t)n);
  w->totals.bytes += n;
  return use_now(w, w->name, n);
}

static int remove_body(struct work *w) { return take_out(w, w->name); }

/* ---- the backend ----------------------------------------------------------------------- */

/* Moves the notes of gets into w, if there are at least `from` of them. */
static void take_touches(struct work *w, int from) {
  struct lmdb *l = w->store->state;
  pthread_mutex_lock(&l->touch_lock);
  if (l->touches.count >= from) {
    w->touches = l->touches;
    l->touches.count = 0;
  }
  pthread_mutex_unlock(&l->touch_lock);
}

static void touch(struct lmdb *l, const struct kvl__name *name) {
  pthread_mutex_lock(&l->touch_lock);
  if (l->touches.count < TOUCHES) l->touches.names[l->touches.count++] = *name;
  pthread_mutex_unlock(&l->touch_lock);
}

static struct work work_on(kvl_store *store, const struct kvl__name *name) {
  return (struct work){
      .store = store, .file = ((struct lmdb *)store->state)->file, .name = name};
}

static void file_touches_from(kvl_store *store, int from) {
  struct work w = work_on(store, NULL);
  take_touches(&w, from);
  int code = w.touches.count ? write_all(&w, file_touches) : 0;
  if (code) trouble(store, "order of use", code);
}

static int lmdb_put(kvl_store *store, const struct kvl__name *name,
                    const struct kvl__head *head, const void *bytes) {
  struct work w = work_on(store, name);
  w.head = head;
  w.bytes = bytes;
  take_touches(&w, 1);
  int code = write_all(&w, put_body);
  if (code) return trouble(store, "put", code);
  atomic_fetch_add(&store->evictions, w.evicted);
  return 1;
}

static int lmdb_get(kvl_store *store, const struct kvl__name *name, void *out, size_t n) {
  struct lmdb *l = store->state;
  MDB_txn *txn;
  MDB_val key = val_of(name), value;
  int code = kvl__lmdb_begin(l->file, MDB_RDONLY, &txn), status = 0;
  if (code) return trouble(store, "get", code);
  code = mdb_get(txn, l->file->records, &key, &value);
  if (!code) status = kvl__store_accept(store, name, value.mv_data, value.mv_size, out, n);
  kvl__lmdb_abort(l->file, txn);
  if (code && code != MDB_NOTFOUND) return trouble(store, "get", code);
  if (status == 1) {
    touch(l, name);
    file_touches_from(store, TOUCHES);
  }
  return status;
}

static void lmdb_find(kvl_store *store, const struct kvl__name *names, int n,
                      uint8_t *found) {
  struct lmdb *l = store->state;
  MDB_txn *txn;
  int code = kvl__lmdb_begin(l->file, MDB_RDONLY, &txn), failed = code;
  memset(found, 0, (size_t)n);
  if (!code) {
    for (int i = 0; i < n; i++) {
      MDB_val key = val_of(&names[i]), value;
      code = mdb_get(txn, l->file->records, &key, &value);
      found[i] = !code;
      if (code && code != MDB_NOTFOUND) failed = code;
    }
    kvl__lmdb_abort(l->file, txn);
  }
  if (failed) trouble(store, "find", failed);
}

static int lmdb_remove(kvl_store *store, const struct kvl__name *name) {
  struct work w = work_on(store, name);
  int code = write_all(&w, remove_body);
  if (code && code != MDB_NOTFOUND) return trouble(store, "remove", code);
  return !code;
}

static int lmdb_sync(kvl_store *store) {
  struct lmdb *l = store->state;
  file_touches_from(store, 1);
  int code = kvl__lmdb_sync(l->file);
  if (!code) return KVL_OK;
  return kvl__fail(KVL_ERR_IO, "lmdb store: %s: sync: %s", l->file->path,
                   kvl__lmdb_words(code));
}

static void lmdb_held(kvl_store *store, kvl_store_stats *out) {
  struct lmdb *l = store->state;
  MDB_txn *txn;
  MDB_stat stat;
  struct kvl__lmdb_totals totals;
  int code = kvl__lmdb_begin(l->file, MDB_RDONLY, &txn);
  if (!code) {
    code = kvl__lmdb_totals(l->file, txn, &totals);
    if (!code) code = mdb_stat(txn, l->file->records, &stat);
    kvl__lmdb_abort(l->file, txn);
  }
  if (code) {
    trouble(store, "stats", code);
  } else {
    out->bytes_held = totals.bytes;
    out->records = (int64_t)stat.ms_entries;
  }
}

static int lmdb_open(kvl_store *store, const char *path) {
  if (!*path)
    return kvl__fail(KVL_ERR_INVALID, "store: url is \"lmdb:\", expected lmdb:PATH");
  struct lmdb *l = kvl__malloc(sizeof *l, "an lmdb store");
  if (!l) return KVL_ERR_NO_MEMORY;
  int lost = kvl__lmdb_open(path, &l->file);
  if (lost < 0) {
    free(l);
    return lost;
  }
  l->touches.count = 0;
  pthread_mutex_init(&l->touch_lock, NULL);
  store->state = l;
  if (lost)
    kvl__store_trouble(store, &store->damaged,
                       "lmdb store: %s: the machine went down before the file "
                       "was synced, so the store starts empty",
                       l->file->path);
  return KVL_OK;
}

static void lmdb_close(kvl_store *store) {
  struct lmdb *l = store->state;
  lmdb_sync(store);
  kvl__lmdb_close(l->file);
  pthread_mutex_destroy(&l->touch_lock);
  free(l);
}

const struct kvl__store_backend kvl__store_lmdb = {
    .scheme = "lmdb",
    .form = "lmdb:PATH",
    .open = lmdb_open,
    .close = lmdb_close,
    .put = lmdb_put,
    .get = lmdb_get,
    .find = lmdb_find,
    .remove = lmdb_remove,
    .sync = lmdb_sync,
    .held = lmdb_held,
};
