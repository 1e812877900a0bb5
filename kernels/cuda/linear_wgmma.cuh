/* kvl_linear for a few rows more than linear_rows.cuh takes, on Hopper: a decode step of some
 * sequences, drafts to verify. It is bound by the bytes of the weights like that kernel, but
 * the rows of x need not fit shared memory.
 *
 * wgmma computes y^T = weight x^T: up to 64 rows of the weights are the rows of a product, and
 * the N rows of x are its columns, of which some may not exist. A tile is `height` rows of
 * the weights, with SwiGLU half of them gates and the others their partners. The height is
 * such that the SMs have equal work: a product's other rows are left over and not stored. A
 * thread block takes tile after tile. One of its warps has TMA bring weights and x, which
 * comes from the L2, into a ring stage by stage along k; a warpgroup multiplies.
 *
 * As in linear_rows.cuh an SM has room for one thread block, no more than UNDER_WAY stages are
 * under way, and frozen weights are brought while the kernel before still runs.
 *
 * Limit     the bytes of the weights at memory bandwidth
 * Measured  notes/20261122-linear.md, kernels/dev/linear.cu */
#ifndef KVL_CUDA_LINEAR_WGMMA_CUH
#define KVL_CUDA_LINEAR_WGMMA_CUH

#include "hopper.cuh"
#include "linear_output.cuh"
#include "programmatic.cuh"

namespace kvl {

struct linear_wgmma_plan {
  enum {
    ROWS = 16,     /* of x, at most: of 32, the L2 would bring as many bytes as of weights */
    HEIGHT = 64,   /* of a product */
    K = 64,        /* numbers of a row that are 128 bytes, the width of the swizzle */
    UNDER_WAY = 4, /* stages; see linear_rows.cuh */
    PLACES = 8,    /* stages in the ring, at most */
    THREADS = WARPGROUP + WARP,
    STATIC = 10 << 10, /* bytes of shared memory that is not dynamic, at most */
  };
  int height, units, tiles; /* a tile's rows of the weights and outputs; how many tiles */
  int boxes, stages;        /* K's of a stage; stages of a tile */
  int places;
};

#if KVL_SM90A

/* Goes through the stages of a thread block's tiles. */
struct linear_stage {
  int tile, stage, left;
  __device__ explicit linear_stage(int stages)
      : tile(blockIdx.x), stage(blockIdx.x % stages), left(stages) {}
  /* Thread blocks begin a tile at different stages, as in linear_rows.cuh. */
  __device__ void next(int stages) {
    if (++stage == stages) stage = 0;
    if (--left == 0) left = stages, tile += gridDim.x;
  }
};

#endif

/* weights: [k / K, 1 or 2, units, K]; rows: [k / K, rows, K] */
template <class T, int N, int BOXES>
__global__ void __launch_bounds__(linear_wgmma_plan::THREADS, 1)
    linear_wgmma(const __grid_constant__ kvl_linear_args g,
                 const __grid_constant__ CUtensorMap weights,
                 const __grid_constant__ CUtensorMap rows,
                 const __grid_constant__ linear_wgmma_plan p) {
#if KVL_SM90A
  using plan = linear_wgmma_plan;
  constexpr int PLACES = plan::PLACES, UNDER_WAY = plan::UNDER_WAY;
  constexpr int K = plan::K, HEIGHT = plan::HEIGHT;
  extern __shared__ char shared_bytes[];
  __shared__ float sums[2][HEIGHT][N + 1];
  __shared__ uint64_t barriers[2][PLACES];
  const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
  const uint32_t bytes_x = BOXES * N * K * 2, bytes_w = BOXES * p.height * K * 2;
  const uint32_t ring_x = (shared_address(shared_bytes) + 1023) & ~1023u;
  const uint32_t ring_w = ring_x + p.places * bytes_x;
  if (threadIdx.x == 0) {
    prefetch_map(&weights);
    prefetch_map(&rows);
    for (int i = 0; i < PLACES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, WARPGROUP / WARP);
    }
    barrier_init_done();
  }
  __syncthreads();
  let_next_start();
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;

