/* Graphs: a step recorded once and replayed without the host. The backend records; this file
 * keeps the memory right. While a graph is recorded the device's free lists are set aside, so
 * that what the step allocates comes from the device or from what the step itself freed;
 * all of it then stays with the graph, whose replays write there. */
#include "internal.h"

typedef kvl_storage *free_list_row[KVL__SIZE_CLASSES];

struct kvl_graph {
  kvl_device *device;
  kvl_stream *stream;            /* recorded on, and replayed on */
  void *handle;                  /* the backend's */
  kvl_storage *storages;         /* allocated while recording, by graph_next */
  kvl_storage *deferred;         /* references to older ones, to be given up at the end */
  free_list_row set_aside[KVL__STREAMS_MAX];
};

int kvl__not_recording(kvl_device *dev, const char *what) {
  if (!dev->recording) return KVL_OK;
  return kvl__fail(KVL_ERR_INVALID, "a graph is being recorded on %s: %s needs the host, "
                   "which has no part in a replay", dev->name, what);
}

int kvl_device_is_recording(const kvl_device *dev) { return dev->recording != NULL; }

void kvl__graph_keep(kvl_storage *s) {
  kvl_graph *g = s->device->recording;
  s->graph = g;
  s->graph_next = g->storages;
  g->storages = s;
}

int kvl__graph_defers(kvl_storage *s) {
  kvl_graph *recording = s->device->recording;
  if (s->graph == recording) return 0;
  s->next = recording->deferred;
  recording->deferred = s;
  return 1;
}

int kvl_graph_begin(kvl_device *dev) {
  int status = kvl__not_recording(dev, "recording another one");
  if (status < 0) return status;
  kvl_graph *g = kvl__malloc(sizeof *g, "a graph");
  if (!g) return KVL_ERR_NO_MEMORY;
  *g = (kvl_graph){.device = dev, .stream = dev->current};
  status = dev->backend->graph_begin(dev->ctx, g->stream->queue);
  if (status < 0) {
    free(g);
    return kvl__device_failed(dev, status, "beginning a graph");
  }
  memcpy(g->set_aside, dev->free_lists, sizeof g->set_aside);
  memset(dev->free_lists, 0, sizeof dev->free_lists);
  dev->storages++; /* the device lives as long as its graphs */
  dev->recording = g;
  return KVL_OK;
}

/* Back to the device's own free lists; what the step freed is in g->storages too. */
static void stop_recording(kvl_graph *g) {
  kvl_device *dev = g->device;
  for (int i = 0; i < KVL__STREAMS_MAX; i++)
    for (int c = 0; c < KVL__SIZE_CLASSES; c++)
      for (kvl_storage *s = dev->free_lists[i][c]; s; s = s->next)
        dev->stats.bytes_cached -= (int64_t)s->bytes;
  memcpy(dev->free_lists, g->set_aside, sizeof dev->free_lists);
  dev->recording = NULL;
  while (g->deferred) {
    kvl_storage *s = g->deferred;
    g->deferred = s->next;
    kvl__storage_unref(s);
  }
}

int kvl_graph_end(kvl_device *dev, kvl_graph **out) {
  kvl_graph *g = dev->recording;
  if (!g) return kvl__fail(KVL_ERR_INVALID, "graph: none is being recorded on %s", dev->name);
  int status = dev->backend->graph_end(dev->ctx, g->stream->queue, &g->handle);
  if (status < 0) kvl__device_failed(dev, status, "recording a graph");
  stop_recording(g);
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
    return kvl__fail(KVL_ERR_INVALID, "graph: replayed on another stream of %s than the one "
                     "that it was recorded on", dev->name);
  if (kvl_interrupted()) return kvl__fail(KVL_ERR_INTERRUPTED, "graph: interrupted");
  status = dev->backend->graph_launch(dev->ctx, g->handle, g->stream->queue);
  return status < 0 ? kvl__device_failed(dev, status, "replaying a graph") : KVL_OK;
}

void kvl_graph_close(kvl_graph *g) {
  if (!g) return;
  kvl_device *dev = g->device;
  for (int i = 0; i < KVL__STREAMS_MAX; i++)
    if (dev->streams[i]) dev->backend->queue_sync(dev->ctx, dev->streams[i]->queue);
  if (g->handle) dev->backend->graph_close(dev->ctx, g->handle);
  while (g->storages) {
    kvl_storage *s = g->storages;
    g->storages = s->graph_next;
    s->graph = NULL;
    if (s->refs == 0) kvl__storage_drop(s);
  }
  free(g);
  dev->storages--;
  kvl__device_unref(dev);
}
