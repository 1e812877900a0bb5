/* out[index[i]] = src[i] for whole rows. An index out of range is skipped. If several rows
 * have one index, the last of them wins.
 *   src    any dtype  [n] rows of bytes_row bytes
 *   index  i32        [n]
 *   out    like src   [rows]
 * Every thread walks the whole index in order and copies the rows whose destination is its
 * own. Destinations are dealt out one by one, so that runs of neighbours spread over the
 * threads. No workspace.
 * Limit: twice the bytes of src over the copy bandwidth; the walk for rows below 64 B. */
#include <omp.h>

#include "args/elementwise.h"
#include "cpu/split.h"
#include "cpu/vec.h"

static void scatter(const struct kvl_scatter_rows_args *a, int64_t thread, int64_t threads) {
  for (int64_t i = 0; i < a->n; i++) {
    int64_t row = a->index[i];
    if (row < 0 || row >= a->rows || (threads > 1 && row % threads != thread)) continue;
    memcpy((char *)a->out + row * a->bytes_row, (const char *)a->src + i * a->bytes_row,
           (size_t)a->bytes_row);
  }
}

KVL_CPU_KERNEL(scatter_rows) {
  const struct kvl_scatter_rows_args *a = args;
  if (a->bytes_row == 0) return 0;
  if (a->bytes_row < 64 || a->n * a->bytes_row < 4 * KVL_GRAIN) {
    scatter(a, 0, 1);
  } else {
#pragma omp parallel
    scatter(a, omp_get_thread_num(), omp_get_num_threads());
  }
  return 0;
}
