/* kvl_linear for few rows. Every form is checked against sums in double, then timed: alone,
 * beside cuBLAS and the version for older devices, and as the chain of products that a step of
 * Llama-8B's shape computes, from a graph. notes/20261122-linear.md has the steps and what
 * lost.
 *
 *        n      k   m   bytes / R   cuBLAS   matvec   linear
 *     6144   4096   1        11.3     17.9     17.8     16.9   with its norm
 *     4096   4096   1         7.5     14.5     13.7     13.1   adds to out
 *    28672   4096   1        52.8     58.8     62.3     60.0   with its norm and SwiGLU
 *     4096  14336   1        26.4     32.5     33.8     32.9   adds to out
 *   128256   4096   1       237.8    247.3    254.8    241.9
 *   128256   4096   8       237.8    250.7             242.9
 * us of single launches, of which about 3 are the launch; one H200, 2026-11-23, the logits of a
 * later run than the others. cuBLAS and matvec do the product alone. The four products of a
 * layer, one after the other from a graph, with norms and frozen weights: 104.0 us for 1 row,
 * 0.95 R, 106.6 for 8; 110.3 for 16 without norms.
 *
 * See dev.cuh for how to compile it; add -lcublas. */
#include "dev.cuh"
#include "linear_wgmma.cuh"
#include "matvec.cuh"

#include <cublas_v2.h>

