/* Storage is the reference-counted memory under tensors; the allocator keeps it. */
#ifndef KVL_ALLOCATOR_H
#define KVL_ALLOCATOR_H

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
  size_t counted;    /* as live: of a large block what was asked for, not what it has */
  kvl_storage *next; /* in a free list */
  uint64_t used;
  int64_t freed; /* a large block in a free list: when, counted by device->frees */
  int refs, home, size_class;
};

/* Sets how much a device may keep of what was freed. Called once, when it is opened. */
void kvl__allocator_open(kvl_device *dev);
/* Opens a storage of at least `bytes` bytes, with one reference, for the current stream. */
int kvl__storage_open(kvl_device *dev, size_t bytes, kvl_storage **out);
int kvl__storage_wrap(kvl_device *dev, void *memory, size_t bytes, kvl_storage **out);
int kvl__storage_open_pinned(kvl_device *dev, size_t bytes, int huge_pages,
                             kvl_storage **out);
void kvl__storage_unref(kvl_storage *s);
/* The current stream is about to use the memory. */
static inline void kvl__storage_use(kvl_storage *s, const kvl_device *dev) {
  s->used |= (uint64_t)1 << dev->current->id;
}
/* Returns the free memory of one stream (-1: of all) to the device. */
void kvl__allocator_trim(kvl_device *dev, int stream);
/* Returns free blocks above 32 MiB. */
void kvl__allocator_trim_large(kvl_device *dev);
/* Ends the device when nothing holds it any more: no handle, no storage, no graph. */
void kvl__device_unref(kvl_device *dev);

/* Memory that a step allocates while it is recorded stays with the graph, because replays
 * write there. During the recording the device's free lists are set aside, so that the step
 * takes fresh memory or memory that it freed itself. */
struct kvl__recording {
  kvl_graph *graph;
  kvl_storage *storages; /* allocated meanwhile, by recording_next */
  kvl_storage *deferred; /* references to older ones, given up at the end */
  kvl__free_lists set_aside;
};
void kvl__recording_begin(kvl_device *dev, struct kvl__recording *r);
void kvl__recording_end(kvl_device *dev, struct kvl__recording *r);
/* Frees the memory that nobody else refers to. Nothing may write there any more. */
void kvl__recording_drop(struct kvl__recording *r);

#endif
