/* The places of a range of tokens of every sequence, one sequence after the other.
 *   tables  i32      [sequences, width]
 *   starts  i32      [sequences]   the first token of each sequence
 *   ends    i32      [sequences]   where each sequence ends in out: cumulative lengths
 *   out     i32 i64  [n]           -1 past the last end, and where there is no block
 * Limit: the bytes written. */
#include "args/index.h"
#include "cpu/split.h"
#include "cpu/vec.h"

static void put(const struct kvl_ragged_places_args *g, int64_t i, int64_t place) {
  if (g->bytes_place == 8) ((int64_t *)g->out)[i] = place;
  else ((int32_t *)g->out)[i] = (int32_t)place;
}

KVL_CPU_KERNEL(ragged_places) {
  const struct kvl_ragged_places_args *g = args;
  int64_t at = 0;
  for (int64_t s = 0; s < g->sequences; s++) {
    const int64_t from = at, end = i64_min(g->ends[s], g->n);
    for (; at < end; at++) {
      int64_t token = g->starts[s] + (at - from), b = token / g->block_size;
      int32_t block = token >= 0 && b < g->width ? g->tables[s * g->width + b] : -1;
      put(g, at, block < 0 ? -1 : (int64_t)block * g->block_size + token % g->block_size);
    }
  }
  for (; at < g->n; at++) put(g, at, -1);
  return 0;
}
