/* A caching allocator for device memory, ordered by streams.
 *
 * A freed block goes back to the list of the stream that it was allocated on (its home). The
 * next allocation there is later work on the same stream, so it may take the block at once.
 * If other streams used the block, the home stream first waits for them.
 *
 * Small blocks, up to BYTES_SMALL_MAX, have four classes of sizes per octave. Larger ones are
 * rounded up to BYTES_LARGE_UNIT and share one list per stream: a request takes the block
 * that fits it best, if no more than an eighth of that stays unused. All free large blocks
 * together have at most bytes_large_max bytes; beyond that the one that was freed first goes
 * back to the device. So a loop with large temporaries asks the device for them once, and a
 * big cache that is closed does not stay. When the device has no room, everything that is
 * free goes back to it, and the allocation is tried again. */
#include "core/allocator.h"

enum { BYTES_UNIT = 512, BYTES_LARGE_UNIT = 2 << 20, UNUSED_MOST = 8 };
static const size_t BYTES_SMALL_MAX = (size_t)32 << 20;

/* Host memory is shared with everything else on the machine, and no allocation fails in time
 * to give any back, so less of it stays cached. */
void kvl__allocator_open(kvl_device *dev) {
  static const int64_t host_most = (int64_t)1 << 30;
  int64_t unused, total = 0;
  if (dev->backend->memory(dev->ctx, &unused, &total) < 0) total = 0;
  int is_host = dev->backend->host_memory;
  dev->bytes_large_max = total / (is_host ? 16 : 8);
  if (is_host && dev->bytes_large_max > host_most) dev->bytes_large_max = host_most;
}

/* units 1 ... 65536 -> class 0 ... 59; *units becomes the size of the class */
static int size_class(size_t *units) {
  size_t u = *units - 1;
  if (u < 4) return (int)u;
  int e = 63 - __builtin_clzll(u);
  size_t quarter = u >> (e - 2); /* 4 ... 7 */
  *units = (quarter + 1) << (e - 2);
  return (int)(4 * (e - 1) + (int)quarter - 4);
}

/* Returns the memory of a storage without references to the device at once. */
static void drop(kvl_storage *s) {
  kvl_device *dev = s->device;
  if (s->size_class == KVL__PINNED) dev->backend->host_free(dev->ctx, s->ptr, s->bytes);
  else if (s->size_class != KVL__LENT) dev->backend->free(dev->ctx, s->ptr);
  free(s);
}

/* Takes the first storage out of a free list, or out of the rest of one. */
static kvl_storage *take(kvl_device *dev, kvl_storage **list) {
  kvl_storage *s = *list;
  *list = s->next;
  dev->stats.bytes_cached -= (int64_t)s->bytes;
  if (s->size_class == KVL__LARGE) dev->free.bytes_large -= (int64_t)s->bytes;
  return s;
}

static void trim(kvl_device *dev, int stream, int first_class) {
  for (int i = 0; i < KVL__STREAMS_MAX; i++) {
    if ((stream >= 0 && i != stream) || !dev->streams[i]) continue;
    dev->backend->queue_sync(dev->ctx, dev->streams[i]->queue);
    for (int c = first_class; c < KVL__SIZE_CLASSES; c++)
      while (dev->free.list[i][c]) drop(take(dev, &dev->free.list[i][c]));
  }
}

void kvl__allocator_trim(kvl_device *dev, int stream) { trim(dev, stream, 0); }
void kvl__allocator_trim_large(kvl_device *dev) {
  if (dev->free.bytes_large > 0) trim(dev, -1, KVL__LARGE);
}

/* The free large storage, with at least `bytes` bytes, that leaves the fewest unused. */
static kvl_storage **best_large(kvl_device *dev, int stream, size_t bytes) {
  kvl_storage **best = NULL;
  size_t most = bytes + bytes / UNUSED_MOST;
  for (kvl_storage **at = &dev->free.list[stream][KVL__LARGE]; *at; at = &(*at)->next) {
    if ((*at)->bytes < bytes || (*at)->bytes > most) continue;
    if (!best || (*at)->bytes < (*best)->bytes) best = at;
  }
  return best;
}

/* Returns large blocks to the device, the one that was freed first before the others, until
 * no more than bytes_large_max bytes of them are free. */
