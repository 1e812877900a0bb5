/* The allocator opens storages, the reference-counted memory under tensors, and keeps what is
 * freed. */
#ifndef KVL_ALLOCATOR_H
#define KVL_ALLOCATOR_H

#include "core/free_memory.h"

/* Sets how much a device may keep of what was freed. Called once, when it is opened. */
void kvl__allocator_open(kvl_device *dev);
/* Opens a storage of at least `bytes` bytes, with one reference, for the current stream. */
int kvl__storage_open(kvl_device *dev, size_t bytes, kvl_storage **out);
int kvl__storage_wrap(kvl_device *dev, void *memory, size_t bytes, kvl_storage **out);
int kvl__storage_open_pinned(kvl_device *dev, size_t bytes, int huge_pages,
                             kvl_storage **out);
void kvl__storage_unref(kvl_storage *s);
/* Makes the graph that is being recorded hold the memory. */
int kvl__recording_hold(struct kvl__recording *r, kvl_storage *s);
/* The current stream is about to use the memory. */
static inline int kvl__storage_use(kvl_storage *s, const kvl_device *dev) {
  s->used |= (uint64_t)1 << dev->current->id;
  return dev->recording ? kvl__recording_hold(dev->recording, s) : KVL_OK;
}
/* Returns the free memory of one stream (-1: of all) to the device, except pieces of segments
 * that are in use. */
void kvl__allocator_trim(kvl_device *dev, int stream);
/* Ends the device when nothing holds it any more: no handle, no storage, no graph. */
void kvl__device_unref(kvl_device *dev);

void kvl__recording_begin(kvl_device *dev, struct kvl__recording *r);
void kvl__recording_end(kvl_device *dev, struct kvl__recording *r);
/* Caches the memory that nobody else refers to. Nothing may write there any more. */
void kvl__recording_drop(struct kvl__recording *r);

#endif
