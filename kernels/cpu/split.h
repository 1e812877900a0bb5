/* How an op shares its work between threads: [0, n) is cut into pieces of `grain`. This does
 * not depend on the number of threads, so no result does. A single piece is a plain call,
 * without OpenMP. */
#ifndef KVL_CPU_SPLIT_H
#define KVL_CPU_SPLIT_H

#include <stdint.h>

/* Does items [begin, end) of the op; returns 0 or a negative kvl_status. */
typedef int kvl_piece(const void *args, int64_t begin, int64_t end);

/* Elements in a piece of an elementwise op: about 10 us of work, several times what it
 * costs to wake a team of threads. */
enum { KVL_GRAIN = 32768 };

static inline int64_t i64_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t i64_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Rows of `row` elements that make up a piece. */
static inline int64_t kvl__grain_rows(int64_t row) {
  return i64_max(1, KVL_GRAIN / i64_max(1, row));
}

static inline int kvl__split(int64_t n, int64_t grain, kvl_piece *piece, const void *args) {
  if (n <= grain) return n > 0 ? piece(args, 0, n) : 0;
  int64_t pieces = (n + grain - 1) / grain;
  int status = 0;
#pragma omp parallel for schedule(dynamic) reduction(min : status)
  for (int64_t p = 0; p < pieces; p++) {
    int s = piece(args, p * grain, i64_min(n, (p + 1) * grain));
    if (s < status) status = s;
  }
  return status;
}

#endif
