/* lmdb:PATH: records in a file, by LMDB. Readers lock nothing and copy from the map; writers
 * take turns, across processes too. Four trees, which a transaction changes together:
 *
 *   records  name -> kvl__head and the block
 *   used     name -> struct use: tick of the last use, bytes of the block
 *   order    tick -> name: the least recently used first
 *   main     "kvlab" -> struct totals
 *
 * A get would have to write to say that a record was used. Instead it notes the name, and the
 * next put, or the TOUCHES-th get, files the notes: order is right to within so many gets, and
 * a killed process loses its notes.
 *
 * Nothing is synced before kvl_store_sync or close (MDB_NOSYNC): a sync a put costs milliseconds.
 * What the kernel was given survives the process, in the order it was given, and LMDB writes the
 * page that makes a transaction valid last, so a kill at any time leaves the file whole. When
 * the machine goes down that order is not kept: unsynced.c finds out, and the store begins
 * anew.
 *
 * The map has to be as large as the file becomes. It is doubled when it is full, or follows
 * another process that did; meanwhile no transaction may run, hence the lock `map`. */
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <lmdb.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store.h"
#include "unsynced.h"

enum {
  MAGIC = 0x4b564c53, VERSION = 1, READERS_MAX = 512,
  MAP_BYTES = KVL__ROOM(64 << 20, 64 << 10),       /* at first */
  TOUCHES = KVL__ROOM(256, 4),
};

struct totals {
  uint32_t magic, version;
  uint64_t tick;                 /* of the newest use */
  int64_t bytes;                 /* of all blocks */
};

struct use { uint64_t tick; int64_t bytes; };

struct lmdb {
  MDB_env *env;
  MDB_dbi main, records, used, order;
  pthread_rwlock_t map;          /* read: a transaction runs; write: the map changes */
  int map_failed;                /* an LMDB code: there is no map any more */
  pthread_mutex_t touch_lock;
  struct kvl__name touched[TOUCHES];
  int touches;
  dev_t device;
  ino_t inode;
  struct lmdb *next;             /* in open_files */
  char path[];                   /* without links, from the root */
};

/* ---- transactions --------------------------------------------------------------------- */

/* Double the map that was `full`, or (0) take over its size from another process. */
static int resize(struct lmdb *l, size_t full) {
  MDB_envinfo now;
  pthread_rwlock_wrlock(&l->map);
  mdb_env_info(l->env, &now);
  int code = l->map_failed;
  if (!code && (!full || now.me_mapsize <= full)) {
    code = mdb_env_set_mapsize(l->env, full ? 2 * full : 0);
    l->map_failed = code;
  }
  pthread_rwlock_unlock(&l->map);
  return code;
}

/* 0: a transaction runs, until `end`; else an LMDB code. */
static int begin(struct lmdb *l, unsigned flags, MDB_txn **txn) {
  for (int cleaned = 0;;) {
    pthread_rwlock_rdlock(&l->map);
    int code = l->map_failed ? l->map_failed : mdb_txn_begin(l->env, NULL, flags, txn);
    if (!code) return 0;
    pthread_rwlock_unlock(&l->map);
    if (code == MDB_MAP_RESIZED) {
      if ((code = resize(l, 0))) return code;
    } else if (code != MDB_READERS_FULL || cleaned++ || mdb_reader_check(l->env, &(int){0})) {
      return code; /* the readers were not those of killed processes */
    }
  }
}

static void end_read(struct lmdb *l, MDB_txn *txn) {
  mdb_txn_abort(txn);
  pthread_rwlock_unlock(&l->map);
}

/* What a write transaction is about. */
struct work {
  kvl_store *store;
  struct lmdb *l;
  MDB_txn *txn;
  struct totals totals;
  const struct kvl__name *name;
  const struct kvl__head *head;
  const void *bytes;
  int64_t evicted;
  int touches;
  struct kvl__name touched[TOUCHES];
};

static MDB_val val(const void *bytes, size_t n) { return (MDB_val){n, (void *)bytes}; }

