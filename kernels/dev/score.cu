/* Scores of blocks: checks, versions and times of score_minmax, score_mean and score_max_qk.
 *
 *   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I kernels -I runtime \
 *        -I kernels/cuda kernels/dev/score.cu -o score -lcuda && ./score
 *
 * Versions, us at 16 x 32K, block 16, bf16, 8 KV heads x 128, groups of 4 and 8, on an H100
 * 80GB HBM3, 2026-11-20 and 21; R = 3090 GB/s. A plain read of as much takes 47, 25 and 348.
 *                                                          minmax     mean      max_qk
 *   1  rows in registers, no pipeline                     103 131    57 72   1130 1511
 *   2  rings of copies, a head at a time, fp32 FMA         60  72    40 54    480  926
 *   3  four heads at a time, one wave                      57  64    34 45    536  669
 *   4  tensor cores, 96 KiB rings, q after the first rows  54  56    34 35    372  380
 *   5  a bulk copy a block, for all KV heads at once       53 (below)
 *   6  4 with q's loads first, 48 KiB rings, four blocks
 *      of threads an SM                                    52  53    29 29    364  372
 *   7  6 with one look-up a tile of tokens and less
 *      arithmetic a copy: f8 max_qk 267 -> 192             52  53    29 29    366  367
 * No difference: rings of 64, 80 and 96 KiB, copies that prefetch 256 bytes into the L2, the
 * number of blocks a block of threads takes between 128 and 1024 (argument "sweep"). */
#include "barrier.cuh"
#include "score_rows.cuh"

#include <cstring>

#include "dev.cuh"

using kvl::score_call;

namespace {

/* ---- version 5: bulk copies ------------------------------------------------------------ */

/* min and max of a block for all KV heads are one run of 4 KiB: one bulk copy. A block of
 * threads takes all 8 heads of a range of blocks, a warp a head, and one more warp fetches
 * tiles of 8 blocks into a ring that they share. minmax of bf16, 8 KV heads x 128, groups up
 * to 8. */
constexpr int BULK_STAGES = 6, BULK_ITEMS = 8, BULK_ROW = 4096 + 64;

__global__ void __launch_bounds__(9 * 32, 1)
    score_bulk(const __grid_constant__ score_call a, int parts, int each) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barriers[2 * BULK_STAGES];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = (int)a.heads / 8;
  const uint32_t full = kvl::shared_address(barriers), empty = full + BULK_STAGES * 8;
  const uint32_t ring = kvl::shared_address(shared);
  if (threadIdx.x == 0) {
    for (int s = 0; s < BULK_STAGES; s++) {
      kvl::barrier_init(full + s * 8, 1);
      kvl::barrier_init(empty + s * 8, 8);
    }
    kvl::barrier_init_done();
  }
  __syncthreads();
  const int64_t seq = blockIdx.x / parts, first = (int64_t)(blockIdx.x % parts) * each;
  const int count = (int)min((int64_t)each, a.max_blocks - first);
  const int tiles = (count + BULK_ITEMS - 1) / BULK_ITEMS;
  if (warp == 8) {
    const int32_t *table = a.tables + seq * a.max_blocks + first;
    int64_t next = lane < BULK_ITEMS && lane < count ? table[lane] : 0;
    for (int tile = 0; tile < tiles; tile++) {
      const int stage = tile % BULK_STAGES, turn = tile / BULK_STAGES;
      const int64_t block = next;
      const int item = (tile + 1) * BULK_ITEMS + lane;
      next = lane < BULK_ITEMS && item < count ? table[item] : 0;
      kvl::barrier_wait(empty + stage * 8, (turn & 1) ^ 1);
      if (lane == 0) kvl::barrier_arrive_expect(full + stage * 8, BULK_ITEMS * 4096);
      __syncwarp();
      if (lane < BULK_ITEMS)
        kvl::copy_bytes(ring + (stage * BULK_ITEMS + lane) * BULK_ROW,
                        (const char *)a.rows + block * 4096, 4096, full + stage * 8);
    }
    return;
  }
  /* q split by sign, in the lane's order. */
  uint4 q[2][4];
  for (int j = 0; j < 4; j++) {
    const int piece = lane % 4 + 4 * j, head = lane / 4;
    kvl::pack<__nv_bfloat16, 8> x, low, high;
    for (int e = 0; e < 8; e++) x.at[e] = __float2bfloat16(0.f);
    if (head < group)
      x = kvl::load_pack<8>((const __nv_bfloat16 *)a.q +
                            ((seq * a.heads + warp * group + head) * 128 + piece * 8));
    for (int e = 0; e < 8; e++) {
      low.at[e] = __hmin(x.at[e], __float2bfloat16(0.f));
      high.at[e] = __hmax(x.at[e], __float2bfloat16(0.f));
    }
    q[0][j] = *(uint4 *)&low;
    q[1][j] = *(uint4 *)&high;
  }
  float *scores = a.scores + (seq * 8 + warp) * a.max_blocks + first;
  for (int tile = 0; tile < tiles; tile++) {
    const int stage = tile % BULK_STAGES, turn = tile / BULK_STAGES;
    kvl::barrier_wait(full + stage * 8, turn & 1);
    const char *row = shared + (stage * BULK_ITEMS + lane / 4) * BULK_ROW + warp * 256;
    float c[4] = {};
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint4 x = *(const uint4 *)(row + r * 2048 + (lane % 4 + 4 * j) * 16);
        const uint32_t a0[4] = {x.x, 0, x.y, 0}, a1[4] = {x.z, 0, x.w, 0};
        kvl::mma(c, a0, q[r][j].x, q[r][j].y, __nv_bfloat16());
        kvl::mma(c, a1, q[r][j].z, q[r][j].w, __nv_bfloat16());
      }
    kvl::barrier_arrive_warp(empty + stage * 8, lane);
    float best = -INFINITY;
    for (int i = 0; i < 2; i++)
      if (lane % 4 * 2 + i < group) best = fmaxf(best, c[i]);
    best = kvl::warp_max<4>(best);
    const int item = tile * BULK_ITEMS + lane / 4;
    if (lane % 4 == 0 && item < count) scores[item] = best;
  }
}

