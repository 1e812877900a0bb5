/* Tickets: a task of the prefetch engine with what it holds of the device, and waiting for it.
 *
 * What a task holds, a reference on the destination and marks, is taken at submit and given
 * back by a later call of a caller's thread: workers must not touch either. */
#include <limits.h>

#include "prefetch.h"

/* ---- marks: opened by callers, and used again ----------------------------------------- */

static int mark_take(kvl_prefetch *e, void **out) {
  if (e->marks_free > 0) {
    *out = e->marks[--e->marks_free];
    return KVL_OK;
  }
  void **grown = kvl__realloc(e->marks, (size_t)(e->marks_open + 1) * sizeof *grown, "marks");
  if (!grown) return KVL_ERR_NO_MEMORY;
  e->marks = grown;
  int status = e->device->backend->mark_open(e->device->ctx, out);
  if (status < 0) return kvl__device_failed(e->device, status, "opening an event");
  e->marks_open++;
  return KVL_OK;
}

static void marks_give(kvl_prefetch *e, kvl_ticket *t) {
  if (t->after) e->marks[e->marks_free++] = t->after;
  for (int i = 0; t->marks && i < t->layers && t->marks[i]; i++)
    e->marks[e->marks_free++] = t->marks[i];
}

int kvl__ticket_unref(kvl_ticket *t) {
  if (--t->refs > 0) return 0;
  marks_give(t->engine, t);
  free(t);
  return 1;
}

/* ---- making one ----------------------------------------------------------------------- */

static int expect_task(const kvl_prefetch *e, const kvl_prefetch_task *task) {
  struct kvl__call c = {.op = "prefetch", .device = e->device};
  const kvl_tensor *m = task->memory;
  kvl__arg(&c, "memory", m, KVL__ANY, "layers blocks 2 kv_heads block_size head_dim");
  if (task->n < 0) kvl__call_fail(&c, "n is %d, expected 0 or more", task->n);
  if (task->n > 0 && (!task->keys || !task->blocks))
    kvl__call_fail(&c, "%s are missing", task->keys ? "blocks" : "keys");
  if (task->first_layer < 0)
    kvl__call_fail(&c, "first_layer is %d, expected 0 or more", task->first_layer);
  for (int i = 0; c.status >= 0 && i < task->n; i++)
    if (task->blocks[i] < 0 || task->blocks[i] >= m->shape[1])
      kvl__call_fail(&c, "block %d is %d, expected 0 ... %lld", i, task->blocks[i],
                     (long long)m->shape[1] - 1);
  return c.status < 0 ? c.status : kvl__not_recording(e->device, "a prefetch");
}

