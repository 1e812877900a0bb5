/* The small kernels of a decode or prefill step: checks against plain references on the host,
 * then times at serving shapes and at decode shapes, in shares of their own bytes / R.
 *
 *   cd kernels/cuda && nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I .. \
 *     -I ../../runtime -I . ../dev/step.cu rmsnorm.cu rope.cu rope_append.cu silu_mul.cu \
 *     append_kv.cu hot_append.cu block_minmax.cu block_mean.cu merge_attention.cu \
 *     copy_blocks.cu move_blocks.cu -o step -lcuda && ./step
 *
 * Versions, us and shares of R = 3084 to 3094 GB/s, bf16 where nothing else is said, on an
 * H100 80GB HBM3, 2026-11-21; an empty launch reads 3.0. The last of each is the shipped one.
 * Writes that are still in the L2 at the end are not waited for: hence shares above 1.
 *   rmsnorm [4096, 4096], + residual; [4096, 14336], + residual
 *     1  a block walks its row twice             26.3 0.83  47.2 0.92   115 0.66  187 0.81
 *     2  rows in registers, 512 threads at most  31.6 0.69  50.4 0.86  77.6 0.98  211 0.72
 *     3  256 at most, then up to 8 packs each    25.3 0.86  44.9 0.97  88.5 0.86  182 0.83
 *     4  4 packs each from 128 threads on (with a residual 2 from 256 on), no spills
 *                                                21.6 1.01  44.0 0.99  77.3 0.99  168 0.91
 *   rmsnorm [131072, 128]   1  26.1 0.83    4  20.9 1.04
 *   silu_mul [4096, 14336]
 *     1  16 waves of blocks that loop over packs          136 0.84   f32 244 0.93
 *     2  a pack a thread; 32 bytes a thread 135 us        130 0.88   f32 227 1.00
 *     3  and a division of 2 ulp where 16 bits are stored 112 1.02   f32 227 1.01
 *   rope [4096, 32, 128], 16 tokens
 *     1  64-bit divisions, an item at a time              67.7 0.32  6.0
 *     2  32-bit ones, the next item under way             22.4 0.97  5.4
 *   rope_append [4096 tokens, 32 and 8 heads], 16 tokens; of three launches 46.9 and 12.7
 *     1  items of three kinds, two divisions each         40.3 0.81  6.8
 *     2  a run of lanes a head                            35.7 0.92  6.2   f8e4m3 35.4 0.85
 *   block_minmax, block_mean of 2048 blocks of 16; a plain read of so much takes 28 us
 *     1  floats, 4 rows a lane ahead           31.0 0.79  29.5 0.78   f8e4m3 26.1  21.8
 *     2  8 rows ahead: 117 registers           34.2 0.71  34.2 0.67          29.3  30.9
 *     3  2 rows ahead                          31.5 0.78  30.6 0.76          25.6  22.8
 *     4  as 1, pairs compared as pairs, 16 dims of f8e4m3 a lane
 *                                              29.5 0.83  29.3 0.79          18.7  20.6
 */
#include "late.cuh"
#include "tensor.cuh"

#include <cstdarg>
#include <cstring>
#include <string>

