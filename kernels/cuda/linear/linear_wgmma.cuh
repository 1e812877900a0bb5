/* kvl_linear for the few rows of a decode step, on Hopper: some sequences, drafts to verify.
 *
 * wgmma computes y^T = weight x^T: up to 64 rows of the weights are the rows of a product, and
 * the N rows of x are its columns, of which some may not exist. A tile is `height` rows of
 * the weights, with SwiGLU half of them gates and the others their partners. The height is
 * chosen so that the SMs have equal work; a product's other rows are not stored. A thread
 * block takes tile after tile. A warp has TMA bring the weights into a ring, stage by stage
 * along k; another one brings x, which comes from the L2; a warpgroup multiplies.
 *
 * A norm is r x * norm, where r is one number for each row. Four warps multiply x by the norm's
 * weights, stage by stage in turn, and sum x's squares on the way; r is multiplied in when a
 * tile is done. In f16, x * norm could overflow, so norms in f16 are not done here.
 *
 * In a chain of products, what follows a tile counts in full. So each thread then has eight
 * outputs of one row: it computes them beside each other and stores them at once.
 *
 * A thread block asks for so much shared memory that an SM has room for only one. The
 * reason is that the next product begins early, while this one ends: if two of its blocks
 * were on an SM that is free first, they would share that SM's copies for as long as they
 * run. If the weights are frozen, it fills its ring while it waits for the kernels before
 * it: then memory is read between two products, too. Weights are read once in a step, so
 * the L2 is told to drop them first. Then the L2 keeps what small kernels between the
 * products read: tables, positions, their code.
 *
 * Limit     the bytes of the weights at memory bandwidth
 * Measured  notes/20261122-linear.md, bench/linear.lua */
#ifndef KVL_CUDA_LINEAR_WGMMA_CUH
#define KVL_CUDA_LINEAR_WGMMA_CUH

#include "args/linear.h"
#include "cuda/hopper.cuh"
#include "cuda/linear/linear_output.cuh"
#include "cuda/programmatic.cuh"

