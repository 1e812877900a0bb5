/* Attention over lists of tokens: what token_attention.cu ships, checked and timed through its
 * launcher.
 *
 *   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I kernels -I runtime \
 *        -I kernels/cuda kernels/dev/token_attention.cu -o token -lcuda && ./token
 *
 * us (a plain read of as many bytes, a kernel that only reads the same rows):
 * H200, 2026-11-22
 *   decode   bf16    1 row 13.3 (6.0, 8.4)   16 39.3 (34.1, 66.5)   64 126 (123, 146)
 *            f8e4m3  1 row 15.6 (4.9, 6.5)   16 27.6 (19.1, 35.5)   64 77.3 (64.5, 78.4)
 *            f32     1 row 24.9 (8.0, 11.4)  16 79.2 (64.4, 107)    64 279 (240, 259)
 * H100 80GB HBM3, 2026-11-21
 *   prefill  4096 rows of 16K 4613 (11104, 4301)   of 64K 4817 (-, 4416)
 *            7/8 shared 4303 (-, 4378)   64 heads of one KV head 1352 (1388, 575)
 * What bounds it and what is left: notes/20261121-token-attention.md, and of f8e4m3 and f32
 * notes/20261122-token-attention.md. */
#include "dev.cuh"
#include "../cuda/token_attention.cu"

