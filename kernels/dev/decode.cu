/* Paged decode: what paged_attention.cu ships, checked and timed through its launcher.
 *
 *   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I kernels -I runtime \
 *        -I kernels/cuda kernels/dev/decode.cu \
 *        kernels/cuda/attention/instances/*.cu -o decode -lcuda
 *   ./decode [check | time] [part of the names of cases]
 *
 * Versions on an H100 80GB HBM3, 2026-11-21, us; bf16, 32/8 heads, head_dim 128, block 16,
 * random tables, L2 flushed. `limit` is bytes / R, without the 3.7 us of an empty launch:
 *
 *         16 x 32K  1 x 32K  1 x 128K  8 x 4K  16 x 8K  64 x 4K   10%*   5%*   Zipf**
 *   limit      694     43.4       174    43.4      174      347   69.5   8.7      704
 *   1          717     56.1       189    55.2      188      362   84.5  22.6     2263
 *   2          742     71.0       203    79.1      222      402  110    39.6      768
 *   3          711     71.2       200    63.8      194      369   94.9  29.2      728
 *   4          750     66.4       235    60.6      220      395   92.6  36.4      748
 *   5          714     57.9       190    59.4      191      366   88.4  23.4      720
 *   6          708     58.6       190    59.5      189      366   89.1  23.7      721
 *   7       0.99 R     56.4       183    59.1      184      356   86.8  18.7  0.986 R
 *   7 again    707     57.9       189    59.2      189      365   88.8  23.5      721
 *   8          706     56.5       189    59.0      188      365   87.9  22.0
 *   9          707     56.4       188    57.5      188      364   88.0  21.2      721
 *   10         710     54.8       186    56.3      188      366   86.8  21.4
 *   11         706     55.2       186    56.1      188      365   86.2  21.4      720
 *   a read             47.6                        177           75.5  13.8
 *   *  of the blocks, at random per KV head: of 16 x 32K, of 1 x 128K
 *   ** 32 sequences of 128K, 64K, 43K, ...
 *
 *   1  the host cuts every sequence alike, from max_blocks: blocks of four warps (f1c3f26)
 *   2  work split on the device: warps take equal runs of tiles, KV head after KV head
 *   3  shares of sequences, the KV heads of a share side by side; one tile of nothing is
 *      computed before data is there; look-ups for 16 tiles at once
 *   4  version 3, and 1/6 of the tiles in small shares that warps draw when they are done
 *   5  version 3 without that tile; teams of up to four warps joined in their block;
 *      paged_combine fits beside the workers and has all its loads under way at once
 *   6  version 5, and nothing waits for a table's entries before the first copies are issued
 *   7  version 6, and a warp copies 512 neighbouring bytes at a time, not twice 256
 *   8  version 7 with fewer instructions before the first copies and after the last tile: the
 *      host divides, up to 32 sequences need no barrier, q is asked for before K, the second
 *      look-up follows the second tile
 *   9  version 8, rings of two stages, refilled before a tile is waited for
 *   10 version 8, rings of two stages: one tile of a warp under way while it computes
 *   11 version 10, look-ups as in 7, and two tiles under way where a share has more than 96 a
 *      warp
 *   12 version 11, and the start and the first look-up happen before the kernels ahead have
 *      ended: shipped
 *   a read: a warp sums the same runs of 4 KB, whose places it finds in a list
 *
 * Versions 1 to 6 and from `7 again` on were timed by this program, each group in a run; 7 is a
 * check of the tree by `kvlab bench`, whose random selections (5%) take 5 us less. Why, and
 * what bounds it: notes/20261121-decode.md. */
#include <cuda_fp8.h>

#include <cstdarg>
#include <cstring>
#include <string>

#include "args/attention.h"
#include "late.cuh"
#include "cuda/attention/paged_attention.cu"

extern "C" int kvl_dtype_bytes(int dtype) {
  return dtype == KVL_DTYPE_F32 ? 4 : dtype == KVL_DTYPE_F8E4M3 ? 1 : 2;
}

/* The function that writes the plug-in's error text. */
int kvl_cuda::fail(int status, const char *format, ...) {
  va_list words;
  va_start(words, format);
  vfprintf(stderr, format, words);
  va_end(words);
  return status;
}

