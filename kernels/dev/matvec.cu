/* A decode step's matrix products: few rows a [m, k] by weights b [n, k], bf16. Every version
 * is checked against sums in double, then timed.
 *
 *   1  cuBLAS (GemmEx, its own choice)
 *   2  a warp for each row of b, registers one batch ahead
 *   3  matvec.cuh: four warps
 *
 *        n      k   m   bytes / R     1      2      3
 *     6144   4096   1        16.2   22.6   21.9   21.7
 *     4096   4096   1        10.8   17.5   17.6   16.1
 *    28672   4096   1        75.8   86.0   81.8   81.7
 *     4096  14336   1        37.9   45.3   48.6   44.4
 *   128256   4096   1       339.2  377.6  345.0  346.3
 *   128256   4096   2       339.2  378.0  348.5  347.7
 *    28672   4096   4       75.8    87.2   86.3  100.0
 * us of single launches, of which 4 are the launch; H100 80GB HBM3, 2026-11-21. From three
 * rows on the products cost more than is gained: cuBLAS.
 *
 * See dev.cuh for how to compile it; add -lcublas. */
#include "dev.cuh"
#include "matvec.cuh"

#include <cublas_v2.h>

namespace {

using bf16 = __nv_bfloat16;

__global__ void slow(const bf16 *a, const bf16 *b, double *out, double *size, int m,
                     int64_t n, int k) {
  int64_t at = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (at >= m * n) return;
  const bf16 *x = a + at / n * k, *w = b + at % n * k;
  double sum = 0, absolute = 0;
  for (int i = 0; i < k; i++) {
    double p = (double)__bfloat162float(x[i]) * __bfloat162float(w[i]);
    sum += p;
    absolute += fabs(p);
  }
  out[at] = sum;
  size[at] = absolute;
}

struct problem {
  int m;
  int64_t n;
  int k;
  bf16 *a, *b;
  kvl_matmul_args args(void *out, int out_dtype) const {
    kvl_matmul_args g = {};
    g.a = a, g.b = b, g.out = out, g.batch = 1, g.m = m, g.n = n, g.k = k;
    g.transpose_b = 1, g.dtype = KVL_DTYPE_BF16, g.out_dtype = out_dtype;
    return g;
  }
};

kvl_cuda_queue queue() {
  kvl_cuda_queue q = {};
  cudaDeviceProp p;
  DEV_CHECK(cudaGetDeviceProperties(&p, 0));
  q.sm_count = p.multiProcessorCount;
  q.shared_optin = (int)p.sharedMemPerBlockOptin;
  return q;
}

bool check(const problem &p, const kvl_cuda_queue *q) {
  const size_t count = (size_t)p.m * p.n;
  float *out = dev::alloc<float>(count);
  double *want = dev::alloc<double>(count), *size = dev::alloc<double>(count);
  if (kvl::launch_matvec(p.args(out, KVL_DTYPE_F32), q) < 0) return false;
  slow<<<(unsigned)((count + 127) / 128), 128>>>(p.a, p.b, want, size, p.m, p.n, p.k);
  DEV_CHECK(cudaDeviceSynchronize());
  std::vector<float> got = dev::download(out, count);
  std::vector<double> w = dev::download(want, count), s = dev::download(size, count);
  double worst = 0;
  for (size_t i = 0; i < count; i++)
    worst = std::max(worst,
                     !(fabs(got[i] - w[i]) <= 1e30) ? 1e30 : fabs(got[i] - w[i]) / s[i]);
  cudaFree(out), cudaFree(want), cudaFree(size);
  bool ok = worst < 2e-6;
  if (!ok)
    printf("WRONG m %d n %lld k %d: off by %g of the sum of sizes\n", p.m, (long long)p.n,
           p.k, worst);
  return ok;
}

}  // namespace

int main() {
  kvl_cuda_queue q = queue();
  cublasHandle_t blas;
  cublasCreate(&blas);
  int wrong = 0, checks = 0;
  for (int m = 1; m <= 2; m++)
    for (int64_t n : {1, 2, 31, 132, 1000, 4097})
      for (int k : {8, 16, 256, 264, 2048, 2056, 4096, 14336}) {
        problem p = {m, n, k, dev::randn<bf16>((size_t)m * k, 1), dev::randn<bf16>(n * k, 2)};
        wrong += !check(p, &q), checks++;
        cudaFree(p.a), cudaFree(p.b);
      }
  printf("%d checks, %d wrong\n", checks, wrong);
  dev::bench b;
  const double R = b.read_bandwidth();
  printf("R %.0f GB/s\n%8s %6s  m  bytes/R   cuBLAS       matvec\n", R / 1e3, "n", "k");
  const struct {
    int64_t n;
    int k;
  } shapes[] = {{6144, 4096},   {4096, 4096}, {28672, 4096}, {4096, 14336},
                {128256, 4096}, {1024, 4096}, {1536, 1536},  {512, 256}};
  for (auto s : shapes)
    for (int m = 1; m <= 2; m++) {
      problem p = {m, s.n, s.k, dev::randn<bf16>((size_t)m * s.k, 1),
                   dev::randn<bf16>(s.n * s.k, 2)};
      bf16 *out = dev::alloc<bf16>(m * s.n);
      const float one = 1, zero = 0;
      auto cublas = [&] {
        cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)s.n, m, s.k, &one, p.b, CUDA_R_16BF,
                     s.k, p.a, CUDA_R_16BF, s.k, &zero, out, CUDA_R_16BF, (int)s.n,
                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
      };
      const kvl_matmul_args g = p.args(out, KVL_DTYPE_BF16);
      auto ours = [&] { kvl::launch_matvec(g, &q); };
      const double limit = (double)s.n * s.k * 2 / R;
      printf("%8lld %6d %2d  %7.1f", (long long)s.n, s.k, m, limit);
      for (double t : {b.time(cublas), b.time(ours)}) printf("  %6.1f %4.2f", t, limit / t);
      printf("\n");
      cudaFree(p.a), cudaFree(p.b), cudaFree(out);
    }
  return wrong > 0;
}