namespace {

enum {
  BF16 = KVL_DTYPE_BF16,
  F16 = KVL_DTYPE_F16,
  F32 = KVL_DTYPE_F32,
  F8 = KVL_DTYPE_F8E4M3
};
/* Which tokens: every row others; at random; a row's and 7/8 of the row's before it. */
enum choice { DISTINCT, RANDOM, NEAR };

struct problem {
  const char *name;
  int rows, k, tokens; /* tokens: of the cache */
  choice lists = DISTINCT;
  int heads = 32, kv_heads = 8, head_dim = 128, block_size = 16;
  int dtype = BF16, cache_dtype = BF16;
  bool per_head = false;
  int holes = 0;   /* one entry of so many is nothing */
  int growing = 0; /* row r has r * growing entries */
};

size_t bytes_of(int dtype) { return dtype == F32 ? 4 : dtype == F8 ? 1 : 2; }

void *randn_of(int dtype, size_t n, uint64_t seed) {
  if (dtype == F32) return dev::randn<float>(n, seed);
  if (dtype == F16) return dev::randn<__half>(n, seed);
  if (dtype == F8) return dev::randn<__nv_fp8_e4m3>(n, seed);
  return dev::randn<__nv_bfloat16>(n, seed);
}

std::vector<int32_t> make_lists(const problem &p) {
  const int heads = p.per_head ? p.kv_heads : 1;
  std::vector<int32_t> all, order = dev::shuffled(p.tokens, 7);
  uint64_t state = 1;
  for (int r = 0; r < p.rows; r++)
    for (int h = 0; h < heads; h++) {
      std::vector<int32_t> row(p.k);
      for (int i = 0; i < p.k; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        uint64_t at = i + (uint64_t)h * 17 + (uint64_t)r * (p.lists == NEAR ? p.k / 8 : p.k);
        if (p.lists == RANDOM) at = state >> 33;
        row[i] = order[at % p.tokens];
        const bool nothing = p.holes && (state >> 40) % p.holes == 0;
        if (nothing || (p.growing && i >= r * p.growing)) row[i] = i % 2 ? -1 : p.tokens + i;
      }
      /* as an indexer gives them: ascending, and so block after block */
      std::sort(row.begin(), row.end(),
                [](int a, int b) { return (unsigned)a < (unsigned)b; });
      if (p.holes) std::reverse(row.begin(), row.end());
      all.insert(all.end(), row.begin(), row.end());
    }
  return all;
}

/* ---- the reference: one block a head, in double ------------------------------------------ */

__device__ double number(const void *p, int dtype, int64_t at) {
  if (dtype == F8) return (double)(float)((const __nv_fp8_e4m3 *)p)[at];
  return kvl::load_any(p, dtype, at);
}

__global__ void reference(kvl_token_attention_args t, double *out, double *lse) {
  extern __shared__ double scores[];
  const kvl_cache_view &c = t.cache;
  const int64_t row = blockIdx.x / t.heads, head = blockIdx.x % t.heads;
  const int64_t kv_head = head / (t.heads / c.kv_heads);
  const int32_t *list = t.places +
                        (row * t.place_heads + (t.place_heads > 1 ? kv_head : 0)) * t.k;
  auto at = [&](int64_t place, int half) {
    return (((place / c.block_size * 2 + half) * c.kv_heads + kv_head) * c.block_size +
            place % c.block_size) *
           c.head_dim;
  };
  for (int i = threadIdx.x; i < t.k; i += blockDim.x) {
    const int64_t place = list[i];
    scores[i] = -INFINITY;
    if (place < 0 || place >= c.blocks * c.block_size) continue;
    double dot = 0;
    for (int d = 0; d < c.head_dim; d++)
      dot += number(t.q, t.dtype, (int64_t)blockIdx.x * c.head_dim + d) *
             number(c.kv, c.dtype, at(place, 0) + d);
    scores[i] = dot * t.scale * (c.k_scale ? c.k_scale[kv_head] : 1);
  }
  __syncthreads();
  double top = -INFINITY, sum = 0;
  for (int i = 0; i < t.k; i++) top = fmax(top, scores[i]);
  for (int i = 0; i < t.k; i++) sum += scores[i] == -INFINITY ? 0 : exp(scores[i] - top);
  for (int d = threadIdx.x; d < c.head_dim; d += blockDim.x) {
    double x = 0;
    for (int i = 0; i < t.k; i++)
      if (scores[i] != -INFINITY)
        x += exp(scores[i] - top) * number(c.kv, c.dtype, at(list[i], 1) + d);
    out[(int64_t)blockIdx.x * c.head_dim + d] =
        sum == 0 ? 0 : x / sum * (c.v_scale ? c.v_scale[kv_head] : 1);
  }
  if (threadIdx.x == 0) lse[blockIdx.x] = sum == 0 ? -INFINITY : top + log(sum);
}

/* ---- the limit: a block reads the rows that the kernel's does, and sums them -------------- */

__global__ void __launch_bounds__(256) gather(kvl_token_attention_args t, uint32_t *out) {
  const kvl_cache_view &c = t.cache;
  const int64_t row = blockIdx.x, kv_head = blockIdx.y;
  const int bytes = c.dtype == F8 ? 1 : c.dtype == F32 ? 4 : 2;
  const int lanes = (int)(c.head_dim * bytes) / 16; /* a row */
  const int side = threadIdx.x / lanes, sides = blockDim.x / lanes,
            piece = threadIdx.x % lanes;
  const int32_t *list = t.places + row * t.k;
  const int split = blockIdx.z, each = (int)(t.k / gridDim.z);
  const int64_t half = (int64_t)c.kv_heads * c.block_size * lanes;
  uint32_t sum = 0;
#pragma unroll 8
  for (int i = split * each + side; i < (split + 1) * each; i += sides) {
    const int place = list[i];
    const uint4 *k = (const uint4 *)c.kv + ((int64_t)place / c.block_size * 2 * half) +
                     ((kv_head * c.block_size + place % c.block_size) * lanes) + piece;
    const uint4 x = __ldcg(k), y = __ldcg(k + half);
    sum += x.x ^ x.y ^ x.z ^ x.w ^ y.x ^ y.y ^ y.z ^ y.w;
  }
  if (sum == 0x12345678u) *out = sum;
}

struct setting {
  kvl_token_attention_args t = {};
  size_t count = 0;
  std::vector<void *> owned;
  explicit setting(const problem &p) {
    const size_t kv = (size_t)p.tokens * 2 * p.kv_heads * p.head_dim;
    count = (size_t)p.rows * p.heads * p.head_dim;
    t.cache = {randn_of(p.cache_dtype, kv, 1),
               p.tokens / p.block_size,
               p.kv_heads,
               p.block_size,
               p.head_dim,
               p.cache_dtype,
               0,
               nullptr,
               nullptr};
    if (p.cache_dtype == F8) {
      std::vector<float> scales(p.kv_heads);
      for (int i = 0; i < p.kv_heads; i++) scales[i] = 0.5f + 0.25f * i;
      t.cache.k_scale = dev::upload(scales);
      t.cache.v_scale = dev::upload(scales);
    }
    t.q = randn_of(p.dtype, count, 2);
    t.places = dev::upload(make_lists(p));
    t.out = dev::alloc<float>(count);
    t.lse = dev::alloc<float>((size_t)p.rows * p.heads);
    t.rows = p.rows;
    t.heads = p.heads;
    t.place_heads = p.per_head ? p.kv_heads : 1;
    t.k = p.k;
    t.scale = 1.f / sqrtf((float)p.head_dim);
    t.dtype = t.out_dtype = p.dtype;
    owned = {t.cache.kv,
             (void *)t.q,
             (void *)t.places,
             t.out,
             t.lse,
             (void *)t.cache.k_scale,
             (void *)t.cache.v_scale};
  }
  ~setting() {
    for (void *p : owned) cudaFree(p);
  }
};

bool check(const problem &p, const kvl_cuda_queue &q) {
  setting s(p);
  s.t.out_dtype = F32;
  if (kvl_cuda_token_attention(&s.t, (void *)&q) < 0) exit(1);
  const size_t rows = (size_t)p.rows * p.heads;
  double *out = dev::alloc<double>(s.count), *lse = dev::alloc<double>(rows);
  if (rows) reference<<<(unsigned)rows, 128, p.k * sizeof(double)>>>(s.t, out, lse);
  DEV_CHECK(cudaDeviceSynchronize());
  auto got = dev::download((float *)s.t.out, s.count), got_lse = dev::download(s.t.lse, rows);
  auto want = dev::download(out, s.count), want_lse = dev::download(lse, rows);
  const double least = p.dtype == F32 ? 2e-5 : p.dtype == BF16 ? 8e-3 : 1e-3;
  double worst = 0, worst_lse = 0;
  for (size_t i = 0; i < s.count; i++) {
    double off = fabs(got[i] - want[i]);
    if (!(off <= worst)) worst = off;
  }
  for (size_t i = 0; i < rows; i++) {
    double off = got_lse[i] == want_lse[i] ? 0 : fabs(got_lse[i] - want_lse[i]);
    if (!(off <= worst_lse)) worst_lse = off;
  }
  const bool is = worst <= least && worst_lse <= 1e-4;
  if (!is) printf("  wrong: %s  out %.3g  lse %.3g\n", p.name, worst, worst_lse);
  cudaFree(out);
  cudaFree(lse);
  return is;
}

void check_all(const kvl_cuda_queue &q, bool is_short, bool is_least) {
  int n = 0, right = 0;
  auto one = [&](problem p) {
    if (is_short && (p.k > 200 || p.rows > 3)) return;
    if (is_least && (p.head_dim % 128 || p.heads == p.kv_heads)) return;
    right += check(p, q), n++;
  };
  for (int dtype : {BF16, F16, F32})
    for (int cache : {BF16, F16, F32, F8}) {
      if (dtype != F32 && cache != dtype && cache != F8) continue;
      for (int dim : {64, 128, 256, 80, 16})
        for (int group : {1, 4, 16, 20, 40, 72}) {
          problem p = {"dtypes, dims and groups", 3, 200, 640, RANDOM};
          p.dtype = dtype, p.cache_dtype = cache, p.head_dim = dim;
          p.kv_heads = 2, p.heads = 2 * group;
          one(p);
        }
    }
  for (int dtype : {BF16, F32})
    for (int k : {0, 1, 63, 64, 65, 129, 2048})
      for (int rows : {0, 1, 3, 17, 40}) {
        problem p = {"lengths and rows", rows, k, 4096, RANDOM};
        p.dtype = p.cache_dtype = dtype;
        one(p);
        p.name = "holes", p.holes = 3;
        one(p);
        p.name = "growing lists", p.holes = 0, p.growing = 13;
        one(p);
        p.name = "a list a head", p.per_head = true, p.block_size = 10, p.tokens = 4090;
        one(p);
      }
  printf("%d of %d right\n", right, n);
  if (right < n) exit(1);
}

void time_all(const kvl_cuda_queue &q) {
  dev::bench bench;
  const double r = bench.read_bandwidth();
  uint32_t *sink = dev::alloc<uint32_t>(1);
  printf("R %.0f GB/s\n%-42s %9s %9s %8s %8s %9s %8s\n", r * 1e-3, "", "us", "limit us",
         "GB/s", "of R", "gather us", "TFLOP/s");
  std::vector<problem> all;
  for (int rows : {1, 4, 16, 32, 64})
    all.push_back({"decode, tokens of its own", rows, 2048, 131072});
  for (int tokens : {16384, 65536}) {
    all.push_back({"prefill, at random", 4096, 2048, tokens, RANDOM});
    all.push_back({"prefill, 7/8 shared", 4096, 2048, tokens, NEAR});
  }
  for (int rows : {1, 4, 16, 32, 64}) {
    problem f8 = {"decode, f8e4m3", rows, 2048, 131072};
    f8.cache_dtype = F8;
    all.push_back(f8);
  }
  for (int cache : {F8, BF16, F32})
    for (int rows : {1, 16, 64}) {
      problem f32 = {"decode, f32 q", rows, 2048, 131072};
      f32.dtype = F32, f32.cache_dtype = cache;
      f32.name = cache == F8     ? "f32 q, f8e4m3 cache"
                 : cache == BF16 ? "f32 q, bf16 cache"
                                 : "f32 q, f32 cache";
      all.push_back(f32);
    }
  for (int dim : {64, 256}) {
    problem f8 = {dim == 64 ? "f8e4m3, head_dim 64" : "f8e4m3, head_dim 256", 64, 2048,
                  131072};
    f8.cache_dtype = F8, f8.head_dim = dim;
    all.push_back(f8);
  }
  problem near = {"prefill, f8e4m3, 7/8 shared", 4096, 2048, 65536, NEAR};
  near.cache_dtype = F8;
  all.push_back(near);
  problem mqa = {"prefill, 64 heads of one", 4096, 2048, 65536, RANDOM, 64, 1};
  all.push_back(mqa);
  for (const problem &p : all) {
    setting s(p);
    const bool small = p.rows <= 64;
    const double us = bench.time([&] { kvl_cuda_token_attention(&s.t, (void *)&q); }, false,
                                 small ? 30 : 5);
    const dim3 grid(p.rows, p.kv_heads, p.rows < 32 ? 32 / p.rows : 1);
    const double read = bench.time([&] { gather<<<grid, 256>>>(s.t, sink); }, false,
                                   small ? 30 : 5);
    const double bytes = 2.0 * p.rows * p.k * p.kv_heads * p.head_dim *
                         bytes_of(p.cache_dtype);
    const double flops = 4.0 * p.rows * p.k * p.heads * p.head_dim;
    /* a plain read of as many bytes, which has a start and an end as well */
    const size_t most = std::min((size_t)bytes, bench.bytes);
    const double limit = bench.time([&] { bench.read(most); }) * bytes / most;
    printf("%-27s %4d of %6d %9.1f %9.1f %8.0f %8.2f %9.1f %8.1f\n", p.name, p.rows, p.tokens,
           us, limit, bytes / us * 1e-3, limit / us, read, flops / us * 1e-6);
  }
}

}  // namespace

int main(int argc, char **argv) {
  cudaDeviceProp device;
  DEV_CHECK(cudaGetDeviceProperties(&device, 0));
  kvl_cuda_queue q = {};
  q.sm_count = device.multiProcessorCount;
  q.shared_optin = (int)device.sharedMemPerBlockOptin;
  const char mode = argc > 1 ? argv[1][0]
                             : 'a'; /* c, s, r: check all, less or least; t: time */
  if (mode != 't') check_all(q, mode == 's' || mode == 'r', mode == 'r');
  if (mode == 'a' || mode == 't') time_all(q);
}
