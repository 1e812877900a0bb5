/* Marks and graphs of the CUDA backend.
 *
 * A CUDA event cannot cross the border of a capture. During a capture, a wait for an event
 * from outside ruins the capture; after it, a wait for an event from inside fails. A mark
 * can cross the border, because a caller that waits for it need not know where it was last
 * recorded. It has two events, one for each side:
 *   a wait inside for a mark of this recording is an edge of the graph;
 *   a wait inside for any other mark delays every replay until that mark is complete;
 *   a wait outside for a mark of a graph waits for the end of the graph's last replay.
 *
 * Captures are relaxed: meanwhile the allocator may call cudaMalloc, and begin and end may
 * be called by two threads. In a replay the kernels keep the priority of the queue that they
 * were recorded on. All memory that they write to, including workspaces (cuBLAS's, too),
 * comes with their arguments and belongs to the graph, so these queues may run other ops
 * beside a replay. A queue that took part stays open until the graph is closed, because
 * recorded cuBLAS kernels may read memory that belongs to the queue's handle. */
#include <stdlib.h>

#include "cuda/backend.cuh"

namespace kvl_cuda {

struct mark {
  cudaEvent_t event; /* outside of recordings, with timing */
  cudaEvent_t edge;  /* in the recording of `in`; NULL until first needed */
  graph *in;         /* the graph whose recording has the last record; NULL: it is outside */
  int refs;          /* the handle, and graphs whose replays wait for it */
};

struct graph {
  cudaGraphExec_t exec;
  cudaEvent_t replayed; /* the end of the last replay */
  mark **before;        /* replays start after these */
  int before_count, before_room;
  int refs; /* the handle, and marks recorded in it */
};

bool is_recorded(const device_ctx *d, const kvl_cuda_queue *q) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (!d->recording) return false;
  return kvl__cuda_check(cudaStreamIsCapturing(q->stream, &capture)) == KVL_OK &&
         capture != cudaStreamCaptureStatusNone;
}

namespace {

cudaStream_t stream_of(const void *queue) { return ((const kvl_cuda_queue *)queue)->stream; }

void graph_unref(graph *g) {
  if (!g || --g->refs > 0) return;
  if (g->replayed) kvl__cuda_check(cudaEventDestroy(g->replayed));
  delete g;
}

void mark_unref(mark *m) {
  if (--m->refs > 0) return;
  if (m->event) kvl__cuda_check(cudaEventDestroy(m->event));
  if (m->edge) kvl__cuda_check(cudaEventDestroy(m->edge));
  graph_unref(m->in);
  delete m;
}

int event_done(cudaEvent_t event) {
  cudaError_t error = cudaEventQuery(event);
  if (error == cudaErrorNotReady) {
    cudaGetLastError(); /* not a failure: clear it, or the next check would find it */
    return 0;
  }
  int status = kvl__cuda_check(error);
  return status < 0 ? status : 1;
}

/* Makes a stream outside of recordings wait for both records that a mark may have. If there
 * are two, the one outside is older; a wait for a record that is complete costs nothing. */
int wait_outside(cudaStream_t stream, const mark *m) {
  int status = kvl__cuda_check(cudaStreamWaitEvent(stream, m->event, 0));
  if (status == KVL_OK && m->in)
    status = kvl__cuda_check(cudaStreamWaitEvent(stream, m->in->replayed, 0));
  return status;
}

int replay_after(graph *g, mark *m) {
  for (int i = 0; i < g->before_count; i++)
    if (g->before[i] == m) return KVL_OK;
  if (g->before_count == g->before_room) {
    int room = g->before_room ? 2 * g->before_room : 16;
    mark **more = (mark **)realloc(g->before, (size_t)room * sizeof *more);
    if (!more) return fail(KVL_ERR_NO_MEMORY, "out of host memory");
    g->before = more;
    g->before_room = room;
  }
  m->refs++;
  g->before[g->before_count++] = m;
  return KVL_OK;
}

/* Reports what the driver's error means here, followed by the driver's message. */
int recording_failed(cudaError_t error) {
  const char *why = "";
  if (error == cudaErrorStreamCaptureUnjoined)
    why = "a stream took part, and nothing waited for it before the end: ";
  if (error == cudaErrorStreamCaptureInvalidated)
    why = "something before the end failed or cannot be recorded: ";
  return fail(KVL_ERR_DEVICE, "%s%s: %s", why, cudaGetErrorName(error),
              cudaGetErrorString(error));
}

}  // namespace

/* ---- marks ----------------------------------------------------------------------- */

int mark_open(void *ctx, void **out) {
  int status = enter(ctx);
  if (status < 0) return status;
  mark *m = new (std::nothrow) mark();
  if (!m) return fail(KVL_ERR_NO_MEMORY, "out of host memory");
  m->refs = 1;
  status = kvl__cuda_check(cudaEventCreate(&m->event));
  if (status < 0) mark_unref(m);
  else *out = m;
  return status;
}

void mark_close(void *ctx, void *handle) {
  if (enter(ctx) == KVL_OK) mark_unref((mark *)handle);
}

int mark_record(void *ctx, void *handle, void *queue) {
  mark *m = (mark *)handle;
  int status = enter(ctx);
  if (status < 0) return status;
  const device_ctx *d = (const device_ctx *)ctx;
  graph *in = d->recording;
  if (!is_recorded(d, (const kvl_cuda_queue *)queue)) in = NULL;
  if (in && !m->edge)
    status = kvl__cuda_check(cudaEventCreateWithFlags(&m->edge, cudaEventDisableTiming));
  if (status == KVL_OK)
    status = kvl__cuda_check(cudaEventRecord(in ? m->edge : m->event, stream_of(queue)));
  if (status < 0) return status;
  if (in) in->refs++;
  graph_unref(m->in);
  m->in = in;
  return KVL_OK;
}

