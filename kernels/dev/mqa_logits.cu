/* Logits of an indexer, and the keys that they are made of. Compile: see dev.cuh, with the
 * CPU's kernels of a key beside it:
 *
 *   for f in quantise_rows hadamard index_append index_gather; do gcc -O3 -std=gnu17 -mavx2 \
 *     -mfma -mf16c -ffp-contract=off -DKVL_ISA=avx2 -DKVL_ISA_AVX2=1 -I kernels -I runtime \
 *     -c kernels/cpu/$f.c; done
 *   nvcc ... kernels/dev/mqa_logits.cu *.o -o mqa_logits -lcuda -lcublasLt -lgomp
 *
 * `mqa_logits short` leaves the checks out. Versions, 64 heads of 128, f32 logits; causal
 * prefill in TFLOP/s, decode over blocks of 64 (the last: 16) as a share of R; H100 80GB,
 * 2026-11-21, F 1450 to 1489 TFLOP/s:
 *       2048 x 32K  4096 x 64K  4096 x 4096   64 x 64K  16 x 32K  1 x 128K  blocks of 16
 *   1      1091        1051         720         0.841     0.704     0.411      0.654
 *   2      1079        1058         918         0.884     0.698     0.407      0.781
 *   3      1072        1045         922         0.873     0.701     0.428      0.748
 *   4      1083        1061         931         0.889     0.719     0.433      0.779
 * 1  one warp brings all; shares count tiles; a lookup of the block table for each tile
 * 2  a warp for items and one for tiles, 32 lookups at once and one time ahead; a group costs
 *    a share a unit to begin
 * 3  2; up to 32 groups, each warp finds its share without a barrier; lengths and tables are
 *    asked for early; decode in tiles of 128 tokens, one product for a consumer
 * 4  3 with tiles of 256 tokens again: shipped
 */
#include <cublasLt.h>

#include <cstring>

#include "../cuda/hadamard.cu"
#include "../cuda/index_append.cu"
#include "../cuda/index_gather.cu"
#include "../cuda/mqa_logits.cu"
#include "../cuda/mqa_logits_paged.cu"
#include "../cuda/quantise_rows.cu"

#include "dev.cuh"

extern "C" {
kvl_kernel kvl_cpu_quantise_rows_avx2, kvl_cpu_hadamard_avx2, kvl_cpu_index_append_avx2,
    kvl_cpu_index_gather_avx2;
}

namespace {

using kvl::f8e4m3;

kvl_cuda_queue the_queue() {
  cudaDeviceProp p;
  DEV_CHECK(cudaGetDeviceProperties(&p, 0));
  kvl_cuda_queue q = {};
  q.sm_count = p.multiProcessorCount, q.shared_optin = (int)p.sharedMemPerBlockOptin;
  return q;
}

uint64_t state = 1;
uint32_t any(uint32_t n) { /* 0 ... n - 1 */
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)((state >> 33) % n);
}

template <class T> void free_all(std::vector<T *> list) {
  for (T *p : list) cudaFree(p);
}

/* ---- the bytes of keys against the CPU's ------------------------------------------------ */

template <class T>
bool same_bytes(const char *what, const T *there, const std::vector<T> &here) {
  const std::vector<T> got = dev::download(there, here.size());
  size_t differ = 0, first = 0;
  for (size_t i = 0; i < here.size(); i++)
    if (memcmp(&got[i], &here[i], sizeof(T)) && !differ++) first = i;
  if (differ)
    printf("WRONG %s: %zu of %zu differ, first %zu\n", what, differ, here.size(), first);
  return differ == 0;
}