static void limit_large(kvl_device *dev) {
  while (dev->free.bytes_large > dev->bytes_large_max) {
    kvl_storage **oldest = NULL;
    for (int i = 0; i < KVL__STREAMS_MAX; i++)
      for (kvl_storage **at = &dev->free.list[i][KVL__LARGE]; *at; at = &(*at)->next)
        if (!oldest || (*at)->freed < (*oldest)->freed) oldest = at;
    kvl_storage *s = take(dev, oldest);
    dev->backend->queue_sync(dev->ctx, dev->streams[s->home]->queue);
    drop(s);
  }
}

static void *device_alloc(kvl_device *dev, size_t bytes) {
  void *p = NULL;
  dev->stats.allocations++;
  if (kvl__allocation_fails() || dev->backend->alloc(dev->ctx, bytes, &p) < 0) return NULL;
  return p;
}

static void count_live(kvl_device *dev, kvl_storage *s, int sign) {
  int64_t *live = s->size_class == KVL__PINNED ? &dev->stats.bytes_pinned
                                               : &dev->stats.bytes_live;
  *live += sign * (int64_t)s->counted;
  if (dev->stats.bytes_live > dev->stats.bytes_live_peak)
    dev->stats.bytes_live_peak = dev->stats.bytes_live;
  dev->holds += sign;
}

/* In a hostile build, fresh and freed memory is all ones: NaN, -1. */
static void poison(kvl_device *dev, kvl_storage *s) {
#ifdef KVL_HOSTILE
  struct kvl_fill_args args = {s->ptr, (int64_t)s->bytes, 255.0, KVL_DTYPE_U8};
  dev->backend->launch(dev->ctx, dev->streams[s->home]->queue, KVL_OP_fill, &args,
                       sizeof args);
#else
  (void)dev, (void)s;
#endif
}

/* ---- memory of a recorded step -------------------------------------------------------- */

/* A storage was allocated while a step is recorded. */
static void keep(kvl_storage *s) {
  struct kvl__recording *r = s->device->recording;
  s->recording = r;
  s->recording_next = r->storages;
  r->storages = s;
}

/* 1 when the recording takes over the last reference of `s` until its end, because s is older
 * and work outside the recording may still use it. */
static int defers(kvl_storage *s) {
  struct kvl__recording *r = s->device->recording;
  if (s->recording == r) return 0;
  s->next = r->deferred;
  r->deferred = s;
  return 1;
}

void kvl__recording_begin(kvl_device *dev, struct kvl__recording *r) {
  r->set_aside = dev->free;
  memset(&dev->free, 0, sizeof dev->free);
  dev->holds++; /* the device lives as long as its graphs */
  dev->recording = r;
}

/* What the step freed is in r->storages, too. */
void kvl__recording_end(kvl_device *dev, struct kvl__recording *r) {
  for (int i = 0; i < KVL__STREAMS_MAX; i++)
    for (int c = 0; c < KVL__SIZE_CLASSES; c++)
      for (kvl_storage *s = dev->free.list[i][c]; s; s = s->next)
        dev->stats.bytes_cached -= (int64_t)s->bytes;
  dev->free = r->set_aside;
  dev->recording = NULL;
  while (r->deferred) {
    kvl_storage *s = r->deferred;
    r->deferred = s->next;
    kvl__storage_unref(s);
  }
}

void kvl__recording_drop(struct kvl__recording *r) {
  while (r->storages) {
    kvl_storage *s = r->storages;
    r->storages = s->recording_next;
    s->recording = NULL;
    if (s->refs == 0) drop(s);
  }
}

/* ---- storages ------------------------------------------------------------------------- */

int kvl__storage_open(kvl_device *dev, size_t bytes, kvl_storage **out) {
  int stream = dev->current->id, class = KVL__LARGE;
  size_t want = bytes ? bytes : 1;
  kvl_storage **found;
  if (want <= BYTES_SMALL_MAX) {
    size_t units = (want + BYTES_UNIT - 1) / BYTES_UNIT;
    class = size_class(&units);
    want = units * BYTES_UNIT;
    found = &dev->free.list[stream][class];
  } else {
    want = (want + BYTES_LARGE_UNIT - 1) / BYTES_LARGE_UNIT * BYTES_LARGE_UNIT;
    found = best_large(dev, stream, want);
  }
  if (found && *found) {
    kvl_storage *s = take(dev, found);
    s->refs = 1;
    s->used = 0;
    s->counted = class == KVL__LARGE ? bytes : want;
    count_live(dev, s, 1);
    poison(dev, s);
    *out = s;
    return KVL_OK;
  }
  kvl_storage *s = kvl__malloc(sizeof *s, "a tensor's storage");
  if (!s) return KVL_ERR_NO_MEMORY;
  void *p = device_alloc(dev, want);
  if (!p && !dev->recording) {
    kvl__allocator_trim(dev, -1);
    p = device_alloc(dev, want);
  }
  if (!p) {
    free(s);
    return kvl__fail(KVL_ERR_NO_MEMORY,
                     "no memory on %s for %zu bytes: %lld bytes are in live tensors",
                     dev->name, bytes, (long long)dev->stats.bytes_live);
  }
  *s = (kvl_storage){
      .device = dev, .ptr = p, .bytes = want, .refs = 1, .home = stream, .size_class = class};
  s->counted = class == KVL__LARGE ? bytes : want;
  if (dev->recording) keep(s);
  count_live(dev, s, 1);
  poison(dev, s);
  *out = s;
  return KVL_OK;
}

