/* A caching allocator for device memory, ordered by streams.
 *
 * A freed storage goes back to the list of the stream that it was allocated on (its home).
 * The next allocation there is later work on the same stream, so it may take the memory at
 * once. If other streams used it, the home stream first waits for them. So a step that
 * repeats allocates nothing from the device, whatever the sizes of its temporaries.
 * core/free_memory.c has the lists, and says which sizes share memory and how much of it
 * stays. When the device has no room, everything that is free goes back to it, and the
 * allocation is tried again. */
#include <stdatomic.h>

#include "args/elementwise.h"
#include "core/allocator.h"

/* Half of a GPU's memory may stay cached, because a result is seldom larger than its
 * inputs. Host memory is shared with everything else on the machine, so it is a quarter
 * there, and the system may take the pages of free large storages while nobody uses them
 * (cool). */
void kvl__allocator_open(kvl_device *dev) {
  int64_t unused, total = 0;
  if (dev->backend->memory(dev->ctx, &unused, &total) < 0) total = 0;
  dev->bytes_total = total;
  dev->bytes_large_max = total / (dev->backend->host_memory ? 4 : 2);
}

int kvl_device_limit_cache(kvl_device *dev, int64_t bytes) {
  KVL__NEED(dev);
  if (bytes < 0)
    return kvl__fail(KVL_ERR_INVALID, "limit_cache: bytes is %lld, expected >= 0",
                     (long long)bytes);
  dev->bytes_large_max = bytes;
  if (!dev->recording) kvl__free_limit(dev);
  return KVL_OK;
}

void kvl__allocator_trim(kvl_device *dev, int stream) { kvl__free_trim(dev, stream, 0); }

