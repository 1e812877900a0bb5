/* Counts the bits in which the hashes of blocks differ from a query's: the shared part of
 * score_hamming and select_hamming. A warp takes 32 blocks of a sequence at a time, one per
 * lane.
 *
 * When every block has a hash, each lane reads its own. When every token has one, LANES lanes
 * read a block's hashes, 16 bytes each, so that loads are contiguous and all in flight at
 * once. Then the warp finds the least distance of every block, of all blocks together in
 * LANES - 1 shuffles (as vf_sum_lanes does on the CPU), and gives it to the block's lane.
 * Source: UCM's GSA on-device (XOR, count, the nearest token of a block). */
#ifndef KVL_CUDA_HAMMING_CUH
#define KVL_CUDA_HAMMING_CUH

#include "args/select.h"
#include "cuda/programmatic.cuh"

namespace kvl {

/* The distance of a table entry that is no block. */
constexpr uint32_t HAMMING_NONE = KVL_HASH_BITS_MAX + 1;

/* How hashes are read.
 *   WORDS    of a hash; 0: as many as the view says
 *   LANES    that read a block together; 32 for token hashes of any size: one token per
 *            lane.
 *            With block hashes, two lanes read a whole 32-byte sector of memory
 *   READERS  lanes that are given the same block
 *   HEADS    whose hashes a sector holds; each lane has those of EACH heads */
template <int WORDS_, int LANES_, bool IS_TOKEN_> struct hash_form {
  static constexpr int WORDS = WORDS_, LANES = LANES_, READERS = IS_TOKEN_ ? 1 : LANES_;
  static constexpr bool IS_TOKEN = IS_TOKEN_;
  static constexpr int HEADS = READERS == 1 ? 1 : 4 / (WORDS > 0 ? WORDS : 4);
  static constexpr int EACH = HEADS / READERS;
};

/* Calls f(hash_form<...>()) with the form of a view that takes one head at a time. */
template <class F> int with_form(const kvl_hash_view &v, F f) {
  const bool is_paired = v.tokens % 16 == 0;
  if (!v.is_token && v.words == 1) return f(hash_form<1, 1, false>());
  if (!v.is_token && v.words == 2) return f(hash_form<2, 1, false>());
  if (!v.is_token) return f(hash_form<0, 1, false>());
  if (is_paired && v.words == 1) return f(hash_form<1, 8, true>());
  if (is_paired && v.words == 2) return f(hash_form<2, 16, true>());
  return f(hash_form<0, 32, true>());
}

__device__ __forceinline__ uint32_t hamming(uint64_t a, uint64_t b) {
  return __popcll(a ^ b);
}
__device__ __forceinline__ uint64_t word_of(uint32_t low, uint32_t high) {
  return low | (uint64_t)high << 32;
}

/* The same, but takes several heads together when they fill sectors. */
template <class F> int with_heads(const kvl_hash_view &v, F f) {
  const bool is_whole = !v.is_token && v.kv_heads * v.words % 4 == 0 && aligned16(v.hashes);
  if (is_whole && v.words == 1) return f(hash_form<1, 2, false>());
  if (is_whole && v.words == 2) return f(hash_form<2, 2, false>());
  return with_form(v, f);
}

/* Loads N blocks of a lane; the hashes may still be in flight. `head` is the first of the
 * FORM's heads. */
template <class FORM, int N> struct hash_batch;

/* One hash per block, of one or two words. */
template <int WORDS, int N> struct hash_batch<hash_form<WORDS, 1, false>, N> {
  pack<uint64_t, WORDS> hash[N];
  uint32_t there; /* bit j: block j exists */

  /* block[j] is physical. */
  __device__ __forceinline__ void load(const kvl_hash_view &v, const int (&block)[N],
                                       const int (&)[N], int head) {
    there = 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
      if ((uint32_t)block[j] >= (uint32_t)v.blocks) continue;
      there |= 1u << j;
      hash[j] = load_pack<WORDS>(v.hashes + ((int64_t)block[j] * v.kv_heads + head) * WORDS);
    }
  }
  __device__ __forceinline__ void distances(const uint64_t *q, uint32_t (&d)[N]) const {
#pragma unroll
    for (int j = 0; j < N; j++) {
      d[j] = 0;
#pragma unroll
      for (int w = 0; w < WORDS; w++) d[j] += hamming(hash[j].at[w], q[w]);
      if (!(there >> j & 1)) d[j] = HAMMING_NONE;
    }
  }
};

