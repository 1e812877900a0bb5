/* What every CUDA kernel file shares: the queue, the launchers' names, dtypes as C++ types,
 * addresses and 16-byte access, reductions over a warp and a block.
 *
 * Device code lives in namespace kvl; each file keeps its own kernels in an unnamed
 * namespace. Everything but kvl_backend_cuda is hidden from the outside. */
#ifndef KVL_CUDA_COMMON_CUH
#define KVL_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/architecture.cuh"
#include "kernel.h"

#ifndef __CUDACC_RTC__ /* NVRTC compiles kernels alone */

typedef struct cublasContext *cublasHandle_t; /* as in cublas_v2.h */

struct kvl_cuda_queue {
  cudaStream_t stream;
  cublasHandle_t blas; /* NULL until kvl__cuda_blas */
  int sm_count;
  int shared_optin; /* bytes of shared memory that a block may ask for */
  int code;         /* the architecture of the code that runs, such as 90 */
  int device;
};

/* Defines the launcher, and the workspace size, of an op. */
#define KVL_CUDA_KERNEL(op) extern "C" int kvl_cuda_##op(const void *args, void *queue)
#define KVL_CUDA_WORKSPACE(op) \
  extern "C" size_t kvl_cuda_##op##_workspace(const void *args, int sm_count)

/* These return 0, or a status after they recorded the driver's message: for the launches
 * since the last call, for one call, or for cuBLAS (its handle is made at the first use). */
int kvl__cuda_launched(void);
int kvl__cuda_check(cudaError_t error);
int kvl__cuda_blas(struct kvl_cuda_queue *queue); /* makes queue->blas */
int kvl__cuda_blas_check(int status, const char *what);
namespace kvl_cuda {
/* Records the message of a failure and returns `status`. */
__attribute__((format(printf, 2, 3))) int fail(int status, const char *format, ...);
}

#endif

/* Runs a body with T the C++ type of a dtype; for other dtypes the launcher returns. */
#define KVL_CUDA_BY_FLOAT(dtype, T, ...) \
  switch (dtype) {                       \
    case KVL_DTYPE_F32: {                \
      using T = float;                   \
      __VA_ARGS__                        \
    } break;                             \
    case KVL_DTYPE_F16: {                \
      using T = __half;                  \
      __VA_ARGS__                        \
    } break;                             \
    case KVL_DTYPE_BF16: {               \
      using T = __nv_bfloat16;           \
      __VA_ARGS__                        \
    } break;                             \
    default: return KVL_ERR_UNSUPPORTED; \
  }
/* The same with T an unsigned type of that many bytes, for ops that only move elements. */
#define KVL_CUDA_BY_BYTES(bytes, T, ...) \
  switch (bytes) {                       \
    case 1: {                            \
      using T = uint8_t;                 \
      __VA_ARGS__                        \
    } break;                             \
    case 2: {                            \
      using T = uint16_t;                \
      __VA_ARGS__                        \
    } break;                             \
    case 4: {                            \
      using T = uint32_t;                \
      __VA_ARGS__                        \
    } break;                             \
    case 8: {                            \
      using T = uint64_t;                \
      __VA_ARGS__                        \
    } break;                             \
    case 16: {                           \
      using T = uint4;                   \
      __VA_ARGS__                        \
    } break;                             \
    default: return KVL_ERR_UNSUPPORTED; \
  }

/* An instruction of sm_90; does nothing on devices before it. */
#if __CUDA_ARCH__ >= 900
#define KVL_SM90(...) asm volatile(__VA_ARGS__)
#else
#define KVL_SM90(...)
#endif

namespace kvl {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xFFFFFFFFu;

/* A hint for copies of data that a step reads once: the L2 drops such data before anything
 * else, such as tables, positions and code. In one kernel with this hint, ptxas 13.0
 * generated illegal instructions: copies with an odd-numbered descriptor (nvdisasm:
 * desc[UR1]). So only kernels that are compiled in advance, whose code was checked, have
 * the hint, and kernels with a policy's hook do not. */
__device__ __forceinline__ uint64_t read_once() {
  uint64_t hint;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(hint));
  return hint;
}
/* Takes the place of a hint, for copies without one. */
struct no_hint {
  __device__ no_hint(uint64_t) {}
};

/* ---- numbers --------------------------------------------------------------------- */

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float(float x) { return x; }
template <> __device__ __forceinline__ __half from_float(float x) {
  return __float2half_rn(x);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}

/* N elements, moved in the widest pieces that their size allows, 16 bytes at most. */
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) pack {
  T at[N];
};
/* Elements of T in 16 bytes. */
template <class T> constexpr int WIDE = 16 / sizeof(T);

template <int N, class T>
__device__ __forceinline__ pack<T, N> load_pack(const T *p) { /* p is aligned to the pack */
  return *reinterpret_cast<const pack<T, N> *>(p);
}
template <int N, class T>
__device__ __forceinline__ void store_pack(T *p, const pack<T, N> &x) {
  *reinterpret_cast<pack<T, N> *>(p) = x;
}
template <int N, class T>
__device__ __forceinline__ void load_floats(const T *p, float (&x)[N]) {
  pack<T, N> raw = load_pack<N>(p);
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = to_float(raw.at[i]);
}
template <int N, class T>
__device__ __forceinline__ void store_floats(T *p, const float (&x)[N]) {
  pack<T, N> raw;
#pragma unroll
  for (int i = 0; i < N; i++) raw.at[i] = from_float<T>(x[i]);
  store_pack<N>(p, raw);
}

