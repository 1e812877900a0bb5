/* The CPU as a device. The default queue runs its work on the calling thread; every other
 * queue is a worker thread with a FIFO of jobs, so that copies overlap compute as they do
 * on a GPU. Kernels come in three instruction sets, chosen by what the processor has. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include <omp.h>

#include "internal.h"

/* ---- kernels by instruction set -------------------------------------------------------- */

#define KVL_TABLE(isa)                                                                    \
  KVL_DECLARE(isa)                                                                        \
  static kvl_kernel *const kernels_##isa[KVL_OP_COUNT] = {KVL_OPS(KVL_ENTRY_##isa)};

#define KVL_DECLARE(isa)                                                                  \
  KVL_OPS(KVL_PROTO_##isa)                                                                \
  size_t kvl_cpu_paged_attention_workspace_##isa(const void *args);                       \
  size_t kvl_cpu_matmul_workspace_##isa(const void *args);
#define KVL_PROTO_plain(op) kvl_kernel kvl_cpu_##op##_plain;
#define KVL_PROTO_avx2(op) kvl_kernel kvl_cpu_##op##_avx2;
#define KVL_PROTO_avx512(op) kvl_kernel kvl_cpu_##op##_avx512;
#define KVL_ENTRY_plain(op) [KVL_OP_##op] = kvl_cpu_##op##_plain,
#define KVL_ENTRY_avx2(op) [KVL_OP_##op] = kvl_cpu_##op##_avx2,
#define KVL_ENTRY_avx512(op) [KVL_OP_##op] = kvl_cpu_##op##_avx512,

KVL_TABLE(plain)
#ifdef __x86_64__
KVL_TABLE(avx2)
KVL_TABLE(avx512)
#endif

struct isa {
  const char *name, *words;
  kvl_kernel *const *kernels;
  size_t (*attention_workspace)(const void *args), (*matmul_workspace)(const void *args);
};
#define KVL_ISA_ROW(isa, words)                                                           \
  {#isa, words, kernels_##isa, kvl_cpu_paged_attention_workspace_##isa,                   \
   kvl_cpu_matmul_workspace_##isa}
static const struct isa isas[] = {
  KVL_ISA_ROW(plain, "portable C"),
#ifdef __x86_64__
  KVL_ISA_ROW(avx2, "AVX2"),
  KVL_ISA_ROW(avx512, "AVX-512"),
#endif
};
enum { ISAS = sizeof isas / sizeof isas[0] };

static int isa_supported(int i) {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (i == 1)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  if (i == 2)
    return isa_supported(1) && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
#endif
  return i == 0;
}

static const struct isa *isa_in_use(const struct isa *choose) {
  static const struct isa *current;
  if (choose) current = choose;
  for (int i = 0; !current && i < ISAS; i++)
    if (isa_supported(ISAS - 1 - i)) current = &isas[ISAS - 1 - i];
  return current;
}

const char *kvl_cpu_isa(void) { return isa_in_use(NULL)->name; }

int kvl_cpu_use_isa(const char *name) {
  for (int i = 0; i < ISAS; i++) {
    if (strcmp(isas[i].name, name)) continue;
    if (!isa_supported(i))
      return kvl__fail(KVL_ERR_UNSUPPORTED, "this processor lacks %s", isas[i].words);
    isa_in_use(&isas[i]);
    return KVL_OK;
  }
  return kvl__fail(KVL_ERR_INVALID, "isa is \"%s\", expected plain, avx2 or avx512", name);
}

/* ---- marks -------------------------------------------------------------------------------- */

/* recorded counts the records made, completed the newest one that its queue has reached. */
struct mark {
  pthread_mutex_t lock;
  pthread_cond_t reached;
  int64_t recorded, completed, ns;
  int refs;                      /* the handle and the jobs that mention it */
};

static int mark_open(void *ctx, void **out) {
  (void)ctx;
  struct mark *m = kvl__malloc(sizeof *m, "an event");
  if (!m) return KVL_ERR_NO_MEMORY;
  *m = (struct mark){.refs = 1};
  pthread_mutex_init(&m->lock, NULL);
  pthread_cond_init(&m->reached, NULL);
  *out = m;
  return KVL_OK;
}

static void mark_unref(struct mark *m) {
  pthread_mutex_lock(&m->lock);
  int left = --m->refs;
  pthread_mutex_unlock(&m->lock);
  if (left) return;
  pthread_cond_destroy(&m->reached);
  pthread_mutex_destroy(&m->lock);
  free(m);
}

static void mark_close(void *ctx, void *mark) {
  (void)ctx;
  mark_unref(mark);
}

static void mark_complete(struct mark *m, int64_t generation) {
  pthread_mutex_lock(&m->lock);
  if (generation > m->completed) m->completed = generation;
  m->ns = kvl_clock_ns();
  pthread_cond_broadcast(&m->reached);
  pthread_mutex_unlock(&m->lock);
}

static void mark_wait(struct mark *m, int64_t generation) {
  pthread_mutex_lock(&m->lock);
  while (m->completed < generation) pthread_cond_wait(&m->reached, &m->lock);
  pthread_mutex_unlock(&m->lock);
}

static int mark_sync(void *ctx, void *mark) {
  (void)ctx;
  struct mark *m = mark;
  mark_wait(m, m->recorded);
  return KVL_OK;
}

static int mark_done(void *ctx, void *mark) {
  (void)ctx;
  struct mark *m = mark;
  pthread_mutex_lock(&m->lock);
  int done = m->completed >= m->recorded;
  pthread_mutex_unlock(&m->lock);
  return done;
}

static int mark_elapsed_us(void *ctx, void *from, void *to, double *us) {
  (void)ctx;
  *us = (double)(((struct mark *)to)->ns - ((struct mark *)from)->ns) * 1e-3;
  return KVL_OK;
}

/* ---- queues -------------------------------------------------------------------------------- */

enum { JOBS = KVL__ROOM(256, 2), JOB_BYTES = 272 };

struct job {
  kvl_kernel *run;
  _Alignas(16) unsigned char args[JOB_BYTES];
};

struct queue {
  int threaded;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t head, tail;           /* jobs done, jobs submitted */
  int closing, status;           /* status: first failure since the last sync */
  struct job jobs[JOBS];
};

static void *queue_main(void *arg) {
  struct queue *q = arg;
  pthread_mutex_lock(&q->lock);
  for (;;) {
    while (q->head == q->tail && !q->closing) pthread_cond_wait(&q->changed, &q->lock);
    if (q->head == q->tail) break;
    struct job *job = &q->jobs[q->head % JOBS];
    pthread_mutex_unlock(&q->lock);
    int status = job->run(job->args, NULL);
    pthread_mutex_lock(&q->lock);
    if (status < 0 && q->status >= 0) q->status = status;
    q->head++;
    pthread_cond_broadcast(&q->changed);
  }
  pthread_mutex_unlock(&q->lock);
  return NULL;
}

static int queue_open(void *ctx, int is_default, void **out) {
  (void)ctx;
  struct queue *q = kvl__malloc(sizeof *q, "a stream");
  if (!q) return KVL_ERR_NO_MEMORY;
  memset(q, 0, sizeof *q);
  pthread_mutex_init(&q->lock, NULL);
  pthread_cond_init(&q->changed, NULL);
  q->threaded = !is_default;
  if (q->threaded && pthread_create(&q->thread, NULL, queue_main, q)) {
    free(q);
    return kvl__fail(KVL_ERR_DEVICE, "cpu: no thread for a stream");
  }
  *out = q;
  return KVL_OK;
}

static int queue_sync(void *ctx, void *queue) {
  (void)ctx;
  struct queue *q = queue;
  if (!q->threaded) return KVL_OK;
  pthread_mutex_lock(&q->lock);
  while (q->head != q->tail) pthread_cond_wait(&q->changed, &q->lock);
  int status = q->status;
  q->status = KVL_OK;
  pthread_mutex_unlock(&q->lock);
  if (status < 0) kvl__fail(status, "an op on a stream: %s", kvl_status_text(status));
  return status;
}

static void queue_close(void *ctx, void *queue) {
  (void)ctx;
  struct queue *q = queue;
  if (q->threaded) {
    pthread_mutex_lock(&q->lock);
    q->closing = 1;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
    pthread_join(q->thread, NULL);
  }
  pthread_cond_destroy(&q->changed);
  pthread_mutex_destroy(&q->lock);
  free(q);
}

static int submit(struct queue *q, kvl_kernel *run, const void *args, size_t size) {
  if (!q->threaded) return run(args, NULL);
  KVL_CHECK(size <= JOB_BYTES);
  pthread_mutex_lock(&q->lock);
  while (q->tail - q->head == JOBS) pthread_cond_wait(&q->changed, &q->lock);
  struct job *job = &q->jobs[q->tail % JOBS];
  job->run = run;
  memcpy(job->args, args, size);
  q->tail++;
  pthread_cond_broadcast(&q->changed);
  pthread_mutex_unlock(&q->lock);
  return KVL_OK;
}

/* ---- work that is not an op ------------------------------------------------------------------ */

struct mark_job { struct mark *mark; int64_t generation; };

static int run_record(const void *args, void *queue) {
  const struct mark_job *job = args;
  (void)queue;
  mark_complete(job->mark, job->generation);
  mark_unref(job->mark);
  return KVL_OK;
}

static int run_wait(const void *args, void *queue) {
  const struct mark_job *job = args;
  (void)queue;
  mark_wait(job->mark, job->generation);
  mark_unref(job->mark);
  return KVL_OK;
}

static int submit_mark(struct mark *m, struct queue *q, kvl_kernel *run, int record) {
  pthread_mutex_lock(&m->lock);
  m->recorded += record;
  m->refs++;
  struct mark_job job = {m, m->recorded};
  pthread_mutex_unlock(&m->lock);
  return submit(q, run, &job, sizeof job);
}

static int mark_record(void *ctx, void *mark, void *queue) {
  (void)ctx;
  return submit_mark(mark, queue, run_record, 1);
}

static int queue_wait(void *ctx, void *queue, void *mark) {
  (void)ctx;
  return submit_mark(mark, queue, run_wait, 0);
}

struct copy_job { void *dst; const void *src; size_t bytes; };

static int run_copy(const void *args, void *queue) {
  const struct copy_job *job = args;
  (void)queue;
  memmove(job->dst, job->src, job->bytes);
  return KVL_OK;
}

static int copy(void *ctx, void *queue, void *dst, const void *src, size_t bytes,
                enum kvl_copy_kind kind) {
  (void)ctx, (void)kind;
  struct copy_job job = {dst, src, bytes};
  return submit(queue, run_copy, &job, sizeof job);
}

/* ---- the table --------------------------------------------------------------------------------- */

static int count(void) { return 1; }

static int open_cpu(int index, void **ctx, char *words) {
  (void)index, (void)words;
  *ctx = (void *)&isas; /* no state of its own */
  return KVL_OK;
}

static void close_cpu(void *ctx) { (void)ctx; }

static void describe(void *ctx, char *text, size_t size) {
  (void)ctx;
  snprintf(text, size, "%s, %d threads", isa_in_use(NULL)->words, omp_get_max_threads());
}

static int memory(void *ctx, int64_t *bytes_free, int64_t *bytes_total) {
  (void)ctx;
  int64_t page = sysconf(_SC_PAGESIZE);
  *bytes_free = page * sysconf(_SC_AVPHYS_PAGES);
  *bytes_total = page * sysconf(_SC_PHYS_PAGES);
  return KVL_OK;
}

/* Memory that the machine does not have is refused here: an overcommitted page would
 * otherwise kill the process when it is first touched. */
static int alloc(void *ctx, size_t bytes, void **out) {
  int64_t bytes_free, bytes_total;
  memory(ctx, &bytes_free, &bytes_total);
  if (bytes > (size_t)bytes_total) return KVL_ERR_NO_MEMORY;
  size_t align = bytes >= ((size_t)2 << 20) ? (size_t)2 << 20 : 256;
  void *p = aligned_alloc(align, (bytes + align - 1) & ~(align - 1));
  if (!p) return KVL_ERR_NO_MEMORY;
  *out = p;
  return KVL_OK;
}

static void free_cpu(void *ctx, void *p) {
  (void)ctx;
  free(p);
}

static size_t workspace(void *ctx, enum kvl_op op, const void *args) {
  (void)ctx;
  const struct isa *isa = isa_in_use(NULL);
  if (op == KVL_OP_paged_attention) return isa->attention_workspace(args);
  if (op == KVL_OP_matmul) return isa->matmul_workspace(args);
  return 0;
}

static int launch(void *ctx, void *queue, enum kvl_op op, const void *args, size_t size) {
  (void)ctx;
  return submit(queue, isa_in_use(NULL)->kernels[op], args, size);
}

static const char *last_error(void) { return ""; }

const kvl_backend kvl__backend_cpu = {
  .version = KVL_BACKEND_VERSION, .name = "cpu", .host_memory = 1,
  .count = count, .open = open_cpu, .close = close_cpu, .describe = describe,
  .memory = memory, .alloc = alloc, .free = free_cpu,
  .host_alloc = alloc, .host_free = free_cpu,
  .queue_open = queue_open, .queue_close = queue_close, .queue_sync = queue_sync,
  .mark_open = mark_open, .mark_close = mark_close, .mark_record = mark_record,
  .queue_wait = queue_wait, .mark_sync = mark_sync, .mark_done = mark_done,
  .mark_elapsed_us = mark_elapsed_us, .copy = copy,
  .workspace = workspace, .launch = launch, .last_error = last_error,
};
