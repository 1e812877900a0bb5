/* Prefill attention: mma.sync (paged_prefill.cuh) and wgmma (paged_wgmma.cuh), as they are
 * shipped. Each is checked against a slow reference in fp32 over ragged, windowed, selected,
 * broken and poisoned cases, then timed; `prefill profile` launches wgmma alone, for ncu.
 *
 * TFLOP/s, bf16, 32/8 heads, head_dim 128, block 16, H100, 2026-11-21, in the order in which
 * they were written; only the first and the last were kept:
 *                                                    16K   32K    4K    8K  4K x 32K
 *   0  mma.sync                                      282   293   254   275   287
 *   1  wgmma and TMA, warps specialised              479   478   366   431   503
 *   2  1, S of the next tile before P V, turns       463   484   373   455   497
 *      with tiles of 176 keys                        488   522   385   461   541
 *   3  2 on a fixed grid, head by head               476   551   258   306   572
 *      softmax really under P V (see the note)       485   559   264   340   621
 *   4  3, items of all heads by length               577   533   404   490   558
 *   5  4, uniform descriptors, sums scaled only on
 *      a new maximum, no turns                       618   574   412   494   623
 *      with turns                                    572   572   401   475   570
 *      with three stages                             553   548   391   479   562
 *      with tiles of 176 keys (132 bytes spilled)    543   526   372   454   570
 *   6  5, no running maximum                         719   647   492   590   685
 *      with turns                                    650   642   484   574   657
 *      with weights of their own under P V           565   576   425   502   551
 *   7  6 tidied, 16-byte stores: shipped             702   646   490   610   707
 *      cuDNN through torch, contiguous K and V       660   623   519   616   695
 * Runs differ by 5%, the GPU's clock with them. Profile: notes/20261121-prefill.md. */
#include <cstdint>
#include <cstring>
#include <string>

#include "args/attention.h"
#include "dev.cuh"
#include "cuda/attention/paged_prefill.cuh"
#include "cuda/attention/wgmma_launch.cuh"

using namespace kvl;
using bf16 = __nv_bfloat16;