namespace {

kvl_cuda_queue queue;
int wrong = 0;
void expect(bool right, const char *what, int dtype, int64_t n) {
  if (!right) {
    wrong++;
    printf("WRONG %s %s %lld\n", what, DTYPES[dtype], (long long)n);
  }
}
/* |x - want| <= absolute + relative |want|, and NaN only where wanted. */
bool close(const std::vector<float> &x, const std::vector<float> &want, double absolute,
           double relative) {
  for (size_t i = 0; i < x.size(); i++) {
    if (x[i] == want[i] || (x[i] != x[i] && want[i] != want[i])) continue;
    if (!(fabs((double)x[i] - want[i]) <= absolute + relative * fabs(want[i]))) return false;
  }
  return true;
}
double half_step(int dtype) { return dtype == BF16 ? 0x1p-8 : dtype == F16 ? 0x1p-11 : 2e-6; }

std::vector<int32_t> first_of(std::vector<int32_t> v, size_t n) {
  v.resize(n);
  return v;
}

/* ---- checks ---------------------------------------------------------------------------- */

void check_rmsnorm(int dtype, int weight_dtype, int64_t rows, int64_t dim,
                   bool has_residual) {
  tensor x(dtype, rows * dim), r(dtype, rows * dim), out(dtype, rows * dim);
  tensor w(weight_dtype, dim);
  std::vector<float> a = x.random(1).read(), b = r.random(2).read(), g = w.random(3).read();
  kvl_rmsnorm_args args = {
      x.at,        has_residual ? r.at : nullptr, w.at, out.at, rows, dim, 1e-5f, dtype,
      weight_dtype};
  kvl_cuda_rmsnorm(&args, &queue);
  std::vector<float> want(rows * dim);
  for (int64_t i = 0; i < rows; i++) {
    double squares = 0;
    for (int64_t d = i * dim; d < (i + 1) * dim; d++) {
      if (has_residual) a[d] = rounded(dtype, a[d] + b[d]);
      squares += (double)a[d] * a[d];
    }
    double scale = 1 / sqrt(squares / dim + 1e-5);
    for (int64_t d = 0; d < dim; d++)
      want[i * dim + d] = (float)(a[i * dim + d] * scale * g[d]);
  }
  expect(close(out.read(), want, 1e-6, half_step(dtype)), "rmsnorm", dtype, dim);
  if (has_residual) expect(r.read() == a, "rmsnorm residual", dtype, dim);
}

void rope_host(std::vector<float> &x, int dtype, const std::vector<int32_t> &positions,
               const std::vector<float> &inv_freq, int64_t heads, int64_t dim) {
  size_t pairs = inv_freq.size();
  for (size_t t = 0; t < positions.size(); t++)
    for (int64_t h = 0; h < heads; h++)
      for (size_t i = 0; i < pairs; i++) {
        float *low = &x[(t * heads + h) * dim + i], *high = low + pairs;
        double angle = (float)positions[t] * inv_freq[i], c = cos(angle), s = sin(angle);
        double u = *low, v = *high;
        *low = rounded(dtype, (float)(u * c - v * s));
        *high = rounded(dtype, (float)(v * c + u * s));
      }
}
std::vector<float> frequencies(int64_t pairs) {
  std::vector<float> f(pairs);
  for (int64_t i = 0; i < pairs; i++) f[i] = powf(500000.f, -(float)i / (float)pairs);
  return f;
}
std::vector<int32_t> some_positions(int64_t tokens) {
  std::vector<int32_t> p(tokens);
  for (int64_t t = 0; t < tokens; t++) p[t] = (int32_t)((t * 7919) % 131072);
  return p;
}

void check_rope(int dtype, int64_t tokens, int64_t heads, int64_t dim, int64_t pairs) {
  tensor x(dtype, tokens * heads * dim);
  std::vector<float> want = x.random(1).read();
  list<int32_t> positions(some_positions(tokens));
  list<float> inv_freq(frequencies(pairs));
  kvl_rope_args args = {x.at, positions.at, inv_freq.at, tokens, heads, dim, pairs, dtype};
  kvl_cuda_rope(&args, &queue);
  rope_host(want, dtype, positions.host, inv_freq.host, heads, dim);
  double relative = dtype == F32 ? 0 : 2 * half_step(dtype);
  expect(close(x.read(), want, 2e-6, relative), "rope", dtype, dim);
}

void check_silu_mul(int dtype, int64_t count) {
  tensor gate(dtype, count), up(dtype, count), out(dtype, count);
  std::vector<float> g = gate.random(1, 20.f).read(), u = up.random(2).read(), want(count);
  kvl_silu_mul_args args = {gate.at, up.at, out.at, count, dtype};
  kvl_cuda_silu_mul(&args, &queue);
  for (int64_t i = 0; i < count; i++)
    want[i] = (float)(g[i] / (1 + exp(-(double)g[i])) * u[i]);
  expect(close(out.read(), want, 1e-7, half_step(dtype)), "silu_mul", dtype, count);
}

/* One layer's memory, with scales where it is f8e4m3. */
struct cache {
  tensor kv;
  list<float> k_scale, v_scale;
  kvl_cache_view view;
  static std::vector<float> scales(int heads, float first) {
    std::vector<float> s(heads);
    for (int h = 0; h < heads; h++) s[h] = first / (float)(h + 1);
    return s;
  }
  cache(int dtype, int64_t blocks, int kv_heads, int block_size, int head_dim)
      : kv(dtype, blocks * 2 * kv_heads * block_size * head_dim),
        k_scale(scales(kv_heads, 0.37f)), v_scale(scales(kv_heads, 0.011f)) {
    view = {kv.at,
            blocks,
            kv_heads,
            block_size,
            head_dim,
            dtype,
            0,
            dtype == F8 ? k_scale.at : nullptr,
            dtype == F8 ? v_scale.at : nullptr};
  }
  size_t element(int64_t block, int half, int head, int token) const {
    return (((block * 2 + half) * view.kv_heads + head) * view.block_size + token) *
           (size_t)view.head_dim;
  }
  /* What append_kv writes to memory `to`, k and v being floats of the rows' dtype. */
  void append(std::vector<float> &to, const std::vector<float> &k,
              const std::vector<float> &v, int64_t block, int token, int64_t row,
              int head) const {
    if (block < 0 || block >= view.blocks) return;
    for (int half = 0; half < 2; half++)
      for (int d = 0; d < view.head_dim; d++) {
        float x = (half ? v : k)[(row * view.kv_heads + head) * view.head_dim + d];
        if (view.dtype == F8) x *= 1.f / (half ? v_scale : k_scale).host[head];
        to[element(block, half, head, token) + d] = rounded(view.dtype, x);
      }
  }
};

/* Places of `tokens` tokens: distinct, some negative, one out of range. */
std::vector<int64_t> some_places(int64_t tokens, int64_t blocks, int block_size) {
  std::vector<int32_t> order = dev::shuffled((int32_t)(blocks * block_size), 3);
  std::vector<int64_t> places(tokens);
  for (int64_t t = 0; t < tokens; t++) places[t] = t % 5 == 3 ? -1 : order[t];
  if (tokens > 2) places[2] = blocks * block_size + 5;
  return places;
}

void check_append(int dtype, int from, int64_t tokens, int heads, int size, int dim) {
  const int64_t blocks = tokens / size + 2;
  cache c(dtype, blocks, heads, size, dim), hot(dtype, blocks, heads, size, dim),
      buffer(dtype, blocks, heads, size, dim);
  tensor k(from, tokens * heads * dim), v(from, tokens * heads * dim);
  std::vector<float> a = k.random(1).read(), b = v.random(2).read();
  std::vector<float> want = c.kv.random(3).read(), want_hot = hot.kv.random(4).read(),
                     want_buffer = buffer.kv.random(5).read();
  list<int64_t> places(some_places(tokens, blocks, size)),
      open(some_places(tokens, blocks, size));
  std::vector<int32_t> slots;
  for (int h = 0; h < heads; h++)
    for (int64_t i = 0; i < blocks; i++) slots.push_back((i + h) % 3 ? (int32_t)i : -1);
  list<int32_t> slot_of(slots);
  for (int64_t t = 0; t < tokens; t++)
    for (int h = 0; h < heads; h++) {
      int64_t place = places.host[t];
      if (place >= 0) c.append(want, a, b, place / size, (int)(place % size), t, h);
      if (place >= 0 && place / size < blocks)
        c.append(want_hot, a, b, slots[h * blocks + place / size], (int)(place % size), t, h);
      place = open.host[t];
      if (place >= 0) c.append(want_buffer, a, b, place / size, (int)(place % size), t, h);
    }
  kvl_append_kv_args args = {c.view, k.at, v.at, places.at, tokens, from};
  kvl_cuda_append_kv(&args, &queue);
  expect(close(c.kv.read(), want, 0, 0), "append_kv", dtype, dim);
  kvl_hot_append_args more = {};
  more.hot.memory = hot.view;
  more.hot.slot_of = slot_of.at;
  more.hot.blocks = blocks;
  more.cache = c.view;
  more.buffer = buffer.view;
  more.k = k.at, more.v = v.at, more.places = places.at, more.buffer_places = open.at;
  more.tokens = tokens, more.dtype = from;
  c.kv.random(3);
  kvl_cuda_hot_append(&more, &queue);
  expect(close(c.kv.read(), want, 0, 0), "hot_append cache", dtype, dim);
  expect(close(hot.kv.read(), want_hot, 0, 0), "hot_append memory", dtype, dim);
  expect(close(buffer.kv.read(), want_buffer, 0, 0), "hot_append buffer", dtype, dim);
}

void check_blocks(int dtype, int mean_dtype, int heads, int size, int dim) {
  const int64_t n = 40, blocks = 50;
  cache c(dtype, blocks, heads, size, dim);
  std::vector<float> kv = c.kv.random(1).read();
  std::vector<int32_t> order = dev::shuffled((int32_t)blocks, 4), ids, tokens, rows;
  for (int64_t i = 0; i < n; i++) {
    ids.push_back(i == 7 ? -1 : i == 8 ? 1 << 29 : order[i]);
    tokens.push_back(i == 3 ? 0 : (int32_t)(i * 5 % size + 1));
    rows.push_back(i == 9 ? -1 : (int32_t)(n - 1 - i));
  }
  list<int32_t> id_list(ids), token_list(tokens), row_list(rows);
  tensor minmax(dtype, n * 2 * heads * dim), mean(mean_dtype, n * heads * dim);
  std::vector<float> want = minmax.random(2).read(), want_mean = mean.random(3).read();
  for (int64_t i = 0; i < n; i++)
    for (int h = 0; h < heads; h++)
      for (int d = 0; d < dim; d++) {
        if (rows[i] < 0 || ids[i] < 0 || ids[i] >= blocks) continue;
        float low = INFINITY, high = -INFINITY, sum = 0;
        for (int t = 0; t < tokens[i]; t++) {
          float x = kv[c.element(ids[i], 0, h, t) + d];
          low = fminf(low, x), high = fmaxf(high, x), sum += x;
        }
        size_t row = (2 * rows[i] * (size_t)heads + h) * dim + d;
        want[row] = rounded(dtype, low);
        want[row + (size_t)heads * dim] = rounded(dtype, high);
        want_mean[(rows[i] * (size_t)heads + h) * dim + d] = tokens[i] ? sum / tokens[i]
                                                                       : 0.f;
      }
  kvl_block_minmax_args a = {c.view, id_list.at, token_list.at, row_list.at, minmax.at, n, n};
  kvl_block_mean_args b = {c.view, id_list.at, token_list.at, row_list.at, mean.at,
                           n,      n,          mean_dtype};
  kvl_cuda_block_minmax(&a, &queue);
  expect(close(minmax.read(), want, 0, 0), "block_minmax", dtype, dim);
  kvl_cuda_block_mean(&b, &queue);
  expect(close(mean.read(), want_mean, 1e-5, half_step(mean_dtype)), "block_mean", dtype,
         dim);
}

void check_merge(int dtype, int64_t rows, int64_t dim) {
  tensor a(dtype, rows * dim), b(dtype, rows * dim), out(dtype, rows * dim);
  tensor la(F32, rows), lb(F32, rows), lse(F32, rows);
  std::vector<float> x = a.random(1).read(), y = b.random(2).read(), u = la.random(3).read(),
                     v = lb.random(4).read(), want(rows * dim), want_lse(rows);
  for (int64_t r = 0; r < rows; r++) {
    if (r % 7 == 3 || r % 7 == 5) u[r] = -INFINITY;
    if (r % 7 == 4 || r % 7 == 5) v[r] = -INFINITY;
    double m = std::max(u[r], v[r]), wa = exp(u[r] - m), wb = exp(v[r] - m);
    bool none = m == -INFINITY;
    want_lse[r] = (float)(none ? -INFINITY : m + log(wa + wb));
    for (int64_t d = r * dim; d < (r + 1) * dim; d++)
      want[d] = (float)(none ? 0 : (wa * x[d] + wb * y[d]) / (wa + wb));
  }
  DEV_CHECK(cudaMemcpy(la.at, u.data(), rows * 4, cudaMemcpyHostToDevice));
  DEV_CHECK(cudaMemcpy(lb.at, v.data(), rows * 4, cudaMemcpyHostToDevice));
  kvl_merge_attention_args args = {
      a.at, b.at, (float *)la.at, (float *)lb.at, out.at, (float *)lse.at, rows, dim, dtype};
  kvl_cuda_merge_attention(&args, &queue);
  expect(close(out.read(), want, 1e-6, half_step(dtype)), "merge_attention", dtype, dim);
  expect(close(lse.read(), want_lse, 1e-6, 1e-6), "merge_attention lse", dtype, dim);
  args.out = a.at, args.lse = (float *)la.at; /* in place */
  kvl_cuda_merge_attention(&args, &queue);
  expect(a.bits() == out.bits() && la.bits() == lse.bits(), "merge in place", dtype, dim);
}

void check_copies(int dtype, int heads, int size, int dim) {
  const int64_t blocks = 30;
  cache c(dtype, blocks, heads, size, dim), to(dtype, blocks + 3, heads, size, dim);
  std::vector<float> want = c.kv.random(1).read(), moved = to.kv.random(2).read();
  const std::vector<float> before = want;
  list<int32_t> src({3, -1, 5, 29}), dst({10, 4, -1, 0});
  kvl_copy_blocks_args args = {c.view, src.at, dst.at, 4};
  const size_t block = c.element(1, 0, 0, 0);
  std::copy_n(&want[3 * block], block, &want[10 * block]);
  std::copy_n(&want[29 * block], block, &want[0]);
  kvl_cuda_copy_blocks(&args, &queue);
  expect(c.kv.read() == want, "copy_blocks", dtype, dim);
  std::vector<int32_t> from_list, to_list;
  int64_t bytes = 0;
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < 5; i++) { /* entry (head, i) */
      int32_t f = i == 2 ? -1 : i * 3 + h % 2, t = i == 4 ? 1 << 20 : 30 - i * 2 - h % 3 % 2;
      from_list.push_back(f);
      to_list.push_back(t);
      if (f < 0 || t >= blocks + 3) continue;
      for (int half = 0; half < 2; half++)
        std::copy_n(&want[c.element(f, half, h, 0)], size * dim,
                    &moved[to.element(t, half, h, 0)]);
      bytes += 2 * size * dim * (int64_t)bytes_of(dtype);
    }
  list<int32_t> f(from_list), t(to_list);
  list<int64_t> count({1000});
  kvl_move_blocks_args more = {c.view, to.view, f.at, t.at, count.at, 1, heads, 5};
  kvl_cuda_move_blocks(&more, &queue);
  expect(to.kv.read() == moved, "move_blocks", dtype, dim);
  expect(dev::download(count.at, 1)[0] == 1000 + bytes, "move_blocks moved", dtype, dim);
}

