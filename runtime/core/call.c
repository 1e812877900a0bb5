/* How an op gets from tensors to a kernel: one check that every op uses, and the launch. */
#include "core/call.h"
#include "core/tensor.h"

int kvl__call_fail(struct kvl__call *call, const char *format, ...) {
  if (call->status < 0) return call->status;
  char text[400];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  return call->status = kvl__fail(KVL_ERR_INVALID, "%s: %s", call->op, text);
}

/* ---- shapes ---------------------------------------------------------------------------- */

static int dim_find(const struct kvl__call *call, const char *name, int length) {
  for (int i = 0; i < call->dims; i++)
    if (call->dim[i].length == length && !memcmp(call->dim[i].name, name, (size_t)length))
      return i;
  return -1;
}

int64_t kvl__dim(const struct kvl__call *call, const char *name) {
  int i = dim_find(call, name, (int)strlen(name));
  return i < 0 ? 0 : call->dim[i].size;
}

/* Compares one word of a shape with one size. A new name is bound to the size. */
static int word_matches(struct kvl__call *call, const char *word, int length, int64_t size) {
  if (word[0] >= '0' && word[0] <= '9') return strtoll(word, NULL, 10) == size;
  int i = dim_find(call, word, length);
  if (i >= 0) return call->dim[i].size == size;
  KVL_CHECK(call->dims < 16);
  call->dim[call->dims].name = word;
  call->dim[call->dims].length = length;
  call->dim[call->dims++].size = size;
  return 1;
}

void kvl__bind(struct kvl__call *call, const char *name, const char *shape, int64_t size) {
  int length = (int)strcspn(shape, " ");
  if (call->status >= 0 && !word_matches(call, shape, length, size))
    kvl__call_fail(call, "%s has %.*s %lld, expected %lld", name, length, shape,
                   (long long)size, (long long)kvl__dim(call, shape));
}

/* Compares the words before "..." with the leading dims, and the words after it with the
 * trailing dims. */
static int shape_matches(struct kvl__call *call, const kvl_tensor *t, const char *shape) {
  int words = 0, open = 0;
  for (const char *p = shape; *p; p++) {
    if (p != shape && p[-1] != ' ') continue;
    if (*p == '.') open = 1;
    else words++;
  }
  if (open ? t->ndim < words : t->ndim != words) return 0;
  int i = 0;
  for (const char *p = shape; *p;) {
    int length = (int)strcspn(p, " ");
    if (*p == '.') i += t->ndim - words;
    else if (!word_matches(call, p, length, t->shape[i++])) return 0;
    p += length;
    while (*p == ' ') p++;
  }
  return 1;
}

/* "tokens=4, heads, 2" */
static void shape_words(const struct kvl__call *call, const char *shape, char *text,
                        size_t size) {
  size_t n = 0;
  for (const char *p = shape; *p && n < size;) {
    int length = (int)strcspn(p, " "), i = dim_find(call, p, length);
    n += (size_t)snprintf(text + n, size - n, "%s%.*s", p == shape ? "" : ", ", length, p);
    if (i >= 0 && n < size)
      n += (size_t)snprintf(text + n, size - n, "=%lld", (long long)call->dim[i].size);
    p += length;
    while (*p == ' ') p++;
  }
}

static void dtype_words(unsigned dtypes, char *text, size_t size) {
  size_t n = 0;
  text[0] = 0;
  for (int d = 0; d <= KVL_DTYPE_U64 && n < size; d++)
    if (dtypes >> d & 1)
      n += (size_t)snprintf(text + n, size - n, "%s%s", n ? "|" : "", kvl_dtype_name(d));
}

static void fail_mismatch(struct kvl__call *call, const char *name, int name_length,
                          const kvl_tensor *t, unsigned dtypes, const char *shape,
                          int bound) {
  char got[96], want_shape[160], want_dtype[64];
  call->dims = bound; /* names that this very tensor bound are not expected of it */
  shape_words(call, shape, want_shape, sizeof want_shape);
  dtype_words(dtypes, want_dtype, sizeof want_dtype);
  kvl__call_fail(call, "%.*s is %s, expected %s [%s]", name_length, name,
                 kvl__tensor_words(t, got, sizeof got), want_dtype, want_shape);
}

