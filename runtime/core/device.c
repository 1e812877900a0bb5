/* Devices: the list of open ones, how they end, and what they report about themselves.
 * runtime/open.c opens them. */
#include "core/device.h"

enum { DEVICES_MAX = 16 };
static kvl_device *devices[DEVICES_MAX]; /* every device in use, in no order */

kvl_device *kvl__device_find(const kvl_backend *backend, int index) {
  for (int i = 0; i < DEVICES_MAX; i++)
    if (devices[i] && devices[i]->backend == backend && devices[i]->index == index)
      return devices[i];
  return NULL;
}

int kvl__device_new(const kvl_backend *backend, int index, kvl_device **out) {
  int place = 0;
  while (place < DEVICES_MAX && devices[place]) place++;
  if (place == DEVICES_MAX)
    return kvl__fail(KVL_ERR_DEVICE, "%s:%d: %d devices are open already", backend->name,
                     index, DEVICES_MAX);
  kvl_device *dev = kvl__malloc(sizeof *dev, "a device");
  if (!dev) return KVL_ERR_NO_MEMORY;
  memset(dev, 0, sizeof *dev);
  dev->backend = backend;
  dev->index = index;
  dev->opens = 1;
  *out = devices[place] = dev;
  return KVL_OK;
}

void kvl__device_end(kvl_device *dev) {
  for (int i = 0; i < DEVICES_MAX; i++)
    if (devices[i] == dev) devices[i] = NULL;
  for (int i = 0; i < KVL__STREAMS_MAX; i++) {
    if (!dev->streams[i]) continue;
    dev->backend->queue_close(dev->ctx, dev->streams[i]->queue);
    free(dev->streams[i]);
  }
  if (dev->scratch_mark) dev->backend->mark_close(dev->ctx, dev->scratch_mark);
  if (dev->ctx) dev->backend->close(dev->ctx);
  free(dev);
}

void kvl__device_drain(kvl_device *dev) {
  for (int i = 0; i < KVL__STREAMS_MAX; i++)
    if (dev->streams[i]) dev->backend->queue_sync(dev->ctx, dev->streams[i]->queue);
}

int kvl__not_recording(kvl_device *dev, const char *what) {
  if (!dev->recording) return KVL_OK;
  return kvl__fail(KVL_ERR_INVALID,
                   "a graph is being recorded on %s: %s needs the host, "
                   "which has no part in a replay",
                   dev->name, what);
}

int kvl_device_is_recording(const kvl_device *dev) { return dev && dev->recording != NULL; }

/* ---- what a device tells --------------------------------------------------------------- */

const char *kvl_device_name(const kvl_device *dev) { return dev ? dev->name : "?"; }
const char *kvl_device_description(kvl_device *dev) { /* the CPU's can change: its link */
  if (!dev) return "?";
  dev->backend->describe(dev->ctx, dev->description, sizeof dev->description);
  return dev->description;
}
const char *kvl_device_build(kvl_device *dev) {
  if (!dev) return "?";
  snprintf(dev->build, sizeof dev->build, "%s; %s", kvl__build(), dev->backend->build());
  return dev->build;
}
int kvl_device_is_cpu(const kvl_device *dev) {
  return dev && !strcmp(dev->backend->name, "cpu");
}

int kvl__device_failed(kvl_device *dev, int status, const char *doing) {
  const char *words = dev->backend->last_error();
  if (!words[0]) return status; /* the backend has recorded its own */
  return kvl__fail(status, "%s on %s: %s", doing, dev->name, words);
}

int kvl_device_stats_get(kvl_device *dev, kvl_device_stats *out) {
  KVL__NEED(dev);
  KVL__NEED(out);
  kvl_device_stats stats = dev->stats;
  int status = dev->backend->memory(dev->ctx, &stats.bytes_free, &stats.bytes_total);
  if (status < 0) return kvl__device_failed(dev, status, "asking for free memory");
  *out = stats;
  return KVL_OK;
}

int64_t kvl_bytes_live(void) {
  int64_t bytes = 0;
  for (int i = 0; i < DEVICES_MAX; i++)
    if (devices[i]) bytes += devices[i]->stats.bytes_live;
  return bytes;
}

int kvl_device_reset_peak(kvl_device *dev) {
  KVL__NEED(dev);
  dev->stats.bytes_live_peak = dev->stats.bytes_live;
  return KVL_OK;
}
