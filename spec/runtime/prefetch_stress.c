/* Tests the prefetcher with many threads. prefetch_spec.lua builds it with the thread
 * sanitizer. A fake device stands in for a GPU: the runtime takes its memory for memory
 * that the host cannot write, and its queues are threads, so that records go through
 * staging, copies and marks. A fake store misses and fails now and then, and remembers
 * what was asked of it.
 *
 *   stress N   N tasks from 16 threads, with random priorities, cancels and changes of
 *              priority: each task ends once, in one way; each record is asked for once; a
 *              block holds its own task's bytes, and is left alone before and after
 *   order      one worker serves tasks by priority, then in the order of submission; a full
 *              queue and a wait meanwhile report what they should
 *   faults     each call of the device fails once: the submit or the ticket says so, and the
 *              next task runs as if nothing had happened
 * Prints what is wrong and returns 1, or prints counts. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "abi.h"
#include "core/allocator.h"
#include "cpu/backend.h"
#include "cpu/queue.h"
#include "store/store.h"

#define EXPECT(condition)                                                                   \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, kvl_last_error()); \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)

enum {
  THREADS = 16,
  IN_FLIGHT = 6,
  BLOCKS_TASK = 4,
  LAYERS = 3,
  WORDS = 10,       /* of a record: few, since what is tested happens between records */
  BYTES_HALF = 256, /* of a worker's staging: holds three records; no half is smaller */
  BLOCKS = THREADS * (IN_FLIGHT + 1) * BLOCKS_TASK,
};

static uint64_t mix(uint64_t x) { /* the finaliser of MurmurHash3 */
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccd;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53;
  return x ^ (x >> 33);
}

/* ---- the device ----------------------------------------------------------------------- */

static int count(void) { return 1; }
static int open_(int index, void **ctx, char *words) {
  (void)index, (void)words;
  *ctx = (void *)&count;
  return KVL_OK;
}
static void close_(void *ctx) { (void)ctx; }
static void describe(void *ctx, char *text, size_t size) {
  (void)ctx;
  snprintf(text, size, "?");
}
static int memory(void *ctx, int64_t *bytes_free, int64_t *bytes_total) {
  (void)ctx;
  *bytes_free = *bytes_total = 0;
  return KVL_OK;
}
static int alloc(void *ctx, size_t bytes, void **out) {
  (void)ctx;
  return (*out = malloc(bytes)) ? KVL_OK : KVL_ERR_NO_MEMORY;
}
static int host_alloc(void *ctx, size_t bytes, int huge_pages, void **out) {
  (void)huge_pages;
  return alloc(ctx, bytes, out);
}
static void free_(void *ctx, void *p) { (void)ctx, free(p); }
static void host_free(void *ctx, void *p, size_t bytes) { (void)ctx, (void)bytes, free(p); }
static const char *no_words(void) { return ""; }

static atomic_int calls_until_fault; /* 0: no fault */

#define FAULTY(name, parameters, ...)                                                    \
  static int name parameters {                                                           \
    if (atomic_load(&calls_until_fault) && atomic_fetch_sub(&calls_until_fault, 1) == 1) \
      return kvl__fail(KVL_ERR_DEVICE, "the device fails");                              \
    return kvl__cpu_##name(__VA_ARGS__);                                                 \
  }
FAULTY(queue_open, (void *c, enum kvl_queue_kind kind, void **out), c, kind, out)
FAULTY(mark_open, (void *c, void **out), c, out)
FAULTY(mark_record, (void *c, void *mark, void *queue), c, mark, queue)
FAULTY(queue_wait, (void *c, void *queue, void *mark), c, queue, mark)
FAULTY(mark_sync, (void *c, void *mark), c, mark)
FAULTY(mark_elapsed_us, (void *c, void *from, void *to, double *us), c, from, to, us)
FAULTY(copy,
       (void *c, void *queue, void *dst, const void *src, size_t bytes,
        enum kvl_copy_kind kind),
       c, queue, dst, src, bytes, kind)

const kvl_backend kvl__backend_cpu = {
    .version = KVL_BACKEND_VERSION,
    .name = "fake",
    .host_memory = 0,
    .count = count,
    .open = open_,
    .close = close_,
    .describe = describe,
    .memory = memory,
    .alloc = alloc,
    .free = free_,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .queue_open = queue_open,
    .queue_close = kvl__cpu_queue_close,
    .queue_sync = kvl__cpu_queue_sync,
    .mark_open = mark_open,
    .mark_close = kvl__cpu_mark_close,
    .mark_record = mark_record,
    .queue_wait = queue_wait,
    .mark_sync = mark_sync,
    .mark_done = kvl__cpu_mark_done,
    .mark_elapsed_us = mark_elapsed_us,
    .copy = copy,
    .build = no_words,
    .last_error = no_words,
};