namespace {

/* What a policy's hook may be: it reads all that it is given. */
struct test_hook {
  static constexpr bool ACTIVE = true, KEEPS = false;
  __device__ float operator()(float score, const hook_row &row, int index) const {
    const int back = row.query_index - index;
    score += 0.01f * (float)(index % 7 - row.head % 3) + 0.05f * (float)row.kv_head;
    if (index / 16 % 5 == 3 && back > 64 && index < row.length - 9) score = -INFINITY;
    return score + (row.seq == 1 ? 0.1f : 0.f);
  }
};

/* One that is as cheap as most: ALiBi. */
struct light_hook {
  static constexpr bool ACTIVE = true, KEEPS = false;
  __device__ float operator()(float score, const hook_row &row, int index) const {
    return score + exp2f(-2.f * (float)(row.head + 1)) * (float)(index - row.query_index);
  }
};

/* ---- the reference ------------------------------------------------------------------- */

/* One block of threads per (token, head), everything in fp32, keys in any order. */
template <class T>
__global__ void reference(kvl_paged_attention_args a, bool hooked, float *out, float *lse) {
  extern __shared__ float scores[]; /* [keys] */
  __shared__ float q[256], scratch[32];
  const int64_t token = blockIdx.x, head = blockIdx.y;
  const kvl_pages &c = a.cache;
  const int d = c.key.dim, group = (int)(a.heads / c.kv_heads), kv_head = (int)head / group;
  int seq = 0;
  if (!a.starts) seq = (int)token;
  else
    while (a.starts[seq + 1] <= token) seq++;
  const int length = a.lens[seq];
  const int at = length - (a.starts ? a.starts[seq + 1] - (int)token : 1);
  for (int i = threadIdx.x; i < d; i += blockDim.x)
    q[i] = to_float(((const T *)a.q)[(token * a.heads + head) * d + i]);
  __syncthreads();
  const int entries = (int)(a.selection ? a.max_selected : a.max_blocks);
  auto row = [&](int i, int &index)
      -> int64_t { /* where a key's K begins, or -1 */
                   int entry = i / c.block_size, block = entry;
                   if (a.selection)
                     block = a.selection[(seq * a.selection_heads +
                                          (a.selection_heads > 1 ? kv_head : 0)) *
                                             a.max_selected +
                                         entry];
                   if (block < 0 || block >= a.max_blocks) return -1;
                   index = block * c.block_size + i % c.block_size;
                   if (index >= length || (a.causal && index > at)) return -1;
                   if (a.window && index <= at - a.window) return -1;
                   int64_t physical = a.tables[seq * a.max_blocks + block];
                   if (a.slots)
                     physical =
                         a.slots[(seq * a.slot_heads + (a.slot_heads > 1 ? kv_head : 0)) *
                                     a.max_selected +
                                 entry];
                   if (physical < 0 || physical >= c.blocks) return -1;
                   return kvl__row_at(&c, &c.key, physical, kv_head, i % c.block_size);
  };
  const bool f8 = c.codec == KVL_CODEC_F8E4M3;
  const int64_t to_value = kvl__to_value(&c, kv_head);
  auto cached = [&](int64_t row, int e) {
    const char *at = (const char *)c.memory + row;
    if (c.codec == KVL_CODEC_INT8) { /* rounded as a cache of T would hold it */
      const int64_t in_strip = row % c.key.bytes, token = in_strip / c.key.bytes_row;
      const float x = to_float(((const int8 *)at)[e]);
      return to_float(from_float<T>(x * scale_of(c.key, at - in_strip, token, e)));
    }
    return f8 ? to_float(((const f8e4m3 *)at)[e]) : to_float(((const T *)at)[e]);
  };
  const float k_scale = c.k_scale ? c.k_scale[kv_head] : 1.f;
  const float v_scale = c.v_scale ? c.v_scale[kv_head] : 1.f;
  const int keys = entries * c.block_size;
  float m = -INFINITY;
  for (int i = threadIdx.x; i < keys; i += blockDim.x) {
    int index;
    const int64_t k = row(i, index);
    float s = -INFINITY;
    if (k >= 0) {
      s = 0.f;
      for (int e = 0; e < d; e++) s += q[e] * cached(k, e);
      s *= a.scale * k_scale;
      if (a.soft_cap > 0.f) s = a.soft_cap * tanhf(s / a.soft_cap);
      if (a.alibi) s += a.alibi[head] * (index - at);
      if (hooked) {
        const hook_row of = {seq, c.kv_heads, kv_head, (int)head % group, length, at};
        s = test_hook()(s * LOG2E, of, index) * LN2;
      }
      if (a.tree && index >= tree_begin(a, length) && !tree_shows(a, token, length, index))
        s = -INFINITY;
    }
    scores[i] = s;
    m = fmaxf(m, s);
  }
  m = block_max(m, scratch);
  float sum = 0.f;
  for (int i = threadIdx.x; i < keys; i += blockDim.x)
    sum += scores[i] = scores[i] == -INFINITY ? 0.f : expf(scores[i] - m);
  sum = block_sum(sum, scratch);
  const float own = sum > 0.f ? m + logf(sum) : -INFINITY;
  const int64_t r = token * a.heads + head;
  const float prev = a.prev_lse ? a.prev_lse[r] : -INFINITY, top = fmaxf(own, prev);
  const float w = own == -INFINITY ? 0.f : expf(own - top);
  const float w_prev = prev == -INFINITY ? 0.f : expf(prev - top), both = w + w_prev;
  if (threadIdx.x == 0) lse[r] = both > 0.f ? top + logf(both) : -INFINITY;
  for (int e = threadIdx.x; e < d; e += blockDim.x) {
    float x = 0.f;
    for (int i = 0; i < keys; i++) {
      int index;
      const int64_t k = scores[i] > 0.f ? row(i, index) : -1;
      if (k >= 0) x += scores[i] * cached(k + to_value, e);
    }
    x = sum > 0.f ? x / sum * v_scale : 0.f;
    if (w_prev > 0.f) x = (x * w + a.prev_out[r * d + e] * w_prev) / both;
    out[r * d + e] = x;
  }
}

/* ---- cases --------------------------------------------------------------------------- */

/* Packs rows as the append does; a thread has the numbers of a scale. */
__global__ void pack_rows(const float *x, kvl_pages c, int64_t count) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t row = i / c.key.groups, strip = row / c.block_size,
                token = row % c.block_size;
  const int begin = (int)(i % c.key.groups) * PACKED_GROUP, dim = c.key.dim;
  const int end = min(begin + PACKED_GROUP, dim);
  float most = 0.f;
  for (int e = begin; e < end; e++) most = fmaxf(most, fabsf(x[row * dim + e]));
  char *const at = (char *)c.memory + strip * c.key.bytes;
  const __nv_bfloat16 scale = __float2bfloat16(most / 127.f);
  ((__nv_bfloat16 *)(at + c.key.scales))[token * c.key.groups + begin / PACKED_GROUP] = scale;
  for (int e = begin; e < end; e++)
    ((int8_t *)(at + token * c.key.bytes_row))[e] = (int8_t)fminf(
        fmaxf(rintf(x[row * dim + e] / to_float(scale)), -127.f), 127.f);
}

struct shape_case {
  const char *name;
  std::vector<int> lens, chunk; /* of each sequence */
  int heads = 8, kv_heads = 2, head_dim = 128, block_size = 16;
  bool causal = true;
  int window = 0;
  float soft_cap = 0.f;
  bool alibi = false, prev = false, out_f32 = false;
  int selection = 0;   /* 1: shared, 2: per KV head, 3: with slots, some -1 */
  bool broken = false; /* some table entries are out of range */
  bool f8 = false;     /* an f8e4m3 cache with scales */
  bool packed = false; /* an int8 cache */
  bool decode = false; /* starts is NULL */
  float q_std = 1.f, scale_by = 1.f;
  bool hooked = false;  /* with test_hook */
  int tree_words = 0;   /* a random draft tree over 64 tokens a word */
  bool pinned = false;  /* the cache is in host memory */
  float kv_std = 1.f;   /* of an int8 cache */
  float k_factor = 1.f; /* of the f8e4m3 cache's k_scale; 0: of the first KV head alone */
};