/* The hashes of a sector, 16 bytes per lane. q points to the hash of the first of HEADS
 * heads; d has this lane's heads: d[j * EACH + i] is of block j and head i. */
template <int WORDS, int N> struct hash_batch<hash_form<WORDS, 2, false>, N> {
  static constexpr int EACH = 2 / WORDS;
  uint4 piece[N];
  uint32_t there;

  __device__ __forceinline__ void load(const kvl_hash_view &v, const int (&block)[N],
                                       const int (&)[N], int head) {
    const uint64_t *p = v.hashes + head * WORDS + threadIdx.x % 2 * 2;
    there = 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
      if ((uint32_t)block[j] >= (uint32_t)v.blocks) continue;
      there |= 1u << j;
      piece[j] = *(const uint4 *)(p + (int64_t)block[j] * v.kv_heads * WORDS);
    }
  }
  __device__ __forceinline__ void distances(const uint64_t *q,
                                            uint32_t (&d)[N * EACH]) const {
    const uint64_t mine[2] = {q[threadIdx.x % 2 * 2], q[threadIdx.x % 2 * 2 + 1]};
#pragma unroll
    for (int j = 0; j < N; j++) {
      const uint32_t low = hamming(word_of(piece[j].x, piece[j].y), mine[0]);
      const uint32_t high = hamming(word_of(piece[j].z, piece[j].w), mine[1]);
      const bool is_there = there >> j & 1;
      d[j * EACH] = is_there ? EACH > 1 ? low : low + high : HAMMING_NONE;
      if (EACH > 1) d[j * EACH + EACH - 1] = is_there ? high : HAMMING_NONE;
    }
  }
};

/* One hash per block, of any number of words. */
template <int N> struct hash_batch<hash_form<0, 1, false>, N> {
  const uint64_t *hash[N];
  int words;

  __device__ __forceinline__ void load(const kvl_hash_view &v, const int (&block)[N],
                                       const int (&)[N], int head) {
    words = v.words;
#pragma unroll
    for (int j = 0; j < N; j++)
      hash[j] = (uint32_t)block[j] < (uint32_t)v.blocks
                    ? v.hashes + ((int64_t)block[j] * v.kv_heads + head) * words
                    : nullptr;
  }
  __device__ __forceinline__ void distances(const uint64_t *q, uint32_t (&d)[N]) const {
#pragma unroll
    for (int j = 0; j < N; j++) {
      d[j] = hash[j] ? 0 : HAMMING_NONE;
      for (int w = 0; hash[j] && w < words; w++) d[j] += hamming(hash[j][w], q[w]);
    }
  }
};

