/* The insides of a device and of its streams. */
#ifndef KVL_DEVICE_H
#define KVL_DEVICE_H

#include "core/backend.h"
#include "core/status.h"

enum { KVL__STREAMS_MAX = 64, KVL__SIZE_CLASSES = 60 };

struct kvl_stream {
  kvl_device *device;
  void *queue;                   /* of the backend */
  int id;                        /* index in device->streams */
};

/* Free memory of a device, by home stream and class of size (core/allocator.c). */
typedef struct kvl__free_lists {
  kvl_storage *list[KVL__STREAMS_MAX][KVL__SIZE_CLASSES];
} kvl__free_lists;

struct kvl_device {
  const kvl_backend *backend;
  void *ctx;
  int opens, holds;              /* holds: storages and graphs; it ends when both are 0 */
  int index;
  char name[24], description[160];
  kvl_stream *streams[KVL__STREAMS_MAX];
  kvl_stream *current;
  void *scratch_mark;            /* joins streams when storage is freed */
  struct kvl__recording *recording;   /* the memory of the graph that is recorded, or NULL */
  kvl__free_lists free;
  kvl_device_stats stats;
};

/* The device that is open already, or NULL. */
kvl_device *kvl__device_find(const kvl_backend *backend, int index);
/* A device without a context, which kvl__device_find finds from now on. */
int kvl__device_new(const kvl_backend *backend, int index, kvl_device **out);
/* Forget a device and free it, its streams and its context. None of its memory is cached. */
void kvl__device_end(kvl_device *dev);
/* Wait for every stream, whatever fails. */
void kvl__device_drain(kvl_device *dev);
/* A failure while a graph is recorded, of what needs the host: `what` cannot be in it. */
int kvl__not_recording(kvl_device *dev, const char *what);
/* `status` with the driver's words after `doing`; words that are recorded stay where the
 * driver has none. */
int kvl__device_failed(kvl_device *dev, int status, const char *doing);

#endif
