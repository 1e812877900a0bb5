/* Runs a CUDA kernel that kvlab generated on the CPU, for machines without a GPU: the C++
 * compiler reads this file before the kernel's source. Every thread of a thread block is a
 * coroutine with a stack of its own. Lanes of a warp exchange values only when all of them
 * are at the same place; lanes that have parted end the run with an error, as they would
 * hang or be wrong on a GPU. Blocks run one after the other, which is slow.
 *
 * The arguments are followed by the grid: x, y, z, 8 bytes each. */
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

/* The kernel's own types are CUDA's. */
#define int64_t cuda_int64_t
#define uint64_t cuda_uint64_t
typedef long long int64_t;
typedef unsigned long long uint64_t;

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct uint4 {
  unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
struct emulated_index {
  unsigned x, y, z;
};
static emulated_index threadIdx, blockIdx, blockDim, gridDim;

/* ---- threads ---------------------------------------------------------------------------- */

enum { EMULATED_MOST = 1024, EMULATED_STACK = 1 << 20 };
enum emulated_state { READY, AT_WARP, AT_BLOCK, ENDED };

/* A thread begins with setcontext, and is left and entered again with longjmp, which asks
 * the system nothing. */
struct emulated_thread {
  jmp_buf at;
  emulated_state state;
  bool has_begun;
  int exchanges; /* so many it has taken part in */
};

static struct {
  emulated_thread thread[EMULATED_MOST];
  unsigned long long mailbox[2][EMULATED_MOST]; /* by the parity of an exchange */
  ucontext_t beginning;
  jmp_buf scheduler;
  char *stacks;
  int threads, now;
  void (*body)(void);
} emulated;

static inline void emulated_wait(emulated_state at) {
  emulated_thread *t = &emulated.thread[emulated.now];
  t->state = at;
  if (!_setjmp(t->at)) _longjmp(emulated.scheduler, 1);
  threadIdx.x = (unsigned)emulated.now;
}
static void emulated_start(void) {
  threadIdx.x = (unsigned)emulated.now;
  emulated.body();
  emulated.thread[emulated.now].state = ENDED;
  _longjmp(emulated.scheduler, 1);
}
static void emulated_begin(int i) {
  emulated.thread[i].has_begun = true;
  emulated.beginning.uc_stack.ss_sp = emulated.stacks + (size_t)i * EMULATED_STACK;
  emulated.beginning.uc_stack.ss_size = EMULATED_STACK;
  makecontext(&emulated.beginning, emulated_start, 0);
  setcontext(&emulated.beginning);
}

/* Runs the threads first ... end - 1 until each waits or has ended. */
static void emulated_advance(int first, int end) {
  for (volatile int i = first; i < end; i++)
    if (emulated.thread[i].state == READY) {
      emulated.now = i;
      if (_setjmp(emulated.scheduler)) continue;
      if (emulated.thread[i].has_begun) _longjmp(emulated.thread[i].at, 1);
      emulated_begin(i);
    }
}
/* Whether all of these threads are in a state. */
static bool emulated_all(int first, int end, emulated_state state) {
  for (int i = first; i < end; i++)
    if (emulated.thread[i].state != state) return false;
  return true;
}
static void emulated_release(int first, int end) {
  for (int i = first; i < end; i++) emulated.thread[i].state = READY;
}

/* One thread block. False: lanes of a warp, or warps, have parted. */
static bool emulated_block(void) {
  const int n = emulated.threads;
  for (int i = 0; i < n; i++) {
    emulated.thread[i].state = READY;
    emulated.thread[i].has_begun = false;
    emulated.thread[i].exchanges = 0;
  }
  for (;;) {
    for (int first = 0; first < n; first += 32) {
      const int end = first + 32 < n ? first + 32 : n;
      emulated_advance(first, end);
      while (emulated_all(first, end, AT_WARP)) {
        emulated_release(first, end);
        emulated_advance(first, end);
      }
      if (!emulated_all(first, end, AT_BLOCK) && !emulated_all(first, end, ENDED))
        return false;
    }
    if (emulated_all(0, n, ENDED)) return true;
    if (!emulated_all(0, n, AT_BLOCK)) return false;
    emulated_release(0, n);
  }
}

static int emulate(const long long *grid, int threads, void (*body)(void)) {
  if (threads > EMULATED_MOST || threads % 32) return -1;
  if (!emulated.stacks)
    emulated.stacks = (char *)mmap(NULL, (size_t)EMULATED_MOST * EMULATED_STACK,
                                   PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (emulated.stacks == MAP_FAILED) return -1;
  getcontext(&emulated.beginning);
  emulated.threads = threads;
  emulated.body = body;
  blockDim = {(unsigned)threads, 1, 1};
  gridDim = {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]};
  bool right = true;
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x && right; blockIdx.x++)
        right = emulated_block();
  return right ? 0 : -1;
}

/* ---- what kernels call ------------------------------------------------------------------ */

template <class T> static inline T __shfl_xor_sync(unsigned, T x, int mask) {
  emulated_thread *t = &emulated.thread[emulated.now];
  unsigned long long *box = emulated.mailbox[t->exchanges++ & 1];
  box[emulated.now] = 0;
  memcpy(&box[emulated.now], &x, sizeof x);
  emulated_wait(AT_WARP);
  memcpy(&x, &box[emulated.now ^ mask], sizeof x);
  return x;
}
template <class T> static inline T __shfl_sync(unsigned, T x, int lane) {
  emulated_thread *t = &emulated.thread[emulated.now];
  unsigned long long *box = emulated.mailbox[t->exchanges++ & 1];
  box[emulated.now] = 0;
  memcpy(&box[emulated.now], &x, sizeof x);
  emulated_wait(AT_WARP);
  memcpy(&x, &box[emulated.now / 32 * 32 + lane % 32], sizeof x);
  return x;
}
static inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned all = 0;
  for (int lane = 0; lane < 32; lane++) all |= (unsigned)__shfl_sync(0, (int)x, lane) << lane;
  return all;
}
static inline bool __any_sync(unsigned, bool x) { return __ballot_sync(0, x) != 0; }
static inline void __syncwarp(void) {
  emulated.thread[emulated.now].exchanges++;
  emulated_wait(AT_WARP);
}
static inline void __syncthreads(void) { emulated_wait(AT_BLOCK); }

/* A thread block's dynamic shared memory. */
alignas(128) static char emulated_shared[232448];
#define DYNAMIC_SHARED(name) char *const name = emulated_shared

template <class T> static inline T __ldg(const T *p) { return *p; }
static inline float __uint_as_float(unsigned x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static inline unsigned __float_as_uint(float x) {
  unsigned y;
  memcpy(&y, &x, 4);
  return y;
}
static inline float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
#define __expf expf
static inline float __fdividef(float a, float b) { return a / b; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __float2int_rz(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.f) return 2147483647;
  return x <= -2147483648.f ? -2147483647 - 1 : (int)x;
}
static inline unsigned __float2uint_rz(float x) {
  return !(x > 0) ? 0u : x >= 4294967296.f ? 4294967295u : (unsigned)x;
}
static inline float from_f16(unsigned x) { return (float)*(const _Float16 *)&x; }
static inline unsigned short to_f16(float x) {
  const _Float16 y = (_Float16)x;
  unsigned short r;
  memcpy(&r, &y, 2);
  return r;
}

#include "cuda_emulation_mma.h"

#define kvl_code emulated_kernel
