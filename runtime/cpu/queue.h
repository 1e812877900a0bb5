/* Queues, marks and graphs of the CPU device, as runtime/core/backend.h describes them. */
#ifndef KVL_CPU_QUEUE_H
#define KVL_CPU_QUEUE_H

#include "cpu/link.h"

/* cpu/mark.c */
int kvl__cpu_mark_open(void *ctx, void **out);
void kvl__cpu_mark_close(void *ctx, void *mark);
int kvl__cpu_mark_sync(void *ctx, void *mark);
int kvl__cpu_mark_done(void *ctx, void *mark);
int kvl__cpu_mark_elapsed_us(void *ctx, void *from, void *to, double *us);

struct kvl__mark;
/* Adds a reference, for a job or a graph, and `records` (0 or 1) new records. Returns the
 * number of the newest record. */
int64_t kvl__mark_ref(struct kvl__mark *mark, int records);
void kvl__mark_unref(struct kvl__mark *mark);
/* Notes that the queue has reached the record, at the time `at`. */
void kvl__mark_complete(struct kvl__mark *mark, int64_t record, struct kvl__time at);
/* Waits for the record. Returns the time of the newest complete one. */
struct kvl__time kvl__mark_wait(struct kvl__mark *mark, int64_t record);

/* cpu/queue.c */
int kvl__cpu_queue_open(void *ctx, enum kvl_queue_kind kind, void **out);
void kvl__cpu_queue_close(void *ctx, void *queue);
int kvl__cpu_queue_sync(void *ctx, void *queue);
int kvl__cpu_mark_record(void *ctx, void *mark, void *queue);
int kvl__cpu_queue_wait(void *ctx, void *queue, void *mark);
/* Makes the queue run a kernel; the args are copied. */
int kvl__cpu_submit(void *queue, kvl_kernel *run, const void *args, size_t size);
int kvl__cpu_copy(void *ctx, void *queue, void *dst, const void *src, size_t bytes,
                  enum kvl_copy_kind kind);

/* cpu/code.c */
int kvl__cpu_code_open(void *ctx, const void *image, size_t bytes, void **out);
void kvl__cpu_code_close(void *code);
void *kvl__cpu_code_hook(void *code);
int kvl__cpu_code_launch(void *ctx, void *queue, void *code, const void *args, size_t size,
                         const kvl_grid *grid);
/* Why the last kvl__cpu_code_open of this thread failed. */
const char *kvl__cpu_code_error(void);

int kvl__cpu_graph_begin(void *ctx, void *queue);
int kvl__cpu_graph_end(void *ctx, void *queue, void **out);
int kvl__cpu_graph_launch(void *ctx, void *graph, void *queue);
void kvl__cpu_graph_close(void *ctx, void *graph);

#endif
