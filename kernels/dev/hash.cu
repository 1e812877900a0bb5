/* Hashes of keys, Hamming scores, and the fused selection by them. Compile: see dev.cuh.
 *
 * Versions of the fused selection, 64 bits, 30%, microseconds with a cold L2 (an empty launch
 * reads 3.1), and of scores of 128-bit token hashes, 16 x 32K, as a share of R; H100 80GB,
 * 2026-11-21:
 *        [1,8192]  [64,8192]  [64,65536]  scores
 *   1      15.6      19.0        77.5      0.61
 *   2      13.9      16.3        62.7      0.75
 *   3      18.2      21.1        95.4
 *   4      12.7      14.9        61.9      0.75
 *   5      10.3      24.4        53.8
 *   6       9.1      18.8        54.1      0.71
 *   7       9.2      13.1        34.8      0.75
 * 1  1024 threads, 8 blocks a lane: registers spilled. Scores: 16 loads a lane at once, a warp
 *    for each (32 blocks, KV head)
 * 2  512 threads, 16 blocks a lane; all is asked for before anything is waited for; four
 *    copies of the histogram. Scores: 8 loads at once, twice the warps, all of them at once
 * 3  rolled loops, hashes copied to shared memory asynchronously, a histogram column a lane:
 *    less code, but a chain of shared-memory latencies for each block
 * 4  2 with the group's queries asked for at once (a branch on the dtype in between had made
 *    them wait for each other), distances of a single batch kept in registers.
 *    Cycles of [1,8192], 2 a nanosecond: loads under way and the query summed 5400, hashed
 *    2700, distances and histogram 4300, edge 1000, places 1500, writing 3700
 * 5  a cluster of eight blocks for the heads that share a sector; distances are kept as bytes
 *    in shared memory, histograms are sent with st.async. 16 clusters of eight are two waves:
 *    there is room for 15
 * 6  half the registers, so that two blocks share an SM: 16 clusters run at once but not side
 *    by side, and it spills. The query's hash by 8 lanes a bit in place of 16. Scores: each
 *    block's 2 KiB by a bulk copy, 96 under way an SM: 29.5 us with tables in order, so it is
 *    not where the hashes lie; 10.1 us in place of 7.5 for 2048 blocks: a longer start and
 *    end
 * 7  the largest team of which all run at once, an SM a block: six here. Lists are put
 *    together in shared memory and written in whole sectors; what is certain is written while
 *    the query is on its way: shipped, with the scores of 2. Cycles of [1,8192], of 11500:
 *    until hashes are asked for 3000, query 2100, hashed 900, distances and histogram 1200,
 *    the rest 4300; 1300 instructions a warp
 * Hashes of the tokens of 2048 blocks x 8 KV heads, 64 bits: a warp a hash 1654 us, tensor
 * cores with exact sums where they are in doubt 114; of the means 194 and 56; of the means of
 * 16 blocks 38 and 9.9, by a block of threads each. */
#include <cstring>

#include "../cuda/block_hash.cu"
#include "../cuda/hash_rows.cu"
#include "../cuda/score_hamming.cu"
#include "../cuda/select_hamming.cu"

#include "dev.cuh"

namespace {

/* ---- reference -------------------------------------------------------------------------- */

typedef std::vector<uint64_t> hash_t;

/* Sums as kernels.h fixes them. */
hash_t hash_of(const float *x, const std::vector<float> &planes, int dim, int bits) {
  hash_t words((bits + 63) / 64);
  for (int b = 0; b < bits; b++) {
    volatile float part[16] = {};
    for (int d = 0; d < dim; d++) {
      volatile float product = x[d] * planes[(size_t)b * dim + d];
      part[d % 16] = part[d % 16] + product;
    }
    for (int step = 8; step > 0; step /= 2)
      for (int p = 0; p < step; p++) part[p] = part[p] + part[p + step];
    if (part[0] > 0) words[b / 64] |= (uint64_t)1 << b % 64;
  }
  return words;
}

struct shape {
  int seqs, kv_heads, group, dim, bits, block_size, max_blocks;
  bool is_token, is_shared;
  int dtype;
  int words() const { return (bits + 63) / 64; }
  int heads() const { return kv_heads * group; }
  int tokens() const { return is_token ? block_size : 1; }
  int lists() const { return is_shared ? 1 : kv_heads; }
  int64_t blocks() const { return (int64_t)seqs * max_blocks; }
};

struct problem {
  shape s;
  std::vector<float> q, planes;
  std::vector<uint64_t> hashes;
  std::vector<int32_t> tables, lens;
  void *q_there;
  float *planes_there, *scores;
  uint64_t *hashes_there, *q_hashes;
  int32_t *tables_there, *lens_there, *selection, *counts;
  int max_selected;
  kvl_budget budget;
  kvl_cuda_queue queue = {};

