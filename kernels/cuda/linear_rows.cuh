/* kvl_linear for the few rows of a decode step, on Hopper and later. A thread block takes a
 * tile of eight rows of the weights at a time (with SwiGLU: four and their partners). One of
 * its warps has bulk copies bring them into a ring in shared memory, stage by stage along k;
 * the others multiply on the tensor cores, each a part of the stage.
 *
 * A sum over k does not care for its order. So a lane reads 16 contiguous bytes of a row of
 * the weights and the same bytes of a row of x, and both products of a step take half of them.
 *
 * A thread block asks for so much shared memory that an SM has room for one: the next product
 * begins early, while this one ends, and two of its blocks on an SM that is free first would
 * share that SM's copies for as long as they run. If the weights are frozen, it fills its ring
 * while it waits for the kernels before it: then memory is read between two products, too.
 * Limit: the bytes of the weights at memory bandwidth.
 * Measured and tried: see kernels/dev/linear.cu. */
#ifndef KVL_CUDA_LINEAR_ROWS_CUH
#define KVL_CUDA_LINEAR_ROWS_CUH

#include "barrier.cuh"
#include "linear_output.cuh"
#include "mma.cuh"
#include "programmatic.cuh"

namespace kvl {

enum {
  LINEAR_ROWS = 4,  /* the most rows of x; the tensor cores would take eight */
  LINEAR_WARPS = 8, /* that multiply */
  LINEAR_CONSUMERS = LINEAR_WARPS * WARP,
  LINEAR_THREADS = LINEAR_CONSUMERS + WARP,
  LINEAR_TILE = 8,  /* rows of the weights */
  LINEAR_STEP = 4,  /* packs of a row in a step: 32 numbers */
  LINEAR_SHARE = 4, /* steps of a stage for each warp */
  LINEAR_STAGE_STEPS = LINEAR_WARPS * LINEAR_SHARE,
  LINEAR_PACKS = LINEAR_STAGE_STEPS * LINEAR_STEP, /* of a row in a stage */
  LINEAR_UNDER_WAY = 4, /* stages, 64 KiB; with more, memory delivers less */
  LINEAR_STAGES =
      10, /* an even number, at most in the ring: what has arrived and waits for its turn, too */
  /* Packs from one row to the next in shared memory: neighbours are in different banks. */
  LINEAR_STAGE_ROW = LINEAR_PACKS + LINEAR_STEP,
  LINEAR_STAGE = LINEAR_TILE * LINEAR_STAGE_ROW,
};
__host__ __device__ inline int linear_row(int packs) { return packs + LINEAR_STEP; }

/* Copies the rows of x to shared memory, normalised if there is a norm. */
template <class T, class W>
__device__ __forceinline__ void normalise_rows(const kvl_linear_args &g, T *to) {
  __shared__ float sums[LINEAR_ROWS][LINEAR_WARPS];
  const int packs = (int)(g.k / 8), lane = threadIdx.x % WARP;
  const T *x = (const T *)g.x;
  const W *norm = (const W *)g.norm;
  float squares[LINEAR_ROWS] = {};
  for (int p = threadIdx.x; p < packs; p += LINEAR_CONSUMERS) {
    pack<T, 8> v[LINEAR_ROWS]; /* the loads of all rows are under way at the same time */
#pragma unroll
    for (int m = 0; m < LINEAR_ROWS; m++)
      if (m < g.rows) v[m] = load_pack<8>(x + ((int64_t)m * packs + p) * 8);
#pragma unroll
    for (int m = 0; m < LINEAR_ROWS; m++) {
      if (m >= g.rows) break;
#pragma unroll
      for (int e = 0; e < 8; e++) squares[m] += to_float(v[m].at[e]) * to_float(v[m].at[e]);
      store_pack<8>(to + (m * linear_row(packs) + p) * 8, v[m]);
    }
  }
  if (!norm) return;
#pragma unroll
  for (int m = 0; m < LINEAR_ROWS; m++) {
    if (m >= g.rows) break;
    squares[m] = warp_sum(squares[m]);
    if (lane == 0) sums[m][threadIdx.x / WARP] = squares[m];
  }
  named_sync(1, LINEAR_CONSUMERS);
  float scale[LINEAR_ROWS];
#pragma unroll
  for (int m = 0; m < LINEAR_ROWS; m++) {
    if (m >= g.rows) break;
    const float all = warp_sum(lane < LINEAR_WARPS ? sums[m][lane] : 0.f);
    scale[m] = 1.0f / sqrtf(all / (float)g.k + g.eps);
  }
  for (int p = threadIdx.x; p < packs; p += LINEAR_CONSUMERS) { /* the thread's own packs */
    const pack<W, 8> own = load_pack<8>(norm + p * 8);
#pragma unroll
    for (int m = 0; m < LINEAR_ROWS; m++) {
      if (m >= g.rows) break;
      T *at = to + (m * linear_row(packs) + p) * 8;
      pack<T, 8> v = load_pack<8>(at);
#pragma unroll
      for (int e = 0; e < 8; e++)
        v.at[e] = from_float<T>(to_float(v.at[e]) * scale[m] * to_float(own.at[e]));
      store_pack<8>(at, v);
    }
  }
}

/* The rows of the weights that make a tile. */
struct linear_tiles {
  const uint4 *weight;
  int64_t units, tiles;
  int packs, swiglu, per_tile, stages; /* per_tile: outputs of a tile; stages: of a tile */
  __device__ __forceinline__ explicit linear_tiles(const kvl_linear_args &g) {
    weight = (const uint4 *)g.weight;
    swiglu = g.form == KVL_LINEAR_SWIGLU;
    per_tile = LINEAR_TILE >> swiglu;
    units = g.n >> swiglu;
    tiles = (units + per_tile - 1) / per_tile;
    packs = (int)(g.k / 8);
    stages = (packs + LINEAR_PACKS - 1) / LINEAR_PACKS;
  }
  __device__ __forceinline__ const uint4 *row(int64_t tile, int i) const {
    int64_t unit = tile * per_tile + i % per_tile;
    if (unit >= units) unit = units - 1; /* read again, and not stored */
    if (i >= per_tile) unit += units;
    return weight + unit * packs;
  }
  /* Thread blocks begin a tile at different stages: if all read the same columns at the same
   * time, some channels of the memory would have more to do than others. */
  __device__ __forceinline__ int first_stage() const { return (int)blockIdx.x % stages; }
  __device__ __forceinline__ int packs_of(int stage) const {
    const int left = packs - stage * LINEAR_PACKS;
    return left < LINEAR_PACKS ? left : LINEAR_PACKS;
  }
};

/* Fills the ring. full[s] counts a stage's bytes, empty[s] the warps that are done with it.
 * Each of the first lanes brings one row of a tile. */
__device__ __forceinline__ void bring_weights(const kvl_linear_args &g, int places,
                                              uint32_t ring, uint32_t full, uint32_t empty,
                                              int lane) {
  if (lane >= LINEAR_TILE) return;
  const linear_tiles w(g);
  const uint32_t to = ring + lane * LINEAR_STAGE_ROW * 16;
  /* `back` is LINEAR_UNDER_WAY stages behind `at`. */
  int at = 0, back = places - LINEAR_UNDER_WAY, stage = w.first_stage();
  uint32_t phase = 1, back_phase = 1;
  bool is_first = true; /* none is so far back yet */
  if (!g.frozen) wait_for_previous();
  for (int64_t tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
    const uint4 *row = w.row(tile, lane);
    for (int i = 0; i < w.stages; i++) {
      const int bytes = w.packs_of(stage) * 16;
      barrier_wait(empty + 8 * at, phase);
      if (at == LINEAR_UNDER_WAY) is_first = false;
      if (!is_first) barrier_wait(full + 8 * back, back_phase);
      barrier_arrive_expect(full + 8 * at, bytes);
      copy_bytes(to + at * LINEAR_STAGE * 16, row + stage * LINEAR_PACKS, bytes,
                 full + 8 * at);
      if (++stage == w.stages) stage = 0;
      if (++at == places) at = 0, phase ^= 1;
      if (++back == places) back = 0, back_phase ^= 1;
    }
  }
}

/* One output from the sums of all warps. part: [warps][rows][LINEAR_TILE]; before: see
 * linear_before. */
template <bool PARTS, class T>
__device__ __forceinline__ void store_output(const kvl_linear_args &g, const linear_tiles &w,
                                             const float *part, int m, int column,
                                             int64_t unit, uint32_t before) {
  float y = 0, z = 0;
#pragma unroll
  for (int i = 0; i < LINEAR_WARPS; i++) {
    const float *own = part + (i * LINEAR_ROWS + m) * LINEAR_TILE + column;
    y += own[0];
    if (w.swiglu) z += own[LINEAR_TILE / 2];
  }
  store_linear<PARTS, T>(g, w.units, m, unit, y, z, before);
}

/* A consuming lane: the sums of its rows of x and of the weights. */
template <class T> struct linear_lane {
  const uint4 *x, *w; /* where its rows begin */
  int warp;
  bool has_row; /* of x */
  float c[4][4];

  /* Adds COUNT steps from `step` on, a warp's steps being LINEAR_WARPS apart. */
  template <int COUNT>
  __device__ __forceinline__ void add(const uint4 *x_at, const uint4 *w_at, int step) {
    uint4 a[COUNT], b[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int at = (step + i * LINEAR_WARPS) * LINEAR_STEP;
      b[i] = w_at[at];
      a[i] = make_uint4(0, 0, 0, 0);
      if (has_row) a[i] = x_at[at];
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int sum = i % 2 * 2;
      mma(c[sum], {a[i].x, 0, a[i].y, 0}, b[i].x, b[i].y, T());
      mma(c[sum + 1], {a[i].z, 0, a[i].w, 0}, b[i].z, b[i].w, T());
    }
  }
  /* Adds the warp's share of a stage that has `steps` steps. */
  __device__ __forceinline__ void add_stage(int stage, int place, int steps) {
    const uint4 *x_at = x + stage * LINEAR_PACKS, *w_at = w + place * LINEAR_STAGE;
    if (steps == LINEAR_STAGE_STEPS) return add<LINEAR_SHARE>(x_at, w_at, warp);
    for (int step = warp; step < steps; step += LINEAR_WARPS) add<1>(x_at, w_at, step);
  }
};

template <bool PARTS, class T>
__global__ void __launch_bounds__(LINEAR_THREADS, 2)
    linear_rows(const __grid_constant__ kvl_linear_args g, int places) {
  extern __shared__ uint4 shared_packs[]; /* the ring, then x: [rows, linear_row(packs)] */
  __shared__ float parts[2][LINEAR_WARPS * LINEAR_ROWS * LINEAR_TILE];
  __shared__ uint64_t barriers[2][LINEAR_STAGES];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < LINEAR_STAGES; i++) {
      barrier_init(full + 8 * i, LINEAR_TILE);
      barrier_init(empty + 8 * i, LINEAR_WARPS);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (warp == LINEAR_WARPS)
    return bring_weights(g, places, shared_address(shared_packs), full, empty, lane);

  const linear_tiles w(g);
  T *rows = (T *)(shared_packs + places * LINEAR_STAGE);
  wait_for_previous();
  if (g.norm && g.norm_dtype == KVL_DTYPE_F32) normalise_rows<T, float>(g, rows);
  else normalise_rows<T, T>(g, rows);
  named_sync(1, LINEAR_CONSUMERS);

  const int row = lane / 4, quad = lane % 4;
  linear_lane<T> own = {(const uint4 *)rows + row * linear_row(w.packs) + quad,
                        shared_packs + row * LINEAR_STAGE_ROW + quad, warp, row < g.rows};
  const int m = threadIdx.x / w.per_tile, column = threadIdx.x % w.per_tile;
  uint32_t at = 0, phase = 0;
  int turn = 0, stage = w.first_stage();
  for (int64_t tile = blockIdx.x; tile < w.tiles; tile += gridDim.x, turn ^= 1) {
    const int64_t unit = tile * w.per_tile + column, to = m * w.units + unit;
    const bool stores = m < g.rows && unit < w.units;
    uint32_t before = 0; /* loaded now, looked at when the tile is done */
    if (stores) before = linear_before(g, to);
#pragma unroll
    for (int i = 0; i < 16; i++) own.c[i / 4][i % 4] = 0;
    for (int i = 0; i < w.stages; i++) {
      barrier_wait(full + 8 * at, phase);
      own.add_stage(stage, at, w.packs_of(stage) / LINEAR_STEP);
      barrier_arrive_warp(empty + 8 * at, lane);
      if (++stage == w.stages) stage = 0;
      if ((int)++at == places) at = 0, phase ^= 1;
    }
    if (own.has_row) {
      float *part = parts[turn] + (warp * LINEAR_ROWS + row) * LINEAR_TILE + quad * 2;
#pragma unroll
      for (int i = 0; i < 2; i++)
        part[i] = own.c[0][i] + own.c[1][i] + own.c[2][i] + own.c[3][i];
    }
    named_sync(1, LINEAR_CONSUMERS); /* one a tile: the sums are in two places in turn */
    if (stores) store_output<PARTS, T>(g, w, parts[turn], m, column, unit, before);
  }
}

/* Bytes of dynamic shared memory with a ring of so many places; beside it a block has less
 * than LINEAR_STATIC. */
inline size_t linear_shared(const kvl_linear_args &g, int places) {
  return (size_t)(g.rows * linear_row((int)(g.k / 8)) + places * LINEAR_STAGE) * 16;
}
enum { LINEAR_STATIC = 4 << 10 };

inline bool takes_linear_rows(const kvl_linear_args &g, const kvl_cuda_queue *q) {
  return is_hopper(q) && g.rows <= LINEAR_ROWS && g.k > 0 && g.k % (8 * LINEAR_STEP) == 0 &&
         (g.dtype == KVL_DTYPE_F16 || g.dtype == KVL_DTYPE_BF16) &&
         aligned16(g.x, g.weight, g.norm) &&
         linear_shared(g, LINEAR_UNDER_WAY) + LINEAR_STATIC <= (size_t)q->shared_optin;
}

template <bool PARTS, class T>
int launch_linear_rows(const kvl_linear_args &g, const kvl_cuda_queue *q) {
  constexpr auto kernel = linear_rows<PARTS, T>;
  int status = allow_shared<kernel>(q, q->shared_optin - LINEAR_STATIC);
  if (status == KVL_OK) status = prefer_shared<kernel>(q);
  if (status != KVL_OK) return status;
  const int swiglu = g.form == KVL_LINEAR_SWIGLU, per_tile = LINEAR_TILE >> swiglu;
  const int64_t tiles = ((g.n >> swiglu) + per_tile - 1) / per_tile;
  const size_t room = (size_t)q->shared_optin - LINEAR_STATIC, alone = room / 2;
  int places = LINEAR_STAGES;
  while (linear_shared(g, places) > room) places -= 2; /* rings of 5 or 7 are 10% slower */
  const size_t bytes = linear_shared(g, places);
  return launch_programmatic(kernel, (unsigned)(tiles < q->sm_count ? tiles : q->sm_count),
                             LINEAR_THREADS, bytes > alone ? bytes : alone, q, g, places);
}
template <class T> int launch_linear_rows(const kvl_linear_args &g, const kvl_cuda_queue *q) {
  return g.parts > 1 ? launch_linear_rows<true, T>(g, q) : launch_linear_rows<false, T>(g, q);
}
inline int launch_linear_rows(const kvl_linear_args &g, const kvl_cuda_queue *q) {
  return g.dtype == KVL_DTYPE_F16 ? launch_linear_rows<__half>(g, q)
                                  : launch_linear_rows<__nv_bfloat16>(g, q);
}

}  // namespace kvl

#endif
