/* What the products of a layer of experts work on: tiles of rows, each of one expert. */
#ifndef KVL_CUDA_EXPERT_TILES_CUH
#define KVL_CUDA_EXPERT_TILES_CUH

#include "cuda/common.cuh"

namespace kvl {

/* Some rows of one expert. */
struct expert_tile {
  int expert, rows;
};

/* Row i of tile t comes from row t / share * step + i, and goes to row t * rows + i. */
struct experts_product {
  const expert_tile *tiles; /* NULL: each choice is a tile of one row */
  const int *count;         /* tiles; NULL: `most` */
  const int32_t *chosen;
  void *out;             /* [most * rows, units] */
  int experts, most;     /* most: tiles */
  int rows, share, step; /* rows: a multiple of 8 */
  int units, cuts;       /* outputs of a row; pieces of work that a tile has */
  int stages, places;
  bool swiglu;
  __device__ __forceinline__ int tiles_there() const { return count ? *count : most; }
  __device__ __forceinline__ expert_tile tile(int t) const {
    if (tiles) return tiles[t];
    const int e = chosen[t];
    return {e, (unsigned)e < (unsigned)experts};
  }
};

}  // namespace kvl

#endif
