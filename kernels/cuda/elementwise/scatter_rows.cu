/* out[index[i]] = src[i] for whole rows. An index out of range is skipped; of equal indices
 * the last one wins.
 *   src        any  [n, bytes_row bytes]
 *   index      i32  [n]
 *   out        any  [rows, bytes_row bytes]
 *   workspace  u32  [rows]   the last claim on each row: i + 1, or 0 for none
 * Two launches: every i claims its row with an atomic maximum, then only the winners copy.
 * Reads and writes at most n rows, and clears the workspace. Limit: memory bandwidth. */
#include "args/elementwise.h"
#include "cuda/elementwise/copy_rows.cuh"
#include "cuda/elementwise.cuh"

namespace {

struct claim_body {
  const int32_t *index;
  uint32_t *last;
  int64_t rows;
  template <int N> __device__ void run(int64_t i) const {
    int64_t at = index[i];
    if (at >= 0 && at < rows) atomicMax(last + at, (uint32_t)i + 1);
  }
};

struct scatter_rows_body {
  const char *src;
  const int32_t *index;
  const uint32_t *last;
  char *out;
  int64_t rows, bytes_row;
  __device__ bool row(int64_t i, const char **from, char **to) const {
    int64_t at = index[i];
    if (at < 0 || at >= rows || last[at] != (uint32_t)i + 1) return false;
    *from = src + i * bytes_row;
    *to = out + at * bytes_row;
    return true;
  }
};

}  // namespace

KVL_CUDA_WORKSPACE(scatter_rows) {
  (void)sm_count;
  return (size_t)((const kvl_scatter_rows_args *)args)->rows * sizeof(uint32_t);
}

KVL_CUDA_KERNEL(scatter_rows) {
  const kvl_scatter_rows_args *g = (const kvl_scatter_rows_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (g->n == 0 || g->rows == 0 || g->bytes_row == 0) return KVL_OK;
  uint32_t *last = (uint32_t *)g->workspace;
  int status = kvl__cuda_check(
      cudaMemsetAsync(last, 0, (size_t)g->rows * sizeof *last, q->stream));
  if (status == KVL_OK)
    status = kvl::each<1>(claim_body{g->index, last, g->rows}, g->n, false, queue);
  if (status < 0) return status;
  scatter_rows_body f{(const char *)g->src, g->index, last,
                      (char *)g->out,       g->rows,  g->bytes_row};
  return kvl::copy_rows(f, g->n, g->bytes_row, g->src, g->out, q);
}
