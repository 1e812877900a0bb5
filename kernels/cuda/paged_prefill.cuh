/* Flash attention of many query rows over paged KV for 16-bit q and cache, on the tensor
 * cores (mma.sync).
 *
 * One block of threads takes 128 query rows that share a KV head: 128 / group tokens with
 * all heads of the group, so short chunks fill a tile and K and V are fetched once for the
 * group. Each warp owns 32 rows (16 above 128 dims) and walks all keys, in tiles of KEYS. Tiles of K
 * and V are double-buffered by asynchronous copies: tile j + 1 arrives while tile j is
 * used, with one barrier a tile. */
#ifndef KVL_CUDA_PAGED_PREFILL_CUH
#define KVL_CUDA_PAGED_PREFILL_CUH

#include "paged_output.cuh"

namespace kvl {

template <int D, int TILES_ = (D <= 128 ? 2 : 1), int KEYS_ = (D > 192 ? 32 : 64)>
struct prefill_shape {
  /* With 16-row tiles a fragment of K or V that a warp reads from shared memory feeds one
   * mma only, and those reads are the limit; two tiles a warp halve them, where the sums
   * leave registers for it. */
  static constexpr int TILES = TILES_;                       /* of 16 rows, a warp */
  static constexpr int WARPS = 8 / TILES, ROWS = 128, THREADS = WARPS * WARP;
  static constexpr int KEYS = KEYS_;
  static constexpr int PIECES = TILE_PIECES<D>;
  static constexpr bool Q_SHARED = D > 64;   /* else q stays in registers */
  static constexpr int TILE_BYTES = KEYS * PIECES * 16;
  static constexpr int Q_BYTES = Q_SHARED ? ROWS * D * 2 : 0;
  static constexpr int SHARED_BYTES = Q_BYTES + 4 * TILE_BYTES;
};

/* Three generations of a tile's rows: tile j + 2 is looked up while j + 1 is copied and j
 * is used. */
template <int KEYS> struct row_lists {
  int64_t offset[3][KEYS];
  int position[3][KEYS];
};

template <class T, int D, class shape>
__global__ void __launch_bounds__(shape::THREADS, shape::TILES)
paged_prefill(const __grid_constant__ kvl_paged_attention_args a, int subgroups) {
  constexpr int KEYS = shape::KEYS, PIECES = shape::PIECES, TILES = shape::TILES;
  extern __shared__ __align__(128) char shared[];
  __shared__ row_lists<KEYS> lists;

  const int group = (int)(a.heads / a.cache.kv_heads), kv_head = blockIdx.y / subgroups;
  const int first = blockIdx.y % subgroups * shape::ROWS;
  const int heads_each = min(group - first, shape::ROWS);
  /* With a causal mask later tiles are longer: they start first. */
  const query_tile tile_q =
      find_tile(a, gridDim.x - 1 - blockIdx.x, max(1, shape::ROWS / group));
  if (tile_q.seq < 0) return;
  const query_rows rows = {tile_q.token0, kv_head * group + first, heads_each,
                           tile_q.tokens * heads_each};
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
  const int head_dim = a.cache.head_dim, length = a.lens[tile_q.seq];
  const int last = tile_q.position0 + tile_q.tokens - 1;
  const paged_walk walk(a, tile_q.seq, kv_head, a.causal ? min(last + 1, length) : length);
  const int tiles = (walk.keys + KEYS - 1) / KEYS;
  const T *cache = (const T *)a.cache.kv;
  const int64_t to_value = walk.to_value();

  const uint32_t tiles_at = shared_address(shared + shape::Q_BYTES);
  auto find = [&](int t) {
    if (tid >= KEYS) return;
    paged_row row = walk.find(t * KEYS + tid);
    lists.offset[t % 3][tid] = row.offset;
    lists.position[t % 3][tid] = row.position;
  };
  auto fetch = [&](int t) {
    uint32_t k_at = tiles_at + (t & 1) * 2 * shape::TILE_BYTES, v_at = k_at + shape::TILE_BYTES;
#pragma unroll
    for (int i = 0; i < KEYS * PIECES / shape::THREADS; i++) {
      int r = (i * shape::THREADS + tid) / PIECES, piece = (i * shape::THREADS + tid) % PIECES;
      bool valid = lists.position[t % 3][r] >= 0 && piece * 8 < head_dim;
      const T *k = valid ? cache + lists.offset[t % 3][r] + piece * 8 : cache;
      uint32_t to = tile_byte<PIECES>(r, piece);
      copy_async(k_at + to, k, valid);
      copy_async(v_at + to, valid ? k + to_value : cache, valid);
    }
  };
  find(0);
  find(1);
  __syncthreads();
  fetch(0);
  copy_commit();

  /* This lane's rows: of the warp's 16-row tile i, lane/4 (half 0) and lane/4 + 8. */
  const int pair = lane % 4 * 2;
  const float scale = a.scale * LOG2E;
  const bool alibi = a.alibi != nullptr;
  int row[TILES][2], at[TILES][2], limit[TILES][2];   /* position; the last key it sees */
  float slope[TILES][2];
  /* Keys past `most` concern no row of the warp; keys up to `least` concern every row of
   * it (rows that do not exist may see what they like). */
  int most = -1, least = INT_MAX;
  uint32_t q[shape::Q_SHARED ? 1 : D / 16][TILES][4];
  uint4 *q_warp = (uint4 *)shared + warp * (D / 16) * TILES * WARP + lane;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    const T *from[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int r = row[i][half] = (warp * TILES + i) * 16 + half * 8 + lane / 4;
      bool has = r < rows.count;
      from[half] = nullptr;
      if (has) from[half] = (const T *)a.q + (rows.token(r) * a.heads + rows.head(r)) * head_dim;
      at[i][half] = tile_q.position0 + r / heads_each;
      limit[i][half] = !has ? -1 : a.causal ? at[i][half] : length - 1;
      slope[i][half] = alibi && has ? a.alibi[rows.head(r)] * LOG2E : 0.f;
      most = max(most, limit[i][half]);
      if (has) least = min(least, limit[i][half]);
    }
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t x[4];
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] = load_pair(from[e % 2], k * 16 + pair + e / 2 * 8, head_dim);
      if constexpr (shape::Q_SHARED)
        q_warp[(k * TILES + i) * WARP] = make_uint4(x[0], x[1], x[2], x[3]);
      else
#pragma unroll
        for (int e = 0; e < 4; e++) q[k][i][e] = x[e];
    }
  }
  most = warp_max(most);
  least = warp_min(least);

  float out[TILES][D / 8][4] = {}, m[TILES][2], l[TILES][2] = {};
