/* The file of an lmdb store: opening it, transactions, and the memory map. The map must be
 * as large as the file becomes. It is doubled when it is full, and grows too when another
 * process has doubled its own. While it grows, no transaction of this process may run,
 * hence the lock `map`.
 *
 * Nothing is synced before kvl_store_sync or close (MDB_NOSYNC), because syncing every put
 * would cost milliseconds. If the process is killed, the kernel still has all that it was
 * given, in the order in which it was given. LMDB writes last the page that makes a
 * transaction valid, so a kill at any time leaves the file whole. If the machine goes
 * down, that order is lost: unsynced.c detects this, and the store starts empty. */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/store_lmdb.h"
#include "store/unsynced.h"

enum {
  MAGIC = 0x4b564c53,
  VERSION = 1,
  READERS_MAX = 512,
  MAP_BYTES = KVL__ROOM(64 << 20, 64 << 10), /* at first */
};

/* ---- transactions --------------------------------------------------------------------- */

int kvl__lmdb_grow(struct kvl__lmdb *l, size_t full) {
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

const char *kvl__lmdb_words(int code) {
  /* LMDB's code for a write that ended early, whatever the system said */
  if (code == EIO)
    return "a page was not written whole (Input/output error): the disk is full, the size "
           "of files is limited, or the device failed";
  return code == KVL__LMDB_CUT ? "the file was cut off while it was open"
                               : mdb_strerror(code);
}

/* Checks that the file is as long as it was; if not, reading it through the map would kill
 * the process. A cut between this check and the end of a transaction goes unnoticed. */
static int check_length(struct kvl__lmdb *l, int64_t *bytes) {
  int fd;
  struct stat st;
  int64_t seen = l->bytes_seen; /* before the length: another thread may make it longer */
  mdb_env_get_fd(l->env, &fd);
  if (fstat(fd, &st) < 0) return errno;
  if (st.st_size < seen) l->is_cut = 1;
  if (l->is_cut) return KVL__LMDB_CUT;
  while (seen < st.st_size &&
         !atomic_compare_exchange_weak(&l->bytes_seen, &seen, (int64_t)st.st_size))
    continue;
  if (bytes) *bytes = st.st_size;
  return 0;
}

/* The bytes of all pages that LMDB knows of. */
static int64_t bytes_of_pages(struct kvl__lmdb *l) {
  MDB_envinfo info;
  MDB_stat stat;
  mdb_env_info(l->env, &info);
  mdb_env_stat(l->env, &stat);
  return (int64_t)(info.me_last_pgno + 1) * stat.ms_psize;
}

/* If the file ends before the last page that LMDB knows of, that page was never written or
 * somebody has cut it off. This appends zeros, which are neither records nor pages of a
 * tree. Call it in a write transaction, so that no other process makes the file longer. */
static int restore_length(struct kvl__lmdb *l) {
  int fd;
  int64_t bytes, pages = bytes_of_pages(l);
  int code = check_length(l, &bytes);
  if (code || bytes >= pages) return code;
  mdb_env_get_fd(l->env, &fd);
  return ftruncate(fd, (off_t)pages) < 0 ? errno : 0;
}

/* Begins a transaction in a file that has all pages that LMDB knows of. */
static int begin_whole(struct kvl__lmdb *l, unsigned flags, MDB_txn **txn) {
  int64_t bytes;
  int code = check_length(l, &bytes);
  if (!code) code = mdb_txn_begin(l->env, NULL, flags, txn);
  if (code || bytes >= bytes_of_pages(l)) return code;
  if (!(flags & MDB_RDONLY)) {
    if ((code = restore_length(l))) mdb_txn_abort(*txn);
    return code;
  }
  mdb_txn_abort(*txn);
  if ((code = mdb_txn_begin(l->env, NULL, 0, txn))) return code;
  code = restore_length(l);
  mdb_txn_abort(*txn);
  return code ? code : mdb_txn_begin(l->env, NULL, flags, txn);
}

int kvl__lmdb_begin(struct kvl__lmdb *l, unsigned flags, MDB_txn **txn) {
  for (int cleaned = 0;;) {
    pthread_rwlock_rdlock(&l->map);
    int code = l->map_failed ? l->map_failed : begin_whole(l, flags, txn);
    if (!code) return 0;
    pthread_rwlock_unlock(&l->map);
    if (code == MDB_MAP_RESIZED) {
      if ((code = kvl__lmdb_grow(l, 0))) return code;
    } else if (code != MDB_READERS_FULL || cleaned++ || mdb_reader_check(l->env, &(int){0})) {
      return code; /* the readers belong to processes that still run */
    }
  }
}

void kvl__lmdb_abort(struct kvl__lmdb *l, MDB_txn *txn) {
  mdb_txn_abort(txn);
  pthread_rwlock_unlock(&l->map);
}

int kvl__lmdb_commit(struct kvl__lmdb *l, MDB_txn *txn) {
  int code = kvl__unsynced_note(l->path) < 0 ? EIO : 0;
  if (code) mdb_txn_abort(txn);
  else code = mdb_txn_commit(txn);
  if (!code) check_length(l, NULL); /* to know the new length; the commit is done */
  pthread_rwlock_unlock(&l->map);
  return code;
}

int kvl__lmdb_sync(struct kvl__lmdb *l) {
  MDB_txn *txn; /* keeps others from writing until the note is gone */
  int code = kvl__lmdb_begin(l, 0, &txn);
  if (code) return code;
  code = mdb_env_sync(l->env, 1);
  if (!code) kvl__unsynced_clear(l->path);
  kvl__lmdb_abort(l, txn);
  return code;
}

MDB_val kvl__lmdb_val(const void *bytes, size_t n) { return (MDB_val){n, (void *)bytes}; }

int kvl__lmdb_get(MDB_txn *txn, MDB_dbi tree, MDB_val key, void *out, size_t n) {
  MDB_val value;
  int code = mdb_get(txn, tree, &key, &value);
  if (!code && value.mv_size != n) return MDB_CORRUPTED;
  if (!code) memcpy(out, value.mv_data, n);
  return code;
}

int kvl__lmdb_put(MDB_txn *txn, MDB_dbi tree, MDB_val key, const void *bytes, size_t n) {
  MDB_val value = kvl__lmdb_val(bytes, n);
  return mdb_put(txn, tree, &key, &value, 0);
}

int kvl__lmdb_totals(struct kvl__lmdb *l, MDB_txn *txn, struct kvl__lmdb_totals *out) {
  return kvl__lmdb_get(txn, l->main, kvl__lmdb_val("kvlab", 5), out, sizeof *out);
}

int kvl__lmdb_totals_put(struct kvl__lmdb *l, MDB_txn *txn,
                         const struct kvl__lmdb_totals *totals) {
  return kvl__lmdb_put(txn, l->main, kvl__lmdb_val("kvlab", 5), totals, sizeof *totals);
}

/* ---- open and close -------------------------------------------------------------------- */

/* LMDB's locks do not work when a process opens a file twice, so this list prevents that. */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvl__lmdb *open_files;

static int check_not_open(const char *path) {
  struct stat st;
  if (stat(path, &st) < 0) return KVL_OK;
  for (struct kvl__lmdb *l = open_files; l; l = l->next)
    if (l->device == st.st_dev && l->inode == st.st_ino)
      return kvl__fail(KVL_ERR_INVALID, "lmdb store: %s is open in this process", path);
  return KVL_OK;
}

/* Checks that the file is a store's and opens its trees, or creates them in a new file. */
static int open_trees(struct kvl__lmdb *l, MDB_txn *txn) {
  struct kvl__lmdb_totals totals;
  MDB_stat stat;
  int code = mdb_dbi_open(txn, NULL, 0, &l->main);
  if (code) return code;
  code = kvl__lmdb_totals(l, txn, &totals);
  if (code == MDB_NOTFOUND) {
    code = mdb_stat(txn, l->main, &stat);
    if (!code && stat.ms_entries > 0) return MDB_INCOMPATIBLE;
    totals = (struct kvl__lmdb_totals){MAGIC, VERSION, 0, 0};
    if (!code) code = kvl__lmdb_totals_put(l, txn, &totals);
    if (!code && kvl__unsynced_note(l->path) < 0) code = EIO;
  }
  if (code) return code;
  if (totals.magic != MAGIC) return MDB_INCOMPATIBLE;
  if (totals.version != VERSION) return MDB_VERSION_MISMATCH;
  code = mdb_dbi_open(txn, "records", MDB_CREATE, &l->records);
  if (!code) code = mdb_dbi_open(txn, "used", MDB_CREATE, &l->used);
  if (!code) code = mdb_dbi_open(txn, "order", MDB_CREATE | MDB_INTEGERKEY, &l->order);
  return code;
}

/* Gives the lock file its room on the disk. LMDB makes it with a hole and writes there through a
 * map, which on a full disk would kill the process. Returns 0 or an errno. */
static int reserve_lock(const char *path) {
  enum { LOCK_BYTES = (READERS_MAX + 2) * 64 };
  char name[PATH_MAX];
  struct stat st;
  if (snprintf(name, sizeof name, "%s-lock", path) >= PATH_MAX) return ENAMETOOLONG;
  int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0666), code = 0;
  if (fd < 0) return errno;
  if (fstat(fd, &st) < 0) code = errno;
  else code = posix_fallocate(fd, 0, st.st_size ? st.st_size : LOCK_BYTES);
  close(fd);
  return code;
}

