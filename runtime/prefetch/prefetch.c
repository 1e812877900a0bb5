/* The prefetcher: tasks wait in a queue by priority, and worker threads take the first.
 *
 * One lock guards the queue, the tasks and the counters. A task is WAITING in the queue,
 * then RUNNING in a worker, and then over for good: COMPLETED, CANCELLED or FAILED. A task
 * that is over still holds resources of the device. Workers must not touch these, so the
 * next call that submits, waits or closes gives them back on its caller's thread (`reap`).
 *
 * While a link is emulated there are no worker threads. Tasks run in the order of the
 * queue, on the thread that waits for a task or submits to a full queue. In modelled time,
 * a transfer begins as soon as the work that used its memory before the submit is over,
 * however late the host waits for it.
 *
 * Source: the PrefetchEngine of UCM's GSA (its priorities, workers and limit on pending
 * tasks). Here callers that wait for a task learn if it failed or never ran. */
#include <time.h>

#include "cpu/link.h"
#include "prefetch/prefetch.h"
#include "store/store.h"

enum { WORKERS_MAX = 64, PENDING_MAX = 1 << 20, NS_SLICE = 50 * 1000 * 1000 };

/* ---- references ----------------------------------------------------------------------- */

static void prefetch_free(kvl_prefetch *p) {
  kvl_device *dev = p->device;
  kvl__marks_close(&p->marks);
  kvl__queue_close(&p->queue);
  pthread_cond_destroy(&p->work);
  pthread_cond_destroy(&p->room);
  pthread_cond_destroy(&p->changed);
  pthread_mutex_destroy(&p->lock);
  free(p);
  kvl_device_close(dev);
}

static void reap(kvl_prefetch *p) {
  while (p->over) {
    kvl_ticket *t = p->over;
    p->over = t->next;
    kvl_tensor_close(&t->memory);
    p->refs -= kvl__ticket_unref(t, &p->marks);
  }
}

void kvl__prefetch_enter(kvl_prefetch *p) {
  pthread_mutex_lock(&p->lock);
  p->refs++;
}

void kvl__prefetch_leave(kvl_prefetch *p) {
  reap(p);
  int left = --p->refs;
  pthread_mutex_unlock(&p->lock);
  if (left == 0) prefetch_free(p);
}

/* ---- waiting -------------------------------------------------------------------------- */

int64_t kvl__deadline_ns(int64_t timeout_us) {
  int64_t now = kvl_clock_ns();
  return timeout_us < 0 || timeout_us > (INT64_MAX - now) / 1000 ? INT64_MAX
                                                                 : now + timeout_us * 1000;
}

int kvl__prefetch_wait_on(kvl_prefetch *p, pthread_cond_t *cond, int64_t end,
                          const char *op) {
  if (kvl_interrupted()) return kvl__fail(KVL_ERR_INTERRUPTED, "%s: interrupted", op);
  int64_t now = kvl_clock_ns(), until = now + NS_SLICE; /* a signal does not end the wait */
  if (now >= end) return 0;
  if (until > end) until = end;
  struct timespec at = {until / 1000000000, until % 1000000000};
  pthread_cond_timedwait(cond, &p->lock, &at);
  return 1;
}

static void cond_open(pthread_cond_t *cond) {
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC); /* the clock of kvl_clock_ns */
  pthread_cond_init(cond, &attr);
  pthread_condattr_destroy(&attr);
}

/* ---- the life of a task: the lock is held --------------------------------------------- */

static void count_pending(kvl_prefetch *p) {
  p->stats.pending = p->queue.count;
  if (p->stats.pending > p->stats.pending_peak) p->stats.pending_peak = p->stats.pending;
}

