/* Block stores: the part that all backends share. The URL chooses the backend. This file
 * checks arguments, puts a head in front of each record and checks it when the record is
 * read, and counts what happens. */
#include "store/store.h"

enum { MAGIC = 0x4b564c52, VERSION = 1, TIMEOUT_MS = 1000, FIND_AT_ONCE = 256 };

_Static_assert(sizeof(struct kvl__head) == 24, "a head has no holes");

static const struct kvl__store_backend *const backends[] = {
    &kvl__store_memory,
    &kvl__store_lmdb,
    &kvl__store_redis,
    &kvl__store_rediss,
};
enum { BACKENDS = sizeof backends / sizeof backends[0] };

/* ---- records --------------------------------------------------------------------------- */

static struct kvl__name name_of(const kvl_key *key, int part) {
  struct kvl__name name;
  uint32_t p = (uint32_t)part;
  memcpy(name.bytes, &key->lo, 8);
  memcpy(name.bytes + 8, &key->hi, 8);
  memcpy(name.bytes + 16, &p, 4);
  return name;
}

void kvl__store_trouble(kvl_store *store, _Atomic int64_t *counter, const char *format, ...) {
  va_list list;
  va_start(list, format);
  pthread_mutex_lock(&store->problem_lock);
  vsnprintf(store->problem, sizeof store->problem, format, list);
  pthread_mutex_unlock(&store->problem_lock);
  va_end(list);
  if (counter) atomic_fetch_add(counter, 1);
}

/* Counts a damaged record and keeps a message that says which one and why. Returns
 * KVL__DAMAGED. */
static int damaged(kvl_store *store, const struct kvl__name *name, const char *what,
                   uint64_t got, uint64_t expected) {
  uint64_t lo, hi;
  uint32_t part;
  memcpy(&lo, name->bytes, 8);
  memcpy(&hi, name->bytes + 8, 8);
  memcpy(&part, name->bytes + 16, 4);
  kvl__store_trouble(store, &store->damaged,
                     "%s store: record %016llx%016llx part %u: %s is %llu, expected %llu",
                     store->backend->scheme, (unsigned long long)hi, (unsigned long long)lo,
                     part, what, (unsigned long long)got, (unsigned long long)expected);
  return KVL__DAMAGED;
}

int kvl__store_accept(kvl_store *store, const struct kvl__name *name, const void *record,
                      size_t bytes, void *out, size_t n) {
  struct kvl__head head;
  if (bytes < sizeof head)
    return damaged(store, name, "its size with the head", bytes, sizeof head + n);
  memcpy(&head, record, sizeof head);
  const char *payload = (const char *)record + sizeof head;
  if (head.magic != MAGIC) return damaged(store, name, "magic", head.magic, MAGIC);
  if (head.version != VERSION) return damaged(store, name, "version", head.version, VERSION);
  if (head.bytes != bytes - sizeof head)
    return damaged(store, name, "its size", bytes - sizeof head, head.bytes);
  uint64_t checksum = kvl__record_checksum(name, payload, head.bytes);
  if (head.checksum != checksum)
    return damaged(store, name, "checksum", checksum, head.checksum);
  if (head.bytes != n) {
    damaged(store, name, "its length", head.bytes, n);
    return 0;
  }
  if (n > 0) memcpy(out, payload, n);
  return 1;
}

/* ---- open and close -------------------------------------------------------------------- */

/* Finds the backend of a URL "scheme:rest" and returns the index of the rest. Messages
 * quote only the scheme, because the rest may contain a password. */
static int backend_of(const char *url, const struct kvl__store_backend **out) {
  const char *colon = strchr(url, ':');
  int length = colon ? (int)(colon - url) : 0;
  char known[192] = "";
  for (int i = 0; i < BACKENDS; i++) {
    const char *scheme = backends[i]->scheme;
    if (colon && strlen(scheme) == (size_t)length && !strncmp(scheme, url, (size_t)length)) {
      *out = backends[i];
      return length + 1;
    }
    size_t used = strlen(known);
    snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", backends[i]->form);
  }
  if (!colon)
    return kvl__fail(KVL_ERR_INVALID, "store: url has no scheme, expected %s", known);
  return kvl__fail(KVL_ERR_INVALID, "store: url begins with \"%.*s:\", expected %s",
                   length > 32 ? 32 : length, url, known);
}

int kvl_store_open(const char *url, int64_t capacity, int timeout_ms, kvl_store **out) {
  KVL__NEED(out);
  const struct kvl__store_backend *backend = NULL;
  if (!url) return kvl__fail(KVL_ERR_INVALID, "store: url is missing");
  int rest = backend_of(url, &backend);
  if (rest < 0) return rest;
  if (capacity < 0)
    return kvl__fail(KVL_ERR_INVALID, "store: capacity is %lld, expected >= 0",
                     (long long)capacity);
  if (timeout_ms < 0)
    return kvl__fail(KVL_ERR_INVALID, "store: timeout_ms is %d, expected >= 0", timeout_ms);
  kvl_store *s = kvl__malloc(sizeof *s, "a store");
  if (!s) return KVL_ERR_NO_MEMORY;
  memset(s, 0, sizeof *s);
  s->backend = backend;
  s->refs = 1;
  s->capacity = capacity;
  s->timeout_ms = timeout_ms ? timeout_ms : TIMEOUT_MS;
  pthread_mutex_init(&s->problem_lock, NULL);
  int status = backend->open(s, url + rest);
  if (status < 0) {
    pthread_mutex_destroy(&s->problem_lock);
    free(s);
    return status;
  }
  *out = s;
  return KVL_OK;
}