namespace kvl {

struct linear_wgmma_plan {
  enum {
    ROWS = 32,   /* of x, at most: then the L2 brings as many bytes of x as of weights */
    HEIGHT = 64, /* of a product */
    K = 64,      /* numbers of a row that are 128 bytes, the width of the swizzle */
    UNDER_WAY = 48 << 10,           /* the most bytes of weights in flight: with more,
                                     * memory delivers less */
    PLACES = 16,                    /* stages in the ring, at most */
    THREADS = WARPGROUP + 2 * WARP, /* and NORM_WARPS if there is a norm */
    NORM_ROWS = 16,                 /* of x, at most, if there is a norm */
    NORM_WARPS = 4,                 /* the ring's places are then a multiple of it */
  };
  /* Bytes of shared memory that is not dynamic, for n rows of x. */
  static constexpr int static_bytes(int n) {
    return 8 * HEIGHT * (n + 1) + 4 * NORM_WARPS * n + 32 * PLACES;
  }
  int height, units, tiles; /* a tile's rows of the weights and outputs; how many tiles */
  int boxes, stages;        /* K's of a stage; stages of a tile */
  int places, under_way;    /* stages in the ring; the most stages in flight */
  bool wide;                /* see stores_wide */
};

#if KVL_SM90A

/* Goes through the slots of the ring and the stages of a thread block's tiles. */
struct linear_stage {
  int tile, stage, left, at = 0;
  uint32_t phase = 0;
  /* Thread blocks begin a tile at different stages: if all read the same columns at the same
   * time, some channels of the memory would have more to do than others. */
  __device__ explicit linear_stage(int stages)
      : tile(blockIdx.x), stage(blockIdx.x % stages), left(stages) {}
  __device__ void next(int stages, int places) {
    if (++stage == stages) stage = 0;
    if (--left == 0) left = stages, tile += gridDim.x;
    if (++at == places) at = 0, phase ^= 1;
  }
};

/* The barriers of each stage of the pipeline: the weights have arrived, x has arrived, x is
 * multiplied by the norm, both were read. */
struct linear_barriers {
  uint32_t weights, came, normed, empty;
};

/* One of the warps that multiply x by the norm's weights, each in its own places of the ring.
 * `squares` gets the sum of squares of each row of the stages that this warp had. A stage of x
 * is at ring_x + place * bytes_x, [BOXES, N, K], swizzled. */
template <class T, class W, int N, int BOXES>
__device__ void apply_norm(const kvl_linear_args &g, const linear_wgmma_plan &p,
                           const linear_barriers &barriers, char *ring_x, int nth,
                           float *squares, int lane) {
  using plan = linear_wgmma_plan;
  constexpr int K = plan::K, WARPS = plan::NORM_WARPS;
  constexpr int EACH = N / 4; /* packs of a box in each lane: one in every fourth row */
  const W *norm = (const W *)g.norm;
  float sums[EACH] = {};
  wait_for_previous();
  for (linear_stage x(p.stages); x.tile < p.tiles; x.next(p.stages, p.places)) {
    if (x.at % WARPS != nth) continue;
    pack<W, 8> weights[BOXES][2]; /* of rows that are even and odd, in fours */
#pragma unroll
    for (int box = 0; box < BOXES; box++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int64_t k = (x.stage * BOXES + box) * K + ((lane % 8) ^ (lane / 8 + i * 4)) * 8;
        weights[box][i] = load_pack<8>(norm + (k < g.k ? k : 0)); /* past k, x is 0 */
      }
    barrier_wait(barriers.came + 8 * x.at, x.phase);
    T *const own = (T *)(ring_x + x.at * BOXES * N * K * 2 + lane * 16);
    const bool is_first = x.tile == blockIdx.x;
#pragma unroll
    for (int box = 0; box < BOXES; box++) {
      pack<T, 8> v[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) v[i] = load_pack<8>(own + (box * N + i * 4) * K);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const float value = to_float(v[i].at[e]);
          if (is_first) sums[i] += value * value;
          v[i].at[e] = from_float<T>(value * to_float(weights[box][i % 2].at[e]));
        }
        store_pack<8>(own + (box * N + i * 4) * K, v[i]);
      }
    }
    if (is_first && x.left <= WARPS) { /* this warp's last one */
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const float sum = warp_sum<8>(sums[i]);
        if (lane % 8 == 0) squares[lane / 8 + i * 4] = sum;
      }
    }
    fence_async();
    barrier_arrive_warp(barriers.normed + 8 * x.at, lane);
  }
}

#endif