/* The same bits as rope of q and k, and append_kv of that k. */
void check_rope_append(int dtype, int from, int64_t tokens, int heads, int kv_heads, int size,
                       int dim, int64_t pairs) {
  const int64_t blocks = tokens / size + 2;
  cache c(dtype, blocks, kv_heads, size, dim), want(dtype, blocks, kv_heads, size, dim);
  tensor q(from, tokens * heads * dim), k(from, tokens * kv_heads * dim),
      v(from, tokens * kv_heads * dim), q2(from, q.count), k2(from, k.count);
  q2.random(1), k.random(2), v.random(3);
  k2.copy(k);
  want.kv.random(4);
  list<int32_t> positions(some_positions(tokens));
  list<float> inv_freq(frequencies(pairs));
  list<int64_t> places(some_places(tokens, blocks, size));
  kvl_rope_args a = {q2.at, positions.at, inv_freq.at, tokens, heads, dim, pairs, from};
  kvl_rope_args b = {k2.at, positions.at, inv_freq.at, tokens, kv_heads, dim, pairs, from};
  kvl_cuda_rope(&a, &queue);
  kvl_cuda_rope(&b, &queue);
  kvl_append_kv_args append = {want.view, k2.at, v.at, places.at, tokens, from};
  kvl_cuda_append_kv(&append, &queue);
  std::vector<uint8_t> k_before = k.bits();
  kvl_rope_append_args args = {c.view,    q.at,   k.at,  v.at,  positions.at, inv_freq.at,
                               places.at, tokens, heads, pairs, from};
  dev::late_inputs late;
  late.add(positions.at, tokens), late.add(inv_freq.at, pairs), late.add(places.at, tokens);
  for (int i = 0; i < 1 + late.KINDS; i++) {
    q.random(1), c.kv.random(4);
    if (i) late.spoil(i - 1), late.write(&queue);
    kvl_cuda_rope_append(&args, &queue);
    expect(q.bits() == q2.bits(), "rope_append q", from, dim);
    expect(k.bits() == k_before, "rope_append k", from, dim);
    expect(c.kv.bits() == want.kv.bits(), "rope_append cache", dtype, dim);
  }
}