template <class T> struct problem {
  kvl_paged_attention_args a = {};
  int64_t pairs = 0; /* (row, key) seen, without selection, for all heads */
  std::vector<void *> owned;
  template <class X> X
  *own(X *p) {
    owned.push_back((void *)p);
    return p;
  }

  problem(const shape_case &c, bool poison = true) {
    const int seqs = (int)c.lens.size();
    int longest = 1, tokens = 0, blocks = 0;
    std::vector<int32_t> starts = {0};
    for (int s = 0; s < seqs; s++) {
      longest = std::max(longest, c.lens[s]);
      starts.push_back(tokens += c.chunk[s]);
      blocks += (c.lens[s] + c.block_size - 1) / c.block_size;
      for (int i = 0; i < c.chunk[s]; i++) {
        int at = c.lens[s] - c.chunk[s] + i, end = c.causal ? at + 1 : c.lens[s];
        int from = c.window ? std::max(0, at - c.window + 1) : 0;
        pairs += (int64_t)c.heads * std::max(0, end - from);
      }
    }
    const int max_blocks = (longest + c.block_size - 1) / c.block_size + 1;
    blocks += 3;
    std::vector<int32_t> order = dev::shuffled(blocks, 7), tables(seqs * max_blocks, -1);
    int next = 0;
    for (int s = 0; s < seqs; s++)
      for (int b = 0; b * c.block_size < c.lens[s]; b++) {
        tables[s * max_blocks + b] = order[next++];
        if (c.broken && (b * 7 + s) % 5 == 1)
          tables[s * max_blocks + b] = b % 2 ? -1 : blocks;
      }
    a.dtype = sizeof(T) == 4            ? KVL_DTYPE_F32
              : std::is_same_v<T, bf16> ? KVL_DTYPE_BF16
                                        : KVL_DTYPE_F16;
    a.cache = dev::pages(c.packed ? KVL_CODEC_INT8
                         : c.f8   ? KVL_CODEC_F8E4M3
                                  : a.dtype,
                         blocks, c.kv_heads, c.block_size, c.head_dim);
    const kvl_strips &strip = a.cache.key;
    const int64_t bytes_page = a.cache.bytes_page, rows_page = 2 * c.kv_heads * c.block_size;
    const int64_t numbers = blocks * rows_page * c.head_dim;
    void *kv;
    if (c.packed) {
      a.cache.memory = kv = dev::alloc<char>(blocks * bytes_page);
      float *x = dev::randn<float>(numbers, 1, c.kv_std);
      const int64_t count = blocks * rows_page * strip.groups;
      pack_rows<<<(unsigned)((count + 255) / 256), 256>>>(x, a.cache, count);
      DEV_CHECK(cudaFree(x));
    } else {
      kv = c.f8 ? (void *)dev::randn<__nv_fp8_e4m3>(numbers, 1, 2.f)
                : (void *)dev::randn<T>(numbers, 1);
    }
    own(kv);
    if (poison) { /* what lies past a sequence's end, and blocks nobody owns */
      char *nan = dev::alloc<char>(bytes_page);
      auto spoil = [&](int64_t at, int64_t bytes) {
        DEV_CHECK(cudaMemcpy((char *)kv + at, nan, bytes, cudaMemcpyDeviceToDevice));
      };
      for (int s = 0; s < seqs; s++) {
        const int b = c.lens[s] / c.block_size, t = c.lens[s] % c.block_size;
        const int physical = t ? tables[s * max_blocks + b] : -1;
        if (physical < 0 || physical >= blocks) continue;
        for (int h = 0; h < 2 * c.kv_heads; h++) {
          const int64_t at = physical * bytes_page + h * strip.bytes;
          spoil(at + t * strip.bytes_row, (int64_t)(c.block_size - t) * strip.bytes_row);
          spoil(at + strip.scales + t * 2 * strip.groups,
                (int64_t)(c.block_size - t) * 2 * strip.groups);
        }
      }
      for (int b = next; b < blocks; b++) spoil(order[b] * bytes_page, bytes_page);
      cudaFree(nan);
    }
    a.cache.memory = kv;
    if (c.pinned) {
      void *host;
      DEV_CHECK(cudaMallocHost(&host, blocks * bytes_page)); /* until the program ends */
      DEV_CHECK(cudaMemcpy(host, kv, blocks * bytes_page, cudaMemcpyDeviceToHost));
      a.cache.memory = host;
      a.cache.pinned = 1;
    }
    if (c.f8) {
      std::vector<float> scales(2 * c.kv_heads);
      for (size_t i = 0; i < scales.size(); i++) scales[i] = 0.3f + 0.1f * i;
      for (int i = 0; i < c.kv_heads; i++)
        if (c.k_factor != 0.f || i == 0) scales[i] *= c.k_factor;
      a.cache.k_scale = own(dev::upload(scales));
      a.cache.v_scale = a.cache.k_scale + c.kv_heads;
    }
    a.out_dtype = c.out_f32 ? KVL_DTYPE_F32 : a.dtype;
    a.tokens = tokens, a.seqs = seqs, a.heads = c.heads, a.max_blocks = max_blocks;
    a.q = own(dev::randn<T>((size_t)tokens * c.heads * c.head_dim, 2, c.q_std));
    a.tables = own(dev::upload(tables));
    a.lens = own(dev::upload(std::vector<int32_t>(c.lens.begin(), c.lens.end())));
    a.starts = c.decode ? nullptr : own(dev::upload(starts));
    a.scale = c.scale_by / sqrtf((float)c.head_dim), a.soft_cap = c.soft_cap;
    a.causal = c.causal, a.window = c.window;
    if (c.selection) {
      a.selection_heads = c.selection > 1 ? c.kv_heads : 1;
      a.max_selected = max_blocks / 2 + 2;
      std::vector<int32_t> chosen, slots;
      for (int s = 0; s < seqs; s++)
        for (int h = 0; h < a.selection_heads; h++) {
          int n = 0;
          for (int b = 0; b * c.block_size < c.lens[s] && n < a.max_selected; b++) {
            if (dev::shuffled(97, b * 31 + s * 7 + h)[0] % 2) continue;
            chosen.push_back(b), n++;
            slots.push_back(b % 3 == 1 ? -1 : tables[s * max_blocks + b]);
          }
          for (; n < a.max_selected; n++) chosen.push_back(-1), slots.push_back(-1);
        }
      a.selection = own(dev::upload(chosen));
      if (c.selection == 3) {
        a.slots = own(dev::upload(slots));
        a.slot_heads = a.selection_heads;
      }
    }
    const size_t rows = (size_t)tokens * c.heads;
    if (c.tree_words) {
      std::vector<uint64_t> words((size_t)tokens * c.tree_words);
      for (size_t i = 0; i < words.size(); i++)
        words[i] = i * 0x9E3779B97F4A7C15ull ^ i << 17 ^ 0x5555F0F01234ABCDull;
      a.tree = own(dev::upload(words));
      a.tree_words = c.tree_words;
    }
    if (c.alibi) {
      a.alibi = own(dev::randn<float>(c.heads, 3, 0.1f));
      std::vector<float> slopes(c.heads); /* as models have them */
      for (int h = 0; h < c.heads; h++) slopes[h] = exp2f(-8.f * (h + 1) / c.heads);
      if (!poison) a.alibi = own(dev::upload(slopes));
    }
    if (c.prev) {
      a.prev_out = own(dev::randn<float>(rows * c.head_dim, 4));
      a.prev_lse = own(dev::randn<float>(rows, 5, 3.f));
    }
    a.out = own(dev::alloc<float>(rows * c.head_dim));
    a.lse = own(dev::alloc<float>(rows));
    a.workspace = own(dev::alloc<char>((size_t)64 << 20));
  }
  ~problem() {
    for (void *p : owned) cudaFree(p);
  }
};