static void end_task(kvl_prefetch *p, kvl_ticket *t, int state) {
  t->state = state;
  for (int i = 0; i < t->n; i++) t->arrived[i] = t->arrived[i] == BLOCK_WHOLE;
  p->stats.completed += state == KVL_PREFETCH_COMPLETED;
  p->stats.cancelled += state == KVL_PREFETCH_CANCELLED;
  p->stats.failed += state == KVL_PREFETCH_FAILED;
  p->stats.hits += t->hits;
  p->stats.misses += t->lost;
  p->stats.bytes += t->bytes;
  t->next = p->over;
  p->over = t;
  pthread_cond_broadcast(&p->changed);
}

/* Ends a task that has left the queue and will not run. */
static void end_waiting(kvl_prefetch *p, kvl_ticket *t) {
  t->ns_started = kvl_clock_ns();
  count_pending(p);
  pthread_cond_signal(&p->room);
  end_task(p, t, KVL_PREFETCH_CANCELLED);
}

/* Called when the records of the task's next layer have been read, as far as the store has
 * them, and their copies are issued. */
static void layer_ready(kvl_prefetch *p, kvl_ticket *t) {
  pthread_mutex_lock(&p->lock);
  if (t->lost > 0 && t->first_lost == t->layers) t->first_lost = t->layers_ready;
  t->layers_ready++;
  pthread_cond_broadcast(&p->changed);
  pthread_mutex_unlock(&p->lock);
}

static void bring(kvl_prefetch *p, struct kvl__worker *w, kvl_ticket *t) {
  int status = kvl__worker_begin(w, t), more = status >= 0;
  for (int layer = 0; more && layer < t->layers; layer++) {
    status = kvl__worker_layer(w, t, layer);
    more = status > 0;
    if (more) layer_ready(p, t);
  }
  kvl__worker_end(w, t, status);
}

/* Runs a task that has left the queue. */
static void run_task(kvl_prefetch *p, struct kvl__thread *thread, kvl_ticket *t) {
  t->state = KVL_PREFETCH_RUNNING;
  t->ns_started = kvl_clock_ns();
  thread->running = t;
  count_pending(p);
  pthread_cond_signal(&p->room);
  pthread_mutex_unlock(&p->lock);
  bring(p, &thread->worker, t);
  pthread_mutex_lock(&p->lock);
  thread->running = NULL;
  if (t->status < 0) end_task(p, t, KVL_PREFETCH_FAILED);
  else if (t->layers_ready == t->layers) end_task(p, t, KVL_PREFETCH_COMPLETED);
  else end_task(p, t, KVL_PREFETCH_CANCELLED);
}

static void *thread_main(void *arg) {
  struct kvl__thread *thread = arg;
  kvl_prefetch *p = thread->prefetch;
  pthread_mutex_lock(&p->lock);
  while (!p->is_closing) {
    kvl_ticket *t = kvl__queue_pop(&p->queue);
    if (t) run_task(p, thread, t);
    else pthread_cond_wait(&p->work, &p->lock);
  }
  pthread_mutex_unlock(&p->lock);
  return NULL;
}

int kvl__prefetch_run_first(kvl_prefetch *p) {
  kvl_ticket *t = p->is_modelled && !p->is_running ? kvl__queue_pop(&p->queue) : NULL;
  if (!t) return 0;
  p->is_running = 1;
  run_task(p, &p->threads[p->next_thread++ % p->num_threads], t);
  p->is_running = 0;
  return 1;
}

/* ---- open and close ------------------------------------------------------------------- */

static int expect_range(const char *name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return KVL_OK;
  return kvl__fail(KVL_ERR_INVALID, "prefetch: %s is %lld, expected 1 ... %lld", name,
                   (long long)value, (long long)most);
}