/* weights: [k / K, 1 or 2, units, K]; rows: [k / K, rows, K] */
template <class T, int N, int BOXES>
__global__ void __launch_bounds__(linear_wgmma_plan::THREADS +
                                      linear_wgmma_plan::NORM_WARPS * WARP,
                                  1)
    linear_wgmma(const __grid_constant__ kvl_linear_args g,
                 const __grid_constant__ CUtensorMap weights,
                 const __grid_constant__ CUtensorMap rows,
                 const __grid_constant__ linear_wgmma_plan p) {
#if KVL_SM90A
  using plan = linear_wgmma_plan;
  constexpr int PLACES = plan::PLACES;
  constexpr int K = plan::K, HEIGHT = plan::HEIGHT, BYTES_BOX = N * K * 2;
  constexpr int NORM_WARPS = plan::NORM_WARPS;
  extern __shared__ char shared_bytes[];
  __shared__ float sums[2][HEIGHT][N + 1], squares[NORM_WARPS][N];
  __shared__ uint64_t barriers_at[4][PLACES];
  const linear_barriers barriers = {
      shared_address(barriers_at[0]), shared_address(barriers_at[1]),
      shared_address(barriers_at[2]), shared_address(barriers_at[3])};
  const uint32_t bytes_x = BOXES * BYTES_BOX, bytes_w = BOXES * p.height * K * 2;
  const uint32_t ring_x = (shared_address(shared_bytes) + 1023) & ~1023u;
  const uint32_t ring_w = ring_x + p.places * bytes_x;
  if (threadIdx.x < NORM_WARPS * N) squares[threadIdx.x / N][threadIdx.x % N] = 0.f;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  constexpr int WEIGHTS = WARPGROUP / WARP, ROWS = WEIGHTS + 1, NORM = ROWS + 1; /* warps */
  const uint64_t once = read_once();
  linear_stage w(p.stages), back(p.stages); /* under_way stages behind */
  auto bring_w = [&] {
    barrier_arrive_expect(barriers.weights + 8 * w.at, bytes_w);
    copy_box4(ring_w + w.at * bytes_w, &weights, w.tile * p.units, w.stage * BOXES,
              barriers.weights + 8 * w.at, once);
    w.next(p.stages, p.places);
  };
  if (warp == WEIGHTS && lane == 0) {
    for (int i = 0; i < PLACES; i++) {
      barrier_init(barriers.weights + 8 * i, 1);
      barrier_init(barriers.came + 8 * i, 1);
      barrier_init(barriers.normed + 8 * i, 1);
      barrier_init(barriers.empty + 8 * i, WARPGROUP / WARP);
    }
    barrier_init_done();
    fence_async();
    if (g.frozen)
      for (int i = 0; i < p.under_way && w.tile < p.tiles; i++) bring_w();
    prefetch_map(&rows);
  }
  __syncthreads();
  let_next_start();

  if (warp == WEIGHTS) {
    if (lane > 0) return;
    if (!g.frozen) {
      wait_for_previous();
      for (int i = 0; i < p.under_way && w.tile < p.tiles; i++) bring_w();
    }
    while (w.tile < p.tiles) {
      barrier_wait(barriers.empty + 8 * w.at, w.phase ^ 1);
      barrier_wait(barriers.weights + 8 * back.at, back.phase);
      back.next(p.stages, p.places);
      bring_w();
    }
    return;
  }
  if (warp == ROWS) {
    if (lane > 0) return;
    wait_for_previous();
    for (linear_stage x(p.stages); x.tile < p.tiles; x.next(p.stages, p.places)) {
      barrier_wait(barriers.empty + 8 * x.at, x.phase ^ 1);
      barrier_arrive_expect(barriers.came + 8 * x.at, BOXES * (int)g.rows * K * 2);
#pragma unroll
      for (int box = 0; box < BOXES; box++)
        copy_box4(ring_x + x.at * bytes_x + box * BYTES_BOX, &rows, 0, x.stage * BOXES + box,
                  barriers.came + 8 * x.at);
    }
    return;
  }
  if (warp >= NORM) {
    char *own = shared_bytes + (ring_x - shared_address(shared_bytes));
    const int nth = warp - NORM;
    if constexpr (N <= plan::NORM_ROWS) {
      if (g.norm_dtype == KVL_DTYPE_F32)
        apply_norm<T, float, N, BOXES>(g, p, barriers, own, nth, squares[nth], lane);
      else apply_norm<T, T, N, BOXES>(g, p, barriers, own, nth, squares[nth], lane);
    }
    return;
  }

  /* At the end of a tile, each thread has eight outputs of a row of x. */
  constexpr int GROUPS = HEIGHT / 8;
  const bool swiglu = g.form == KVL_LINEAR_SWIGLU, adds = g.form == KVL_LINEAR_ADD;
  const int64_t units = swiglu ? g.n / 2 : g.n;
  constexpr int ROWS_AT_ONCE = WARPGROUP / GROUPS,
                TURNS = (N + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  const int column = threadIdx.x % GROUPS * 8;
  const uint32_t ready_x = g.norm ? barriers.normed : barriers.came;
  float d[N / 2];
  int turn = 0;
  linear_stage s(p.stages);
  wait_for_previous();
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, turn ^= 1) {
    const int64_t unit = (int64_t)tile * p.units + column;
    const int stored = column < p.units && unit < units ? (int)g.rows : 0;
    linear_before before[TURNS] = {}; /* loaded now, looked at when the tile is done */
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int m = threadIdx.x / GROUPS + i * ROWS_AT_ONCE;
      if (m < stored && adds && p.wide) before[i].load(g, m * units + unit);
    }
    int last = -1;
    for (int i = 0; i < p.stages; i++) {
      barrier_wait(barriers.weights + 8 * s.at, s.phase);
      barrier_wait(ready_x + 8 * s.at, s.phase);
      products_begin();
#pragma unroll
      for (int box = 0; box < BOXES; box++) {
        const uint64_t w = rows_at<128>(ring_w + s.at * bytes_w + box * p.height * 128);
        const uint64_t x = rows_at<128>(ring_x + s.at * bytes_x + box * BYTES_BOX);
#pragma unroll
        for (int k = 0; k < K / 16; k++)
          product<T>(d, matrix_plus(w, k * 32), matrix_plus(x, k * 32), i + box + k > 0);
      }
      products_commit();
      products_wait<1>();
      if (last >= 0) barrier_arrive_warp(barriers.empty + 8 * last, lane);
      last = s.at;
      s.next(p.stages, p.places);
    }
    products_wait<0>();
    settle(d);
    barrier_arrive_warp(barriers.empty + 8 * last, lane);
    float(*own)[N + 1] = &sums[turn][warp * 16 + lane / 4];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      own[i & 2 ? 8 : 0][i / 4 * 8 + lane % 4 * 2 + (i & 1)] = d[i];
    named_sync(1, WARPGROUP); /* one barrier a tile: the sums alternate between two buffers */
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int m = threadIdx.x / GROUPS + i * ROWS_AT_ONCE;
      if (m >= stored) continue;
      float scale = 1.f;
      if (g.norm) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < NORM_WARPS; w++) all += squares[w][m];
        scale = 1.f / sqrtf(all / (float)g.k + g.eps);
      }
      float y[8], z[8], x[8];
      const int partner = swiglu ? column + p.units : column;
