/* A layer of experts: y[r] = sum of weights[r][j] * down[e] (silu(g) * u) over j, where e =
 * chosen[r][j], and g and u are the halves of gate_up[e] x[r]; then out = y or out += y.
 *   x, out   f32 f16 bf16  [rows, k]
 *   chosen   i32           [rows, active]
 *   weights  f32           [rows, active]
 *   gate_up  like x        [experts, 2 * inner, k]
 *   down     like x        [experts, k, inner]
 * The host does not know what was chosen, so the device plans: a thread block sorts the pairs
 * of row and choice by expert into tiles of rows, and the kernels after it take as many
 * tiles as there are. Rows are collected, multiplied by both matrices, and added up. Products
 * on Hopper are those of experts_wgmma.cuh, and on other GPUs, or of sizes that TMA does not
 * take, those of experts_mma.cuh. For up to UNPLANNED rows there is no plan: every choice has
 * a tile of its own. Without wgmma these few, and f32, are for warps that multiply a row of a
 * matrix with up to eight rows of x.
 * Where a row lies in its expert's tiles depends on timing, and its result does not.
 * Limit: see experts_wgmma.cuh. Measured: docs/performance.md */
#include "args/elementwise.h"
#include "args/linear.h"
#include "cuda/block_scan.cuh"
#include "cuda/linear/experts_mma.cuh"
#include "cuda/linear/experts_wgmma.cuh"
#include "cuda/row.cuh"

