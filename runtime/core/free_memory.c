/* Small storages, up to BYTES_SMALL_MAX, have four classes of sizes per octave, and each is a
 * piece of device memory of its own. Larger ones are pieces of segments, of which the device
 * gives one at a time. A large request takes the free piece that fits it best. The rest of
 * the piece is cut off as a piece of its own if it is more than BYTES_SMALL_MAX. A smaller
 * rest stays unused; but if it is more than an eighth of the request, the piece does not
 * fit. Pieces that are free join with free neighbours. Only a whole segment can go back to
 * the device, so segments of more than a sixteenth of the device's memory are never cut: a
 * small tensor that lives long would hold the whole segment.
 *
 * A new segment is rounded up to a sixteenth of the next power of two below it, at most
 * 64 MiB. So a result that grows with every step asks the device for one segment per
 * sixteenth, and not for one per step.
 *
 * How much free large memory stays: dev->bytes_large_max, less where tensors need the room of
 * the device. cuBLAS, graphs and compiled code do not ask the allocator, so a sixteenth of
 * the device is left to them. An eighth of the device may always be kept, because a step
 * beside a cache that fills the memory has temporaries, too. */
#include "core/free_memory.h"

static const size_t BYTES_UNIT = 512, BYTES_LARGE_UNIT = (size_t)2 << 20,
                    BYTES_STEP_MAX = (size_t)64 << 20, BYTES_SMALL_MAX = (size_t)32 << 20;
enum { UNUSED_MOST = 8, STEPS = 16, CUT_MOST = 16, OTHERS = 16, ALWAYS = 8 };

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* units 1 ... 65536 -> class 0 ... 59; *units becomes the size of the class */
static int size_class_of(size_t *units) {
  size_t u = *units - 1;
  if (u < 4) return (int)u;
  int e = 63 - __builtin_clzll(u);
  size_t quarter = u >> (e - 2); /* 4 ... 7 */
  *units = (quarter + 1) << (e - 2);
  return (int)(4 * (e - 1) + (int)quarter - 4);
}

size_t kvl__free_round(size_t bytes, int *size_class) {
  if (bytes == 0) bytes = 1;
  *size_class = KVL__LARGE;
  if (bytes > BYTES_SMALL_MAX) return round_up(bytes, BYTES_LARGE_UNIT);
  size_t units = (bytes + BYTES_UNIT - 1) / BYTES_UNIT;
  *size_class = size_class_of(&units);
  return units * BYTES_UNIT;
}

size_t kvl__free_segment_bytes(size_t bytes, int size_class) {
  if (size_class != KVL__LARGE) return bytes;
  size_t step = ((size_t)1 << (63 - __builtin_clzll(bytes))) / STEPS;
  return round_up(bytes, step < BYTES_STEP_MAX ? step : BYTES_STEP_MAX);
}

/* ---- lists ---------------------------------------------------------------------------- */

/* Whether a free storage is a whole segment. */
static int is_whole(const kvl_storage *s) { return !s->before && !s->after; }

static kvl_storage *unlink(kvl__free_lists *lists, kvl_storage **at) {
  kvl_storage *s = *at;
  *at = s->next;
  s->is_listed = 0;
  s->device->stats.bytes_cached -= (int64_t)s->bytes;
  if (s->size_class == KVL__LARGE) lists->bytes_large -= (int64_t)s->bytes;
  return s;
}

static void link(kvl__free_lists *lists, kvl_storage *s) {
  kvl_storage **list = &lists->list[s->home][s->size_class];
  s->next = *list;
  *list = s;
  s->is_listed = 1;
  s->device->stats.bytes_cached += (int64_t)s->bytes;
  if (s->size_class == KVL__LARGE) lists->bytes_large += (int64_t)s->bytes;
}

static void unlink_large(kvl__free_lists *lists, kvl_storage *s) {
  kvl_storage **at = &lists->list[s->home][KVL__LARGE];
  while (*at != s) at = &(*at)->next;
  unlink(lists, at);
}

/* ---- pieces of segments --------------------------------------------------------------- */

/* Whether `rest` bytes at the end of s can be cut off as a piece of their own. */
static int can_cut(const kvl_storage *s, size_t rest) {
  const kvl_device *dev = s->device;
  size_t segment = s->bytes;
  for (const kvl_storage *p = s->before; p; p = p->before) segment += p->bytes;
  for (const kvl_storage *p = s->after; p; p = p->after) segment += p->bytes;
  return rest > BYTES_SMALL_MAX && segment <= (size_t)dev->bytes_total / CUT_MOST;
}

/* Cuts s after `bytes` bytes. If there is no memory for the record of the second piece, s
 * stays whole. */