/* ---- problems -------------------------------------------------------------------------- */

template <class T> constexpr int dtype_of = KVL_DTYPE_F32;
template <> constexpr int dtype_of<__half> = KVL_DTYPE_F16;
template <> constexpr int dtype_of<__nv_bfloat16> = KVL_DTYPE_BF16;
template <> constexpr int dtype_of<kvl::f8e4m3> = KVL_DTYPE_F8E4M3;

template <class T> __global__ void cast_kernel(const float *from, T *to, size_t count) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
       i += (size_t)gridDim.x * blockDim.x)
    to[i] = kvl::convert<T>(from[i]);
}
template <class T> void *random_rows(size_t count, uint64_t seed) {
  if constexpr (!kvl::same<T, kvl::f8e4m3>) return dev::randn<T>(count, seed);
  float *from = dev::randn<float>(count, seed);
  T *to = dev::alloc<T>(count);
  cast_kernel<<<1056, 256>>>(from, to, count);
  DEV_CHECK(cudaDeviceSynchronize());
  DEV_CHECK(cudaFree(from));
  return to;
}

struct problem {
  score_call call;
  kvl::score_kind kind;
  size_t bytes; /* of the rows that are scored */
  std::vector<void *> memory;
  ~problem() {
    for (void *p : memory) cudaFree(p);
  }
  template <class T> T *own(T *p) {
    memory.push_back((void *)p);
    return p;
  }
};

/* Random rows and tables. Min and max need not be in order: the formula does not care, the
 * identity by q's sign does, so they are put in order. */
template <class T> __global__ void order_minmax(T *rows, int64_t blocks, int64_t row) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < blocks * row;
       i += (int64_t)gridDim.x * blockDim.x) {
    T *low = rows + i / row * 2 * row + i % row, *high = low + row;
    T x = *low, y = *high;
    if (kvl::to_float(x) > kvl::to_float(y)) *low = y, *high = x;
  }
}

