/* Top-p over blocks: shortens selections, in place, to the fewest blocks whose weights reach
 * a share of their sequence's total weight.
 *   weights    f32  [seqs, heads or 1, max_blocks]   what is not > 0 counts as 0
 *   lens       i32  [seqs]
 *   selection  i32  [seqs, heads, max_selected]   ascending, -1 padded
 *   counts     i32  [seqs, heads]                 optional
 * The first `sink` and the last `recent` blocks stay, and their weights count. Of the others
 * the heaviest are kept, ties to the lower index, until the weights reach `mass` times the
 * sum over all blocks of the sequence.
 *
 * One thread block per row. Floats >= 0 have the order of their bits, so 31 bisections find
 * the least weight to keep. Sums are double.
 * Limit: latency of 34 reductions over the block, and of as many passes over L1. Not
 * tuned. */
#include "args/select.h"
#include "cuda/block_scan.cuh"
#include "cuda/elementwise.cuh"

namespace kvl {
namespace {

struct trim_row {
  const float *weights;
  int32_t *selection;
  int n, first, last; /* entries; only blocks first ... last - 1 may be dropped */
  double *shared;

  __device__ float weight(int block) const { return fmaxf(weights[block], 0.f); }
  __device__ bool may_go(int block) const { return block >= first && block < last; }

  /* The sum over the entries that weigh at least the float with these bits: over those that
   * may be dropped (`loose`), or over those that may not. */
  __device__ double sum_from(uint32_t bits, bool loose = true) const {
    double sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      const int block = selection[i];
      const float w = weight(block);
      if (may_go(block) == loose && __float_as_uint(w) >= bits) sum += w;
    }
    return block_sum(sum, shared);
  }

  /* Finds which of the entries that may be dropped to keep: those above `least`, and `ties`
   * of those that equal it. */
  __device__ void find_least(double wanted, uint32_t *least, int *ties) const {
    *least = 0;
    *ties = n;
    if (sum_from(0) <= wanted) return;
    uint32_t found = 0;
#pragma unroll 1
    for (uint32_t bit = 1u << 30; bit; bit >>= 1)
      if (sum_from(found | bit) >= wanted) found |= bit;
    const double missing = (wanted - sum_from(found + 1)) / __uint_as_float(found);
    *least = found;
    *ties = missing <= 0 ? 0 : missing < n ? (int)ceil(missing) : n;
  }

  /* Keeps the order: a pass of the block writes only to indices that it has already read. */
  __device__ int keep(uint32_t least, int ties, int (*sums)[WARP]) const {
    int count = 0, equal = 0;
    for (int begin = 0; begin < n; begin += blockDim.x) {
      const int i = begin + threadIdx.x, block = i < n ? selection[i] : -1;
      const uint32_t bits = i < n ? __float_as_uint(weight(block)) : 0;
      const bool loose = i < n && may_go(block), is_tie = loose && bits == least;
      int before[1] = {is_tie}, total[1];
      block_scan(before, total, sums);
      const bool stays = i < n &&
                         (!loose || bits > least || (is_tie && equal + before[0] < ties));
      equal += total[0];
      before[0] = stays;
      block_scan(before, total, sums);
      if (stays) selection[count + before[0]] = block;
      count += total[0];
    }
    __syncthreads();
    for (int i = count + threadIdx.x; i < n; i += blockDim.x) selection[i] = -1;
    return count;
  }
};

__global__ void __launch_bounds__(1024)
    trim(const __grid_constant__ kvl_trim_selection_args a) {
  __shared__ double shared[WARP];
  __shared__ int sums[1][WARP];
  const int64_t i = blockIdx.x;
  const int length = max(a.lens[i / a.heads], 0);
  const int blocks = (int)min((int64_t)(length + (int64_t)a.block_size - 1) / a.block_size,
                              a.max_blocks);
  trim_row r = {a.weights + (a.weight_heads > 1 ? i : i / a.heads) * a.max_blocks,
                a.selection + i * a.max_selected,
                0,
                a.sink,
                blocks - a.recent,
                shared};
  int n = 0; /* entries before the first one that is no block */
  for (int64_t first = 0; first < a.max_selected; first += blockDim.x) {
    const int64_t at = first + threadIdx.x;
    const int block = at < a.max_selected ? r.selection[at] : -1;
    const int there = __syncthreads_count(block >= 0 && block < blocks);
    n += there;
    if (there < (int)blockDim.x) break;
  }
  r.n = n;
  int count = n;
  if (a.mass < 1) {
    double total = 0;
    for (int b = threadIdx.x; b < blocks; b += blockDim.x) total += r.weight(b);
    total = block_sum(total, shared);
    uint32_t least;
    int ties;
    r.find_least(a.mass * total - r.sum_from(0, false), &least, &ties);
    count = r.keep(least, ties, sums);
  }
  if (threadIdx.x == 0 && a.counts) a.counts[i] = count;
}

}  // namespace
}  // namespace kvl

KVL_CUDA_KERNEL(trim_selection) {
  const kvl_trim_selection_args &a = *(const kvl_trim_selection_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  const int64_t rows = a.seqs * a.heads;
  if (rows == 0) return KVL_OK;
  kvl::trim<<<(unsigned)rows, a.max_selected <= 256 ? 256 : 1024, 0, q->stream>>>(a);
  return kvl__cuda_launched();
}