static int start(kvl_prefetch *p, const kvl_prefetch_options *o) {
  char *staging = NULL;
  int status = kvl__queue_open(&p->queue, o->max_pending);
  if (status < 0) return status;
  if (!p->device->backend->host_memory || p->is_modelled) {
    p->bytes_half = (size_t)(o->bytes_staging / (2 * o->workers)) & ~(size_t)255;
    int64_t bytes = 2 * o->workers * (int64_t)p->bytes_half;
    status = kvl_tensor_open_pinned(p->device, KVL_DTYPE_U8, 1, &bytes, 0, &p->staging);
    staging = p->staging.ptr;
  }
  for (int i = 0; i < o->workers && status >= 0; i++) {
    struct kvl__thread *thread = &p->threads[i];
    *thread = (struct kvl__thread){.prefetch = p,
                                   .worker = {.device = p->device,
                                              .store = p->store,
                                              .is_modelled = p->is_modelled,
                                              .bytes_half = p->bytes_half}};
    p->num_threads++;
    status = kvl__worker_open(&thread->worker,
                              staging ? staging + 2 * (size_t)i * p->bytes_half : NULL);
    if (status < 0 || p->is_modelled) continue;
    if (pthread_create(&thread->thread, NULL, thread_main, thread))
      return kvl__fail(KVL_ERR_DEVICE, "prefetch: the thread of worker %d did not start", i);
    thread->has_thread = 1;
  }
  return status;
}

int kvl_prefetch_open(kvl_device *dev, kvl_store *store, const kvl_prefetch_options *o,
                      kvl_prefetch **out) {
  KVL__NEED(out);
  if (!dev || !store || !o)
    return kvl__fail(KVL_ERR_INVALID, "prefetch: %s is missing",
                     !dev     ? "device"
                     : !store ? "store"
                              : "options");
  int status = expect_range("workers", o->workers, WORKERS_MAX);
  if (status >= 0) status = expect_range("max_pending", o->max_pending, PENDING_MAX);
  if (status >= 0) status = expect_range("bytes_staging", o->bytes_staging, INT64_MAX);
  if (status >= 0) status = kvl__not_recording(dev, "opening a prefetcher");
  if (status < 0) return status;
  size_t bytes = sizeof(kvl_prefetch) + (size_t)o->workers * sizeof(struct kvl__thread);
  kvl_prefetch *p = kvl__malloc(bytes, "a prefetcher");
  if (!p) return KVL_ERR_NO_MEMORY;
  memset(p, 0, bytes);
  p->device = p->marks.device = dev;
  p->store = store;
  p->refs = 1;
  p->is_modelled = kvl_device_is_cpu(dev) && kvl__link_on();
  dev->opens++;
  atomic_fetch_add(&store->refs, 1);
  pthread_mutex_init(&p->lock, NULL);
  cond_open(&p->work);
  cond_open(&p->room);
  cond_open(&p->changed);
  status = start(p, o);
  if (status < 0) kvl_prefetch_close(p);
  else *out = p;
  return status;
}

void kvl_prefetch_close(kvl_prefetch *p) {
  if (!p) return;
  pthread_mutex_lock(&p->lock);
  p->is_closing = 1;
  for (kvl_ticket *t; (t = kvl__queue_pop(&p->queue));) end_waiting(p, t);
  for (int i = 0; i < p->num_threads; i++)
    if (p->threads[i].running) atomic_store(&p->threads[i].running->is_cancelled, 1);
  pthread_cond_broadcast(&p->work);
  pthread_cond_broadcast(&p->room);
  while (p->is_running) pthread_cond_wait(&p->changed, &p->lock);
  pthread_mutex_unlock(&p->lock);
  for (int i = 0; i < p->num_threads; i++) {
    if (p->threads[i].has_thread) pthread_join(p->threads[i].thread, NULL);
    kvl__worker_close(&p->threads[i].worker);
  }
  pthread_mutex_lock(&p->lock);
  kvl_tensor_close(&p->staging);
  kvl_store_close(p->store);
  kvl__prefetch_leave(p);
}

/* ---- submit --------------------------------------------------------------------------- */

int kvl__prefetch_expect(const kvl_prefetch *p) {
  if (!kvl_device_is_cpu(p->device) || kvl__link_on() == p->is_modelled) return KVL_OK;
  return kvl__fail(KVL_ERR_INVALID,
                   "prefetch: kvl_cpu_link was called since the prefetcher was "
                   "opened; open it again");
}