namespace {

using bf16 = __nv_bfloat16;

/* The scale of the row comes after the rounding, as in the kernel. */
__global__ void normalise(const bf16 *x, const bf16 *norm, float *h, int k, float eps) {
  double sum = 0;
  for (int i = 0; i < k; i++) sum += (double)__bfloat162float(x[i]) * __bfloat162float(x[i]);
  const float scale = 1.0f / sqrtf((float)(sum / k) + eps);
  for (int i = 0; i < k; i++) {
    const float v = __bfloat162float(x[i]);
    h[i] = norm ? __bfloat162float(__float2bfloat16(v * __bfloat162float(norm[i]))) * scale
                : v;
  }
}
__global__ void slow(const float *h, const bf16 *w, double *out, double *size, int64_t n,
                     int k) {
  int64_t at = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (at >= n) return;
  double sum = 0, absolute = 0;
  for (int i = 0; i < k; i++) {
    double p = (double)h[i] * __bfloat162float(w[at * k + i]);
    sum += p;
    absolute += fabs(p);
  }
  out[at] = sum;
  size[at] = absolute;
}

bool frozen = false; /* are the weights? */

struct problem {
  int m;
  int64_t n;
  int k, form;
  bool has_norm, has_bias;
  bf16 *x = nullptr, *w = nullptr, *norm = nullptr, *bias = nullptr;
  int64_t outputs() const { return form == KVL_LINEAR_SWIGLU ? n / 2 : n; }
  void open() {
    x = dev::randn<bf16>((size_t)m * k, 1, 2.f), w = dev::randn<bf16>(n * k, 2);
    norm = dev::randn<bf16>(k, 3), bias = dev::randn<bf16>(n, 4, 4.f);
  }
  void close() { cudaFree(x), cudaFree(w), cudaFree(norm), cudaFree(bias); }
  kvl_linear_args args(void *out, int out_dtype) const {
    kvl_linear_args g = {};
    g.x = x, g.weight = w, g.norm = has_norm ? norm : nullptr,
    g.bias = has_bias ? bias : nullptr, g.out = out, g.parts = 1;
    g.rows = m, g.n = n, g.k = k, g.eps = 1e-5f, g.form = form, g.frozen = frozen;
    g.dtype = g.norm_dtype = KVL_DTYPE_BF16, g.out_dtype = out_dtype;
    return g;
  }
};

kvl_cuda_queue queue() {
  kvl_cuda_queue q = {};
  cudaDeviceProp p;
  DEV_CHECK(cudaGetDeviceProperties(&p, 0));
  q.sm_count = p.multiProcessorCount;
  q.shared_optin = (int)p.sharedMemPerBlockOptin;
  DEV_CHECK(cudaStreamCreateWithFlags(&q.stream, cudaStreamNonBlocking));
  return q;
}

/* Without a norm that is a launch of its own. */
int launch(kvl_linear_args g, const kvl_cuda_queue *q) {
  if (!kvl::fuses_norm(g)) g.norm = nullptr;
  return kvl::launch_linear_wgmma(g, q);
}

bool check(problem p, const kvl_cuda_queue *q) {
  p.has_norm = p.has_norm && p.m <= 8;
  p.open();
  if (!kvl::takes_linear_wgmma(p.args(nullptr, KVL_DTYPE_F32), q)) {
    p.close();
    return true;
  }
  const int64_t count = p.m * p.outputs();
  float *out = dev::alloc<float>(count);
  std::vector<float> before(count, p.form == KVL_LINEAR_ADD ? 0.5f : NAN);
  DEV_CHECK(cudaMemcpy(out, before.data(), count * 4, cudaMemcpyHostToDevice));
  DEV_CHECK(cudaDeviceSynchronize());
  if (launch(p.args(out, KVL_DTYPE_F32), q) < 0) return false;
  DEV_CHECK(cudaDeviceSynchronize());
  std::vector<float> got = dev::download(out, count);
  float *h = dev::alloc<float>(p.k);
  double *want = dev::alloc<double>(p.n), *size = dev::alloc<double>(p.n);
  std::vector<bf16> bias = dev::download(p.bias, p.n);
  double worst = 0;
  for (int m = 0; m < p.m; m++) {
    normalise<<<1, 1>>>(p.x + (size_t)m * p.k, p.has_norm ? p.norm : nullptr, h, p.k, 1e-5f);
    slow<<<(unsigned)((p.n + 127) / 128), 128>>>(h, p.w, want, size, p.n, p.k);
    DEV_CHECK(cudaDeviceSynchronize());
    std::vector<double> y = dev::download(want, p.n), s = dev::download(size, p.n);
    for (int64_t i = 0; i < p.n; i++) {
      if (p.has_bias) y[i] += __bfloat162float(bias[i]);
      s[i] += 1;
    }
    for (int64_t i = 0; i < p.outputs(); i++) {
      double v = y[i], scale = s[i];
      if (p.form == KVL_LINEAR_ADD) v += 0.5;
      if (p.form == KVL_LINEAR_SWIGLU) {
        v = y[i] / (1 + exp(-y[i])) * y[i + p.n / 2];
        scale = s[i] * s[i + p.n / 2];
      }
      const double off = fabs(got[m * p.outputs() + i] - v) / scale;
      worst = std::max(worst, off <= 1e30 ? off : 1e30);
    }
  }
  cudaFree(out), cudaFree(h), cudaFree(want), cudaFree(size);
  p.close();
  /* a norm's sum has another order, which can move a rounding of h: 2^-9 of one product */
  const bool ok = worst < (p.has_norm ? 2e-4 : 4e-6);
  if (!ok)
    printf("WRONG m %d n %lld k %d form %d norm %d bias %d: off by %g of the sum of sizes\n",
           p.m, (long long)p.n, p.k, p.form, p.has_norm, p.has_bias, worst);
  return ok;
}

/* The products of `layers` layers, one after the other: microseconds of a replay. */
double chain(const kvl_cuda_queue *q, int layers, int m) {
  const struct {
    int64_t n;
    int k, form;
    bool norm;
  } shape[4] = {{6144, 4096, KVL_LINEAR_PLAIN, true},
                {4096, 4096, KVL_LINEAR_ADD, false},
                {28672, 4096, KVL_LINEAR_SWIGLU, true},
                {4096, 14336, KVL_LINEAR_ADD, false}};
  std::vector<problem> all;
  bf16 *x = dev::randn<bf16>((size_t)m * 4096, 1),
       *wide = dev::randn<bf16>((size_t)m * 28672, 2);
  std::vector<kvl_linear_args> calls;
  for (int l = 0; l < layers; l++)
    for (int i = 0; i < 4; i++) {
      problem p = {m, shape[i].n, shape[i].k, shape[i].form, shape[i].norm, false};
      p.w = dev::randn<bf16>((size_t)p.n * p.k, 7 + i, 0.01f);
      p.norm = dev::randn<bf16>(p.k, 3);
      kvl_linear_args g = p.args(i % 2 ? x : wide, KVL_DTYPE_BF16);
      g.x = i % 2 ? wide : x;
      all.push_back(p), calls.push_back(g);
    }
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  DEV_CHECK(cudaDeviceSynchronize());
  for (int i = 0; i < 4; i++)
    launch(calls[i], q); /* sets attributes, which is not recorded */
  DEV_CHECK(cudaDeviceSynchronize());
  DEV_CHECK(cudaStreamBeginCapture(q->stream, cudaStreamCaptureModeGlobal));
  for (auto &g : calls) launch(g, q);
  DEV_CHECK(cudaStreamEndCapture(q->stream, &graph));
  DEV_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t from, to;
  cudaEventCreate(&from), cudaEventCreate(&to);
  std::vector<float> times;
  for (int i = 0; i < 30; i++) {
    cudaEventRecord(from, q->stream);
    cudaGraphLaunch(exec, q->stream);
    cudaEventRecord(to, q->stream);
    DEV_CHECK(cudaEventSynchronize(to));
    float ms;
    cudaEventElapsedTime(&ms, from, to);
    times.push_back(ms * 1e3f);
  }
  std::sort(times.begin(), times.end());
  printf("least %.1f, largest %.1f: ", times[0] / layers, times[29] / layers);
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
  for (auto &p : all) cudaFree(p.w), cudaFree(p.norm);
  cudaFree(x), cudaFree(wide);
  return times[15];
}

void chains(const kvl_cuda_queue *q, double R) {
  const double bytes = 2.0 * (6144. * 4096 + 4096. * 4096 + 28672. * 4096 + 4096. * 14336);
  for (int i = 0; i < 10; i++) {
    const int layers = 16, m = 1 << i / 2;
    frozen = i % 2;
    const double t = chain(q, layers, m) / layers;
    printf("a layer's four products, %d rows%s: %.1f us, %.2f R\n", m,
           frozen ? ", frozen weights" : "", t, bytes / R / t);
  }
}

}  // namespace