/* One hash per token. It loads nothing before the query is known: a warp has enough loads. */
template <int WORDS, int LANES> struct hash_batch<hash_form<WORDS, LANES, true>, 1> {
  static constexpr int PER = WARP / LANES; /* blocks that a warp reads at a time */
  const kvl_hash_view *v;
  int block, tokens, head;

  __device__ __forceinline__ void load(const kvl_hash_view &view, const int (&block_)[1],
                                       const int (&tokens_)[1], int head_) {
    v = &view, tokens = tokens_[0], head = head_;
    block = (uint32_t)block_[0] < (uint32_t)view.blocks ? block_[0] : -1;
  }
  __device__ __forceinline__ const uint64_t *hashes_of(int b) const {
    return v->hashes + ((int64_t)b * v->kv_heads + head) * v->tokens * v->words;
  }
  __device__ __forceinline__ void distances(const uint64_t *q, uint32_t (&d)[1]) const {
    if constexpr (WORDS == 0) d[0] = of_any(q);
    else d[0] = of_pieces(q);
  }

  /* One token per lane. */
  __device__ uint32_t of_any(const uint64_t *q) const {
    const int lane = threadIdx.x % WARP;
    uint32_t mine = HAMMING_NONE;
#pragma unroll 1
    for (int i = 0; i < WARP; i++) {
      const int b = __shfl_sync(ALL_LANES, block, i), n = __shfl_sync(ALL_LANES, tokens, i);
      uint32_t least = HAMMING_NONE;
      for (int t = lane; b >= 0 && t < n; t += WARP) {
        const uint64_t *hash = hashes_of(b) + (int64_t)t * v->words;
        uint32_t sum = 0;
        for (int w = 0; w < v->words; w++) sum += hamming(hash[w], q[w]);
        least = min(least, sum);
      }
      least = __reduce_min_sync(ALL_LANES, least);
      if (i == lane) mine = least;
    }
    return mine;
  }

  /* The nearest token of one piece of 16 bytes; its first token is number `token` of n. */
  static __device__ __forceinline__ uint32_t of_piece(const uint4 &x, const uint64_t *q,
                                                      int token, int n) {
    const uint64_t low = word_of(x.x, x.y), high = word_of(x.z, x.w);
    if (WORDS == 2)
      return token < n ? hamming(low, q[0]) + hamming(high, q[1]) : HAMMING_NONE;
    return min(token < n ? hamming(low, q[0]) : HAMMING_NONE,
               token + 1 < n ? hamming(high, q[0]) : HAMMING_NONE);
  }

  __device__ __forceinline__ uint32_t of_pieces(const uint64_t *q_) const {
    constexpr int EACH = 2 / (WORDS > 0 ? WORDS : 1); /* tokens per piece */
    const int lane = threadIdx.x % WARP, group = lane / LANES;
    const int pieces = v->tokens / EACH;
    const uint64_t q[2] = {q_[0], WORDS > 1 ? q_[1] : 0};
    uint32_t best[LANES];
#pragma unroll
    for (int r = 0; r < LANES; r++) best[r] = HAMMING_NONE;
#pragma unroll 1
    for (int piece = lane % LANES; piece < pieces; piece += LANES) {
#pragma unroll
      for (int r0 = 0; r0 < LANES; r0 += 8) {
        uint4 x[8];
#pragma unroll
        for (int r = 0; r < 8; r++) {
          const int b = __shfl_sync(ALL_LANES, block, (r0 + r) * PER + group);
          x[r] = make_uint4(0, 0, 0, 0);
          if (b >= 0) x[r] = __ldcs((const uint4 *)hashes_of(b) + piece);
        }
#pragma unroll
        for (int r = 0; r < 8; r++) {
          const int n = __shfl_sync(ALL_LANES, tokens, (r0 + r) * PER + group);
          best[r0 + r] = min(best[r0 + r], of_piece(x[r], q, piece * EACH, n));
        }
      }
    }
    /* best[r] of this lane is of block r * PER + group: finds the least over LANES lanes. */
#pragma unroll
    for (int s = LANES / 2; s > 0; s /= 2)
#pragma unroll
      for (int r = 0; r < LANES / 2; r++) {
        if (r >= s) break;
        const uint32_t keep = lane & s ? best[r + s] : best[r];
        const uint32_t send = lane & s ? best[r] : best[r + s];
        best[r] = min(keep, __shfl_xor_sync(ALL_LANES, send, s));
      }
    const uint32_t mine = __shfl_sync(ALL_LANES, best[0], lane % PER * LANES + lane / PER);
    return block >= 0 ? mine : HAMMING_NONE;
  }
};

}  // namespace kvl

#endif