void check() {
  for (int dtype : {F32, F16, BF16}) {
    for (int64_t dim : {1, 7, 64, 128, 256, 1000, 1024, 1032, 2048, 4096, 5000, 5120, 8192,
                        14336, 16384, 20000, 40000})
      for (int64_t rows : {0, 1, 5, 300})
        for (bool residual : {false, true}) check_rmsnorm(dtype, dtype, rows, dim, residual);
    check_rmsnorm(dtype, F32, 17, 4096, true);
    check_rmsnorm(dtype, F32, 17, 128, false);
    for (int64_t tokens : {0, 1, 5, 700}) {
      check_rope(dtype, tokens, 8, 128, 64);
      check_rope(dtype, tokens, 3, 80, 40);
      check_rope(dtype, tokens, 2, 40, 10);
      check_rope(dtype, tokens, 1, 600, 300);
    }
    for (int64_t count : {0, 1, 9, 4096, 100003, 3000000}) check_silu_mul(dtype, count);
    for (int64_t rows : {0, 1, 33, 5000})
      for (int64_t dim : {1, 8, 40, 64, 128, 256, 300}) check_merge(dtype, rows, dim);
  }
  for (int dtype : {F32, F16, BF16, F8})
    for (int from : {F32, F16, BF16}) {
      if (from != F32 && from != dtype && dtype != F8) continue;
      for (int64_t tokens : {0, 1, 13, 500})
        for (int dim : {16, 64, 128, 256}) {
          check_append(dtype, from, tokens, 3, 16, dim);
          check_rope_append(dtype, from, tokens, 12, 3, 16, dim, dim / 2);
          check_rope_append(dtype, from, tokens, 3, 3, 5, dim, dim / 4);
          check_rope_append(dtype, from, tokens, 4, 1, 5, dim, 3);
        }
    }
  for (int dtype : {F32, F16, BF16, F8})
    for (int size : {1, 16, 64, 256})
      for (int dim : {16, 80, 128, 256}) {
        check_blocks(dtype, dtype == F8 ? BF16 : dtype, 2, size, dim);
        check_blocks(dtype, dtype == F8 ? F16 : F32, 2, size, dim);
        if (size < 256) check_copies(dtype, 3, size, dim);
      }
  printf("%d checks failed\n", wrong);
}