int queue_wait(void *ctx, void *queue, void *handle) {
  const device_ctx *d = (const device_ctx *)ctx;
  mark *m = (mark *)handle;
  int status = enter(ctx);
  if (status < 0) return status;
  if (m->in && m->in == d->recording) /* by this wait, a queue outside joins the recording */
    return kvl__cuda_check(cudaStreamWaitEvent(stream_of(queue), m->edge, 0));
  if (is_recorded(d, (const kvl_cuda_queue *)queue)) return replay_after(d->recording, m);
  return wait_outside(stream_of(queue), m);
}

int mark_sync(void *ctx, void *handle) {
  const mark *m = (const mark *)handle;
  int status = enter(ctx);
  if (status < 0) return status;
  if (m->in && m->in == ((const device_ctx *)ctx)->recording)
    return fail(KVL_ERR_INVALID, "a graph is being recorded, and the event is part of it");
  status = kvl__cuda_check(cudaEventSynchronize(m->event));
  if (status == KVL_OK && m->in)
    status = kvl__cuda_check(cudaEventSynchronize(m->in->replayed));
  return status;
}

int mark_done(void *ctx, void *handle) {
  const mark *m = (const mark *)handle;
  int status = enter(ctx);
  if (status < 0) return status;
  if (m->in && m->in == ((const device_ctx *)ctx)->recording)
    return fail(KVL_ERR_INVALID, "a graph is being recorded, and the event is part of it");
  status = event_done(m->event);
  return status == 1 && m->in ? event_done(m->in->replayed) : status;
}

int mark_elapsed_us(void *ctx, void *from, void *to, double *us) {
  const mark *first = (const mark *)from, *last = (const mark *)to;
  float ms = 0;
  int status = enter(ctx);
  if (status < 0) return status;
  if (first->in || last->in)
    return fail(KVL_ERR_INVALID, "an event was last recorded in a graph: it has no time");
  cudaError_t error = cudaEventElapsedTime(&ms, first->event, last->event);
  if (error == cudaErrorInvalidResourceHandle || error == cudaErrorNotReady) {
    cudaGetLastError();
    return fail(KVL_ERR_INVALID, "an event is not recorded or not complete: %s",
                cudaGetErrorString(error));
  }
  status = kvl__cuda_check(error);
  if (status == KVL_OK) *us = ms * 1e3;
  return status;
}

/* ---- graphs ---------------------------------------------------------------------- */

int graph_begin(void *ctx, void *queue) {
  device_ctx *d = (device_ctx *)ctx;
  if (d->recording) return fail(KVL_ERR_INVALID, "a graph is being recorded already");
  int status = enter(ctx);
  /* make the handle before the capture, so that none of that is captured */
  if (status == KVL_OK) status = kvl__cuda_blas((kvl_cuda_queue *)queue);
  if (status < 0) return status;
  graph *g = new (std::nothrow) graph();
  if (!g) return fail(KVL_ERR_NO_MEMORY, "out of host memory");
  g->refs = 1;
  status = kvl__cuda_check(cudaEventCreateWithFlags(&g->replayed, cudaEventDisableTiming));
  if (status == KVL_OK)
    status = kvl__cuda_check(
        cudaStreamBeginCapture(stream_of(queue), cudaStreamCaptureModeRelaxed));
  if (status < 0) graph_unref(g);
  else d->recording = g;
  return status;
}

int graph_end(void *ctx, void *queue, void **out) {
  device_ctx *d = (device_ctx *)ctx;
  graph *g = d->recording;
  *out = NULL;
  if (!g) return fail(KVL_ERR_INVALID, "no graph is being recorded");
  int status = enter(ctx);
  if (status < 0) return status;
  d->recording = NULL;
  cudaGraph_t captured = NULL;
  /* this ends the capture on every stream of the recording, even after a failure */
  cudaError_t error = cudaStreamEndCapture(stream_of(queue), &captured);
  if (error == cudaSuccess)
    error = cudaGraphInstantiate(&g->exec, captured, cudaGraphInstantiateFlagUseNodePriority);
  if (captured) cudaGraphDestroy(captured);
  /* upload the graph now, or the first replay would pay for that */
  if (error == cudaSuccess) error = cudaGraphUpload(g->exec, stream_of(queue));
  if (error != cudaSuccess) {
    cudaGetLastError();
    graph_close(ctx, g);
    return recording_failed(error);
  }
  *out = g;
  return KVL_OK;
}

int graph_launch(void *ctx, void *handle, void *queue) {
  graph *g = (graph *)handle;
  int status = enter(ctx);
  if (status < 0) return status;
  if (is_recorded((const device_ctx *)ctx, (const kvl_cuda_queue *)queue))
    return fail(KVL_ERR_INVALID, "a graph is being recorded");
  for (int i = 0; i < g->before_count && status == KVL_OK; i++)
    status = wait_outside(stream_of(queue), g->before[i]);
  if (status == KVL_OK) status = kvl__cuda_check(cudaGraphLaunch(g->exec, stream_of(queue)));
  if (status == KVL_OK)
    status = kvl__cuda_check(cudaEventRecord(g->replayed, stream_of(queue)));
  return status;
}

void graph_close(void *ctx, void *handle) {
  graph *g = (graph *)handle;
  if (!g || enter(ctx) < 0) return;
  if (g->exec) kvl__cuda_check(cudaGraphExecDestroy(g->exec));
  for (int i = 0; i < g->before_count; i++) mark_unref(g->before[i]);
  free(g->before);
  g->before = NULL;
  g->before_count = 0;
  graph_unref(g);
}

}  // namespace kvl_cuda
