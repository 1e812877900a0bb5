/* Attention over latents row by row: a warp computes a row of q, 32 keys at a time
 * (compute_row). It takes every dtype and every GPU, and can have a hook; but each head reads all
 * keys itself, so it is slow. latent.cuh is its fast twin.
 *
 * Bytes     keys * key_dim * element for every row, most of them from L2
 * Tolerance 1e-5 relative: P is not rounded */
#ifndef KVL_CUDA_LATENT_ROWS_CUH
#define KVL_CUDA_LATENT_ROWS_CUH

#include "cuda/attention/paged_mend.cuh"

namespace kvl {

constexpr int LATENT_ROW_WARPS = 8;
constexpr int LATENT_VALUES_MOST = 576; /* numbers of a value */

/* T: q's type; C: the cache's. */
template <class T, class C, class H>
__device__ __forceinline__ void attend_latent_rows(const kvl_paged_attention_args &a,
                                                   const H &hook) {
  let_next_start();
  wait_for_previous();
  const int64_t rows = a.tokens * a.heads, step = (int64_t)gridDim.x * LATENT_ROW_WARPS;
  for (int64_t row = blockIdx.x * LATENT_ROW_WARPS + threadIdx.x / WARP; row < rows;
       row += step) {
    const mend_row r(a, row);
    if (r.seq < 0) continue;
    if (a.listed) {
      const plain_divisor by = {(uint32_t)a.cache.block_size};
      const listed_keys<plain_divisor> keys(a, by, r.token, r.kv_head);
      compute_row<T, C, LATENT_VALUES_MOST>(a, r, hook, keys, 0);
    } else {
      compute_row<T, C, LATENT_VALUES_MOST>(a, r, hook);
    }
  }
}

}  // namespace kvl

#endif
