/* Statuses and their messages, the interrupt flag, and host allocation that can be made to
 * fail. */
#include <stdatomic.h>
#include <time.h>

#include "abi.h"
#include "core/status.h"

_Static_assert(sizeof(kvl_tensor) == 88, "kvl_tensor is read by LuaJIT");
_Static_assert(offsetof(kvl_tensor, shape) == 24, "kvl_tensor is read by LuaJIT");
_Static_assert(sizeof(kvl_attention) == 192, "kvl_attention is read by LuaJIT");
_Static_assert(sizeof(kvl_cut) == 72, "kvl_cut is read by LuaJIT");
_Static_assert(sizeof(kvl_span) == 32, "kvl_span is read by LuaJIT");
_Static_assert(sizeof(kvl_hot) == 88, "kvl_hot is read by LuaJIT");
_Static_assert(sizeof(kvl_resolve) == 80, "kvl_resolve is read by LuaJIT");
_Static_assert(sizeof(kvl_vllm) == 88, "kvl_vllm is read by LuaJIT");
_Static_assert(sizeof(kvl_hamming) == 96, "kvl_hamming is read by LuaJIT");
_Static_assert(sizeof(kvl_budget) == 24, "kvl_budget is read by LuaJIT");
_Static_assert(sizeof(kvl_key) == 16, "kvl_key is read by LuaJIT");
_Static_assert(sizeof(kvl_store_stats) == 80, "kvl_store_stats is read by LuaJIT");
_Static_assert(sizeof(kvl_prefetch_options) == 16, "kvl_prefetch_options is read by LuaJIT");
_Static_assert(sizeof(kvl_prefetch_task) == 48, "kvl_prefetch_task is read by LuaJIT");
_Static_assert(sizeof(kvl_prefetch_stats) == 88, "kvl_prefetch_stats is read by LuaJIT");
_Static_assert(sizeof(kvl_prefetch_result) == 64, "kvl_prefetch_result is read by LuaJIT");
_Static_assert(sizeof(kvl_safetensors_entry) == 80, "entry is read by LuaJIT");
_Static_assert(sizeof(kvl_gguf_entry) == 88, "entry is read by LuaJIT");
_Static_assert(sizeof(kvl_gguf_metadata) == 40, "metadata is read by LuaJIT");

static _Thread_local char words[512];
static atomic_int interrupted;
static _Thread_local int holds;
static atomic_int allocations_until_failure;

uint32_t kvl_abi(void) { return KVL_ABI; }

const char *kvl_status_text(int status) {
  if (status > 0) return "ok";
  switch ((kvl_status)status) { /* ORDER kvl_status; no default: -Wswitch finds gaps */
    case KVL_OK: return "ok";
    case KVL_ERR_INVALID: return "invalid argument";
    case KVL_ERR_NO_MEMORY: return "out of memory";
    case KVL_ERR_NO_BLOCKS: return "out of blocks";
    case KVL_ERR_IO: return "input/output error";
    case KVL_ERR_FORMAT: return "bad file format";
    case KVL_ERR_DEVICE: return "device failure";
    case KVL_ERR_UNSUPPORTED: return "unsupported";
    case KVL_ERR_INTERRUPTED: return "interrupted";
  }
  return "unknown status";
}

const char *kvl_last_error(void) { return words; }

int kvl__fail(int status, const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(words, sizeof words, format, list);
  va_end(list);
  return status;
}

int kvl__missing(const char *function, const char *name) {
  return kvl__fail(KVL_ERR_INVALID, "%s: %s is NULL", function, name);
}

void kvl_interrupt(int set) { atomic_store(&interrupted, set != 0); }
int kvl_interrupted(void) { return holds > 0 ? 0 : atomic_load(&interrupted); }
int kvl_interrupt_hold(int more) { return holds += more; }

int kvl_fail_allocation(int n) {
#ifdef KVL_HOSTILE
  atomic_store(&allocations_until_failure, n);
  return KVL_OK;
#else
  (void)n;
  return kvl__fail(KVL_ERR_UNSUPPORTED, "kvl_fail_allocation: only in hostile builds");
#endif
}

int kvl__allocation_fails(void) {
#ifdef KVL_HOSTILE
  if (atomic_load(&allocations_until_failure) > 0)
    return atomic_fetch_sub(&allocations_until_failure, 1) == 1;
#endif
  (void)allocations_until_failure;
  return 0;
}

void *kvl__malloc(size_t bytes, const char *what) { return kvl__realloc(NULL, bytes, what); }

void *kvl__realloc(void *p, size_t bytes, const char *what) {
  void *q = kvl__allocation_fails() ? NULL : realloc(p, bytes ? bytes : 1);
  if (!q) kvl__fail(KVL_ERR_NO_MEMORY, "no host memory for %s (%zu bytes)", what, bytes);
  return q;
}

int64_t kvl_clock_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