static int open_file(struct kvl__lmdb *l) {
  MDB_txn *txn;
  struct stat st;
  int fd, code = reserve_lock(l->path);
  if (!code) code = mdb_env_create(&l->env);
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
  if ((code = kvl__lmdb_begin(l, 0, &txn))) return code;
  code = open_trees(l, txn);
  if (code) mdb_txn_abort(txn);
  else code = mdb_txn_commit(txn); /* open_trees has made a note if it wrote */
  pthread_rwlock_unlock(&l->map);
  return code;
}

static void free_file(struct kvl__lmdb *l) {
  if (l->env) mdb_env_close(l->env);
  pthread_rwlock_destroy(&l->map);
  free(l);
}

static struct kvl__lmdb *new_file(const char *path) {
  struct kvl__lmdb *l = kvl__malloc(sizeof *l + strlen(path) + 1, "an lmdb store");
  if (!l) return NULL;
  memset(l, 0, sizeof *l);
  strcpy(l->path, path);
  pthread_rwlockattr_t attr; /* writers first, or readers could keep the map from growing */
  pthread_rwlockattr_init(&attr);
  pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
  pthread_rwlock_init(&l->map, &attr);
  pthread_rwlockattr_destroy(&attr);
  return l;
}

/* Makes the path of a file, which need not exist, absolute and free of symbolic links. */
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

