/* The CUDA backend implements the table of runtime/core/backend.h with the CUDA runtime. This
 * file has the device, queues and ops; memory.cu and graph.cu have the rest.
 *
 * A queue is a non-blocking stream with a cuBLAS handle, which is made when it is first
 * needed. Only the calls whose name says so wait for the device, and every launch can be
 * recorded in a graph.
 *
 * After an asynchronous fault of a kernel, the next call that checks returns KVL_ERR_DEVICE
 * with the driver's message. The process's CUDA context is then lost. */
#include <cublas_v2.h>
#include <stdarg.h>
#include <stdio.h>

#include "abi.h"
#include "cuda/launch.cuh"
#include "cuda/backend.cuh"

using namespace kvl_cuda;

enum { CAPABILITY_MIN = 80 };

static thread_local char words_last[KVL_WORDS_MAX];

int kvl_cuda::fail(int status, const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(words_last, sizeof words_last, format, list);
  va_end(list);
  return status;
}

/* Each thread has its own current device; setting it anew costs tens of nanoseconds. */
int kvl_cuda::enter(const void *ctx) {
  return kvl__cuda_check(cudaSetDevice(((const device_ctx *)ctx)->index));
}

namespace {

const char *last_error(void) { return words_last; }

/* ---- the device ------------------------------------------------------------------ */

int device_count(void) {
  int n = 0;
  int status = kvl__cuda_check(cudaGetDeviceCount(&n));
  if (status < 0) return status;
  return n > 0 ? n : fail(KVL_ERR_DEVICE, "the driver lists no CUDA device");
}

int device_describe(device_ctx *d) {
  cudaDeviceProp p;
  int driver = 0, runtime = 0;
  cudaError_t error = cudaGetDeviceProperties(&p, d->index);
  if (error == cudaSuccess) error = cudaDriverGetVersion(&driver);
  if (error == cudaSuccess) error = cudaRuntimeGetVersion(&runtime);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&d->registered_same,
                                   cudaDevAttrCanUseHostPointerForRegisteredMem, d->index);
  if (error != cudaSuccess) return kvl__cuda_check(error);
  if (p.major * 10 + p.minor < CAPABILITY_MIN)
    return fail(KVL_ERR_UNSUPPORTED, "%s has compute capability %d.%d, 8.0 is needed", p.name,
                p.major, p.minor);
  error = cudaSetDevice(d->index);
  if (error == cudaSuccess) error = cudaFree(NULL); /* makes the context now */
  if (error != cudaSuccess) return kvl__cuda_check(error);
  d->code = kvl::code_for(d->index);
  if (d->code == 0) {
    cudaGetLastError();
    return fail(KVL_ERR_UNSUPPORTED,
                "%s has compute capability %d.%d, and no code for it was built: kvlab build "
                "--cuda=on --cuda-arch=%d%d%s (this is %s)",
                p.name, p.major, p.minor, p.major, p.minor, p.major == 9 ? "a" : "", build());
  }
  d->capability = p.major * 10 + p.minor;
  d->sm_count = p.multiProcessorCount;
  d->shared_optin = (int)p.sharedMemPerBlockOptin;
  const int of_code = kvl::block_bytes_of(d->code, d->shared_optin);
  if (d->shared_optin > of_code) d->shared_optin = of_code;
  snprintf(d->text, sizeof d->text, "%.128s, %d SMs, %.1f GiB, driver %d.%d, runtime %d.%d",
           p.name, p.multiProcessorCount, (double)p.totalGlobalMem / (1 << 30), driver / 1000,
           driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  return KVL_OK;
}

int device_open(int index, void **ctx, char *words) {
  device_ctx *d = new (std::nothrow) device_ctx();
  int status = d ? device_count() : fail(KVL_ERR_NO_MEMORY, "out of host memory");
  if (status >= 0 && (index < 0 || index >= status))
    status = fail(KVL_ERR_DEVICE, "there is no cuda:%d, the driver lists %d", index, status);
  if (status >= 0) {
    d->index = index;
    status = device_describe(d);
  }
  if (status < 0) {
    delete d;
    if (words) snprintf(words, KVL_WORDS_MAX, "%s", words_last);
    return status;
  }
  *ctx = d;
  return KVL_OK;
}

void device_close(void *ctx) { delete (device_ctx *)ctx; }

void device_text(void *ctx, char *text, size_t size) {
  snprintf(text, size, "%s", ((device_ctx *)ctx)->text);
}

int device_memory(void *ctx, int64_t *bytes_free, int64_t *bytes_total) {
  size_t f, t;
  int status = enter(ctx);
  if (status == KVL_OK) status = kvl__cuda_check(cudaMemGetInfo(&f, &t));
  if (status == KVL_OK) {
    *bytes_free = (int64_t)f;
    *bytes_total = (int64_t)t;
  }
  return status;
}

/* ---- queues ---------------------------------------------------------------------- */

void queue_close(void *ctx, void *queue) {
  kvl_cuda_queue *q = (kvl_cuda_queue *)queue;
  if (!q || enter(ctx) < 0) return;
  if (q->blas) cublasDestroy(q->blas);
  if (q->stream) cudaStreamDestroy(q->stream);
  cudaGetLastError();
  delete q;
}

/* The default queue gets a stream of its own like every other queue, because CUDA's own
 * default stream serialises with all other streams. */
int queue_open(void *ctx, enum kvl_queue_kind kind, void **out) {
  const device_ctx *d = (const device_ctx *)ctx;
  int status = enter(ctx);
  if (status < 0) return status;
  kvl_cuda_queue *q = new (std::nothrow) kvl_cuda_queue();
  if (!q) return fail(KVL_ERR_NO_MEMORY, "out of host memory");
  q->sm_count = d->sm_count;
  q->shared_optin = d->shared_optin;
  q->code = d->code;
  q->device = d->index;
  int least, greatest; /* the greatest priority is the lowest number */
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (error == cudaSuccess)
    error = cudaStreamCreateWithPriority(&q->stream, cudaStreamNonBlocking,
                                         kind == KVL_QUEUE_URGENT ? greatest : least);
  if (error != cudaSuccess) {
    status = kvl__cuda_check(error);
    queue_close(ctx, q);
    return status;
  }
  *out = q;
  return KVL_OK;
}

int queue_sync(void *ctx, void *queue) {
  int status = enter(ctx);
  if (status < 0) return status;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (is_recorded((const device_ctx *)ctx, q)) /* to wait would ruin the recording */
    return fail(KVL_ERR_INVALID, "a graph is being recorded, and the stream takes part");
  return kvl__cuda_check(cudaStreamSynchronize(q->stream));
}

/* ---- ops ------------------------------------------------------------------------- */

}  // namespace

