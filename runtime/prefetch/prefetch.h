/* The insides of a prefetcher: a queue of waiting tasks (prefetch_queue.c), tasks and their
 * tickets (ticket.c), what a worker does with one (prefetch_worker.c), the threads and the lock
 * around them (prefetch.c), and waiting for a ticket (prefetch_wait.c). */
#ifndef KVL_PREFETCH_H
#define KVL_PREFETCH_H

#include <pthread.h>

#include "prefetch/prefetch_queue.h"
#include "prefetch/prefetch_worker.h"

struct kvl__thread {
  kvl_prefetch *prefetch;
  pthread_t thread;
  int has_thread;      /* 0 where tasks run on the threads that wait */
  kvl_ticket *running; /* NULL: none; under the prefetcher's lock */
  struct kvl__worker worker;
};

struct kvl_prefetch {
  kvl_device *device;
  kvl_store *store;
  pthread_mutex_t lock;
  pthread_cond_t work;    /* a task waits, or the prefetcher is closing */
  pthread_cond_t room;    /* a waiting task went */
  pthread_cond_t changed; /* a layer is ready, a task is over */
  struct kvl__queue queue;
  kvl_ticket *over;   /* not reaped */
  kvl_tensor staging; /* u8 [workers, 2, bytes_half]; closed: none */
  size_t bytes_half;
  struct kvl__marks marks;
  kvl_prefetch_stats stats;
  int refs; /* the handle, tickets, and calls that wait in it */
  int is_closing;
  int is_modelled; /* an emulated link: tasks run on the threads that wait */
  int is_running;  /* a modelled task */
  int num_threads, next_thread;
  struct kvl__thread threads[];
};

/* Around a caller's thread's work with a prefetcher: its lock is held, and it stays. leave also
 * gives back what tasks that are over held of the device. */
void kvl__prefetch_enter(kvl_prefetch *p);
void kvl__prefetch_leave(kvl_prefetch *p);
/* The times of a prefetcher are modelled exactly while a link is emulated. */
int kvl__prefetch_expect(const kvl_prefetch *p);
/* With the lock held: */
/* Wait for a change until `end`. 1: look again, 0: the time is up, < 0: interrupted. */
int kvl__prefetch_wait_on(kvl_prefetch *p, pthread_cond_t *cond, int64_t end, const char *op);
/* Modelled: run the first waiting task here. 0: there is none, or one runs already. */
int kvl__prefetch_run_first(kvl_prefetch *p);
/* Cancel a task. 0: it is over. */
int kvl__prefetch_stop(kvl_prefetch *p, kvl_ticket *t);
/* When a timeout ends on kvl_clock_ns; INT64_MAX: never. */
int64_t kvl__deadline_ns(int64_t timeout_us);

#endif