int kvl__storage_open_pinned(kvl_device *dev, size_t bytes, int huge_pages,
                             kvl_storage **out) {
  int status = kvl__not_recording(dev, "allocating pinned memory");
  if (status < 0) return status;
  kvl_storage *s = kvl__malloc(sizeof *s, "a tensor's storage");
  if (!s) return KVL_ERR_NO_MEMORY;
  *s = (kvl_storage){.device = dev,
                     .bytes = bytes ? bytes : 1,
                     .counted = bytes ? bytes : 1,
                     .refs = 1,
                     .home = dev->current->id,
                     .size_class = KVL__PINNED};
  status = kvl__allocation_fails()
               ? KVL_ERR_NO_MEMORY
               : dev->backend->host_alloc(dev->ctx, s->bytes, huge_pages, &s->ptr);
  if (status < 0) {
    free(s);
    return kvl__fail(status, "no pinned host memory for %zu bytes: %lld bytes are pinned",
                     bytes, (long long)dev->stats.bytes_pinned);
  }
  count_live(dev, s, 1);
  *out = s;
  return KVL_OK;
}

int kvl__storage_wrap(kvl_device *dev, void *memory, size_t bytes, kvl_storage **out) {
  kvl_storage *s = kvl__malloc(sizeof *s, "a tensor's storage");
  if (!s) return KVL_ERR_NO_MEMORY;
  *s = (kvl_storage){.device = dev,
                     .ptr = memory,
                     .bytes = bytes,
                     .counted = bytes,
                     .refs = 1,
                     .home = dev->current->id,
                     .size_class = KVL__LENT};
  count_live(dev, s, 1);
  *out = s;
  return KVL_OK;
}

/* The streams, other than its home, that used the storage and still exist. */
static uint64_t foreign_streams(const kvl_storage *s) {
  return s->used & ~((uint64_t)1 << s->home);
}

static void cache(kvl_storage *s) {
  kvl_device *dev = s->device;
  void *home = dev->streams[s->home]->queue;
  for (uint64_t left = foreign_streams(s); left; left &= left - 1) {
    kvl_stream *other = dev->streams[__builtin_ctzll(left)];
    if (!other) continue; /* closing a stream synchronises it */
    dev->backend->mark_record(dev->ctx, dev->scratch_mark, other->queue);
    dev->backend->queue_wait(dev->ctx, home, dev->scratch_mark);
  }
  poison(dev, s);
  s->next = dev->free.list[s->home][s->size_class];
  dev->free.list[s->home][s->size_class] = s;
  dev->stats.bytes_cached += (int64_t)s->bytes;
  if (s->size_class != KVL__LARGE) return;
  s->freed = ++dev->frees;
  dev->free.bytes_large += (int64_t)s->bytes;
  if (!dev->recording) limit_large(dev); /* what was recorded stays with its graph */
}

void kvl__storage_unref(kvl_storage *s) {
  kvl_device *dev = s->device;
  if (s->refs == 1 && dev->recording && defers(s)) return;
  if (--s->refs > 0) return;
  count_live(dev, s, -1);
  if (s->recording && !dev->recording) {
    /* its graph writes there at every replay, and drops it when it is closed */
  } else if (s->size_class >= 0 && dev->streams[s->home]) {
    cache(s);
  } else {
    if (s->size_class != KVL__LENT) kvl__device_drain(dev);
    drop(s);
  }
  kvl__device_unref(dev);
}

void kvl__device_unref(kvl_device *dev) {
  if (dev->opens > 0 || dev->holds > 0) return;
  kvl__allocator_trim(dev, -1);
  kvl__device_end(dev);
}

int kvl_device_trim(kvl_device *dev) {
  KVL__NEED(dev);
  kvl__allocator_trim(dev, -1);
  return KVL_OK;
}