  problem(const shape &s_, kvl_budget budget_, bool is_full, unsigned seed, int spread)
      : s(s_), budget(budget_) {
    cudaDeviceProp p;
    DEV_CHECK(cudaGetDeviceProperties(&p, 0));
    queue.sm_count = p.multiProcessorCount,
    queue.shared_optin = (int)p.sharedMemPerBlockOptin;
    float *numbers = dev::randn<float>((size_t)s.seqs * s.heads() * s.dim, seed);
    q = dev::download(numbers, (size_t)s.seqs * s.heads() * s.dim);
    if (s.dtype == KVL_DTYPE_BF16) {
      std::vector<__nv_bfloat16> half(q.size());
      for (size_t i = 0; i < q.size(); i++) half[i] = q[i], q[i] = (float)half[i];
      q_there = dev::upload(half);
    } else q_there = dev::upload(q);
    cudaFree(numbers);
    numbers = dev::randn<float>((size_t)s.bits * s.dim, seed + 1);
    planes = dev::download(numbers, (size_t)s.bits * s.dim);
    planes_there = numbers;
    uint64_t state = seed;
    auto bits = [&] {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      return dev_mix(state);
    };
    hashes.resize((size_t)s.blocks() * s.kv_heads * s.tokens() * s.words());
    for (auto &h : hashes) {
      h = bits();
      for (int i = 0; i < spread; i++) h &= bits(); /* fewer bits: more ties */
      if (s.bits == 32) h &= 0xFFFFFFFFu;
    }
    hashes_there = dev::upload(hashes);
    tables = dev::shuffled((int)s.blocks(), seed);
    lens.resize(s.seqs);
    for (int i = 0; i < s.seqs; i++) {
      lens[i] = s.max_blocks * s.block_size;
      if (!is_full) lens[i] = i % 3 == 1 ? lens[i] / 2 - 5 : i % 3 == 2 ? 17 : lens[i] - 3;
      lens[i] = std::max(lens[i], 0);
    }
    if (!is_full)
      for (size_t i = 3; i < tables.size(); i += 97) tables[i] = -1;
    tables_there = dev::upload(tables), lens_there = dev::upload(lens);
    max_selected = std::max(1, kvl__budget_blocks(budget, s.max_blocks));
    selection = dev::alloc<int32_t>((size_t)s.seqs * s.lists() * max_selected);
    counts = dev::alloc<int32_t>((size_t)s.seqs * s.lists());
    scores = dev::alloc<float>((size_t)s.seqs * s.lists() * s.max_blocks);
    q_hashes = dev::alloc<uint64_t>((size_t)s.seqs * s.kv_heads * s.words());
  }
  ~problem() {
    for (void *p : {q_there, (void *)planes_there, (void *)hashes_there, (void *)tables_there,
                    (void *)lens_there, (void *)selection, (void *)counts, (void *)scores,
                    (void *)q_hashes})
      cudaFree(p);
  }
  static uint64_t dev_mix(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x7FB5D329728EA185ull;
    return (x ^ (x >> 27)) * 0x81DADEF4BC2DD44Dull;
  }
  kvl_hash_view view() const {
    return {hashes_there, s.blocks(), s.kv_heads, s.tokens(), s.words(), s.is_token};
  }
  void score() const {
    kvl_score_hamming_args a = {};
    a.q = q_hashes, a.hashes = view(), a.tables = tables_there, a.lens = lens_there;
    a.scores = scores, a.seqs = s.seqs, a.score_heads = s.lists(),
    a.max_blocks = s.max_blocks;
    a.block_size = s.block_size;
    kvl_cuda_score_hamming(&a, (void *)&queue);
  }
  void select() const {
    kvl_select_hamming_args a = {};
    a.q = q_there, a.planes = planes_there, a.hashes = view(), a.tables = tables_there;
    a.lens = lens_there, a.selection = selection, a.counts = counts, a.seqs = s.seqs;
    a.heads = s.heads(), a.selection_heads = s.lists(), a.max_blocks = s.max_blocks;
    a.max_selected = max_selected, a.budget = budget, a.block_size = s.block_size;
    a.head_dim = s.dim, a.bits = s.bits, a.dtype = s.dtype;
    kvl_cuda_select_hamming(&a, (void *)&queue);
  }
  /* Distances of a list's blocks; > bits: no block. */
  std::vector<int> distances(int seq, int list, const std::vector<hash_t> &hash) const {
    const int n = std::min((lens[seq] + s.block_size - 1) / s.block_size, s.max_blocks);
    std::vector<int> d(n, 5000);
    for (int h = s.is_shared ? 0 : list; h <= (s.is_shared ? s.kv_heads - 1 : list); h++)
      for (int b = 0; b < n; b++) {
        const int block = tables[(size_t)seq * s.max_blocks + b];
        const int left = lens[seq] - b * s.block_size;
        const int count = s.is_token ? std::min(s.block_size, left) : 1;
        if (block < 0) continue;
        for (int t = 0; t < count; t++) {
          int sum = 0;
          for (int w = 0; w < s.words(); w++)
            sum += __builtin_popcountll(
                hash[h][w] ^
                hashes[(((size_t)block * s.kv_heads + h) * s.tokens() + t) * s.words() + w]);
          d[b] = std::min(d[b], sum);
        }
      }
    return d;
  }
};

int wrong = 0, checked = 0;
void expect(bool right, const char *what, const shape &s) {
  checked++;
  if (right || wrong++ > 20) return;
  printf(
      "WRONG %s: seqs %d heads %d x %d dim %d bits %d block %d max %d token %d shared %d\n",
      what, s.seqs, s.kv_heads, s.group, s.dim, s.bits, s.block_size, s.max_blocks,
      s.is_token, s.is_shared);
}

/* is_small: as on a device of 28 KiB of shared memory and without clusters, so in windows. */
void check(const shape &s, kvl_budget budget, int spread, bool is_small = false) {
  problem p(s, budget, false, 7 + s.bits + s.max_blocks, spread);
  if (is_small) p.queue.shared_optin = 28 << 10;
  std::vector<uint64_t> all;
  std::vector<std::vector<hash_t>> hash(s.seqs);
  for (int seq = 0; seq < s.seqs; seq++)
    for (int h = 0; h < s.kv_heads; h++) {
      std::vector<float> x(s.dim);
      for (int g = 0; g < s.group; g++)
        for (int d = 0; d < s.dim; d++) {
          float y = p.q[((size_t)seq * s.heads() + h * s.group + g) * s.dim + d];
          x[d] = g ? x[d] + y : y;
        }
      hash[seq].push_back(hash_of(x.data(), p.planes, s.dim, s.bits));
      all.insert(all.end(), hash[seq][h].begin(), hash[seq][h].end());
    }
  DEV_CHECK(cudaMemcpy(p.q_hashes, all.data(), all.size() * 8, cudaMemcpyHostToDevice));
  p.score();
  p.select();
  DEV_CHECK(cudaDeviceSynchronize());
  auto scores = dev::download(p.scores, (size_t)s.seqs * s.lists() * s.max_blocks);
  auto chosen = dev::download(p.selection, (size_t)s.seqs * s.lists() * p.max_selected);
  auto counts = dev::download(p.counts, (size_t)s.seqs * s.lists());
  for (int row = 0; row < s.seqs * s.lists(); row++) {
    auto d = p.distances(row / s.lists(), row % s.lists(), hash[row / s.lists()]);
    const int n = (int)d.size(), k = std::min(kvl__budget_blocks(budget, n), p.max_selected);
    bool right = true;
    for (int b = 0; b < s.max_blocks; b++) {
      float want = b >= n || d[b] > s.bits ? -INFINITY : -(float)d[b];
      right = right && scores[(size_t)row * s.max_blocks + b] == want;
    }
    expect(right, "scores", s);
    const int sink = std::min(budget.sink, k), recent = std::min(budget.recent, k - sink);
    std::vector<int> order, want;
    for (int b = 0; b < n; b++) (b < sink || b >= n - recent ? want : order).push_back(b);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return d[a] < d[b]; });
    want.insert(want.end(), order.begin(), order.begin() + (k - sink - recent));
    std::sort(want.begin(), want.end());
    want.resize(p.max_selected, -1);
    expect(memcmp(want.data(), &chosen[(size_t)row * p.max_selected], want.size() * 4) == 0,
           "selection", s);
    expect(counts[row] == k, "counts", s);
  }
}

