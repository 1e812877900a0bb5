/* Storages, and the free ones of a device: lists by stream and size, and the segments that
 * large storages are pieces of. Only the allocator and graphs use the functions. */
#ifndef KVL_FREE_MEMORY_H
#define KVL_FREE_MEMORY_H

#include "core/device.h"

enum { KVL__LENT = -1, KVL__PINNED = -2 }; /* in place of a size class: never cached */

/* refs counts kvl_tensor handles. `used` has a bit for every stream that launched work on
 * the memory since it was allocated. A free storage waits in the list of its home stream,
 * whose later work may take it without waiting. */
struct kvl_storage {
  kvl_device *device;
  struct kvl__recording *recording; /* was allocated while this was recorded: stays with it */
  kvl_storage *recording_next;
  void *ptr;
  size_t bytes;
  size_t counted; /* as live: for a large storage the requested bytes, not those of its
                   * piece */
  kvl_storage *before, *after; /* the neighbours of a piece of a segment, by address */
  kvl_storage *next;           /* in a free list */
  uint64_t used;
  int64_t freed; /* when it was put into a free list, counted by device->frees */
  int refs, home, size_class, is_listed;
  int is_frozen;    /* kvl_tensor_freeze */
  int64_t in_graph; /* the number of the graph that holds it, of several the last one */
};

/* A graph holds a reference to all memory that it uses, because replays read and write there.
 * Memory that a step allocates while it is recorded belongs to the graph. During the recording
 * the device's free lists are set aside. The step takes memory that it freed itself; otherwise
 * memory that was free on its stream before, which then belongs to the graph; otherwise fresh
 * memory. */
struct kvl__recording {
  kvl_graph *graph;
  int stream;            /* on which the recording began */
  kvl_storage *storages; /* allocated meanwhile, by recording_next */
  kvl_storage *deferred; /* references to older ones, given up at the end */
  kvl_storage **held;    /* older ones that the step uses */
  int held_count;
  int64_t number; /* of the recordings of the process */
  kvl__free_lists set_aside;
};

/* From now on the storage belongs to the recording. */
static inline void kvl__recording_keep(struct kvl__recording *r, kvl_storage *s) {
  s->recording = r;
  s->recording_next = r->storages;
  r->storages = s;
}

/* Rounds a request up to what a free list has, and sets its class. */
size_t kvl__free_round(size_t bytes, int *size_class);
/* What the device is asked for when no free storage fits: at least `bytes` bytes. */
size_t kvl__free_segment_bytes(size_t bytes, int size_class);

/* Takes a storage of at least `bytes` bytes out of the lists of a stream; NULL if none fits.
 * A large one is cut if that leaves a piece worth keeping. loose: takes any that is large
 * enough, however much of it stays unused, because the device has no more memory. */
kvl_storage *kvl__free_take(kvl__free_lists *lists, int stream, int size_class, size_t bytes,
                            int loose);
/* Puts a storage that nobody refers to into the lists, and joins it with free neighbours. */
void kvl__free_put(kvl__free_lists *lists, kvl_storage *s);

/* Returns the storage, which is in no list, to the device. */
void kvl__free_drop(kvl_storage *s);
/* Returns the free segments of a stream (-1: of all) to the device; `large_only` leaves the
 * small classes. Waits for the streams. Pieces of a segment that is in use stay. */
void kvl__free_trim(kvl_device *dev, int stream, int large_only);
/* Returns free segments, those that were freed first before others, until at most the bytes
 * that the device may keep are free. */
void kvl__free_limit(kvl_device *dev);

#endif