namespace kvl {
namespace {

enum { PLAN_THREADS = 1024, ROW_WARPS = 8, EXPERT_ROWS = 8, UNPLANNED = 4 };

/* ---- the plan ------------------------------------------------------------------------- */

/* Where things are in the workspace. A slot is a collected row. */
struct experts_room {
  int rows;  /* of a tile */
  int tiles; /* at most */
  size_t count, tile, row_of, slot_of, x, between, y, bytes;
};

/* The expected number of experts that some pair chose, if all choices are as likely. */
double expected_experts(const kvl_experts_args &g) {
  const double all = (double)g.experts, pairs = (double)(g.rows * g.active);
  double none = 1; /* the chance that no pair chose an expert */
  for (double by = 1 - 1 / all, n = pairs; n >= 1; n = floor(n / 2), by *= by)
    if (fmod(n, 2) == 1) none *= by;
  return all * (1 - none);
}

/* How many tiles an expert has on average whose number of rows is about normally distributed. */
double tiles_of_expert(double average, int rows) {
  double tiles = 1, more = 1;
  if (average > 8.0 * rows) return average / rows + 0.5;
  for (int full = rows; more > 1e-3; full += rows)
    tiles += more = 0.5 * erfc((full + 0.5 - average) / sqrt(2 * average));
  return tiles;
}

bool takes_experts_wgmma(const kvl_experts_args &g, int device) {
  return is_hopper_device(device) && g.k % 64 == 0 && g.inner % 64 == 0 &&
         (g.dtype == KVL_DTYPE_F16 || g.dtype == KVL_DTYPE_BF16) &&
         aligned16(g.x, g.gate_up, g.down) && encode_map();
}

/* The rows of a tile. Of a tile, the rows themselves and about 256 rows of a matrix come from the
 * L2, which limits tiles of many rows. */
int rows_of_tile(const kvl_experts_args &g, int device) {
  const double average = (double)(g.rows * g.active) / expected_experts(g);
  double least = INFINITY;
  int best = EXPERT_ROWS;
  for (int rows : {8, 16, 32, 64, 128, 192}) {
    if (rows > experts_mma_shape::ROWS && !takes_experts_wgmma(g, device)) break;
    const double brings = tiles_of_expert(average, rows) * (rows + 256);
    if (brings < 0.9 * least) least = brings, best = rows;
  }
  return best;
}

experts_room room_of(const kvl_experts_args &g, int device) {
  const bool is_planned = g.rows > UNPLANNED;
  const int rows = is_planned ? rows_of_tile(g, device) : (int)EXPERT_ROWS;
  const int64_t pairs = g.rows * g.active;
  const int64_t most = is_planned && pairs > g.experts ? g.experts : pairs;
  const size_t element = g.dtype == KVL_DTYPE_F32 ? 4 : 2;
  experts_room r = {rows, (int)(most + (pairs - most) / rows)};
  const int64_t slots = (int64_t)r.tiles * rows;
  auto take = [&](int64_t count, size_t bytes) {
    const size_t at = r.bytes;
    r.bytes += ((size_t)count * bytes + 255) / 256 * 256;
    return at;
  };
  r.count = take(1, sizeof(int));
  r.tile = take(r.tiles, sizeof(expert_tile));
  r.row_of = take(slots, sizeof(int));
  r.slot_of = take(pairs, sizeof(int));
  r.x = take(is_planned ? slots * g.k : 0, element);
  r.between = take(slots * g.inner, element);
  r.y = take(slots * g.k, element);
  return r;
}

/* Counts the pairs of each expert, gives each expert its tiles, and each pair its slot. */
__global__ void __launch_bounds__(PLAN_THREADS)
    plan_experts(const __grid_constant__ kvl_experts_args g, int rows, int *count,
                 expert_tile *tiles, int *row_of, int *slot_of) {
  __shared__ int chosen[KVL_EXPERTS_MOST], next[KVL_EXPERTS_MOST], shared[1][WARP];
  const int pairs = (int)(g.rows * g.active), experts = (int)g.experts;
  for (int e = threadIdx.x; e < experts; e += PLAN_THREADS) chosen[e] = 0;
  __syncthreads();
  let_next_start();
  wait_for_previous();
  auto expert_of = [&](int i) {
    const int e = g.chosen[i];
    return (unsigned)e < (unsigned)experts ? e : -1;
  };
  for (int i = threadIdx.x; i < pairs; i += PLAN_THREADS)
    if (const int e = expert_of(i); e >= 0) atomicAdd(&chosen[e], 1);
  __syncthreads();
  int before = 0;
  for (int first = 0; first < experts; first += PLAN_THREADS) {
    const int e = first + threadIdx.x, of = e < experts ? chosen[e] : 0;
    int at[1] = {(of + rows - 1) / rows}, all[1];
    block_scan(at, all, shared);
    if (e < experts) next[e] = (before + at[0]) * rows;
    for (int i = 0; i * rows < of; i++)
      tiles[before + at[0] + i] = {e, min(rows, of - i * rows)};
    before += all[0];
  }
  if (threadIdx.x == 0) *count = before;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += PLAN_THREADS) {
    const int e = expert_of(i), slot = e >= 0 ? atomicAdd(&next[e], 1) : -1;
    slot_of[i] = slot;
    if (slot >= 0) row_of[slot] = i / (int)g.active;
  }
}

/* to[slot] = x[row_of[slot]]; V: what a thread copies at once. */
template <class V>
__global__ void __launch_bounds__(ROW_THREADS)
    collect_rows(const V *x, V *to, const int *row_of, const expert_tile *tiles,
                 const int *count, int rows, int64_t length) {
  let_next_start();
  wait_for_previous();
  const int slots = *count * rows;
  for (int slot = blockIdx.x; slot < slots; slot += gridDim.x) {
    if (slot % rows >= tiles[slot / rows].rows) continue;
    const V *from = x + row_of[slot] * length;
    for (int64_t i = threadIdx.x; i < length; i += ROW_THREADS)
      to[slot * length + i] = from[i];
  }
}

/* y[r] = the sum of weights[r][j] * y[slot_of[r][j]]; then out = y or out += y. A thread has N
 * neighbours. */
template <class T, int N>
__global__ void __launch_bounds__(ROW_THREADS)
    add_experts(const __grid_constant__ kvl_experts_args g, const T *y, const int *slot_of) {
  let_next_start();
  wait_for_previous();
  const int64_t pieces = g.k / N;
  const int64_t i = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
  if (i >= g.rows * pieces) return;
  const int64_t row = i / pieces, at = (i - row * pieces) * N;
  float sum[N] = {};
  T *const out = (T *)g.out + row * g.k + at;
  if (g.form == KVL_LINEAR_ADD) load_floats(out, sum);
  for (int64_t j = row * g.active; j < (row + 1) * g.active; j++) {
    const bool is_there = (uint32_t)g.chosen[j] < (uint64_t)g.experts;
    if (!is_there) continue;
    const int64_t slot = slot_of ? slot_of[j] : j * EXPERT_ROWS;
    const float weight = g.weights[j];
    float v[N];
    load_floats(y + slot * g.k + at, v);
#pragma unroll
    for (int e = 0; e < N; e++) sum[e] += weight * v[e];
  }
  store_floats(out, sum);
}

/* ---- products without wgmma ----------------------------------------------------------- */

/* A warp takes a unit for up to eight rows of a tile: a row of the matrix, or with SwiGLU a
 * gate and its partner. */
template <class T, int N>
__global__ void __launch_bounds__(ROW_WARPS *WARP)
    experts_rows(const __grid_constant__ experts_product g, const T *weights, const T *x,
                 int64_t k) {
  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int64_t parts = g.rows / EXPERT_ROWS; /* of a tile of rows */
  const int64_t items = g.tiles_there() * parts * g.cuts,
                matrix = (g.swiglu ? 2 : 1) * g.units * k;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t part = item / g.cuts, tile = part / parts;
    const int unit = (int)(item - part * g.cuts) * ROW_WARPS + warp;
    const int first = (int)(part - tile * parts) * EXPERT_ROWS;
    const expert_tile of = g.tile((int)tile);
    const int there = min(of.rows - first, (int)EXPERT_ROWS);
    if (unit >= g.units || there <= 0) continue;
    const T *const w = weights + of.expert * matrix + unit * k;
    const int64_t slot = tile * g.rows + first, from = tile / g.share * g.step + first;
    float y[EXPERT_ROWS] = {}, z[EXPERT_ROWS] = {};
    for (int64_t i = lane * N; i < k; i += WARP * N) {
      float a[N], b[N] = {}, c[N];
      load_floats(w + i, a);
      if (g.swiglu) load_floats(w + g.units * k + i, b);
#pragma unroll
      for (int r = 0; r < EXPERT_ROWS; r++) {
        if (r >= there) break;
        load_floats(x + (from + r) * k + i, c);
#pragma unroll
        for (int e = 0; e < N; e++) {
          y[r] += a[e] * c[e];
          z[r] += b[e] * c[e];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < EXPERT_ROWS; r++) {
      if (r >= there) break;
      const float gate = warp_sum(y[r]), up = warp_sum(z[r]);
      if (lane == 0)
        ((T *)g.out)[(slot + r) * g.units + unit] = from_float<T>(
            g.swiglu ? silu<T>(gate) * up : gate);
    }
  }
}

/* ---- launches ------------------------------------------------------------------------- */

/* How many rows of a matrix a piece of work has: such that the busiest SM has little to do. Each
 * piece takes some time on its own. */
int columns_for(const kvl_experts_args &g, int rows, int64_t height,
                const kvl_cuda_queue *q) {
  const double experts = expected_experts(g), pairs = (double)(g.rows * g.active);
  const double tiles = experts * ceil(pairs / experts / rows);
  double least = INFINITY;
  int best = 256;
  for (int columns = 256; columns >= (rows > 128  ? 256
                                      : rows > 64 ? 128
                                                  : 32);
       columns /= 2) {
    const double cuts = (double)ceil_div(height, columns);
    const double took = ceil(tiles * cuts / q->sm_count) * (columns + 8);
    if (took < 0.97 * least) least = took, best = columns;
  }
  return best;
}

/* One of the two products of every expert. x: [x_rows, k] */
template <class T>
int multiply(const kvl_experts_args &g, experts_product p, const T *weights, const T *x,
             int64_t x_rows, int64_t k, const kvl_cuda_queue *q) {
  const int64_t height = (int64_t)p.units * (p.swiglu ? 2 : 1);
  if constexpr (sizeof(T) == 2) {
    if (takes_experts_wgmma(g, q->device)) {
      using shape = experts_shape;
      const int columns = columns_for(g, p.rows, height, q);
      const int stage = shape::stage_bytes(columns, p.rows);
      CUtensorMap of_weights, of_rows;
      p.cuts = ceil_div(height, columns);
      p.stages = ceil_div(k / shape::K, shape::boxes(columns));
      p.places = (q->shared_optin - shape::STATIC - 1024) / stage;
      if (p.places > shape::PLACES) p.places = shape::PLACES;
      int status = map_experts(g.dtype, weights, g.experts, height, k, p.swiglu, columns,
                               &of_weights);
      if (status == KVL_OK) status = map_expert_rows(g.dtype, x, x_rows, k, p.rows, &of_rows);
      if (status != KVL_OK) return status;
      return launch_experts_wgmma<T>(p, columns, of_weights, of_rows,
                                     (int)grid((int64_t)p.most * p.cuts, 1, q, 1), q);
    }
    if (p.tiles && k % 8 == 0 && p.units % 8 == 0 && aligned16(weights, x))
      return launch_experts_mma<T>(p, weights, x, k, q);
  }
  p.cuts = ceil_div(p.units, ROW_WARPS);
  const bool wide = k % WIDE<T> == 0 && aligned16(weights, x);
  return launch_programmatic(wide ? experts_rows<T, WIDE<T>> : experts_rows<T, 1>,
                             grid((int64_t)p.most * (p.rows / EXPERT_ROWS) * p.cuts, 1, q),
                             ROW_WARPS * WARP, 0, q, p, weights, x, k);
}

/* Plans, and collects the rows of x. */
template <class T>
int collect(const kvl_experts_args &g, const experts_room &room, const kvl_cuda_queue *q) {
  char *const at = (char *)g.workspace;
  int *const count = (int *)(at + room.count), *const row_of = (int *)(at + room.row_of);
  expert_tile *const tiles = (expert_tile *)(at + room.tile);
  const int status = launch_programmatic(plan_experts, 1, PLAN_THREADS, 0, q, g, room.rows,
                                         count, tiles, row_of, (int *)(at + room.slot_of));
  if (status != KVL_OK) return status;
  const unsigned blocks = grid((int64_t)room.tiles * room.rows, 1, q);
  if (g.k % WIDE<T> == 0 && aligned16(g.x))
    return launch_programmatic(collect_rows<uint4>, blocks, ROW_THREADS, 0, q,
                               (const uint4 *)g.x, (uint4 *)(at + room.x), row_of, tiles,
                               count, room.rows, g.k / WIDE<T>);
  return launch_programmatic(collect_rows<T>, blocks, ROW_THREADS, 0, q, (const T *)g.x,
                             (T *)(at + room.x), row_of, tiles, count, room.rows, g.k);
}

template <class T> int launch_experts(const kvl_experts_args &g, const kvl_cuda_queue *q) {
  const bool is_planned = g.rows > UNPLANNED;
  const experts_room room = room_of(g, q->device);
  char *const at = (char *)g.workspace;
  T *const between = (T *)(at + room.between), *const y = (T *)(at + room.y);
  const int64_t slots = (int64_t)room.tiles * room.rows;
  int status = is_planned ? collect<T>(g, room, q) : KVL_OK;
  experts_product p = {};
  p.chosen = g.chosen, p.experts = (int)g.experts, p.most = room.tiles, p.rows = room.rows;
  p.tiles = is_planned ? (expert_tile *)(at + room.tile) : nullptr;
  p.count = is_planned ? (int *)(at + room.count) : nullptr;
  p.share = is_planned ? 1 : (int)g.active, p.step = is_planned ? p.rows : 1;
  p.out = between, p.units = (int)g.inner, p.swiglu = true;
  if (status == KVL_OK)
    status = multiply<T>(g, p, (const T *)g.gate_up,
                         is_planned ? (T *)(at + room.x) : (const T *)g.x,
                         is_planned ? slots : g.rows, g.k, q);
  p.share = 1, p.step = p.rows;
  p.out = y, p.units = (int)g.k, p.swiglu = false;
  if (status == KVL_OK)
    status = multiply<T>(g, p, (const T *)g.down, between, slots, g.inner, q);
  if (status != KVL_OK) return status;
  const bool wide = g.k % WIDE<T> == 0 && aligned16(g.out);
  const int64_t pieces = g.rows * g.k / (wide ? WIDE<T> : 1);
  return launch_programmatic(wide ? add_experts<T, WIDE<T>> : add_experts<T, 1>,
                             (unsigned)ceil_div(pieces, ROW_THREADS), ROW_THREADS, 0, q, g, y,
                             is_planned ? (int *)(at + room.slot_of) : nullptr);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_WORKSPACE(experts) {
  (void)sm_count;
  const kvl_experts_args &g = *(const kvl_experts_args *)args;
  if (g.rows * g.active == 0 || g.k == 0) return 0;
  int device = 0;
  cudaGetDevice(&device);
  return kvl::room_of(g, device).bytes;
}

KVL_CUDA_KERNEL(fill);

KVL_CUDA_KERNEL(experts) {
  const kvl_experts_args &g = *(const kvl_experts_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  if (g.rows * g.k == 0) return KVL_OK;
  if (g.active == 0 || g.inner == 0) {
    if (g.form == KVL_LINEAR_ADD) return KVL_OK;
    kvl_fill_args zero = {g.out, g.rows * g.k, 0, g.dtype};
    return kvl_cuda_fill(&zero, queue);
  }
  int status = KVL_OK;
  KVL_CUDA_BY_FLOAT(g.dtype, T, { status = kvl::launch_experts<T>(g, q); })
  return status;
}
