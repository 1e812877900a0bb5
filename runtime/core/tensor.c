/* Tensors: contiguous row-major views of counted storage, and copies between devices. */
#include "core/allocator.h"
#include "core/tensor.h"

static const struct {
  const char *name;
  int bytes;
} dtypes[] = {
    /* ORDER kvl_dtype */
    {"f32", 4}, {"f16", 2}, {"bf16", 2}, {"f8e4m3", 1},
    {"i32", 4}, {"i64", 8}, {"u8", 1},   {"u64", 8},
};

int kvl_dtype_bytes(int dtype) {
  if (dtype < 0 || dtype > KVL_DTYPE_U64)
    return kvl__fail(KVL_ERR_INVALID, "dtype is %d, expected 0 ... %d", dtype, KVL_DTYPE_U64);
  return dtypes[dtype].bytes;
}

const char *kvl_dtype_name(int dtype) {
  return dtype < 0 || dtype > KVL_DTYPE_U64 ? "?" : dtypes[dtype].name;
}

const char *kvl__tensor_words(const kvl_tensor *t, char *text, size_t size) {
  int n = snprintf(text, size, "%s [", kvl_dtype_name(t->dtype));
  for (int i = 0; i < t->ndim && n < (int)size; i++)
    n += snprintf(text + n, size - (size_t)n, "%s%lld", i ? ", " : "",
                  (long long)t->shape[i]);
  if (n < (int)size) snprintf(text + n, size - (size_t)n, "]");
  return text;
}

/* Sets the shape; the storage stays as it is. */
static int set_shape(kvl_tensor *t, const char *op, int dtype, int ndim,
                     const int64_t *shape) {
  if (!t->device) return kvl__fail(KVL_ERR_INVALID, "%s: device is missing", op);
  int bytes = kvl_dtype_bytes(dtype);
  if (bytes < 0) return bytes;
  if (ndim < 0 || ndim > KVL_DIMS_MAX)
    return kvl__fail(KVL_ERR_INVALID, "%s: %d dims, expected 0 ... %d", op, ndim,
                     KVL_DIMS_MAX);
  if (ndim > 0 && !shape) return kvl__fail(KVL_ERR_INVALID, "%s: shape is NULL", op);
  int64_t count = 1;
  for (int i = 0; i < KVL_DIMS_MAX; i++) {
    int64_t size = i < ndim ? shape[i] : 1;
    if (size < 0)
      return kvl__fail(KVL_ERR_INVALID, "%s: size of dim %d is %lld, expected >= 0", op, i,
                       (long long)size);
    if (__builtin_mul_overflow(count, size, &count) || count > INT64_MAX / bytes)
      return kvl__fail(KVL_ERR_INVALID, "%s: more than 2^63 bytes at dim %d", op, i);
    t->shape[i] = size;
  }
  t->count = count;
  t->ndim = ndim;
  t->dtype = dtype;
  return KVL_OK;
}

static int64_t bytes_of(const kvl_tensor *t) { return t->count * dtypes[t->dtype].bytes; }

int kvl_tensor_open(kvl_device *dev, int dtype, int ndim, const int64_t *shape,
                    kvl_tensor *out) {
  KVL__NEED(out);
  kvl_tensor t = {.device = dev};
  int status = set_shape(&t, "tensor", dtype, ndim, shape);
  if (status < 0) return status;
  status = kvl__storage_open(dev, (size_t)bytes_of(&t), &t.storage);
  if (status < 0) return status;
  t.ptr = t.storage->ptr;
  *out = t;
  return KVL_OK;
}

int kvl_tensor_open_pinned(kvl_device *dev, int dtype, int ndim, const int64_t *shape,
                           int huge_pages, kvl_tensor *out) {
  KVL__NEED(out);
  kvl_tensor t = {.device = dev};
  int status = set_shape(&t, "pinned tensor", dtype, ndim, shape);
  if (status < 0) return status;
  status = kvl__storage_open_pinned(dev, (size_t)bytes_of(&t), huge_pages, &t.storage);
  if (status < 0) return status;
  t.ptr = t.storage->ptr;
  *out = t;
  return KVL_OK;
}

int kvl_tensor_is_pinned(const kvl_tensor *t) {
  return t && t->storage && t->storage->size_class == KVL__PINNED;
}

