/* A task of a prefetcher, which is also the ticket of the caller that submitted it, and the
 * marks that tasks use. */
#ifndef KVL_TICKET_H
#define KVL_TICKET_H

#include <stdatomic.h>

#include "core/allocator.h"

/* Marks of the backend: opened by callers' threads, and used by one task after another. */
struct kvl__marks {
  kvl_device *device;
  void **list; /* the free ones; room for every mark that was opened */
  int free, opened;
  void *before; /* queue that joins streams; NULL until first needed */
  void *joined; /* mark for that */
};
/* None is in use. */
void kvl__marks_close(struct kvl__marks *marks);

/* What is known of a block of a task. LOST: a record of it was not in the store. */
enum block_state { BLOCK_COMING, BLOCK_WHOLE, BLOCK_LOST };

/* A task, which is also the ticket of the caller that submitted it. The prefetcher's lock
 * guards all fields that change after submit, unless a field says otherwise. */
struct kvl_ticket {
  kvl_prefetch *prefetch;
  kvl_tensor memory;      /* a reference until the task is over and reaped */
  kvl_key *keys;          /* [n] */
  int32_t *blocks;        /* [n] */
  uint8_t *arrived;       /* [n] the running worker's block_state; then 0 or 1 */
  void **marks;           /* [layers] its copies are issued; NULL: read in place */
  void *after;            /* mark: what wrote to or read from the memory before */
  int64_t request, order; /* order: of submission */
  int32_t priority, n, layers, first_layer;
  size_t bytes_record;
  int state, status;       /* kvl_prefetch_state; status < 0: why it failed */
  int refs;                /* the prefetcher's until it is reaped, and the ticket's */
  int place;               /* in the queue's heap while it waits */
  atomic_int is_cancelled; /* the worker looks without the lock */
  int layers_ready;        /* read, and their copies issued */
  int first_lost;          /* the first layer that lacked a block */
  int lost;                /* blocks; the running worker's, like what follows */
  int64_t hits, bytes, ns_submitted, ns_started, ns_reading;
  double us_copying;
  kvl_ticket *next;          /* among those that are over and not reaped */
  char words[KVL_WORDS_MAX]; /* of the failure */
};

/* Opens a ticket for a task that was checked, with one reference and nothing of the
 * device's. bytes_half is half of a worker's staging; 0: all memory is read into in place. */
int kvl__ticket_open(kvl_prefetch *p, kvl_device *dev, size_t bytes_half,
                     const kvl_prefetch_task *task, kvl_ticket **out);
/* Takes marks, and notes what used the memory so far; after a failure, drop the ticket. The
 * lock is held. */
int kvl__ticket_equip(kvl_ticket *t, struct kvl__marks *marks);
/* Drops a reference. 1: that was the last, the ticket is gone. The lock is held. */
int kvl__ticket_unref(kvl_ticket *t, struct kvl__marks *marks);
static inline int kvl__ticket_is_over(const kvl_ticket *t) {
  return t->state >= KVL_PREFETCH_COMPLETED;
}

#endif
