/* The prefetch engine: tasks wait in a queue by priority, workers take the first.
 *
 * One lock guards queue, tasks and counters. A task is WAITING in the queue, RUNNING at a
 * worker, and then over: COMPLETED, CANCELLED or FAILED, for good. What it holds of the device
 * is given back on a caller's thread, by the next call that waits or submits (`reap`).
 *
 * While a link is emulated there are no threads: tasks run, in order, on the thread that waits
 * for one or submits to a full queue. A transfer then begins, in modelled time, when what used
 * its memory before the submit is over, and no later because of when the host came to wait.
 *
 * Source: the PrefetchEngine of UCM's GSA (its priorities, workers and bound on pending work;
 * here a task that fails, or never ran, tells those who wait for it). */
#include <time.h>

#include "link_cpu.h"
#include "prefetch.h"
#include "store.h"

enum { WORKERS_MAX = 64, PENDING_MAX = 1 << 20, NS_SLICE = 50 * 1000 * 1000 };

/* ---- references ----------------------------------------------------------------------- */

static void engine_free(kvl_prefetch *e) {
  kvl_device *dev = e->device;
  for (int i = 0; i < e->marks_free; i++) dev->backend->mark_close(dev->ctx, e->marks[i]);
  kvl__queue_close(&e->queue);
  pthread_cond_destroy(&e->work);
  pthread_cond_destroy(&e->room);
  pthread_cond_destroy(&e->changed);
  pthread_mutex_destroy(&e->lock);
  free(e->marks);
  free(e);
  kvl_device_close(dev);
}

static void reap(kvl_prefetch *e) {
  while (e->over) {
    kvl_ticket *t = e->over;
    e->over = t->next;
    kvl_tensor_close(&t->memory);
    e->refs -= kvl__ticket_unref(t);
  }
}

void kvl__prefetch_enter(kvl_prefetch *e) {
  pthread_mutex_lock(&e->lock);
  e->refs++;
}

void kvl__prefetch_leave(kvl_prefetch *e) {
  reap(e);
  int left = --e->refs;
  pthread_mutex_unlock(&e->lock);
  if (left == 0) engine_free(e);
}

/* ---- waiting -------------------------------------------------------------------------- */

int64_t kvl__deadline_ns(int64_t timeout_us) {
  int64_t now = kvl_clock_ns();
  return timeout_us < 0 || timeout_us > (INT64_MAX - now) / 1000 ? INT64_MAX
                                                                 : now + timeout_us * 1000;
}

int kvl__prefetch_wait_on(kvl_prefetch *e, pthread_cond_t *cond, int64_t end,
                          const char *op) {
  if (kvl_interrupted()) return kvl__fail(KVL_ERR_INTERRUPTED, "%s: interrupted", op);
  int64_t now = kvl_clock_ns(), until = now + NS_SLICE; /* a signal wakes nobody */
  if (now >= end) return 0;
  if (until > end) until = end;
  struct timespec at = {until / 1000000000, until % 1000000000};
  pthread_cond_timedwait(cond, &e->lock, &at);
  return 1;
}

static void cond_open(pthread_cond_t *cond) {
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC); /* that of kvl_clock_ns */
  pthread_cond_init(cond, &attr);
  pthread_condattr_destroy(&attr);
}

/* ---- the life of a task: the lock is held --------------------------------------------- */

static void count_pending(kvl_prefetch *e) {
  e->stats.pending = e->queue.count;
  if (e->stats.pending > e->stats.pending_peak) e->stats.pending_peak = e->stats.pending;
}

static void end_task(kvl_prefetch *e, kvl_ticket *t, int state) {
  t->state = state;
  for (int i = 0; i < t->n; i++) t->arrived[i] = t->arrived[i] == BLOCK_WHOLE;
  e->stats.completed += state == KVL_PREFETCH_COMPLETED;
  e->stats.cancelled += state == KVL_PREFETCH_CANCELLED;
  e->stats.failed += state == KVL_PREFETCH_FAILED;
  e->stats.hits += t->hits;
  e->stats.misses += t->lost;
  e->stats.bytes += t->bytes;
  t->next = e->over;
  e->over = t;
  pthread_cond_broadcast(&e->changed);
}

/* A task that has left the queue without having run. */
static void end_waiting(kvl_prefetch *e, kvl_ticket *t) {
  t->ns_started = kvl_clock_ns();
  count_pending(e);
  pthread_cond_signal(&e->room);
  end_task(e, t, KVL_PREFETCH_CANCELLED);
}

/* Runs a task that has left the queue. */
static void run_task(kvl_prefetch *e, struct kvl__worker *w, kvl_ticket *t) {
  t->state = KVL_PREFETCH_RUNNING;
  t->ns_started = kvl_clock_ns();
  w->running = t;
  count_pending(e);
  pthread_cond_signal(&e->room);
  pthread_mutex_unlock(&e->lock);
  kvl__worker_run(w, t);
  pthread_mutex_lock(&e->lock);
  w->running = NULL;
  if (t->status < 0) end_task(e, t, KVL_PREFETCH_FAILED);
  else if (t->layers_ready == t->layers) end_task(e, t, KVL_PREFETCH_COMPLETED);
  else end_task(e, t, KVL_PREFETCH_CANCELLED);
}