template <class T, class Q>
void make(problem &p, kvl::score_kind kind, std::vector<int32_t> lens, int64_t group,
          int64_t kv_heads, int64_t head_dim, int block_size, int join, bool breaks,
          bool ordered = false) {
  int64_t seqs = (int64_t)lens.size(), max_blocks = 2, used = 0;
  for (int32_t n : lens) {
    int64_t blocks = (n + block_size - 1) / block_size;
    used += blocks;
    max_blocks = std::max(max_blocks, blocks + (breaks ? 3 : 0));
  }
  int64_t blocks = used + 1, next = 0;
  std::vector<int32_t> order = dev::shuffled((int32_t)blocks, 3);
  if (ordered) std::sort(order.begin(), order.end());
  std::vector<int32_t> tables(seqs * max_blocks, -1);
  for (int64_t s = 0; s < seqs; s++)
    for (int64_t b = 0; b < (lens[s] + block_size - 1) / block_size; b++)
      tables[s * max_blocks + b] = order[next++];
  if (breaks && !tables.empty()) tables[0] = -1, tables[max_blocks - 1] = 1 << 30;
  int64_t rows = kind == kvl::SCORE_MINMAX ? 2 : 1, row = kv_heads * head_dim;
  if (kind == kvl::SCORE_MAX_QK) row *= block_size, rows = 2;
  size_t count = (size_t)(blocks * rows * row);
  p.kind = kind;
  p.call = {p.own(dev::randn<Q>(seqs * kv_heads * group * head_dim, 5)),
            p.own(random_rows<T>(count, 6)),
            p.own(dev::upload(tables)),
            p.own(dev::upload(lens)),
            p.own(dev::alloc<float>(seqs * kv_heads * max_blocks)),
            seqs,
            kv_heads * group,
            kv_heads,
            head_dim,
            max_blocks,
            blocks,
            rows * row,
            kind == kvl::SCORE_MAX_QK ? block_size * head_dim : head_dim,
            block_size,
            join,
            dtype_of<Q>,
            dtype_of<T>};
  if (kind == kvl::SCORE_MINMAX) order_minmax<<<1056, 256>>>((T *)p.call.rows, blocks, row);
  p.bytes = (size_t)used * row * sizeof(T) * (kind == kvl::SCORE_MINMAX ? 2 : 1);
}

/* One thread a score, in double; `size` gets the sum of the magnitudes. */
__global__ void reference(score_call a, kvl::score_kind kind, float *scores, float *size) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i >= a.seqs * a.kv_heads * a.max_blocks) return;
  int64_t block = i % a.max_blocks, head = i / a.max_blocks % a.kv_heads;
  int64_t seq = i / a.max_blocks / a.kv_heads, group = a.heads / a.kv_heads;
  int64_t physical = a.tables[seq * a.max_blocks + block], begin = block * a.block_size;
  scores[i] = -INFINITY, size[i] = 0.f;
  if (begin >= a.lens[seq] || physical < 0 || physical >= a.blocks) return;
  auto load = [&](int64_t at) {
    const bool is_f8 = a.rows_dtype == KVL_DTYPE_F8E4M3;
    return is_f8 ? kvl::to_float(((kvl::f8e4m3 *)a.rows)[at])
                 : kvl::load_any(a.rows, a.rows_dtype, at);
  };
  int64_t items = 1;
  if (kind == kvl::SCORE_MAX_QK) items = min((int64_t)a.block_size, a.lens[seq] - begin);
  double joined = a.group == KVL_GROUP_MAX ? -INFINITY : 0.0;
  for (int64_t h = 0; h < group; h++) {
    double best = -INFINITY;
    for (int64_t t = 0; t < items; t++) {
      int64_t row = physical * a.block_stride + head * a.head_stride + t * a.head_dim;
      double sum = 0, all = 0;
      for (int64_t d = 0; d < a.head_dim; d++) {
        int64_t at = (seq * a.heads + head * group + h) * a.head_dim + d;
        double q = kvl::load_any(a.q, a.dtype, at);
        double x = q * load(row + d), y = x;
        if (kind == kvl::SCORE_MINMAX) y = q * load(row + a.kv_heads * a.head_dim + d);
        sum += fmax(x, y);
        all += fmax(fabs(x), fabs(y));
      }
      best = fmax(best, sum);
      size[i] = fmaxf(size[i], (float)all);
    }
    joined = a.group == KVL_GROUP_MAX ? fmax(joined, best) : joined + best;
  }
  scores[i] = (float)(a.group == KVL_GROUP_MAX ? joined : joined / group);
}

int launch(const problem &p, const kvl_cuda_queue *q) {
  switch (p.kind) {
    case kvl::SCORE_MINMAX: return kvl::launch_score<kvl::SCORE_MINMAX>(p.call, q);
    case kvl::SCORE_MEAN: return kvl::launch_score<kvl::SCORE_MEAN>(p.call, q);
    default: return kvl::launch_score<kvl::SCORE_MAX_QK>(p.call, q);
  }
}

