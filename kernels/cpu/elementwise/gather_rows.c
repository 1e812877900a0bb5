/* out[i] = src[index[i]], whole rows; an index out of range gives a row of zeros.
 *   src    any dtype  [rows] of bytes_row bytes
 *   index  i32        [n]
 *   out    like src   [n]
 * Limit: twice the bytes of out over the copy bandwidth; latency for rows below 256 B. */
#include "args/elementwise.h"
#include "cpu/split.h"
#include "cpu/vec.h"

static int gather_rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_gather_rows_args *a = args;
  size_t bytes = (size_t)a->bytes_row;
  for (int64_t i = begin; i < end; i++) {
    char *to = (char *)a->out + i * a->bytes_row;
    int64_t row = a->index[i];
    if (row < 0 || row >= a->rows) memset(to, 0, bytes);
    else memcpy(to, (const char *)a->src + row * a->bytes_row, bytes);
  }
  return 0;
}

KVL_CPU_KERNEL(gather_rows) {
  const struct kvl_gather_rows_args *a = args;
  if (a->bytes_row == 0) return 0;
  return kvl__split(a->n, kvl__grain_rows(a->bytes_row / 2), gather_rows_piece, a);
}
