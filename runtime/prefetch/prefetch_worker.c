/* What a prefetch worker does with a task: it reads the records layer by layer and brings
 * them to where they belong.
 *
 * Memory that the host can write receives its records directly, once the work that used it
 * before is over. For memory of a device, the worker reads records into one half of its
 * staging memory while those in the other half are copied. The copies go to the worker's
 * own queue, and neighbouring records are copied together. Of the device, a worker uses
 * the backend's queues, marks and copies. It uses nothing that belongs to the caller's
 * thread: it makes no allocation and touches no stream and no reference count.
 *
 * While an emulated link models times, the caller's thread runs this, and a copy is over
 * as soon as it is issued. Waiting for its mark would tell the model that the host waits. */
#include "prefetch/prefetch_worker.h"

/* A run of this many bytes is copied without waiting for it to grow: 1 MiB reaches the
 * link's speed. */
enum { BYTES_RUN = 1 << 20 };

/* ---- open and close ------------------------------------------------------------------- */

int kvl__worker_open(struct kvl__worker *w, char *staging) {
  kvl_device *dev = w->device;
  const kvl_backend *be = dev->backend;
  if (!staging) return KVL_OK;
  int status = be->queue_open(dev->ctx, KVL_QUEUE_URGENT, &w->queue);
  for (int i = 0; i < 2 && status >= 0; i++) {
    w->halves[i].memory = staging + (size_t)i * w->bytes_half;
    status = be->mark_open(dev->ctx, &w->halves[i].begin);
    if (status >= 0) status = be->mark_open(dev->ctx, &w->halves[i].end);
  }
  return status < 0 ? kvl__device_failed(dev, status, "opening a prefetch worker") : KVL_OK;
}

void kvl__worker_close(struct kvl__worker *w) {
  if (!w->queue) return;
  kvl_device *dev = w->device;
  for (int i = 0; i < 2; i++) {
    if (w->halves[i].begin) dev->backend->mark_close(dev->ctx, w->halves[i].begin);
    if (w->halves[i].end) dev->backend->mark_close(dev->ctx, w->halves[i].end);
  }
  dev->backend->queue_close(dev->ctx, w->queue);
  w->queue = NULL;
}

/* ---- staging and copies --------------------------------------------------------------- */

static int copy_run(struct kvl__worker *w) {
  kvl_device *dev = w->device;
  const kvl_backend *be = dev->backend;
  struct kvl__half *half = &w->halves[w->half];
  struct kvl__run run = w->run;
  int status = KVL_OK;
  if (run.bytes == 0) return KVL_OK;
  w->run.bytes = 0;
  if (!half->is_copying) status = be->mark_record(dev->ctx, half->begin, w->queue);
  half->is_copying = 1;
  if (status >= 0)
    status = be->copy(dev->ctx, w->queue, run.to, run.from, run.bytes, KVL_COPY_FROM_HOST);
  return status < 0 ? kvl__device_failed(dev, status, "copying blocks") : KVL_OK;
}

/* Issues the last copies from the half that is being filled, and marks their end. */
static int end_half(struct kvl__worker *w) {
  kvl_device *dev = w->device;
  struct kvl__half *half = &w->halves[w->half];
  int status = copy_run(w);
  if (status < 0 || !half->is_copying) return status;
  status = dev->backend->mark_record(dev->ctx, half->end, w->queue);
  return status < 0 ? kvl__device_failed(dev, status, "copying blocks") : KVL_OK;
}

/* Waits until the copies from a half that has ended are over. */
static int empty_half(struct kvl__worker *w, struct kvl__half *half, kvl_ticket *t) {
  kvl_device *dev = w->device;
  const kvl_backend *be = dev->backend;
  double us = 0;
  int status = KVL_OK;
  if (half->is_copying && !w->is_modelled) status = be->mark_sync(dev->ctx, half->end);
  if (half->is_copying && status >= 0)
    status = be->mark_elapsed_us(dev->ctx, half->begin, half->end, &us);
  t->us_copying += us;
  half->is_copying = 0;
  half->used = 0;
  return status < 0 ? kvl__device_failed(dev, status, "copying blocks") : KVL_OK;
}

