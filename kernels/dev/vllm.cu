/* PagedAttention V1 and V2 as kvlab ships them, and the append to their layout, on their own:
 * checked on every head size, block size and dtype, and timed beside vLLM's.
 *
 * us, bf16, 32/8 heads, head_dim 128, block 16, random tables, H100 80GB HBM3, 2026-11-21.
 * vLLM: its own kernels, 2026-11-20.
 *
 *               16 x 32K  1 x 32K  1 x 128K  8 x 4K  16 x 8K  64 x 4K  64 x 1K  64 x 8K
 *   V1              9039     2255         -     296      627      665      175     1888
 *   vLLM V1        15596
 *   V2              1159      101       325      97      312      590      181     1156
 *   vLLM V2         1313      111       365     107      343      663
 *
 * vLLM's rule takes V1 for 64 x 1K ... 8K: right up to 1K. What was tried stands in
 * kernels/cuda/vllm_attention.cu. ./vllm 0 only checks; ./vllm 1 and ./vllm 2 launch that
 * version twice, for a profiler. */
#include "../cuda/vllm_append.cu"
#include "../cuda/vllm_attention.cu"
#include "dev.cuh"

#include <cstdarg>
#include <cstring>

/* ---- what the backend gives to a launcher ------------------------------------------ */

int kvl_cuda::fail(int status, const char *format, ...) {
  va_list list;
  va_start(list, format);
  vprintf(format, list);
  va_end(list);
  puts("");
  return status;
}

using namespace kvl;

static kvl_cuda_queue queue_of_device() {
  kvl_cuda_queue q = {};
  DEV_CHECK(cudaDeviceGetAttribute(&q.sm_count, cudaDevAttrMultiProcessorCount, 0));
  DEV_CHECK(
      cudaDeviceGetAttribute(&q.shared_optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  return q;
}

/* ---- the slow reference ------------------------------------------------------------ */

template <class C> __device__ double element(const C *p, int64_t i) { return to_float(p[i]); }

/* A thread a (sequence, head), in double. Keys of a broken table entry do not exist. */
template <class T, class C>
__global__ void slow_attention(kvl_vllm_attention_args a, double *out) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= a.seqs * a.heads) return;
  const int seq = row / a.heads, head = row % a.heads, dim = a.cache.head_dim;
  const int size = a.cache.block_size, x = 16 / sizeof(C);
  const int kv_head = head / (a.heads / a.cache.kv_heads);
  const C *keys = (const C *)a.cache.keys, *values = (const C *)a.cache.values;
  const double ks = a.cache.k_scale ? *a.cache.k_scale : 1;
  const double vs = a.cache.v_scale ? *a.cache.v_scale : 1;
  double top = -1e300, sum = 0;
  for (int d = 0; d < dim; d++) out[(int64_t)row * dim + d] = 0;
  for (int t = 0; t < a.lens[seq]; t++) {
    int64_t block = a.tables[seq * a.max_blocks + t / size];
    if (block < 0 || block >= a.cache.blocks) continue;
    int64_t slice = (block * a.cache.kv_heads + kv_head) * size * dim;
    double s = 0;
    for (int d = 0; d < dim; d++)
      s += element((const T *)a.q, (int64_t)row * dim + d) *
           element(keys, slice + ((int64_t)(d / x) * size + t % size) * x + d % x);
    s = s * ks * a.scale + (a.alibi ? a.alibi[head] : 0.f) * (t - a.lens[seq] + 1);
    double keep = exp(top - fmax(top, s)), weight = exp(s - fmax(top, s));
    top = fmax(top, s);
    sum = sum * keep + weight;
    for (int d = 0; d < dim; d++) {
      double *o = out + (int64_t)row * dim + d;
      *o = *o * keep + weight * vs * element(values, slice + (int64_t)d * size + t % size);
    }
  }
  for (int d = 0; d < dim && sum > 0; d++) out[(int64_t)row * dim + d] /= sum;
}

/* ---- one case ---------------------------------------------------------------------- */

struct sizes {
  int seqs, heads, kv_heads, dim, size, max_len;
};

/* f8e4m3 numbers from normal ones; others as they are drawn. */
template <class C> __global__ void to_cache(const float *from, C *to, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
       i += (size_t)gridDim.x * blockDim.x)
    to[i] = convert<C>(from[i]);
}
template <class C> C *random_cache(size_t n, uint64_t seed) {
  C *p = dev::alloc<C>(n);
  float *x = dev::randn<float>(n, seed);
  to_cache<<<1056, 256>>>(x, p, n);
  DEV_CHECK(cudaDeviceSynchronize());
  DEV_CHECK(cudaFree(x));
  return p;
}

