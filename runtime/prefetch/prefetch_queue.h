/* The waiting tasks of a prefetcher, a heap. */
#ifndef KVL_PREFETCH_QUEUE_H
#define KVL_PREFETCH_QUEUE_H

#include "prefetch/ticket.h"

struct kvl__queue {
  kvl_ticket **heap; /* [room] */
  int count, room;
  int64_t orders; /* submitted so far */
};

int kvl__queue_open(struct kvl__queue *q, int room);
void kvl__queue_close(struct kvl__queue *q);
/* Adds a task. There must be room. */
void kvl__queue_push(struct kvl__queue *q, kvl_ticket *t);
/* Takes out the task with the lowest priority number, among equals the first submitted;
 * NULL: there is none. */
kvl_ticket *kvl__queue_pop(struct kvl__queue *q);
void kvl__queue_remove(struct kvl__queue *q, kvl_ticket *t);
/* Takes out one task of a request; NULL: there is none. */
kvl_ticket *kvl__queue_take(struct kvl__queue *q, int64_t request);
/* Gives every task of a request this priority. Returns the number of these tasks. */
int kvl__queue_reprioritise(struct kvl__queue *q, int64_t request, int32_t priority);

#endif
