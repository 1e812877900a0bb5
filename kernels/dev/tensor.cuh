/* Memory of any dtype for the programs of this folder: poisoned when it is made, filled with
 * normal numbers, read back as floats or as bits. */
#ifndef KVL_DEV_TENSOR_CUH
#define KVL_DEV_TENSOR_CUH

#include "convert.cuh"

#include "dev.cuh"

namespace {

const char *const DTYPES[] = {"f32", "f16", "bf16", "f8e4m3"}; /* ORDER kvl_dtype */
enum {
  F32 = KVL_DTYPE_F32,
  F16 = KVL_DTYPE_F16,
  BF16 = KVL_DTYPE_BF16,
  F8 = KVL_DTYPE_F8E4M3,
};
size_t bytes_of(int dtype) { return dtype == F32 ? 4 : dtype == F8 ? 1 : 2; }

float rounded(int dtype, float x) {
  if (dtype == F16) return __half2float(__float2half_rn(x));
  if (dtype == BF16) return __bfloat162float(__float2bfloat16_rn(x));
  if (dtype == F8)
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(
        __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3), __NV_E4M3)));
  return x;
}

template <class To, class From>
__global__ void cast_kernel(const From *from, To *to, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
       i += (size_t)gridDim.x * blockDim.x)
    to[i] = kvl::convert<To>(from[i]);
}
int cast(const void *from, int from_dtype, void *to, int to_dtype, size_t n) {
  KVL_CUDA_BY_ANY(from_dtype, From, {KVL_CUDA_BY_ANY(to_dtype, To, {
                    cast_kernel<<<1056, 256>>>((const From *)from, (To *)to, n);
                  })})
  return KVL_OK;
}

/* Device memory of one dtype; freed with the tensor. */
struct tensor {
  void *at;
  int dtype;
  size_t count;
  tensor(int dtype_, size_t count_) : dtype(dtype_), count(count_) { /* poisoned */
    at = dev::alloc<char>(std::max<size_t>(count * bytes_of(dtype), 16));
  }
  tensor(const tensor &) = delete;
  ~tensor() { cudaFree(at); }
  tensor &random(uint64_t seed, float std = 1.f) {
    float *x = dev::randn<float>(count, seed, std);
    cast(x, F32, at, dtype, count);
    DEV_CHECK(cudaDeviceSynchronize());
    DEV_CHECK(cudaFree(x));
    return *this;
  }
  tensor &copy(const tensor &from) {
    DEV_CHECK(cudaMemcpy(at, from.at, count * bytes_of(dtype), cudaMemcpyDeviceToDevice));
    return *this;
  }
  std::vector<float> read() const {
    float *x = dev::alloc<float>(count);
    cast(at, dtype, x, F32, count);
    std::vector<float> host = dev::download(x, count);
    DEV_CHECK(cudaFree(x));
    return host;
  }
  std::vector<uint8_t> bits() const {
    return dev::download((const uint8_t *)at, count * bytes_of(dtype));
  }
};
template <class T> struct list {
  T *at;
  std::vector<T> host;
  list(std::vector<T> values) : at(dev::upload(values)), host(std::move(values)) {}
  list(const list &) = delete;
  ~list() { cudaFree(at); }
};

}  // namespace

#endif