/* Put NaN behind the last token of every sequence. */
template <class C>
__global__ void spoil(kvl_vllm_view c, const int32_t *tables, const int32_t *lens,
                      int max_blocks) {
  const int seq = blockIdx.x, size = c.block_size, x = 16 / sizeof(C), len = lens[seq];
  const int64_t block = len % size ? tables[seq * max_blocks + len / size] : -1;
  if (block < 0 || block >= c.blocks) return;
  for (int head = 0; head < c.kv_heads; head++)
    for (int d = threadIdx.x; d < c.head_dim; d += blockDim.x)
      for (int t = len % size; t < size; t++) {
        int64_t slice = (block * c.kv_heads + head) * size * c.head_dim;
        memset((C *)c.keys + slice + (d / x * size + t) * x + d % x, 0xFF, sizeof(C));
        memset((C *)c.values + slice + d * size + t, 0xFF, sizeof(C));
      }
}

template <class T>
constexpr int dtype_of = same<T, float>    ? KVL_DTYPE_F32
                         : same<T, __half> ? KVL_DTYPE_F16
                         : same<T, f8e4m3> ? KVL_DTYPE_F8E4M3
                                           : KVL_DTYPE_BF16;

template <class T, class C> struct problem {
  kvl_vllm_attention_args a = {};
  int64_t count;
  void *workspace = nullptr;

  problem(const sizes &z, const std::vector<int32_t> &lens, bool broken, bool extras) {
    int64_t max_blocks = (z.max_len + z.size - 1) / z.size, blocks = max_blocks * z.seqs;
    size_t elements = (size_t)blocks * z.kv_heads * z.size * z.dim;
    std::vector<int32_t> tables = dev::shuffled((int32_t)blocks, 3);
    for (size_t i = 0; broken && i < tables.size(); i += 5) tables[i] = i % 2 ? -1 : blocks;
    count = (int64_t)z.seqs * z.heads * z.dim;
    a.cache.keys = random_cache<C>(elements, 1);
    a.cache.values = random_cache<C>(elements, 2);
    a.cache.blocks = blocks;
    a.cache.kv_heads = z.kv_heads;
    a.cache.head_dim = z.dim;
    a.cache.block_size = z.size;
    a.cache.dtype = dtype_of<C>;
    a.q = dev::randn<T>(count, 4);
    a.tables = dev::upload(tables);
    a.lens = dev::upload(lens);
    a.out = dev::alloc<T>(count);
    a.seqs = z.seqs;
    a.heads = z.heads;
    a.max_blocks = max_blocks;
    a.scale = 1 / sqrtf((float)z.dim);
    a.dtype = dtype_of<T>;
    if (extras) {
      std::vector<float> slopes(z.heads);
      for (int h = 0; h < z.heads; h++) slopes[h] = exp2f(-8.f * (h + 1) / z.heads);
      a.alibi = dev::upload(slopes);
      if (sizeof(C) == 1) a.cache.k_scale = dev::upload(std::vector<float>{0.5f});
      if (sizeof(C) == 1) a.cache.v_scale = dev::upload(std::vector<float>{3.f});
    }
    spoil<C><<<z.seqs, 64>>>(a.cache, a.tables, a.lens, (int)max_blocks);
    DEV_CHECK(cudaDeviceSynchronize());
  }
  ~problem() {
    for (const void *p : {(const void *)a.cache.keys, (const void *)a.cache.values, a.q,
                          (const void *)a.tables, (const void *)a.lens, (const void *)a.out,
                          (const void *)a.alibi, (const void *)a.cache.k_scale,
                          (const void *)a.cache.v_scale, (const void *)workspace})
      DEV_CHECK(cudaFree((void *)p));
  }
  void choose(int version) {
    a.version = version;
    DEV_CHECK(cudaFree(workspace));
    DEV_CHECK(cudaMalloc(&workspace, kvl_cuda_vllm_attention_workspace(&a, 132) + 1));
    DEV_CHECK(cudaMemset(workspace, 0xFF, kvl_cuda_vllm_attention_workspace(&a, 132) + 1));
    a.workspace = workspace;
  }
  /* The largest error, in units of what rounding the result may make. */
  double check(kvl_cuda_queue *q) {
    double *want = dev::alloc<double>(count);
    slow_attention<T, C><<<(unsigned)(a.seqs * a.heads + 31) / 32, 32>>>(a, want);
    DEV_CHECK(cudaMemset(a.out, 0xFF, count * sizeof(T)));
    if (kvl_cuda_vllm_attention(&a, q) < 0) exit(1);
    std::vector<T> out = dev::download((const T *)a.out, count);
    std::vector<double> right = dev::download(want, count);
    DEV_CHECK(cudaFree(want));
    double unit = same<T, float> ? 2e-6 : same<T, __half> ? 0x1p-11 : 0x1p-8, worst = 0;
    for (int64_t i = 0; i < count; i++) {
      double off = fabs((double)(float)out[i] - right[i]) / (2e-6 + unit * fabs(right[i]));
      if (!(off <= worst)) worst = off == off ? off : 1e30;
    }
    return worst;
  }
};