void kvl_store_close(kvl_store *store) {
  if (!store || atomic_fetch_sub(&store->refs, 1) > 1) return;
  store->backend->close(store);
  pthread_mutex_destroy(&store->problem_lock);
  free(store);
}

/* ---- records in and out ---------------------------------------------------------------- */

static int check(const kvl_store *store, const char *what, const kvl_key *key, int part) {
  if (!store) return kvl__fail(KVL_ERR_INVALID, "store_%s: the store is closed", what);
  if (!key) return kvl__fail(KVL_ERR_INVALID, "store_%s: the key is missing", what);
  if (part < 0)
    return kvl__fail(KVL_ERR_INVALID, "store_%s: part is %d, expected >= 0", what, part);
  return KVL_OK;
}

static int check_bytes(const char *what, const void *bytes, int64_t n) {
  if (n < 0)
    return kvl__fail(KVL_ERR_INVALID, "store_%s: %lld bytes, expected >= 0", what,
                     (long long)n);
  if (n > 0 && !bytes) return kvl__fail(KVL_ERR_INVALID, "store_%s: bytes are missing", what);
  return KVL_OK;
}

int kvl_store_put(kvl_store *store, const kvl_key *key, int part, const void *bytes,
                  int64_t n) {
  int status = check(store, "put", key, part);
  if (status >= 0) status = check_bytes("put", bytes, n);
  if (status < 0) return status;
  if (store->capacity && n > store->capacity)
    return kvl__fail(KVL_ERR_INVALID, "store_put: %lld bytes, the capacity is %lld",
                     (long long)n, (long long)store->capacity);
  struct kvl__name name = name_of(key, part);
  struct kvl__head head = {MAGIC, VERSION, (uint64_t)n,
                           kvl__record_checksum(&name, bytes, (size_t)n)};
  status = store->backend->put(store, &name, &head, bytes);
  if (status == 1) {
    atomic_fetch_add(&store->puts, 1);
    atomic_fetch_add(&store->bytes_written, n);
  }
  return status;
}

int kvl_store_get(kvl_store *store, const kvl_key *key, int part, void *bytes, int64_t n) {
  int status = check(store, "get", key, part);
  if (status >= 0) status = check_bytes("get", bytes, n);
  if (status < 0) return status;
  struct kvl__name name = name_of(key, part);
  status = store->backend->get(store, &name, bytes, (size_t)n);
  if (status == KVL__DAMAGED) { /* or it would be found, and never be put again */
    store->backend->remove(store, &name);
    status = 0;
  }
  atomic_fetch_add(status == 1 ? &store->hits : &store->misses, 1);
  if (status == 1) atomic_fetch_add(&store->bytes_read, n);
  return status;
}

int kvl_store_find(kvl_store *store, const kvl_key *keys, int n, int part, uint8_t *found) {
  struct kvl__name names[FIND_AT_ONCE];
  uint8_t these[FIND_AT_ONCE];
  if (n == 0 && !keys) keys = &(kvl_key){0};
  int status = check(store, "find", keys, part), run = 0;
  if (status < 0) return status;
  if (n < 0) return kvl__fail(KVL_ERR_INVALID, "store_find: %d keys, expected >= 0", n);
  for (int at = 0; at < n && (found || run == at); at += FIND_AT_ONCE) {
    int count = n - at < FIND_AT_ONCE ? n - at : FIND_AT_ONCE;
    for (int i = 0; i < count; i++) names[i] = name_of(&keys[at + i], part);
    store->backend->find(store, names, count, these);
    for (int i = 0; i < count && run == at + i; i++) run += these[i];
    if (found) memcpy(found + at, these, (size_t)count);
  }
  return run;
}

int kvl_store_remove(kvl_store *store, const kvl_key *key, int part) {
  int status = check(store, "remove", key, part);
  if (status < 0) return status;
  struct kvl__name name = name_of(key, part);
  return store->backend->remove(store, &name);
}

int kvl_store_sync(kvl_store *store) {
  if (!store) return kvl__fail(KVL_ERR_INVALID, "store_sync: the store is closed");
  return store->backend->sync ? store->backend->sync(store) : KVL_OK;
}

/* ---- what happened --------------------------------------------------------------------- */

int kvl_store_stats_get(kvl_store *store, kvl_store_stats *out) {
  if (!store) return kvl__fail(KVL_ERR_INVALID, "store_stats: the store is closed");
  KVL__NEED(out);
  kvl_store_stats stats = {
      .hits = store->hits,
      .misses = store->misses,
      .puts = store->puts,
      .evictions = store->evictions,
      .damaged = store->damaged,
      .errors = store->errors,
      .bytes_read = store->bytes_read,
      .bytes_written = store->bytes_written,
      .bytes_held = -1,
      .records = -1,
  };
  store->backend->held(store, &stats);
  *out = stats;
  return KVL_OK;
}

int kvl_store_problem(kvl_store *store, char *text, int size) {
  if (!store) return kvl__fail(KVL_ERR_INVALID, "store_problem: the store is closed");
  if (!text || size < 1)
    return kvl__fail(KVL_ERR_INVALID, "store_problem: text of %d bytes, expected >= 1", size);
  pthread_mutex_lock(&store->problem_lock);
  int length = snprintf(text, (size_t)size, "%s", store->problem);
  pthread_mutex_unlock(&store->problem_lock);
  return length < size ? length : size - 1;
}