/* The largest error in units of the tolerance: 1e-5 of the sum of magnitudes. */
double error_of(const problem &p, const std::function<void()> &run) {
  const score_call &a = p.call;
  size_t count = (size_t)(a.seqs * a.kv_heads * a.max_blocks);
  float *want = dev::alloc<float>(count), *size = dev::alloc<float>(count);
  reference<<<(unsigned)((count + 127) / 128), 128>>>(a, p.kind, want, size);
  DEV_CHECK(cudaMemset(a.scores, 0xFF, count * 4));
  run();
  DEV_CHECK(cudaDeviceSynchronize());
  std::vector<float> x = dev::download(a.scores, count), y = dev::download(want, count),
                     z = dev::download(size, count);
  run();
  std::vector<float> again = dev::download(a.scores, count);
  double worst = memcmp(again.data(), x.data(), count * 4) ? 1e9 : 0; /* not the same bits */
  for (size_t i = 0; i < count; i++) {
    double e = y[i] == x[i] ? 0 : fabs((double)x[i] - y[i]) / (1e-5 * z[i]);
    if (!(e <= 1e9)) e = 1e9;
    worst = std::max(worst, e);
  }
  DEV_CHECK(cudaFree(want));
  DEV_CHECK(cudaFree(size));
  return worst;
}

const char *const KINDS[] = {"minmax", "mean", "max_qk", "tiles"};
const char *const DTYPES[] = {"f32", "f16", "bf16", "f8e4m3"}; /* ORDER kvl_dtype */

template <class T, class Q> void check(const kvl_cuda_queue *q, double &worst) {
  for (int kind = 0; kind < 3; kind++) {
    if (kind == kvl::SCORE_MEAN && kvl::same<T, kvl::f8e4m3>) continue;
    for (int head_dim : {16, 48, 64, 80, 128, 256})
      for (int64_t group : {1, 3, 4, 8, 9, 33, 100})
        for (int block_size : {1, 8, 16, 17, 32}) {
          int join = (head_dim + block_size) % 2 ? KVL_GROUP_MEAN : KVL_GROUP_MAX;
          problem p;
          make<T, Q>(p, (kvl::score_kind)kind, {700, 0, 1, 33, 250}, group, 2, head_dim,
                     block_size, join, true);
          double e = error_of(p, [&] { launch(p, q); });
          worst = std::max(worst, e);
          if (e > 1)
            printf("WRONG %s rows %s q %s head_dim %d group %lld block %d: %g\n", KINDS[kind],
                   DTYPES[dtype_of<T>], DTYPES[dtype_of<Q>], head_dim, (long long)group,
                   block_size, e);
        }
  }
}

template <class T, class Q>
void time_shape(dev::bench &b, const kvl_cuda_queue *q, double r, kvl::score_kind kind,
                int seqs, int tokens, int64_t group, bool ordered = false) {
  problem p;
  make<T, Q>(p, kind, std::vector<int32_t>(seqs, tokens), group, 8, 128, 16, KVL_GROUP_MAX,
             false, ordered);
  double e = error_of(p, [&] { launch(p, q); });
  double us = b.time([&] { launch(p, q); });
  printf("%-7s %-6s q %-4s group %2lld  %3d x %6d%s  %8.1f us  %.3f R  (error %.2f)\n",
         KINDS[kind], DTYPES[dtype_of<T>], DTYPES[dtype_of<Q>], (long long)group, seqs,
         tokens, ordered ? " in order" : "", us, p.bytes / us / r, e);
}

/* Blocks that a block of threads takes. */
template <class T, kvl::score_kind KIND>
void sweep(dev::bench &b, const kvl_cuda_queue *q, double r, int seqs, int tokens) {
  problem p;
  make<T, __nv_bfloat16>(p, KIND == kvl::SCORE_TILES ? kvl::SCORE_MAX_QK : KIND,
                         std::vector<int32_t>(seqs, tokens), 4, 8, 128, 16, KVL_GROUP_MAX,
                         false);
  for (int64_t each : {32, 64, 128, 256, 512, 1024}) {
    double us = b.time([&] { kvl::launch_score_dim<T, 128, KIND>(p.call, q, each); });
    printf("sweep %-7s %-6s %d x %d each %5lld  %8.1f us  %.3f R\n", KINDS[KIND],
           DTYPES[dtype_of<T>], seqs, tokens, (long long)each, us, p.bytes / us / r);
  }
}