template <class T, class C> void check_all(const char *name, kvl_cuda_queue *q) {
  const std::vector<int32_t> lens = {0, 1, 15, 511, 512, 513, 1025, 1033};
  double worst = 0;
  int cases = 0;
  for (int dim : {32, 64, 80, 96, 112, 120, 128, 192, 256})
    for (int size : {8, 16, 32})
      for (int variant = 0; variant < 3; variant++) {
        if (dim % (16 / sizeof(C))) continue;
        int group = 1 << variant * variant; /* 1, 2, 16 */
        sizes z = {(int)lens.size(), 2 * group, 2, dim, size, 1100};
        problem<T, C> p(z, lens, variant == 1, variant > 0);
        for (int version : {1, 2}) {
          p.choose(version);
          double off = p.check(q);
          if (!(off <= 2))
            printf("WRONG %s head_dim %d block %d variant %d V%d: %.3g\n", name, dim, size,
                   variant, version, off);
          worst = off > worst ? off : worst;
          cases++;
        }
      }
  printf("%-10s %d cases, the worst is off by %.2f roundings\n", name, cases, worst);
}

/* The longest sequence that V1 takes on an H100, and one that it has to refuse in words. */
void check_limit(kvl_cuda_queue *q) {
  for (int len : {58000, 58032}) {
    problem<__nv_bfloat16, __nv_bfloat16> p({1, 1, 1, 64, 16, len}, {len}, false, false);
    p.choose(1);
    if (len == 58000) printf("V1 of %d tokens is off by %.2f roundings\n", len, p.check(q));
    else if (kvl_cuda_vllm_attention(&p.a, q) >= 0) puts("WRONG: V1 took 58032 tokens");
  }
}

/* ---- append ------------------------------------------------------------------------ */

template <class C> uint32_t bits_of(C x) {
  uint32_t bits = 0;
  memcpy(&bits, &x, sizeof x);
  return bits;
}
/* What the caches should hold, rounded on the host. */
template <class C, class From> C stored_by_host(From x, float scale) {
  if constexpr (same<C, From>) return x;
  else if constexpr (same<C, f8e4m3>)
    return {__nv_cvt_float_to_fp8((float)x / scale, __NV_SATFINITE, __NV_E4M3)};
  else return C((float)x);
}

/* Every place is written, skipped (-1) or out of range. Compares bits; 0xFF was there. */
template <class From, class C> void check_append(const char *name, kvl_cuda_queue *q) {
  const int blocks = 9, heads = 3, dim = 80, size = 16, x = 16 / sizeof(C);
  const int places = blocks * size;
  const size_t rows = (size_t)places * heads * dim;
  const float scales[] = {0.37f, 3.f};
  kvl_vllm_append_args a = {};
  std::vector<int64_t> to(places);
  std::vector<int32_t> order = dev::shuffled(places, 7);
  for (int i = 0; i < places; i++)
    to[i] = i % 5 == 1 ? -1 : i % 7 == 2 ? places + i : order[i];
  a.cache.keys = dev::alloc<C>(rows);
  a.cache.values = dev::alloc<C>(rows);
  if (sizeof(C) == 1) a.cache.k_scale = dev::upload(std::vector<float>{scales[0]});
  if (sizeof(C) == 1) a.cache.v_scale = dev::upload(std::vector<float>{scales[1]});
  a.cache.blocks = blocks;
  a.cache.kv_heads = heads;
  a.cache.head_dim = dim;
  a.cache.block_size = size;
  a.cache.dtype = dtype_of<C>;
  a.k = dev::randn<From>(rows, 1, 50.f);
  a.v = dev::randn<From>(rows, 2, 50.f);
  a.places = dev::upload(to);
  a.tokens = places;
  a.dtype = dtype_of<From>;
  if (kvl_cuda_vllm_append(&a, q) < 0) exit(1);
  std::vector<C> keys = dev::download((const C *)a.cache.keys, rows), values = keys;
  values = dev::download((const C *)a.cache.values, rows);
  std::vector<From> k = dev::download((const From *)a.k, rows), v = k;
  v = dev::download((const From *)a.v, rows);
  C untouched;
  memset(&untouched, 0xFF, sizeof(C));
  std::vector<C> want_keys(rows, untouched), want_values(rows, untouched);
  for (int t = 0; t < places; t++)
    for (int h = 0; h < heads && to[t] >= 0 && to[t] < places; h++)
      for (int d = 0; d < dim; d++) {
        const size_t slice = (to[t] / size * heads + h) * size * dim, token = to[t] % size;
        const size_t from = ((size_t)t * heads + h) * dim + d;
        want_keys[slice + (d / x * size + token) * x + d % x] = stored_by_host<C>(k[from],
                                                                                  scales[0]);
        want_values[slice + d * size + token] = stored_by_host<C>(v[from], scales[1]);
      }
  int wrong = 0;
  for (size_t i = 0; i < rows; i++)
    wrong += bits_of(keys[i]) != bits_of(want_keys[i]) ||
             bits_of(values[i]) != bits_of(want_values[i]);
  printf("append %-10s %d of %zu elements are wrong\n", name, wrong, rows);
}

