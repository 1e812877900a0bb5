/* What the files of the CUDA backend share: the context, failures, and the functions of the
 * table that backend.cu fills in. */
#ifndef KVL_CUDA_BACKEND_CUH
#define KVL_CUDA_BACKEND_CUH

#include <atomic>
#include <new>

#include "core/backend.h"
#include "cuda/common.cuh"

namespace kvl_cuda {

struct graph;
struct huge_block;

struct device_ctx {
  int index, sm_count, shared_optin;
  int capability;                 /* 90 for compute capability 9.0 */
  int code;                       /* the architecture of the code that runs */
  int registered_same;            /* registered memory has one address on host and device */
  huge_block *huge_blocks;        /* pinned memory in huge pages, see memory.cu */
  std::atomic<graph *> recording; /* or NULL; prefetch workers read it, too */
  char text[256];
};

/* Reports an error of an allocation: KVL_ERR_NO_MEMORY, with a message, if memory ran out,
 * else what kvl__cuda_check returns. */
int no_memory(cudaError_t error, const char *what, size_t bytes);
/* Makes the context's device the current one of this thread. */
int enter(const void *ctx);

/* build.cu */
const char *build();

/* memory.cu */
int device_alloc(void *ctx, size_t bytes, void **out);
void device_free(void *ctx, void *p);
int host_alloc(void *ctx, size_t bytes, int huge_pages, void **out);
void host_free(void *ctx, void *p, size_t bytes);
int copy(void *ctx, void *queue, void *dst, const void *src, size_t bytes,
         enum kvl_copy_kind kind);

/* code.cu */
int code_open(void *ctx, const void *image, size_t bytes, void **out);
void code_close(void *code);
void *code_hook(void *code);
int code_launch(void *ctx, void *queue, void *code, const void *args, size_t size,
                const kvl_grid *grid);
int target(void *ctx, char *text, size_t size);

/* graph.cu */
/* Whether the work that is now submitted to q is recorded in a graph. */
bool is_recorded(const device_ctx *d, const kvl_cuda_queue *q);
int mark_open(void *ctx, void **out);
void mark_close(void *ctx, void *handle);
int mark_record(void *ctx, void *handle, void *queue);
int queue_wait(void *ctx, void *queue, void *handle);
int mark_sync(void *ctx, void *handle);
int mark_done(void *ctx, void *handle);
int mark_elapsed_us(void *ctx, void *from, void *to, double *us);
int graph_begin(void *ctx, void *queue);
int graph_end(void *ctx, void *queue, void **out);
int graph_launch(void *ctx, void *handle, void *queue);
void graph_close(void *ctx, void *handle);

}  // namespace kvl_cuda

#endif