  if (warp == WARPGROUP / WARP) {
    if (lane > 0) return;
    const int tiles = (p.tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1;
    const int count = tiles * p.stages, early = min(count, UNDER_WAY);
    linear_stage w(p.stages), x(p.stages);
    auto bring_w = [&](int at) {
      barrier_arrive_expect(full + 8 * at, bytes_w + bytes_x);
      copy_box4(ring_w + at * bytes_w, &weights, w.tile * p.units, w.stage * BOXES,
                full + 8 * at);
      w.next(p.stages);
    };
    auto bring_x = [&](int at) {
      copy_box4(ring_x + at * bytes_x, &rows, 0, x.stage * BOXES, full + 8 * at);
      x.next(p.stages);
    };
    if (!g.frozen) wait_for_previous();
    for (int i = 0; i < early; i++) bring_w(i);
    if (g.frozen) wait_for_previous();
    for (int i = 0; i < early; i++) bring_x(i);
    /* `back` is UNDER_WAY stages behind `at`. */
    int at = UNDER_WAY % p.places, back = 0;
    uint32_t phase = UNDER_WAY == p.places ? 0 : 1, back_phase = 0;
    for (int i = UNDER_WAY; i < count; i++) {
      barrier_wait(empty + 8 * at, phase);
      barrier_wait(full + 8 * back, back_phase);
      bring_w(at);
      bring_x(at);
      if (++at == p.places) at = 0, phase ^= 1;
      if (++back == p.places) back = 0, back_phase ^= 1;
    }
    return;
  }

  const int64_t units = g.form == KVL_LINEAR_SWIGLU ? g.n / 2 : g.n;
  const int column = threadIdx.x % HEIGHT, row = threadIdx.x / HEIGHT; /* and every second */
  float d[N / 2];
  int at = 0, turn = 0;
  uint32_t phase = 0;
  wait_for_previous();
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, turn ^= 1) {
    const int64_t unit = (int64_t)tile * p.units + column;
    const bool stores = column < p.units && unit < units;
    uint32_t before[N / 2]; /* loaded now, looked at when the tile is done */
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      before[i] = stores && row + 2 * i < g.rows
                      ? linear_before(g, (row + 2 * i) * units + unit)
                      : 0;
    int last = -1;
    for (int i = 0; i < p.stages; i++) {
      barrier_wait(full + 8 * at, phase);
      products_begin();
#pragma unroll
      for (int box = 0; box < BOXES; box++) {
        const uint64_t w = rows_at<128>(ring_w + at * bytes_w + box * p.height * 128);
        const uint64_t x = rows_at<128>(ring_x + at * bytes_x + box * N * 128);
#pragma unroll
        for (int k = 0; k < K / 16; k++)
          product<T>(d, matrix_plus(w, k * 32), matrix_plus(x, k * 32), i + box + k > 0);
      }
      products_commit();
      products_wait<1>();
      if (last >= 0) barrier_arrive_warp(empty + 8 * last, lane);
      last = at;
      if (++at == p.places) at = 0, phase ^= 1;
    }
    products_wait<0>();
    settle(d);
    barrier_arrive_warp(empty + 8 * last, lane);
    float(*own)[N + 1] = &sums[turn][warp * 16 + lane / 4];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      own[i & 2 ? 8 : 0][i / 4 * 8 + lane % 4 * 2 + (i & 1)] = d[i];
    named_sync(1, WARPGROUP); /* one a tile: the sums are in two places in turn */
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const int m = row + 2 * i;
      if (!stores || m >= g.rows) break;
      const float y = sums[turn][column][m];
      const float z = sums[turn][(column + p.units) % HEIGHT][m]; /* with SwiGLU */
      if (g.parts > 1) store_linear<true, T>(g, units, m, unit, y, z, before[i]);
      else store_linear<false, T>(g, units, m, unit, y, z, before[i]);
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

/* Does the kernel take it, apart from its norm? x is normalised already. */
inline bool takes_linear_wgmma(const kvl_linear_args &g, const kvl_cuda_queue *q) {
  constexpr int K = linear_wgmma_plan::K;
  return is_hopper_device(q->device) && g.rows <= linear_wgmma_plan::ROWS && g.k > 0 &&
         g.k % K == 0 && g.n < INT_MAX &&
         (g.dtype == KVL_DTYPE_F16 || g.dtype == KVL_DTYPE_BF16) &&
         aligned16(g.x, g.weight) && encode_map();
}

inline linear_wgmma_plan plan_linear_wgmma(const kvl_linear_args &g, int n,
                                           const kvl_cuda_queue *q) {
  linear_wgmma_plan p = {};
  const int halves = g.form == KVL_LINEAR_SWIGLU ? 2 : 1;
  const int units = (int)(g.n / halves), sms = q->sm_count;
  int64_t least = INT64_MAX;
  /* The busiest SM has the fewest rows. Low tiles are slower for each row, so 16 rows are for
   * small products alone. */
  for (int height : {64, 48, 32, 16}) {
    const int tiles = ceil_div(units, height / halves), rounds = ceil_div(tiles, sms);
    if (height == 16 && 2 * p.tiles > sms) break;
    if ((int64_t)rounds * height >= least) continue;
    least = (int64_t)rounds * height;
    p.height = height, p.units = height / halves, p.tiles = tiles;
  }
  p.boxes = p.height > 32 ? 2 : 4;
  p.stages = ceil_div((int)(g.k / p.K), p.boxes);
  p.places = (q->shared_optin - p.STATIC - 1024 - (p.HEIGHT - p.height) * 128) /
             (p.boxes * (p.height + n) * p.K * 2);
  if (p.places > p.PLACES) p.places = p.PLACES;
  return p;
}

template <class T, int N, int BOXES>
int launch_linear_wgmma(const kvl_linear_args &g, const linear_wgmma_plan &p,
                        const kvl_cuda_queue *q) {
  constexpr auto kernel = linear_wgmma<T, N, BOXES>;
  const int halves = g.form == KVL_LINEAR_SWIGLU ? 2 : 1;
  CUtensorMap weights, rows;
  int status = map_rows(g, g.weight, g.n / halves, halves, p.units, BOXES, &weights);
  if (status == KVL_OK) status = map_rows(g, g.x, g.rows, 1, N, BOXES, &rows);
  if (status == KVL_OK) status = allow_shared<kernel>(q, q->shared_optin - p.STATIC);
  if (status == KVL_OK) status = prefer_shared<kernel>(q);
  if (status != KVL_OK) return status;
  /* A product reads HEIGHT rows of the last tile in the ring, too. */
  const size_t bytes = 1024 + (p.HEIGHT - p.height) * 128 +
                       (size_t)p.places * BOXES * (p.height + N) * p.K * 2;
  const size_t alone = q->shared_optin / 2 + 1024;
  const int rounds = ceil_div(p.tiles, q->sm_count);
  return launch_programmatic(kernel, ceil_div(p.tiles, rounds), p.THREADS,
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
  return g.rows <= 8 ? launch_linear_wgmma<T, 8>(g, q) : launch_linear_wgmma<T, 16>(g, q);
}
inline int launch_linear_wgmma(const kvl_linear_args &g, const kvl_cuda_queue *q) {
  return g.dtype == KVL_DTYPE_F16 ? launch_linear_wgmma<__half>(g, q)
                                  : launch_linear_wgmma<__nv_bfloat16>(g, q);
}

}  // namespace kvl

#endif