/* Whether an op writes to the argument of this name. */
static int is_result(const char *name, int length) {
  static const char *const names[] = {"out",     "dst",     "t",      "residual",
                                      "outs[0]", "outs[1]", "outs[2]"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if ((int)strlen(names[i]) == length && !memcmp(names[i], name, (size_t)length)) return 1;
  return 0;
}

int kvl__arg(struct kvl__call *call, const char *name, const kvl_tensor *t, unsigned dtypes,
             const char *shape) {
  int length = (int)strlen(name), optional = name[length - 1] == '?', bound = call->dims;
  length -= optional;
  if (call->status < 0 || (!t && optional)) return 0;
  if (!t || !t->storage) {
    kvl__call_fail(call, "%.*s is %s, expected a tensor", length, name,
                   t ? "closed" : "missing");
    return 0;
  }
  if (!call->device) call->device = t->device;
  if (t->device != call->device) {
    kvl__call_fail(call, "%.*s is on %s, expected %s like the tensors before it", length,
                   name, kvl_device_name(t->device), kvl_device_name(call->device));
    return 0;
  }
  if (!(dtypes >> t->dtype & 1) || !shape_matches(call, t, shape)) {
    fail_mismatch(call, name, length, t, dtypes, shape, bound);
    return 0;
  }
  if (t->storage->is_frozen && is_result(name, length)) {
    kvl__call_fail(call, "%.*s is frozen, expected a tensor that may be written", length,
                   name);
    return 0;
  }
  KVL_CHECK(call->tensors < (int)(sizeof call->storage / sizeof call->storage[0]));
  call->storage[call->tensors++] = t->storage;
  return 1;
}

int kvl__vector_arg(struct kvl__call *c, const char *name, const kvl_tensor *t,
                    unsigned dtypes, const char *shape) {
  if (!kvl__arg(c, name, t, dtypes, shape)) return 0;
  if ((uintptr_t)t->ptr % 16)
    kvl__call_fail(c,
                   "%.*s begins %d bytes past a multiple of 16; if it is a view, "
                   "clone it",
                   (int)strcspn(name, "?"), name, (int)((uintptr_t)t->ptr % 16));
  return c->status >= 0;
}

static int same_shape(const kvl_tensor *a, const kvl_tensor *b) {
  return a->ndim == b->ndim &&
         !memcmp(a->shape, b->shape, sizeof a->shape[0] * (size_t)a->ndim);
}

void kvl__expect_shape_of(struct kvl__call *c, const char *name, const kvl_tensor *t,
                          const char *other_name, const kvl_tensor *other) {
  char got[96], want[96];
  if (c->status >= 0 && !same_shape(t, other))
    kvl__call_fail(c, "%s is %s, expected the shape of %s, %s", name,
                   kvl__tensor_words(t, got, sizeof got), other_name,
                   kvl__tensor_words(other, want, sizeof want));
}

/* ---- launch ---------------------------------------------------------------------------- */

void *kvl__call_workspace(struct kvl__call *call, enum kvl_op op, const void *args) {
  if (call->status < 0) return NULL;
  kvl_device *dev = call->device;
  size_t bytes = dev->backend->workspace(dev->ctx, op, args);
  if (bytes == 0) return NULL;
  call->status = kvl__storage_open(dev, bytes, &call->workspace);
  return call->status < 0 ? NULL : call->workspace->ptr;
}

int kvl__launch(struct kvl__call *call, enum kvl_op op, const void *args, size_t size) {
  kvl_device *dev = call->device;
  if (call->status >= 0 && kvl_interrupted())
    call->status = kvl__fail(KVL_ERR_INTERRUPTED, "%s: interrupted", call->op);
  if (call->status >= 0) {
    for (int i = 0; i < call->tensors && call->status >= 0; i++)
      call->status = kvl__storage_use(call->storage[i], dev);
  }
  if (call->status >= 0) {
    dev->stats.launches++;
    call->status = dev->backend->launch(dev->ctx, dev->current->queue, op, args, size);
    if (call->status < 0) {
      const char *words = dev->backend->last_error();
      kvl__fail(call->status, "%s on %s: %s", call->op, dev->name,
                words && words[0] ? words : kvl_status_text(call->status));
    }
  }
  if (call->workspace) kvl__storage_unref(call->workspace); /* reuse follows the stream */
  return call->status;
}