/* ---- times ----------------------------------------------------------------------------- */

double r_bytes_us;
void time_of(dev::bench &b, const std::string &what, double bytes,
             const std::function<void()> &fn) {
  double us = b.time(fn);
  printf("%-44s %9.2f us  %7.1f MB  %.3f R\n", what.c_str(), us, bytes / 1e6,
         bytes / us / r_bytes_us);
}
std::string words(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string words(const char *format, ...) {
  char text[100];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  return text;
}

void time_rows(dev::bench &b, int dtype, int64_t rows) {
  const size_t e = bytes_of(dtype);
  for (int64_t dim : {4096, 14336})
    for (bool residual : {false, true}) {
      tensor x(dtype, rows * dim), r(dtype, rows * dim), w(dtype, dim),
          out(dtype, rows * dim);
      x.random(1), r.random(2), w.random(3);
      kvl_rmsnorm_args a = {
          x.at, residual ? r.at : nullptr, w.at, out.at, rows, dim, 1e-5f, dtype, dtype};
      time_of(b,
              words("rmsnorm %s [%lld, %lld]%s", DTYPES[dtype], (long long)rows,
                    (long long)dim, residual ? " + residual" : ""),
              (double)rows * dim * e * (residual ? 4 : 2),
              [&] { kvl_cuda_rmsnorm(&a, &queue); });
    }
  tensor heads(dtype, rows * 32 * 128), head_weight(dtype, 128);
  heads.random(1), head_weight.random(2);
  kvl_rmsnorm_args per_head = {heads.at, nullptr, head_weight.at, heads.at, rows * 32,
                               128,      1e-5f,   dtype,          dtype};
  time_of(b, words("rmsnorm %s [%lld, 128]", DTYPES[dtype], (long long)rows * 32),
          2. * rows * 32 * 128 * e, [&] { kvl_cuda_rmsnorm(&per_head, &queue); });
  tensor gate(dtype, rows * 14336), up(dtype, rows * 14336);
  gate.random(1), up.random(2);
  kvl_silu_mul_args silu = {gate.at, up.at, gate.at, rows * 14336, dtype};
  time_of(b, words("silu_mul %s [%lld, 14336]", DTYPES[dtype], (long long)rows),
          3. * rows * 14336 * e, [&] { kvl_cuda_silu_mul(&silu, &queue); });
}

void time_tokens(dev::bench &b, int dtype, int cache_dtype, int64_t tokens) {
  const size_t e = bytes_of(dtype), ce = bytes_of(cache_dtype);
  const int64_t blocks = tokens / 16 + 64;
  tensor q(dtype, tokens * 32 * 128), k(dtype, tokens * 8 * 128), v(dtype, tokens * 8 * 128);
  q.random(1), k.random(2), v.random(3);
  cache c(cache_dtype, blocks, 8, 16, 128);
  list<int32_t> positions(some_positions(tokens));
  list<float> inv_freq(frequencies(64));
  std::vector<int32_t> order = dev::shuffled((int32_t)blocks, 9);
  std::vector<int64_t> at(tokens);
  for (int64_t t = 0; t < tokens; t++) /* prefill: runs; decode: a block each */
    at[t] = tokens > 300 ? order[t / 16] * 16ll + t % 16
                         : order[t % blocks] * 16ll + t / blocks;
  list<int64_t> places(at);
  kvl_rope_args rq = {q.at, positions.at, inv_freq.at, tokens, 32, 128, 64, dtype};
  kvl_rope_args rk = {k.at, positions.at, inv_freq.at, tokens, 8, 128, 64, dtype};
  kvl_append_kv_args append = {c.view, k.at, v.at, places.at, tokens, dtype};
  const double q_bytes = 2. * q.count * e, k_bytes = 2. * k.count * e,
               append_bytes = 2. * k.count * (e + ce);
  const char *d = DTYPES[dtype], *cd = DTYPES[cache_dtype];
  time_of(b, words("rope %s [%lld, 32, 128]", d, (long long)tokens), q_bytes,
          [&] { kvl_cuda_rope(&rq, &queue); });
  time_of(b, words("append_kv %s -> %s [%lld, 8, 128]", d, cd, (long long)tokens),
          append_bytes, [&] { kvl_cuda_append_kv(&append, &queue); });
  time_of(b, words("rope q, rope k, append_kv %s [%lld]", cd, (long long)tokens),
          q_bytes + k_bytes + append_bytes, [&] {
            kvl_cuda_rope(&rq, &queue);
            kvl_cuda_rope(&rk, &queue);
            kvl_cuda_append_kv(&append, &queue);
          });
  kvl_rope_append_args fused = {c.view,    q.at,   k.at, v.at, positions.at, inv_freq.at,
                                places.at, tokens, 32,   64,   dtype};
  time_of(b, words("rope_append %s -> %s [%lld]", d, cd, (long long)tokens),
          q_bytes + append_bytes, [&] { kvl_cuda_rope_append(&fused, &queue); });
}

void time_blocks(dev::bench &b, int dtype, int64_t n) {
  const size_t e = bytes_of(dtype);
  const int64_t blocks = n + n / 4 + 2;
  cache c(dtype, blocks, 8, 16, 128);
  c.kv.random(1);
  std::vector<int32_t> order = dev::shuffled((int32_t)blocks, 5);
  list<int32_t> ids(first_of(order, n)), tokens(std::vector<int32_t>(n, 16));
  tensor minmax(dtype, blocks * 2 * 8 * 128);
  tensor mean(dtype == F8 ? BF16 : dtype, blocks * 8 * 128);
  kvl_block_minmax_args a = {c.view, ids.at, tokens.at, nullptr, minmax.at, n, blocks};
  kvl_block_mean_args m = {c.view,  ids.at, tokens.at, nullptr,
                           mean.at, n,      blocks,    mean.dtype};
  time_of(b, words("block_minmax %s, %lld blocks", DTYPES[dtype], (long long)n),
          18. * n * 1024 * e, [&] { kvl_cuda_block_minmax(&a, &queue); });
  time_of(b, words("block_mean %s, %lld blocks", DTYPES[dtype], (long long)n),
          n * 1024 * (16. * e + bytes_of(mean.dtype)),
          [&] { kvl_cuda_block_mean(&m, &queue); });
  std::vector<int32_t> src(order.begin(), order.begin() + n / 2);
  std::vector<int32_t> dst(order.begin() + n / 2, order.begin() + n / 2 * 2);
  list<int32_t> from(src), to(dst);
  kvl_copy_blocks_args copy = {c.view, from.at, to.at, n / 2};
  time_of(b, words("copy_blocks %s, %lld blocks", DTYPES[dtype], (long long)n / 2),
          n / 2 * 65536. * e, [&] { kvl_cuda_copy_blocks(&copy, &queue); });
}

void time_merge(dev::bench &b, int dtype, int64_t tokens) {
  const int64_t rows = tokens * 32;
  tensor x(dtype, rows * 128), y(dtype, rows * 128), lx(F32, rows), ly(F32, rows);
  x.random(1), y.random(2), lx.random(3), ly.random(4);
  float *u = (float *)lx.at, *v = (float *)ly.at;
  kvl_merge_attention_args a = {x.at, y.at, u, v, x.at, u, rows, 128, dtype};
  time_of(b, words("merge_attention %s [%lld, 32, 128]", DTYPES[dtype], (long long)tokens),
          rows * (3. * 128 * bytes_of(dtype) + 12),
          [&] { kvl_cuda_merge_attention(&a, &queue); });
}

__global__ void empty_kernel() {}

}  // namespace

int main(int argc, char **) { /* with an argument: times alone */
  cudaDeviceProp prop;
  DEV_CHECK(cudaGetDeviceProperties(&prop, 0));
  queue.sm_count = prop.multiProcessorCount;
  queue.shared_optin = (int)prop.sharedMemPerBlockOptin;
  if (argc == 1) check();
  dev::bench b;
  r_bytes_us = b.read_bandwidth();
  printf("%s, R %.0f GB/s; an empty launch %.2f us\n", prop.name, r_bytes_us / 1e3,
         b.time([] { empty_kernel<<<1, 32>>>(); }));
  for (int64_t rows : {4096, 256, 16}) {
    time_rows(b, BF16, rows);
    time_tokens(b, BF16, BF16, rows);
    time_tokens(b, BF16, F8, rows);
    time_merge(b, BF16, rows);
    time_merge(b, F32, rows);
  }
  for (int64_t n : {2048, 256, 16}) time_blocks(b, BF16, n);
  time_blocks(b, F8, 2048);
  time_rows(b, F32, 4096);
  return wrong != 0;
}