using launcher = int (*)(const kvl_paged_attention_args &, const kvl_cuda_queue *);

template <class T, int D>
int launch_mma(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  using shape = prefill_shape<D>;
  int group = (int)(a.heads / a.cache.kv_heads), subgroups = (group + 127) / 128;
  int tokens_tile = shape::ROWS / group > 1 ? shape::ROWS / group : 1;
  dim3 grid((unsigned)(a.tokens / tokens_tile + a.seqs), a.cache.kv_heads * subgroups);
  auto launch = [&](auto kernel, int status) {
    if (status < 0) return status;
    kernel<<<grid, shape::THREADS, shape::SHARED_BYTES, q->stream>>>(
        a, subgroups, prefill_parts{1, 1, (uint8_t *)a.workspace});
    return (int)KVL_OK;
  };
  if (a.cache.codec == KVL_CODEC_INT8)
    return launch(paged_prefill<T, D, int8>,
                  allow_shared<paged_prefill<T, D, int8>>(q, shape::SHARED_BYTES));
  if (a.cache.codec == KVL_DTYPE_F8E4M3)
    return launch(paged_prefill<T, D, f8e4m3>,
                  allow_shared<paged_prefill<T, D, f8e4m3>>(q, shape::SHARED_BYTES));
  return launch(paged_prefill<T, D>,
                allow_shared<paged_prefill<T, D>>(q, shape::SHARED_BYTES));
}

