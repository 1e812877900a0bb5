/* Sets rows of numbers in a memory, or adds to them, and saves the old numbers. See
 * kvl_update_rows in runtime/kvlab.h.
 *
 *   memory  f32  [cells]     changed
 *   firsts  i32  [rows]; fresh i32 [rows], optional
 *   values  f32  [rows, n]
 *   before  f32  [rows, n]   optional
 *
 * Bytes   16 for each number
 * Limit   the launch: 64 rows of 2048 numbers are 2 MB. A thread has one of them. Exact. */
#include "args/evict.h"
#include "cuda/elementwise.cuh"

namespace kvl {
namespace {

constexpr int UPDATE_THREADS = 256;

/* chunks: thread blocks for a row */
__global__ void __launch_bounds__(UPDATE_THREADS)
    update_rows(const __grid_constant__ kvl_update_rows_args a, divisor chunks) {
  let_next_start();
  wait_for_previous();
  const int64_t row = chunks.quotient(blockIdx.x);
  const int64_t i = (int64_t)(blockIdx.x - row * chunks.by) * UPDATE_THREADS + threadIdx.x;
  if (i < a.n) kvl__update(&a, row, i);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(update_rows) {
  using namespace kvl;
  const kvl_update_rows_args &a = *(const kvl_update_rows_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const int64_t chunks = ceil_div(a.n, UPDATE_THREADS), blocks = a.rows * chunks;
  if (blocks == 0) return KVL_OK;
  if (blocks > INT32_MAX) return kvl__cuda_check(cudaErrorInvalidValue);
  return launch_programmatic(update_rows, (unsigned)blocks, UPDATE_THREADS, 0, q, a,
                             divisor((uint32_t)chunks));
}
