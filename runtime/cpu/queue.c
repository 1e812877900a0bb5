/* The CPU device's queues. The default queue runs its work on the calling thread. Every
 * other queue is a worker thread with a FIFO of jobs, so that copies overlap compute as they
 * do on a GPU. While a link is emulated, the work of every queue runs on the calling thread.
 * A job then takes as long as it takes alone, cpu/link.c overlaps it with other jobs in
 * modelled time, and that time does not depend on how threads were scheduled. The order of
 * submission is always a correct order, because a queue can only wait for marks that were
 * recorded before.
 *
 * One thread submits. A queue's lock guards the data that the queue shares with its worker.
 */
#include <pthread.h>

#include "cpu/queue.h"
#include "args/attention.h"
#include "args/elementwise.h"
#include "args/evict.h"
#include "args/index.h"
#include "args/linear.h"
#include "args/offload.h"
#include "args/select.h"
#include "hook.h"

/* ---- jobs -------------------------------------------------------------------------- */

enum { JOBS = KVL__ROOM(256, 2), JOB_BYTES = 576 };

#define X(op) _Static_assert(sizeof(struct kvl_##op##_args) <= JOB_BYTES, #op);
KVL_OPS(X)
#undef X
_Static_assert(sizeof(struct kvl_hooked_attention_args) <= JOB_BYTES, "attention");
_Static_assert((int)KVL_CODE_ARGUMENTS_MAX <= (int)JOB_BYTES, "arguments of kernels");

enum job_kind { JOB_KERNEL, JOB_RECORD, JOB_WAIT };

struct job {
  enum job_kind kind;
  kvl_kernel *run;        /* KERNEL */
  struct kvl__mark *mark; /* RECORD, WAIT: a reference */
  int64_t record, epoch;  /* RECORD, WAIT: which record; the epoch of its submission */
  _Alignas(16) unsigned char args[JOB_BYTES];
};

struct queue {
  int threaded;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t head, tail;    /* jobs done, jobs submitted */
  int closing, status;    /* status: first failure since the last sync */
  int refs;               /* the handle, and the graphs that mention it */
  struct kvl__time clock; /* while a link is emulated */
  struct job jobs[JOBS];
};

/* Runs a job. `modelled` says that a link is emulated; this is then the submitting thread. */
static int job_run(struct queue *q, const struct job *job, int modelled) {
  if (job->kind == JOB_KERNEL) {
    struct kvl_cpu_job told = {{0, 0}};
    int64_t begin = modelled ? kvl_clock_ns() : 0;
    int status = job->run(job->args, &told);
    if (modelled) kvl__link_advance(&q->clock, kvl_clock_ns() - begin, &told);
    return status;
  }
  if (job->kind == JOB_RECORD) {
    struct kvl__time at = {kvl_clock_ns(), job->epoch};
    if (modelled) at = kvl__link_now(&q->clock);
    kvl__mark_complete(job->mark, job->record, at);
  } else {
    struct kvl__time at = kvl__mark_wait(job->mark, job->record);
    if (modelled) kvl__link_wait(&q->clock, at);
  }
  kvl__mark_unref(job->mark);
  return KVL_OK;
}

/* ---- queues ------------------------------------------------------------------------ */

static void *queue_main(void *arg) {
  struct queue *q = arg;
  pthread_mutex_lock(&q->lock);
  for (;;) {
    while (q->head == q->tail && !q->closing) pthread_cond_wait(&q->changed, &q->lock);
    if (q->head == q->tail) break;
    const struct job *job = &q->jobs[q->head % JOBS];
    pthread_mutex_unlock(&q->lock);
    int status = job_run(q, job, 0);
    pthread_mutex_lock(&q->lock);
    if (status < 0 && q->status >= 0) q->status = status;
    q->head++;
    pthread_cond_broadcast(&q->changed);
  }
  pthread_mutex_unlock(&q->lock);
  return NULL;
}

static void queue_unref(struct queue *q) {
  if (--q->refs > 0) return;
  pthread_cond_destroy(&q->changed);
  pthread_mutex_destroy(&q->lock);
  free(q);
}

int kvl__cpu_queue_open(void *ctx, enum kvl_queue_kind kind, void **out) {
  (void)ctx;
  struct queue *q = kvl__malloc(sizeof *q, "a stream");
  if (!q) return KVL_ERR_NO_MEMORY;
  memset(q, 0, sizeof *q);
  q->refs = 1;
  pthread_mutex_init(&q->lock, NULL);
  pthread_cond_init(&q->changed, NULL);
  q->threaded = kind != KVL_QUEUE_DEFAULT;
  if (q->threaded && pthread_create(&q->thread, NULL, queue_main, q)) {
    queue_unref(q);
    return kvl__fail(KVL_ERR_DEVICE, "cpu: no thread for a stream");
  }
  *out = q;
  return KVL_OK;
}

void kvl__cpu_queue_close(void *ctx, void *queue) {
  (void)ctx;
  struct queue *q = queue;
  pthread_mutex_lock(&q->lock);
  q->closing = 1;
  pthread_cond_broadcast(&q->changed);
  pthread_mutex_unlock(&q->lock);
  if (q->threaded) pthread_join(q->thread, NULL);
  queue_unref(q);
}

/* Waits until the worker has nothing left. The queue's lock is held. */
static void drain(struct queue *q) {
  while (q->head != q->tail) pthread_cond_wait(&q->changed, &q->lock);
}

int kvl__cpu_queue_sync(void *ctx, void *queue) {
  (void)ctx;
  struct queue *q = queue;
  pthread_mutex_lock(&q->lock);
  drain(q);
  int status = q->status;
  q->status = KVL_OK;
  pthread_mutex_unlock(&q->lock);
  kvl__link_host_wait(kvl__link_now(&q->clock));
  if (status < 0) kvl__fail(status, "an op on a stream: %s", kvl_status_text(status));
  return status;
}