/* Finds room in staging for the next record. */
static int stage(struct kvl__worker *w, kvl_ticket *t, char **out) {
  struct kvl__half *half = &w->halves[w->half];
  if (half->used + t->bytes_record > w->bytes_half) {
    int status = end_half(w);
    if (status < 0) return status;
    w->half ^= 1;
    half = &w->halves[w->half];
    status = empty_half(w, half, t);
    if (status < 0) return status;
  }
  *out = half->memory + half->used;
  return KVL_OK;
}

/* Plans the copy of a record from `from`, in staging, to `to`. Neighbours become one copy. */
static int send(struct kvl__worker *w, char *from, char *to, size_t bytes) {
  struct kvl__run *run = &w->run;
  int status = KVL_OK;
  w->halves[w->half].used += bytes;
  if (run->bytes && (to != run->to + run->bytes || run->bytes >= BYTES_RUN))
    status = copy_run(w);
  if (run->bytes == 0) *run = (struct kvl__run){.from = from, .to = to};
  run->bytes += bytes;
  return status;
}

/* ---- tasks ---------------------------------------------------------------------------- */

/* Makes the task wait for work on its memory that was submitted before the task was. */
int kvl__worker_begin(struct kvl__worker *w, kvl_ticket *t) {
  kvl_device *dev = w->device;
  const kvl_backend *be = dev->backend;
  int status = KVL_OK;
  if (t->marks) status = be->queue_wait(dev->ctx, w->queue, t->after);
  else if (!w->is_modelled) status = be->mark_sync(dev->ctx, t->after);
  return status < 0 ? kvl__device_failed(dev, status, "waiting for KV memory") : KVL_OK;
}

/* Reads one record. Returns 1, or 0 if the store lacks it. */
static int read_record(struct kvl__worker *w, kvl_ticket *t, int block, int layer,
                       char *into) {
  int64_t begin = kvl_clock_ns();
  int found = kvl_store_get(w->store, &t->keys[block], t->first_layer + layer, into,
                            (int64_t)t->bytes_record);
  t->ns_reading += kvl_clock_ns() - begin;
  if (found < 0) return found;
  if (found > 0) {
    t->hits++;
    t->bytes += (int64_t)t->bytes_record;
    if (layer == t->layers - 1) t->arrived[block] = BLOCK_WHOLE;
  } else {
    t->lost++;
    t->arrived[block] = BLOCK_LOST; /* its other layers are of no use */
  }
  return found;
}

int kvl__worker_layer(struct kvl__worker *w, kvl_ticket *t, int layer) {
  kvl_device *dev = w->device;
  size_t first = (size_t)(layer * t->memory.shape[1]);
  char *memory = (char *)t->memory.ptr + first * t->bytes_record;
  for (int i = 0; i < t->n; i++) {
    if (t->arrived[i] == BLOCK_LOST) continue;
    if (atomic_load_explicit(&t->is_cancelled, memory_order_relaxed)) return 0;
    char *to = memory + (size_t)t->blocks[i] * t->bytes_record, *into = to;
    int status = t->marks ? stage(w, t, &into) : KVL_OK;
    if (status >= 0) status = read_record(w, t, i, layer, into);
    if (status > 0 && t->marks) status = send(w, into, to, t->bytes_record);
    if (status < 0) return status;
  }
  if (!t->marks) return 1;
  int status = copy_run(w);
  if (status < 0) return status;
  status = dev->backend->mark_record(dev->ctx, t->marks[layer], w->queue);
  return status < 0 ? kvl__device_failed(dev, status, "copying blocks") : 1;
}

/* Waits until no copy of the task is under way, even after a failure. */
static int drain(struct kvl__worker *w, kvl_ticket *t) {
  if (!t->marks) return KVL_OK;
  int status = end_half(w);
  for (int i = 0; i < 2; i++) {
    int other = status < 0 ? status : empty_half(w, &w->halves[i], t);
    if (other < 0) status = other;
    w->halves[i].is_copying = 0;
    w->halves[i].used = 0;
  }
  if (status < 0) w->device->backend->queue_sync(w->device->ctx, w->queue);
  w->run.bytes = 0;
  return status;
}

static void note_failure(kvl_ticket *t, int status) {
  if (status >= 0 || t->status < 0) return; /* the first one counts */
  t->status = status;
  snprintf(t->words, sizeof t->words, "%s", kvl_last_error());
}

void kvl__worker_end(struct kvl__worker *w, kvl_ticket *t, int status) {
  note_failure(t, status);
  note_failure(t, drain(w, t));
}
