/* The places of a range of tokens of every sequence, one sequence after the other.
 *   tables  i32      [sequences, width]
 *   starts  i32      [sequences]   the first token of each range
 *   ends    i32      [sequences]   where it ends in out: cumulative lengths
 *   out     i32 i64  [n]           -1 past the last end, and where there is no block
 * One thread handles one place and finds its sequence by bisection. Limit: the bytes
 * written. */
#include "args/index.h"
#include "cuda/elementwise.cuh"

namespace {

template <class T> struct places_body {
  kvl_ragged_places_args g;
  template <int N> __device__ void run(int64_t i) const {
    int64_t low = 0, high = g.sequences; /* the first sequence that ends behind i */
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (g.ends[middle] > i) high = middle;
      else low = middle + 1;
    }
    int64_t place = -1;
    if (low < g.sequences) {
      const int64_t token = g.starts[low] + i - (low > 0 ? g.ends[low - 1] : 0);
      const int64_t b = token / g.block_size;
      const int32_t block = token >= 0 && b < g.width ? g.tables[low * g.width + b] : -1;
      if (block >= 0) place = (int64_t)block * g.block_size + token % g.block_size;
    }
    ((T *)g.out)[i] = (T)place;
  }
};

}  // namespace

KVL_CUDA_KERNEL(ragged_places) {
  const kvl_ragged_places_args &g = *(const kvl_ragged_places_args *)args;
  if (g.bytes_place == 8) return kvl::each<1>(places_body<int64_t>{g}, g.n, false, queue);
  return kvl::each<1>(places_body<int32_t>{g}, g.n, false, queue);
}