int kvl__ticket_open(kvl_prefetch *e, const kvl_prefetch_task *task, kvl_ticket **out) {
  int status = expect_task(e, task);
  if (status < 0) return status;
  const kvl_tensor *m = task->memory;
  size_t n = (size_t)task->n, layers = (size_t)m->shape[0];
  int64_t blocks = m->shape[0] * m->shape[1];
  size_t bytes = blocks ? (size_t)(m->count / blocks * kvl_dtype_bytes(m->dtype)) : 0;
  int in_place = e->staging.storage == NULL || kvl_tensor_is_pinned(m);
  if (!in_place && bytes > e->bytes_half)
    return kvl__fail(KVL_ERR_INVALID, "prefetch: a block of a layer has %zu bytes, expected "
                     "at most %zu: bytes_staging / (2 * workers)", bytes, e->bytes_half);
  kvl_ticket *t = kvl__malloc(sizeof *t + n * (sizeof *t->keys + sizeof *t->blocks + 1) +
                              layers * sizeof *t->marks, "a prefetch task");
  if (!t) return KVL_ERR_NO_MEMORY;
  memset(t, 0, sizeof *t);
  t->engine = e;
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

/* Records t->after: what streams were given that may use the memory, all of them in one. */
static int record_after(kvl_prefetch *e, kvl_ticket *t) {
  kvl_device *dev = e->device;
  const kvl_backend *be = dev->backend;
  const kvl_storage *s = t->memory.storage;
  uint64_t users = s->used | (uint64_t)1 << s->home | (uint64_t)1 << dev->current->id;
  if (!(users & (users - 1))) return be->mark_record(dev->ctx, t->after, dev->current->queue);
  int status = KVL_OK;
  if (!e->before) status = be->queue_open(dev->ctx, KVL_QUEUE_NORMAL, &e->before);
  if (status >= 0 && !e->joined) status = be->mark_open(dev->ctx, &e->joined);
  for (; users && status >= 0; users &= users - 1) {
    kvl_stream *stream = dev->streams[__builtin_ctzll(users)];
    if (!stream) continue; /* closing a stream synchronises it */
    status = be->mark_record(dev->ctx, e->joined, stream->queue);
    if (status >= 0) status = be->queue_wait(dev->ctx, e->before, e->joined);
  }
  return status < 0 ? status : be->mark_record(dev->ctx, t->after, e->before);
}

int kvl__ticket_equip(kvl_ticket *t) {
  kvl_prefetch *e = t->engine;
  int status = mark_take(e, &t->after);
  for (int i = 0; t->marks && i < t->layers && status >= 0; i++)
    status = mark_take(e, &t->marks[i]);
  if (status < 0) return status;
  status = record_after(e, t);
  return status < 0 ? kvl__device_failed(e->device, status, "prefetch") : KVL_OK;
}

/* ---- waiting -------------------------------------------------------------------------- */

static int is_ready(const kvl_ticket *t, int layers) {
  return kvl__ticket_is_over(t) || t->layers_ready >= layers;
}

/* Waits until the task is over or has `layers` layers ready. 1: so it is, 0: the time is up.
 * The lock is held. */
static int wait_for(kvl_ticket *t, int layers, int64_t timeout_us, const char *op) {
  kvl_prefetch *e = t->engine;
  if (is_ready(t, layers)) return 1;
  int64_t begin = kvl_clock_ns(), end = kvl__deadline_ns(timeout_us);
  int more = kvl__prefetch_expect(e);
  if (more < 0) return more;
  do {
    more = kvl__prefetch_run_first(e);
    if (!more) more = kvl__prefetch_wait_on(e, &e->changed, end, op);
  } while (more > 0 && !is_ready(t, layers));
  if (timeout_us != 0) {
    e->stats.waits++;
    e->stats.us_stalled += (double)(kvl_clock_ns() - begin) * 1e-3;
  }
  return is_ready(t, layers) ? 1 : more;
}

static void fill_result(const kvl_ticket *t, kvl_prefetch_result *out) {
  kvl_prefetch_result r = {
    .state = t->state, .n = t->n, .missing = t->lost, .bytes = t->bytes, .arrived = t->arrived,
    .us_queued = (double)(t->ns_started - t->ns_submitted) * 1e-3,
    .us_reading = (double)t->ns_reading * 1e-3, .us_copying = t->us_copying,
  };
  while (r.leading < t->n && t->arrived[r.leading]) r.leading++;
  for (int i = 0; i < t->n; i++) r.blocks += t->arrived[i];
  *out = r;
}

int kvl_ticket_wait(kvl_ticket *t, int64_t timeout_us, kvl_prefetch_result *out) {
  static const char op[] = "prefetch wait";
  if (!t) return kvl__fail(KVL_ERR_INVALID, "%s: the ticket is closed", op);
  kvl_prefetch *e = t->engine;
  kvl__prefetch_enter(e);
  int status = wait_for(t, INT_MAX, timeout_us, op);
  if (status > 0 && t->status < 0) status = kvl__fail(t->status, "prefetch: %s", t->words);
  /* in modelled time, the host waits now */
  if (status > 0 && e->is_modelled && t->marks && t->layers_ready > 0)
    e->device->backend->mark_sync(e->device->ctx, t->marks[t->layers_ready - 1]);
  if (status > 0) fill_result(t, out);
  kvl__prefetch_leave(e);
  return status;
}

int kvl_ticket_wait_layer(kvl_ticket *t, int layer, kvl_stream *stream) {
  static const char op[] = "prefetch wait_layer";
  if (!t) return kvl__fail(KVL_ERR_INVALID, "%s: the ticket is closed", op);
  kvl_prefetch *e = t->engine;
  kvl_device *dev = e->device;
  int at = layer - t->first_layer, status = KVL_OK;
  if (at < 0 || at >= t->layers)
    status = kvl__fail(KVL_ERR_INVALID, "%s: layer is %d, expected %d ... %d", op, layer,
                       t->first_layer, t->first_layer + t->layers - 1);
  if (status >= 0 && stream && stream->device != dev)
    status = kvl__fail(KVL_ERR_INVALID, "%s: stream belongs to %s, expected one of %s", op,
                       stream->device->name, dev->name);
  if (status >= 0) status = kvl__not_recording(dev, "waiting for a prefetch");
  if (status < 0) return status;
  kvl__prefetch_enter(e);
  status = wait_for(t, at + 1, -1, op);
  if (status > 0 && t->layers_ready > at) {
    status = t->marks ? dev->backend->queue_wait(
                          dev->ctx, (stream ? stream : dev->current)->queue, t->marks[at])
                      : KVL_OK;
    status = status < 0 ? kvl__device_failed(dev, status, op) : at < t->first_lost;
  } else if (status > 0) {
    status = t->status < 0 ? kvl__fail(t->status, "prefetch: %s", t->words) : 0;
  }
  kvl__prefetch_leave(e);
  return status;
}

int kvl_ticket_cancel(kvl_ticket *t) {
  if (!t) return kvl__fail(KVL_ERR_INVALID, "prefetch cancel: the ticket is closed");
  pthread_mutex_lock(&t->engine->lock);
  int was_on = kvl__prefetch_stop(t->engine, t);
  pthread_mutex_unlock(&t->engine->lock);
  return was_on;
}

void kvl_ticket_close(kvl_ticket *t) {
  if (!t) return;
  kvl_prefetch *e = t->engine;
  kvl__prefetch_enter(e);
  e->refs -= kvl__ticket_unref(t);
  kvl__prefetch_leave(e);
}