/* 16384 tokens of bf16, 8 heads of 128: blocks of 16 in random order, and single places. */
void time_append(dev::bench &b, kvl_cuda_queue *q) {
  const int tokens = 16384, heads = 8, dim = 128;
  const size_t rows = (size_t)tokens * heads * dim;
  kvl_vllm_append_args a = {};
  a.cache.keys = dev::alloc<__nv_bfloat16>(rows);
  a.cache.values = dev::alloc<__nv_bfloat16>(rows);
  a.cache.blocks = tokens / 16;
  a.cache.kv_heads = heads;
  a.cache.head_dim = dim;
  a.cache.block_size = 16;
  a.cache.dtype = a.dtype = KVL_DTYPE_BF16;
  a.k = dev::randn<__nv_bfloat16>(rows, 1);
  a.v = dev::randn<__nv_bfloat16>(rows, 2);
  a.tokens = tokens;
  for (int run : {16, 1}) { /* neighbours that stay together */
    std::vector<int32_t> order = dev::shuffled(tokens / run, 3);
    std::vector<int64_t> places(tokens);
    for (int i = 0; i < tokens; i++) places[i] = (int64_t)order[i / run] * run + i % run;
    a.places = dev::upload(places);
    double us = b.time([&] { kvl_cuda_vllm_append(&a, q); });
    printf("append in runs of %2d: %.1f us, %.0f GB/s\n", run, us, 8e-3 * rows / us);
  }
}

int main(int argc, char **argv) {
  kvl_cuda_queue q = queue_of_device();
  const int version = argc > 1 ? atoi(argv[1]) : 0;
  if (version > 0) {
    problem<__nv_bfloat16, __nv_bfloat16> p({16, 32, 8, 128, 16, 32768},
                                            std::vector<int32_t>(16, 32768), false, false);
    p.choose(version);
    for (int i = 0; i < 2; i++) kvl_cuda_vllm_attention(&p.a, &q);
    DEV_CHECK(cudaDeviceSynchronize());
    return 0;
  }
  check_all<float, float>("f32", &q);
  check_all<__half, __half>("f16", &q);
  check_all<__nv_bfloat16, __nv_bfloat16>("bf16", &q);
  check_all<__nv_bfloat16, f8e4m3>("bf16 f8", &q);
  check_all<float, f8e4m3>("f32 f8", &q);
  check_all<__half, f8e4m3>("f16 f8", &q);
  check_limit(&q);
  check_append<float, float>("f32", &q);
  check_append<__half, __half>("f16", &q);
  check_append<float, __half>("f32 f16", &q);
  check_append<float, __nv_bfloat16>("f32 bf16", &q);
  check_append<float, f8e4m3>("f32 f8", &q);
  check_append<__nv_bfloat16, f8e4m3>("bf16 f8", &q);
  if (argc > 1) return 0;

  dev::bench b;
  printf("R %.0f GB/s\n", b.read_bandwidth() * 1e-3);
  time_append(b, &q);
  printf("%10s %10s %10s\n", "", "V1 us", "V2 us");
  const int shapes[][2] = {
      {16, 32768}, {1, 32768}, {1, 131072}, {8, 4096},   {16, 8192}, {64, 4096}, {1, 1024},
      {1, 2048},   {1, 4096},  {1, 8192},   {1, 16384},  {4, 1024},  {4, 4096},  {4, 16384},
      {16, 1024},  {16, 2048}, {16, 4096},  {16, 16384}, {64, 1024}, {64, 2048}, {64, 8192}};
  for (auto &s : shapes) {
    sizes z = {s[0], 32, 8, 128, 16, s[1]};
    problem<__nv_bfloat16, __nv_bfloat16> p(z, std::vector<int32_t>(s[0], s[1]), false,
                                            false);
    printf("%4d x%5dK", s[0], s[1] >> 10);
    for (int version : {1, 2}) {
      if (version == 1 && s[1] > 57000) {
        printf(" %10s", "-");
        continue;
      }
      p.choose(version);
      if (s[1] <= 8192 && p.check(&q) > 2) printf(" WRONG");
      printf(" %10.1f", b.time([&] { kvl_cuda_vllm_attention(&p.a, &q); }));
    }
    puts("");
  }
}
