/* Top-k of tokens with its transform, and running top-k. Compile: see dev.cuh.
 *
 * Microseconds with a cold L2 (an empty launch reads 3.1), k 2048, fp32 N(0, 1), H100 80GB
 * HBM3, 2026-11-21. Tiles: all tiles of 131072 columns.
 *                     [64,8192] [1,131072] [64,131072]  [64,2^20]
 *   positions             10.4      13.6        26.4         380
 *   places 1               13.8      18.6        31.2         401
 *   places 2               12.0      16.4        28.4         382
 *   tiles 1                                                  642
 *   tiles 2                                                  373
 * 1  a place is looked up as it is found, by a thread that finds several one by one
 * 2  places first, then what belongs to them, all at once: the shipped ones */
#include <cstring>

#include "../cuda/select.cu"
#include "../cuda/topk_merge.cu"
#include "../cuda/topk_transform.cu"

#include "dev.cuh"

namespace {

/* ---- data and reference --------------------------------------------------------------- */

enum kind { NORMAL, CLUSTERED, EQUAL, SEVEN, ODD, RISING, SPARSE, KINDS };

std::vector<float> make(kind kind, size_t rows, size_t n, unsigned seed) {
  const float odd[] = {NAN, INFINITY, -INFINITY, 0, -0.f, 1e-40f, -1e-40f, 3e38f, -3e38f, 1};
  uint64_t state = seed * 0x9E3779B97F4A7C15ull + 12345;
  auto bits = [&] {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33);
  };
  std::vector<float> x(rows * n);
  for (size_t at = 0; at < x.size(); at++) {
    float u = (bits() + 1.f) * 0x1p-31f, v = bits() * 0x1p-31f;
    float normal = sqrtf(-2 * logf(u)) * cosf(6.2831853f * v);
    x[at] = kind == NORMAL      ? normal
            : kind == CLUSTERED ? 1 + 1e-3f * normal
            : kind == EQUAL     ? 2.5f
            : kind == SEVEN     ? (float)(bits() % 7)
            : kind == ODD       ? odd[bits() % 10]
            : kind == RISING    ? (float)(at % n)
            : bits() % 50       ? -1.f
                                : normal;
  }
  return x;
}

/* The k first positions of a window, ascending. */
std::vector<int32_t> best(const float *x, int count, int k) {
  std::vector<int32_t> order(count);
  for (int i = 0; i < count; i++) order[i] = i;
  auto before = [&](int32_t i, int32_t j) {
    float a = x[i], b = x[j];
    bool is_tie = (a != a) == (b != b) && (a != a || a == b);
    if (is_tie) return i < j;
    return a != a || b != b ? b != b : a > b;
  };
  if (k < count) {
    std::nth_element(order.begin(), order.begin() + k, order.end(), before);
    order.resize(k);
    std::sort(order.begin(), order.end());
  }
  return order;
}

struct shape {
  int rows, n, k;
};

/* One call's memory, for the largest shape. */
struct call {
  static constexpr size_t MOST = (size_t)1 << 29, OUT = (size_t)1 << 24;
  float *logits = dev::alloc<float>(MOST),
        *values[2] = {dev::alloc<float>(OUT), dev::alloc<float>(OUT)};
  int32_t *out = dev::alloc<int32_t>(OUT);
  int32_t *positions[2] = {dev::alloc<int32_t>(OUT), dev::alloc<int32_t>(OUT)};
  int32_t *starts = dev::alloc<int32_t>(1 << 16), *lens = dev::alloc<int32_t>(1 << 16);
  int32_t *tables = nullptr;
  kvl_cuda_queue q = {};
  call() {
    cudaDeviceProp p;
    DEV_CHECK(cudaGetDeviceProperties(&p, 0));
    q.sm_count = p.multiProcessorCount;
    q.shared_optin = (int)p.sharedMemPerBlockOptin;
    tables = dev::upload(dev::shuffled(1 << 20, 3));
  }
  kvl_transform_view paged(int rows, int n, int block) {
    kvl_transform_view t = {};
    t.tables = tables, t.sequences = 1, t.width = (n + block - 1) / block, t.rows_each = rows;
    t.block_size = block;
    return t;
  }
  kvl_topk_transform_args transform_args(shape s, bool has_starts, int dtype,
                                         kvl_transform_view t) {
    return {logits, has_starts ? starts : nullptr, lens, out, t, s.rows, s.n, s.k, dtype};
  }
  void transform(const kvl_topk_transform_args &a) { kvl_cuda_topk_transform(&a, &q); }
  /* All tiles, which lie one behind the other; the buffer that has the result. */
  int merge_all(shape s, int tile, bool has_starts, int dtype) {
    int now = 0;
    const char *at = (const char *)logits;
    for (int first = 0; first < s.n; first += tile, now = 1 - now) {
      int n = std::min(tile, s.n - first);
      kvl_topk_merge_args a = {at,
                               has_starts ? starts : nullptr,
                               lens,
                               values[now],
                               positions[now],
                               values[1 - now],
                               positions[1 - now],
                               s.rows,
                               n,
                               s.k,
                               first,
                               dtype};
      kvl_cuda_topk_merge(&a, &q);
      at += (size_t)s.rows * n * (dtype == KVL_DTYPE_BF16 ? 2 : 4);
    }
    return now;
  }
};

