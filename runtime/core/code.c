/* Kernels that were compiled while the program runs: the backend loads and launches them. */
#include "core/code.h"

#include "core/allocator.h"
#include "core/tensor.h"

struct kvl_code {
  const kvl_backend *backend;
  void *handle; /* the backend's */
  char name[64];
  kvl_code *next, *previous; /* in the list of all that are loaded */
};

/* Most code stays loaded until the process ends, because graphs may hold it. */
static kvl_code *loaded;

int kvl_code_open(kvl_device *dev, const char *name, const void *image, size_t bytes,
                  kvl_code **out) {
  KVL__NEED(dev);
  KVL__NEED(name);
  KVL__NEED(image);
  KVL__NEED(out);
  if (bytes == 0) return kvl__fail(KVL_ERR_INVALID, "%s: its image is empty", name);
  kvl_code *code = kvl__malloc(sizeof *code, "a kernel");
  if (!code) return KVL_ERR_NO_MEMORY;
  *code = (kvl_code){.backend = dev->backend};
  snprintf(code->name, sizeof code->name, "%s", name);
  int status = dev->backend->code_open(dev->ctx, image, bytes, &code->handle);
  if (status < 0) {
    free(code);
    return kvl__fail(status, "%s on %s: %s", name, dev->name, dev->backend->last_error());
  }
  code->next = loaded;
  if (loaded) loaded->previous = code;
  *out = loaded = code;
  return KVL_OK;
}

static int check_tensors(const kvl_code *code, const kvl_device *dev,
                         kvl_tensor *const *tensors, int n) {
  for (int i = 0; i < n; i++) {
    const kvl_tensor *t = tensors[i];
    if (!t || !t->storage)
      return kvl__fail(KVL_ERR_INVALID, "%s: tensor %d is %s, expected a tensor", code->name,
                       i, t ? "closed" : "missing");
    if (t->device != dev)
      return kvl__fail(KVL_ERR_INVALID, "%s: tensor %d is on %s, expected %s", code->name, i,
                       kvl_device_name(t->device), kvl_device_name(dev));
  }
  return KVL_OK;
}

int kvl_code_launch(kvl_code *code, kvl_device *dev, const void *arguments, size_t size,
                    kvl_tensor *const *tensors, int n, const kvl_grid *grid) {
  KVL__NEED(code);
  KVL__NEED(dev);
  KVL__NEED(arguments);
  KVL__NEED(grid);
  if (n < 0 || (n > 0 && !tensors))
    return kvl__fail(KVL_ERR_INVALID, "%s: n is %d, expected the number of tensors",
                     code->name, n);
  if (size > KVL_CODE_ARGUMENTS_MAX)
    return kvl__fail(KVL_ERR_INVALID, "%s: %zu bytes of arguments, expected at most %d",
                     code->name, size, KVL_CODE_ARGUMENTS_MAX);
  if (code->backend != dev->backend)
    return kvl__fail(KVL_ERR_INVALID, "%s: compiled for %s, launched on %s", code->name,
                     code->backend->name, dev->name);
  if (dev->backend->code_hook(code->handle))
    return kvl__fail(KVL_ERR_INVALID, "%s: it is a hook of attention, not a kernel",
                     code->name);
  int status = check_tensors(code, dev, tensors, n);
  if (status < 0) return status;
  if (kvl_interrupted()) return kvl__fail(KVL_ERR_INTERRUPTED, "%s: interrupted", code->name);
  for (int i = 0; i < n && status >= 0; i++)
    status = kvl__storage_use(tensors[i]->storage, dev);
  if (status < 0) return status;
  dev->stats.launches++;
  status = dev->backend->code_launch(dev->ctx, dev->current->queue, code->handle, arguments,
                                     size, grid);
  if (status < 0) {
    const char *words = dev->backend->last_error();
    kvl__fail(status, "%s on %s: %s", code->name, dev->name,
              words && words[0] ? words : kvl_status_text(status));
  }
  return status;
}

void *kvl__code_hook(const kvl_code *code, const kvl_device *dev) {
  if (code->backend != dev->backend) return NULL;
  return code->backend->code_hook(code->handle);
}

const char *kvl__code_name(const kvl_code *code) { return code->name; }

void kvl_code_close(kvl_code *code) {
  if (!code) return;
  code->backend->code_close(code->handle);
  if (code->next) code->next->previous = code->previous;
  if (code->previous) code->previous->next = code->next;
  else loaded = code->next;
  free(code);
}

int kvl_device_target(kvl_device *dev, char *text, size_t size) {
  KVL__NEED(dev);
  KVL__NEED(text);
  int status = dev->backend->target(dev->ctx, text, size);
  return status < 0 ? kvl__device_failed(dev, status, "asking for the target") : KVL_OK;
}