static void *device_alloc(kvl_device *dev, size_t bytes) {
  void *p = NULL;
  dev->stats.allocations++;
  if (kvl__allocation_fails() || dev->backend->alloc(dev->ctx, bytes, &p) < 0) return NULL;
  dev->stats.bytes_reserved += (int64_t)bytes;
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

/* The streams, other than its home, that used the storage and still exist. */
static uint64_t foreign_streams(const kvl_storage *s) {
  return s->used & ~((uint64_t)1 << s->home);
}

/* Lets the system take the pages of free host memory, if all work that used it has finished.
 * The default stream of the CPU runs on the calling thread, so none of its work is under
 * way. */
static void cool(kvl_storage *s) {
  const kvl_backend *backend = s->device->backend;
  if (backend->unused && s->size_class == KVL__LARGE && s->home == 0 && !foreign_streams(s))
    backend->unused(s->device->ctx, s->ptr, s->bytes);
}

/* ---- memory of a recorded step -------------------------------------------------------- */

/* 1 when the recording takes over the last reference to `s` until the recording ends,
 * because s is older and work outside the recording may still use it. */
static int defers(kvl_storage *s) {
  struct kvl__recording *r = s->device->recording;
  if (s->recording == r) return 0;
  s->next = r->deferred;
  r->deferred = s;
  return 1;
}

int kvl__recording_hold(struct kvl__recording *r, kvl_storage *s) {
  if (s->recording == r || s->in_graph == r->number) return KVL_OK;
  if (!(r->held_count & (r->held_count - 1))) { /* full: its room is the next power of two */
    const size_t room = r->held_count ? 2 * (size_t)r->held_count : 1;
    kvl_storage **held = kvl__realloc(r->held, room * sizeof *held, "a graph's memory");
    if (!held) return KVL_ERR_NO_MEMORY;
    r->held = held;
  }
  s->refs++;
  s->in_graph = r->number;
  r->held[r->held_count++] = s;
  return KVL_OK;
}

void kvl__recording_begin(kvl_device *dev, struct kvl__recording *r) {
  static atomic_llong recordings;
  r->number = atomic_fetch_add(&recordings, 1) + 1;
  r->set_aside = dev->free;
  r->stream = dev->current->id;
  memset(&dev->free, 0, sizeof dev->free);
  dev->holds++; /* the device lives as long as its graphs */
  dev->recording = r;
}

/* Storages that the step freed are in r->storages, too, and no other work may get them. */
void kvl__recording_end(kvl_device *dev, struct kvl__recording *r) {
  for (int i = 0; i < KVL__STREAMS_MAX; i++)
    for (int c = 0; c < KVL__SIZE_CLASSES; c++)
      for (kvl_storage *s = dev->free.list[i][c]; s; s = s->next) {
        dev->stats.bytes_cached -= (int64_t)s->bytes;
        s->is_listed = 0;
      }
  dev->free = r->set_aside;
  dev->recording = NULL;
  while (r->deferred) {
    kvl_storage *s = r->deferred;
    r->deferred = s->next;
    kvl__storage_unref(s);
  }
}

/* Called when all work on the device is done. */
void kvl__recording_drop(struct kvl__recording *r) {
  kvl_device *dev = NULL;
  for (int i = 0; i < r->held_count; i++) kvl__storage_unref(r->held[i]);
  free(r->held);
  while (r->storages) {
    kvl_storage *s = r->storages;
    r->storages = s->recording_next;
    s->recording = NULL;
    if (s->refs > 0) continue;
    dev = s->device;
    if (!s->ptr) { /* became a part of its neighbour */
      free(s);
    } else if (dev->streams[s->home] || s->before || s->after) {
      cool(s);
      kvl__free_put(dev->recording ? &dev->recording->set_aside : &dev->free, s);
    } else {
      kvl__free_drop(s);
    }
  }
  if (dev && !dev->recording) kvl__free_limit(dev);
}

/* ---- storages ------------------------------------------------------------------------- */

/* Free memory that fits. A recording also takes what was free on its own stream before it
 * began: earlier work on that stream is done before any replay. */
static kvl_storage *take_free(kvl_device *dev, int size_class, size_t bytes, int loose) {
  int stream = dev->current->id;
  kvl_storage *s = kvl__free_take(&dev->free, stream, size_class, bytes, loose);
  struct kvl__recording *r = dev->recording;
  if (s || !r || stream != r->stream) return s;
  s = kvl__free_take(&r->set_aside, stream, size_class, bytes, loose);
  if (s) kvl__recording_keep(r, s);
  return s;
}

/* Memory that comes from the device. When there is no room, all free memory goes back
 * first, and the device is asked for no more than is needed. While a step is recorded,
 * nothing goes back, because running work cannot be waited for then. */
static kvl_storage *take_new(kvl_device *dev, int size_class, size_t bytes) {
  kvl_storage *s = kvl__malloc(sizeof *s, "a tensor's storage");
  if (!s) return NULL;
  size_t whole = kvl__free_segment_bytes(bytes, size_class);
  void *p = device_alloc(dev, whole);
  if (!p && !dev->recording) {
    kvl__free_trim(dev, -1, 0);
    p = device_alloc(dev, whole);
  }
  if (!p && whole > bytes) p = device_alloc(dev, whole = bytes);
  if (!p) {
    free(s);
    return NULL;
  }
  *s = (kvl_storage){.device = dev,
                     .ptr = p,
                     .bytes = whole,
                     .home = dev->current->id,
                     .size_class = size_class};
  if (dev->recording) kvl__recording_keep(dev->recording, s);
  return s;
}

int kvl__storage_open(kvl_device *dev, size_t bytes, kvl_storage **out) {
  int size_class;
  size_t want = kvl__free_round(bytes, &size_class);
  kvl_storage *s = take_free(dev, size_class, want, 0);
  if (!s) s = take_new(dev, size_class, want);
  if (!s) s = take_free(dev, size_class, want, 1);
  if (!s)
    return kvl__fail(KVL_ERR_NO_MEMORY,
                     "no memory on %s for %zu bytes: %lld bytes are in live tensors",
                     dev->name, bytes, (long long)dev->stats.bytes_live);
  s->refs = 1;
  s->used = 0;
  s->is_frozen = 0;
  s->in_graph = 0;
  s->counted = size_class == KVL__LARGE ? bytes : want;
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
  if (!dev->recording) cool(s);
  kvl__free_put(&dev->free, s);
  if (!dev->recording) kvl__free_limit(dev); /* what was recorded stays with its graph */
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
    if (s->before || s->after)
      kvl__free_put(&dev->free, s); /* its stream is closed, its segment in use */
    else kvl__free_drop(s);
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