/* With the lock held, waits for room in the queue. Returns 1, or 0 if none came in time. */
static int wait_for_room(kvl_prefetch *p, int64_t timeout_us) {
  int64_t end = kvl__deadline_ns(timeout_us);
  int more = 1;
  while (more > 0 && !p->is_closing && p->queue.count == p->queue.room)
    if (!kvl__prefetch_run_first(p))
      more = kvl__prefetch_wait_on(p, &p->room, end, "prefetch");
  return p->is_closing ? kvl__fail(KVL_ERR_INVALID, "prefetch: the prefetcher is closed")
                       : more;
}

static void push(kvl_prefetch *p, kvl_ticket *t) {
  t->memory.storage->refs++;
  t->ns_submitted = kvl_clock_ns();
  p->refs++;
  p->stats.submitted++;
  kvl__queue_push(&p->queue, t);
  count_pending(p);
  pthread_cond_signal(&p->work);
}

int kvl_prefetch_submit(kvl_prefetch *p, const kvl_prefetch_task *task, int64_t timeout_us,
                        kvl_ticket **out) {
  kvl_ticket *t;
  if (!p || !task)
    return kvl__fail(KVL_ERR_INVALID, "prefetch: the %s",
                     p ? "task is missing" : "prefetcher is closed");
  int status = kvl__prefetch_expect(p);
  if (status >= 0) status = kvl__ticket_open(p, p->device, p->bytes_half, task, &t);
  if (status < 0) return status;
  kvl__prefetch_enter(p);
  int room = wait_for_room(p, timeout_us);
  if (room > 0) status = kvl__ticket_equip(t, &p->marks);
  if (room > 0 && status >= 0) {
    t->refs += out != NULL;
    push(p, t);
    if (out) *out = t;
  } else {
    kvl__ticket_unref(t, &p->marks);
  }
  kvl__prefetch_leave(p);
  return status < 0 ? status : room;
}

/* ---- cancelling, other priorities, counters ------------------------------------------- */

int kvl__prefetch_stop(kvl_prefetch *p, kvl_ticket *t) {
  if (kvl__ticket_is_over(t)) return 0;
  if (t->state == KVL_PREFETCH_RUNNING) {
    atomic_store(&t->is_cancelled, 1);
  } else {
    kvl__queue_remove(&p->queue, t);
    end_waiting(p, t);
  }
  return 1;
}

int kvl_prefetch_cancel(kvl_prefetch *p, int64_t request) {
  if (!p) return kvl__fail(KVL_ERR_INVALID, "prefetch cancel: the prefetcher is closed");
  int cancelled = 0;
  pthread_mutex_lock(&p->lock);
  for (kvl_ticket *t; (t = kvl__queue_take(&p->queue, request)); cancelled++)
    end_waiting(p, t);
  for (int i = 0; i < p->num_threads; i++) {
    kvl_ticket *t = p->threads[i].running;
    if (t && t->request == request) cancelled += kvl__prefetch_stop(p, t);
  }
  pthread_mutex_unlock(&p->lock);
  return cancelled;
}

int kvl_prefetch_reprioritise(kvl_prefetch *p, int64_t request, int priority) {
  if (!p)
    return kvl__fail(KVL_ERR_INVALID, "prefetch reprioritise: the prefetcher is closed");
  pthread_mutex_lock(&p->lock);
  int changed = kvl__queue_reprioritise(&p->queue, request, priority);
  pthread_mutex_unlock(&p->lock);
  return changed;
}

int kvl_prefetch_stats_get(kvl_prefetch *p, kvl_prefetch_stats *out) {
  KVL__NEED(out);
  if (!p) return kvl__fail(KVL_ERR_INVALID, "prefetch stats: the prefetcher is closed");
  pthread_mutex_lock(&p->lock);
  *out = p->stats;
  pthread_mutex_unlock(&p->lock);
  return KVL_OK;
}