/* The value at `key`, of a fixed size, by a copy: LMDB aligns nothing. */
static int get_fixed(MDB_txn *txn, MDB_dbi tree, MDB_val key, void *out, size_t n) {
  MDB_val value;
  int code = mdb_get(txn, tree, &key, &value);
  if (!code && value.mv_size != n) return MDB_CORRUPTED;
  if (!code) memcpy(out, value.mv_data, n);
  return code;
}

static int put_fixed(MDB_txn *txn, MDB_dbi tree, MDB_val key, const void *bytes, size_t n) {
  MDB_val value = val(bytes, n);
  return mdb_put(txn, tree, &key, &value, 0);
}

static int totals_get(struct lmdb *l, MDB_txn *txn, struct totals *out) {
  return get_fixed(txn, l->main, val("kvlab", 5), out, sizeof *out);
}

/* body(w) and the totals that it changed in one transaction, as often as the map has to grow
 * for it. Returns an LMDB code. */
static int write_all(struct work *w, int (*body)(struct work *)) {
  struct lmdb *l = w->l;
  for (;;) {
    MDB_envinfo info;
    struct totals before;
    w->evicted = 0;
    int code = begin(l, 0, &w->txn);
    if (code) return code;
    mdb_env_info(l->env, &info);
    if (!(code = totals_get(l, w->txn, &before))) {
      w->totals = before;
      code = body(w);
    }
    if (!code && memcmp(&before, &w->totals, sizeof before)) {
      code = put_fixed(w->txn, l->main, val("kvlab", 5), &w->totals, sizeof w->totals);
      if (!code && kvl__unsynced_note(l->path) < 0) code = EIO;
    }
    if (code) mdb_txn_abort(w->txn);
    else code = mdb_txn_commit(w->txn);
    pthread_rwlock_unlock(&l->map);
    if (code == MDB_MAP_FULL) code = resize(l, info.me_mapsize);
    else return code;
    if (code) return code;
  }
}

static int trouble(kvl_store *store, const char *doing, int code) {
  struct lmdb *l = store->state;
  kvl__store_trouble(store, &store->errors, "lmdb store: %s: %s: %s", l->path, doing,
                     mdb_strerror(code));
  return 0;
}

/* ---- what transactions do ----------------------------------------------------------------- */

static int ignore_missing(int code) { return code == MDB_NOTFOUND ? 0 : code; }

/* Give the name, which has `bytes`, a new tick. */
static int use_now(struct work *w, const struct kvl__name *name, int64_t bytes) {
  struct use use = {++w->totals.tick, bytes};
  MDB_val key = val(&use.tick, sizeof use.tick), value = val(name, sizeof *name);
  int code = mdb_put(w->txn, w->l->order, &key, &value, MDB_APPEND);
  if (code) return code;
  return put_fixed(w->txn, w->l->used, val(name, sizeof *name), &use, sizeof use);
}

/* File what gets have noted. */
static int file_touches(struct work *w) {
  for (int i = 0; i < w->touches; i++) {
    struct use use;
    MDB_val name = val(&w->touched[i], sizeof w->touched[i]), tick = val(&use.tick, 8);
    int code = get_fixed(w->txn, w->l->used, name, &use, sizeof use);
    if (code == MDB_NOTFOUND) continue;
    if (!code) code = ignore_missing(mdb_del(w->txn, w->l->order, &tick, NULL));
    if (!code) code = use_now(w, &w->touched[i], use.bytes);
    if (code) return code;
  }
  return 0;
}

/* Take the record out of all trees. */
static int take_out(struct work *w, const struct kvl__name *name) {
  struct use use;
  MDB_val key = val(name, sizeof *name), tick = val(&use.tick, sizeof use.tick);
  int code = get_fixed(w->txn, w->l->used, key, &use, sizeof use);
  if (code) return code;
  code = ignore_missing(mdb_del(w->txn, w->l->order, &tick, NULL));
  if (!code) code = mdb_del(w->txn, w->l->used, &key, NULL);
  if (!code) code = ignore_missing(mdb_del(w->txn, w->l->records, &key, NULL));
  w->totals.bytes -= use.bytes;
  return code;
}

