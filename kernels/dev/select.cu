/* Block selection of short rows: select_short.cuh with 256, 512 and 1024 threads, beside the
 * search that long rows use (select.cu, radix_select.cuh).
 * Compile: see dev.cuh. `select c` only checks.
 *
 * The times, in us:
 *   cold    one launch between events, cold L2; an empty launch is the first line
 *   chain   a link of 50 calls in one graph, with programmatic edges: warm caches
 *   mixed   the same with a kernel of 128 KiB of instructions before each call, less the time
 *           of a chain of that kernel: the instructions of select are no longer in the SM
 *
 *                   long rows'           512 threads
 *                cold chain mixed      cold chain mixed
 *    [8,1024]    7.1   4.3   8.9       4.7   1.7   4.9    k 102
 *    [8,2049]    8.6   5.9  12.6       5.3   2.3   8.2    k 205; scores of 1 + 1e-3 N(0, 1) take as long
 *    [8,4097]    9.1   6.6  12.8       6.0   3.1   8.9    k 410
 *    [8,8192]    8.0   5.9  12.1       7.7   4.6  11.9    k 410
 *    [128,2049]  8.9   6.2  51.7       5.7   4.0  23.8    k 205
 *    [512,8192] 26.5  22.6  53.4      22.5  18.0  49.8    k 512
 * One H200, 2026-11-23; an empty launch 2.7. The estimate for [8,2049] with 512 threads was 4.5
 * cold, 3 in a chain and 4 mixed. A chain is faster than that; instructions that have left the
 * SM cost more. */
#include <climits>
#include <cstring>

#include "../cuda/select.cu"

#include "dev.cuh"

