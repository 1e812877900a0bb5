/* out = an index of each row, drawn with the chances softmax(scores): the index where the
 * sum of the score and a Gumbel-distributed number is largest. See kvl__race in philox.h.
 *   scores   f32  [rows, n]   1 <= n < 2^31
 *   numbers  i64  [rows, 2]   a seed, and the word of it that index 0 uses
 *   out      i32  [rows]      the lower index among equals; NaN never wins
 * A thread takes the four scores of a block of words. It generates the random words only if
 * one of these scores could beat the thread's best sum so far. Long rows are cut into
 * pieces, whose best sums go through the workspace.
 * Limit: arithmetic, about 100 operations for each score that could win.
 * Source: Gumbel 1954; Maddison, Tarlow, Minka 2014, arXiv:1411.0030. */
#include "args/elementwise.h"
#include "cuda/best_index.cuh"
#include "philox.h"

namespace {

using kvl::index_key, kvl::larger_key;

constexpr int DRAW_PIECE = 512; /* blocks of words in a piece of a row */

/* How many blocks of words cover n words, wherever index 0 lies in its block. */
KVL_INLINE int64_t word_blocks(int64_t n) { return (n + 3) / 4 + 1; }

inline int draw_pieces(const kvl_draw_args *g, int sm_count) {
  int64_t most = (word_blocks(g->n) + DRAW_PIECE - 1) / DRAW_PIECE;
  int64_t want = (int64_t)sm_count * 8 / (g->rows > 0 ? g->rows : 1);
  return (int)(most < want ? most : want < 1 ? 1 : want);
}

/* The best of the blocks of words [begin, end) of a row. */
__device__ __forceinline__ index_key best_draw(const float *scores, int64_t n, uint64_t seed,
                                               uint64_t offset, int64_t begin, int64_t end) {
  index_key best = 0;
  float to_beat = -INFINITY;
  const int skip = (int)(offset % 4);
  for (int64_t block = begin + threadIdx.x; block < end; block += kvl::ROW_THREADS) {
    const int64_t first = block * 4 - skip;
    float s[4], most = -INFINITY;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int64_t i = first + j;
      s[j] = i >= 0 && i < n ? scores[i] : NAN;
      most = fmaxf(most, s[j]);
    }
    if (best != 0 && !(most + KVL_RACE_MOST > to_beat)) continue;
    uint32_t w[4];
    kvl__philox(seed, offset / 4 + (uint64_t)block, w);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int64_t i = first + j;
      if (i < 0 || i >= n) continue;
      const float sum = KVL_ADD(s[j], kvl__race(kvl__uniform(w[j])));
      best = larger_key()(best, kvl::index_key_of(kvl::order_key(sum), i));
    }
    to_beat = kvl::order_value(kvl::order_of_key(best)); /* NaN: anything could win */
    if (to_beat != to_beat) to_beat = -INFINITY;
  }
  return kvl::team<kvl::ROW_THREADS>::reduce(best, larger_key(), index_key(0));
}

/* Grid: pieces, rows. */
__global__ void __launch_bounds__(kvl::ROW_THREADS)
    draw_kernel(const float *scores, const int64_t *numbers, int32_t *out, index_key *part,
                int64_t rows, int64_t n) {
  const int64_t blocks = word_blocks(n), length = (blocks + gridDim.x - 1) / gridDim.x;
  const int64_t begin = blockIdx.x * length, end = min(begin + length, blocks);
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    index_key best = best_draw(scores + row * n, n, (uint64_t)numbers[2 * row],
                               (uint64_t)numbers[2 * row + 1], begin, end);
    if (threadIdx.x != 0) continue;
    if (part) part[row * gridDim.x + blockIdx.x] = best;
    else out[row] = kvl::index_of_key(best);
  }
}

}  // namespace

KVL_CUDA_WORKSPACE(draw) {
  const kvl_draw_args *g = (const kvl_draw_args *)args;
  int pieces = draw_pieces(g, sm_count);
  return pieces > 1 ? (size_t)pieces * (size_t)g->rows * sizeof(index_key) : 0;
}

KVL_CUDA_KERNEL(draw) {
  const kvl_draw_args *g = (const kvl_draw_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (g->rows == 0) return KVL_OK;
  const int pieces = draw_pieces(g, q->sm_count);
  const unsigned rows = (unsigned)(g->rows < 65535 ? g->rows : 65535);
  index_key *part = pieces > 1 ? (index_key *)g->workspace : nullptr;
  draw_kernel<<<dim3((unsigned)pieces, rows), kvl::ROW_THREADS, 0, q->stream>>>(
      g->scores, g->numbers, g->out, part, g->rows, g->n);
  if (part)
    kvl::join_keys<<<rows, kvl::ROW_THREADS, 0, q->stream>>>(part, g->out, g->rows, pieces);
  return kvl__cuda_launched();
}