bool check_keys(const kvl_cuda_queue *q) {
  bool ok = true;
  for (int dtype : {KVL_DTYPE_F32, KVL_DTYPE_F16, KVL_DTYPE_BF16})
    for (int dim : {1, 8, 33, 64, 128, 1024}) {
      const int64_t rows = 3000, count = rows * dim;
      const int bytes = dtype == KVL_DTYPE_F32 ? 4 : 2;
      std::vector<uint8_t> x(count * bytes);
      for (int64_t i = 0; i < count; i++) {
        const int exponent = (int)any(12) - 28 - (int)(i / dim % 7) * 4;
        const float v = ldexpf((float)any(1 << 24) - (1 << 23), exponent);
        if (dtype == KVL_DTYPE_F32) memcpy(&x[i * 4], &v, 4);
        const __half h = __float2half(v);
        const __nv_bfloat16 b = __float2bfloat16(v);
        if (dtype == KVL_DTYPE_F16) memcpy(&x[i * 2], &h, 2);
        if (dtype == KVL_DTYPE_BF16) memcpy(&x[i * 2], &b, 2);
      }
      for (int i = 0; i < 9; i++) /* NaN and infinities among them */
        memset(&x[any((uint32_t)count) * bytes], i % 3 ? 0xFF : 0x7F, bytes);
      uint8_t *x_there = dev::upload(x);
      std::vector<uint8_t> out(count);
      std::vector<float> scales(rows);
      uint8_t *out_there = dev::alloc<uint8_t>(count);
      float *scales_there = dev::alloc<float>(rows);
      kvl_quantise_rows_args a = {x.data(), out.data(), scales.data(), rows, dim, dtype};
      kvl_cpu_quantise_rows_avx2(&a, nullptr);
      a.x = x_there, a.out = out_there, a.scales = scales_there;
      kvl_cuda_quantise_rows(&a, (void *)q);
      ok &= same_bytes("quantise_rows", out_there, out);
      ok &= same_bytes("scales", scales_there, scales);
      if ((dim & (dim - 1)) == 0) {
        std::vector<uint8_t> turned(x.size());
        kvl_hadamard_args h = {x.data(), turned.data(), rows, 0.125f, dim, dtype};
        /* NaNs have many bits: without them */
        for (int64_t i = 0; i < count; i++)
          if (bytes == 2 ? (x[i * 2 + 1] & 0x7C) == 0x7C : (x[i * 4 + 3] & 0x7F) == 0x7F)
            memset(&x[i * bytes], 0, bytes);
        DEV_CHECK(cudaMemcpy(x_there, x.data(), x.size(), cudaMemcpyHostToDevice));
        kvl_cpu_hadamard_avx2(&h, nullptr);
        uint8_t *turned_there = dev::alloc<uint8_t>(x.size());
        h.x = x_there, h.out = turned_there;
        kvl_cuda_hadamard(&h, (void *)q);
        ok &= same_bytes("hadamard", turned_there, turned);
        cudaFree(turned_there);
      }
      if (dim == 64 || dim == 128)
        for (int size : {1, 7, 64}) {
          const int64_t blocks = rows / size + 2, row = size * (dim + 4);
          std::vector<uint8_t> cache(blocks * row, 0xFF), k(count);
          std::vector<int64_t> places(rows);
          const std::vector<int32_t> order = dev::shuffled((int)(blocks * size), 3);
          for (int64_t i = 0; i < rows; i++) places[i] = i % 5 == 4 ? -1 : order[i];
          uint8_t *cache_there = dev::upload(cache);
          int64_t *places_there = dev::upload(places);
          kvl_index_append_args p = {
              {cache.data(), blocks, size, dim}, x.data(), places.data(), rows, dtype};
          kvl_cpu_index_append_avx2(&p, nullptr);
          p.cache.memory = cache_there, p.k = x_there, p.places = places_there;
          kvl_cuda_index_append(&p, (void *)q);
          ok &= same_bytes("index_append", cache_there, cache);
          kvl_index_gather_args g = {{cache.data(), blocks, size, dim},
                                     places.data(),
                                     k.data(),
                                     scales.data(),
                                     rows};
          kvl_cpu_index_gather_avx2(&g, nullptr);
          g.cache.memory = cache_there, g.places = places_there, g.k = out_there;
          g.scales = scales_there;
          kvl_cuda_index_gather(&g, (void *)q);
          ok &= same_bytes("index_gather", out_there, k);
          ok &= same_bytes("gathered scales", scales_there, scales);
          cudaFree(cache_there), cudaFree(places_there);
        }
      cudaFree(x_there), cudaFree(out_there), cudaFree(scales_there);
    }
  return ok;
}

/* ---- logits ----------------------------------------------------------------------------- */

__device__ float f8_value(uint8_t x) { return kvl::to_float(f8e4m3{x}); }

