/* A prefetcher's waiting tasks: a binary heap. Each task knows its index in the heap, so that
 * any of them can leave it. The tasks of a request are found by a search through all tasks,
 * which is fast enough because not many may wait. */
#include "prefetch/prefetch_queue.h"

int kvl__queue_open(struct kvl__queue *q, int room) {
  q->heap = kvl__malloc((size_t)room * sizeof *q->heap, "a prefetch queue");
  if (!q->heap) return KVL_ERR_NO_MEMORY;
  q->room = room;
  return KVL_OK;
}

void kvl__queue_close(struct kvl__queue *q) { free(q->heap); }

static int goes_before(const kvl_ticket *a, const kvl_ticket *b) {
  return a->priority != b->priority ? a->priority < b->priority : a->order < b->order;
}

static void put(struct kvl__queue *q, int place, kvl_ticket *t) {
  q->heap[place] = t;
  t->place = place;
}

static void rise(struct kvl__queue *q, int place) {
  kvl_ticket *t = q->heap[place];
  for (int above; place > 0 && goes_before(t, q->heap[above = (place - 1) / 2]);
       place = above)
    put(q, place, q->heap[above]);
  put(q, place, t);
}

static void sink(struct kvl__queue *q, int place) {
  kvl_ticket *t = q->heap[place];
  for (int below; (below = 2 * place + 1) < q->count; place = below) {
    if (below + 1 < q->count && goes_before(q->heap[below + 1], q->heap[below])) below++;
    if (!goes_before(q->heap[below], t)) break;
    put(q, place, q->heap[below]);
  }
  put(q, place, t);
}

void kvl__queue_push(struct kvl__queue *q, kvl_ticket *t) {
  KVL_CHECK(q->count < q->room);
  t->order = q->orders++;
  q->heap[q->count++] = t;
  rise(q, q->count - 1);
}

void kvl__queue_remove(struct kvl__queue *q, kvl_ticket *t) {
  kvl_ticket *last = q->heap[--q->count];
  if (last == t) return;
  put(q, t->place, last);
  rise(q, last->place);
  sink(q, last->place);
}

kvl_ticket *kvl__queue_pop(struct kvl__queue *q) {
  if (q->count == 0) return NULL;
  kvl_ticket *t = q->heap[0];
  kvl__queue_remove(q, t);
  return t;
}

kvl_ticket *kvl__queue_take(struct kvl__queue *q, int64_t request) {
  for (int i = 0; i < q->count; i++) {
    kvl_ticket *t = q->heap[i];
    if (t->request != request) continue;
    kvl__queue_remove(q, t);
    return t;
  }
  return NULL;
}

int kvl__queue_reprioritise(struct kvl__queue *q, int64_t request, int32_t priority) {
  int found = 0;
  for (int i = 0; i < q->count; i++) {
    if (q->heap[i]->request != request) continue;
    q->heap[i]->priority = priority;
    found++;
  }
  for (int i = q->count / 2 - 1; found && i >= 0; i--) sink(q, i);
  return found;
}
