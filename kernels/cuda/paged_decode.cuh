/* Split-KV flash decoding for 16-bit q and cache, on the tensor cores.
 *
 * One block of threads takes one (sequence, KV head, split of its keys); up to 16 query
 * heads of the group are the 16 rows of the mma, so K and V are read once. A decode step
 * is bound by memory and a 16-row mma costs the same however many rows are used, so
 * smaller groups waste nothing that matters.
 *
 * Every warp is its own pipeline: tiles of 16 keys (K and V) are dealt to the warps in
 * turn, and each warp keeps STAGES - 1 of its tiles under way into its own part of shared
 * memory. No block-wide barrier until the warps' partial softmaxes are joined at the end. */
#ifndef KVL_CUDA_PAGED_DECODE_CUH
#define KVL_CUDA_PAGED_DECODE_CUH

#include "paged_output.cuh"

namespace kvl {

/* Ring sizes: 96 KiB a block (64 KiB at D = 64), two blocks an SM. */
template <int D> struct decode_shape {
  static constexpr int WARPS = D > 128 ? 2 : 4, STAGES = D > 64 ? 3 : 4;
  static constexpr int KEYS = 16, ROWS = 16;
  static constexpr int PIECES = TILE_PIECES<D>;
  static constexpr int TILE_BYTES = KEYS * PIECES * 16, STAGE_BYTES = 2 * TILE_BYTES;
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
  static constexpr int SHARED_BYTES = RING_BYTES + WARPS * STAGES * KEYS * 4;
  static_assert(WARPS * ROWS * (D * 4 + 8) <= RING_BYTES, "the ring holds the final states");
};

template <class T, int D>
__global__ void __launch_bounds__(decode_shape<D>::WARPS * WARP, 2)
paged_decode(const __grid_constant__ kvl_paged_attention_args a,
             const __grid_constant__ split_place place_, int subgroups) {
  using shape = decode_shape<D>;
  constexpr int STAGES = shape::STAGES, WARPS = shape::WARPS, KEYS = shape::KEYS;
  constexpr int PIECES = shape::PIECES;
  extern __shared__ __align__(128) char shared[];

  split_place place = place_;
  place.split = blockIdx.x % place.splits;
  const int64_t seq = blockIdx.x / place.splits;
  const int kv_head = blockIdx.y / subgroups, group = (int)(a.heads / a.cache.kv_heads);
  const int first = blockIdx.y % subgroups * shape::ROWS;
  const query_rows rows = {seq, kv_head * group + first, group,
                           min(shape::ROWS, group - first)};
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int head_dim = a.cache.head_dim, length = a.lens[seq];

  const paged_walk walk(a, seq, kv_head, length);
  const int tiles = (walk.keys + KEYS - 1) / KEYS;
  const int tile_end = (int)((int64_t)tiles * (place.split + 1) / place.splits);
  int tile = (int)((int64_t)tiles * place.split / place.splits) + warp;

  char *ring = shared + warp * STAGES * shape::STAGE_BYTES;
  const uint32_t ring_at = shared_address(ring);
  int *positions = (int *)(shared + shape::RING_BYTES) + warp * STAGES * KEYS;
  const T *cache = (const T *)a.cache.kv;
  const int64_t to_value = walk.to_value();

  /* Lanes l and l + 16 look up key l of a tile; each lane then copies pieces of rows. */
  auto find = [&](int t) {
    paged_row none = {0, -1};
    return t < tile_end ? walk.find(t * KEYS + lane % KEYS) : none;
  };
  auto fetch = [&](int stage, const paged_row &row) {
    uint32_t k_at = ring_at + stage * shape::STAGE_BYTES, v_at = k_at + shape::TILE_BYTES;
    long long offset = row.position < 0 ? -1 : (long long)row.offset;
#pragma unroll
    for (int i = 0; i < KEYS * PIECES / WARP; i++) {
      int r = (i * WARP + lane) / PIECES, piece = (i * WARP + lane) % PIECES;
      long long at = __shfl_sync(ALL_LANES, offset, r);
      bool valid = at >= 0 && piece * 8 < head_dim;   /* else zeros: no NaN gets in */
      const T *k = valid ? cache + at + piece * 8 : cache;
      uint32_t to = tile_byte<PIECES>(r, piece);
      copy_async(k_at + to, k, valid);
      copy_async(v_at + to, valid ? k + to_value : cache, valid);
    }
    if (lane < KEYS) positions[stage * KEYS + lane] = row.position;
  };

  {
    paged_row start[STAGES - 1];
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) start[s] = find(tile + s * WARPS);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      fetch(s, start[s]);
      copy_commit();
    }
  }

  /* The rows of this lane's two halves of every mma: lane/4 and lane/4 + 8. */
  const int row0 = lane / 4, row1 = row0 + 8, pair = lane % 4 * 2;
  const T *q0 = nullptr, *q1 = nullptr;
  float slope0 = 0.f, slope1 = 0.f;
  if (row0 < rows.count) q0 = (const T *)a.q + (seq * a.heads + rows.head(row0)) * head_dim;
  if (row1 < rows.count) q1 = (const T *)a.q + (seq * a.heads + rows.head(row1)) * head_dim;
  if (a.alibi && q0) slope0 = a.alibi[rows.head(row0)] * LOG2E;
  if (a.alibi && q1) slope1 = a.alibi[rows.head(row1)] * LOG2E;
  uint32_t q[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    q[k][0] = load_pair(q0, k * 16 + pair, head_dim);
    q[k][1] = load_pair(q1, k * 16 + pair, head_dim);
    q[k][2] = load_pair(q0, k * 16 + pair + 8, head_dim);
    q[k][3] = load_pair(q1, k * 16 + pair + 8, head_dim);
  }
  const float scale = a.scale * LOG2E;

  float out[D / 8][4] = {};
  float m0 = -INFINITY, m1 = -INFINITY, l0 = 0.f, l1 = 0.f;
  paged_row next = find(tile + (STAGES - 1) * WARPS);
  for (int stage = 0; tile < tile_end;
       tile += WARPS, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    copy_wait<STAGES - 2>();
    __syncwarp();   /* every lane's copies are in, and the last tile's readers are done */
    fetch(stage == 0 ? STAGES - 1 : stage - 1, next);
    copy_commit();
    next = find(tile + STAGES * WARPS);

    const uint32_t k_at = ring_at + stage * shape::STAGE_BYTES;
    const uint32_t v_at = k_at + shape::TILE_BYTES;
    float s[2][4] = {};   /* 16 rows x keys 0-7 and 8-15 */
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t b[4];
      load_matrices(b, k_at + tile_byte<PIECES>(lane % 8 + lane / 16 * 8,
                                                2 * k + lane / 8 % 2));
      mma(s[0], q[k], b[0], b[1], T());
      mma(s[1], q[k], b[2], b[3], T());
    }
    float top0 = m0, top1 = m1;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        int at = positions[stage * KEYS + n * 8 + pair + c];
        float ahead = (float)(at - (length - 1));
        s[n][c] = at < 0 ? -INFINITY : s[n][c] * scale + slope0 * ahead;
        s[n][c + 2] = at < 0 ? -INFINITY : s[n][c + 2] * scale + slope1 * ahead;
        top0 = fmaxf(top0, s[n][c]);
        top1 = fmaxf(top1, s[n][c + 2]);
      }
    top0 = warp_max<4>(top0);
    top1 = warp_max<4>(top1);
    if (__any_sync(ALL_LANES, top0 > m0 || top1 > m1)) {
      float down0 = exp2_fast(m0 - finite_shift(top0));
      float down1 = exp2_fast(m1 - finite_shift(top1));
      m0 = top0;
      m1 = top1;
      l0 *= down0;
      l1 *= down1;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        out[n][0] *= down0;
        out[n][1] *= down0;
        out[n][2] *= down1;
        out[n][3] *= down1;
      }
    }
    float shift0 = finite_shift(m0), shift1 = finite_shift(m1);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        l0 += s[n][c] = exp2_fast(s[n][c] - shift0);
        l1 += s[n][c + 2] = exp2_fast(s[n][c + 2] - shift1);
      }
    /* The scores' layout is what the next mma wants of its left side. */
    const uint32_t p[4] = {pack2(s[0][0], s[0][1], T()), pack2(s[0][2], s[0][3], T()),
                           pack2(s[1][0], s[1][1], T()), pack2(s[1][2], s[1][3], T())};
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
      uint32_t b[4];
      load_matrices_transposed(b, v_at + tile_byte<PIECES>(lane % 16, 2 * n + lane / 16));
      mma(out[2 * n], p, b[0], b[1], T());
      mma(out[2 * n + 1], p, b[2], b[3], T());
    }
  }
  let_next_start();
  l0 = warp_sum<4>(l0);
  l1 = warp_sum<4>(l1);

  copy_wait<0>();
  __syncthreads();   /* every warp is past its ring, which now takes the states */
  float *sums = (float *)shared;
  float2 *states = (float2 *)(sums + WARPS * shape::ROWS * D);
  float *mine = sums + warp * shape::ROWS * D;
#pragma unroll
  for (int n = 0; n < D / 8; n++) {
    *(float2 *)(mine + row0 * D + n * 8 + pair) = make_float2(out[n][0], out[n][1]);
    *(float2 *)(mine + row1 * D + n * 8 + pair) = make_float2(out[n][2], out[n][3]);
  }
  if (pair == 0) {
    states[warp * shape::ROWS + row0] = make_float2(m0, l0);
    states[warp * shape::ROWS + row1] = make_float2(m1, l1);
  }
  __syncthreads();
  finish_rows<WARPS, shape::ROWS, D>(a, rows, place, sums, states);
}

}  // namespace kvl

#endif