/* Slow and obvious, in double: want, and the sum of sizes. A thread an element. */
__global__ void reference(const uint8_t *q, const float *weights, const uint8_t *k,
                          const float *scales, int64_t rows, int64_t tokens, int heads,
                          int dim, const int64_t *slot_of, int64_t each, float *want,
                          float *size) {
  const int64_t count = rows * tokens;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count;
       i += (int64_t)gridDim.x * blockDim.x) {
    const int64_t r = i / tokens, j = i % tokens;
    const int64_t place = slot_of ? slot_of[r / each * tokens + j] : j;
    if (place < 0) {
      want[i] = -INFINITY, size[i] = 0;
      continue;
    }
    double sum = 0, all = 0;
    for (int h = 0; h < heads; h++) {
      double dot = 0, sizes = 0;
      for (int d = 0; d < dim; d++) {
        const double p = (double)f8_value(q[(r * heads + h) * dim + d]) *
                         f8_value(k[place * dim + d]);
        dot += p, sizes += fabs(p);
      }
      sum += weights[r * heads + h] * fmax(dot, 0.);
      all += fabs(weights[r * heads + h]) * sizes;
    }
    want[i] = (float)(sum * scales[place]);
    size[i] = (float)(all * fabs(scales[place]));
  }
}

struct shape_case {
  const char *name;
  int64_t rows, tokens, columns;
  int heads, dim, block_size, each, dtype; /* block_size 0: contiguous */
  int ranges; /* 0: all of it, 1: newest rows, causal, 2: any, also empty */
  bool whole; /* small whole numbers: exact */
};

struct problem {
  shape_case c;
  int64_t keys, blocks = 0, width = 0; /* keys: that there are */
  uint8_t *q, *k, *cache = nullptr;
  float *weights, *scales, *plain;
  int32_t *starts, *ends, *tables = nullptr;
  std::vector<int32_t> begin, end; /* of rows, clipped */
  std::vector<int64_t> slot_of;
  void *logits;