void time_bulk(dev::bench &b, double r, int seqs) {
  problem p;
  make<__nv_bfloat16, __nv_bfloat16>(p, kvl::SCORE_MINMAX, std::vector<int32_t>(seqs, 32768),
                                     4, 8, 128, 16, KVL_GROUP_MAX, false);
  const int bytes = BULK_STAGES * BULK_ITEMS * BULK_ROW;
  DEV_CHECK(
      cudaFuncSetAttribute(score_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  for (int each : {64, 128, 256}) {
    int parts = 2048 / each;
    auto run = [&] { score_bulk<<<parts * seqs, 288, bytes>>>(p.call, parts, each); };
    double e = error_of(p, run), us = b.time(run);
    printf("bulk copies, %d x 32768, %d blocks each  %.1f us  %.3f R  (error %.2f)\n", seqs,
           each, us, p.bytes / us / r, e);
  }
}

}  // namespace

int main(int argc, char **argv) {
  using namespace kvl;
  using bf16 = __nv_bfloat16;
  cudaDeviceProp prop;
  DEV_CHECK(cudaGetDeviceProperties(&prop, 0));
  kvl_cuda_queue q = {};
  q.sm_count = prop.multiProcessorCount;
  q.shared_optin = (int)prop.sharedMemPerBlockOptin;

  double worst = 0;
  check<bf16, bf16>(&q, worst);
  check<bf16, __half>(&q, worst);
  check<bf16, float>(&q, worst);
  check<__half, __half>(&q, worst);
  check<__half, bf16>(&q, worst);
  check<__half, float>(&q, worst);
  check<float, float>(&q, worst);
  check<float, bf16>(&q, worst);
  check<f8e4m3, bf16>(&q, worst);
  check<f8e4m3, float>(&q, worst);
  printf("largest error %.3f of the tolerance\n", worst);

  dev::bench b;
  const double r = b.read_bandwidth();
  printf("%s, R %.0f GB/s\n", prop.name, r / 1e3);
  for (size_t n : {(size_t)64 << 20, (size_t)128 << 20, (size_t)512 << 20, (size_t)1 << 30}) {
    double us = b.time([&] { b.read(n); });
    printf("plain read of %zu MiB  %.1f us  %.3f R\n", n >> 20, us, n / us / r);
  }
  for (int64_t group : {1, 4, 8, 16})
    time_shape<bf16, bf16>(b, &q, r, SCORE_MINMAX, 16, 32768, group);
  time_shape<bf16, bf16>(b, &q, r, SCORE_MINMAX, 16, 32768, 4, true);
  for (int64_t group : {4, 8}) time_shape<bf16, bf16>(b, &q, r, SCORE_MEAN, 16, 32768, group);
  for (int64_t group : {4, 8})
    time_shape<bf16, bf16>(b, &q, r, SCORE_MAX_QK, 16, 32768, group);
  time_shape<f8e4m3, bf16>(b, &q, r, SCORE_MINMAX, 16, 32768, 4);
  time_shape<f8e4m3, bf16>(b, &q, r, SCORE_MAX_QK, 16, 32768, 4);
  time_shape<float, float>(b, &q, r, SCORE_MINMAX, 16, 32768, 4);
  time_shape<bf16, float>(b, &q, r, SCORE_MINMAX, 16, 32768, 4);
  for (auto [seqs, tokens] :
       {std::pair{1, 32768}, {1, 131072}, {8, 4096}, {64, 4096}, {64, 32768}})
    time_shape<bf16, bf16>(b, &q, r, SCORE_MINMAX, seqs, tokens, 4);
  time_bulk(b, r, 16);
  time_bulk(b, r, 64);
  if (argc < 2 || strcmp(argv[1], "sweep")) return worst > 1;
  sweep<bf16, SCORE_MINMAX>(b, &q, r, 16, 32768);
  sweep<bf16, SCORE_MEAN>(b, &q, r, 16, 32768);
  sweep<bf16, SCORE_TILES>(b, &q, r, 16, 32768);
  sweep<f8e4m3, SCORE_TILES>(b, &q, r, 16, 32768);
  sweep<bf16, SCORE_MINMAX>(b, &q, r, 1, 32768);
  sweep<bf16, SCORE_MINMAX>(b, &q, r, 40, 32768);
  return worst > 1;
}