void kvl__prefetch_layer_ready(kvl_ticket *t) {
  pthread_mutex_lock(&t->engine->lock);
  if (t->lost > 0 && t->first_lost == t->layers) t->first_lost = t->layers_ready;
  t->layers_ready++;
  pthread_cond_broadcast(&t->engine->changed);
  pthread_mutex_unlock(&t->engine->lock);
}

static void *worker_main(void *arg) {
  struct kvl__worker *w = arg;
  kvl_prefetch *e = w->engine;
  pthread_mutex_lock(&e->lock);
  while (!e->is_closing) {
    kvl_ticket *t = kvl__queue_pop(&e->queue);
    if (t) run_task(e, w, t);
    else pthread_cond_wait(&e->work, &e->lock);
  }
  pthread_mutex_unlock(&e->lock);
  return NULL;
}

int kvl__prefetch_run_first(kvl_prefetch *e) {
  kvl_ticket *t = e->is_modelled && !e->is_running ? kvl__queue_pop(&e->queue) : NULL;
  if (!t) return 0;
  e->is_running = 1;
  run_task(e, &e->workers[e->next_worker++ % e->num_workers], t);
  e->is_running = 0;
  return 1;
}

/* ---- open and close ------------------------------------------------------------------- */

static int expect_range(const char *name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return KVL_OK;
  return kvl__fail(KVL_ERR_INVALID, "prefetch: %s is %lld, expected 1 ... %lld", name,
                   (long long)value, (long long)most);
}

static int start(kvl_prefetch *e, const kvl_prefetch_options *o) {
  char *staging = NULL;
  int status = kvl__queue_open(&e->queue, o->max_pending);
  if (status < 0) return status;
  if (!e->device->backend->host_memory || e->is_modelled) {
    e->bytes_half = (size_t)(o->bytes_staging / (2 * o->workers)) & ~(size_t)255;
    int64_t bytes = 2 * o->workers * (int64_t)e->bytes_half;
    status = kvl_tensor_open_pinned(e->device, KVL_DTYPE_U8, 1, &bytes, 0, &e->staging);
    staging = e->staging.ptr;
  }
  for (int i = 0; i < o->workers && status >= 0; i++) {
    struct kvl__worker *w = &e->workers[i];
    e->num_workers++;
    status = kvl__worker_open(w, e, staging ? staging + 2 * (size_t)i * e->bytes_half : NULL);
    if (status < 0 || e->is_modelled) continue;
    if (pthread_create(&w->thread, NULL, worker_main, w))
      return kvl__fail(KVL_ERR_DEVICE, "prefetch: no thread for worker %d", i);
    w->has_thread = 1;
  }
  return status;
}

int kvl_prefetch_open(kvl_device *dev, kvl_store *store, const kvl_prefetch_options *o,
                      kvl_prefetch **out) {
  if (!dev || !store || !o)
    return kvl__fail(KVL_ERR_INVALID, "prefetch: %s is missing",
                     !dev ? "device" : !store ? "store" : "options");
  int status = expect_range("workers", o->workers, WORKERS_MAX);
  if (status >= 0) status = expect_range("max_pending", o->max_pending, PENDING_MAX);
  if (status >= 0) status = expect_range("bytes_staging", o->bytes_staging, INT64_MAX);
  if (status >= 0) status = kvl__not_recording(dev, "opening a prefetch engine");
  if (status < 0) return status;
  size_t bytes = sizeof(kvl_prefetch) + (size_t)o->workers * sizeof(struct kvl__worker);
  kvl_prefetch *e = kvl__malloc(bytes, "a prefetch engine");
  if (!e) return KVL_ERR_NO_MEMORY;
  memset(e, 0, bytes);
  e->device = dev;
  e->store = store;
  e->refs = 1;
  e->is_modelled = kvl_device_is_cpu(dev) && kvl__link_on();
  dev->opens++;
  atomic_fetch_add(&store->refs, 1);
  pthread_mutex_init(&e->lock, NULL);
  cond_open(&e->work);
  cond_open(&e->room);
  cond_open(&e->changed);
  status = start(e, o);
  if (status < 0) kvl_prefetch_close(e);
  else *out = e;
  return status;
}

