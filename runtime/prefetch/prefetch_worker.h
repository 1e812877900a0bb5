/* A worker of a prefetcher has a queue of the backend and a part of the staging memory.
 * With these it brings the records of a task to where they belong. */
#ifndef KVL_PREFETCH_WORKER_H
#define KVL_PREFETCH_WORKER_H

#include "prefetch/ticket.h"

/* Pinned memory that records are read into while those in the other half are copied. */
struct kvl__half {
  char *memory;
  size_t used;       /* bytes that hold records, or will */
  void *begin, *end; /* marks around its copies */
  int is_copying;    /* begin is recorded */
};

/* Records that are neighbours in a half and also in the destination: one copy moves them. */
struct kvl__run {
  char *from, *to;
  size_t bytes;
};

struct kvl__worker {
  kvl_device *device;
  kvl_store *store;
  int is_modelled; /* an emulated link models the times */
  void *queue;     /* of the backend, this worker's own; NULL: no staging */
  struct kvl__half halves[2];
  size_t bytes_half;
  int half; /* index of the half that is being filled */
  struct kvl__run run;
};

/* Opens a worker whose device, store, is_modelled and bytes_half are set. staging is the
 * memory of both halves, or NULL if records need no staging. */
int kvl__worker_open(struct kvl__worker *w, char *staging);
/* Closes a worker that has no copies under way. */
void kvl__worker_close(struct kvl__worker *w);
/* The steps of a task, called in this order and without the prefetcher's lock. begin waits
 * until the task's memory may be written. layer brings one layer after the other and
 * returns 1, or 0 if the task was cancelled. end receives the status of the steps before,
 * waits until no copy of the task is under way, and notes a failure in the task. */
int kvl__worker_begin(struct kvl__worker *w, kvl_ticket *t);
int kvl__worker_layer(struct kvl__worker *w, kvl_ticket *t, int layer);
void kvl__worker_end(struct kvl__worker *w, kvl_ticket *t, int status);

#endif