/* Loads 16 bytes past L1 and has the L2 fetch the 256 bytes around them. Volatile keeps the
 * loads in the order of the code. */
__device__ __forceinline__ uint4 load_streaming(const uint4 *p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}
/* N neighbours of any float dtype from element `at` on; below, one number. */
template <int N>
__device__ __forceinline__ void load_any(const void *p, int dtype, int64_t at,
                                         float (&x)[N]) {
  if (dtype == KVL_DTYPE_F32) load_floats((const float *)p + at, x);
  else if (dtype == KVL_DTYPE_F16) load_floats((const __half *)p + at, x);
  else load_floats((const __nv_bfloat16 *)p + at, x);
}
template <int N>
__device__ __forceinline__ void store_any(void *p, int dtype, int64_t at,
                                          const float (&x)[N]) {
  if (dtype == KVL_DTYPE_F32) store_floats((float *)p + at, x);
  else if (dtype == KVL_DTYPE_F16) store_floats((__half *)p + at, x);
  else store_floats((__nv_bfloat16 *)p + at, x);
}
__device__ __forceinline__ float load_any(const void *p, int dtype, int64_t at) {
  float x[1];
  load_any(p, dtype, at, x);
  return x[0];
}
__device__ __forceinline__ void store_any(void *p, int dtype, int64_t at, float x) {
  const float y[1] = {x};
  store_any(p, dtype, at, y);
}

/* Loads a number here, not where it is first used. */
__device__ __forceinline__ int load_now(const int32_t *p) {
  int x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}
/* Hides how an address was computed, so that it is not computed again for each element. */
template <class T> __device__ __forceinline__ void opaque(T *&p) {
  asm volatile("" : "+l"(p));
}

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ uint4 load_shared(uint32_t shared) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_shared(uint32_t shared, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

/* Keys in the order of the numbers: equal for -0 and 0; only NaN has 0. */
__device__ __forceinline__ uint32_t order_key(float x) {
  uint32_t bits = __float_as_uint(x + 0.0f);
  return x != x ? 0 : bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}
__device__ __forceinline__ float order_value(uint32_t key) { /* NaN for key 0 */
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}

/* A rank is an integer for each number; numbers that come earlier have smaller ones.
 * RANK_LEAST is the rank of -inf, the last before NaN; no element has RANK_NONE. */
constexpr uint32_t RANK_LEAST = 0xFF800000u, RANK_NAN = 0xFFFFFFFEu, RANK_NONE = 0xFFFFFFFFu;

__device__ __forceinline__ uint32_t rank_of(float x) {
  uint32_t key = order_key(x);
  return x != x ? RANK_NAN : ~key;
}
__device__ __forceinline__ float number_of(uint32_t rank) { /* NaN if there is none */
  return order_value(~rank);
}

/* ---- reductions ------------------------------------------------------------------ */

struct add_op {
  template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct max_op { /* of two NaN-free numbers; like fmaxf it ignores one NaN */
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ int operator()(int a, int b) const { return max(a, b); }
};
struct min_op {
  __device__ float operator()(float a, float b) const { return fminf(a, b); }
  __device__ int operator()(int a, int b) const { return min(a, b); }
};

/* Every lane of each group of LANES neighbours (a power of two) gets the group's result. */
template <int LANES = WARP, class T, class F>
__device__ __forceinline__ T warp_reduce(T x, F f) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2)
    x = f(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}
template <int LANES = WARP, class T> __device__ __forceinline__ T warp_sum(T x) {
  return warp_reduce<LANES>(x, add_op());
}
template <int LANES = WARP, class T> __device__ __forceinline__ T warp_max(T x) {
  return warp_reduce<LANES>(x, max_op());
}
template <int LANES = WARP, class T> __device__ __forceinline__ T warp_min(T x) {
  return warp_reduce<LANES>(x, min_op());
}

/* Four sums over LANES lanes each. A lane gets the sum that its two top bits name, with 5
 * shuffles instead of 16. */
template <int LANES>
__device__ __forceinline__ float sum_of_four(const float (&x)[4], int lane) {
  bool high = lane & (LANES / 2), odd = lane & (LANES / 4);
  float keep0 = high ? x[2] : x[0], keep1 = high ? x[3] : x[1];
  keep0 += __shfl_xor_sync(ALL_LANES, high ? x[0] : x[2], LANES / 2);
  keep1 += __shfl_xor_sync(ALL_LANES, high ? x[1] : x[3], LANES / 2);
  float sum = odd ? keep1 : keep0;
  sum += __shfl_xor_sync(ALL_LANES, odd ? keep0 : keep1, LANES / 4);
  return warp_sum<LANES / 4>(sum);
}

/* Every thread of the block (whole warps, 1-D) gets the result, in an order that depends only
 * on the block's size. `shared` has 32 elements; the caller may reuse it at once. */
template <class T, class F>
__device__ __forceinline__ T block_reduce(T x, F f, T none, T *shared) {
  x = warp_reduce(x, f);
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = warp_reduce(lane < warps ? shared[lane] : none, f);
  __syncthreads(); /* before the caller writes `shared` again */
  return x;
}
template <class T> __device__ __forceinline__ T block_sum(T x, T *shared) {
  return block_reduce(x, add_op(), T(0), shared);
}
__device__ __forceinline__ float block_max(float x, float *shared) {
  return block_reduce(x, max_op(), -INFINITY, shared);
}

}  // namespace kvl

#endif
