/* The insides of the prefetch engine: its queue of waiting tasks (prefetch_queue.c), tasks
 * and their tickets (ticket.c), what a worker does with one (prefetch_worker.c), and the
 * engine around them (prefetch.c). */
#ifndef KVL_PREFETCH_H
#define KVL_PREFETCH_H

#include <pthread.h>
#include <stdatomic.h>

#include "internal.h"

/* What is known of a block of a task. LOST: a record of it was not in the store. */
enum block_state { BLOCK_COMING, BLOCK_WHOLE, BLOCK_LOST };

/* A task, and the ticket of who submitted it. The engine's lock guards what changes after
 * submit, except for what says otherwise. */
struct kvl_ticket {
  kvl_prefetch *engine;
  kvl_tensor memory;             /* a reference until the task is over and reaped */
  kvl_key *keys;                 /* [n] */
  int32_t *blocks;               /* [n] */
  uint8_t *arrived;              /* [n] the running worker's block_state; then 0 or 1 */
  void **marks;                  /* [layers] its copies are issued; NULL: read in place */
  void *after;                   /* mark: what wrote to or read from the memory before */
  int64_t request, order;        /* order: of submission */
  int32_t priority, n, layers, first_layer;
  size_t bytes_record;
  int state, status;             /* kvl_prefetch_state; status < 0: why it failed */
  int refs;                      /* the engine's until it is reaped, and the ticket's */
  int place;                     /* in the queue's heap while it waits */
  atomic_int is_cancelled;       /* the worker looks without the lock */
  int layers_ready;              /* read, and their copies issued */
  int first_lost;                /* the first layer that lacked a block */
  int lost;                      /* blocks; the running worker's, like what follows */
  int64_t hits, bytes, ns_submitted, ns_started, ns_reading;
  double us_copying;
  kvl_ticket *next;              /* among those that are over and not reaped */
  char words[KVL_WORDS_MAX];     /* of the failure */
};

/* ---- queue: the waiting tasks, a heap ------------------------------------------------- */

struct kvl__queue {
  kvl_ticket **heap;             /* [room] */
  int count, room;
  int64_t orders;                /* submitted so far */
};

int kvl__queue_open(struct kvl__queue *q, int room);
void kvl__queue_close(struct kvl__queue *q);
/* There is room. */
void kvl__queue_push(struct kvl__queue *q, kvl_ticket *t);
/* The lowest priority number, among equals the first submitted; NULL: none. */
kvl_ticket *kvl__queue_pop(struct kvl__queue *q);
void kvl__queue_remove(struct kvl__queue *q, kvl_ticket *t);
/* Takes out one task of a request; NULL: there is none. */
kvl_ticket *kvl__queue_take(struct kvl__queue *q, int64_t request);
/* Every task of a request gets this priority. Returns how many. */
int kvl__queue_reprioritise(struct kvl__queue *q, int64_t request, int32_t priority);

/* ---- worker --------------------------------------------------------------------------- */

/* Pinned memory that records are read into while those in the other half are copied. */
struct kvl__half {
  char *memory;
  size_t used;                   /* bytes that hold records, or will */
  void *begin, *end;             /* marks around its copies */
  int is_copying;                /* begin is recorded */
};

/* Neighbours in a half that are neighbours in the destination, too: one copy. */
struct kvl__run { char *from, *to; size_t bytes; };

struct kvl__worker {
  kvl_prefetch *engine;
  pthread_t thread;
  int has_thread;
  kvl_ticket *running;           /* NULL: none; under the engine's lock */
  void *queue;                   /* of the backend, this worker's own */
  struct kvl__half halves[2];
  int half;                      /* the one that is filled */
  struct kvl__run run;
};

int kvl__worker_open(struct kvl__worker *w, kvl_prefetch *e, char *staging);
/* Nothing of it is under way. */
void kvl__worker_close(struct kvl__worker *w);
/* Brings the records of a task, or notes in it why not; nothing of the task is under way
 * then. Called without the engine's lock. */
void kvl__worker_run(struct kvl__worker *w, kvl_ticket *t);

/* ---- engine --------------------------------------------------------------------------- */

struct kvl_prefetch {
  kvl_device *device;
  kvl_store *store;
  pthread_mutex_t lock;
  pthread_cond_t work;           /* a task waits, or the engine is closing */
  pthread_cond_t room;           /* a waiting task went */
  pthread_cond_t changed;        /* a layer is ready, a task is over */
  struct kvl__queue queue;
  kvl_ticket *over;              /* not reaped */
  kvl_tensor staging;            /* u8 [workers, 2, bytes_half]; closed: none */
  size_t bytes_half;
  void **marks;                  /* the free ones */
  int marks_free, marks_open;    /* room for every mark that was opened */
  void *before;                  /* queue that joins streams; NULL until first needed */
  void *joined;                  /* mark for that */
  kvl_prefetch_stats stats;
  int refs;                      /* the handle, tickets, and calls that wait in it */
  int is_closing;
  int is_modelled;               /* an emulated link: tasks run on the threads that wait */
  int is_running;                /* a modelled task */
  int num_workers, next_worker;
  struct kvl__worker workers[];
};

/* Around a caller's thread's work with an engine: its lock is held, and it stays. leave also
 * gives back what tasks that are over held of the device. */
void kvl__prefetch_enter(kvl_prefetch *e);
void kvl__prefetch_leave(kvl_prefetch *e);
/* The times of an engine are modelled exactly while a link is emulated. */
int kvl__prefetch_expect(const kvl_prefetch *e);
/* A worker: what will come of the next layer has been read, and its copies are issued. */
void kvl__prefetch_layer_ready(kvl_ticket *t);

/* With the lock held: */
/* Wait for a change until `end`. 1: look again, 0: the time is up, < 0: interrupted. */
int kvl__prefetch_wait_on(kvl_prefetch *e, pthread_cond_t *cond, int64_t end, const char *op);
/* Modelled: run the first waiting task here. 0: there is none, or one runs already. */
int kvl__prefetch_run_first(kvl_prefetch *e);
/* Cancel a task. 0: it is over. */
int kvl__prefetch_stop(kvl_prefetch *e, kvl_ticket *t);
/* When a timeout ends on kvl_clock_ns; INT64_MAX: never. */
int64_t kvl__deadline_ns(int64_t timeout_us);

/* ---- ticket --------------------------------------------------------------------------- */

/* A ticket for a task that is right, with one reference and nothing of the device's. */
int kvl__ticket_open(kvl_prefetch *e, const kvl_prefetch_task *task, kvl_ticket **out);
/* Takes what it needs of the device's; after a failure, drop the ticket. The lock is held. */
int kvl__ticket_equip(kvl_ticket *t);
/* Drops a reference. 1: that was the last, the ticket is gone. The lock is held. */
int kvl__ticket_unref(kvl_ticket *t);
static inline int kvl__ticket_is_over(const kvl_ticket *t) {
  return t->state >= KVL_PREFETCH_COMPLETED;
}

#endif