  uint8_t *numbers(size_t count, uint64_t seed) {
    uint8_t *p = dev::alloc<uint8_t>(count);
    float *x = dev::randn<float>(count, seed, c.whole ? 1.5f : 60.f);
    std::vector<float> v = dev::download(x, count);
    std::vector<uint8_t> b(count);
    for (size_t i = 0; i < count; i++)
      b[i] = __nv_cvt_float_to_fp8(c.whole ? fminf(fmaxf(rintf(v[i]), -3.f), 3.f) : v[i],
                                   __NV_SATFINITE, __NV_E4M3);
    DEV_CHECK(cudaMemcpy(p, b.data(), count, cudaMemcpyHostToDevice));
    cudaFree(x);
    return p;
  }
  float *floats(size_t count, uint64_t seed, bool positive) {
    float *x = dev::randn<float>(count, seed, c.whole ? 2.f : 1.f);
    std::vector<float> v = dev::download(x, count);
    for (float &f : v) {
      if (c.whole) f = rintf(f);
      else if (positive) f = fabsf(f) * 0.01f;
    }
    DEV_CHECK(cudaMemcpy(x, v.data(), count * 4, cudaMemcpyHostToDevice));
    return x;
  }
  explicit problem(const shape_case &c_) : c(c_) {
    state = (uint64_t)(c.rows * 7 + c.tokens * 3 + c.heads);
    const int64_t sequences = c.block_size ? c.rows / c.each : 1;
    if (c.block_size) {
      width = (c.tokens + c.block_size - 1) / c.block_size;
      blocks = width * sequences + 1;
      keys = blocks * c.block_size;
    } else keys = c.tokens;
    q = numbers((size_t)c.rows * c.heads * c.dim, 1);
    k = numbers((size_t)keys * c.dim, 2);
    weights = floats((size_t)c.rows * c.heads, 3, false);
    scales = floats((size_t)keys, 4, true);
    const int bytes = c.dtype == KVL_DTYPE_F32 ? 4 : 2;
    logits = dev::alloc<uint8_t>((size_t)c.rows * c.columns * bytes);
    const int64_t most = std::min(c.tokens, c.columns);
    std::vector<int32_t> s(c.rows, 0), e(c.rows, (int32_t)c.tokens);
    for (int64_t r = 0; r < c.rows; r++) {
      if (c.ranges == 1) e[r] = (int32_t)std::max<int64_t>(0, c.tokens - c.rows + r + 1);
      if (c.ranges == 2) {
        s[r] = c.block_size ? 0 : (int)any((uint32_t)c.tokens) - 3;
        e[r] = any(5) == 0 ? s[r] - 1 : s[r] + (int)any((uint32_t)c.tokens);
        if (any(7) == 0) e[r] = (int)c.tokens + 50;
      }
      begin.push_back(std::max(s[r], 0));
      end.push_back((int32_t)std::min<int64_t>(e[r], most));
    }
    starts = dev::upload(s), ends = dev::upload(e);
    if (!c.block_size) return;
    std::vector<int32_t> table = dev::shuffled((int)blocks, 5);
    table.resize(width * sequences);
    if (c.ranges == 2)
      for (size_t i = 1; i < table.size(); i += 11) table[i] = i % 2 ? -1 : (int)blocks;
    tables = dev::upload(table);
    const int64_t row = c.block_size * (c.dim + 4);
    std::vector<uint8_t> memory(blocks * row), bytes_k = dev::download(k, keys * c.dim);
    std::vector<float> all = dev::download(scales, keys);
    for (int64_t b = 0; b < blocks; b++) {
      memcpy(&memory[b * row], &bytes_k[b * c.block_size * c.dim], c.block_size * c.dim);
      memcpy(&memory[b * row + c.block_size * c.dim], &all[b * c.block_size],
             c.block_size * 4);
    }
    cache = dev::upload(memory);
    for (int64_t s2 = 0; s2 < sequences; s2++)
      for (int64_t j = 0; j < c.tokens; j++) {
        const int32_t block = table[s2 * width + j / c.block_size];
        const bool has = block >= 0 && block < blocks;
        slot_of.push_back(has ? block * c.block_size + j % c.block_size : -1);
      }
  }
  ~problem() {
    for (void *p : {(void *)q, (void *)k, (void *)weights, (void *)scales, (void *)starts,
                    (void *)ends, (void *)tables, (void *)cache, logits})
      cudaFree(p);
  }
  void run(const kvl_cuda_queue *queue, bool mma) const {
    if (c.block_size) {
      kvl_mqa_logits_paged_args a = {{cache, blocks, c.block_size, c.dim},
                                     q,
                                     weights,
                                     tables,
                                     ends,
                                     logits,
                                     c.rows / c.each,
                                     c.each,
                                     width,
                                     c.columns,
                                     c.heads,
                                     c.dtype};
      if (mma) kvl::mqa_logits_mma(kvl::mqa_paged{a}, queue);
      else kvl_cuda_mqa_logits_paged(&a, (void *)queue);
    } else {
      kvl_mqa_logits_args a = {q,      k,        weights,   scales,  starts, ends,   logits,
                               c.rows, c.tokens, c.columns, c.heads, c.dim,  c.dtype};
      if (mma) kvl::mqa_logits_mma(kvl::mqa_contiguous{a}, queue);
      else kvl_cuda_mqa_logits(&a, (void *)queue);
    }
  }
  double elements() const {
    double n = 0;
    for (size_t r = 0; r < begin.size(); r++) n += std::max(0, end[r] - begin[r]);
    return n;
  }
};

std::vector<float> logits_of(const problem &p) {
  const size_t count = (size_t)p.c.rows * p.c.columns;
  if (p.c.dtype == KVL_DTYPE_F32) return dev::download((float *)p.logits, count);
  std::vector<__nv_bfloat16> raw = dev::download((__nv_bfloat16 *)p.logits, count);
  std::vector<float> out(count);
  for (size_t i = 0; i < count; i++) out[i] = __bfloat162float(raw[i]);
  return out;
}

