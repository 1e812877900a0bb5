/* Memory of the CUDA backend: on the device, pinned on the host, and copies between them.
 *
 * Pinned memory has the same address on the host and in kernels (unified addressing). Pinned
 * memory in huge pages is our own mapping, which we register with the driver, because the
 * driver allocates 4 KiB pages, of which a host tier has tens of millions. */
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda/backend.cuh"

namespace kvl_cuda {

int no_memory(cudaError_t error, const char *what, size_t bytes) {
  if (error != cudaErrorMemoryAllocation) return kvl__cuda_check(error);
  cudaGetLastError();
  return fail(KVL_ERR_NO_MEMORY, "no room for %zu bytes of %s memory: %s", bytes, what,
              cudaGetErrorString(error));
}

int device_alloc(void *ctx, size_t bytes, void **out) {
  int status = enter(ctx);
  if (status < 0) return status;
  void *p = NULL;
  cudaError_t error = cudaMalloc(&p, bytes ? bytes : 1);
  if (error != cudaSuccess) return no_memory(error, "device", bytes);
  *out = p;
  return KVL_OK;
}

void device_free(void *ctx, void *p) {
  if (enter(ctx) == KVL_OK) kvl__cuda_check(cudaFree(p));
}

/* ---- pinned memory in huge pages --------------------------------------------------- */

struct huge_block {
  void *p;
  size_t bytes; /* of the mapping */
  huge_block *next;
};

namespace {

constexpr size_t HUGE_PAGE = 2 << 20, PAGE = 4096;
constexpr int TOUCH_THREADS = 8;

struct stretch {
  char *p;
  size_t bytes;
};

void *touch(void *arg) {
  const stretch *s = (const stretch *)arg;
  for (size_t i = 0; i < s->bytes; i += PAGE) *(volatile char *)(s->p + i) = 0;
  return NULL;
}

/* Touches every page. The system zeroes a page at its first touch, at a few GB/s per thread,
 * so several threads share the work. They inherit the caller's CPUs, so numactl still
 * decides which node the pages are on. */
void touch_all(char *p, size_t bytes) {
  size_t pages = bytes / HUGE_PAGE;
  size_t each = (pages + TOUCH_THREADS - 1) / TOUCH_THREADS * HUGE_PAGE;
  pthread_t threads[TOUCH_THREADS];
  stretch parts[TOUCH_THREADS];
  bool started[TOUCH_THREADS] = {};
  for (int i = 0; i < TOUCH_THREADS && i * each < bytes; i++) {
    size_t left = bytes - i * each;
    parts[i] = {p + i * each, left < each ? left : each};
    started[i] = left > each && pthread_create(&threads[i], NULL, touch, &parts[i]) == 0;
    if (!started[i]) touch(&parts[i]);
  }
  for (int i = 0; i < TOUCH_THREADS; i++)
    if (started[i]) pthread_join(threads[i], NULL);
}

/* Maps huge pages if the system has them, else small ones. `bytes` is a multiple of
 * HUGE_PAGE. Returns NULL if there is no memory. */
char *map_huge(size_t bytes) {
  /* to touch more memory than there is would not fail: the process would be killed */
  if (bytes / PAGE > (size_t)sysconf(_SC_PHYS_PAGES) * ((size_t)sysconf(_SC_PAGESIZE) / PAGE))
    return NULL;
  void *mapping = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return NULL;
  size_t before = (HUGE_PAGE - (uintptr_t)mapping % HUGE_PAGE) % HUGE_PAGE;
  char *p = (char *)mapping + before;
  if (before) munmap(mapping, before);
  munmap(p + bytes, HUGE_PAGE - before);
  madvise(p, bytes, MADV_HUGEPAGE);
  /* if a child process shared the pages, the next write here would move them to other memory,
   * and the device would go on with the old */
  madvise(p, bytes, MADV_DONTFORK);
  touch_all(p, bytes);
  return p;
}

/* Returns NULL if there is no memory, or if the driver does not accept it. */
void *huge_alloc(device_ctx *d, size_t bytes) {
  if (!d->registered_same) return NULL;
  huge_block *block = new (std::nothrow) huge_block();
  if (!block) return NULL;
  block->bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  block->p = map_huge(block->bytes);
  if (block->p &&
      cudaHostRegister(block->p, block->bytes,
                       cudaHostRegisterPortable | cudaHostRegisterMapped) != cudaSuccess) {
    cudaGetLastError();
    munmap(block->p, block->bytes);
    block->p = NULL;
  }
  if (!block->p) {
    delete block;
    return NULL;
  }
  block->next = d->huge_blocks;
  d->huge_blocks = block;
  return block->p;
}

}  // namespace

int host_alloc(void *ctx, size_t bytes, int huge_pages, void **out) {
  int status = enter(ctx);
  if (status < 0) return status;
  if (bytes == 0) bytes = 1;
  void *p = huge_pages ? huge_alloc((device_ctx *)ctx, bytes) : NULL;
  cudaError_t error = p ? cudaSuccess : cudaMallocHost(&p, bytes);
  if (error != cudaSuccess) return no_memory(error, "pinned host", bytes);
  *out = p;
  return KVL_OK;
}

void host_free(void *ctx, void *p, size_t bytes) {
  (void)bytes; /* a mapping may be longer; its huge_block has the length */
  if (enter(ctx) < 0) return;
  for (huge_block **at = &((device_ctx *)ctx)->huge_blocks; *at; at = &(*at)->next) {
    huge_block *block = *at;
    if (block->p != p) continue;
    kvl__cuda_check(cudaHostUnregister(p));
    munmap(p, block->bytes);
    *at = block->next;
    delete block;
    return;
  }
  kvl__cuda_check(cudaFreeHost(p));
}

/* ---- copies ---------------------------------------------------------------------- */

/* Finds out whether the device's side of a copy is pinned host memory. */
static int is_pinned(const void *p, bool *out) {
  cudaPointerAttributes attributes;
  int status = kvl__cuda_check(cudaPointerGetAttributes(&attributes, p));
  if (status == KVL_OK) *out = attributes.type == cudaMemoryTypeHost;
  return status;
}

/* The driver knows both sides of a LOCAL copy, so it can find out where they are. It does
 * not know pageable memory, and if the device can access that, too, the driver might not
 * stage it. So a copy that may have pageable memory on one side names its direction. */
int copy(void *ctx, void *queue, void *dst, const void *src, size_t bytes,
         enum kvl_copy_kind kind) {
  int status = enter(ctx);
  if (status < 0 || bytes == 0) return status;
  cudaMemcpyKind way = cudaMemcpyDefault;
  if (kind != KVL_COPY_LOCAL) {
    bool pinned = false, in = kind == KVL_COPY_FROM_HOST;
    status = is_pinned(in ? dst : src, &pinned);
    way = pinned ? cudaMemcpyHostToHost
          : in   ? cudaMemcpyHostToDevice
                 : cudaMemcpyDeviceToHost;
  }
  if (status < 0) return status;
  return kvl__cuda_check(
      cudaMemcpyAsync(dst, src, bytes, way, ((kvl_cuda_queue *)queue)->stream));
}

}  // namespace kvl_cuda
