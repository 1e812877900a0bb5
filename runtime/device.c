/* Devices: the CPU is linked in; the CUDA plug-in libkvlab_cuda.so is opened at run time
 * from beside this library, when first asked for. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif
#include <dlfcn.h>
#include <limits.h>

#include "internal.h"

enum { DEVICES_MAX = 16 };
static kvl_device *devices[DEVICES_MAX]; /* every device in use, in no order */

/* ---- the plug-in ------------------------------------------------------------------- */

static const kvl_backend *backend_cuda_open(void) {
  static const kvl_backend *backend;
  if (backend) return backend;
  Dl_info self;
  char path[PATH_MAX] = "libkvlab_cuda.so";
  if (dladdr((void *)&kvl_abi, &self)) {
    const char *slash = strrchr(self.dli_fname, '/');
    if (slash)
      snprintf(path, sizeof path, "%.*s/libkvlab_cuda.so", (int)(slash - self.dli_fname),
               self.dli_fname);
  }
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    kvl__fail(KVL_ERR_DEVICE, "cuda: the plug-in cannot be loaded (%s); "
              "./kvlab build --cuda=on builds it", dlerror());
    return NULL;
  }
  const kvl_backend *found = dlsym(library, "kvl_backend_cuda");
  if (!found || found->version != KVL_BACKEND_VERSION) {
    kvl__fail(KVL_ERR_DEVICE, "cuda: %s was built for another version of kvlab", path);
    dlclose(library);
    return NULL;
  }
  return backend = found;
}

/* ---- open and close ------------------------------------------------------------------ */

static int parse_name(const char *name, const kvl_backend **backend, int *index) {
  *index = 0;
  if (name && !strcmp(name, "cpu")) {
    *backend = &kvl__backend_cpu;
    return KVL_OK;
  }
  if (name && !strncmp(name, "cuda", 4)) {
    char *end = (char *)name + 4;
    if (*end == ':' && end[1] >= '0' && end[1] <= '9') *index = (int)strtol(end + 1, &end, 10);
    if (!*end) {
      *backend = backend_cuda_open();
      return *backend ? KVL_OK : KVL_ERR_DEVICE;
    }
  }
  return kvl__fail(KVL_ERR_INVALID, "device is \"%s\", expected \"cpu\", \"cuda\" or \"cuda:N\"",
                   name ? name : "NULL");
}

static kvl_device *device_find(const kvl_backend *backend, int index) {
  for (int i = 0; i < DEVICES_MAX; i++)
    if (devices[i] && devices[i]->backend == backend && devices[i]->index == index)
      return devices[i];
  return NULL;
}

static int device_start(kvl_device *dev, char *text) {
  const kvl_backend *be = dev->backend;
  int status = be->open(dev->index, &dev->ctx, text);
  if (status < 0) return status;
  status = be->mark_open(dev->ctx, &dev->scratch_mark);
  if (status >= 0) status = kvl__stream_open(dev, KVL_QUEUE_DEFAULT, &dev->current);
  if (status < 0) {
    if (dev->scratch_mark) be->mark_close(dev->ctx, dev->scratch_mark);
    be->close(dev->ctx);
  }
  return status;
}

int kvl_device_open(const char *name, kvl_device **out) {
  const kvl_backend *backend = NULL;
  int index = 0, slot = 0;
  int status = parse_name(name, &backend, &index);
  if (status < 0) return status;
  kvl_device *dev = device_find(backend, index);
  if (dev) {
    dev->opens++;
    *out = dev;
    return KVL_OK;
  }
  int count = backend->count();
  if (count < 0)
    return kvl__fail(KVL_ERR_DEVICE, "%s: no usable device (%s)", name, backend->last_error());
  if (index >= count)
    return kvl__fail(KVL_ERR_DEVICE, "%s: there are %d devices", name, count);
  while (slot < DEVICES_MAX && devices[slot]) slot++;
  if (slot == DEVICES_MAX)
    return kvl__fail(KVL_ERR_DEVICE, "%s: %d devices are open already", name, DEVICES_MAX);
  dev = kvl__malloc(sizeof *dev, "a device");
  if (!dev) return KVL_ERR_NO_MEMORY;
  memset(dev, 0, sizeof *dev);
  dev->backend = backend;
  dev->index = index;
  dev->opens = 1;
  char text[KVL_WORDS_MAX] = "";
  status = device_start(dev, text);
  if (status < 0) {
    free(dev);
    return kvl__fail(status, "%s: %s", name, text[0] ? text : kvl_status_text(status));
  }
  if (backend == &kvl__backend_cpu) snprintf(dev->name, sizeof dev->name, "cpu");
  else snprintf(dev->name, sizeof dev->name, "%s:%d", backend->name, index);
  devices[slot] = dev;
  *out = dev;
  return KVL_OK;
}

void kvl__device_unref(kvl_device *dev) {
  if (dev->opens > 0 || dev->storages > 0) return;
  for (int i = 0; i < DEVICES_MAX; i++)
    if (devices[i] == dev) devices[i] = NULL;
  kvl__allocator_trim(dev, -1);
  for (int i = 0; i < KVL__STREAMS_MAX; i++) {
    if (!dev->streams[i]) continue;
    dev->backend->queue_close(dev->ctx, dev->streams[i]->queue);
    free(dev->streams[i]);
  }
  dev->backend->mark_close(dev->ctx, dev->scratch_mark);
  dev->backend->close(dev->ctx);
  free(dev);
}

void kvl_device_close(kvl_device *dev) {
  if (!dev || dev->opens == 0) return;
  dev->opens--;
  kvl__device_unref(dev);
}

/* ---- what a device tells --------------------------------------------------------------- */

const char *kvl_device_name(const kvl_device *dev) { return dev->name; }
const char *kvl_device_description(kvl_device *dev) { /* the CPU's can change: its link */
  dev->backend->describe(dev->ctx, dev->description, sizeof dev->description);
  return dev->description;
}
int kvl_device_is_cpu(const kvl_device *dev) { return dev->backend == &kvl__backend_cpu; }

int kvl__device_failed(kvl_device *dev, int status, const char *doing) {
  const char *words = dev->backend->last_error();
  if (!words[0]) return status; /* the backend has recorded its own */
  return kvl__fail(status, "%s on %s: %s", doing, dev->name, words);
}

int kvl_device_stats_get(kvl_device *dev, kvl_device_stats *out) {
  kvl_device_stats stats = dev->stats;
  int status = dev->backend->memory(dev->ctx, &stats.bytes_free, &stats.bytes_total);
  if (status < 0) return kvl__device_failed(dev, status, "asking for free memory");
  *out = stats;
  return KVL_OK;
}

int kvl_device_reset_peak(kvl_device *dev) {
  dev->stats.bytes_live_peak = dev->stats.bytes_live;
  return KVL_OK;
}

int kvl_device_sync(kvl_device *dev) {
  int status = kvl__not_recording(dev, "waiting for the device");
  if (status < 0) return status;
  for (int i = 0; i < KVL__STREAMS_MAX; i++) {
    if (!dev->streams[i]) continue;
    status = kvl_stream_sync(dev->streams[i]);
    if (status < 0) return status;
  }
  return KVL_OK;
}

int kvl_device_trim(kvl_device *dev) {
  kvl__allocator_trim(dev, -1);
  return KVL_OK;
}
