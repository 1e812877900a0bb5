/* A graph is a step that is recorded once and replayed without the host. The backend records
 * it, and the allocator keeps the memory of the step with the graph. */
#include "core/allocator.h"

struct kvl_graph {
  kvl_device *device;
  kvl_stream *stream; /* recorded on, and replayed on */
  void *handle;       /* the backend's */
  struct kvl__recording recording;
};

/* A recording may need memory, but cannot return any that is cached for other streams. So
 * that goes back before it, if little of the device is free. */
static void make_room(kvl_device *dev) {
  int64_t bytes_free = 0, total = 0;
  if (dev->backend->host_memory || dev->free.bytes_large == 0) return;
  if (dev->backend->memory(dev->ctx, &bytes_free, &total) < 0 || bytes_free < total / 8)
    kvl__free_trim(dev, -1, 1);
}

int kvl_graph_begin(kvl_device *dev) {
  KVL__NEED(dev);
  int status = kvl__not_recording(dev, "recording another one");
  if (status < 0) return status;
  kvl_graph *g = kvl__malloc(sizeof *g, "a graph");
  if (!g) return KVL_ERR_NO_MEMORY;
  *g = (kvl_graph){.device = dev, .stream = dev->current};
  make_room(dev);
  status = dev->backend->graph_begin(dev->ctx, g->stream->queue);
  if (status < 0) {
    free(g);
    return kvl__device_failed(dev, status, "beginning a graph");
  }
  g->recording.graph = g;
  kvl__recording_begin(dev, &g->recording);
  return KVL_OK;
}

int kvl_graph_end(kvl_device *dev, kvl_graph **out) {
  KVL__NEED(dev);
  KVL__NEED(out);
  if (!dev->recording)
    return kvl__fail(KVL_ERR_INVALID, "graph: none is being recorded on %s", dev->name);
  kvl_graph *g = dev->recording->graph;
  int status = dev->backend->graph_end(dev->ctx, g->stream->queue, &g->handle);
  if (status < 0) kvl__device_failed(dev, status, "recording a graph");
  kvl__recording_end(dev, &g->recording);
  if (status < 0) kvl_graph_close(g);
  else *out = g;
  return status;
}

int kvl_graph_replay(kvl_graph *g) {
  if (!g) return kvl__fail(KVL_ERR_INVALID, "graph: it is closed");
  kvl_device *dev = g->device;
  int status = kvl__not_recording(dev, "replaying another one");
  if (status < 0) return status;
  if (dev->current != g->stream)
    return kvl__fail(KVL_ERR_INVALID,
                     "graph: replayed on another stream of %s than the one "
                     "that it was recorded on",
                     dev->name);
  if (kvl_interrupted()) return kvl__fail(KVL_ERR_INTERRUPTED, "graph: interrupted");
  status = dev->backend->graph_launch(dev->ctx, g->handle, g->stream->queue);
  return status < 0 ? kvl__device_failed(dev, status, "replaying a graph") : KVL_OK;
}

void kvl_graph_close(kvl_graph *g) {
  if (!g) return;
  kvl_device *dev = g->device;
  kvl__device_drain(dev);
  if (g->handle) dev->backend->graph_close(dev->ctx, g->handle);
  kvl__recording_drop(&g->recording);
  free(g);
  dev->holds--;
  kvl__device_unref(dev);
}
