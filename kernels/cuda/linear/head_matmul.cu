/* Rows of each head times a matrix of that head: out[t][h] = x[t][h][0 ... k) w[h]; the numbers
 * of x[t][h] behind the first k follow unchanged.
 *   x    f32 f16 bf16  [tokens, heads, k + rest]
 *   w    like x        [heads, k, n], or [heads, n, k] transposed
 *   out  like x        [tokens, heads, n + rest]
 * For up to HEAD_TOKENS tokens of 16 bits a thread block takes some columns of one head. Its
 * warps divide k, read w straight into the registers of products (mma.sync) and add up
 * through shared memory. A lane reads 16 bytes at a time, so it has neighbouring numbers where
 * the operand of a product has numbers that are apart; the order of k does not matter to a
 * sum, and that of n is undone when results are written. More tokens, f32, and sizes that are
 * no multiples of 8 are for cuBLAS, which takes rows that are apart, and a copy.
 *
 * Bytes   w once; tokens * heads * (k + n + 2 * rest) * element
 * Limit   memory; the launch for a small model
 * Source  Liu et al. 2024 (DeepSeek-V2: the absorbed matrices of latent attention) */
#include "args/linear.h"
#include "cuda/mma.cuh"
#include "cuda/programmatic.cuh"

KVL_CUDA_KERNEL(matmul);
KVL_CUDA_WORKSPACE(matmul);

namespace kvl {
namespace {

enum { HEAD_TOKENS = 16, HEAD_WARPS = 4, HEAD_THREADS = HEAD_WARPS * WARP };

/* What a lane has under way for a step of a warp, and its products. w lies as [heads, n, k]:
 * a step is 32 terms of k for 32 columns. A lane has eight neighbours of k: of row lane / 4
 * of each eight rows of w, and of tokens lane / 4 and lane / 4 + 8 of x. */
template <bool TURNED> struct head_step {
  static constexpr int COLUMNS = 32, TILES = 4, TERMS = 32;
  uint4 w[4];
  uint32_t x[2][4];

  /* From the first number of the block's columns; `columns` of them exist. */
  template <class T>
  __device__ __forceinline__ void load_w(const T *from, int k, int, int columns, int term) {
    const int row = threadIdx.x % WARP / 4, at = term + threadIdx.x % 4 * 8;
    from += row * k + at;
#pragma unroll
    for (int j = 0; j < 4; j++)
      w[j] = at < k && 8 * j + row < columns
                 ? load_streaming((const uint4 *)(from + 8 * j * k))
                 : make_uint4(0, 0, 0, 0);
  }
  template <class T>
  __device__ __forceinline__ void load_x(const T *from, int k, int x_row, int tokens,
                                         int term) {
    const int row = threadIdx.x % WARP / 4, at = term + threadIdx.x % 4 * 8;
    from += row * x_row + at;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 y = at < k && row + 8 * i < tokens ? *(const uint4 *)(from + 8 * i * x_row)
                                                     : make_uint4(0, 0, 0, 0);
      x[0][i] = y.x, x[0][2 + i] = y.y, x[1][i] = y.z, x[1][2 + i] = y.w;
    }
  }
  template <class T> __device__ __forceinline__ void multiply(float (&sum)[TILES][4]) const {
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      mma(sum[j], x[0], w[j].x, w[j].y, T());
      mma(sum[j], x[1], w[j].z, w[j].w, T());
    }
  }
  /* Where column c of product j is. */
  static __device__ __forceinline__ int place(int j, int c) { return 8 * j + c; }
};

/* w lies as [heads, k, n]: a step is 16 terms for 64 columns. A lane has eight neighbours of n in
 * four rows of w; of x, it has two neighbours of k at two places for each token. */
template <> struct head_step<false> {
  static constexpr int COLUMNS = 64, TILES = 8, TERMS = 16;
  uint4 w[4];
  uint32_t x[4];

  template <class T>
  __device__ __forceinline__ void load_w(const T *from, int k, int n, int columns, int term) {
    const int column = threadIdx.x % WARP / 4 * 8, at = term + threadIdx.x % 4 * 2;
    from += at * n + column;
#pragma unroll
    for (int j = 0; j < 4; j++)
      w[j] = at + j / 2 * 8 < k && column < columns
                 ? load_streaming((const uint4 *)(from + (j / 2 * 8 + j % 2) * n))
                 : make_uint4(0, 0, 0, 0);
  }
  template <class T>
  __device__ __forceinline__ void load_x(const T *from, int k, int x_row, int tokens,
                                         int term) {
    const int row = threadIdx.x % WARP / 4, at = term + threadIdx.x % 4 * 2;
    from += row * x_row + at;
#pragma unroll
    for (int j = 0; j < 4; j++)
      x[j] = at + j / 2 * 8 < k && row + j % 2 * 8 < tokens
                 ? *(const uint32_t *)(from + j % 2 * 8 * x_row + j / 2 * 8)
                 : 0;
  }
  template <class T> __device__ __forceinline__ void multiply(float (&sum)[TILES][4]) const {
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      auto pair = [&](const uint4 &even, const uint4 &odd) {
        const uint32_t a = (&even.x)[j / 2], b = (&odd.x)[j / 2];
        return __byte_perm(a, b, j % 2 ? 0x7632 : 0x5410);
      };
      mma(sum[j], x, pair(w[0], w[1]), pair(w[2], w[3]), T());
    }
  }
  static __device__ __forceinline__ int place(int j, int c) { return 8 * c + j; }
};

/* Grid: runs of columns, heads. The first numbers of a frozen w are read before the kernels
 * before this one have ended. */