/* ---- hashes of keys --------------------------------------------------------------------- */

struct keys {
  int n, kv_heads, size, dim, bits;
  bool is_token;
  __nv_bfloat16 *cache;
  float *planes;
  int32_t *blocks, *tokens;
  uint64_t *hashes;
  kvl_cuda_queue queue = {};
  std::vector<int32_t> order, valid;
  size_t count;
  keys(int n_, int kv_heads_, int size_, int dim_, int bits_, bool is_token_, bool is_full)
      : n(n_), kv_heads(kv_heads_), size(size_), dim(dim_), bits(bits_), is_token(is_token_) {
    queue.sm_count = 132, queue.shared_optin = 232448;
    cache = dev::randn<__nv_bfloat16>((size_t)n * 2 * kv_heads * size * dim, 3);
    planes = dev::randn<float>((size_t)bits * dim, 4, 0.1f);
    order = dev::shuffled(n, 5), valid.resize(n);
    for (int i = 0; i < n; i++) valid[i] = is_full ? size : i % (size + 1);
    blocks = dev::upload(order), tokens = dev::upload(valid);
    count = (size_t)n * kv_heads * (is_token ? size : 1) * ((bits + 63) / 64);
    hashes = dev::alloc<uint64_t>(count);
  }
  ~keys() {
    for (void *p :
         {(void *)cache, (void *)planes, (void *)blocks, (void *)tokens, (void *)hashes})
      cudaFree(p);
  }
  void run() const {
    kvl_block_hash_args a = {};
    a.cache.kv = cache, a.cache.blocks = n, a.cache.kv_heads = kv_heads;
    a.cache.block_size = size, a.cache.head_dim = dim, a.cache.dtype = KVL_DTYPE_BF16;
    a.blocks = blocks, a.tokens = tokens, a.planes = planes, a.hashes = hashes;
    a.n = n, a.summary_rows = n, a.bits = bits, a.is_token = is_token;
    kvl_cuda_block_hash(&a, (void *)&queue);
  }
  void check() const {
    run();
    DEV_CHECK(cudaDeviceSynchronize());
    auto got = dev::download(hashes, count);
    auto k = dev::download(cache, (size_t)n * 2 * kv_heads * size * dim);
    auto side = dev::download(planes, (size_t)bits * dim);
    const int words = (bits + 63) / 64, each = is_token ? size : 1;
    bool right = true;
    for (int i = 0; i < n; i++)
      for (int h = 0; h < kv_heads; h++)
        for (int t = 0; t < each; t++) {
          std::vector<float> x(dim);
          const size_t at = (((size_t)order[i] * 2 * kv_heads + h) * size + t) * dim;
          for (int u = 0; u < (is_token ? 1 : valid[i]); u++)
            for (int d = 0; d < dim; d++) {
              float y = (float)k[at + (size_t)u * dim + d];
              x[d] = u ? x[d] + y : y;
            }
          hash_t want = hash_of(x.data(), side, dim, bits);
          if (is_token && t >= valid[i]) want.assign(words, ~(uint64_t)0);
          right = right &&
                  !memcmp(want.data(),
                          &got[(((size_t)order[i] * kv_heads + h) * each + t) * words],
                          8 * words);
        }
    checked++;
    if (!right && ++wrong)
      printf("WRONG hashes of keys: n %d size %d dim %d bits %d token %d\n", n, size, dim,
             bits, is_token);
  }
};

}  // namespace