int checked = 0, wrong = 0;

template <class T>
void expect(const std::vector<T> &got, const std::vector<T> &want, const char *what, shape s,
            kind kind) {
  checked++;
  for (size_t i = 0; i < want.size(); i++)
    if (memcmp(&got[i], &want[i], sizeof(T)) && !(want[i] == 0 && got[i] == 0) &&
        !(want[i] != want[i] && got[i] != got[i])) {
      wrong++;
      printf("WRONG %s [%d,%d] k %d kind %d: row %zu place %zu\n", what, s.rows, s.n, s.k,
             kind, i / s.k, i % s.k);
      return;
    }
}

void put_logits(call &c, const std::vector<float> &x, bool is_bf16) {
  if (!is_bf16) {
    DEV_CHECK(cudaMemcpy(c.logits, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
    return;
  }
  std::vector<__nv_bfloat16> y(x.size());
  for (size_t i = 0; i < x.size(); i++) y[i] = __float2bfloat16_rn(x[i]);
  DEV_CHECK(cudaMemcpy(c.logits, y.data(), y.size() * 2, cudaMemcpyHostToDevice));
}

void check(call &c, shape s, kind kind, int tile) {
  for (bool is_bf16 : {false, true})
    for (bool has_starts : {false, true}) {
      std::vector<float> x = make(kind, s.rows, s.n, s.n + kind);
      for (float &y : x)
        if (is_bf16) y = __bfloat162float(__float2bfloat16_rn(y));
      std::vector<int32_t> starts(s.rows), lens(s.rows), want, places;
      std::vector<float> values;
      const auto order = dev::shuffled(1 << 20, 3);
      for (int r = 0; r < s.rows; r++) {
        starts[r] = has_starts ? (int)((r * 7919ll + 13) % (s.n + 1)) : 0;
        lens[r] = r % 5 == 4 ? std::min(s.k, s.n) : r % 7 == 6 ? 0 : s.n - starts[r] - r % 3;
        const float *row = &x[(size_t)r * s.n + starts[r]];
        auto chosen = best(row, std::max(std::min(lens[r], s.n - starts[r]), 0), s.k);
        for (int32_t p : chosen) {
          values.push_back(row[p]);
          places.push_back(order[p / 64] * 64 + p % 64);
        }
        want.insert(want.end(), chosen.begin(), chosen.end());
        want.resize((size_t)(r + 1) * s.k, -1);
        places.resize(want.size(), -1);
        values.resize(want.size(), -INFINITY);
      }
      const int dtype = is_bf16 ? KVL_DTYPE_BF16 : KVL_DTYPE_F32;
      const size_t size = want.size();
      DEV_CHECK(cudaMemcpy(c.starts, starts.data(), s.rows * 4, cudaMemcpyHostToDevice));
      DEV_CHECK(cudaMemcpy(c.lens, lens.data(), s.rows * 4, cudaMemcpyHostToDevice));
      put_logits(c, x, is_bf16);
      for (bool is_paged : {false, true}) {
        DEV_CHECK(cudaMemset(c.out, 0x77, size * 4));
        kvl_transform_view none = {};
        c.transform(c.transform_args(s, has_starts, dtype,
                                     is_paged ? c.paged(s.rows, s.n, 64) : none));
        expect(dev::download(c.out, size), is_paged ? places : want,
               is_paged ? "places" : "positions", s, kind);
      }
      std::vector<float> tiles;
      for (int first = 0; first < s.n; first += tile)
        for (int r = 0; r < s.rows; r++)
          for (int j = first; j < std::min(first + tile, s.n); j++)
            tiles.push_back(x[(size_t)r * s.n + j]);
      put_logits(c, tiles, is_bf16);
      for (int i = 0; i < 2; i++) {
        DEV_CHECK(cudaMemset(c.values[i], 0x77, size * 4));
        DEV_CHECK(cudaMemset(c.positions[i], 0x77, size * 4));
      }
      int at = c.merge_all(s, tile, has_starts, dtype);
      expect(dev::download(c.positions[at], size), want, "merged", s, kind);
      expect(dev::download(c.values[at], size), values, "merged values", s, kind);
    }
}

/* causal: row r has the last r + 1 columns less than the last row. */
void time_all(call &c, dev::bench &b, shape s, kind kind, bool is_causal) {
  const size_t numbers = (size_t)s.rows * s.n;
  const float std = kind == CLUSTERED ? 1e-3f : 1.f;
  dev::randn_kernel<<<1056, 256>>>(c.logits, numbers, 7, std);
  std::vector<int32_t> lens(s.rows);
  for (int r = 0; r < s.rows; r++) lens[r] = is_causal ? s.n - s.rows + r + 1 : s.n;
  DEV_CHECK(cudaMemcpy(c.lens, lens.data(), s.rows * 4, cudaMemcpyHostToDevice));
  printf("[%d,%d] k %d kind %d%s:", s.rows, s.n, s.k, kind, is_causal ? " causal" : "");
  auto both = [&](const char *what, const std::function<void()> &fn) {
    printf("  %s %.1f %.1f", what, b.time(fn), b.time(fn, true));
  };
  kvl_select_args select = {};
  select.scores = c.logits, select.lens = c.lens, select.selection = c.out;
  select.seqs = s.rows, select.selection_heads = 1, select.max_blocks = s.n;
  select.max_selected = s.k, select.budget = {-1, s.k, 0, 0, 0}, select.block_size = 1;
  both("select", [&] { kvl_cuda_select(&select, &c.q); });
  auto plain = c.transform_args(s, false, KVL_DTYPE_F32, {});
  both("positions", [&] { c.transform(plain); });
  auto places = c.transform_args(s, false, KVL_DTYPE_F32, c.paged(s.rows, s.n, 64));
  both("places", [&] { c.transform(places); });
  for (int tile : {8192, 32768, 131072})
    if (tile < s.n) {
      printf("  tiles of %d", tile);
      both("", [&] { c.merge_all(s, tile, false, KVL_DTYPE_F32); });
    }
  auto half = c.transform_args(s, false, KVL_DTYPE_BF16, {});
  std::vector<float> x = make(kind, 1, s.n, 7); /* every row the same in bf16 */
  if (numbers <= 1 << 24) {
    std::vector<float> all;
    for (int r = 0; r < s.rows; r++) all.insert(all.end(), x.begin(), x.end());
    put_logits(c, all, true);
    both("bf16", [&] { c.transform(half); });
  }
  printf("\n");
}

}  // namespace

__global__ void nothing() {}

int main(int argc, char **) {
  call c;
  const bool is_short = argc > 1; /* under compute-sanitizer */
  const shape shapes[] = {{3, 1, 1},        {5, 33, 7},       {9, 1000, 100},
                          {7, 2047, 2046},  {40, 3000, 256},  {8, 9000, 2048},
                          {3, 20000, 2048}, {2, 70001, 5000}, {60, 16385, 512},
                          {1, 300001, 2048}};
  for (auto &s : shapes)
    for (int k = 0; k < KINDS; k++) {
      if (is_short && ((size_t)s.rows * s.n > 100000 || k % 3)) continue;
      for (int tile : {s.n / 3 + 1, s.n > 100000 ? 65536 : 1500})
        if (tile < s.n || s.n < 10) check(c, s, (kind)k, tile);
    }
  printf("%d checked, %d wrong\n", checked, wrong);
  if (wrong || is_short) return wrong != 0;
  dev::bench b;
  auto empty = [] { nothing<<<1, 32>>>(); };
  printf("cold and warm L2, us; an empty launch %.1f %.1f\n", b.time(empty),
         b.time(empty, true));
  const shape timed[] = {{1, 8192, 2048},      {64, 8192, 2048},     {1, 131072, 2048},
                         {64, 131072, 2048},   {1, 1 << 20, 2048},   {64, 1 << 20, 2048},
                         {512, 1 << 20, 2048}, {4096, 131072, 2048}, {4096, 16384, 2048}};
  for (auto &s : timed) time_all(c, b, s, NORMAL, false);
  time_all(c, b, {64, 131072, 2048}, CLUSTERED, false);
  time_all(c, b, {4096, 4096, 2048}, NORMAL, true);
  time_all(c, b, {4096, 65536, 2048}, NORMAL, true);
}
