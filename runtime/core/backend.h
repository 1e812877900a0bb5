/* The table of functions that make a device, which every backend fills in. cpu/backend.c is
 * linked in; the CUDA plug-in exports `kvl_backend_cuda` and is opened at run time. */
#ifndef KVL_BACKEND_H
#define KVL_BACKEND_H

#include "ops.h"

/* Backend contexts, queues and marks are opaque to the runtime. When a call fails, `words`
 * (a buffer of KVL_WORDS_MAX bytes) receives the driver's own message. */
enum { KVL_WORDS_MAX = 256 };

enum kvl_copy_kind { KVL_COPY_LOCAL, KVL_COPY_FROM_HOST, KVL_COPY_TO_HOST };

/* If work of two queues could run, that of an URGENT queue goes first (transfers beside
 * compute). */
enum kvl_queue_kind { KVL_QUEUE_DEFAULT, KVL_QUEUE_NORMAL, KVL_QUEUE_URGENT };

typedef struct kvl_backend {
  uint32_t version; /* KVL_BACKEND_VERSION of the build's abi.h */
  const char *name; /* "cpu", "cuda" */
  int host_memory;  /* device pointers can be read by the host */

  int (*count)(void); /* how many devices; < 0: none can be used */
  int (*open)(int index, void **ctx, char *words);
  void (*close)(void *ctx);
  void (*describe)(void *ctx, char *text, size_t size);
  int (*memory)(void *ctx, int64_t *bytes_free, int64_t *bytes_total);

  int (*alloc)(void *ctx, size_t bytes, void **out); /* 256-byte aligned */
  void (*free)(void *ctx, void *p);
  /* The memory is cached, and no work on it is under way: its contents may be lost until it is
   * written again. May be NULL. */
  void (*unused)(void *ctx, void *p, size_t bytes);
  int (*host_alloc)(void *ctx, size_t bytes, int huge_pages, void **out); /* pinned */
  void (*host_free)(void *ctx, void *p, size_t bytes);

  int (*queue_open)(void *ctx, enum kvl_queue_kind kind, void **out);
  void (*queue_close)(void *ctx, void *queue);
  int (*queue_sync)(void *ctx, void *queue);

  int (*mark_open)(void *ctx, void **out);
  void (*mark_close)(void *ctx, void *mark);
  int (*mark_record)(void *ctx, void *mark, void *queue);
  int (*queue_wait)(void *ctx, void *queue, void *mark);
  int (*mark_sync)(void *ctx, void *mark);
  int (*mark_done)(void *ctx, void *mark);
  int (*mark_elapsed_us)(void *ctx, void *from, void *to, double *us);

  /* Copies asynchronously. The host memory of a FROM_HOST copy may be changed only after a
   * queue_sync; if it is pageable, as soon as the call returns, because it is staged. */
  int (*copy)(void *ctx, void *queue, void *dst, const void *src, size_t bytes,
              enum kvl_copy_kind kind);

  /* Bytes of workspace the op wants for these args (0: none), and the launch itself. */
  size_t (*workspace)(void *ctx, enum kvl_op op, const void *args);
  int (*launch)(void *ctx, void *queue, enum kvl_op op, const void *args, size_t size);

  /* Machine code that was compiled at run time: a shared library (CPU) or a cubin. code_open
   * copies the image. code_launch runs its entry kvl_code; the grid is the GPU's. code_hook
   * returns the hook in the form that the op takes (kernels/hook.h); NULL: the code is a
   * kernel. */
  int (*code_open)(void *ctx, const void *image, size_t bytes, void **out);
  void (*code_close)(void *code);
  void *(*code_hook)(void *code);
  int (*code_launch)(void *ctx, void *queue, void *code, const void *args, size_t size,
                     const kvl_grid *grid);
  /* NVRTC's name of the device ("sm_90a"), or the CPU's instruction set. */
  int (*target)(void *ctx, char *text, size_t size);

  /* Between begin and end, work that is submitted to `queue`, and to queues that wait for a
   * mark recorded on it, is recorded and not run. end makes the graph; *out is NULL if the
   * recording failed. launch runs it on any queue. close may be called when no launch of it
   * is under way. */
  int (*graph_begin)(void *ctx, void *queue);
  int (*graph_end)(void *ctx, void *queue, void **out);
  int (*graph_launch)(void *ctx, void *graph, void *queue);
  void (*graph_close)(void *ctx, void *graph);

  /* Appends to the library's own text what the backend was built from, and with which BLAS. */
  const char *(*build)(void);
  const char *(*last_error)(void); /* the driver's words for this thread's last failure */
} kvl_backend;

#endif
