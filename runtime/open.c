/* Opens devices. The CPU backend is linked in. The CUDA plug-in, libkvlab_cuda.so, lies in
 * the folder of this library and is loaded when a CUDA device is first opened. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif
#include <dlfcn.h>
#include <limits.h>

#include "abi.h"
#include "core/allocator.h"
#include "core/stream.h"
#include "cpu/backend.h"

/* ---- the plug-in ------------------------------------------------------------------- */

/* Without a driver the plug-in can do nothing, and loading it with its libraries takes a tenth
 * of a second. */
static const kvl_backend *backend_cuda_open(void) {
  static const kvl_backend *backend;
  if (backend) return backend;
  if (!dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL)) {
    kvl__fail(KVL_ERR_DEVICE, "cuda: no usable device (NVIDIA's driver is not here: %s)",
              dlerror());
    return NULL;
  }
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
    kvl__fail(KVL_ERR_DEVICE,
              "cuda: the plug-in cannot be loaded (%s); "
              "./kvlab build --cuda=on builds it",
              dlerror());
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
    if (*end == ':' && end[1] >= '0' && end[1] <= '9')
      *index = (int)strtol(end + 1, &end, 10);
    if (!*end) {
      *backend = backend_cuda_open();
      return *backend ? KVL_OK : KVL_ERR_DEVICE;
    }
  }
  return kvl__fail(KVL_ERR_INVALID,
                   "device is \"%s\", expected \"cpu\", \"cuda\" or \"cuda:N\"",
                   name ? name : "NULL");
}

static int device_start(kvl_device *dev, char *text) {
  const kvl_backend *be = dev->backend;
  int status = be->open(dev->index, &dev->ctx, text);
  if (status < 0) return status;
  status = be->mark_open(dev->ctx, &dev->scratch_mark);
  if (status >= 0) status = kvl__stream_open(dev, KVL_QUEUE_DEFAULT, &dev->current);
  if (status >= 0) kvl__allocator_open(dev);
  return status;
}

int kvl_device_open(const char *name, kvl_device **out) {
  KVL__NEED(name);
  KVL__NEED(out);
  const kvl_backend *backend = NULL;
  int index = 0;
  int status = parse_name(name, &backend, &index);
  if (status < 0) return status;
  kvl_device *dev = kvl__device_find(backend, index);
  if (dev) {
    dev->opens++;
    *out = dev;
    return KVL_OK;
  }
  int count = backend->count();
  if (count < 0)
    return kvl__fail(KVL_ERR_DEVICE, "%s: no usable device (%s)", name,
                     backend->last_error());
  if (index >= count)
    return kvl__fail(KVL_ERR_DEVICE, "%s: there is no such device; this machine has %d", name,
                     count);
  status = kvl__device_new(backend, index, &dev);
  if (status < 0) return status;
  char text[KVL_WORDS_MAX] = "";
  status = device_start(dev, text);
  if (status < 0) {
    kvl__device_end(dev);
    return kvl__fail(status, "%s: %s", name, text[0] ? text : kvl_status_text(status));
  }
  if (backend == &kvl__backend_cpu) snprintf(dev->name, sizeof dev->name, "cpu");
  else snprintf(dev->name, sizeof dev->name, "%s:%d", backend->name, index);
  *out = dev;
  return KVL_OK;
}

void kvl_device_close(kvl_device *dev) {
  if (!dev || dev->opens == 0) return;
  dev->opens--;
  kvl__device_unref(dev);
}
