/* The CPU device's marks: places in queues that other queues, and the host, wait for. A
 * mark's lock guards the data that the submitting thread shares with the workers that reach
 * the mark. */
#include <pthread.h>

#include "cpu/queue.h"

/* Records are numbered. A wait is for the newest record before it, as on a GPU: records of
 * several queues may complete in any order, and a later record says nothing about an earlier
 * one. All records up to `completed` are complete; number completed + 1 + i is complete
 * where bit i of `beyond` is set. `at` is the time of the newest record. */
struct kvl__mark {
  pthread_mutex_t lock;
  pthread_cond_t reached;
  int64_t recorded, completed, newest;
  uint64_t beyond;
  struct kvl__time at;
  int refs; /* the handle, and the jobs that mention it */
};
enum { BEYOND = 64 }; /* a record that is further ahead waits for earlier ones */

int kvl__cpu_mark_open(void *ctx, void **out) {
  (void)ctx;
  struct kvl__mark *m = kvl__malloc(sizeof *m, "an event");
  if (!m) return KVL_ERR_NO_MEMORY;
  *m = (struct kvl__mark){.refs = 1};
  pthread_mutex_init(&m->lock, NULL);
  pthread_cond_init(&m->reached, NULL);
  *out = m;
  return KVL_OK;
}

int64_t kvl__mark_ref(struct kvl__mark *m, int records) {
  pthread_mutex_lock(&m->lock);
  m->refs++;
  m->recorded += records;
  int64_t record = m->recorded;
  pthread_mutex_unlock(&m->lock);
  return record;
}

void kvl__mark_unref(struct kvl__mark *m) {
  pthread_mutex_lock(&m->lock);
  int left = --m->refs;
  pthread_mutex_unlock(&m->lock);
  if (left) return;
  pthread_cond_destroy(&m->reached);
  pthread_mutex_destroy(&m->lock);
  free(m);
}

void kvl__cpu_mark_close(void *ctx, void *mark) {
  (void)ctx;
  kvl__mark_unref(mark);
}

/* The lock is held. */
static int is_complete(const struct kvl__mark *m, int64_t record) {
  int64_t ahead = record - m->completed;
  return ahead <= 0 || (ahead <= BEYOND && m->beyond >> (ahead - 1) & 1);
}

void kvl__mark_complete(struct kvl__mark *m, int64_t record, struct kvl__time at) {
  pthread_mutex_lock(&m->lock);
  while (record - m->completed > BEYOND) pthread_cond_wait(&m->reached, &m->lock);
  m->beyond |= (uint64_t)1 << (record - m->completed - 1);
  for (; m->beyond & 1; m->beyond >>= 1) m->completed++;
  if (record > m->newest) {
    m->newest = record;
    m->at = at;
  }
  pthread_cond_broadcast(&m->reached);
  pthread_mutex_unlock(&m->lock);
}

struct kvl__time kvl__mark_wait(struct kvl__mark *m, int64_t record) {
  pthread_mutex_lock(&m->lock);
  while (!is_complete(m, record)) pthread_cond_wait(&m->reached, &m->lock);
  struct kvl__time at = m->at;
  pthread_mutex_unlock(&m->lock);
  return at;
}

int kvl__cpu_mark_sync(void *ctx, void *mark) {
  (void)ctx;
  struct kvl__mark *m = mark;
  kvl__link_host_wait(kvl__mark_wait(m, m->recorded));
  return KVL_OK;
}

int kvl__cpu_mark_done(void *ctx, void *mark) {
  struct kvl__mark *m = mark;
  pthread_mutex_lock(&m->lock);
  int done = is_complete(m, m->recorded);
  pthread_mutex_unlock(&m->lock);
  if (done) kvl__cpu_mark_sync(ctx, m); /* the host's next work comes after it */
  return done;
}

int kvl__cpu_mark_elapsed_us(void *ctx, void *from, void *to, double *us) {
  (void)ctx;
  struct kvl__time begin = kvl__mark_wait(from, 0), end = kvl__mark_wait(to, 0);
  if (begin.epoch != end.epoch)
    return kvl__fail(KVL_ERR_INVALID, "event: kvl_cpu_link was called between the two");
  *us = (double)(end.ns - begin.ns) * 1e-3;
  return KVL_OK;
}