/* wgmma with a hook. */
template <class T, class shape, class H>
__global__ void __launch_bounds__(shape::THREADS, 1)
    hooked_wgmma(const __grid_constant__ kvl_paged_attention_args a,
                 const __grid_constant__ CUtensorMap map,
                 const __grid_constant__ wgmma_plan plan) {
  wgmma_attention<T, shape, true>(a, map, plan, H());
}
template <class T, class shape, class H>
int launch_hooked_shape(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  wgmma_plan plan;
  plan_wgmma<shape>(a, q->device, q->sm_count, plan);
  return launch_planned<T, shape>(
      a, plan, true, q, [&](int grid, bool programmatic, const CUtensorMap &map) {
        allow_shared<hooked_wgmma<T, shape, H>>(q, shape::SHARED_BYTES);
        return launch_programmatic(hooked_wgmma<T, shape, H>, grid, shape::THREADS,
                                   shape::SHARED_BYTES, q, a, map, plan);
      });
}
template <class T, int D, class H = test_hook>
int launch_hooked(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  if (a.cache.codec == KVL_CODEC_INT8)
    return launch_hooked_shape<T, wgmma_shape<D, int8>, H>(a, q);
  if (a.cache.codec == KVL_DTYPE_F8E4M3)
    return launch_hooked_shape<T, wgmma_shape<D, f8e4m3>, H>(a, q);
  return launch_hooked_shape<T, wgmma_shape<D>, H>(a, q);
}

template <class T, int D>
int launch_dim(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  return with_codec<void>(a.cache.codec, [&](auto of) {
    using C = typename decltype(of)::C;
    return launch_wgmma_dim<std::conditional_t<same<C, f8e4m3>, __half, T>, C, D>(a, q);
  });
}

struct version {
  const char *name;
  int head_dim;
  launcher run_bf16, run_f16, hooked_bf16;
};
/* -DONLY=128 compiles and runs wgmma with this head_dim alone. */
const version versions[] = {
#ifdef ONLY
    {"wgmma", ONLY, launch_dim<bf16, ONLY>, launch_dim<__half, ONLY>,
     launch_hooked<bf16, ONLY>},
#else
    {"mma.sync", 128, launch_mma<bf16, 128>, launch_mma<__half, 128>},
    {"mma.sync", 64, launch_mma<bf16, 64>, launch_mma<__half, 64>},
    {"wgmma", 128, launch_dim<bf16, 128>, launch_dim<__half, 128>, launch_hooked<bf16, 128>},
    {"wgmma", 64, launch_dim<bf16, 64>, launch_dim<__half, 64>, launch_hooked<bf16, 64>},
    {"wgmma", 96, launch_dim<bf16, 96>, launch_dim<__half, 96>, launch_hooked<bf16, 96>},
    {"wgmma", 192, launch_dim<bf16, 192>, launch_dim<__half, 192>, launch_hooked<bf16, 192>},
    {"wgmma", 256, launch_dim<bf16, 256>, launch_dim<__half, 256>, launch_hooked<bf16, 256>},
#endif
};