/* ---- the store: key.lo is the task, key.hi the index of its block --------------------- */

enum answer { FOUND, MISS, FAILURE };

static kvl_store store;
static atomic_uchar *asked; /* [tasks][LAYERS][BLOCKS_TASK] */
static atomic_int is_gated; /* while set, reads wait */
static atomic_int served;   /* tasks of one record that were served; order[] lists them */
static int order[4096];

static enum answer answer_to(const kvl_key *key, int part) {
  uint64_t dice = mix(key->lo * 31 + key->hi * 7 + (uint64_t)part) % 1000;
  return dice < 4 ? FAILURE : dice < 40 ? MISS : FOUND;
}

static uint64_t word(const kvl_key *key, int part, int i) {
  return mix(key->lo) ^ mix(key->hi + 1000) ^ mix((uint64_t)(part * 1000 + i) + 77);
}

int kvl_store_get(kvl_store *s, const kvl_key *key, int part, void *bytes, int64_t n) {
  struct timespec nap = {0, 100000};
  (void)s;
  EXPECT(n == WORDS * 8);
  while (atomic_load(&is_gated)) nanosleep(&nap, NULL);
  if (!asked) {
    order[atomic_fetch_add(&served, 1) % 4096] = (int)key->lo;
    return 0;
  }
  size_t at = (key->lo * LAYERS + (size_t)part) * BLOCKS_TASK + key->hi;
  EXPECT(atomic_fetch_add(&asked[at], 1) == 0);
  switch (answer_to(key, part)) {
    case FAILURE: return kvl__fail(KVL_ERR_IO, "the store fails at %llu", (long long)key->lo);
    case MISS: return 0;
    case FOUND: break;
  }
  for (int i = 0; i < WORDS; i++) ((uint64_t *)bytes)[i] = word(key, part, i);
  return 1;
}

void kvl_store_close(kvl_store *s) { atomic_fetch_sub(&s->refs, 1); }

/* ---- stress --------------------------------------------------------------------------- */

struct flight {
  kvl_ticket *ticket;
  kvl_key keys[BLOCKS_TASK];
  int32_t blocks[BLOCKS_TASK];
  int n;
};

static kvl_prefetch *prefetcher;
static kvl_tensor kv;
static atomic_int next_task, completed, cancelled, failed, refused;
static int tasks;

static uint64_t *record(int layer, int block) {
  return (uint64_t *)kv.ptr + ((size_t)layer * BLOCKS + (size_t)block) * WORDS;
}

/* Writes the pattern that a block holds while no task owns it. */
static void leave_block(int block) {
  for (int l = 0; l < LAYERS; l++)
    for (int i = 0; i < WORDS; i++) record(l, block)[i] = ~(uint64_t)block;
}

static void expect_left(int block) {
  for (int l = 0; l < LAYERS; l++)
    for (int i = 0; i < WORDS; i++) EXPECT(record(l, block)[i] == ~(uint64_t)block);
}

/* Checks the result of a task that nobody cancelled against the store's answers. */
static void expect_result(const struct flight *f, const kvl_prefetch_result *r) {
  int blocks = 0, leading = 0;
  for (int i = 0; i < f->n; i++) {
    int whole = 1;
    for (int l = 0; l < LAYERS; l++) whole &= answer_to(&f->keys[i], l) == FOUND;
    EXPECT(r->arrived[i] == whole);
    leading += whole && leading == i;
    blocks += whole;
  }
  EXPECT(r->blocks == blocks && r->leading == leading && r->missing == f->n - blocks);
}

/* Waits for a layer and checks its blocks. The default stream runs on this thread, so it
 * has waited for the copies when the call returns. */
static int layer_of(struct flight *f, int layer) {
  int status = kvl_ticket_wait_layer(f->ticket, layer, NULL);
  for (int i = 0; status == 1 && i < f->n; i++)
    for (int w = 0; w < WORDS; w++)
      EXPECT(record(layer, f->blocks[i])[w] == word(&f->keys[i], layer, w));
  return status;
}

