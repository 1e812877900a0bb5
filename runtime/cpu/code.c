/* Kernels that were compiled at run time, as shared libraries. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memfd_create */
#endif
#include <dlfcn.h>
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cpu/backend.h"
#include "cpu/queue.h"

struct code {
  void *library;
  int file; /* stays open: dlopen knows libraries by name, and its number is in the name */
  kvl_kernel *run; /* NULL: it is a hook */
  void *hook;      /* NULL: it is a kernel */
};

static _Thread_local char words[KVL_WORDS_MAX];

const char *kvl__cpu_code_error(void) {
  static _Thread_local char told[KVL_WORDS_MAX];
  memcpy(told, words, sizeof told);
  words[0] = 0; /* it says nothing about a later failure */
  return told;
}

static int failed(const char *what, const char *why) {
  snprintf(words, sizeof words, "%s: %s", what, why);
  return KVL_ERR_DEVICE;
}

static int write_all(int file, const char *bytes, size_t size) {
  while (size > 0) {
    ssize_t n = write(file, bytes, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return 0;
    bytes += n;
    size -= (size_t)n;
  }
  return 1;
}

/* The image becomes a file in memory: what was checked is what is loaded, and no folder has
 * to be writable or allow programs. */
int kvl__cpu_code_open(void *ctx, const void *image, size_t bytes, void **out) {
  (void)ctx;
  int file = memfd_create("kvlab_kernel", MFD_CLOEXEC);
  if (file < 0) return failed("memfd_create", strerror(errno));
  char path[32];
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  void *library = NULL;
  if (!write_all(file, image, bytes)) {
    failed("writing the image", strerror(errno));
  } else {
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) failed("loading the image", dlerror());
  }
  if (!library) {
    close(file);
    return KVL_ERR_DEVICE;
  }
  struct code *code = malloc(sizeof *code);
  kvl_kernel *run = (kvl_kernel *)dlsym(library, "kvl_code");
  void *hook = run ? NULL : dlsym(library, "kvl_code_hook");
  if (!code || (!run && !hook)) {
    int status = code ? failed("loading the image",
                               "it has no function kvl_code or kvl_code_hook")
                      : KVL_ERR_NO_MEMORY;
    free(code);
    dlclose(library);
    close(file);
    return status;
  }
  *code = (struct code){library, file, run, hook};
  *out = code;
  return KVL_OK;
}

void kvl__cpu_code_close(void *handle) {
  struct code *code = handle;
  dlclose(code->library);
  close(code->file);
  free(code);
}

void *kvl__cpu_code_hook(void *handle) { return ((struct code *)handle)->hook; }

int kvl__cpu_code_launch(void *ctx, void *queue, void *handle, const void *args, size_t size,
                         const kvl_grid *grid) {
  (void)ctx, (void)grid;
  const struct code *code = handle;
  return kvl__cpu_submit(queue, code->run, args, size);
}