namespace {

/* ---- a call --------------------------------------------------------------------------- */

enum {
  BF16 = KVL_DTYPE_BF16,
  F16 = KVL_DTYPE_F16,
  F32 = KVL_DTYPE_F32,
  F8 = KVL_DTYPE_F8E4M3,
  INT8 = KVL_CODEC_INT8 /* of the cache alone */
};
enum { NO_SELECTION, SHARED, PER_HEAD };

struct problem {
  const char *name;
  std::vector<int> lens;
  int heads = 32, kv_heads = 8, head_dim = 128, block_size = 16;
  int dtype = BF16, cache_dtype = BF16, out_dtype = BF16;
  int extra_blocks = 0; /* of the tables, past the longest sequence */
  int select = NO_SELECTION;
  double ratio = 0.1;
  bool slots = false, alibi = false, prev = false, scales = false, broken = false;
  int window = 0;
  float soft_cap = 0;
};

__device__ __forceinline__ float element(const void *p, int dtype, int64_t at) {
  if (dtype == F8) return kvl::to_float(((const kvl::f8e4m3 *)p)[at]);
  return kvl::load_any(p, dtype, at);
}
/* A number of the cache. */
__device__ __forceinline__ float number(const kvl_pages &c, const kvl_strips &of,
                                        int64_t block, int64_t head, int64_t token, int dim) {
  const char *const strip = (const char *)c.memory + kvl__strip_at(&c, &of, block, head);
  if (c.codec != INT8) return element(strip + token * of.bytes_row, c.codec, dim);
  return kvl::to_float(((const kvl::int8 *)(strip + token * of.bytes_row))[dim]) *
         kvl::scale_of(of, strip, token, dim);
}
__device__ __forceinline__ void put(void *p, int dtype, int64_t at, float x) {
  if (dtype == F32) ((float *)p)[at] = x;
  else if (dtype == F16) ((__half *)p)[at] = __half(x);
  else if (dtype == BF16) ((__nv_bfloat16 *)p)[at] = __nv_bfloat16(x);
  else ((kvl::f8e4m3 *)p)[at] = kvl::convert<kvl::f8e4m3>(x);
}
__global__ void fill_randn(void *p, int dtype, int64_t count, uint64_t seed) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count;
       i += (int64_t)gridDim.x * blockDim.x) {
    float u = (dev::hash(2 * i + seed * 0x9E3779B97F4A7C15ull) + 1.f) * 0x1p-32f;
    float v = dev::hash(2 * i + 1 + seed * 0x9E3779B97F4A7C15ull) * 0x1p-32f;
    put(p, dtype, i, sqrtf(-2.f * logf(u)) * cospif(2.f * v));
  }
}
/* Random whole numbers, and for each token scales that differ by up to 4. */
__global__ void fill_packed(kvl_pages c, uint64_t seed) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
       i < c.blocks * 2 * c.kv_heads * c.block_size; i += (int64_t)gridDim.x * blockDim.x) {
    const int64_t token = i % c.block_size, strip = i / c.block_size;
    const int64_t head = strip % c.kv_heads, block = strip / c.kv_heads / 2;
    const kvl_strips &of = strip / c.kv_heads % 2 ? c.value : c.key;
    char *const at = (char *)c.memory + kvl__strip_at(&c, &of, block, head);
    for (int d = 0; d < of.dim; d++) {
      const uint32_t bits = dev::hash(i * of.dim + d + seed * 0x9E3779B97F4A7C15ull);
      at[token * of.bytes_row + d] = (char)((int)(bits % 255) - 127);
    }
    for (int g = 0; g < of.groups; g++)
      ((__nv_bfloat16 *)(at + of.scales))[token * of.groups + g] = __float2bfloat16_rn(
          (1.f + 3.f * dev::hash(~(i * of.groups + g) - seed) * 0x1p-32f) / 160.f);
  }
}
/* NaN into what lies past the end of every sequence's last block. */
__global__ void poison_tails(kvl_paged_attention_args a) {
  const kvl_pages &c = a.cache;
  int64_t s = blockIdx.x, len = a.lens[s], block = len / c.block_size;
  if (len % c.block_size == 0) return;
  int64_t physical = a.tables[s * a.max_blocks + block];
  if (physical < 0 || physical >= c.blocks) return;
  for (int64_t h = 0; h < 2 * c.kv_heads; h++)
    for (int64_t t = len % c.block_size; t < c.block_size; t++) {
      const kvl_strips &of = h < c.kv_heads ? c.key : c.value;
      char *const strip = (char *)c.memory + kvl__strip_at(&c, &of, physical, h % c.kv_heads);
      for (int d = threadIdx.x; c.codec != INT8 && d < of.dim; d += blockDim.x)
        put(strip + t * of.bytes_row, c.codec, d, NAN);
      for (int g = threadIdx.x; g < of.groups; g += blockDim.x)
        put(strip + of.scales, BF16, t * of.groups + g, NAN);
    }
}

