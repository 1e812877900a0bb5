/* Streams and events: a thin layer over the backend's queues and marks, which also tells the
 * allocator about streams. */
#include "core/allocator.h"
#include "core/stream.h"

int kvl__stream_open(kvl_device *dev, enum kvl_queue_kind kind, kvl_stream **out) {
  int id = 0;
  while (id < KVL__STREAMS_MAX && dev->streams[id]) id++;
  if (id == KVL__STREAMS_MAX)
    return kvl__fail(KVL_ERR_INVALID, "stream: %d streams are open on this device already",
                     KVL__STREAMS_MAX);
  kvl_stream *s = kvl__malloc(sizeof *s, "a stream");
  if (!s) return KVL_ERR_NO_MEMORY;
  *s = (kvl_stream){.device = dev, .id = id};
  int status = dev->backend->queue_open(dev->ctx, kind, &s->queue);
  if (status < 0) {
    free(s);
    return kvl__device_failed(dev, status, "opening a stream");
  }
  dev->streams[id] = s;
  *out = s;
  return KVL_OK;
}

int kvl_stream_open(kvl_device *dev, kvl_stream **out) {
  KVL__NEED(dev);
  KVL__NEED(out);
  return kvl__stream_open(dev, KVL_QUEUE_NORMAL, out);
}

void kvl_stream_close(kvl_stream *stream) {
  if (!stream || stream->id == 0) return; /* the default stream lives with the device */
  kvl_device *dev = stream->device;
  if (dev->current == stream) dev->current = dev->streams[0];
  kvl__allocator_trim(dev, stream->id);
  dev->streams[stream->id] = NULL;
  dev->backend->queue_close(dev->ctx, stream->queue);
  free(stream);
}

int kvl_stream_sync(kvl_stream *stream) {
  KVL__NEED(stream);
  kvl_device *dev = stream->device;
  int status = kvl__not_recording(dev, "waiting for a stream");
  if (status < 0) return status;
  status = dev->backend->queue_sync(dev->ctx, stream->queue);
  return status < 0 ? kvl__device_failed(dev, status, "synchronising a stream") : KVL_OK;
}

int kvl_device_use_stream(kvl_device *dev, kvl_stream *stream) {
  KVL__NEED(dev);
  if (stream && stream->device != dev)
    return kvl__fail(KVL_ERR_INVALID, "stream belongs to %s, expected one of %s",
                     stream->device->name, dev->name);
  dev->current = stream ? stream : dev->streams[0];
  return KVL_OK;
}

kvl_stream *kvl_device_stream(kvl_device *dev) { return dev ? dev->current : NULL; }

int kvl_device_sync(kvl_device *dev) {
  KVL__NEED(dev);
  int status = kvl__not_recording(dev, "waiting for the device");
  if (status < 0) return status;
  for (int i = 0; i < KVL__STREAMS_MAX; i++) {
    if (!dev->streams[i]) continue;
    status = kvl_stream_sync(dev->streams[i]);
    if (status < 0) return status;
  }
  return KVL_OK;
}

/* ---- events ------------------------------------------------------------------------ */

int kvl_event_open(kvl_device *dev, kvl_event **out) {
  KVL__NEED(dev);
  KVL__NEED(out);
  kvl_event *e = kvl__malloc(sizeof *e, "an event");
  if (!e) return KVL_ERR_NO_MEMORY;
  *e = (kvl_event){.device = dev};
  int status = dev->backend->mark_open(dev->ctx, &e->mark);
  if (status < 0) {
    free(e);
    return kvl__device_failed(dev, status, "opening an event");
  }
  *out = e;
  return KVL_OK;
}

void kvl_event_close(kvl_event *event) {
  if (!event) return;
  event->device->backend->mark_close(event->device->ctx, event->mark);
  free(event);
}

static int same_device(const kvl_event *event, const kvl_stream *stream) {
  if (!event || !stream)
    return kvl__fail(KVL_ERR_INVALID, "%s is missing", event ? "stream" : "event");
  if (event->device == stream->device) return KVL_OK;
  return kvl__fail(KVL_ERR_INVALID, "event belongs to %s, but stream to %s",
                   event->device->name, stream->device->name);
}

int kvl_event_record(kvl_event *event, kvl_stream *stream) {
  int status = same_device(event, stream);
  if (status < 0) return status;
  kvl_device *dev = event->device;
  status = dev->backend->mark_record(dev->ctx, event->mark, stream->queue);
  if (status < 0) return kvl__device_failed(dev, status, "recording an event");
  event->recorded = 1;
  return KVL_OK;
}

int kvl_stream_wait_event(kvl_stream *stream, kvl_event *event) {
  int status = same_device(event, stream);
  if (status < 0 || !event->recorded) return status;
  kvl_device *dev = event->device;
  status = dev->backend->queue_wait(dev->ctx, stream->queue, event->mark);
  return status < 0 ? kvl__device_failed(dev, status, "waiting for an event") : KVL_OK;
}

int kvl_event_sync(kvl_event *event) {
  KVL__NEED(event);
  if (!event->recorded) return KVL_OK;
  kvl_device *dev = event->device;
  int status = kvl__not_recording(dev, "waiting for an event");
  if (status < 0) return status;
  status = dev->backend->mark_sync(dev->ctx, event->mark);
  return status < 0 ? kvl__device_failed(dev, status, "synchronising an event") : KVL_OK;
}

int kvl_event_done(kvl_event *event) {
  KVL__NEED(event);
  if (!event->recorded) return 1;
  kvl_device *dev = event->device;
  int status = dev->backend->mark_done(dev->ctx, event->mark);
  return status < 0 ? kvl__device_failed(dev, status, "asking an event") : status;
}

int kvl_event_elapsed_us(kvl_event *from, kvl_event *to, double *us) {
  KVL__NEED(us);
  if (!from || !to) return kvl__fail(KVL_ERR_INVALID, "event is missing");
  if (!from->recorded || !to->recorded)
    return kvl__fail(KVL_ERR_INVALID, "event %s was never recorded",
                     from->recorded ? "to" : "from");
  int status = kvl_event_sync(from);
  if (status >= 0) status = kvl_event_sync(to);
  if (status < 0) return status;
  kvl_device *dev = from->device;
  status = dev->backend->mark_elapsed_us(dev->ctx, from->mark, to->mark, us);
  return status < 0 ? kvl__device_failed(dev, status, "timing events") : KVL_OK;
}