__global__ void nothing() {}

int main(int argc, char **) {
  const bool is_short = argc > 1; /* under compute-sanitizer */
  const int F = KVL_DTYPE_F32, B = KVL_DTYPE_BF16;
  const kvl_budget third = {0.3, 0, 0, 1, 2}, few = {-1, 5, 0, 2, 1}, none = {0, 0, 0, 0, 0},
                   whole = {1, 0, 0, 0, 0};
  const bool t = true, f = false;
  const shape shapes[] = {
      {3, 2, 4, 128, 64, 16, 100, f, f, B},    {3, 2, 4, 128, 64, 16, 100, f, t, F},
      {3, 2, 1, 80, 32, 16, 33, f, f, F},      {3, 1, 8, 256, 128, 16, 700, f, f, F},
      {2, 3, 2, 24, 192, 16, 50, f, t, F},     {2, 1, 2, 128, 1024, 16, 300, f, f, F},
      {3, 2, 4, 128, 64, 16, 100, t, f, B},    {3, 2, 4, 128, 128, 16, 100, t, f, F},
      {3, 2, 4, 128, 128, 16, 100, t, t, F},   {3, 2, 4, 64, 64, 32, 70, t, t, F},
      {3, 2, 4, 64, 128, 64, 70, t, f, F},     {3, 2, 4, 64, 192, 17, 70, t, f, F},
      {3, 1, 1, 64, 64, 1, 70, t, f, F},       {3, 1, 1, 64, 128, 8, 70, t, f, F},
      {1, 1, 4, 128, 64, 16, 8192, f, f, B},   {1, 1, 4, 128, 64, 16, 30000, f, f, B},
      {8, 8, 4, 128, 64, 16, 20000, f, f, B},  {2, 1, 1, 64, 128, 16, 20000, f, f, F},
      {4, 8, 1, 64, 64, 16, 2100, t, f, F},    {1, 4, 1, 64, 128, 16, 3000, t, f, F},
      {2, 1, 1, 64, 128, 16, 12000, t, f, F},  {2, 1, 1, 64, 64, 1, 30000, t, f, F},
      {1, 1, 1, 64, 64, 16, 1000000, f, f, F}, {40, 1, 1, 64, 64, 1, 150000, f, f, F}};
  for (auto &s : shapes) {
    if (is_short && s.max_blocks > 3000) continue;
    for (int spread : {0, 3}) {
      check(s, third, spread);
      if (s.max_blocks > 50000) continue;
      check(s, few, spread);
      if (s.max_blocks < 1000) check(s, none, spread), check(s, whole, spread);
      if (s.max_blocks > 5000) check(s, third, spread, true);
    }
  }
  for (int bits : {32, 64, 128, 1024})
    for (int dim : {128, 64, 80, 256})
      for (int size : {16, 17})
        for (bool is_token : {false, true})
          keys(19, 2, size, dim, bits, is_token, false).check();
  keys(70, 3, 64, 128, 64, false, false).check();
  printf("%d checked, %d wrong\n", checked, wrong);
  if (wrong || is_short) return wrong != 0;

  dev::bench b;
  const double read = b.read_bandwidth();
  printf("R %.0f GB/s; an empty launch %.1f us\n", read * 1e-3,
         b.time([] { nothing<<<1, 32>>>(); }));
  auto of = [&](int seqs, int kv_heads, int max_blocks, int bits, bool is_token = false,
                bool is_shared = false) {
    return shape{seqs, kv_heads, 4, 128, bits, 16, max_blocks, is_token, is_shared, B};
  };
  const shape timed[] = {
      of(1, 1, 8192, 64),      of(8, 8, 8192, 64),        of(8, 8, 65536, 64),
      of(64, 1, 65536, 64),    of(1, 1, 131072, 64),      of(1, 8, 2048, 64),
      of(16, 8, 2048, 64),     of(16, 8, 2048, 64, f, t), of(16, 8, 2048, 128),
      of(16, 8, 2048, 128, t), of(16, 8, 2048, 64, t),    of(16, 8, 2048, 128, t, t),
      of(1, 8, 2048, 128, t)};
  for (auto &s : timed) {
    problem p(s, {0.3, 0, 0, 1, 2}, true, 1, 0);
    const double bytes = 8.0 * s.blocks() * s.kv_heads * s.tokens() * s.words();
    const double score = b.time([&] { p.score(); }), select = b.time([&] { p.select(); });
    printf(
        "%d x %d KV heads, %d blocks, %d bits%s%s: scores %.1f us (%.2f R), select %.1f us "
        "(%.2f R), warm %.1f\n",
        s.seqs, s.kv_heads, s.max_blocks, s.bits, s.is_token ? ", tokens" : "",
        s.is_shared ? ", shared" : "", score,
        (bytes + 4.0 * s.seqs * s.lists() * s.max_blocks) / score / read, select,
        bytes / select / read, b.time([&] { p.select(); }, true));
  }
  for (int n : {16, 512, 2048})
    for (int bits : {64, 128})
      for (bool is_token : {false, true}) {
        keys k(n, 8, 16, 128, bits, is_token, true);
        printf("hashes of %d blocks, %d bits%s: %.1f us\n", n, bits,
               is_token ? ", tokens" : "", b.time([&] { k.run(); }));
      }
}
