/* The insides of a device and of its streams. */
#ifndef KVL_DEVICE_H
#define KVL_DEVICE_H

#include "core/backend.h"
#include "core/status.h"

enum { KVL__STREAMS_MAX = 64, KVL__SIZE_CLASSES = 61, KVL__LARGE = 60 };

struct kvl_stream {
  kvl_device *device;
  void *queue; /* of the backend */
  int id;      /* index in device->streams */
};

/* Free memory of a device, by home stream and class of size (core/free_memory.c). The last
 * class, KVL__LARGE, has pieces of any size; bytes_large is the sum of all of them. */
typedef struct kvl__free_lists {
  kvl_storage *list[KVL__STREAMS_MAX][KVL__SIZE_CLASSES];
  int64_t bytes_large;
} kvl__free_lists;

struct kvl_device {
  const kvl_backend *backend;
  void *ctx;
  int opens, holds; /* holds: storages and graphs; it ends when both are 0 */
  int index;
  char name[24], description[160], build[256];
  kvl_stream *streams[KVL__STREAMS_MAX];
  kvl_stream *current;
  void *scratch_mark;               /* joins streams when storage is freed */
  struct kvl__recording *recording; /* the memory of the graph that is recorded, or NULL */
  kvl__free_lists free;
  int64_t bytes_total, bytes_large_max; /* of the device; of free large memory */
  int64_t frees;                        /* how many storages were freed so far */
  kvl_device_stats stats;
};

/* The device that is open already, or NULL. */
kvl_device *kvl__device_find(const kvl_backend *backend, int index);
/* Makes a device without a context. From now on kvl__device_find finds it. */
int kvl__device_new(const kvl_backend *backend, int index, kvl_device **out);
/* Removes a device from the list and frees it, its streams and its context. It must have no
 * cached memory. */
void kvl__device_end(kvl_device *dev);
/* Waits for every stream, whatever fails. */
void kvl__device_drain(kvl_device *dev);
/* Fails if a graph is being recorded, for an operation `what` that needs the host and so
 * cannot be part of a graph. */
int kvl__not_recording(kvl_device *dev, const char *what);
/* Returns `status` and records the driver's message after `doing`. If the driver has none, a
 * message that is recorded already stays. */
int kvl__device_failed(kvl_device *dev, int status, const char *doing);

#endif
