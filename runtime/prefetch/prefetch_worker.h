/* The means by which a worker of a prefetcher brings a task's records: a queue of the
 * backend and a part of the staging. */
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
  int is_modelled; /* an emulated link tells the times */
  void *queue;     /* of the backend, this worker's own; NULL: no staging */
  struct kvl__half halves[2];
  size_t bytes_half;
  int half; /* the one that is filled */
  struct kvl__run run;
};

/* device, store, is_modelled and bytes_half are set. staging: two halves, or NULL. */
int kvl__worker_open(struct kvl__worker *w, char *staging);
/* Nothing of it is under way. */
void kvl__worker_close(struct kvl__worker *w);
/* Without the prefetcher's lock, in this order: wait until the task's memory may be written;
 * bring one layer after the other (1: done, 0: the task was cancelled); and at the end, with
 * the status of what came before, wait until nothing of the task is under way. A failure is
 * noted in the task. */
int kvl__worker_begin(struct kvl__worker *w, kvl_ticket *t);
int kvl__worker_layer(struct kvl__worker *w, kvl_ticket *t, int layer);
void kvl__worker_end(struct kvl__worker *w, kvl_ticket *t, int status);

#endif