static void cut(kvl__free_lists *lists, kvl_storage *s, size_t bytes) {
  kvl_storage *rest = malloc(sizeof *rest);
  if (!rest) return;
  *rest = (kvl_storage){.device = s->device,
                        .ptr = (char *)s->ptr + bytes,
                        .bytes = s->bytes - bytes,
                        .home = s->home,
                        .size_class = s->size_class,
                        .freed = s->freed,
                        .before = s,
                        .after = s->after};
  if (rest->after) rest->after->before = rest;
  s->after = rest;
  s->bytes = bytes;
  if (s->recording) kvl__recording_keep(s->recording, rest);
  link(lists, rest);
}

/* Makes b a part of a; b lies behind a and is in no list. If the list of a recording still
 * has b's record, this is then a record without memory. */
static void join(kvl_storage *a, kvl_storage *b) {
  a->bytes += b->bytes;
  a->after = b->after;
  if (a->after) a->after->before = a;
  b->ptr = NULL;
  b->bytes = 0;
  b->before = b->after = NULL;
  if (!b->recording) free(b);
}

static int can_join(const kvl_storage *s, const kvl_storage *neighbour) {
  return neighbour && neighbour->is_listed && neighbour->recording == s->recording;
}

void kvl__free_put(kvl__free_lists *lists, kvl_storage *s) {
  s->freed = ++s->device->frees;
  int64_t freed = s->freed;
  if (can_join(s, s->after)) {
    unlink_large(lists, s->after);
    join(s, s->after);
  }
  if (can_join(s, s->before)) {
    kvl_storage *before = s->before;
    unlink_large(lists, before);
    join(before, s);
    s = before;
    s->freed = freed;
  }
  link(lists, s);
}

/* Takes a storage of a small class, or the large piece that leaves the fewest bytes. */
kvl_storage *kvl__free_take(kvl__free_lists *lists, int stream, int size_class, size_t bytes,
                            int loose) {
  kvl_storage **list = &lists->list[stream][size_class], **best = NULL;
  if (size_class != KVL__LARGE) return *list ? unlink(lists, list) : NULL;
  for (kvl_storage **at = list; *at; at = &(*at)->next) {
    if ((*at)->bytes < bytes || (best && (*at)->bytes >= (*best)->bytes)) continue;
    size_t rest = (*at)->bytes - bytes;
    if (loose || rest <= bytes / UNUSED_MOST || can_cut(*at, rest)) best = at;
  }
  if (!best) return NULL;
  kvl_storage *s = unlink(lists, best);
  if (can_cut(s, s->bytes - bytes)) cut(lists, s, bytes);
  return s;
}

/* ---- back to the device --------------------------------------------------------------- */

void kvl__free_drop(kvl_storage *s) {
  kvl_device *dev = s->device;
  if (s->size_class == KVL__PINNED) {
    dev->backend->host_free(dev->ctx, s->ptr, s->bytes);
  } else if (s->size_class != KVL__LENT) {
    dev->backend->free(dev->ctx, s->ptr);
    dev->stats.bytes_reserved -= (int64_t)s->bytes;
  }
  free(s);
}

void kvl__free_trim(kvl_device *dev, int stream, int large_only) {
  for (int i = 0; i < KVL__STREAMS_MAX; i++) {
    if (stream >= 0 && i != stream) continue;
    if (dev->streams[i]) dev->backend->queue_sync(dev->ctx, dev->streams[i]->queue);
    for (int c = large_only ? KVL__LARGE : 0; c < KVL__SIZE_CLASSES; c++)
      for (kvl_storage **at = &dev->free.list[i][c]; *at;) {
        if (is_whole(*at)) kvl__free_drop(unlink(&dev->free, at));
        else at = &(*at)->next;
      }
  }
}

/* How many bytes of free large memory may stay now. */
static int64_t keep_most(const kvl_device *dev) {
  int64_t used = dev->stats.bytes_reserved - dev->stats.bytes_cached;
  int64_t room = dev->bytes_total - dev->bytes_total / OTHERS - used;
  if (room < dev->bytes_total / ALWAYS) room = dev->bytes_total / ALWAYS;
  return room < dev->bytes_large_max ? room : dev->bytes_large_max;
}

void kvl__free_limit(kvl_device *dev) {
  while (dev->free.bytes_large > keep_most(dev)) {
    kvl_storage **oldest = NULL;
    for (int i = 0; i < KVL__STREAMS_MAX; i++)
      for (kvl_storage **at = &dev->free.list[i][KVL__LARGE]; *at; at = &(*at)->next)
        if (is_whole(*at) && (!oldest || (*at)->freed < (*oldest)->freed)) oldest = at;
    if (!oldest) return;
    kvl_storage *s = unlink(&dev->free, oldest);
    if (dev->streams[s->home])
      dev->backend->queue_sync(dev->ctx, dev->streams[s->home]->queue);
    kvl__free_drop(s);
  }
}
