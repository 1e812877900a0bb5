/* Exact selection: topk (sorted, or by index) and select. Compile: see dev.cuh.
 *
 * Versions of the search, select of fp32 N(0, 1), microseconds with a cold L2 (an empty
 * launch reads 3.1), H100 80GB HBM3, 2026-11-21. The last column: 1 + 1e-3 N(0, 1).
 *                 [1,8192] [64,8192] [1,131072] [64,131072]  [64,131072]
 *                   k 256    k 2048     k 2048      k 2048    clustered
 *   1               13.5      14.2      106         110          114
 *   2                9.9      11.0       20.6        68.9         72
 *   3                9.4      12.9       18.4        90.0         36
 *   4                7.8      11.3       16.9        29.3         27.5
 *   5                7.6      10.3       13.7        26.1         24.8
 * 1  a block a row, three passes of 11, 11 and 10 bits over all of it (below)
 * 2  rows in registers, clusters of 8 for long ones, histograms of every pass joined through
 *    distributed shared memory; the first interval from a sample. A cluster barrier that
 *    releases memory is a MEMBAR.GPU, 1 us, and there were two a pass
 * 3  what lies within the sample's bracket is listed, and the rest dropped; lists go to the
 *    first block. 100 instructions an element, and 512 samples: lists overflowed
 * 4  3 with 5 instructions an element, 2048 samples, lists read by the first block
 * 5  4 with lists sent by bulk copies, loops left rolled (which was worth a tenth), dense
 *    words written by the whole warp
 * 6  5 with a sample that grows with the row and knows its indices, so that a bracket of equal
 *    numbers ends at an index; long rows in a smaller part of shared memory.
 *    H200, 2026-11-22, [64,2^20] k 2048, [64,131072] with 8 values: 5 takes 365 and 151 us, 6
 *    takes 109 and 33; notes/20261122-topk.md
 * 7  6 with the indices of long rows put side by side in shared memory before they are
 *    written: the shipped one. H200, 2026-11-28, topk by index, [1,131072] k 8192: 6 takes
 *    38 us, 7 takes 22; notes/20261128-cliffs.md
 * Since then select has rows of up to 9216 in a kernel of their own, see select.cu. */
#include <cstring>
#include <thread>

#include "args/select.h"
#include "cuda/select/select.cu"
#include "cuda/select/topk.cu"

#include "dev.cuh"