#pragma unroll
      for (int e = 0; e < 8; e++) {
        y[e] = sums[turn][column + e][m] * scale;
        z[e] = sums[turn][partner + e][m] * scale;
      }
      if (p.wide) {
        before[i].template floats<T>(g, x);
        store_linear<T>(g, units, m, unit, y, z, x);
      } else {
#pragma unroll
        for (int e = 0; e < 8; e++) {
          float y1[1] = {y[e]}, z1[1] = {z[e]}, x1[1] = {};
          if (unit + e >= units || column + e >= p.units) break;
          if (adds) load_any(g.out, g.out_dtype, m * units + unit + e, x1);
          store_linear<T>(g, units, m, unit + e, y1, z1, x1);
        }
      }
    }
    __syncwarp(); /* all lanes have to come to the next product */
  }
#endif
}

/* Maps rows of k numbers, `halves` times `units` of them, as [k / K, halves, units, K]. */
inline int map_rows(const kvl_linear_args &g, const void *p, int64_t units, int halves,
                    int box_rows, int boxes, CUtensorMap *map) {
  constexpr int K = linear_wgmma_plan::K;
  const cuuint64_t k = g.k;
  const cuuint64_t dims[4] = {K, (cuuint64_t)units, (cuuint64_t)halves, k / K};
  const cuuint64_t strides[3] = {2 * k, 2 * k * units, 2 * K};
  const cuuint32_t box[4] = {K, (cuuint32_t)box_rows, (cuuint32_t)halves, (cuuint32_t)boxes};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult r = encode_map()(map,
                                  g.dtype == KVL_DTYPE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                  4, (void *)p, dims, strides, box, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? KVL_OK : kvl__cuda_check(cudaErrorInvalidValue);
}

/* Does the kernel take the call? fuses_norm: whether it also does the norm. */
inline bool takes_linear_wgmma(const kvl_linear_args &g, const kvl_cuda_queue *q) {
  constexpr int K = linear_wgmma_plan::K;
  return is_hopper_device(q->device) && g.rows <= linear_wgmma_plan::ROWS && g.k > 0 &&
         g.k % K == 0 && g.n < INT_MAX &&
         (g.dtype == KVL_DTYPE_F16 || g.dtype == KVL_DTYPE_BF16) &&
         aligned16(g.x, g.weight) && encode_map();
}

inline bool fuses_norm(const kvl_linear_args &g) {
  return g.dtype == KVL_DTYPE_BF16 && aligned16(g.norm) &&
         g.rows <= linear_wgmma_plan::NORM_ROWS;
}

inline linear_wgmma_plan plan_linear_wgmma(const kvl_linear_args &g, int n,
                                           const kvl_cuda_queue *q) {
  linear_wgmma_plan p = {};
  const int halves = g.form == KVL_LINEAR_SWIGLU ? 2 : 1;
  const int units = (int)(g.n / halves), sms = q->sm_count;
  int64_t least = INT64_MAX;
  p.wide = stores_wide(g);
  /* The busiest SM has the fewest rows. Low tiles are slower for each row, so tiles of 16
   * rows are only for small products. */
  for (int height : {64, 48, 32, 16}) {
    const int tiles = ceil_div(units, height / halves), rounds = ceil_div(tiles, sms);
    if (height == 16 && 2 * p.tiles > sms) break;
    if ((int64_t)rounds * height >= least) continue;
    least = (int64_t)rounds * height;
    p.height = height, p.units = height / halves, p.tiles = tiles;
  }
  p.boxes = p.height > 32 ? 2 : 4;
  p.stages = ceil_div((int)(g.k / p.K), p.boxes);
  p.places = (q->shared_optin - p.static_bytes(n) - 1024 - (p.HEIGHT - p.height) * 128) /
             (p.boxes * (p.height + n) * p.K * 2);
  if (p.places > p.PLACES) p.places = p.PLACES;
  if (g.norm) p.places -= p.places % p.NORM_WARPS;
  p.under_way = p.UNDER_WAY / (p.boxes * p.height * p.K * 2);
  return p;
}

template <class T, int N, int BOXES>
int launch_linear_wgmma(const kvl_linear_args &g, const linear_wgmma_plan &p,
                        const kvl_cuda_queue *q) {
  constexpr auto kernel = linear_wgmma<T, N, BOXES>;
  const int halves = g.form == KVL_LINEAR_SWIGLU ? 2 : 1;
  CUtensorMap weights, rows;
  int status = map_rows(g, g.weight, g.n / halves, halves, p.units, BOXES, &weights);
  if (status == KVL_OK) status = map_rows(g, g.x, g.rows, 1, (int)g.rows, 1, &rows);
  if (status == KVL_OK) status = allow_shared<kernel>(q, q->shared_optin - p.static_bytes(N));
  if (status == KVL_OK) status = prefer_shared<kernel>(q);
  if (status != KVL_OK) return status;
  /* A product reads HEIGHT rows of the last tile in the ring, too. */
  const size_t bytes = 1024 + (p.HEIGHT - p.height) * 128 +
                       (size_t)p.places * BOXES * (p.height + N) * p.K * 2;
  const size_t alone = q->shared_optin / 2 + 1024;
  const int rounds = ceil_div(p.tiles, q->sm_count);
  const int threads = p.THREADS + (g.norm ? p.NORM_WARPS * WARP : 0);
  return launch_programmatic(kernel, ceil_div(p.tiles, rounds), threads,
                             bytes > alone ? bytes : alone, q, g, weights, rows, p);
}
template <class T, int N>
int launch_linear_wgmma(const kvl_linear_args &g, const kvl_cuda_queue *q) {
  const linear_wgmma_plan p = plan_linear_wgmma(g, N, q);
  return p.boxes == 2 ? launch_linear_wgmma<T, N, 2>(g, p, q)
                      : launch_linear_wgmma<T, N, 4>(g, p, q);
}
template <class T>
int launch_linear_wgmma(const kvl_linear_args &g, const kvl_cuda_queue *q) {
  return g.rows <= 8    ? launch_linear_wgmma<T, 8>(g, q)
         : g.rows <= 16 ? launch_linear_wgmma<T, 16>(g, q)
         : g.rows <= 24 ? launch_linear_wgmma<T, 24>(g, q)
                        : launch_linear_wgmma<T, 32>(g, q);
}
inline int launch_linear_wgmma(const kvl_linear_args &g, const kvl_cuda_queue *q) {
  return g.dtype == KVL_DTYPE_F16 ? launch_linear_wgmma<__half>(g, q)
                                  : launch_linear_wgmma<__nv_bfloat16>(g, q);
}

}  // namespace kvl

#endif