int kvl_tensor_freeze(const kvl_tensor *t, int frozen) {
  if (!t || !t->storage) return kvl__fail(KVL_ERR_INVALID, "freeze: the tensor is closed");
  int status = kvl_device_sync(t->device);
  if (status >= 0) t->storage->is_frozen = frozen != 0;
  return status;
}

int kvl_tensor_is_frozen(const kvl_tensor *t) {
  return t && t->storage && t->storage->is_frozen;
}

int kvl_tensor_wrap(kvl_device *dev, int dtype, int ndim, const int64_t *shape, void *memory,
                    kvl_tensor *out) {
  KVL__NEED(out);
  kvl_tensor t = {.device = dev, .ptr = memory};
  int status = set_shape(&t, "wrap", dtype, ndim, shape);
  if (status < 0) return status;
  if (!memory) return kvl__fail(KVL_ERR_INVALID, "wrap: memory is NULL");
  status = kvl__storage_wrap(dev, memory, (size_t)bytes_of(&t), &t.storage);
  if (status < 0) return status;
  *out = t;
  return KVL_OK;
}

void kvl_tensor_close(kvl_tensor *t) {
  if (!t || !t->storage) return;
  kvl__storage_unref(t->storage);
  t->storage = NULL;
  t->ptr = NULL;
}

/* ---- views --------------------------------------------------------------------------- */

static int view_of(const kvl_tensor *t, const char *op) {
  if (t && t->storage) return KVL_OK;
  return kvl__fail(KVL_ERR_INVALID, "%s: the tensor is closed", op);
}

int kvl_tensor_narrow(const kvl_tensor *t, int64_t start, int64_t length, kvl_tensor *out) {
  KVL__NEED(out);
  int status = view_of(t, "narrow");
  if (status < 0) return status;
  if (t->ndim < 1) return kvl__fail(KVL_ERR_INVALID, "narrow: the tensor has no dims");
  if (start < 0 || length < 0 || start > t->shape[0] - length)
    return kvl__fail(KVL_ERR_INVALID,
                     "narrow: rows %lld ... %lld, expected within 0 ... %lld",
                     (long long)start, (long long)(start + length), (long long)t->shape[0]);
  kvl_tensor v = *t;
  int64_t row = t->shape[0] ? t->count / t->shape[0] : 0;
  v.shape[0] = length;
  v.count = row * length;
  v.ptr = (char *)t->ptr + start * row * dtypes[t->dtype].bytes;
  v.storage->refs++;
  *out = v;
  return KVL_OK;
}

int kvl_tensor_index(const kvl_tensor *t, int64_t index, kvl_tensor *out) {
  KVL__NEED(out);
  int status = view_of(t, "index");
  if (status < 0) return status;
  if (t->ndim < 1 || index < 0 || index >= t->shape[0])
    return kvl__fail(KVL_ERR_INVALID, "index: %lld, expected 0 ... %lld", (long long)index,
                     t->ndim < 1 ? -1LL : (long long)t->shape[0] - 1);
  kvl_tensor v = *t;
  v.count = t->count / t->shape[0];
  v.ptr = (char *)t->ptr + index * v.count * dtypes[t->dtype].bytes;
  memmove(v.shape, v.shape + 1, sizeof v.shape - sizeof v.shape[0]);
  v.shape[KVL_DIMS_MAX - 1] = 1;
  v.ndim--;
  v.storage->refs++;
  *out = v;
  return KVL_OK;
}

int kvl_tensor_reshape(const kvl_tensor *t, int ndim, const int64_t *shape, kvl_tensor *out) {
  KVL__NEED(out);
  int status = view_of(t, "reshape");
  if (status < 0) return status;
  kvl_tensor v = *t;
  status = set_shape(&v, "reshape", t->dtype, ndim, shape);
  if (status < 0) return status;
  if (v.count != t->count) {
    char from[96], to[96];
    return kvl__fail(KVL_ERR_INVALID, "reshape: %s to %s, expected the same count",
                     kvl__tensor_words(t, from, sizeof from),
                     kvl__tensor_words(&v, to, sizeof to));
  }
  v.storage->refs++;
  *out = v;
  return KVL_OK;
}

/* ---- copies ---------------------------------------------------------------------------- */