static int evict_oldest(struct work *w) {
  MDB_cursor *cursor;
  MDB_val tick, value;
  struct kvl__name name;
  int code = mdb_cursor_open(w->txn, w->l->order, &cursor);
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
  MDB_val key = val(w->name, sizeof *w->name);
  MDB_val value = {sizeof *w->head + w->head->bytes, NULL};
  int64_t n = (int64_t)w->head->bytes;
  int code = ignore_missing(take_out(w, w->name));
  if (!code) code = file_touches(w);
  while (!code && w->store->capacity && w->totals.bytes + n > w->store->capacity)
    code = evict_oldest(w);
  if (!code) code = mdb_put(w->txn, w->l->records, &key, &value, MDB_RESERVE);
  if (code) return code;
  memcpy(value.mv_data, w->head, sizeof *w->head);
  if (n > 0) memcpy((char *)value.mv_data + sizeof *w->head, w->bytes, (size_t)n);
  w->totals.bytes += n;
  return use_now(w, w->name, n);
}

static int remove_body(struct work *w) { return take_out(w, w->name); }

/* ---- the backend -------------------------------------------------------------------------- */

/* Move the notes of gets into w, when there are at least `from`. */
static void take_touches(struct work *w, int from) {
  struct lmdb *l = w->l;
  pthread_mutex_lock(&l->touch_lock);
  if (l->touches >= from) {
    w->touches = l->touches;
    memcpy(w->touched, l->touched, (size_t)l->touches * sizeof *l->touched);
    l->touches = 0;
  }
  pthread_mutex_unlock(&l->touch_lock);
}

static void touch(struct lmdb *l, const struct kvl__name *name) {
  pthread_mutex_lock(&l->touch_lock);
  if (l->touches < TOUCHES) l->touched[l->touches++] = *name;
  pthread_mutex_unlock(&l->touch_lock);
}

static void file_touches_from(kvl_store *store, int from) {
  struct work w = {.store = store, .l = store->state};
  take_touches(&w, from);
  int code = w.touches ? write_all(&w, file_touches) : 0;
  if (code) trouble(store, "order of use", code);
}

static int lmdb_put(kvl_store *store, const struct kvl__name *name,
                    const struct kvl__head *head, const void *bytes) {
  struct work w = {.store = store, .l = store->state, .name = name, .head = head,
                   .bytes = bytes};
  take_touches(&w, 1);
  int code = write_all(&w, put_body);
  if (code) return trouble(store, "put", code);
  atomic_fetch_add(&store->evictions, w.evicted);
  return 1;
}

static int lmdb_get(kvl_store *store, const struct kvl__name *name, void *out, size_t n) {
  struct lmdb *l = store->state;
  MDB_txn *txn;
  MDB_val key = val(name, sizeof *name), value;
  int code = begin(l, MDB_RDONLY, &txn), status = 0;
  if (code) return trouble(store, "get", code);
  code = mdb_get(txn, l->records, &key, &value);
  if (!code) status = kvl__store_accept(store, name, value.mv_data, value.mv_size, out, n);
  end_read(l, txn);
  if (code && code != MDB_NOTFOUND) return trouble(store, "get", code);
  if (status) {
    touch(l, name);
    file_touches_from(store, TOUCHES);
  }
  return status;
}

static void lmdb_find(kvl_store *store, const struct kvl__name *names, int n, uint8_t *found) {
  struct lmdb *l = store->state;
  MDB_txn *txn;
  int code = begin(l, MDB_RDONLY, &txn), failed = code;
  memset(found, 0, (size_t)n);
  if (!code) {
    for (int i = 0; i < n; i++) {
      MDB_val key = val(&names[i], sizeof names[i]), value;
      code = mdb_get(txn, l->records, &key, &value);
      found[i] = !code;
      if (code && code != MDB_NOTFOUND) failed = code;
    }
    end_read(l, txn);
  }
  if (failed) trouble(store, "find", failed);
}

static int lmdb_remove(kvl_store *store, const struct kvl__name *name) {
  struct work w = {.store = store, .l = store->state, .name = name};
  int code = write_all(&w, remove_body);
  if (code && code != MDB_NOTFOUND) return trouble(store, "remove", code);
  return !code;
}

