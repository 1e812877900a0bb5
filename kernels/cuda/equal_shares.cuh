/* Tiles that are cut into equal runs, without 64-bit divisions. */
#ifndef KVL_CUDA_EQUAL_SHARES_CUH
#define KVL_CUDA_EQUAL_SHARES_CUH

#include "common.cuh"

namespace kvl {

/* `total` tiles in `count` shares: the first `more` have per + 1 tiles, the others per. */
struct equal_shares {
  uint32_t count, per, more;
  equal_shares() = default;
  __device__ equal_shares(uint32_t total, uint32_t shares)
      : count(shares), per(total / shares), more(total - per * shares) {}
  __device__ uint32_t begin(uint32_t share) const { return share * per + min(share, more); }
  /* The share of a tile. */
  __device__ uint32_t of(uint32_t tile) const {
    const uint32_t longer = more * (per + 1);
    return tile < longer ? tile / (per + 1) : more + (tile - longer) / per;
  }
};

}  // namespace kvl

#endif