namespace {

/* ---- version 1: a block a row, three passes of 11, 11 and 10 bits over all of it ------ */

__global__ void __launch_bounds__(1024)
    select_blocks1(const float *scores, int n, int wanted, int32_t *selection) {
  using namespace kvl;
  constexpr int DIGITS = 2048;
  __shared__ int counts[DIGITS], warp_sums[WARP], found[2];
  __shared__ int above_warp[WARP], equal_warp[WARP];
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, warps = 1024 / WARP;
  scores += (int64_t)blockIdx.x * n;
  selection += (int64_t)blockIdx.x * wanted;
  uint32_t edge = 0; /* keys above it are taken, and the first `ties` of its equals */
  int ties = wanted, shift = 32;
  for (int pass = 0; pass < 3; pass++) {
    const int bits = pass < 2 ? 11 : 10, digits = 1 << bits, shift_above = shift;
    shift -= bits;
    for (int i = tid; i < DIGITS; i += 1024) counts[i] = 0;
    __syncthreads();
    for (int i = tid; i < n; i += 1024) {
      uint32_t key = order_key(scores[i]);
      if (pass == 0 || key >> shift_above == edge >> shift_above)
        atomicAdd(&counts[key >> shift & (digits - 1)], 1);
    }
    __syncthreads();
    int sum = 0, top = digits - 1 - tid * 8;
    if (top >= 0)
      for (int j = 0; j < 8; j++) sum += counts[top - j];
    int upto = warp_scan(sum);
    if (lane == WARP - 1) warp_sums[warp] = upto;
    __syncthreads();
    for (int w = 0; w < warp; w++) upto += warp_sums[w];
    if (top >= 0 && upto >= ties && upto - sum < ties) { /* one thread */
      int taken = upto - sum, digit = top;
      while (taken + counts[digit] < ties) taken += counts[digit--];
      found[0] = digit;
      found[1] = taken;
    }
    __syncthreads();
    edge |= (uint32_t)found[0] << shift;
    ties -= found[1];
  }
  const int stretch = ((n + warps - 1) / warps + WARP - 1) / WARP * WARP;
  const int begin = min(warp * stretch, n), end = min(begin + stretch, n);
  int above = 0, equal = 0;
  for (int i = begin + lane; i < end; i += WARP) {
    uint32_t key = order_key(scores[i]);
    above += key > edge;
    equal += key == edge;
  }
  above = warp_sum(above);
  equal = warp_sum(equal);
  if (lane == 0) above_warp[warp] = above, equal_warp[warp] = equal;
  __syncthreads();
  above = equal = 0;
  for (int w = 0; w < warp; w++) above += above_warp[w], equal += equal_warp[w];
  for (int i = begin; i < end; i += WARP) {
    bool inside = i + lane < end;
    uint32_t key = inside ? order_key(scores[i + lane]) : 0, before = (1u << lane) - 1;
    unsigned is_above = __ballot_sync(ALL_LANES, inside && key > edge);
    unsigned is_equal = __ballot_sync(ALL_LANES, inside && key == edge);
    int rank_equal = equal + __popc(is_equal & before);
    bool taken = inside && (key > edge || (key == edge && rank_equal < ties));
    if (taken)
      selection[above + __popc(is_above & before) + min(rank_equal, ties)] = i + lane;
    above += __popc(is_above);
    equal += __popc(is_equal);
  }
}

/* ---- data and reference --------------------------------------------------------------- */

enum kind {
  NORMAL,
  CLUSTERED,
  EQUAL,
  MANY_EQUAL,
  ALL_NAN,
  MINUS_INF,
  PADDED,
  ZEROS,
  DENORMAL,
  ANY_BITS,
  RISING,
  FALLING,
  OUTLIER,
  ODD,
  SEVEN,
  LOW_SAMPLE,
  HIGH_SAMPLE,
  TWO,
  EIGHT,
  MANY_VALUES, /* 64 */
  KINDS
};
const char *const names[KINDS] = {"normal",      "clustered",   "equal",    "99% equal",
                                  "NaN",         "-inf",        "95% -inf", "zeros",
                                  "denormal",    "bits",        "rising",   "falling",
                                  "outlier",     "odd numbers", "7 values", "low sample",
                                  "high sample", "2 values",    "8 values", "64 values"};

/* Calls fn(0) ... fn(n - 1) on all cores. */
void parallel(int n, const std::function<void(int)> &fn) {
  const int count = std::min(n, (int)std::max(std::thread::hardware_concurrency(), 1u));
  std::vector<std::thread> threads;
  for (int t = 0; t < count; t++)
    threads.emplace_back([&fn, t, n, count] {
      for (int i = t; i < n; i += count) fn(i);
    });
  for (auto &t : threads) t.join();
}

void make_row(kind kind, float *x, int n, uint64_t seed) {
  const float odd[] = {NAN, INFINITY, -INFINITY, 0, -0.f, 1e-40f, -1e-40f, 3e38f, -3e38f, 1};
  uint64_t state = seed * 0x9E3779B97F4A7C15ull + 12345;
  auto bits = [&] { /* splitmix64: every bit is random at every stride */
                    uint64_t z = state += 0x9E3779B97F4A7C15ull;
                    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
                    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
                    return (uint32_t)(z >> 33);
  };
  auto normal = [&] {
    float u = (bits() + 1.f) * 0x1p-31f, v = bits() * 0x1p-31f;
    return sqrtf(-2 * logf(u)) * cosf(6.2831853f * v);
  };
  auto number = [](uint32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
  };
  for (int i = 0; i < n; i++) switch (kind) {
      case CLUSTERED: x[i] = 1 + 1e-3f * normal(); break;
      case EQUAL: x[i] = 0.25f; break;
      case MANY_EQUAL: x[i] = bits() % 100 == 0 ? 3 + normal() : 0.5f; break;
      case ALL_NAN: x[i] = NAN; break;
      case MINUS_INF: x[i] = -INFINITY; break;
      case PADDED: x[i] = bits() % 20 ? -INFINITY : normal(); break;
      case ZEROS: x[i] = i % 2 ? 0.f : -0.f; break;
      case DENORMAL: x[i] = number(bits() % 2000 | bits() << 31); break;
      case ANY_BITS: x[i] = number(bits() << 1 | bits() % 2); break;
      case RISING: x[i] = (float)i; break;
      case FALLING: x[i] = (float)-i; break;
      case OUTLIER: x[i] = i == n / 2 ? 1e30f : 1 + 1e-3f * normal(); break;
      case ODD: x[i] = odd[bits() % 10]; break;
      case SEVEN: x[i] = (float)(bits() % 7) - 3; break;
      case TWO: x[i] = (float)(bits() % 2); break;
      case EIGHT: x[i] = (float)(bits() % 8); break;
      case MANY_VALUES: x[i] = (float)(bits() % 64) * 0.125f; break;
      default: x[i] = normal();
    }
  if (kind != LOW_SAMPLE && kind != HIGH_SAMPLE) return;
  for (int samples = 512; samples <= 512 * 64 && samples <= n; samples *= 2)
    for (int number = 0; number < samples; number++) /* what any team takes for its sample */
      x[kvl::sampled(number, n / samples)] = normal() + (kind == LOW_SAMPLE ? -9 : 9);
}
std::vector<float> make(kind kind, int rows, int n, unsigned seed) {
  std::vector<float> x((size_t)rows * n);
  parallel(rows, [&](int r) {
    make_row(kind, &x[(size_t)r * n], n, seed + (uint64_t)r * 1000003);
  });
  return x;
}

uint64_t host_key(float x, int i, bool largest) {
  uint32_t b, rank = 0xFFFFFFFFu;
  float y = x + 0.f;
  memcpy(&b, &y, 4);
  b ^= b >> 31 ? 0xFFFFFFFFu : 0x80000000u;
  if (x == x) rank = largest ? ~b : b;
  return (uint64_t)rank << 32 | (unsigned)i;
}
/* The k first of x[begin ... end - 1], by rank. */
std::vector<int> first_of(const float *x, int begin, int end, int k, bool largest) {
  std::vector<uint64_t> keys;
  for (int i = begin; i < end; i++) keys.push_back(host_key(x[i], i, largest));
  std::partial_sort(keys.begin(), keys.begin() + k, keys.end());
  return std::vector<int>(keys.begin(), keys.begin() + k);
}

/* ---- calls ---------------------------------------------------------------------------- */

struct call {
  kvl_cuda_queue q = {};
  float *a, *values;
  int32_t *out, *lens, *counts;
  void *workspace;
  size_t most;
  explicit call(size_t most_) : most(most_) {
    cudaDeviceProp p;
    DEV_CHECK(cudaGetDeviceProperties(&p, 0));
    q.sm_count = p.multiProcessorCount;
    q.shared_optin = (int)p.sharedMemPerBlockOptin;
    q.code = kvl::code_for(0);
    a = dev::alloc<float>(most);
    values = dev::alloc<float>(std::min(most, (size_t)64 << 17));
    out = dev::alloc<int32_t>(std::min(most, (size_t)64 << 17));
    lens = dev::alloc<int32_t>(1024);
    counts = dev::alloc<int32_t>(1024);
    workspace = dev::alloc<char>((size_t)512 << 20);
  }
  kvl_topk_args topk_args(int rows, int n, int k, bool largest, bool by_index, bool valued) {
    kvl_topk_args g = {};
    g.a = a, g.values = valued ? values : nullptr, g.indices = out;
    g.rows = rows, g.n = n, g.k = k, g.workspace = workspace;
    g.largest = largest, g.by_index = by_index;
    return g;
  }
  void topk(const kvl_topk_args &g) { kvl_cuda_topk(&g, &q); }
  kvl_select_args select_args(int rows, int n, int most_selected, kvl_budget budget) {
    kvl_select_args s = {};
    s.scores = a, s.lens = lens, s.selection = out, s.counts = counts;
    s.seqs = rows, s.selection_heads = 1, s.max_blocks = n, s.max_selected = most_selected;
    s.budget = budget, s.block_size = 16;
    return s;
  }
  void select(const kvl_select_args &s) { kvl_cuda_select(&s, &q); }
};

int wrong = 0, checked = 0;
template <class T>
void expect(const std::vector<T> &got, const std::vector<T> &want, const char *what, int n,
            int k, int kind) {
  checked++;
  if (memcmp(got.data(), want.data(), want.size() * sizeof(T)) == 0) return;
  if (wrong++ < 20) printf("WRONG %s n %d k %d kind %d\n", what, n, k, kind);
}

void check(call &c, int rows, int n, int k, kind kind) {
  std::vector<float> x = make(kind, rows, n, n + kind);
  DEV_CHECK(cudaMemcpy(c.a, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
  size_t size = (size_t)rows * k;
  for (bool largest : {true, false}) {
    std::vector<int32_t> want(size);
    parallel(rows, [&](int r) {
      auto row = first_of(&x[(size_t)r * n], 0, n, k, largest);
      std::copy(row.begin(), row.end(), &want[(size_t)r * k]);
    });
    for (bool by_index : {false, true}) {
      if (by_index)
        for (int r = 0; r < rows; r++)
          std::sort(&want[(size_t)r * k], &want[(size_t)r * k] + k);
      std::vector<float> values(size);
      for (size_t i = 0; i < size; i++) values[i] = x[i / k * n + want[i]];
      DEV_CHECK(cudaMemset(c.out, 0x77, size * 4));
      DEV_CHECK(cudaMemset(c.values, 0x77, size * 4));
      c.topk(c.topk_args(rows, n, k, largest, by_index, true));
      expect(dev::download(c.out, size), want, by_index ? "by index" : "topk", n, k, kind);
      expect(dev::download(c.values, size), values, "values", n, k, kind);
    }
  }
  for (int sink : {0, 3}) {
    std::vector<int32_t> lens(rows), want(size), counts(rows);
    kvl_budget budget = {-1, k, 0, sink, 2 * sink};
    parallel(rows, [&](int r) {
      lens[r] = r % 3 == 1 ? n / 2 * 16 - 5 : r % 3 == 2 ? 17 : n * 16;
      lens[r] = std::max(lens[r], 0);
      int blocks = std::min((lens[r] + 15) / 16, n), all = kvl__budget_blocks(budget, blocks);
      all = std::min(all, k);
      int first = std::min(sink, all), last = std::min(2 * sink, all - first);
      const int begin = first, end = blocks - last, left = all - first - last;
      std::vector<int> row;
      for (int i : first_of(&x[(size_t)r * n], begin, end, left, true))
        if (x[(size_t)r * n + i] > -INFINITY)
          row.push_back(i); /* the others are not eligible */
      for (int i = 0; i < first; i++) row.push_back(i);
      for (int i = blocks - last; i < blocks; i++) row.push_back(i);
      std::sort(row.begin(), row.end());
      counts[r] = (int)row.size();
      row.resize(k, -1);
      std::copy(row.begin(), row.end(), &want[(size_t)r * k]);
    });
    DEV_CHECK(cudaMemcpy(c.lens, lens.data(), rows * 4, cudaMemcpyHostToDevice));
    DEV_CHECK(cudaMemset(c.out, 0x77, size * 4));
    c.select(c.select_args(rows, n, k, budget));
    expect(dev::download(c.out, size), want, "select", n, k, kind);
    expect(dev::download(c.counts, rows), counts, "counts", n, k, kind);
  }
}

/* What a cold call is expected to take: an empty launch and the phases (8 us for one block, 11
 * for a team), and the bytes at 4.2 TB/s or at 33 GB/s for each of the SMs that work. */
double predicted(int rows, int n) {
  const int blocks = 132 / rows, team = n <= 8192 ? 1 : blocks >= 8 ? 8 : blocks >= 2 ? 2 : 1;
  const double bytes = 4.0 * rows * n, own = bytes / std::min(rows * team, 132) / 33e3;
  return (team > 1 ? 11 : 8) + std::max(bytes / 4.2e6, own);
}

void time_all(call &c, dev::bench &b, int rows, int n, int k, kind kind) {
  std::vector<float> x = make(kind, rows, n, 7);
  DEV_CHECK(cudaMemcpy(c.a, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
  std::vector<int32_t> lens(rows, n * 16);
  DEV_CHECK(cudaMemcpy(c.lens, lens.data(), rows * 4, cudaMemcpyHostToDevice));
  auto s = c.select_args(rows, n, k, {-1, k, 0, 0, 0});
  auto g = c.topk_args(rows, n, k, true, true, false), sorted = g;
  sorted.by_index = 0;
  printf("%5d x %8d  k %5d  %-18s %8.1f", rows, n, k, names[kind], predicted(rows, n));
  const int repeats = (size_t)rows * n > 1 << 25 ? 11 : 30;
  auto time = [&](const std::function<void()> &fn) {
    printf(" %9.1f", b.time(fn, false, repeats));
  };
  if (rows * (size_t)n <= 1 << 23)
    time([&] { select_blocks1<<<rows, 1024>>>(c.a, n, k, c.out); });
  else printf("         -");
  time([&] { c.select(s); });
  time([&] { c.topk(g); });
  time([&] { c.topk(sorted); });
  printf("\n");
}

}  // namespace

__global__ void nothing() {}

/* `topk c` only checks, `topk t` only times, `topk s` checks small rows for memcheck, and
 * `topk r` fewer for racecheck, which is slow. */
int main(int argc, char **argv) {
  const char mode = argc > 1 ? argv[1][0] : 'a';
  const bool is_least = mode == 'r', is_short = mode == 's' || is_least;
  call c(is_short ? (size_t)1 << 23 : (size_t)1 << 27);
  /* The first call of a kernel settles how much shared memory it may have, so the first shape
   * uses the kernel that both settings of `shared` have in common. */
  const int shapes[][3] = {{80, 20000, 1500},   {3, 1, 1},
                           {3, 2, 1},           {3, 33, 7},
                           {3, 100, 100},       {3, 1000, 100},
                           {3, 2048, 205},      {2, 2047, 2046},
                           {3, 4099, 4099},     {3, 5000, 1},
                           {3, 8192, 256},      {200, 3000, 500},
                           {3, 8191, 5000},     {3, 16001, 3},
                           {64, 16384, 2048},   {2, 65536, 20000},
                           {2, 65535, 64},      {3, 131072, 2048},
                           {1, 131071, 100000}, {2, 300001, 4096},
                           {1, 1 << 20, 2048},  {1, (1 << 20) + 77, 300},
                           {40, 200000, 1000},  {17, 1 << 20, 2048},
                           {18, 1 << 19, 2049}, {17, (1 << 21) - 3, 700},
                           {67, 300000, 2048},  {17, 1 << 20, 30000},
                           {3, 1 << 22, 3000},  {67, 1 << 20, 600}};
  const int shared[] = {c.q.shared_optin, 163 << 10}; /* the second without clusters */
  const int code = c.q.code;
  for (auto &s : shapes)
    for (int k = 0; k < KINDS && mode != 't'; k++) {
      size_t numbers = (size_t)s[0] * s[1];
      /* of the large ones: those that end in equal numbers, an order, or a wrong guess */
      bool is_heavy = numbers >= 1 << 20 && k > MANY_EQUAL && k != PADDED && k != RISING &&
                      k != FALLING && k < LOW_SAMPLE;
      if (numbers > 40 << 20 && k != NORMAL && k != EIGHT && k != RISING) continue;
      if (is_short && (numbers > 140000 || k % 4 > 1)) continue;
      if (is_least && (s[0] > 3 || numbers > 50000 || (k != NORMAL && k != TWO))) continue;
      if (is_heavy) continue;
      for (int bytes : shared) {
        if (bytes != shared[0] && (numbers < 20000 || k % 3)) continue;
        c.q.shared_optin = bytes, c.q.code = bytes == shared[0] ? code : 80;
        check(c, s[0], s[1], s[2], (kind)k);
      }
    }
  c.q.shared_optin = shared[0], c.q.code = code;
  printf("%d checked, %d wrong\n", checked, wrong);
  if (wrong || is_short || mode == 'c') return wrong != 0;
  dev::bench b;
  auto empty = [] { nothing<<<1, 32>>>(); };
  printf("cold L2, us; an empty launch %.1f\n%-45s %8s %9s %9s %9s %9s\n", b.time(empty), "",
         "expected", "version 1", "select", "by index", "sorted");
  const int timed[][4] = {{1, 8192, 256, NORMAL},          {64, 8192, 2048, NORMAL},
                          {1, 131072, 2048, NORMAL},       {64, 131072, 2048, NORMAL},
                          {64, 131072, 2048, CLUSTERED},   {128, 2048, 205, NORMAL},
                          {8, 2048, 128, NORMAL},          {128, 2048, 614, NORMAL},
                          {64, 65536, 19661, NORMAL},      {64, 32768, 2048, NORMAL},
                          {64, 16384, 2048, NORMAL},       {512, 8192, 512, NORMAL},
                          {64, 131072, 2048, PADDED},      {64, 131072, 2048, SEVEN},
                          {64, 131072, 2048, OUTLIER},     {64, 131072, 10000, PADDED},
                          {1, 131072, 2048, EQUAL},        {64, 131072, 2048, EQUAL},
                          {64, 131072, 2048, TWO},         {64, 131072, 2048, EIGHT},
                          {64, 131072, 2048, MANY_VALUES}, {64, 131072, 20000, EIGHT},
                          {64, 131072, 2048, ALL_NAN},     {64, 131072, 2048, LOW_SAMPLE},
                          {64, 1 << 19, 2048, NORMAL},     {64, 1 << 20, 2048, NORMAL},
                          {64, 1 << 21, 2048, NORMAL},     {64, 1 << 20, 2048, CLUSTERED},
                          {64, 1 << 20, 2048, EQUAL},      {64, 1 << 20, 2048, TWO},
                          {64, 1 << 20, 2048, EIGHT},      {64, 1 << 20, 2048, MANY_VALUES},
                          {64, 1 << 20, 2048, RISING},     {64, 1 << 20, 2048, FALLING},
                          {64, 1 << 20, 2048, PADDED},     {64, 1 << 20, 20000, NORMAL},
                          {128, 1 << 20, 2048, NORMAL},    {1, 1 << 20, 2048, NORMAL},
                          {8, 1 << 20, 2048, NORMAL},      {1, 1 << 20, 2048, RISING},
                          {1, 1 << 21, 2048, NORMAL},      {1, 1 << 22, 2048, NORMAL},
                          {1, 131072, 4096, NORMAL},       {1, 131072, 8192, NORMAL},
                          {1, 131072, 16384, NORMAL},      {16, 131072, 8192, NORMAL},
                          {64, 131072, 8192, NORMAL},      {64, 131072, 50000, NORMAL}};
  for (auto &t : timed) time_all(c, b, t[0], t[1], t[2], (kind)t[3]);
}