template <class T>
bool check(const shape_case &c, const version &v, const kvl_cuda_queue *q) {
  problem<T> p(c);
  const size_t rows = (size_t)p.a.tokens * p.a.heads, count = rows * c.head_dim;
  float *out = p.own(dev::alloc<float>(count)), *lse = p.own(dev::alloc<float>(rows));
  const int entries = (int)(p.a.selection ? p.a.max_selected : p.a.max_blocks);
  const int bytes = entries * c.block_size * 4;
  cudaFuncSetAttribute(reference<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  reference<T><<<dim3((unsigned)p.a.tokens, c.heads), 128, bytes>>>(p.a, c.hooked, out, lse);
  DEV_CHECK(cudaGetLastError());
  const launcher run = c.hooked                  ? v.hooked_bf16
                       : std::is_same_v<T, bf16> ? v.run_bf16
                                                 : v.run_f16;
  if (run(p.a, q) != KVL_OK) return false;
  DEV_CHECK(cudaDeviceSynchronize());
  auto want = dev::download(out, count), want_lse = dev::download(lse, rows);
  auto got_lse = dev::download(p.a.lse, rows);
  std::vector<float> got(count);
  if (c.out_f32) got = dev::download((float *)p.a.out, count);
  else {
    auto raw = dev::download((T *)p.a.out, count);
    for (size_t i = 0; i < count; i++) got[i] = (float)raw[i];
  }
  const double scores_std = (double)c.q_std * c.kv_std;
  double worst = 0, worst_lse = 0;
  for (size_t i = 0; i < count; i++) {
    double e = fabs(got[i] - want[i]) / c.kv_std;
    if (!(e <= worst)) worst = e;
  }
  for (size_t i = 0; i < rows; i++) {
    double e = want_lse[i] == got_lse[i] ? 0 : fabs(got_lse[i] - want_lse[i]);
    if (scores_std > 1) e /= scores_std;
    if (!(e <= worst_lse)) worst_lse = e;
  }
  /* P rounds to q's dtype and so does out; values are normal, below 6. */
  const double wide = c.f8 ? 1.2 : 1; /* the standard deviation of V with its scale */
  /* With large scores a row is one value, the largest ones too. */
  const double large = scores_std > 1.01 ? 1.6 : 1;
  const double tolerance = (std::is_same_v<T, bf16> ? 0.02 : 0.0025) * large * wide;
  bool ok = worst <= tolerance && worst_lse <= 1e-4;
  if (!ok)
    printf("WRONG %s D %d, %s%s, block %d, %s: out %g lse %g\n", v.name, v.head_dim, c.name,
           c.packed ? ", int8"
           : c.f8   ? ", f8"
                    : "",
           c.block_size, std::is_same_v<T, bf16> ? "bf16" : "f16", worst, worst_lse);
  return ok;
}

std::vector<shape_case> check_cases(int d) {
  std::vector<shape_case> cases;
  auto add = [&](const char *name, std::vector<int> lens, std::vector<int> chunk,
                 const std::function<void(shape_case &)> &change = nullptr) {
    shape_case c{name, lens, chunk};
    c.head_dim = d;
    if (change) change(c);
    cases.push_back(c);
  };
  add("whole prompt", {512}, {512});
  add("history", {1000}, {300});
  add("ragged", {77, 0, 1, 900, 130, 64, 5}, {77, 0, 1, 33, 130, 3, 5});
  add("more rows than keys", {40}, {70});
  add("not causal", {700, 129}, {100, 129}, [](shape_case &c) { c.causal = false; });
  for (int group : {1, 4, 7, 8, 16, 65, 128, 192, 200})
    add("groups", {333, 200}, {333, 50}, [=](shape_case &c) { c.heads = 2 * group; });
  add("a group beyond a tile", {200}, {9},
      [](shape_case &c) { c.heads = 160, c.kv_heads = 1; });
  for (int size : {8, 16, 24, 64, 256, 48, 88})
    for (bool causal : {true, false})
      add("block sizes", {601, 300}, {200, 300}, [=](shape_case &c) {
        c.block_size = size;
        c.causal = causal;
      });
  for (int selection : {1, 2, 3})
    for (int size : {16, 64, 24})
      for (bool causal : {true, false})
        add("selection", {901, 450}, {100, 450}, [=](shape_case &c) {
          c.selection = selection, c.block_size = size, c.causal = causal;
        });
  add("broken table", {901, 450}, {100, 450}, [](shape_case &c) { c.broken = true; });
  for (int window : {1, 17, 128, 400})
    for (int selection : {0, 2})
      add("window", {901, 450}, {300, 450},
          [=](shape_case &c) { c.window = window, c.selection = selection; });
  add("window, not causal", {901}, {300},
      [](shape_case &c) { c.window = 70, c.causal = false; });
  add("alibi", {700}, {300}, [](shape_case &c) { c.alibi = true; });
  add("soft cap", {700}, {300}, [](shape_case &c) { c.soft_cap = 2.f; });
  add("both", {700}, {300}, [](shape_case &c) { c.soft_cap = 5.f, c.alibi = true; });
  for (bool f32 : {false, true})
    add("prev", {700, 3}, {300, 3}, [=](shape_case &c) { c.prev = true, c.out_f32 = f32; });
  for (int tokens : {1, 2, 3, 16, 33})
    for (int selection : {0, 1, 3})
      for (int window : {0, 700})
        add("few tokens over many", {3001, 5, 0, 1700}, {tokens, 2, 0, tokens},
            [=](shape_case &c) { c.selection = selection, c.window = window; });
  add("few tokens, prev, biased", {3001, 1700}, {7, 1},
      [](shape_case &c) { c.prev = true, c.soft_cap = 2.f, c.alibi = true; });
  /* Weights relative to an early score pass the largest float. */
  for (float std : {20.f, 100.f})
    for (int tokens : {300, 2})
      for (int window : {0, 70})
        add("large scores", {700, 1500}, {tokens, tokens},
            [=](shape_case &c) { c.q_std = std, c.window = window; });
  add("one of many", std::vector<int>(70, 333), std::vector<int>(70, 2));
  for (int group : {17, 32, 64, 100, 128, 200})
    for (int selection : {0, 2})
      add("decode of wide groups", {3001, 5, 0, 1700, 64}, {1, 1, 1, 1, 1},
          [=](shape_case &c) {
            c.heads = 2 * group, c.decode = true, c.selection = selection;
          });
  for (int tokens : {300, 2})
    for (bool causal : {true, false})
      add("tree", {700, 301}, {tokens, tokens},
          [=](shape_case &c) { c.tree_words = 2, c.causal = causal; });
  add("tree, biased", {700, 301}, {30, 70},
      [](shape_case &c) { c.tree_words = 1, c.soft_cap = 5.f, c.alibi = true; });
  for (float cap : {50.f, 500.f})
    add("larger soft cap", {700, 300}, {300, 2}, [=](shape_case &c) { c.soft_cap = cap; });
  for (int tokens : {300, 3})
    for (int selection : {0, 2, 3})
      add("hook", {901, 450}, {tokens, tokens},
          [=](shape_case &c) { c.hooked = true, c.selection = selection; });
  add("hook, biased", {901, 450, 0}, {100, 450, 0}, [](shape_case &c) {
    c.hooked = true, c.soft_cap = 4.f, c.alibi = true, c.window = 200;
  });
  add("hook, large scores", {901, 450}, {100, 450},
      [](shape_case &c) { c.hooked = true, c.q_std = 100.f; });
  for (int size : {1, 2, 5, 12, 17, 100})
    for (int selection : {0, 1, 2, 3})
      for (int tokens : {200, 3})
        add("any block size", {601, 0, 300}, {tokens, 0, tokens}, [=](shape_case &c) {
          c.block_size = size, c.selection = selection, c.window = tokens == 3 ? 70 : 0;
          c.alibi = size == 5, c.hooked = size == 2, c.broken = size == 12;
        });
  for (int size : {1, 5})
    for (int tokens : {300, 2}) {
      add("by row, prev", {700, 301, 3}, {tokens, 40, 3}, [=](shape_case &c) {
        c.block_size = size, c.prev = true, c.soft_cap = size == 5 ? 20.f : 0.f;
      });
      add("by row, tree", {700, 301}, {tokens, tokens},
          [=](shape_case &c) { c.block_size = size, c.tree_words = 2; });
      add("by row, large scores", {700, 1500}, {tokens, tokens}, [=](shape_case &c) {
        c.block_size = size, c.q_std = 100.f, c.window = size == 5 ? 70 : 0;
      });
      add("by row, wide groups", {3001, 5, 0, 1700, 64}, {1, 1, 1, 1, 1}, [=](shape_case &c) {
        c.block_size = size, c.decode = true, c.heads = tokens == 2 ? 34 : 256;
      });
    }
  for (int size : {5, 16})
    for (int tokens : {200, 2})
      add("pinned", {601, 300}, {tokens, 9},
          [=](shape_case &c) { c.pinned = true, c.block_size = size; });
  for (int size : {8, 16, 64})
    for (int tokens : {200, 2})
      add("pinned, hook", {601, 300}, {tokens, 9},
          [=](shape_case &c) { c.pinned = c.hooked = true, c.block_size = size; });
  for (float std : {1e-4f, 1e-30f})
    add("small queries", {700, 300}, {100, 2}, [=](shape_case &c) { c.q_std = std; });
  add("any block size, not causal", {601, 300}, {200, 300},
      [](shape_case &c) { c.block_size = 7, c.causal = false, c.alibi = true; });
  /* All of these once more over f8e4m3 and int8. */
  const size_t count = cases.size();
  for (size_t i = 0; i < count; i++) {
    cases.push_back(cases[i]);
    cases.back().f8 = true;
    /* wgmma_takes leaves the others to paged_prefill.cuh. */
    if (cases[i].block_size % 8 || (cases[i].pinned && !cases[i].hooked)) continue;
    cases.push_back(cases[i]);
    cases.back().packed = true;
  }
  for (float factor : {-1.f, 0.f, 1e-30f, 0.01f})
    for (int size : {16, 5})
      for (bool biased : {false, true})
        add("f8e4m3, scales of K", {700, 45}, {300, 45}, [=](shape_case &c) {
          c.f8 = true, c.block_size = size, c.k_factor = factor, c.alibi = biased;
          c.q_std = factor == -1.f ? 20.f : 1.f;
        });
  for (float std : {1e-20f, 2.5e35f}) /* some scales are LARGE_SCALE and more */
    for (int size : {16, 64})
      for (bool biased : {false, true})
        add("int8, scales", {700, 1500}, {300, 2}, [=](shape_case &c) {
          c.packed = true, c.block_size = size, c.kv_std = std, c.alibi = biased;
          c.q_std = 1e6f / std, c.scale_by = 1e-6f; /* q stays among normal numbers */
        });
  return cases;
}

}  // namespace