template <class T, bool TURNED>
__global__ void __launch_bounds__(HEAD_THREADS)
    head_product(const __grid_constant__ kvl_head_matmul_args g) {
  using step = head_step<TURNED>;
  constexpr int COLUMNS = step::COLUMNS, AHEAD = 4, NEXT = HEAD_WARPS * step::TERMS;
  __shared__ alignas(16) float sums[HEAD_WARPS][HEAD_TOKENS][COLUMNS + 4];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, head = blockIdx.y;
  const int k = (int)g.k, n = (int)g.n, tokens = (int)g.tokens, heads = (int)g.heads;
  const int rest = (int)g.rest, x_row = heads * (k + rest), out_row = heads * (n + rest);
  const int column = (int)blockIdx.x * COLUMNS, columns = min(n - column, COLUMNS);
  const T *const w = (const T *)g.w + (int64_t)head * k * n + column * (TURNED ? k : 1);
  const T *const x = (const T *)g.x + head * (k + rest);
  T *const out = (T *)g.out + head * (n + rest);
  int first = warp * step::TERMS;
  step steps[AHEAD];
  auto load_w = [&] {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) steps[i].load_w(w, k, n, columns, first + i * NEXT);
  };
  let_next_start();
  if (g.frozen) load_w();
  wait_for_previous();
  if (!g.frozen) load_w();
  float sum[step::TILES][4] = {};
  while (true) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) steps[i].load_x(x, k, x_row, tokens, first + i * NEXT);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) steps[i].template multiply<T>(sum);
    first += AHEAD * NEXT;
    if (first >= k) break;
    load_w();
  }
#pragma unroll
  for (int j = 0; j < step::TILES; j++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      sums[warp][lane / 4 + i / 2 * 8][step::place(j, lane % 4 * 2 + i % 2)] = sum[j][i];
  __syncthreads();
  for (int i = threadIdx.x; i < tokens * (COLUMNS / 8); i += HEAD_THREADS) {
    const int token = i / (COLUMNS / 8), at = i % (COLUMNS / 8) * 8;
    if (at >= columns) continue;
    float all[8] = {};
#pragma unroll
    for (int j = 0; j < HEAD_WARPS; j++) {
      float one[8];
      load_floats(&sums[j][token][at], one);
#pragma unroll
      for (int e = 0; e < 8; e++) all[e] += one[e];
    }
    store_floats(out + token * out_row + column + at, all);
  }
  if (blockIdx.x > 0) return;
  const int packs = rest / 8;
  for (int i = threadIdx.x; i < tokens * packs; i += HEAD_THREADS) {
    const int token = i / packs, at = i % packs * 8;
    store_pack<8>(out + token * out_row + n + at, load_pack<8>(x + token * x_row + k + at));
  }
}

/* The numbers behind those of products; a thread block has one row. */
template <class T>
__global__ void __launch_bounds__(HEAD_THREADS)
    copy_rests(const __grid_constant__ kvl_head_matmul_args g) {
  let_next_start();
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < g.tokens * g.heads; row += gridDim.x)
    for (int64_t i = threadIdx.x; i < g.rest; i += HEAD_THREADS)
      ((T *)g.out)[row * (g.n + g.rest) + g.n + i] =
          ((const T *)g.x)[row * (g.k + g.rest) + g.k + i];
}

bool takes_head_product(const kvl_head_matmul_args &g) {
  const int64_t most = INT_MAX / HEAD_TOKENS; /* offsets have 32 bits */
  return g.dtype != KVL_DTYPE_F32 && g.tokens <= HEAD_TOKENS && g.heads <= 65535 &&
         (g.k | g.n | g.rest) % 8 == 0 && g.k <= most && g.n <= most && g.rest <= most &&
         g.k * g.n <= most && g.heads * (g.k + g.rest) <= most &&
         g.heads * (g.n + g.rest) <= most && aligned16(g.x, g.w, g.out);
}

template <class T>
int launch_head_product(const kvl_head_matmul_args &g, const kvl_cuda_queue *q) {
  auto launch = [&](auto kernel, int columns) {
    const dim3 blocks((unsigned)ceil_div(g.n > 0 ? g.n : 1, columns), (unsigned)g.heads);
    return launch_programmatic(kernel, blocks, HEAD_THREADS, 0, q, g);
  };
  if (g.transpose_w) return launch(head_product<T, true>, head_step<true>::COLUMNS);
  return launch(head_product<T, false>, head_step<false>::COLUMNS);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_WORKSPACE(head_matmul) {
  const kvl_head_matmul_args &g = *(const kvl_head_matmul_args *)args;
  if (kvl::takes_head_product(g)) return 0;
  const kvl_matmul_args product = kvl__head_products(&g);
  return kvl_cuda_matmul_workspace(&product, sm_count);
}

KVL_CUDA_KERNEL(head_matmul) {
  using namespace kvl;
  const kvl_head_matmul_args &g = *(const kvl_head_matmul_args *)args;
  kvl_cuda_queue *q = (kvl_cuda_queue *)queue;
  if (g.tokens * g.heads == 0) return KVL_OK;
  if (takes_head_product(g))
    return g.dtype == KVL_DTYPE_F16 ? launch_head_product<__half>(g, q)
                                    : launch_head_product<__nv_bfloat16>(g, q);
  const kvl_matmul_args product = kvl__head_products(&g);
  int status = kvl_cuda_matmul(&product, q);
  if (status != KVL_OK || g.rest == 0) return status;
  KVL_CUDA_BY_FLOAT(g.dtype, T, {
    return launch_programmatic(copy_rests<T>, grid(g.tokens * g.heads, 1, q), HEAD_THREADS, 0,
                               q, g);
  })
}