static int lmdb_sync(kvl_store *store) {
  struct lmdb *l = store->state;
  MDB_txn *txn;
  file_touches_from(store, 1);
  int code = begin(l, 0, &txn); /* keeps others from writing until the note is gone */
  if (!code) {
    code = mdb_env_sync(l->env, 1);
    if (!code) kvl__unsynced_clear(l->path);
    end_read(l, txn);
  }
  if (!code) return KVL_OK;
  return kvl__fail(KVL_ERR_IO, "lmdb store: %s: sync: %s", l->path, mdb_strerror(code));
}

static void lmdb_held(kvl_store *store, kvl_store_stats *out) {
  struct lmdb *l = store->state;
  MDB_txn *txn;
  MDB_stat stat;
  struct totals totals;
  int code = begin(l, MDB_RDONLY, &txn);
  if (!code) {
    code = totals_get(l, txn, &totals);
    if (!code) code = mdb_stat(txn, l->records, &stat);
    end_read(l, txn);
  }
  if (code) {
    trouble(store, "stats", code);
  } else {
    out->bytes_held = totals.bytes;
    out->records = (int64_t)stat.ms_entries;
  }
}

/* ---- open and close ------------------------------------------------------------------------ */

/* LMDB's locks do not work when a process opens a file twice. */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static struct lmdb *open_files;

static int check_not_open(const char *path) {
  struct stat st;
  if (stat(path, &st) < 0) return KVL_OK;
  for (struct lmdb *l = open_files; l; l = l->next)
    if (l->device == st.st_dev && l->inode == st.st_ino)
      return kvl__fail(KVL_ERR_INVALID, "lmdb store: %s is open in this process", path);
  return KVL_OK;
}

/* Where the file ends before what LMDB takes for its last page, somebody has cut it, and to
 * read there through the map would kill us. Zeros are no records and no pages of a tree. */
static int restore_length(struct lmdb *l, int fd) {
  MDB_envinfo info;
  MDB_stat stat;
  struct stat st;
  mdb_env_info(l->env, &info);
  mdb_env_stat(l->env, &stat);
  off_t bytes = (off_t)(info.me_last_pgno + 1) * stat.ms_psize;
  if (fstat(fd, &st) < 0) return errno;
  return st.st_size < bytes && ftruncate(fd, bytes) < 0 ? errno : 0;
}

/* Check whose file it is, or make the trees of a new one. */
static int open_trees(struct lmdb *l, MDB_txn *txn, int fd) {
  struct totals totals;
  MDB_stat stat;
  int code = restore_length(l, fd);
  if (!code) code = mdb_dbi_open(txn, NULL, 0, &l->main);
  if (code) return code;
  code = totals_get(l, txn, &totals);
  if (code == MDB_NOTFOUND) {
    code = mdb_stat(txn, l->main, &stat);
    if (!code && stat.ms_entries > 0) return MDB_INCOMPATIBLE;
    totals = (struct totals){MAGIC, VERSION, 0, 0};
    if (!code) code = put_fixed(txn, l->main, val("kvlab", 5), &totals, sizeof totals);
  }
  if (code) return code;
  if (totals.magic != MAGIC) return MDB_INCOMPATIBLE;
  if (totals.version != VERSION) return MDB_VERSION_MISMATCH;
  code = mdb_dbi_open(txn, "records", MDB_CREATE, &l->records);
  if (!code) code = mdb_dbi_open(txn, "used", MDB_CREATE, &l->used);
  if (!code) code = mdb_dbi_open(txn, "order", MDB_CREATE | MDB_INTEGERKEY, &l->order);
  return code;
}

static int open_file(struct lmdb *l) {
  MDB_txn *txn;
  struct stat st;
  int fd, code = mdb_env_create(&l->env);
  if (code) return code;
  mdb_env_set_maxdbs(l->env, 3);
  mdb_env_set_maxreaders(l->env, READERS_MAX);
  mdb_env_set_mapsize(l->env, MAP_BYTES);
  code = mdb_env_open(l->env, l->path, MDB_NOSUBDIR | MDB_NOSYNC | MDB_NOTLS, 0666);
  if (code) return code;
  mdb_reader_check(l->env, &(int){0}); /* forget the readers of killed processes */
  mdb_env_get_fd(l->env, &fd);
  if (fstat(fd, &st) < 0) return errno;
  l->device = st.st_dev;
  l->inode = st.st_ino;
  if ((code = begin(l, 0, &txn))) return code;
  code = open_trees(l, txn, fd);
  if (!code && kvl__unsynced_note(l->path) < 0) code = EIO;
  if (code) mdb_txn_abort(txn);
  else code = mdb_txn_commit(txn);
  pthread_rwlock_unlock(&l->map);
  return code;
}