int main(int argc, char **argv) {
  auto mode = [&](const char *name) { return argc > 1 && !strcmp(argv[1], name); };
  const bool profile = mode("profile");
  /* `prefill check [NAME]` and `prefill time [NAME]` do one part, for cases named so. */
  auto chosen = [&](const shape_case &c) { return argc < 3 || strstr(c.name, argv[2]); };
  kvl_cuda_queue q = {};
  DEV_CHECK(cudaGetDevice(&q.device));
  DEV_CHECK(cudaDeviceGetAttribute(&q.sm_count, cudaDevAttrMultiProcessorCount, q.device));
  DEV_CHECK(cudaDeviceGetAttribute(&q.shared_optin, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                   q.device));
  q.code = kvl::code_for(q.device);
  int wrong = 0, done = 0;
  for (const version &v : versions) {
    if (profile || mode("time")) break;
    for (const shape_case &c : check_cases(v.head_dim)) {
      if (!chosen(c)) continue;
      const bool wgmma = !strcmp(v.name, "wgmma");
      if (!wgmma && (c.decode || c.hooked)) continue;
      const bool half = !c.hooked && c.kv_std == 1.f;
      wrong += !check<bf16>(c, v, &q) + (half && !check<__half>(c, v, &q));
      done += 1 + half;
    }
  }
  if (done) printf("%d checks, %d wrong\n", done, wrong);

  if (mode("check")) return wrong > 0;
  using sizes = std::vector<int>;
  std::vector<shape_case> timed = {
      {"4K", {4096}, {4096}, 32, 8},
      {"8K", {8192}, {8192}, 32, 8},
      {"16K", {16384}, {16384}, 32, 8},
      {"32K", {32768}, {32768}, 32, 8},
      {"16 x 2K", sizes(16, 2048), sizes(16, 2048), 32, 8},
      {"4K x 32K, all seen", {32768}, {4096}, 32, 8, 128, 16, false},
      {"16K, block 256", {16384}, {16384}, 32, 8, 128, 256},
      {"4K over 16K", {20480}, {4096}, 32, 8},
      {"4K over 16K, D 64", {20480}, {4096}, 32, 8, 64},
      {"4K over 16K, D 96", {20480}, {4096}, 32, 8, 96},
      {"4K over 16K, D 192", {20480}, {4096}, 32, 8, 192},
      {"4K over 16K, D 256", {20480}, {4096}, 32, 8, 256},
      {"4K over 16K, window 4K", {20480}, {4096}, 32, 8, 128, 16, true, 4096},
      {"4K over 16K, soft cap", {20480}, {4096}, 32, 8, 128, 16, true, 0, 50.f},
      {"4K over 16K, ALiBi", {20480}, {4096}, 32, 8, 128, 16, true, 0, 0.f, true},
      {"16K, D 64", {16384}, {16384}, 32, 8, 64},
  };
  for (int size : {1, 2, 5, 8, 12, 48}) {
    timed.push_back({"4K over 16K, block", {20480}, {4096}, 32, 8, 128, size});
    if (size == 1) timed.push_back({"8 over 1 x 128K, block", {131072}, {8}, 32, 8, 128, 1});
  }
  for (int d : {128, 64, 96, 192, 256})
    timed.push_back({"4K over 16K", {20480}, {4096}, 32, 8, d});
  for (int size : {1, 256})
    timed.push_back({"4K over 16K, block", {20480}, {4096}, 32, 8, 128, size});
  timed.push_back({"4K over 16K, soft cap", {20480}, {4096}, 32, 8, 128, 16, true, 0, 50.f});
  timed.push_back(
      {"4K over 16K, ALiBi", {20480}, {4096}, 32, 8, 128, 16, true, 0, 0.f, true});
  timed.push_back({"4K", {4096}, {4096}, 32, 8});
  timed.push_back({"32K", {32768}, {32768}, 32, 8});
  for (int tokens : {2, 32})
    timed.push_back({"tokens over 1 x 128K", {131072}, {tokens}, 32, 8});
  for (size_t i = timed.size() - 13, end = timed.size(); i < end; i++) {
    if (timed[i].block_size % 8 == 0) {
      timed.push_back(timed[i]);
      timed.back().packed = true;
    }
    timed[i].f8 = true;
  }
  timed.push_back({"4K over 16K, a hook", {20480}, {4096}, 32, 8});
  timed.back().hooked = true;
  for (int tokens : {1, 2, 4, 8, 16, 32, 64, 128, 512})
    timed.push_back({"tokens over 1 x 128K", {131072}, {tokens}, 32, 8});
  timed.push_back({"the same, block 256", {131072}, {8}, 32, 8, 128, 256});
  for (int tokens : {2, 8})
    timed.push_back({"tokens over 16 x 8K", sizes(16, 8192), sizes(16, tokens), 32, 8});
  for (int group : {17, 32, 64, 128}) {
    shape_case c = {"decode 16 x 8K, heads", sizes(16, 8192), sizes(16, 1), 8 * group, 8};
    c.decode = true;
    timed.push_back(c);
    c.lens = {131072}, c.chunk = {1}, c.name = "decode 1 x 128K, heads";
    timed.push_back(c);
  }
  dev::bench bench;
  printf("read of 2 GiB: %.0f GB/s\n", bench.read_bandwidth() * 1e-3);
  for (const shape_case &c : timed)
    for (const version &v : versions) {
      const bool wgmma = !strcmp(v.name, "wgmma");
      if (c.head_dim != v.head_dim || (!wgmma && (profile || c.decode || c.hooked))) continue;
      if (!wgmma && c.chunk[0] < 16) continue;
      if (!chosen(c)) continue;
      problem<bf16> p(c, false);
      const launcher run = c.hooked ? launch_hooked<bf16, 128, light_hook> : v.run_bf16;
      const double us = bench.time([&] { run(p.a, &q); }, false, profile ? 1 : 15);
      double keys = 0;
      for (int n : c.lens) keys += n;
      printf("%-24s %4d %3d %-4s %-9s %8.1f us %7.1f TFLOP/s %6.0f GB/s\n", c.name,
             c.decode ? c.heads : c.chunk[0], c.block_size,
             c.packed ? "int8"
             : c.f8   ? "f8"
                      : "",
             v.name, us, 4.0 * c.head_dim * p.pairs / us * 1e-6,
             2 * keys * c.kv_heads * kvl__bytes_token(&p.a.cache.key) / us * 1e-3);
      fflush(stdout);
      if (profile) return 0;
    }
  return wrong > 0;
}