/* Device memory that every problem shares. */
struct arena {
  char *p;
  size_t bytes, used = 0;
  explicit arena(size_t n) : p(dev::alloc<char>(n)), bytes(n) {}
  void *take(size_t n) {
    void *at = p + used;
    used += (n + 511) / 512 * 512;
    if (used > bytes) {
      fprintf(stderr, "the arena is too small\n");
      exit(1);
    }
    return at;
  }
  template <class T> T *put(const std::vector<T> &host) {
    T *at = (T *)take(host.size() * sizeof(T));
    DEV_CHECK(cudaMemcpy(at, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return at;
  }
};

struct call {
  kvl_paged_attention_args a = {};
  size_t bytes_workspace = 0;
  double bytes = 0; /* K and V that have to be read */
};

call prepare(const problem &p, arena &memory, unsigned seed, int sms) {
  memory.used = 0;
  call c;
  kvl_paged_attention_args &a = c.a;
  const int64_t seqs = (int64_t)p.lens.size();
  int64_t longest = 1, blocks = 0;
  for (int len : p.lens) {
    int64_t n = (len + p.block_size - 1) / p.block_size;
    longest = std::max(longest, n);
    blocks += n;
  }
  a.seqs = a.tokens = seqs;
  a.heads = p.heads;
  a.max_blocks = longest + p.extra_blocks;
  a.scale = 1.f / sqrtf((float)p.head_dim);
  a.soft_cap = p.soft_cap;
  a.window = p.window;
  a.causal = 1;
  a.dtype = p.dtype;
  a.out_dtype = p.out_dtype;
  const int64_t pool = blocks + 3;
  a.cache = dev::pages(p.cache_dtype, pool, p.kv_heads, p.block_size, p.head_dim);
  const int64_t row = kvl__bytes_token(&a.cache.key);
  a.cache.memory = memory.take((size_t)(pool * a.cache.bytes_page));
  if (p.cache_dtype == INT8) fill_packed<<<1056, 256>>>(a.cache, seed);
  else
    fill_randn<<<1056, 256>>>(a.cache.memory, p.cache_dtype,
                              pool * 2 * p.kv_heads * p.block_size * p.head_dim, seed);

  std::vector<int32_t> order = dev::shuffled((int32_t)pool, seed), tables, selection, slots;
  size_t taken = 0;
  srand(seed);
  for (int64_t s = 0; s < seqs; s++) {
    int64_t n = (p.lens[s] + p.block_size - 1) / p.block_size;
    for (int64_t b = 0; b < a.max_blocks; b++) {
      int32_t block = b < n ? order[taken++] : b % 2 ? -1 : 0x7FFFFFFF;
      if (p.broken && b < n && rand() % 7 == 0) block = rand() % 2 ? -5 : (int32_t)pool + 9;
      tables.push_back(block);
    }
  }
  a.tables = memory.put(tables);
  a.lens = memory.put(p.lens);
  double keys = 0;
  for (int len : p.lens) keys += p.window ? std::min(len, p.window) : len;
  keys *= p.kv_heads;
  if (p.select != NO_SELECTION) {
    a.selection_heads = a.slot_heads = p.select == PER_HEAD ? p.kv_heads : 1;
    a.max_selected = std::max<int64_t>(1, (int64_t)ceil(p.ratio * longest));
    keys = 0;
    for (int64_t s = 0; s < seqs; s++)
      for (int64_t h = 0; h < a.selection_heads; h++) {
        int n = (p.lens[s] + p.block_size - 1) / p.block_size;
        int k = std::min<int>((int)ceil(p.ratio * n), n);
        std::vector<int32_t> chosen = dev::shuffled(n, seed + 17 * (unsigned)(s * 64 + h));
        chosen.resize(k);
        std::sort(chosen.begin(), chosen.end());
        for (int64_t i = 0; i < a.max_selected; i++) {
          int block = i < k ? chosen[i] : -1;
          selection.push_back(block);
          slots.push_back(block < 0 || rand() % 9 == 0 ? -1
                                                       : tables[s * a.max_blocks + block]);
          if (block >= 0)
            keys += std::min(p.block_size, p.lens[s] - block * p.block_size) *
                    (a.selection_heads == 1 ? p.kv_heads : 1.0);
        }
      }
    a.selection = memory.put(selection);
    if (p.slots) a.slots = memory.put(slots);
  }
  c.bytes = keys * 2 * row;
  const int64_t outs = seqs * p.heads * p.head_dim, rows = seqs * p.heads;
  auto randn = [&](int dtype, int64_t count, unsigned salt) {
    void *at = memory.take((size_t)count * kvl_dtype_bytes(dtype));
    fill_randn<<<1056, 256>>>(at, dtype, count, seed + salt);
    return at;
  };
  a.q = randn(p.dtype, outs, 1);
  if (p.prev) {
    a.prev_out = (float *)randn(F32, outs, 2);
    a.prev_lse = (float *)randn(F32, rows, 3);
  }
  if (p.alibi) {
    std::vector<float> slopes;
    for (int h = 0; h < p.heads; h++)
      slopes.push_back(0.3f * exp2f(-8.f * (h + 1) / p.heads));
    a.alibi = memory.put(slopes);
  }
  if (p.scales) {
    std::vector<float> k, v;
    for (int h = 0; h < p.kv_heads; h++) {
      k.push_back(0.5f + 0.25f * h);
      v.push_back(1.5f - 0.1f * h);
    }
    a.cache.k_scale = memory.put(k);
    a.cache.v_scale = memory.put(v);
  }
  a.out = memory.take((size_t)outs * kvl_dtype_bytes(p.out_dtype));
  a.lse = (float *)memory.take((size_t)rows * 4);
  kvl_hooked_attention_args hooked = {};
  hooked.base = a;
  c.bytes_workspace = kvl_cuda_paged_attention_workspace(&hooked, sms);
  a.workspace = memory.take(c.bytes_workspace);
  if (seqs) poison_tails<<<(unsigned)seqs, 64>>>(a);
  DEV_CHECK(cudaDeviceSynchronize());
  return c;
}

/* ---- the reference --------------------------------------------------------------------- */

/* One block a row; sums in double. want_out f32 [rows, head_dim]. */
__global__ void reference(kvl_paged_attention_args a, float *scores, int64_t most,
                          float *want_out, float *want_lse) {
  const kvl_pages &c = a.cache;
  const int64_t row = blockIdx.x, s = row / a.heads, h = row % a.heads;
  const int g = (int)(h / (a.heads / c.kv_heads)), len = a.lens[s], at = len - 1;
  const int64_t entries = a.selection ? a.max_selected
                                      : (len + c.block_size - 1) / c.block_size;
  float *score = scores + row * most;
  __shared__ float top;
  __shared__ double sum;
  auto physical = [&](int64_t i, int &block) -> int64_t {
    block = (int)i;
    if (a.selection)
      block = a.selection[(s * a.selection_heads + (a.selection_heads > 1 ? g : 0)) *
                              a.max_selected +
                          i];
    if (block < 0 || (int64_t)block * c.block_size >= len) return -1;
    int64_t p =
        a.slots
            ? a.slots[(s * a.slot_heads + (a.slot_heads > 1 ? g : 0)) * a.max_selected + i]
            : a.tables[s * a.max_blocks + block];
    return p < 0 || p >= c.blocks ? -1 : p;
  };
  auto read = [&](int64_t p, int half, int t, int d) {
    return number(c, half ? c.value : c.key, p, g, t, d);
  };
  for (int64_t k = threadIdx.x; k < entries * c.block_size; k += blockDim.x) {
    int block, t = (int)(k % c.block_size);
    int64_t p = physical(k / c.block_size, block);
    int index = block * c.block_size + t;
    score[k] = -INFINITY;
    if (p < 0 || index >= len || (a.window && index <= at - a.window)) continue;
    double dot = 0;
    for (int d = 0; d < c.key.dim; d++)
      dot += (double)element(a.q, a.dtype, row * c.key.dim + d) * read(p, 0, t, d);
    dot *= a.scale * (c.k_scale ? c.k_scale[g] : 1.f);
    if (a.soft_cap) dot = a.soft_cap * tanh(dot / a.soft_cap);
    score[k] = (float)(dot + (a.alibi ? a.alibi[h] * (double)(index - at) : 0));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    top = -INFINITY;
    for (int64_t k = 0; k < entries * c.block_size; k++) top = fmaxf(top, score[k]);
    sum = 0;
    for (int64_t k = 0; k < entries * c.block_size; k++)
      if (score[k] > -INFINITY) sum += exp((double)score[k] - top);
  }
  __syncthreads();
  double lse = sum > 0 ? top + log(sum) : -INFINITY, keep = 0, mine = 1;
  if (a.prev_lse) {
    double prev = a.prev_lse[row], both = fmax(prev, lse);
    both += log(exp(prev - both) + exp(lse - both));
    keep = exp(prev - both);
    mine = exp(lse - both);
    lse = both;
  }
  for (int d = threadIdx.x; d < c.key.dim; d += blockDim.x) {
    double x = 0;
    for (int64_t k = 0; k < entries * c.block_size; k++) {
      if (score[k] == -INFINITY) continue;
      int block;
      int64_t p = physical(k / c.block_size, block);
      x += exp((double)score[k] - top) * read(p, 1, (int)(k % c.block_size), d);
    }
    x = sum > 0 ? x / sum * (c.v_scale ? c.v_scale[g] : 1.f) * mine : 0;
    if (keep > 0) x += keep * a.prev_out[row * c.key.dim + d];
    want_out[row * c.key.dim + d] = (float)x;
  }
  if (threadIdx.x == 0) want_lse[row] = (float)lse;
}

/* The largest error over its tolerance, which is the spec's. */
__global__ void compare(kvl_paged_attention_args a, const float *out, const float *lse,
                        float unit, float *worst) {
  const int64_t rows = a.tokens * a.heads, n = rows * a.cache.key.dim;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n + rows;
       i += (int64_t)gridDim.x * blockDim.x) {
    float rel = 2 * unit, got, want, room;
    if (i < n) {
      got = element(a.out, a.out_dtype, i);
      want = out[i];
      room = 6e-5f + rel + rel * fabsf(want);
    } else {
      got = a.lse[i - n];
      want = lse[i - n];
      room = 6e-5f + rel / 8 + 1e-5f * fabsf(want);
    }
    float off = got == want ? 0 : fabsf(got - want) / room;
    if (!(off <= 1e9f)) off = 1e9f;
    atomicMax((int *)&worst[i < n ? 0 : 1], __float_as_int(off));
  }
}

struct harness {
  kvl_cuda_queue q = {};
  arena memory;
  float *worst;
  harness() : memory((size_t)6 << 30), worst(dev::alloc<float>(2)) {
    DEV_CHECK(cudaDeviceGetAttribute(&q.sm_count, cudaDevAttrMultiProcessorCount, 0));
    DEV_CHECK(
        cudaDeviceGetAttribute(&q.shared_optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    q.code = kvl::code_for(0);
  }
  void run(const call &c) {
    kvl_hooked_attention_args hooked = {};
    hooked.base = c.a;
    if (kvl_cuda_paged_attention(&hooked, &q) < 0) exit(1);
  }
};

int failures = 0;
const char *chosen = ""; /* a part of the names of cases */

void check(harness &h, const problem &p) {
  if (!strstr(p.name, chosen)) return;
  call c = prepare(p, h.memory, 3 + (unsigned)p.lens.size(), h.q.sm_count);
  const kvl_paged_attention_args &a = c.a;
  const size_t rows = (size_t)(a.tokens * a.heads), n = rows * p.head_dim;
  const size_t bytes = n * kvl_dtype_bytes(p.out_dtype);
  dev::late_inputs late;
  late.add(a.lens, a.seqs);
  late.add(a.tables, a.seqs * a.max_blocks);
  if (a.selection) late.add(a.selection, a.seqs * a.selection_heads * a.max_selected);
  if (a.slots) late.add(a.slots, a.seqs * a.slot_heads * a.max_selected);
  std::vector<char> first(bytes), other(bytes);
  bool same = true;
  for (int i = 0; i < 2 + late.KINDS; i++) { /* with anything in the workspace, and with
                                              * late inputs */
    DEV_CHECK(cudaMemset(a.workspace, i ? 0x11 : 0xFF, c.bytes_workspace));
    DEV_CHECK(cudaMemset(a.out, 0xFF, bytes));
    DEV_CHECK(cudaMemset(a.lse, 0xFF, rows * 4));
    if (i >= 2) late.spoil(i - 2), late.write(&h.q);
    h.run(c);
    DEV_CHECK(cudaMemcpy((i ? other : first).data(), a.out, bytes, cudaMemcpyDeviceToHost));
    if (i) same = same && !memcmp(first.data(), other.data(), bytes);
  }
  const int64_t most = a.selection ? a.max_selected * p.block_size
                                   : a.max_blocks * p.block_size;
  float *scores = (float *)h.memory.take(rows * most * 4);
  float *out = (float *)h.memory.take(n * 4), *lse = (float *)h.memory.take(rows * 4);
  DEV_CHECK(cudaMemset(h.worst, 0, 8));
  if (rows) reference<<<(unsigned)rows, 128>>>(a, scores, most, out, lse);
  float units[] = {0, 0x1p-11f, 0x1p-8f};
  compare<<<256, 256>>>(a, out, lse, std::max(units[p.dtype], units[p.out_dtype]), h.worst);
  std::vector<float> worst = dev::download(h.worst, 2);
  bool fine = same && worst[0] <= 1 && worst[1] <= 1;
  failures += !fine;
  printf("%s %-42s out %.3f lse %.3f of the tolerance%s\n", fine ? "ok  " : "FAIL", p.name,
         worst[0], worst[1], same ? "" : ", not the same bits");
}

std::vector<int> even(int n, int len) { return std::vector<int>(n, len); }
std::vector<int> zipf(int n, int longest) {
  std::vector<int> lens;
  for (int i = 0; i < n; i++) lens.push_back(longest / (i + 1));
  return lens;
}

void check_all(harness &h) {
  auto with = [](const char *name, std::vector<int> lens,
                 std::function<void(problem &)> set) {
    problem p;
    p.name = name;
    p.lens = lens;
    set(p);
    return p;
  };
  const std::vector<int> ragged = {700, 0, 1, 33, 2047, 16, 5};
  const std::vector<int> many = [] {
    std::vector<int> lens;
    for (int i = 0; i < 700; i++) lens.push_back(i * 37 % 101);
    return lens;
  }();
  check(h, with("even", even(4, 1024), [](problem &) {}));
  check(h, with("ragged, NaN past the ends", ragged, [](problem &) {}));
  check(h, with("ragged, f32 out", ragged, [](problem &p) { p.out_dtype = F32; }));
  check(h, with("one key", {1}, [](problem &) {}));
  check(h, with("no key", {0}, [](problem &) {}));
  check(h, with("no sequence", {}, [](problem &) {}));
  check(h, with("700 short ones", many, [](problem &p) { p.head_dim = 64; }));
  check(h, with("long", {9000, 3}, [](problem &p) { p.extra_blocks = 20000; }));
  check(h,
        with("f16", ragged, [](problem &p) { p.dtype = p.cache_dtype = p.out_dtype = F16; }));
  for (int block : {1, 5, 8, 17, 32, 256, 4096})
    check(h, with("block size", ragged, [=](problem &p) { p.block_size = block; }));
  for (int dim : {8, 16, 24, 64, 80, 96, 128, 192, 256})
    check(h, with("head_dim", ragged, [=](problem &p) { p.head_dim = dim; }));
  for (int group : {1, 2, 3, 5, 8, 16, 17, 33})
    check(h, with("group", ragged, [=](problem &p) { p.kv_heads = 2, p.heads = 2 * group; }));
  for (int select : {SHARED, PER_HEAD})
    for (int block : {1, 16, 17}) {
      auto chosen = [=](problem &p) {
        p.select = select, p.block_size = block, p.ratio = 0.3, p.alibi = true;
      };
      check(h, with("selection", ragged, chosen));
      check(h, with("selection and window", ragged,
                    [&](problem &p) { chosen(p), p.window = 300; }));
      check(h, with("slots", ragged, [&](problem &p) { chosen(p), p.slots = true; }));
    }
  check(h, with("broken tables", ragged, [](problem &p) { p.broken = true; }));
  check(h, with("alibi", ragged, [](problem &p) { p.alibi = true; }));
  for (int window : {1, 7, 16, 100, 1000})
    check(h, with("window", ragged, [=](problem &p) { p.window = window; }));
  for (float cap : {0.5f, 5.f, 50.f, 1000.f})
    check(h, with("soft cap", ragged, [=](problem &p) { p.soft_cap = cap; }));
  check(h, with("soft cap, f16", ragged, [](problem &p) {
          p.dtype = p.cache_dtype = p.out_dtype = F16, p.soft_cap = 20, p.alibi = true;
        }));
  check(h, with("prev", ragged, [](problem &p) { p.prev = true, p.out_dtype = F32; }));
  check(h, with("prev, window, cap, alibi, broken", ragged, [](problem &p) {
          p.prev = p.alibi = p.broken = true, p.window = 555, p.soft_cap = 30;
        }));
  for (int dtype : {BF16, F16, F32})
    for (int dim : {16, 64, 80, 128, 192, 256})
      check(h, with("f8", ragged, [=](problem &p) {
              p.cache_dtype = F8, p.dtype = p.out_dtype = dtype, p.head_dim = dim,
              p.scales = true;
            }));
  for (int block : {5, 8, 64})
    check(h, with("f8, block size, window, cap, selection", ragged, [=](problem &p) {
            p.cache_dtype = F8, p.block_size = block, p.window = 800, p.soft_cap = 30;
            p.select = PER_HEAD, p.ratio = 0.5, p.heads = 40;
          }));
  const std::vector<int> packed = {700, 0, 1, 31, 33, 1000, 4097, 16, 5};
  for (int dtype : {BF16, F16})
    for (int dim : {16, 64, 80, 96, 128, 144, 192, 256})
      for (int group : {1, 4, 8, 12, 16, 20})
        check(h, with("int8", packed, [=](problem &p) {
                p.cache_dtype = INT8, p.dtype = p.out_dtype = dtype, p.head_dim = dim;
                p.kv_heads = 2, p.heads = 2 * group;
              }));
  check(h, with("int8, 700 short ones", many, [](problem &p) { p.cache_dtype = INT8; }));
  check(h, with("int8, long", {70000, 3}, [](problem &p) { p.cache_dtype = INT8; }));
  for (int block : {8, 24, 64})
    for (int group : {5, 10})
      check(h, with("int8, block size, window, cap, selection", packed, [=](problem &p) {
              p.cache_dtype = INT8, p.block_size = block, p.window = 800, p.soft_cap = 30;
              p.select = PER_HEAD, p.ratio = 0.5, p.heads = 8 * group, p.alibi = true;
            }));
  check(h, with("int8, slots, prev, broken", ragged, [](problem &p) {
          p.cache_dtype = INT8, p.prev = p.broken = p.slots = true, p.select = SHARED;
          p.ratio = 0.5, p.out_dtype = F32;
        }));
  for (int dtype : {BF16, F16, F32})
    for (int dim : {24, 64, 128, 256})
      for (int group : {1, 4, 7})
        check(h, with("f32 q", ragged, [=](problem &p) {
                p.dtype = p.out_dtype = F32, p.cache_dtype = dtype, p.head_dim = dim;
                p.kv_heads = 2, p.heads = 2 * group;
              }));
  check(h, with("f32 q, all of it", ragged, [](problem &p) {
          p.dtype = p.out_dtype = F32, p.prev = p.alibi = p.broken = true;
          p.window = 400, p.soft_cap = 10, p.select = SHARED, p.ratio = 0.6;
        }));
  printf("%d failures\n", failures);
}

/* ---- times ----------------------------------------------------------------------------- */

void time_one(harness &h, dev::bench &b, double r, const problem &p) {
  call c = prepare(p, h.memory, 7, h.q.sm_count);
  double us = b.time([&] { h.run(c); });
  printf("%-38s %8.1f us %7.0f GB/s  %.3f R   bytes / R %6.1f us\n", p.name, us,
         c.bytes / us / 1e3, c.bytes / us / r, c.bytes / r);
  fflush(stdout);
}

/* The same work after other work: how much does the state of the caches cost? */
void time_after(harness &h, dev::bench &b, const char *name,
                const std::function<void()> &before) {
  problem p;
  p.lens = even(1, 32768);
  call c = prepare(p, h.memory, 7, h.q.sm_count);
  std::vector<float> times(30);
  for (float &ms : times) {
    before();
    DEV_CHECK(cudaEventRecord(b.from));
    h.run(c);
    DEV_CHECK(cudaEventRecord(b.to));
    DEV_CHECK(cudaEventSynchronize(b.to));
    DEV_CHECK(cudaEventElapsedTime(&ms, b.from, b.to));
  }
  std::sort(times.begin(), times.end());
  printf("P2 1 x 32K %-27s %8.1f us\n", name, times[15] * 1e3);
}

void time_all(harness &h) {
  dev::bench b;
  double r = b.read_bandwidth();
  printf("R %.0f GB/s\n", r / 1e3);
  auto go = [&](
                const char *name, std::vector<int> lens,
                std::function<void(problem &)> set = [](problem &) {}) {
    if (!strstr(name, chosen)) return;
    problem p;
    p.name = name;
    p.lens = lens;
    set(p);
    time_one(h, b, r, p);
  };
  go("P1 16 x 32K", even(16, 32768));
  go("P2 1 x 32K", even(1, 32768));
  go("P2 1 x 128K", even(1, 131072));
  go("P3 8 x 4K", even(8, 4096));
  go("P3 16 x 8K", even(16, 8192));
  go("P3 64 x 4K", even(64, 4096));
  auto sparse = [](double ratio) {
    return [=](problem &p) { p.select = PER_HEAD, p.ratio = ratio; };
  };
  go("P4 10% of 16 x 32K", even(16, 32768), sparse(0.1));
  go("P4 5% of 1 x 128K", even(1, 131072), sparse(0.05));
  go("zipf 32, longest 128K", zipf(32, 131072));
  go("4096 x 100", even(4096, 100));
  go("16 x 8K, tables of 128K", even(16, 8192), [](problem &p) { p.extra_blocks = 7680; });
  go("32 x 32K, window 4K", even(32, 32768), [](problem &p) { p.window = 4096; });
  go("16 x 32K, soft cap 50", even(16, 32768), [](problem &p) { p.soft_cap = 50; });
  auto f8 = [](problem &p) { p.cache_dtype = F8; };
  go("f8 16 x 32K", even(16, 32768), f8);
  go("f8 1 x 32K", even(1, 32768), f8);
  go("f8 16 x 8K", even(16, 8192), f8);
  go("f8 10% of 16 x 32K", even(16, 32768),
     [](problem &p) { p.cache_dtype = F8, p.select = PER_HEAD, p.ratio = 0.1; });
  auto int8 = [](problem &p) { p.cache_dtype = INT8; };
  go("int8 16 x 32K", even(16, 32768), int8);
  go("int8 1 x 32K", even(1, 32768), int8);
  go("int8 1 x 128K", even(1, 131072), int8);
  go("int8 16 x 2K", even(16, 2048), int8);
  go("int8 16 x 8K", even(16, 8192), int8);
  go("int8 16 x 32K, 64 on 8", even(16, 32768), [&](problem &p) { int8(p), p.heads = 64; });
  go("int8 16 x 32K, 128 on 8", even(16, 32768), [&](problem &p) { int8(p), p.heads = 128; });
  go("int8 16 x 32K, soft cap 50", even(16, 32768),
     [&](problem &p) { int8(p), p.soft_cap = 50; });
  go("int8 10% of 16 x 32K", even(16, 32768),
     [&](problem &p) { int8(p), p.select = PER_HEAD, p.ratio = 0.1; });
  go("int8 16 x 16K, D 64", even(16, 16384), [&](problem &p) { int8(p), p.head_dim = 64; });
  go("int8 16 x 16K, D 256", even(16, 16384), [&](problem &p) { int8(p), p.head_dim = 256; });
  go("f32 q 16 x 32K", even(16, 32768), [](problem &p) { p.dtype = p.out_dtype = F32; });
  go("f32 q, f8 16 x 32K", even(16, 32768),
     [](problem &p) { p.dtype = p.out_dtype = F32, p.cache_dtype = F8; });
  static const int dims[] = {64, 80, 96, 192, 256};
  static const char *dim_names[] = {"16 x 16K, D 64", "16 x 16K, D 80", "16 x 16K, D 96",
                                    "16 x 16K, D 192", "16 x 16K, D 256"};
  for (int i = 0; i < 5; i++)
    go(dim_names[i], even(16, 16384), [=](problem &p) { p.head_dim = dims[i]; });
  go("16 x 16K, D 64, f8", even(16, 16384), [&](problem &p) { p.head_dim = 64, f8(p); });
  go("16 x 16K, D 256, f8", even(16, 16384), [&](problem &p) { p.head_dim = 256, f8(p); });
  static const int groups[][2] = {{8, 8}, {16, 8}, {64, 8}, {128, 8}, {32, 1}, {48, 1}};
  static const char *group_names[] = {"16 x 16K, 8 on 8",  "16 x 16K, 16 on 8",
                                      "16 x 16K, 64 on 8", "16 x 16K, 128 on 8",
                                      "64 x 16K, 32 on 1", "64 x 16K, 48 on 1"};
  for (int i = 0; i < 6; i++)
    go(group_names[i], even(groups[i][1] == 1 ? 64 : 16, 16384),
       [=](problem &p) { p.heads = groups[i][0], p.kv_heads = groups[i][1]; });
  static const int sizes[] = {1, 5, 8, 32, 64, 256};
  static const char *size_names[] = {"16 x 16K, block 1",  "16 x 16K, block 5",
                                     "16 x 16K, block 8",  "16 x 16K, block 32",
                                     "16 x 16K, block 64", "16 x 16K, block 256"};
  for (int i = 0; i < 6; i++)
    go(size_names[i], even(16, 16384), [=](problem &p) { p.block_size = sizes[i]; });
  if (*chosen) return;
  time_after(h, b, "warm", [] {});
  time_after(h, b, "after a read of 128 MiB", [&] { b.read((size_t)128 << 20); });
  time_after(h, b, "after a read of 512 MiB", [&] { b.read((size_t)512 << 20); });
  time_after(h, b, "after a read of 2 GiB", [&] { b.read((size_t)2 << 30); });
  time_after(h, b, "after a write of 512 MiB",
             [&] { DEV_CHECK(cudaMemsetAsync(b.memory, 1, (size_t)512 << 20)); });
  time_after(h, b, "after a read, device idle", [&] {
    b.read((size_t)512 << 20);
    DEV_CHECK(cudaDeviceSynchronize());
  });
  printf("R %.0f GB/s\n", b.read_bandwidth() / 1e3);
}

}  // namespace

int main(int argc, char **argv) {
  harness h;
  std::string what = argc > 1 ? argv[1] : "all";
  if (argc > 2) chosen = argv[2];
  if (what != "time") check_all(h);
  if (what != "check") time_all(h);
  return failures != 0;
}