static void land(struct flight *f, unsigned *seed) {
  kvl_prefetch_result r;
  int status = rand_r(seed) % 4 ? layer_of(f, rand_r(seed) % LAYERS) : 0;
  EXPECT(status >= 0 || status == KVL_ERR_IO);
  while (!(status = kvl_ticket_wait(f->ticket, rand_r(seed) % 2 ? -1 : 200, &r))) {}
  EXPECT(status == 1 ||
         (status == KVL_ERR_IO && strstr(kvl_last_error(), "the store fails")));
  EXPECT(kvl_ticket_cancel(f->ticket) == 0);
  if (status < 0) {
    failed++;
  } else {
    EXPECT(r.state == KVL_PREFETCH_COMPLETED || r.state == KVL_PREFETCH_CANCELLED);
    completed += r.state == KVL_PREFETCH_COMPLETED;
    cancelled += r.state == KVL_PREFETCH_CANCELLED;
    if (r.state == KVL_PREFETCH_COMPLETED) expect_result(f, &r);
    for (int i = 0; i < f->n; i++)
      for (int l = 0; r.arrived[i] && l < LAYERS; l++)
        for (int w = 0; w < WORDS; w++)
          EXPECT(record(l, f->blocks[i])[w] == word(&f->keys[i], l, w));
  }
  kvl_ticket_close(f->ticket);
  f->ticket = NULL;
  for (int i = 0; i < f->n; i++) leave_block(f->blocks[i]);
}

/* Submits a task. Returns 1, or 0 if the queue was full. */
static int take_off(struct flight *f, int task, unsigned *seed) {
  f->n = rand_r(seed) % (BLOCKS_TASK + 1);
  for (int i = 0; i < f->n; i++) {
    f->keys[i] = (kvl_key){(uint64_t)task, (uint64_t)i};
    expect_left(f->blocks[i]);
  }
  kvl_prefetch_task t = {&kv, f->keys, f->blocks, task % 64, f->n, 0, rand_r(seed) % 5 - 1,
                         0};
  int64_t timeout = rand_r(seed) % 3 ? -1 : rand_r(seed) % 50;
  int status = kvl_prefetch_submit(prefetcher, &t, timeout, &f->ticket);
  EXPECT(status >= 0);
  if (status == 0) refused++;
  return status;
}

static void *submitter(void *arg) {
  int me = (int)(intptr_t)arg;
  unsigned seed = (unsigned)me + 1;
  struct flight flights[IN_FLIGHT] = {0};
  for (int i = 0; i < IN_FLIGHT * BLOCKS_TASK; i++) {
    int block = me * (IN_FLIGHT + 1) * BLOCKS_TASK + i;
    flights[i / BLOCKS_TASK].blocks[i % BLOCKS_TASK] = block;
    leave_block(block);
  }
  for (int task; (task = atomic_fetch_add(&next_task, 1)) < tasks;) {
    struct flight *f = &flights[rand_r(&seed) % IN_FLIGHT];
    if (f->ticket) land(f, &seed);
    while (!take_off(f, task, &seed)) {}
    int dice = rand_r(&seed) % 100;
    if (dice < 10) kvl_ticket_cancel(f->ticket);
    else if (dice < 13) kvl_prefetch_cancel(prefetcher, rand_r(&seed) % 64);
    else if (dice < 30)
      kvl_prefetch_reprioritise(prefetcher, rand_r(&seed) % 64, dice % 5 - 1);
  }
  for (int i = 0; i < IN_FLIGHT; i++)
    if (flights[i].ticket) land(&flights[i], &seed);
  return NULL;
}

static void stress(int n) {
  pthread_t threads[THREADS];
  kvl_prefetch_stats stats;
  tasks = n;
  asked = calloc((size_t)n * LAYERS * BLOCKS_TASK, 1);
  for (int i = 0; i < THREADS; i++)
    pthread_create(&threads[i], NULL, submitter, (void *)(intptr_t)i);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  EXPECT(kvl_prefetch_stats_get(prefetcher, &stats) == 0);
  EXPECT(stats.submitted == tasks && stats.pending == 0);
  EXPECT(stats.completed == completed && stats.cancelled == cancelled);
  EXPECT(stats.failed == failed && completed + cancelled + failed == tasks);
  EXPECT(stats.bytes == stats.hits * WORDS * 8 && stats.pending_peak <= 32);
  EXPECT(completed && cancelled && failed && stats.misses);
  printf("%d tasks: %d completed, %d cancelled, %d failed, %d times full\n", tasks, completed,
         cancelled, failed, refused);
}

/* ---- order ---------------------------------------------------------------------------- */

enum { TASKS = 1000, RAISED = 3, DROPPED = 17, OTHERS = 99 };

/* Every 7th task belongs to a request that is raised later, and every 11th of the others
 * to one that is cancelled. */
