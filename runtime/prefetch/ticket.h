/* A task of a prefetcher, which is also the ticket of the caller that submitted it, and the
 * marks that tasks use. */
#ifndef KVL_TICKET_H
#define KVL_TICKET_H

#include <stdatomic.h>

#include "core/allocator.h"

/* Marks of the backend: opened by callers' threads, and used by one task after another. */
struct kvl__marks {
  kvl_device *device;
  void **list; /* the free marks; has room for all that were opened */
  int free, opened;
  void *before; /* queue that joins streams; NULL until first needed */
  void *joined; /* mark for joining them */
};
/* Closes all marks. None may be in use. */
void kvl__marks_close(struct kvl__marks *marks);

/* What is known about a block of a task. WHOLE: all of its layers were read. LOST: a
 * record of it was not in the store. */
enum block_state { BLOCK_COMING, BLOCK_WHOLE, BLOCK_LOST };

/* A task, which is also the ticket of the caller that submitted it. The prefetcher's lock
 * guards all fields that change after submit, unless a field says otherwise. */
struct kvl_ticket {
  kvl_prefetch *prefetch;
  kvl_tensor memory;      /* retained until the task is over and reaped */
  kvl_key *keys;          /* [n] */
  int32_t *blocks;        /* [n] */
  uint8_t *arrived;       /* [n] block_state while the worker runs; then 0 or 1 */
  void **marks;           /* [layers] recorded after a layer's copies; NULL: none needed */
  void *after;            /* mark: recorded after the work that used the memory before */
  int64_t request, order; /* order: number of the submission */
  int32_t priority, n, layers, first_layer;
  size_t bytes_record;
  int state, status;       /* kvl_prefetch_state; status < 0: why it failed */
  int refs;                /* the prefetcher's until it is reaped, and the caller's */
  int place;               /* its index in the queue's heap while it waits */
  atomic_int is_cancelled; /* the worker reads it without the lock */
  int layers_ready;        /* layers that were read and whose copies are issued */
  int first_lost;          /* the first layer that lacked a block */
  int lost;                /* blocks; from here to us_copying: the running worker's */
  int64_t hits, bytes, ns_submitted, ns_started, ns_reading;
  double us_copying;
  kvl_ticket *next;          /* in the list of tasks that are over and not reaped */
  char words[KVL_WORDS_MAX]; /* the message of the failure */
};

/* Checks a task and opens a ticket for it, with one reference and nothing of the device's.
 * bytes_half is the size of half of a worker's staging; 0: records need no staging. */
int kvl__ticket_open(kvl_prefetch *p, kvl_device *dev, size_t bytes_half,
                     const kvl_prefetch_task *task, kvl_ticket **out);
/* Takes marks, and records the mark of the work that used the memory so far. After a
 * failure the caller drops the ticket. The lock is held. */
int kvl__ticket_equip(kvl_ticket *t, struct kvl__marks *marks);
/* Drops a reference. Returns 1 if it was the last and the ticket is gone. The lock is
 * held. */
int kvl__ticket_unref(kvl_ticket *t, struct kvl__marks *marks);
static inline int kvl__ticket_is_over(const kvl_ticket *t) {
  return t->state >= KVL_PREFETCH_COMPLETED;
}

#endif
