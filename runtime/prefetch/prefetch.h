/* The inside of a prefetcher: a queue of waiting tasks (prefetch_queue.c), tasks and their
 * tickets (ticket.c), what a worker does with a task (prefetch_worker.c), the threads and
 * the lock around them (prefetch.c), and waiting for a ticket (prefetch_wait.c). */
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
  pthread_cond_t room;    /* a task has left the queue */
  pthread_cond_t changed; /* a layer is ready, a task is over */
  struct kvl__queue queue;
  kvl_ticket *over;   /* list of tasks that are over and not reaped */
  kvl_tensor staging; /* u8 [workers, 2, bytes_half]; not open if unused */
  size_t bytes_half;
  struct kvl__marks marks;
  kvl_prefetch_stats stats;
  int refs; /* one for the handle, each ticket and each running call */
  int is_closing;
  int is_modelled; /* an emulated link: tasks run on the threads that wait */
  int is_running;  /* a modelled task runs */
  int num_threads, next_thread;
  struct kvl__thread threads[];
};

/* A caller's thread calls enter before it works with a prefetcher and leave after it. In
 * between it holds the lock, and the prefetcher is not freed. leave also gives back the
 * device resources of tasks that are over. */
void kvl__prefetch_enter(kvl_prefetch *p);
void kvl__prefetch_leave(kvl_prefetch *p);
/* Fails unless the prefetcher was opened with the emulated link as it is now, on or off. */
int kvl__prefetch_expect(const kvl_prefetch *p);
/* The lock is held in the next three functions. */
/* Waits for a change until `end`. Returns 1 if the caller should look again, 0 if the time
 * is up, < 0 if interrupted. */
int kvl__prefetch_wait_on(kvl_prefetch *p, pthread_cond_t *cond, int64_t end, const char *op);
/* If times are modelled, runs the first waiting task on this thread. Returns 1, or 0 if
 * none waits or one runs already. */
int kvl__prefetch_run_first(kvl_prefetch *p);
/* Cancels a task. Returns 1, or 0 if it is over. */
int kvl__prefetch_stop(kvl_prefetch *p, kvl_ticket *t);
/* The time of kvl_clock_ns at which a timeout ends; INT64_MAX: never. */
int64_t kvl__deadline_ns(int64_t timeout_us);

#endif
