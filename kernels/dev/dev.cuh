/* What the programs of this folder share. Each one holds the numbered versions of a kernel,
 * losers included, and a main() that first checks every version against a slow reference and
 * then times it. They are compiled by hand and never linked into kvlab:
 *
 *   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I kernels -I runtime \
 *        -I kernels/cuda kernels/dev/NAME.cu -o NAME -lcuda && ./NAME
 *
 * Times are medians of 30 single launches between events, after a read of 512 MiB that
 * empties the L2; an empty launch reads 3 to 4 us. R is a read-only sum over 2 GiB. */
#ifndef KVL_DEV_CUH
#define KVL_DEV_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define DEV_CHECK(call)                                                                  \
  do {                                                                                   \
    cudaError_t dev_error = (call);                                                      \
    if (dev_error != cudaSuccess) {                                                      \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(dev_error)); \
      exit(1);                                                                           \
    }                                                                                    \
  } while (0)

/* What the launchers need from the plug-in's backend. */
int kvl__cuda_check(cudaError_t error) {
  DEV_CHECK(error);
  return 0;
}
int kvl__cuda_launched(void) { return kvl__cuda_check(cudaGetLastError()); }

#include "page.h"

namespace dev {

template <class T> T *alloc(size_t count) { /* poisoned: every byte 0xFF is a NaN */
  void *p;
  DEV_CHECK(cudaMalloc(&p, count * sizeof(T)));
  DEV_CHECK(cudaMemset(p, 0xFF, count * sizeof(T)));
  return (T *)p;
}
template <class T> T *upload(const std::vector<T> &host) {
  T *p = alloc<T>(host.size());
  DEV_CHECK(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
template <class T> std::vector<T> download(const T *p, size_t count) {
  std::vector<T> host(count);
  DEV_CHECK(cudaMemcpy(host.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

/* Normal numbers by Box and Muller over a hash of the index. */
__device__ __forceinline__ uint32_t hash(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return (uint32_t)(x >> 32);
}
template <class T>
__global__ void randn_kernel(T *p, size_t count, uint64_t seed, float std) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
       i += (size_t)gridDim.x * blockDim.x) {
    float u = (hash(2 * i + seed * 0x9E3779B97F4A7C15ull) + 1.f) * 0x1p-32f;
    float v = hash(2 * i + 1 + seed * 0x9E3779B97F4A7C15ull) * 0x1p-32f;
    p[i] = T(std * sqrtf(-2.f * logf(u)) * cospif(2.f * v));
  }
}
template <class T> T *randn(size_t count, uint64_t seed, float std = 1.f) {
  T *p = alloc<T>(count);
  randn_kernel<<<1056, 256>>>(p, count, seed, std);
  DEV_CHECK(cudaGetLastError());
  return p;
}

/* 0 ... n-1 in random order. */
inline std::vector<int32_t> shuffled(int32_t n, unsigned seed) {
  std::vector<int32_t> order(n);
  for (int32_t i = 0; i < n; i++) order[i] = i;
  uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
  for (int32_t i = n - 1; i > 0; i--) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(order[i], order[(state >> 33) % (uint64_t)(i + 1)]);
  }
  return order;
}

static __global__ void sum_kernel(const uint4 *p, size_t count, uint32_t *out) {
  uint32_t sum = 0;
#pragma unroll 8
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
       i += (size_t)gridDim.x * blockDim.x) {
    uint4 x = p[i];
    sum += x.x ^ x.y ^ x.z ^ x.w;
  }
  if (sum == 0x12345678u) *out = sum;
}

struct bench {
  cudaEvent_t from, to;
  uint4 *memory;
  uint32_t *sum;
  size_t bytes = (size_t)2 << 30;
  bench() {
    DEV_CHECK(cudaEventCreate(&from));
    DEV_CHECK(cudaEventCreate(&to));
    memory = (uint4 *)alloc<char>(bytes);
    sum = alloc<uint32_t>(1);
  }
  void read(size_t n) { sum_kernel<<<132 * 8, 512>>>(memory, n / 16, sum); }

  /* Microseconds of one call of fn; warm: the caches stay as they are. */
  double time(const std::function<void()> &fn, bool warm = false, int repeats = 30) {
    std::vector<float> times(repeats);
    fn();
    for (float &ms : times) {
      if (!warm) read((size_t)512 << 20);
      DEV_CHECK(cudaEventRecord(from));
      fn();
      DEV_CHECK(cudaEventRecord(to));
      DEV_CHECK(cudaEventSynchronize(to));
      DEV_CHECK(cudaEventElapsedTime(&ms, from, to));
    }
    DEV_CHECK(cudaGetLastError());
    std::sort(times.begin(), times.end());
    return times[repeats / 2] * 1e3;
  }
  /* R in bytes per microsecond. */
  double read_bandwidth() {
    return bytes / time([&] { read(bytes); }, true);
  }
};

/* Pages with keys and values of `dim` numbers; memory, scales and pinned stay empty. */
inline kvl_pages pages(int codec, int64_t blocks, int kv_heads, int block_size, int dim) {
  const kvl_format format = {codec, kv_heads, block_size, dim, dim, 0, nullptr, nullptr};
  kvl_pages made = kvl__pages(&format);
  made.blocks = blocks;
  return made;
}

}  // namespace dev

#endif