bool check(const shape_case &c, const kvl_cuda_queue *q) {
  bool ok = true;
  problem p(c);
  const size_t count = (size_t)c.rows * c.tokens;
  float *want_there = dev::alloc<float>(count), *size_there = dev::alloc<float>(count);
  int64_t *places = p.slot_of.empty() ? nullptr : dev::upload(p.slot_of);
  reference<<<1056, 256>>>(p.q, p.weights, p.k, p.scales, c.rows, c.tokens, c.heads, c.dim,
                           places, c.each, want_there, size_there);
  const std::vector<float> want = dev::download(want_there, count);
  const std::vector<float> size = dev::download(size_there, count);
  for (bool mma : {false, true}) {
    const int bytes = c.dtype == KVL_DTYPE_F32 ? 4 : 2;
    DEV_CHECK(cudaMemset(p.logits, 0xFF, (size_t)c.rows * c.columns * bytes));
    p.run(q, mma);
    DEV_CHECK(cudaDeviceSynchronize());
    const std::vector<float> got = logits_of(p);
    double worst = 0, both = 0, all = 0;
    size_t touched = 0, missed = 0, wrong = 0;
    for (int64_t r = 0; r < c.rows; r++)
      for (int64_t j = 0; j < c.columns; j++) {
        const float g = got[r * c.columns + j];
        if (j < p.begin[r] || j >= p.end[r]) {
          touched += g == g;
          continue;
        }
        const double w = want[r * c.tokens + j], s = size[r * c.tokens + j];
        if (g != g) missed++;
        else if (w == -INFINITY || g == -INFINITY) wrong += g != w;
        else {
          const double rounding = c.dtype == KVL_DTYPE_F32 ? 1e-7 : 0.004;
          const double off = std::max(0., fabs(g - w) - rounding * fabs(w)) / (s + 1e-30);
          if (off > worst) worst = off;
          if (c.whole && c.dtype == KVL_DTYPE_F32) wrong += g != (float)w;
          both += 2 * w * g, all += w * w + (double)g * g;
        }
      }
    const double limit = mma ? 2e-6 : 2e-4, difference = all > 0 ? 1 - both / all : 0;
    const bool good = worst <= limit && !touched && !missed && !wrong &&
                      (difference < 5e-6 || c.dtype != KVL_DTYPE_F32);
    if (!good || !strncmp(c.name, "show", 4))
      printf("%s %s (%s) %ld x %ld, %d heads of %d, block %d: off %.2g of size, "
             "difference %.2g, %zu touched, %zu missed, %zu wrong\n",
             good ? "right" : "WRONG", c.name, mma ? "mma" : "chosen", (long)c.rows,
             (long)c.tokens, c.heads, c.dim, c.block_size, worst, difference, touched, missed,
             wrong);
    ok &= good;
  }
  cudaFree(want_there), cudaFree(size_there), cudaFree(places);
  return ok;
}

std::vector<shape_case> check_cases() {
  const int F = KVL_DTYPE_F32, B = KVL_DTYPE_BF16;
  std::vector<shape_case> cases = {
      {"show", 64, 4096, 4096, 64, 128, 0, 1, F, 0, false},
      {"show", 32, 2048, 2048, 64, 128, 64, 1, F, 0, false},
  };
  for (int dim : {32, 64, 128})
    for (int heads : {8, 20, 32, 64}) {
      for (int ranges : {0, 1, 2})
        for (int64_t rows : {1, 3, 37, 530})
          cases.push_back({"contiguous", rows, 1000 + rows, 1000 + rows, heads, dim, 0, 1,
                           ranges == 1 ? B : F, ranges, false});
      cases.push_back({"one token", 5, 1, 1, heads, dim, 0, 1, F, 0, false});
      cases.push_back({"fewer columns", 9, 700, 333, heads, dim, 0, 1, F, 0, false});
      cases.push_back({"more columns", 9, 333, 700, heads, dim, 0, 1, F, 2, false});
      cases.push_back({"whole numbers", 130, 3000, 3000, heads, dim, 0, 1, F, 2, true});
      for (int size : {1, 8, 24, 64, 100, 256})
        for (int each : {1, 2, 5})
          cases.push_back({"paged", 7 * each, 1111, 1111, heads, dim, size, each,
                           each == 2 ? B : F, size % 3 ? 2 : 0, false});
      cases.push_back({"paged, long", 2, 20000, 20000, heads, dim, 64, 1, F, 0, false});
      cases.push_back({"paged, many", 700, 190, 190, heads, dim, 64, 1, F, 2, true});
    }
  return cases;
}

/* ---- time ------------------------------------------------------------------------------- */