void kvl_prefetch_close(kvl_prefetch *e) {
  if (!e) return;
  kvl_device *dev = e->device;
  pthread_mutex_lock(&e->lock);
  e->is_closing = 1;
  for (kvl_ticket *t; (t = kvl__queue_pop(&e->queue));) end_waiting(e, t);
  for (int i = 0; i < e->num_workers; i++)
    if (e->workers[i].running) atomic_store(&e->workers[i].running->is_cancelled, 1);
  pthread_cond_broadcast(&e->work);
  pthread_cond_broadcast(&e->room);
  while (e->is_running) pthread_cond_wait(&e->changed, &e->lock);
  pthread_mutex_unlock(&e->lock);
  for (int i = 0; i < e->num_workers; i++) {
    if (e->workers[i].has_thread) pthread_join(e->workers[i].thread, NULL);
    kvl__worker_close(&e->workers[i]);
  }
  pthread_mutex_lock(&e->lock);
  if (e->before) dev->backend->queue_close(dev->ctx, e->before);
  if (e->joined) dev->backend->mark_close(dev->ctx, e->joined);
  kvl_tensor_close(&e->staging);
  kvl_store_close(e->store);
  kvl__prefetch_leave(e);
}

/* ---- submit --------------------------------------------------------------------------- */

int kvl__prefetch_expect(const kvl_prefetch *e) {
  if (!kvl_device_is_cpu(e->device) || kvl__link_on() == e->is_modelled) return KVL_OK;
  return kvl__fail(KVL_ERR_INVALID, "prefetch: kvl_cpu_link was called since the engine was "
                   "opened; open it anew");
}

/* 1: a task may be pushed, 0: there was no room in time. The lock is held. */
static int wait_for_room(kvl_prefetch *e, int64_t timeout_us) {
  int64_t end = kvl__deadline_ns(timeout_us);
  int more = 1;
  while (more > 0 && !e->is_closing && e->queue.count == e->queue.room)
    if (!kvl__prefetch_run_first(e))
      more = kvl__prefetch_wait_on(e, &e->room, end, "prefetch");
  return e->is_closing ? kvl__fail(KVL_ERR_INVALID, "prefetch: the engine is closed") : more;
}

static void push(kvl_prefetch *e, kvl_ticket *t) {
  t->memory.storage->refs++;
  t->ns_submitted = kvl_clock_ns();
  e->refs++;
  e->stats.submitted++;
  kvl__queue_push(&e->queue, t);
  count_pending(e);
  pthread_cond_signal(&e->work);
}

int kvl_prefetch_submit(kvl_prefetch *e, const kvl_prefetch_task *task, int64_t timeout_us,
                        kvl_ticket **out) {
  kvl_ticket *t;
  if (!e || !task)
    return kvl__fail(KVL_ERR_INVALID, "prefetch: the %s", e ? "task is missing"
                                                            : "engine is closed");
  int status = kvl__prefetch_expect(e);
  if (status >= 0) status = kvl__ticket_open(e, task, &t);
  if (status < 0) return status;
  kvl__prefetch_enter(e);
  int room = wait_for_room(e, timeout_us);
  if (room > 0) status = kvl__ticket_equip(t);
  if (room > 0 && status >= 0) {
    t->refs += out != NULL;
    push(e, t);
    if (out) *out = t;
  } else {
    kvl__ticket_unref(t);
  }
  kvl__prefetch_leave(e);
  return status < 0 ? status : room;
}

/* ---- changes of mind, counters -------------------------------------------------------- */

int kvl__prefetch_stop(kvl_prefetch *e, kvl_ticket *t) {
  if (kvl__ticket_is_over(t)) return 0;
  if (t->state == KVL_PREFETCH_RUNNING) {
    atomic_store(&t->is_cancelled, 1);
  } else {
    kvl__queue_remove(&e->queue, t);
    end_waiting(e, t);
  }
  return 1;
}

int kvl_prefetch_cancel(kvl_prefetch *e, int64_t request) {
  if (!e) return kvl__fail(KVL_ERR_INVALID, "prefetch cancel: the engine is closed");
  int cancelled = 0;
  pthread_mutex_lock(&e->lock);
  for (kvl_ticket *t; (t = kvl__queue_take(&e->queue, request)); cancelled++)
    end_waiting(e, t);
  for (int i = 0; i < e->num_workers; i++) {
    kvl_ticket *t = e->workers[i].running;
    if (t && t->request == request) cancelled += kvl__prefetch_stop(e, t);
  }
  pthread_mutex_unlock(&e->lock);
  return cancelled;
}

int kvl_prefetch_reprioritise(kvl_prefetch *e, int64_t request, int priority) {
  if (!e) return kvl__fail(KVL_ERR_INVALID, "prefetch reprioritise: the engine is closed");
  pthread_mutex_lock(&e->lock);
  int changed = kvl__queue_reprioritise(&e->queue, request, priority);
  pthread_mutex_unlock(&e->lock);
  return changed;
}

int kvl_prefetch_stats_get(kvl_prefetch *e, kvl_prefetch_stats *out) {
  if (!e) return kvl__fail(KVL_ERR_INVALID, "prefetch stats: the engine is closed");
  pthread_mutex_lock(&e->lock);
  *out = e->stats;
  pthread_mutex_unlock(&e->lock);
  return KVL_OK;
}