static void free_file(struct lmdb *l) {
  if (l->env) mdb_env_close(l->env);
  pthread_rwlock_destroy(&l->map);
  pthread_mutex_destroy(&l->touch_lock);
  free(l);
}

static struct lmdb *new_file(const char *path) {
  struct lmdb *l = kvl__malloc(sizeof *l + strlen(path) + 1, "an lmdb store");
  if (!l) return NULL;
  memset(l, 0, sizeof *l);
  strcpy(l->path, path);
  pthread_rwlockattr_t attr; /* or readers could keep the map from growing for ever */
  pthread_rwlockattr_init(&attr);
  pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
  pthread_rwlock_init(&l->map, &attr);
  pthread_rwlockattr_destroy(&attr);
  pthread_mutex_init(&l->touch_lock, NULL);
  return l;
}

/* The path of a file, which need not be there, without links and from the root. */
static int resolve(const char *path, char out[PATH_MAX]) {
  char folder[PATH_MAX], name[PATH_MAX];
  if (realpath(path, out)) return 0;
  if (errno != ENOENT || strlen(path) >= PATH_MAX) return errno;
  strcpy(folder, path);
  strcpy(name, path);
  if (!realpath(dirname(folder), out)) return errno;
  size_t used = strlen(out);
  int n = snprintf(out + used, PATH_MAX - used, "/%s", basename(name));
  return n < (int)(PATH_MAX - used) ? 0 : ENAMETOOLONG;
}

static int open_locked(kvl_store *store, const char *given) {
  char path[PATH_MAX];
  int code = resolve(given, path);
  if (code) return kvl__fail(KVL_ERR_IO, "lmdb store: %s: %s", given, strerror(code));
  int status = check_not_open(path);
  if (status < 0) return status;
  int lost = kvl__unsynced_recover(path);
  if (lost < 0) return lost;
  struct lmdb *l = new_file(path);
  if (!l) return KVL_ERR_NO_MEMORY;
  code = open_file(l);
  if (code) {
    status = code == ENOMEM ? KVL_ERR_NO_MEMORY
           : code > 0 ? KVL_ERR_IO : KVL_ERR_FORMAT;
    free_file(l);
    return kvl__fail(status, "lmdb store: %s: %s", path, code == MDB_INCOMPATIBLE
                     ? "an LMDB file of another program" : mdb_strerror(code));
  }
  store->state = l;
  l->next = open_files;
  open_files = l;
  if (lost)
    kvl__store_trouble(store, &store->damaged, "lmdb store: %s: the machine went down before "
                       "it was synced; it begins anew", path);
  return KVL_OK;
}

static int lmdb_open(kvl_store *store, const char *path) {
  if (!*path) return kvl__fail(KVL_ERR_INVALID, "store: url is \"lmdb:\", expected lmdb:PATH");
  pthread_mutex_lock(&open_lock);
  int status = open_locked(store, path);
  pthread_mutex_unlock(&open_lock);
  return status;
}

static void lmdb_close(kvl_store *store) {
  struct lmdb *l = store->state, **at = &open_files;
  lmdb_sync(store);
  pthread_mutex_lock(&open_lock);
  while (*at != l) at = &(*at)->next;
  *at = l->next;
  free_file(l);
  pthread_mutex_unlock(&open_lock);
}

const struct kvl__store_backend kvl__store_lmdb = {
  .scheme = "lmdb", .form = "lmdb:PATH", .open = lmdb_open, .close = lmdb_close,
  .put = lmdb_put, .get = lmdb_get, .find = lmdb_find, .remove = lmdb_remove,
  .sync = lmdb_sync, .held = lmdb_held,
};