static int request_of(int task) {
  return task % 7 == 3 ? RAISED : task % 11 ? OTHERS : DROPPED;
}
static int first_priority(int task) { return (int)(mix((uint64_t)task) % 4); }
static int last_priority(int task) {
  return request_of(task) == RAISED ? -5 : first_priority(task);
}

static int by_order(const void *a, const void *b) {
  int x = *(const int *)a, y = *(const int *)b, first = last_priority(x) - last_priority(y);
  return first ? first : x - y;
}

static kvl_ticket *submit_one(const kvl_tensor *layer, int task, int request, int priority) {
  kvl_key key = {(uint64_t)task, 0};
  int32_t block = 0;
  kvl_ticket *ticket;
  kvl_prefetch_task t = {layer, &key, &block, request, 1, 0, priority, 0};
  EXPECT(kvl_prefetch_submit(prefetcher, &t, -1, &ticket) == 1);
  return ticket;
}

/* Checks a full queue: TASKS tasks wait, and no more may. */
static void expect_full(kvl_ticket *waiting, const kvl_tensor *layer) {
  kvl_prefetch_result r = {.n = 77};
  kvl_prefetch_task t = {.memory = layer};
  /* the gate is shut, and with a timeout of 0 neither call waits */
  EXPECT(kvl_prefetch_submit(prefetcher, &t, 0, NULL) == 0);
  EXPECT(kvl_ticket_wait(waiting, 0, &r) == 0);
  int64_t begin = kvl_clock_ns();
  EXPECT(kvl_prefetch_submit(prefetcher, &t, 10000, NULL) == 0);
  EXPECT(kvl_ticket_wait(waiting, 10000, &r) == 0 && r.n == 77);
  EXPECT(kvl_clock_ns() - begin >= 20000000);
  kvl_interrupt(1);
  EXPECT(kvl_prefetch_submit(prefetcher, &t, -1, NULL) == KVL_ERR_INTERRUPTED);
  EXPECT(kvl_ticket_wait(waiting, -1, &r) == KVL_ERR_INTERRUPTED);
  EXPECT(kvl_ticket_wait_layer(waiting, 0, NULL) == KVL_ERR_INTERRUPTED);
  kvl_interrupt(0);
}

/* Checks that a running task that is cancelled stops at its next record. */
static void expect_stop(void) {
  kvl_key keys[BLOCKS_TASK] = {{0}};
  int32_t blocks[BLOCKS_TASK] = {0, 1, 2, 3};
  kvl_prefetch_task t = {&kv, keys, blocks, 5, BLOCKS_TASK, 0, 0, 0};
  kvl_prefetch_result r;
  kvl_prefetch_stats stats;
  kvl_ticket *ticket;
  int before = served;
  atomic_store(&is_gated, 1);
  EXPECT(kvl_prefetch_submit(prefetcher, &t, -1, &ticket) == 1);
  do kvl_prefetch_stats_get(prefetcher, &stats);
  while (stats.pending);
  EXPECT(kvl_prefetch_cancel(prefetcher, 5) == 1 && kvl_ticket_cancel(ticket) == 1);
  EXPECT(kvl_ticket_wait(ticket, 0, &r) == 0);
  atomic_store(&is_gated, 0);
  EXPECT(kvl_ticket_wait(ticket, -1, &r) == 1 && r.state == KVL_PREFETCH_CANCELLED);
  EXPECT(served <= before + 1 && r.missing == served - before);
  EXPECT(kvl_ticket_wait_layer(ticket, 0, NULL) == 0);
  kvl_ticket_close(ticket);
}

static void in_order(void) {
  int expected[TASKS], n = 0;
  kvl_tensor layer;
  kvl_prefetch_result r;
  kvl_prefetch_stats stats;
  EXPECT(kvl_tensor_narrow(&kv, 0, 1, &layer) == 0);
  atomic_store(&is_gated, 1);
  kvl_ticket_close(submit_one(&layer, 0, OTHERS, 0));
  do kvl_prefetch_stats_get(prefetcher, &stats);
  while (stats.pending); /* the first task runs and waits at the gate */
  for (int task = 1; task < TASKS; task++) {
    kvl_ticket_close(submit_one(&layer, task, request_of(task), first_priority(task)));
    if (request_of(task) != DROPPED) expected[n++] = task;
  }
  kvl_ticket *last = submit_one(&layer, TASKS, OTHERS, 1000);
  expect_full(last, &layer);
  EXPECT(kvl_prefetch_cancel(prefetcher, DROPPED) == TASKS - 1 - n);
  EXPECT(kvl_prefetch_reprioritise(prefetcher, RAISED, -5) == (TASKS + 3) / 7);
  atomic_store(&is_gated, 0);
  EXPECT(kvl_ticket_wait(last, -1, &r) == 1);
  kvl_ticket_close(last);
  qsort(expected, (size_t)n, sizeof *expected, by_order);
  EXPECT(served == n + 2 && order[0] == 0 && order[n + 1] == TASKS);
  for (int i = 0; i < n; i++) EXPECT(order[i + 1] == expected[i]);
  kvl_tensor_close(&layer);
  printf("%d tasks in order\n", n + 2);
}