static int open_locked(const char *given, struct kvl__lmdb **out) {
  char path[PATH_MAX];
  int code = resolve(given, path);
  if (code) return kvl__fail(KVL_ERR_IO, "lmdb store: %s: %s", given, strerror(code));
  int status = check_not_open(path);
  if (status < 0) return status;
  int lost = kvl__unsynced_recover(path);
  if (lost < 0) return lost;
  struct kvl__lmdb *l = new_file(path);
  if (!l) return KVL_ERR_NO_MEMORY;
  code = open_file(l);
  if (code) {
    status = code == ENOMEM ? KVL_ERR_NO_MEMORY : code > 0 ? KVL_ERR_IO : KVL_ERR_FORMAT;
    free_file(l);
    return kvl__fail(
        status, "lmdb store: %s: %s", path,
        code == MDB_INCOMPATIBLE ? "an LMDB file of another program" : kvl__lmdb_words(code));
  }
  l->next = open_files;
  *out = open_files = l;
  return lost;
}

int kvl__lmdb_open(const char *path, struct kvl__lmdb **out) {
  pthread_mutex_lock(&open_lock);
  int status = open_locked(path, out);
  pthread_mutex_unlock(&open_lock);
  return status;
}

void kvl__lmdb_close(struct kvl__lmdb *l) {
  struct kvl__lmdb **at = &open_files;
  pthread_mutex_lock(&open_lock);
  while (*at != l) at = &(*at)->next;
  *at = l->next;
  free_file(l);
  pthread_mutex_unlock(&open_lock);
}
