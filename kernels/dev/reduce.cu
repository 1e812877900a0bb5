/* How fast can this machine read? Sums of one long row of f32: the R that memory-bound
 * kernels are compared with, so it has to be the best there is.
 *
 *                                                              1 GiB   2 GiB   4 GiB
 *   1  a block sums a stretch of its own, 4 packs of 16 bytes
 *      a thread and step                                        2873    2833    2814
 *   2  the blocks walk side by side: tiles of 4 packs a thread,
 *      interleaved                                              3118    3136    3132
 *   3  2 with loads that stay out of the L1 and ask the L2 for
 *      256 bytes                                                3117    3135    3132
 *   4  3 with 512 threads a block                               3136    3156    3159
 *   5  bulk copies of 32 KiB into a ring, one block an SM       3124    3150    3157
 *   6  bulk copies of 16 KiB, two blocks an SM                  3102    3122    3125
 *   7  reduce.cu: 4, and a kernel that joins the pieces         3104    3140    3149
 * GB/s, H100 80GB HBM3 (2619 MHz: 3352 GB/s), 2026-11-21. Before, reduce.cu was 1 and reached
 * 3007 in 2 GiB; with 2, but adding the elements of a pack in a chain, 3033. Tiles of 2 and 8
 * packs, 264 to 4224 blocks, 256 to 1024 threads lie between 3080 and 3160; bulk copies of
 * 2 to 8 KiB between 2570 and 3110. */
#include "dev.cuh"
#include "barrier.cuh"

namespace {

enum { PACKS = 4, WARPS = 32 };

__device__ float4 load_streaming(const float4 *p) {
  const uint4 x = kvl::load_streaming((const uint4 *)p);
  return reinterpret_cast<const float4 &>(x);
}
__device__ float total(float4 x) { return x.x + x.y + (x.z + x.w); }

__device__ void put(float sum, float *out) {
  __shared__ float shared[WARPS];
  sum = kvl::block_sum(sum, shared);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

__global__ void stretches(const float4 *x, size_t packs, float *out) {
  size_t begin = packs * blockIdx.x / gridDim.x, end = packs * (blockIdx.x + 1) / gridDim.x;
  float sum = 0;
#pragma unroll 4
  for (size_t i = begin + threadIdx.x; i < end; i += blockDim.x) sum += total(x[i]);
  put(sum, out);
}

/* packs: a multiple of the tile. */
template <bool STREAMING> __global__ void tiles(const float4 *x, size_t packs, float *out) {
  size_t tile = (size_t)PACKS * blockDim.x;
  float sum = 0;
  for (size_t t = blockIdx.x * tile; t < packs; t += gridDim.x * tile) {
    float4 at[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
      const float4 *from = x + t + p * blockDim.x + threadIdx.x;
      at[p] = STREAMING ? load_streaming(from) : *from;
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) sum += total(at[p]);
  }
  put(sum, out);
}

/* Warp 0 copies; all sum. */
template <int BYTES, int STAGES>
__global__ void bulk(const char *x, size_t bytes, float *out) {
  using namespace kvl;
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) uint64_t full[STAGES];
  auto fetch = [&](int stage, size_t tile) {
    const uint32_t barrier = shared_address(full + stage);
    barrier_arrive_expect(barrier, BYTES);
    copy_bytes(shared_address(ring + stage * BYTES), x + tile * BYTES, BYTES, barrier);
  };
  size_t tiles = bytes / BYTES, next = blockIdx.x;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(shared_address(full + s), 1);
    barrier_init_done();
    for (int s = 0; s < STAGES && next < tiles; s++, next += gridDim.x) fetch(s, next);
  }
  __syncthreads();
  float sum = 0;
  int stage = 0, phase = 0;
  for (size_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    barrier_wait(shared_address(full + stage), phase);
    const float4 *at = (const float4 *)(ring + stage * BYTES);
#pragma unroll 4
    for (int i = threadIdx.x; i < BYTES / 16; i += blockDim.x) sum += total(at[i]);
    __syncthreads();
    if (threadIdx.x == 0 && next < tiles) {
      fetch(stage, next);
      next += gridDim.x;
    }
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  put(sum, out);
}

template <int BYTES, int STAGES>
void launch_bulk(const float *x, size_t count, int blocks, float *out) {
  DEV_CHECK(cudaFuncSetAttribute(
      bulk<BYTES, STAGES>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES * STAGES));
  bulk<BYTES, STAGES><<<blocks, 256, BYTES * STAGES>>>((const char *)x, count * 4, out);
}

}  // namespace

int main() {
  dev::bench bench;
  cudaDeviceProp device;
  DEV_CHECK(cudaGetDeviceProperties(&device, 0));
  const int sms = device.multiProcessorCount;
  kvl_cuda_queue queue = {};
  queue.sm_count = sms;
  const size_t most = (size_t)1 << 30; /* floats */
  float *x = dev::randn<float>(most, 1), *out = dev::alloc<float>(8192);
  float *pieces = dev::alloc<float>((size_t)sms * 8);
  auto run = [&](int version, size_t count) {
    const float4 *packs = (const float4 *)x;
    if (version == 1) stretches<<<sms * 8, 256>>>(packs, count / 4, out);
    if (version == 2) tiles<false><<<sms * 8, 256>>>(packs, count / 4, out);
    if (version == 3) tiles<true><<<sms * 8, 256>>>(packs, count / 4, out);
    if (version == 4) tiles<true><<<sms * 8, 512>>>(packs, count / 4, out);
    if (version == 5) launch_bulk<32768, 6>(x, count, sms, out);
    if (version == 6) launch_bulk<16384, 6>(x, count, sms * 2, out);
    if (version == 7) {
      kvl_reduce_args args = {
          x, out, 1, (int64_t)count, 1, pieces, KVL_REDUCE_SUM, KVL_DTYPE_F32, KVL_DTYPE_F32};
      kvl_cuda_reduce(&args, &queue);
    }
  };
  const size_t few = (size_t)1 << 24;
  std::vector<float> host = dev::download(x, few);
  double want = 0;
  for (float at : host) want += at;
  for (int version = 1; version <= 7; version++) {
    DEV_CHECK(cudaMemset(out, 0xFF, 8192 * 4));
    run(version, few);
    int sums = version == 5 ? sms : version == 6 ? sms * 2 : version == 7 ? 1 : sms * 8;
    double got = 0;
    for (float at : dev::download(out, sums)) got += at;
    printf("%d  ", version);
    if (!(std::abs(got - want) < 0.05)) printf("WRONG: %.4f, expected %.4f\n", got, want);
    for (size_t count = most / 4; count <= most; count *= 2) {
      double us = bench.time([&] { run(version, count); }, true);
      printf("  %zu GiB %7.1f us %7.1f GB/s", count >> 28, us, count * 4e-3 / us);
    }
    printf("\n");
  }
}
