/* A ticket is a task of a prefetcher with the resources of the device that it holds:
 * marks, and a reference to the memory that it writes to. Both are taken at submit and
 * given back by a later call on a caller's thread, because workers must not touch either. */
#include "core/call.h"
#include "prefetch/ticket.h"

/* ---- marks: opened on callers' threads, used by many tasks ---------------------------- */

static int mark_take(struct kvl__marks *m, void **out) {
  if (m->free > 0) {
    *out = m->list[--m->free];
    return KVL_OK;
  }
  void **grown = kvl__realloc(m->list, (size_t)(m->opened + 1) * sizeof *grown, "marks");
  if (!grown) return KVL_ERR_NO_MEMORY;
  m->list = grown;
  int status = m->device->backend->mark_open(m->device->ctx, out);
  if (status < 0) return kvl__device_failed(m->device, status, "opening an event");
  m->opened++;
  return KVL_OK;
}

static void marks_give(struct kvl__marks *m, kvl_ticket *t) {
  if (t->after) m->list[m->free++] = t->after;
  for (int i = 0; t->marks && i < t->layers && t->marks[i]; i++)
    m->list[m->free++] = t->marks[i];
}

void kvl__marks_close(struct kvl__marks *m) {
  kvl_device *dev = m->device;
  for (int i = 0; i < m->free; i++) dev->backend->mark_close(dev->ctx, m->list[i]);
  if (m->before) dev->backend->queue_close(dev->ctx, m->before);
  if (m->joined) dev->backend->mark_close(dev->ctx, m->joined);
  free(m->list);
}

int kvl__ticket_unref(kvl_ticket *t, struct kvl__marks *marks) {
  if (--t->refs > 0) return 0;
  marks_give(marks, t);
  free(t);
  return 1;
}

/* ---- opening a ticket ----------------------------------------------------------------- */

static int expect_task(kvl_device *dev, const kvl_prefetch_task *task) {
  struct kvl__call c = {.op = "prefetch", .device = dev};
  const kvl_tensor *m = task->memory;
  kvl__arg(&c, "memory", m, KVL__ANY, "layers blocks ...");
  if (task->n < 0) kvl__call_fail(&c, "n is %d, expected 0 or more", task->n);
  if (task->n > 0 && (!task->keys || !task->blocks))
    kvl__call_fail(&c, "%s are missing", task->keys ? "blocks" : "keys");
  if (task->first_layer < 0)
    kvl__call_fail(&c, "first_layer is %d, expected 0 or more", task->first_layer);
  for (int i = 0; c.status >= 0 && i < task->n; i++)
    if (task->blocks[i] < 0 || task->blocks[i] >= m->shape[1])
      kvl__call_fail(&c, "block %d is %d, expected 0 ... %lld", i, task->blocks[i],
                     (long long)m->shape[1] - 1);
  return c.status < 0 ? c.status : kvl__not_recording(dev, "a prefetch");
}

int kvl__ticket_open(kvl_prefetch *p, kvl_device *dev, size_t bytes_half,
                     const kvl_prefetch_task *task, kvl_ticket **out) {
  int status = expect_task(dev, task);
  if (status < 0) return status;
  const kvl_tensor *m = task->memory;
  size_t n = (size_t)task->n, layers = (size_t)m->shape[0];
  int64_t blocks = m->shape[0] * m->shape[1];
  size_t bytes = blocks ? (size_t)(m->count / blocks * kvl_dtype_bytes(m->dtype)) : 0;
  int in_place = bytes_half == 0 || kvl_tensor_is_pinned(m);
  if (!in_place && bytes > bytes_half)
    return kvl__fail(KVL_ERR_INVALID,
                     "prefetch: a block of a layer has %zu bytes, expected "
                     "at most %zu: bytes_staging / (2 * workers)",
                     bytes, bytes_half);
  kvl_ticket *t = kvl__malloc(
      sizeof *t + n * (sizeof *t->keys + sizeof *t->blocks + 1) + layers * sizeof *t->marks,
      "a prefetch task");
  if (!t) return KVL_ERR_NO_MEMORY;
  memset(t, 0, sizeof *t);
  t->prefetch = p;
  t->refs = 1;
  t->memory = *m;
  t->bytes_record = bytes;
  t->request = task->request;
  t->priority = task->priority;
  t->n = task->n;
  t->layers = t->first_lost = (int)layers;
  t->first_layer = task->first_layer;
  t->keys = (kvl_key *)(t + 1);
  void **marks = (void **)(t->keys + n);
  t->blocks = (int32_t *)(marks + layers);
  t->arrived = (uint8_t *)(t->blocks + n);
  memset(marks, 0, layers * sizeof *marks);
  memset(t->arrived, BLOCK_COMING, n);
  if (n) memcpy(t->keys, task->keys, n * sizeof *t->keys);
  if (n) memcpy(t->blocks, task->blocks, n * sizeof *t->blocks);
  if (!in_place) t->marks = marks;
  *out = t;
  return KVL_OK;
}

/* Records t->after: one mark for all work given so far to streams that may use the memory. */
static int record_after(struct kvl__marks *m, kvl_ticket *t) {
  kvl_device *dev = m->device;
  const kvl_backend *be = dev->backend;
  const kvl_storage *s = t->memory.storage;
  uint64_t users = s->used | (uint64_t)1 << s->home | (uint64_t)1 << dev->current->id;
  if (!(users & (users - 1))) return be->mark_record(dev->ctx, t->after, dev->current->queue);
  int status = KVL_OK;
  if (!m->before) status = be->queue_open(dev->ctx, KVL_QUEUE_NORMAL, &m->before);
  if (status >= 0 && !m->joined) status = be->mark_open(dev->ctx, &m->joined);
  for (; users && status >= 0; users &= users - 1) {
    kvl_stream *stream = dev->streams[__builtin_ctzll(users)];
    if (!stream) continue; /* closed, which has synchronised it */
    status = be->mark_record(dev->ctx, m->joined, stream->queue);
    if (status >= 0) status = be->queue_wait(dev->ctx, m->before, m->joined);
  }
  return status < 0 ? status : be->mark_record(dev->ctx, t->after, m->before);
}

int kvl__ticket_equip(kvl_ticket *t, struct kvl__marks *marks) {
  int status = mark_take(marks, &t->after);
  for (int i = 0; t->marks && i < t->layers && status >= 0; i++)
    status = mark_take(marks, &t->marks[i]);
  if (status < 0) return status;
  status = record_after(marks, t);
  return status < 0 ? kvl__device_failed(marks->device, status, "prefetch") : KVL_OK;
}