/* An op that needs no workspace has no such function. */
#define X(op)                      \
  KVL_CUDA_KERNEL(op);             \
  extern "C" __attribute__((weak)) \
  size_t kvl_cuda_##op##_workspace(const void *args, int sm_count);
KVL_OPS(X)
#undef X

namespace {

typedef size_t workspace_of(const void *args, int sm_count);

kvl_kernel *const launchers[] = {
#define X(op) kvl_cuda_##op,
    KVL_OPS(X)
#undef X
};
workspace_of *const workspaces[] = {
#define X(op) kvl_cuda_##op##_workspace,
    KVL_OPS(X)
#undef X
};

size_t workspace(void *ctx, enum kvl_op op, const void *args) {
  if ((unsigned)op >= KVL_OP_COUNT || !workspaces[op]) return 0;
  if (enter(ctx) < 0) return 0; /* and then launch fails */
  return workspaces[op](args, ((const device_ctx *)ctx)->sm_count);
}

int launch(void *ctx, void *queue, enum kvl_op op, const void *args, size_t size) {
  (void)size; /* args are read before the call returns */
  int status = enter(ctx);
  if (status < 0) return status;
  if ((unsigned)op >= KVL_OP_COUNT) return fail(KVL_ERR_INVALID, "there is no op %d", op);
  words_last[0] = 0;
  status = launchers[op](args, queue);
  if (status == KVL_ERR_UNSUPPORTED && !words_last[0])
    fail(status, "the CUDA kernel does not take this dtype");
  return status;
}

}  // namespace

int kvl__cuda_check(cudaError_t error) {
  if (error == cudaSuccess) return KVL_OK;
  cudaGetLastError(); /* clears the error, unless it is a fault of the context */
  return fail(KVL_ERR_DEVICE, "%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
}

int kvl__cuda_launched(void) { return kvl__cuda_check(cudaGetLastError()); }

int kvl__cuda_blas_check(int status, const char *what) {
  if (status == CUBLAS_STATUS_SUCCESS) return KVL_OK;
  return fail(status == CUBLAS_STATUS_ALLOC_FAILED ? KVL_ERR_NO_MEMORY : KVL_ERR_DEVICE,
              "%s: %s", what, cublasGetStatusString((cublasStatus_t)status));
}

/* matmul.cu sets the handle's workspace at every call: it comes from the allocator, and
 * during a recording it belongs to the graph. A queue that joined a recording may make its
 * handle during the capture. That allocates memory, which relaxed captures allow. */
int kvl__cuda_blas(kvl_cuda_queue *q) {
  if (q->blas) return KVL_OK;
  cublasHandle_t blas = NULL;
  int status = kvl__cuda_blas_check(cublasCreate(&blas), "cublasCreate");
  if (status == KVL_OK)
    status = kvl__cuda_blas_check(cublasSetStream(blas, q->stream), "cublasSetStream");
  if (status == KVL_OK) /* f32 stays f32, and partial sums of f16 and bf16 are added in f32 */
    status = kvl__cuda_blas_check(
        cublasSetMathMode(blas,
                          (cublasMath_t)(CUBLAS_DEFAULT_MATH |
                                         CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
        "cublasSetMathMode");
  if (status < 0) {
    if (blas) cublasDestroy(blas);
    return status;
  }
  q->blas = blas;
  return KVL_OK;
}

extern "C" {
extern const kvl_backend kvl_backend_cuda;
__attribute__((visibility("default"))) const kvl_backend kvl_backend_cuda = {
    KVL_BACKEND_VERSION,
    "cuda",
    0,
    device_count,
    device_open,
    device_close,
    device_text,
    device_memory,
    device_alloc,
    device_free,
    NULL, /* unused: the driver takes nothing back by itself */
    host_alloc,
    host_free,
    queue_open,
    queue_close,
    queue_sync,
    mark_open,
    mark_close,
    mark_record,
    queue_wait,
    mark_sync,
    mark_done,
    mark_elapsed_us,
    copy,
    workspace,
    launch,
    code_open,
    code_close,
    code_hook,
    code_launch,
    target,
    graph_begin,
    graph_end,
    graph_launch,
    graph_close,
    build,
    last_error,
};
}