#pragma unroll
  for (int i = 0; i < TILES; i++) m[i][0] = m[i][1] = -INFINITY;
  for (int t = 0; t < tiles; t++) {
    copy_wait<0>();
    __syncthreads();   /* tile t is whole, list t + 1 written, buffer of t - 1 read out */
    if (t + 1 < tiles) fetch(t + 1);
    copy_commit();
    if (t + 2 < tiles) find(t + 2);

    const int *positions = lists.position[t % 3];
    if (positions[0] > most) continue;   /* past every row of this warp */
    const uint32_t k_at = tiles_at + (t & 1) * 2 * shape::TILE_BYTES;
    const uint32_t v_at = k_at + shape::TILE_BYTES;
    float s[TILES][KEYS / 8][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t x[TILES][4];
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        if constexpr (shape::Q_SHARED) {
          uint4 y = q_warp[(k * TILES + i) * WARP];
          x[i][0] = y.x, x[i][1] = y.y, x[i][2] = y.z, x[i][3] = y.w;
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++) x[i][e] = q[k][i][e];
        }
      }
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        uint32_t b[4];
        load_matrices(b, k_at + tile_byte<PIECES>(n * 16 + lane % 8 + lane / 16 * 8,
                                                  2 * k + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          mma(s[i][2 * n], x[i], b[0], b[1], T());
          mma(s[i][2 * n + 1], x[i], b[2], b[3], T());
        }
      }
    }
    /* Only the last keys of a tile can be missing or unseen: if its last is there and seen
     * by every row, so are all. */
    const int position_last = positions[KEYS - 1];
    const bool plain = position_last >= 0 && position_last <= least && !alibi;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      if (plain) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int c = 0; c < 4; c++) s[i][n][c] *= scale;
      } else {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int c = 0; c < 4; c++) {
            int key = positions[n * 8 + pair + c % 2];
            float bias = slope[i][c / 2] * (float)(key - at[i][c / 2]);
            bool seen = key >= 0 && key <= limit[i][c / 2];
            s[i][n][c] = seen ? s[i][n][c] * scale + bias : -INFINITY;
          }
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float top = m[i][half];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
          top = fmaxf(top, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
        top = warp_max<4>(top);
        const float shift = finite_shift(top), down = exp2_fast(m[i][half] - shift);
        m[i][half] = top;
        l[i][half] *= down;
        if (__any_sync(ALL_LANES, down != 1.f))   /* seldom, once the maximum has settled */
#pragma unroll
          for (int n = 0; n < D / 8; n++) {
            out[i][n][2 * half] *= down;
            out[i][n][2 * half + 1] *= down;
          }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int c = 2 * half; c < 2 * half + 2; c++)
            l[i][half] += s[i][n][c] = exp2_fast(s[i][n][c] - shift);
      }
    }
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      /* The scores' layout is what the next mma wants of its left side. */
      uint32_t p[TILES][4];
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          p[i][e] = pack2(s[i][2 * k + e / 2][e % 2 * 2], s[i][2 * k + e / 2][e % 2 * 2 + 1], T());
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        uint32_t b[4];
        load_matrices_transposed(
            b, v_at + tile_byte<PIECES>(k * 16 + lane % 16, 2 * n + lane / 16));
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          mma(out[i][2 * n], p[i], b[0], b[1], T());
          mma(out[i][2 * n + 1], p[i], b[2], b[3], T());
        }
      }
    }
  }
  copy_wait<0>();

  /* Rows straight from the registers: four lanes write 8 neighbours of each row. */
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = warp_sum<4>(l[i][half]), inverse = sum == 0.f ? 0.f : 1.f / sum;
      int r = row[i][half];
      if (r >= rows.count) continue;
      int64_t to = rows.token(r) * a.heads + rows.head(r);
      if (a.lse && pair == 0)
        a.lse[to] = sum == 0.f ? -INFINITY : (m[i][half] + log2f(sum)) * LN2;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        int dim = n * 8 + pair;
        if (dim >= head_dim) continue;
        float x[2] = {out[i][n][2 * half] * inverse, out[i][n][2 * half + 1] * inverse};
        if (a.out_dtype == KVL_DTYPE_F32)
          store_floats((float *)a.out + to * head_dim + dim, x);
        else store_floats((T *)a.out + to * head_dim + dim, x);
      }
    }
}

}  // namespace kvl

#endif