namespace {

struct variant {
  const char *name;
  int (*run)(const kvl_select_args &, const kvl_cuda_queue *);
};
const variant variants[] = {{"long rows'", kvl::select_long},
                            {"256", kvl::short_rows::launch<256>},
                            {"512", kvl::short_rows::launch<512>},
                            {"1024", kvl::short_rows::launch<1024>}};

uint64_t state = 1;
uint32_t random_bits() { /* splitmix64 */
  uint64_t z = state += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (uint32_t)(z >> 33);
}
float normal() {
  const float u = (random_bits() + 1.f) * 0x1p-31f, v = random_bits() * 0x1p-31f;
  return sqrtf(-2 * logf(u)) * cosf(6.2831853f * v);
}
float number(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

enum { KINDS = 20 };
float score(int kind, int i, int special) {
  const float odd[] = {NAN, INFINITY, -INFINITY, 0, -0.f, 1e-40f, -1e-40f, 3e38f, -3e38f, 1};
  switch (kind) {
    case 1: return 1 + 1e-3f * normal();
    case 2: return 0.25f;
    case 3: return random_bits() % 100 ? 0.5f : 3 + normal();
    case 4: return NAN;
    case 5: return -INFINITY;
    case 6: return random_bits() % 20 ? -INFINITY : normal();
    case 7: return i % 2 ? 0.f : -0.f;
    case 8: return number(random_bits() % 2000 | random_bits() << 31);
    case 9: return number(random_bits() << 1 | random_bits() % 2);
    case 10: return (float)i;
    case 11: return (float)-i;
    case 12: return i == special ? 1e30f : 1 + 1e-3f * normal();
    case 13: return odd[random_bits() % 10];
    case 14: return (float)(random_bits() % 7) - 3;
    case 15: return i == special ? INFINITY : normal();
    case 16: return exp2f((float)(random_bits() % 250) - 125);
    case 17: return i < special ? 3e38f : -3e38f;
    case 18: return ldexpf(normal(), -(int)(random_bits() % 120));
    case 19: return i == special ? 1e20f : number(0x3F800000u + (i % 3 > 0));
    default: return normal();
  }
}

/* One row by sorting, as the header of select.cu defines it. Returns the count. */
int reference(const kvl_select_args &a, const float *scores, int length, int32_t *to) {
  const int64_t blocks = ((int64_t)std::max(length, 0) + a.block_size - 1) / a.block_size;
  const int n = (int)std::min(blocks, a.max_blocks);
  const int k = (int)std::min<int64_t>(kvl__budget_blocks(a.budget, n), a.max_selected);
  const int sink = std::min({a.budget.sink, n, k});
  const int recent = std::min({a.budget.recent, n - sink, k - sink});
  std::vector<int> row;
  for (int i = sink; i < n - recent; i++)
    if (scores[i] > -INFINITY) row.push_back(i);
  std::stable_sort(row.begin(), row.end(),
                   [&](int x, int y) { return scores[x] > scores[y]; });
  row.resize(std::min((int)row.size(), k - sink - recent));
  for (int i = 0; i < sink; i++) row.push_back(i);
  for (int i = n - recent; i < n; i++) row.push_back(i);
  std::sort(row.begin(), row.end());
  std::copy(row.begin(), row.end(), to);
  std::fill(to + row.size(), to + a.max_selected, -1);
  return (int)row.size();
}

struct call {
  kvl_cuda_queue q = {};
  float *scores;
  int32_t *lens, *selection, *counts;
  call() {
    cudaDeviceProp p;
    DEV_CHECK(cudaGetDeviceProperties(&p, 0));
    DEV_CHECK(cudaStreamCreate(&q.stream));
    q.sm_count = p.multiProcessorCount, q.shared_optin = (int)p.sharedMemPerBlockOptin;
    scores = dev::alloc<float>(1 << 23), selection = dev::alloc<int32_t>(1 << 21);
    lens = dev::alloc<int32_t>(1024), counts = dev::alloc<int32_t>(1024);
  }
  kvl_select_args args(int seqs, int heads, int n, int most, kvl_budget budget) const {
    kvl_select_args s = {};
    s.scores = scores, s.lens = lens, s.selection = selection, s.counts = counts;
    s.seqs = seqs, s.selection_heads = heads, s.max_blocks = n, s.max_selected = most;
    s.budget = budget, s.block_size = 16;
    return s;
  }
  void fill(const kvl_select_args &s, int kind, std::vector<float> &x) {
    x.resize(s.seqs * s.selection_heads * s.max_blocks);
    const int special = random_bits() % s.max_blocks;
    for (size_t i = 0; i < x.size(); i++) x[i] = score(kind, i % s.max_blocks, special);
    DEV_CHECK(cudaMemcpy(scores, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
  }
};

int checked = 0, wrong = 0;
void check(call &c, int n, int kind, int most, kvl_budget budget) {
  const int heads = 2;
  const int length[] = {n * 16, 0, 1, n * 8 + 3, INT_MAX}, seqs = 5;
  kvl_select_args s = c.args(seqs, heads, n, most, budget);
  std::vector<float> x;
  c.fill(s, kind, x);
  DEV_CHECK(cudaMemcpy(c.lens, length, sizeof length, cudaMemcpyHostToDevice));
  std::vector<int32_t> want(seqs * heads * most), counts(seqs * heads);
  for (int r = 0; r < seqs * heads; r++)
    counts[r] = reference(s, &x[(size_t)r * n], length[r / heads], &want[(size_t)r * most]);
  for (const variant &v : variants) {
    DEV_CHECK(cudaMemset(c.selection, 0x77, want.size() * 4 + 256));
    DEV_CHECK(cudaMemset(c.counts, 0x77, counts.size() * 4));
    v.run(s, &c.q);
    DEV_CHECK(cudaStreamSynchronize(c.q.stream));
    const auto got = dev::download(c.selection, want.size() + 64);
    bool is_right = std::equal(want.begin(), want.end(), got.begin()) &&
                    dev::download(c.counts, counts.size()) == counts;
    for (size_t i = want.size(); i < got.size(); i++) is_right &= got[i] == 0x77777777;
    checked++;
    if (!is_right && wrong++ < 20)
      printf("WRONG %s n %d kind %d most %d k %d\n", v.name, n, kind, most, budget.blocks);
  }
}
void check_all(call &c) {
  for (int n : {1,    2,    31,   33,   100,  511,  1023, 1024, 1025, 2047,
                2049, 2560, 2561, 4608, 4609, 8191, 8192, 8193, 9215, 9216})
    for (int kind = 0; kind < KINDS; kind++) {
      check(c, n, kind, n, {-1, (int)(random_bits() % (n + 2)), 0, 0, 0});
      check(c, n, kind, n / 2 + 1, {0.1, 0, 3, 2, 3});
      check(c, n, kind, n + 7, {-1, n / 10, 0, (int)(random_bits() % n), 1});
    }
  printf("%d checked, %d wrong\n", checked, wrong);
}

/* ---- times ---------------------------------------------------------------------------- */

__global__ void nothing() {}
/* Every instruction differs, so the compiler makes no loop of them. */
template <int N> __device__ __forceinline__ void many(float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i % 4] = fmaf(x[i % 4], 1.f + i, x[(i + 1) % 4]);
}
__global__ void __launch_bounds__(128, 8) much_code(float *out) {
  kvl::let_next_start();
  kvl::wait_for_previous();
  float x[4] = {(float)threadIdx.x, 1, 2, 3};
  many<2048>(x), many<2047>(x), many<2046>(x), many<2045>(x);
  if (x[0] + x[1] + x[2] + x[3] == 1.25f) *out = 1;
}

enum { LINKS = 50 };
/* Microseconds of a link of a chain of calls of fn, the median of 21 chains. */
double link(const call &c, const std::function<void()> &fn) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t from, to;
  DEV_CHECK(cudaEventCreate(&from));
  DEV_CHECK(cudaEventCreate(&to));
  DEV_CHECK(cudaStreamBeginCapture(c.q.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < LINKS; i++) fn();
  DEV_CHECK(cudaStreamEndCapture(c.q.stream, &graph));
  DEV_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<float> times(21);
  for (float &ms : times) {
    DEV_CHECK(cudaGraphLaunch(exec, c.q.stream)); /* so the timed one does not wait for us */
    DEV_CHECK(cudaEventRecord(from, c.q.stream));
    DEV_CHECK(cudaGraphLaunch(exec, c.q.stream));
    DEV_CHECK(cudaEventRecord(to, c.q.stream));
    DEV_CHECK(cudaEventSynchronize(to));
    DEV_CHECK(cudaEventElapsedTime(&ms, from, to));
  }
  DEV_CHECK(cudaGraphExecDestroy(exec));
  DEV_CHECK(cudaGraphDestroy(graph));
  DEV_CHECK(cudaEventDestroy(from));
  DEV_CHECK(cudaEventDestroy(to));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3 / LINKS;
}

void time_all(call &c, dev::bench &b, int rows, int n, int k, int kind) {
  const kvl_select_args s = c.args(1, rows, n, k, {-1, k, 0, 1, 2});
  std::vector<float> x;
  const int32_t length = n * 16;
  c.fill(s, kind, x);
  DEV_CHECK(cudaMemcpy(c.lens, &length, 4, cudaMemcpyHostToDevice));
  kvl_cuda_queue null = c.q; /* bench records its events in the null stream */
  null.stream = 0;
  auto other = [&] {
    kvl::launch_programmatic(much_code, dim3(c.q.sm_count), 128, 0, &c.q,
                             c.scores + (1 << 23) - 1);
  };
  const double link_other = link(c, other);
  printf("[%d,%d] k %d%s\n", rows, n, k, kind == 1 ? ", 1 + 1e-3 N" : "");
  for (const variant &v : variants) {
    const double cold = b.time([&] { v.run(s, &null); });
    const double chain = link(c, [&] { v.run(s, &c.q); });
    const double mixed = link(c, [&] { other(), v.run(s, &c.q); }) - link_other;
    printf("  %-10s %8.2f %8.2f %8.2f\n", v.name, cold, chain, mixed);
  }
}

}  // namespace

int main(int argc, char **argv) {
  call c;
  check_all(c);
  if (wrong || argc > 1) return wrong != 0;
  dev::bench b;
  printf("an empty launch %.2f\n  %-10s %8s %8s %8s\n", b.time([] { nothing<<<1, 32>>>(); }),
         "threads", "cold", "chain", "mixed");
  const int timed[][4] = {{8, 2049, 205, 0},   {8, 2049, 205, 1},  {8, 8192, 410, 0},
                          {8, 8193, 410, 0},   {8, 1024, 102, 0},  {8, 4097, 410, 0},
                          {128, 2049, 205, 0}, {512, 8192, 512, 0}};
  for (auto &t : timed) time_all(c, b, t[0], t[1], t[2], t[3]);
}
