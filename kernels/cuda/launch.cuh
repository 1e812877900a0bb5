/* The host's side of a launch: checks whether addresses allow wide access, counts the thread
 * blocks, and asks for shared memory. programmatic.cuh launches kernels that may begin before
 * the previous one has ended. */
#ifndef KVL_CUDA_LAUNCH_CUH
#define KVL_CUDA_LAUNCH_CUH

#include <type_traits>

#include "cuda/common.cuh"

#ifndef __CUDACC_RTC__ /* NVRTC compiles kernels alone */

namespace kvl {

template <int> __global__ void nothing() {}
/* The architecture that the code which runs on the current device was compiled for, such as 90;
 * 0 if none runs there. */
inline int code_for(int device) {
  static int known[64];
  int &number = known[device % 64];
  cudaFuncAttributes of;
  if (number == 0 && cudaFuncGetAttributes(&of, nothing<0>) == cudaSuccess)
    number = of.ptxVersion;
  return number;
}
/* Does code with Hopper's own instructions run? Later GPUs do not have them. */
inline bool is_hopper_device(int device) { return code_for(device) == 90; }
/* Does code with thread block clusters and large tiles run? */
inline bool is_hopper(const kvl_cuda_queue *q) { return tiles_of(q->code) == LARGE_TILES; }

/* The result of f with the size of the code's tiles, as a constant. */
template <class F> auto with_tiles(int code, F f) {
  if (tiles_of(code) == LARGE_TILES)
    return f(std::integral_constant<tile_size, LARGE_TILES>());
  return f(std::integral_constant<tile_size, SMALL_TILES>());
}

/* May all of these addresses and row sizes (bytes) be accessed 16 bytes at a time? */
template <class... P> inline bool aligned16(P... p) {
  return (((uintptr_t)p | ...) & 15) == 0;
}

/* The number of thread blocks for `pieces` of work, `per_block` each, when blocks loop over
 * the rest: enough to fill the device a few times over. */
inline unsigned grid(int64_t pieces, int per_block, const kvl_cuda_queue *q, int waves = 16) {
  int64_t blocks = (pieces + per_block - 1) / per_block;
  int64_t most = (int64_t)q->sm_count * waves;
  return (unsigned)(blocks < most ? blocks : most);
}

inline int ceil_div(int64_t a, int64_t b) { return (int)((a + b - 1) / b); }

/* Configures the SM for as much shared memory as possible. Kernels whose blocks are to run
 * side by side on an SM need that. */
template <auto kernel> int prefer_shared(const kvl_cuda_queue *q) {
  static unsigned preferred = 0; /* one bit per device; setting it twice does no harm */
  unsigned bit = 1u << (q->device & 31);
  if (preferred & bit) return KVL_OK;
  int status = kvl__cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared));
  if (status == KVL_OK) preferred |= bit;
  return status;
}

/* A kernel has to ask for dynamic shared memory, once per device, if that and what it has anyway
 * come to more than 48 KiB. */
template <auto kernel> int allow_shared(const kvl_cuda_queue *q, int bytes) {
  static unsigned allowed = 0;
  unsigned bit = 1u << (q->device & 31);
  if (bytes <= SHARED_UNASKED || (allowed & bit)) return KVL_OK;
  int status = kvl__cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (status == KVL_OK) allowed |= bit;
  return status;
}

}  // namespace kvl

#endif

#endif
