/* What callers do with a ticket: wait for its task or a layer, cancel the task, close it. */
#include <limits.h>

#include "prefetch/prefetch.h"

static int is_ready(const kvl_ticket *t, int layers) {
  return kvl__ticket_is_over(t) || t->layers_ready >= layers;
}

/* Waits until the task is over or has `layers` layers ready. Returns 1 if that is so, 0 if
 * the time is up. The lock is held. */
static int wait_for(kvl_ticket *t, int layers, int64_t timeout_us, const char *op) {
  kvl_prefetch *p = t->prefetch;
  if (is_ready(t, layers)) return 1;
  int64_t begin = kvl_clock_ns(), end = kvl__deadline_ns(timeout_us);
  int more = kvl__prefetch_expect(p);
  if (more < 0) return more;
  do {
    more = kvl__prefetch_run_first(p);
    if (!more) more = kvl__prefetch_wait_on(p, &p->changed, end, op);
  } while (more > 0 && !is_ready(t, layers));
  if (timeout_us != 0) {
    p->stats.waits++;
    p->stats.us_stalled += (double)(kvl_clock_ns() - begin) * 1e-3;
  }
  return is_ready(t, layers) ? 1 : more;
}

static void fill_result(const kvl_ticket *t, kvl_prefetch_result *out) {
  kvl_prefetch_result r = {
      .state = t->state,
      .n = t->n,
      .missing = t->lost,
      .bytes = t->bytes,
      .arrived = t->arrived,
      .us_queued = (double)(t->ns_started - t->ns_submitted) * 1e-3,
      .us_reading = (double)t->ns_reading * 1e-3,
      .us_copying = t->us_copying,
  };
  while (r.leading < t->n && t->arrived[r.leading]) r.leading++;
  for (int i = 0; i < t->n; i++) r.blocks += t->arrived[i];
  *out = r;
}

int kvl_ticket_wait(kvl_ticket *t, int64_t timeout_us, kvl_prefetch_result *out) {
  static const char op[] = "prefetch wait";
  if (!t) return kvl__fail(KVL_ERR_INVALID, "%s: the ticket is closed", op);
  kvl_prefetch *p = t->prefetch;
  kvl__prefetch_enter(p);
  int status = wait_for(t, INT_MAX, timeout_us, op);
  if (status > 0 && t->status < 0) status = kvl__fail(t->status, "prefetch: %s", t->words);
  /* tells the model that the host waits for the last copy */
  if (status > 0 && p->is_modelled && t->marks && t->layers_ready > 0)
    p->device->backend->mark_sync(p->device->ctx, t->marks[t->layers_ready - 1]);
  if (status > 0) fill_result(t, out);
  kvl__prefetch_leave(p);
  return status;
}

int kvl_ticket_wait_layer(kvl_ticket *t, int layer, kvl_stream *stream) {
  static const char op[] = "prefetch wait_layer";
  if (!t) return kvl__fail(KVL_ERR_INVALID, "%s: the ticket is closed", op);
  kvl_prefetch *p = t->prefetch;
  kvl_device *dev = p->device;
  int at = layer - t->first_layer, status = KVL_OK;
  if (at < 0 || at >= t->layers)
    status = kvl__fail(KVL_ERR_INVALID, "%s: layer is %d, expected %d ... %d", op, layer,
                       t->first_layer, t->first_layer + t->layers - 1);
  if (status >= 0 && stream && stream->device != dev)
    status = kvl__fail(KVL_ERR_INVALID, "%s: stream belongs to %s, expected one of %s", op,
                       stream->device->name, dev->name);
  if (status >= 0) status = kvl__not_recording(dev, "waiting for a prefetch");
  if (status < 0) return status;
  kvl__prefetch_enter(p);
  status = wait_for(t, at + 1, -1, op);
  if (status > 0 && t->layers_ready > at) {
    status = t->marks ? dev->backend->queue_wait(
                            dev->ctx, (stream ? stream : dev->current)->queue, t->marks[at])
                      : KVL_OK;
    status = status < 0 ? kvl__device_failed(dev, status, op) : at < t->first_lost;
  } else if (status > 0) {
    status = t->status < 0 ? kvl__fail(t->status, "prefetch: %s", t->words) : 0;
  }
  kvl__prefetch_leave(p);
  return status;
}

int kvl_ticket_cancel(kvl_ticket *t) {
  if (!t) return kvl__fail(KVL_ERR_INVALID, "prefetch cancel: the ticket is closed");
  pthread_mutex_lock(&t->prefetch->lock);
  int was_on = kvl__prefetch_stop(t->prefetch, t);
  pthread_mutex_unlock(&t->prefetch->lock);
  return was_on;
}

void kvl_ticket_close(kvl_ticket *t) {
  if (!t) return;
  kvl_prefetch *p = t->prefetch;
  kvl__prefetch_enter(p);
  p->refs -= kvl__ticket_unref(t, &p->marks);
  kvl__prefetch_leave(p);
}