/* ---- faults --------------------------------------------------------------------------- */

/* Runs one task of `n` blocks; if `by_layer`, waits for it layer by layer. */
static int try(int task, int n, int by_layer) {
  struct flight f = {.n = n};
  for (int i = 0; i < n; i++) f.keys[i] = (kvl_key){(uint64_t)task, (uint64_t)i};
  for (int i = 0; i < n; i++) f.blocks[i] = 2 * i + (i == 3); /* some are neighbours */
  kvl_prefetch_task t = {&kv, f.keys, f.blocks, 0, n, 0, 0, 0};
  kvl_prefetch_result r;
  int status = kvl_prefetch_submit(prefetcher, &t, -1, &f.ticket);
  if (status < 0) return status;
  for (int l = 0; by_layer && l < LAYERS && status >= 0; l++) status = layer_of(&f, l);
  if (status >= 0) status = kvl_ticket_wait(f.ticket, -1, &r);
  else kvl_ticket_wait(f.ticket, -1, &r);
  if (status >= 0) expect_result(&f, &r);
  kvl_ticket_close(f.ticket);
  return status;
}

static void faults(void) {
  int faulty = 0, task = 0, is_left = 0;
  kvl_stream *stream; /* has used the memory, too, so that streams are joined */
  EXPECT(kvl_stream_open(kv.device, &stream) == 0);
  kv.storage->used |= (uint64_t)1 << stream->id;
  asked = calloc(2000 * LAYERS * BLOCKS_TASK, 1);
  for (int n = 1; !is_left; n++) {
    int status;
    atomic_store(&calls_until_fault, n);
    do status = try(task++, BLOCKS_TASK, n % 2);
    while (status == KVL_ERR_IO);
    is_left = atomic_exchange(&calls_until_fault, 0) > 0;
    EXPECT(status == KVL_ERR_DEVICE ? !!strstr(kvl_last_error(), "device fails") : is_left);
    faulty += status == KVL_ERR_DEVICE;
    do status = try(task++, BLOCKS_TASK, 1);
    while (status == KVL_ERR_IO);
    EXPECT(status == 1 && task < 2000);
  }
  kvl_stream_close(stream);
  EXPECT(faulty > 20);
  printf("%d faults told\n", faulty);
}

static void open_faults(kvl_device *dev, const kvl_prefetch_options *o) {
  for (int n = 1, status = KVL_ERR_DEVICE; status < 0; n++) {
    atomic_store(&calls_until_fault, n);
    status = kvl_prefetch_open(dev, &store, o, &prefetcher);
    EXPECT(status == KVL_ERR_DEVICE || (status == 0 && n > o->workers * 5));
    EXPECT(store.refs == 1 + (status == 0));
  }
  atomic_store(&calls_until_fault, 0);
}

int main(int argc, char **argv) {
  const char *what = argc > 1 ? argv[1] : "stress";
  int is_order = !strcmp(what, "order");
  kvl_device *dev;
  int64_t shape[6] = {LAYERS, BLOCKS, 2, 1, WORDS, 1};
  /* `order` has one worker */
  kvl_prefetch_options o = {4 * 2 * BYTES_HALF, is_order ? 1 : 4, is_order ? TASKS : 32};
  EXPECT(kvl_device_open("cpu", &dev) == 0);
  EXPECT(kvl_tensor_open(dev, KVL_DTYPE_F32, 6, shape, &kv) == 0);
  store.refs = 1;
  open_faults(dev, &o);
  if (is_order) in_order(), expect_stop();
  else if (!strcmp(what, "faults")) faults();
  else stress(argc > 2 ? atoi(argv[2]) : 1000);
  kvl_prefetch_close(prefetcher);
  EXPECT(store.refs == 1 && kv.storage->refs == 1);
  kvl_tensor_close(&kv);
  kvl_device_close(dev);
  free(asked);
  return 0;
}