static int copy_bytes(kvl_device *dev, kvl_storage *s, void *dst, const void *src,
                      int64_t bytes, enum kvl_copy_kind kind, int wait) {
  if (wait) {
    int status = kvl__not_recording(dev, "reading from the device");
    if (status < 0) return status;
  }
  if (bytes == 0) return KVL_OK;
  const kvl_backend *be = dev->backend;
  int status = kvl__storage_use(s, dev);
  if (status < 0) return status;
  status = be->copy(dev->ctx, dev->current->queue, dst, src, (size_t)bytes, kind);
  if (status >= 0 && wait) status = be->queue_sync(dev->ctx, dev->current->queue);
  return status < 0 ? kvl__device_failed(dev, status, "copying") : KVL_OK;
}

int kvl_copy(const kvl_tensor *src, const kvl_tensor *dst) {
  char a[96], b[96];
  if (kvl_tensor_is_frozen(dst)) return kvl__fail(KVL_ERR_INVALID, "copy: dst is frozen");
  if (!src || !src->storage || !dst || !dst->storage)
    return kvl__fail(KVL_ERR_INVALID, "copy: %s is closed",
                     src && src->storage ? "dst" : "src");
  if (src->dtype != dst->dtype || src->count != dst->count)
    return kvl__fail(KVL_ERR_INVALID, "copy: dst is %s, expected %s",
                     kvl__tensor_words(dst, b, sizeof b),
                     kvl__tensor_words(src, a, sizeof a));
  int64_t bytes = bytes_of(src);
  kvl_device *from = src->device, *to = dst->device;
  if (from == to) {
    int in = kvl_tensor_is_pinned(src), out = kvl_tensor_is_pinned(dst);
    int status = kvl__storage_use(src->storage, to);
    if (status < 0) return status;
    return copy_bytes(to, dst->storage, dst->ptr, src->ptr, bytes,
                      in == out ? KVL_COPY_LOCAL
                      : in      ? KVL_COPY_FROM_HOST
                                : KVL_COPY_TO_HOST,
                      0);
  }
  if (from->backend->host_memory) { /* the work that wrote src must be done */
    int status = kvl__not_recording(to, "copying from another device");
    if (status >= 0) status = kvl_stream_sync(from->current);
    if (status < 0) return status;
    return copy_bytes(to, dst->storage, dst->ptr, src->ptr, bytes, KVL_COPY_FROM_HOST, 0);
  }
  if (!to->backend->host_memory)
    return kvl__fail(KVL_ERR_UNSUPPORTED, "copy: from %s to %s; go through the cpu",
                     from->name, to->name);
  int status = kvl_stream_sync(to->current);
  if (status < 0) return status;
  return copy_bytes(from, src->storage, dst->ptr, src->ptr, bytes, KVL_COPY_TO_HOST, 1);
}

static int host_copy_checked(const kvl_tensor *t, const void *memory, int64_t bytes,
                             const char *op) {
  int status = view_of(t, op);
  if (status < 0) return status;
  if (bytes > 0 && !memory) return kvl__fail(KVL_ERR_INVALID, "%s: memory is NULL", op);
  if (bytes != bytes_of(t))
    return kvl__fail(KVL_ERR_INVALID, "%s: %lld bytes, expected %lld", op, (long long)bytes,
                     (long long)bytes_of(t));
  return KVL_OK;
}

int kvl_tensor_write(const kvl_tensor *t, const void *memory, int64_t bytes) {
  int status = host_copy_checked(t, memory, bytes, "write");
  if (status < 0) return status;
  if (t->storage->is_frozen) return kvl__fail(KVL_ERR_INVALID, "write: the tensor is frozen");
  kvl_device *dev = t->device; /* CUDA stages pageable memory before it returns */
  status = kvl__not_recording(dev, "writing to the device");
  if (status < 0) return status;
  int local = dev->backend->host_memory;
  return copy_bytes(dev, t->storage, t->ptr, memory, bytes,
                    local ? KVL_COPY_LOCAL : KVL_COPY_FROM_HOST, local);
}

int kvl_tensor_read(const kvl_tensor *t, void *memory, int64_t bytes) {
  int status = host_copy_checked(t, memory, bytes, "read");
  if (status < 0) return status;
  kvl_device *dev = t->device;
  status = copy_bytes(dev, t->storage, memory, t->ptr, bytes,
                      dev->backend->host_memory ? KVL_COPY_LOCAL : KVL_COPY_TO_HOST, 1);
  if (status >= 0 && t->dtype == KVL_DTYPE_F32) {
    float *x = memory;
    for (int64_t i = 0; i < t->count; i++)
      if (x[i] != x[i]) x[i] = __builtin_nanf("");
  }
  return status;
}