/* `linear chain` only times the products of layers; `linear least` checks every 61st case, for
 * racecheck. */
int main(int count, char **words) {
  kvl_cuda_queue q = queue();
  const bool least = count > 1 && words[1][0] == 'l';
  if (count > 1 && !least) {
    dev::bench b;
    chains(&q, b.read_bandwidth());
    return 0;
  }
  cublasHandle_t blas;
  cublasCreate(&blas);
  int wrong = 0, checks = 0, cases = 0;
  for (int m : {1, 2, 4, 5, 8, 13, 16})
    for (int64_t n : {2, 132, 1002, 9900})
      for (int k : {32, 64, 256, 576, 2048, 2080, 4096, 6144, 14336}) {
        if (n > 9000 && k > 600) continue;
        for (int form = 0; form < 3; form++)
          for (int extra = 0; extra < 4; extra++) {
            if (least && cases++ % 61) continue;
            frozen = checks * 2654435761u >> 31;
            wrong += !check({m, n, k, form, (extra & 1) != 0, (extra & 2) != 0}, &q);
            checks++;
          }
      }
  printf("%d checks, %d wrong\n", checks, wrong);
  if (least) return wrong > 0;
  dev::bench b;
  const double R = b.read_bandwidth();
  printf("R %.0f GB/s\n%8s %6s  m  bytes/R   cuBLAS       matvec       linear\n", R / 1e3,
         "n", "k");
  const struct {
    int64_t n;
    int k, form;
  } shapes[] = {{6144, 4096, 0},   {4096, 4096, 1}, {28672, 4096, 2}, {4096, 14336, 1},
                {128256, 4096, 0}, {1024, 4096, 0}, {1536, 1536, 0},  {512, 256, 0}};
  kvl_cuda_queue main_stream = q;
  main_stream.stream = 0; /* what dev::bench times */
  for (auto s : shapes)
    for (int m : {1, 2, 4, 8, 16}) {
      problem p = {m, s.n, s.k, s.form, s.form != 1, false};
      p.open();
      bf16 *out = dev::alloc<bf16>(m * s.n);
      const float one = 1, zero = 0;
      auto cublas = [&] {
        cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)s.n, m, s.k, &one, p.w, CUDA_R_16BF,
                     s.k, p.x, CUDA_R_16BF, s.k, &zero, out, CUDA_R_16BF, (int)s.n,
                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
      };
      kvl_matmul_args old = {};
      old.a = p.x, old.b = p.w, old.out = out, old.batch = 1, old.m = m, old.n = s.n,
      old.k = s.k, old.transpose_b = 1, old.dtype = old.out_dtype = KVL_DTYPE_BF16;
      auto matvec = [&] {
        if (m <= 2) kvl::launch_matvec(old, &main_stream);
      };
      const kvl_linear_args g = p.args(out, KVL_DTYPE_BF16);
      auto ours = [&] {
        if (kvl::takes_linear_wgmma(g, &q)) launch(g, &main_stream);
      };
      const double limit = (double)s.n * s.k * 2 / R;
      printf("%8lld %6d %2d  %7.1f", (long long)s.n, s.k, m, limit);
      for (double t : {b.time(cublas), b.time(matvec), b.time(ours)})
        printf("  %6.1f %4.2f", t, limit / t);
      printf("\n");
      p.close(), cudaFree(out);
    }
  chains(&q, R);
  return wrong > 0;
}
