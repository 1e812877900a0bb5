/* The index of the largest number of a row. A number and its index form one 64-bit key, so
 * that a plain maximum finds both, and the lower index among equal numbers. Long rows are
 * cut into pieces, whose keys are joined by a second kernel. */
#ifndef KVL_BEST_INDEX_CUH
#define KVL_BEST_INDEX_CUH

#include "cuda/row.cuh"

namespace kvl {

typedef unsigned long long index_key; /* 0: none yet */

/* order: of the number, as order_key makes it; larger for what wins. */
__device__ __forceinline__ index_key index_key_of(uint32_t order, int64_t i) {
  return (index_key)order << 32 | (uint32_t) ~(uint32_t)i;
}
__device__ __forceinline__ uint32_t order_of_key(index_key key) {
  return (uint32_t)(key >> 32);
}
__device__ __forceinline__ int32_t index_of_key(index_key key) {
  return (int32_t) ~(uint32_t)key;
}

struct larger_key {
  __device__ index_key operator()(index_key a, index_key b) const { return a > b ? a : b; }
};

/* Grid: rows. part [rows, pieces]. */
static __global__ void __launch_bounds__(ROW_THREADS)
    join_keys(const index_key *part, int32_t *out, int64_t rows, int pieces) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    index_key best = 0;
    for (int p = threadIdx.x; p < pieces; p += ROW_THREADS)
      best = larger_key()(best, part[row * pieces + p]);
    best = team<ROW_THREADS>::reduce(best, larger_key(), index_key(0));
    if (threadIdx.x == 0) out[row] = index_of_key(best);
  }
}

}  // namespace kvl

#endif