/* F: f8e4m3 GEMM 8192^3 into bf16, TFLOP/s. */
double gemm_rate(dev::bench &b) {
  const int n = 8192;
  uint8_t *x = dev::alloc<uint8_t>((size_t)n * n), *y = dev::alloc<uint8_t>((size_t)n * n);
  float *r = dev::randn<float>((size_t)n * n, 9, 1.f);
  kvl_quantise_rows_args a = {r, x, dev::alloc<float>(n), n, n, KVL_DTYPE_F32};
  const kvl_cuda_queue q = the_queue();
  kvl_cuda_quantise_rows(&a, (void *)&q);
  a.out = y;
  kvl_cuda_quantise_rows(&a, (void *)&q);
  __nv_bfloat16 *out = dev::alloc<__nv_bfloat16>((size_t)n * n);
  cublasLtHandle_t lt;
  cublasLtCreate(&lt);
  cublasLtMatmulDesc_t op;
  cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const cublasOperation_t t = CUBLAS_OP_T;
  cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t);
  cublasLtMatrixLayout_t in, to;
  cublasLtMatrixLayoutCreate(&in, CUDA_R_8F_E4M3, n, n, n);
  cublasLtMatrixLayoutCreate(&to, CUDA_R_16BF, n, n, n);
  cublasLtMatmulPreference_t wish;
  cublasLtMatmulPreferenceCreate(&wish);
  const size_t room = 32 << 20;
  void *workspace = dev::alloc<uint8_t>(room);
  cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room,
                                       sizeof room);
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  cublasLtMatmulAlgoGetHeuristic(lt, op, in, in, to, to, wish, 1, &found, &count);
  if (!count) return 0;
  const float one = 1, zero = 0;
  const double us = b.time([&] {
    cublasLtMatmul(lt, op, &one, x, in, y, in, &zero, out, to, out, to, &found.algo,
                   workspace, room, nullptr);
  });
  free_all<void>({x, y, r, out, workspace, a.scales});
  return 2.0 * n * n * n / us * 1e-6;
}

}  // namespace

int main(int count, char **words) {
  const bool is_short = count > 1 && !strcmp(words[1], "short");
  const kvl_cuda_queue q = the_queue();
  bool ok = is_short || check_keys(&q);
  if (!is_short)
    for (const shape_case &c : check_cases()) ok &= check(c, &q);
  printf("%s\n", ok ? "all right" : "WRONG");
  dev::bench b;
  const double R = b.read_bandwidth(), F = gemm_rate(b);
  printf("R %.0f GB/s, F %.0f TFLOP/s\n", R * 1e-3, F);
  const int F32 = KVL_DTYPE_F32;
  const shape_case timed[] = {
      {"prefill", 2048, 32768, 32768, 64, 128, 0, 1, F32, 1, false},
      {"prefill", 4096, 65536, 65536, 64, 128, 0, 1, F32, 1, false},
      {"prefill", 2048, 4096, 4096, 64, 128, 0, 1, F32, 1, false},
      {"prefill", 4096, 4096, 4096, 64, 128, 0, 1, F32, 1, false},
      {"prefill", 2048, 32768, 32768, 64, 128, 0, 1, KVL_DTYPE_BF16, 1, false},
      {"prefill", 2048, 32768, 32768, 32, 128, 0, 1, F32, 1, false},
      {"prefill", 2048, 32768, 32768, 64, 64, 0, 1, F32, 1, false},
      {"decode", 64, 65536, 65536, 64, 128, 64, 1, F32, 0, false},
      {"decode", 16, 32768, 32768, 64, 128, 64, 1, F32, 0, false},
      {"decode", 1, 131072, 131072, 64, 128, 64, 1, F32, 0, false},
      {"decode", 128, 65536, 65536, 64, 128, 64, 2, F32, 0, false},
      {"decode", 64, 65536, 65536, 64, 128, 16, 1, F32, 0, false},
  };
  for (const shape_case &c : timed) {
    problem p(c);
    const double us = b.time([&] { p.run(&q, false); }), n = p.elements();
    const double tflops = 2.0 * n * c.heads * c.dim / us * 1e-6;
    const double out = n * (c.dtype == F32 ? 4 : 2);
    const double bytes = c.block_size ? n / c.each * (c.dim + 4) + out : 0;
    printf(
        "%s %5ld x %6ld, %d heads of %3d, %4s, block %2d, each %d: %8.1f us, %6.0f TFLOP/s "
        "(%.3f F)",
        c.name, (long)c.rows, (long)c.tokens, c.heads, c.dim, c.dtype == F32 ? "f32" : "bf16",
        c.block_size, c.each, us, tflops, tflops / F);
    if (c.block_size) printf(", %.0f GB/s (%.3f R)", bytes / us * 1e-3, bytes / us / R);
    printf("\n");
  }
  return !ok;
}
