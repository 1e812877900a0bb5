/* memory: records in this process, in a hash table whose entries also form a list in the
 * order of their last use. The lock is held only while pointers are used or changed. An
 * entry counts the threads that copy from it, and the last of them frees it. */
#include "store/store.h"

struct entry {
  struct entry *next; /* in its bucket */
  struct entry *older, *newer;
  struct kvl__name name;
  atomic_int refs;        /* one for the table, one for each running get */
  size_t bytes;           /* of the block */
  unsigned char record[]; /* a kvl__head and the block */
};

struct memory {
  pthread_mutex_t lock;
  struct entry **buckets, *oldest, *newest;
  size_t buckets_count; /* a power of two */
  int64_t bytes, records;
};

static struct entry **find(struct memory *m, const struct kvl__name *name) {
  uint64_t lo;
  uint32_t part;
  memcpy(&lo, name->bytes, 8); /* is a hash already: no mixing needed */
  memcpy(&part, name->bytes + 16, 4);
  uint64_t hash = lo ^ (part * 0x9e3779b97f4a7c15u) >> 16;
  struct entry **at = &m->buckets[hash & (m->buckets_count - 1)];
  while (*at && memcmp(&(*at)->name, name, sizeof *name)) at = &(*at)->next;
  return at;
}

static void unref(struct entry *e) {
  if (atomic_fetch_sub(&e->refs, 1) == 1) free(e);
}

static void list_remove(struct memory *m, struct entry *e) {
  *(e->older ? &e->older->newer : &m->oldest) = e->newer;
  *(e->newer ? &e->newer->older : &m->newest) = e->older;
}

static void list_append(struct memory *m, struct entry *e) {
  e->older = m->newest;
  e->newer = NULL;
  *(m->newest ? &m->newest->newer : &m->oldest) = e;
  m->newest = e;
}

/* Takes the entry that `at` points to out of the table. */
static void drop(struct memory *m, struct entry **at) {
  struct entry *e = *at;
  *at = e->next;
  list_remove(m, e);
  m->bytes -= (int64_t)e->bytes;
  m->records--;
  unref(e);
}

/* Doubles the buckets. If there is no memory for them, the table works on with longer
 * chains. */
static void grow(struct memory *m) {
  size_t count = m->buckets_count * 2;
  struct entry **buckets = kvl__malloc(count * sizeof *buckets, "a larger store");
  if (!buckets) return;
  memset(buckets, 0, count * sizeof *buckets);
  free(m->buckets);
  m->buckets = buckets;
  m->buckets_count = count;
  for (struct entry *e = m->oldest; e; e = e->newer) {
    struct entry **at = find(m, &e->name);
    e->next = NULL;
    *at = e;
  }
}

static int memory_open(kvl_store *store, const char *rest) {
  if (*rest)
    return kvl__fail(KVL_ERR_INVALID, "store: url is \"memory:%s\", expected \"memory:\"",
                     rest);
  struct memory *m = kvl__malloc(sizeof *m, "a memory store");
  if (!m) return KVL_ERR_NO_MEMORY;
  *m = (struct memory){.buckets_count = KVL__ROOM(256, 1)};
  m->buckets = kvl__malloc(m->buckets_count * sizeof *m->buckets, "a memory store");
  if (!m->buckets) {
    free(m);
    return KVL_ERR_NO_MEMORY;
  }
  memset(m->buckets, 0, m->buckets_count * sizeof *m->buckets);
  pthread_mutex_init(&m->lock, NULL);
  store->state = m;
  return KVL_OK;
}

static void memory_close(kvl_store *store) {
  struct memory *m = store->state;
  for (struct entry *e = m->oldest, *newer; e; e = newer) {
    newer = e->newer;
    unref(e);
  }
  pthread_mutex_destroy(&m->lock);
  free(m->buckets);
  free(m);
}

static int memory_put(kvl_store *store, const struct kvl__name *name,
                      const struct kvl__head *head, const void *bytes) {
  struct memory *m = store->state;
  size_t n = head->bytes;
  struct entry *e = kvl__malloc(sizeof *e + sizeof *head + n, "a record"), **at;
  if (!e) return KVL_ERR_NO_MEMORY;
  *e = (struct entry){.name = *name, .bytes = n};
  atomic_init(&e->refs, 1);
  memcpy(e->record, head, sizeof *head);
  if (n > 0) memcpy(e->record + sizeof *head, bytes, n);
  pthread_mutex_lock(&m->lock);
  if (*(at = find(m, name))) drop(m, at);
  while (store->capacity && m->bytes + (int64_t)n > store->capacity) {
    drop(m, find(m, &m->oldest->name));
    atomic_fetch_add(&store->evictions, 1);
  }
  if ((size_t)m->records >= m->buckets_count) grow(m);
  at = find(m, name);
  *at = e;
  list_append(m, e);
  m->bytes += (int64_t)n;
  m->records++;
  pthread_mutex_unlock(&m->lock);
  return 1;
}

static int memory_get(kvl_store *store, const struct kvl__name *name, void *out, size_t n) {
  struct memory *m = store->state;
  pthread_mutex_lock(&m->lock);
  struct entry *e = *find(m, name);
  if (e) {
    atomic_fetch_add(&e->refs, 1);
    list_remove(m, e);
    list_append(m, e);
  }
  pthread_mutex_unlock(&m->lock);
  if (!e) return 0;
  int status = kvl__store_accept(store, name, e->record, sizeof(struct kvl__head) + e->bytes,
                                 out, n);
  unref(e);
  return status;
}

static void memory_find(kvl_store *store, const struct kvl__name *names, int n,
                        uint8_t *found) {
  struct memory *m = store->state;
  pthread_mutex_lock(&m->lock);
  for (int i = 0; i < n; i++) found[i] = *find(m, &names[i]) != NULL;
  pthread_mutex_unlock(&m->lock);
}

static int memory_remove(kvl_store *store, const struct kvl__name *name) {
  struct memory *m = store->state;
  pthread_mutex_lock(&m->lock);
  struct entry **at = find(m, name);
  int there = *at != NULL;
  if (there) drop(m, at);
  pthread_mutex_unlock(&m->lock);
  return there;
}

static void memory_held(kvl_store *store, kvl_store_stats *out) {
  struct memory *m = store->state;
  pthread_mutex_lock(&m->lock);
  out->bytes_held = m->bytes;
  out->records = m->records;
  pthread_mutex_unlock(&m->lock);
}

const struct kvl__store_backend kvl__store_memory = {
    .scheme = "memory",
    .form = "memory:",
    .open = memory_open,
    .close = memory_close,
    .put = memory_put,
    .get = memory_get,
    .find = memory_find,
    .remove = memory_remove,
    .held = memory_held,
};