static int queue_push(struct queue *q, const struct job *job) {
  pthread_mutex_lock(&q->lock);
  while (q->tail - q->head == JOBS) pthread_cond_wait(&q->changed, &q->lock);
  q->jobs[q->tail++ % JOBS] = *job;
  pthread_cond_broadcast(&q->changed);
  pthread_mutex_unlock(&q->lock);
  return KVL_OK;
}

static int queue_run(struct queue *q, const struct job *job) {
  pthread_mutex_lock(&q->lock);
  drain(q); /* it may have jobs from before the link was turned on */
  pthread_mutex_unlock(&q->lock);
  return job_run(q, job, kvl__link_on());
}

/* ---- graphs: recording ------------------------------------------------------------- */

struct entry {
  struct queue *queue; /* NULL: the one that the graph is launched on */
  struct job job;
};

struct graph {
  struct queue *queue;     /* of begin */
  struct entry *entries;   /* in the order of submission */
  int count, room, status; /* status: why the recording failed */
};

static struct graph *recording; /* NULL: none */

static int graph_append(struct graph *g, struct queue *q, const struct job *job) {
  if (g->count == g->room) {
    int room = g->room ? 2 * g->room : KVL__ROOM(64, 1);
    struct entry *grown = kvl__realloc(g->entries, (size_t)room * sizeof *grown, "a graph");
    if (!grown) return g->status = KVL_ERR_NO_MEMORY;
    g->entries = grown;
    g->room = room;
  }
  struct entry *e = &g->entries[g->count++];
  *e = (struct entry){.queue = q == g->queue ? NULL : q, .job = *job};
  if (e->queue) e->queue->refs++;
  if (job->mark) kvl__mark_ref(job->mark, 0);
  return KVL_OK;
}

int kvl__cpu_graph_begin(void *ctx, void *queue) {
  (void)ctx;
  struct graph *g = kvl__malloc(sizeof *g, "a graph");
  if (!g) return KVL_ERR_NO_MEMORY;
  *g = (struct graph){.queue = queue};
  recording = g;
  return KVL_OK;
}

int kvl__cpu_graph_end(void *ctx, void *queue, void **out) {
  (void)queue;
  struct graph *g = recording;
  recording = NULL;
  int status = g->status;
  *out = g;
  if (status < 0) {
    kvl__cpu_graph_close(ctx, g);
    *out = NULL;
    kvl__fail(status, "recording a graph: %s", kvl_status_text(status));
  }
  return status;
}

/* ---- submission -------------------------------------------------------------------- */

static int submit(struct queue *q, struct job *job) {
  if (recording) return graph_append(recording, q, job);
  if (job->mark) {
    job->record = kvl__mark_ref(job->mark, job->kind == JOB_RECORD);
    job->epoch = kvl__link_epoch();
  }
  return q->threaded && !kvl__link_on() ? queue_push(q, job) : queue_run(q, job);
}

int kvl__cpu_submit(void *queue, kvl_kernel *run, const void *args, size_t size) {
  struct job job = {.kind = JOB_KERNEL, .run = run};
  memcpy(job.args, args, size);
  return submit(queue, &job);
}

int kvl__cpu_mark_record(void *ctx, void *mark, void *queue) {
  (void)ctx;
  return submit(queue, &(struct job){.kind = JOB_RECORD, .mark = mark});
}

int kvl__cpu_queue_wait(void *ctx, void *queue, void *mark) {
  (void)ctx;
  return submit(queue, &(struct job){.kind = JOB_WAIT, .mark = mark});
}

struct copy_args {
  void *dst;
  const void *src;
  size_t bytes;
  enum kvl_copy_kind kind;
};

static int run_copy(const void *args, void *job) {
  const struct copy_args *a = args;
  int64_t *bytes_link = ((struct kvl_cpu_job *)job)->bytes_link;
  memmove(a->dst, a->src, a->bytes);
  if (a->kind == KVL_COPY_FROM_HOST) bytes_link[KVL_LINK_TO_DEVICE] += (int64_t)a->bytes;
  if (a->kind == KVL_COPY_TO_HOST) bytes_link[KVL_LINK_TO_HOST] += (int64_t)a->bytes;
  return KVL_OK;
}

int kvl__cpu_copy(void *ctx, void *queue, void *dst, const void *src, size_t bytes,
                  enum kvl_copy_kind kind) {
  (void)ctx;
  struct copy_args args = {dst, src, bytes, kind};
  return kvl__cpu_submit(queue, run_copy, &args, sizeof args);
}

/* ---- graphs: replay ---------------------------------------------------------------- */

/* The work of a queue that has been closed since goes to the queue of the launch. It
 * overlaps less there, but it is still correct, because the order of submission always is. A
 * replay makes new records of the marks, and its waits are for the new records. */
int kvl__cpu_graph_launch(void *ctx, void *graph, void *queue) {
  (void)ctx;
  struct graph *g = graph;
  int status = KVL_OK;
  for (int i = 0; i < g->count && status >= 0; i++) {
    const struct entry *e = &g->entries[i];
    struct job job = e->job;
    status = submit(e->queue && !e->queue->closing ? e->queue : queue, &job);
  }
  return status;
}

void kvl__cpu_graph_close(void *ctx, void *graph) {
  (void)ctx;
  struct graph *g = graph;
  for (int i = 0; i < g->count; i++) {
    if (g->entries[i].queue) queue_unref(g->entries[i].queue);
    if (g->entries[i].job.mark) kvl__mark_unref(g->entries[i].job.mark);
  }
  free(g->entries);
  free(g);
}
