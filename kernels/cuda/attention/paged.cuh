/* What the kernels over paged KV memory share: finding a key's row in the cache by its
 * number, tiles of ragged query rows, and the steps of a softmax in base 2. */
#ifndef KVL_CUDA_PAGED_CUH
#define KVL_CUDA_PAGED_CUH

#include "args/attention.h"
#include "cuda/mma.cuh"
#include "cuda/programmatic.cuh"
#include "cuda/strip.cuh"

namespace kvl {

/* How many of 0 ... n-1 satisfy `holds`, which is true up to some index and false after it.
 * All threads of the block call it and get the same answer; every round narrows the range
 * by the block's size, so 128 threads need two rounds up to 16384. */
template <class F> __device__ __forceinline__ int prefix_count(int n, F holds) {
  int low = 0;
  while (n > 0) {
    int step = (n + blockDim.x - 1) / blockDim.x;
    int last = min((int)(threadIdx.x + 1) * step, n) - 1; /* the stretch's last index */
    bool whole = (int)threadIdx.x * step < n && holds(low + last);
    int full = min(__syncthreads_count(whole) * step, n);
    low += full;
    n = min(step - 1, n - full); /* the last index of the next stretch is known to be false */
  }
  return low;
}

/* A key's row of K (in bytes from the cache's start), its index in the sequence and its
 * token in the block. */
struct paged_row {
  int64_t offset;
  int index; /* -1: there is no key, whatever that memory holds */
  int token;
  /* Where the scales of a packed row begin, in bytes from the cache's start. */
  __device__ int64_t scales(const kvl_strips &of) const {
    return offset + of.scales + (int64_t)token * (2 * of.groups - of.bytes_row);
  }
};

/* Where a key lies: its token in a physical block; the block number comes unchecked. */
struct paged_block {
  int physical, index, token;
};

/* The keys of a sequence, or of its selected blocks, numbered from 0 by ascending index.
 * `keys` is the most there may be: a selection can end before. */
struct paged_keys {
  const kvl_paged_attention_args &a;
  const int32_t *table;    /* of this sequence */
  int64_t list, slot_list; /* where its selection begins, and its slots */
  int64_t blocks;
  int kv_head, block_size, begin, end; /* only indices begin ... end-1 are seen */
  int keys;

  __device__ paged_keys(const kvl_paged_attention_args &args, int64_t seq, int kv_head_,
                        int begin_, int end_)
      : a(args), table(a.tables + seq * a.max_blocks), list(0), slot_list(0),
        blocks(a.cache.blocks), kv_head(kv_head_), block_size(a.cache.block_size),
        begin(begin_) {
    end = (int)min((int64_t)max(end_, 0), a.max_blocks * block_size);
    keys = end;
    if (a.selection) {
      int64_t row = seq * a.selection_heads + (a.selection_heads > 1 ? kv_head : 0);
      list = row * a.max_selected;
      slot_list = (seq * a.slot_heads + (a.slot_heads > 1 ? kv_head : 0)) * a.max_selected;
      keys = (int)min((int64_t)blocks_seen(), a.max_selected) * block_size;
    }
  }
  __device__ int blocks_seen() const {
    return (int)((end + (unsigned)block_size - 1) / (unsigned)block_size);
  }
  /* Adding this to a K row's offset gives its V row. */
  __device__ int64_t to_value() const { return kvl__to_value(&a.cache, kv_head); }

  /* Finds a key's block, without waiting for the value in the table. entry is
   * key / block_size. EARLY: see read_early; there must be no selection and no slots then. */
  template <bool EARLY = false> __device__ paged_block look_up(int key, int entry) const {
    const paged_block none = {-1, -1, 0};
    if (key >= keys) return none;
    const int token = key - entry * block_size;
    int block = entry;
    if (a.selection) {
      block = a.selection[list + entry];
      if ((unsigned)block >= (unsigned)blocks_seen()) return none; /* past the last block */
    }
    const int physical = a.slots ? a.slots[slot_list + entry]
                         : EARLY ? read_early(table + block)
                                 : table[block];
    return {physical, block * block_size + token, token};
  }
  /* The key's row, whether the key is seen or not; index -1: there is no block. */
  __device__ paged_row row_of(const paged_block &b) const {
    if (b.physical < 0 || b.physical >= blocks) return {0, -1, 0}; /* no slot, bad table */
    return {kvl__row_at(&a.cache, &a.cache.key, b.physical, kv_head, b.token), b.index,
            b.token};
  }
  __device__ paged_row find(int key) const {
    paged_row row = row_of(look_up(key, key / block_size));
    if (row.index < begin || row.index >= end) row.index = -1;
    return row;
  }
  /* For `count` keys of one block, from `row` on: bit i tells whether key i is seen. */
  __device__ unsigned seen(const paged_row &row, int count) const {
    if (row.index < 0) return 0;
    const int low = min(max(begin - row.index, 0), count);
    const int high = min(max(end - row.index, 0), count);
    return (1u << high) - (1u << min(low, high));
  }
};

/* The same for a thread block that walks over all keys: here `keys` is exact, and all keys
 * before number `first` have indices before `begin`. */
struct paged_walk : paged_keys {
  int listed; /* selected blocks that begin before `end` */
  int first;

  /* All threads of the block call this, as they search the selection together. */
  __device__ paged_walk(const kvl_paged_attention_args &args, int64_t seq, int kv_head,
                        int end_, int begin_ = 0)
      : paged_keys(args, seq, kv_head, max(begin_, 0), end_), listed(0), first(begin) {
    if (!a.selection) return;
    const int32_t *selection = a.selection + list;
    const int seen = blocks_seen(), before = begin / block_size;
    listed = prefix_count((int)a.max_selected,
                          [=](int i) { return (unsigned)selection[i] < (unsigned)seen; });
    keys = listed * block_size;
    first = begin == 0 ? 0 : block_size * prefix_count(listed, [=](int i) {
                               return selection[i] < before;
                             });
  }
};

/* The first index that the query at `index` sees. */
__device__ __forceinline__ int window_begin(const kvl_paged_attention_args &a, int index) {
  return kvl__window_begin(a.window, index);
}

/* The first index that a draft tree says something about; without one, INT_MAX. */
__device__ __forceinline__ int tree_begin(const kvl_paged_attention_args &a, int length) {
  return a.tree ? max(length - 64 * a.tree_words, 0) : INT_MAX;
}

/* Does the tree show row `token` of q the key at `index`, tree_begin or later? */
__device__ __forceinline__ bool tree_shows(const kvl_paged_attention_args &a, int64_t token,
                                           int length, int index) {
  const int back = length - 1 - index;
  return a.tree[token * a.tree_words + back / 64] >> (back % 64) & 1;
}

/* Which keys of its sequence a row of q sees: indices low ... limit, except those that a
 * draft tree hides. */
struct query_sight {
  int64_t token, seq; /* seq -1: no sequence has the row */
  int length, at, low, limit;

  __device__ query_sight(const kvl_paged_attention_args &a, int64_t token_)
      : token(token_), seq(token_) {
    int after = 0; /* new tokens behind this one */
    if (a.starts) {
      int64_t begin = 0, end = a.seqs + 1; /* how many starts are not behind the token? */
      while (begin < end) {
        const int64_t middle = (begin + end) / 2;
        if (a.starts[middle] <= token) begin = middle + 1;
        else end = middle;
      }
      seq = begin <= a.seqs ? begin - 1 : -1;
      if (seq < 0) return;
      after = a.starts[begin] - (int)token - 1;
    }
    length = a.lens[seq];
    at = length - 1 - after;
    low = window_begin(a, at);
    limit = a.causal ? at : length - 1;
  }
  __device__ bool sees(const kvl_paged_attention_args &a, int index) const {
    if (index < low || index > limit) return false;
    return index < tree_begin(a, length) || tree_shows(a, token, length, index);
  }
};

/* ---- query tiles ----------------------------------------------------------------------- */

/* The tile of query tokens that block `number` of the grid takes. The tiles of sequence s
 * have numbers from starts[s] / tokens_tile + s on, which leaves room for its partial last
 * tile and needs no scan. seq is the sequence, or -1 when there is nothing to do. */
struct query_tile {
  int64_t seq, token0;
  int tokens, index0; /* of token0; negative when q has more rows than there are keys */
};
__device__ __forceinline__ query_tile find_tile(const kvl_paged_attention_args &a,
                                                int64_t number, int tokens_tile) {
  query_tile t = {-1, 0, 0, 0};
  int before = prefix_count(
      (int)a.seqs, [&](int s) { return (int64_t)(a.starts[s] / tokens_tile) + s <= number; });
  if (before == 0) return t;
  int s = before - 1, start = a.starts[s], end = a.starts[s + 1];
  int64_t token = start + (number - (start / tokens_tile + s)) * tokens_tile;
  if (token >= end) return t;
  t.seq = s;
  t.token0 = token;
  t.tokens = (int)min((int64_t)tokens_tile, end - token);
  t.index0 = a.lens[s] - (end - (int)token);
  return t;
}

/* ---- softmax --------------------------------------------------------------------------- */

__device__ __forceinline__ float exp2_fast(float x) { /* 2 ulp; exp2(-inf) = 0 */
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

/* Softmax in base 2: `shift` is the running maximum, or 0 while nothing was seen, so that
 * exp2(-inf - shift) is 0 and never NaN. */
__device__ __forceinline__ float finite_shift(float m) { return m == -INFINITY ? 0.f : m; }

/* Scales two rows: of each tile of an mma's result a thread has elements 0, 1 of one row and
 * 2, 3 of the other. */
template <int N>
__device__ __forceinline__ void scale_rows(float (&x)[N][4], float by0, float by1) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    x[n][0] *= by0;
    x[n][1] *= by0;
    x[n][2] *= by1;
    x[n][3] *= by1;
  }
}
/* Turns scores into weights, and adds these to the rows' sums. */
template <int N>
__device__ __forceinline__ void weigh_rows(float (&s)[N][4], float shift0, float shift1,
                                           float &sum0, float &sum1) {
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      sum0 += s[n][c] = exp2_fast(s[n][c] - shift0);
      sum1 += s[n][c + 2] = exp2_fast(s[n][c + 2] - shift1);
    }
}

/* Raises two rows' maxima to those of new scores (each lane knows its own), and rescales
 * their sums. */
template <int N>
__device__ __forceinline__ void raise_maxima(float top0, float top1, float &m0, float &m1,
                                             float &l0, float &l1, float (&out)[N][4]) {
  top0 = warp_max<4>(top0);
  top1 = warp_max<4>(top1);
  if (!__any_sync(ALL_LANES, top0 > m0 || top1 > m1)) return;
  const float down0 = exp2_fast(m0 - finite_shift(top0));
  const float down1 = exp2_fast(m1 - finite_shift(top1));
  m0 = top0;
  m1 = top1;
  l0 *= down0;
  l1 *= down1;
  scale_rows(out, down0, down1);
}

/* out += P V for 16 rows: s has their weights of 8 * KEYS8 keys, whose V is in a tile of
 * shared memory from row `first` on. */
template <class T, int PIECES, int KEYS8, int DIMS8>
__device__ __forceinline__ void add_values(float (&out)[DIMS8][4], const float (&s)[KEYS8][4],
                                           uint32_t v_at, int first, int lane) {
#pragma unroll
  for (int k = 0; k < KEYS8 / 2; k++) {
    /* The scores already have the layout of the next mma's left operand. */
    const uint32_t p[4] = {pack2(s[2 * k][0], s[2 * k][1], T()),
                           pack2(s[2 * k][2], s[2 * k][3], T()),
                           pack2(s[2 * k + 1][0], s[2 * k + 1][1], T()),
                           pack2(s[2 * k + 1][2], s[2 * k + 1][3], T())};
#pragma unroll
    for (int n = 0; n < DIMS8 / 2; n++) {
      uint32_t b[4];
      load_matrices_transposed(
          b, v_at + tile_byte<PIECES>(first + k * 16 + lane % 16, 2 * n + lane / 16));
      mma(out[2 * n], p, b[0], b[1], T());
      mma(out[2 * n + 1], p, b[2], b[3], T());
    }
  }
}

/* tanh with a relative error of about 1e-6. tanh.approx has an error of 5e-4, which a cap of
 * 50 would turn into 0.02 of a score. */
__device__ __forceinline__ float tanh_fast(float x) {
  if (fabsf(x) < 0.25f) {
    float y = x * x;
    return x + x * y * (-1.f / 3 + y * (2.f / 15 + y * (-17.f / 315)));
  }
  return 1.f - __fdividef(2.f, exp2_fast(2.f * LOG2E * x) + 1.f);
}

/* Turns q k into a score in base 2, before ALiBi: scaled, and capped unless cap is 0. */
struct score_rule {
  float scale, cap;
  __device__ explicit score_rule(const kvl_paged_attention_args &a)
      : scale(a.soft_cap > 0.f ? a.scale / a.soft_cap : a.scale * LOG2E),
        cap(a.soft_cap * LOG2E) {}
  __device__ float operator()(float dot) const {
    return cap == 0.f ? dot * scale : cap * tanh_fast(dot * scale);
  }
};

/* Two 16-bit neighbours of a row of q as one 32-bit word, or 0 outside of the row. */
template <class T>
__device__ __forceinline__ uint32_t load_pair(const T *row, int at, int head_dim) {
  return row && at < head_dim ? *reinterpret_cast<const uint32_t *>(row + at) : 0u;
}

/* Sixteen dims of two rows of q, as the left operand of an mma. */
template <class T>
__device__ __forceinline__ void load_fragment(uint32_t (&x)[4], const T *q0, const T *q1,
                                              int at, int head_dim) {
  x[0] = load_pair(q0, at, head_dim);
  x[1] = load_pair(q1, at, head_dim);
  x[2] = load_pair(q0, at + 8, head_dim);
  x[3] = load_pair(q1, at + 8, head_dim);
}

/* ---- numbers of 8 bits on the tensor cores, as f16 ------------------------------------- */

/* Every f8e4m3 and every int8 is an f16, too, so K and V become f16 on the way from shared
 * memory to the tensor cores, q is scaled by a power of two into f16's range, and P is f16.
 * ldmatrix moves pairs of bytes. Of a 16-byte piece lane l gets dims 4 (l%4) ... + 3 of a key,
 * but the mma expects 2 (l%4), + 1, + 8, + 9; so q's dims are permuted in the same way. Of V
 * (transposed) a lane gets two dims of two keys, and the columns of a piece's two mma are its
 * even dims and its odd dims. */

/* Adds RAISED to each of four int8, and returns the sums as f16: those of bytes 0, 1 and those
 * of bytes 2, 3; or, with ALTERNATE, of bytes 0, 2 and of bytes 1, 3. They are exact, because
 * the f16 with the high byte 0x64 is 1024 + its low byte. */
constexpr int RAISED = 1024 + 128;
template <class C, bool ALTERNATE = false>
__device__ __forceinline__ uint2 raised_bytes(uint32_t x) {
  static_assert(same<C, int8>, "the others have no such form");
  x ^= 0x80808080u; /* adds 128 to each */
  return make_uint2(__byte_perm(x, 0x64646464u, ALTERNATE ? 0x4240 : 0x4140),
                    __byte_perm(x, 0x64646464u, ALTERNATE ? 0x4341 : 0x4342));
}

/* Four numbers of 8 bits as f16, in the same order. */
template <class C, bool ALTERNATE = false>
__device__ __forceinline__ uint2 bytes_to_f16(uint32_t x) {
  if constexpr (same<C, f8e4m3>) {
    return halves_of(ALTERNATE ? __byte_perm(x, 0, 0x3120) : x);
  } else {
    uint2 y = raised_bytes<C, ALTERNATE>(x);
    asm("sub.f16x2 %0, %0, %1;" : "+r"(y.x) : "r"(0x64806480u)); /* RAISED */
    asm("sub.f16x2 %0, %0, %1;" : "+r"(y.y) : "r"(0x64806480u));
    return y;
  }
}

/* The n for which 2^n brings numbers up to `top` to about 2^14, by their exponents: exact. At
 * most 100, as 2^n has to be finite. */
__device__ __forceinline__ int f16_shift(float top) {
  int exponent = (int)(__float_as_uint(top) >> 23);
  return exponent == 255 ? 0 : min(127 + 14 - exponent, 100);
}

__device__ __forceinline__ float power_of_two(int n) { /* -126 ... 127 */
  return __int_as_float((127 + n) << 23);
}

/* Scales rows of q in place and turns them from T into f16. Returns the powers of two. */
template <class T, int K> __device__ __forceinline__ int2 rows_to_f16(uint32_t (&q)[K][4]) {
  float top[2] = {};
#pragma unroll
  for (int k = 0; k < K; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 x = unpack2(q[k][i], T());
      top[i % 2] = fmaxf(top[i % 2], fmaxf(fabsf(x.x), fabsf(x.y)));
    }
  const int2 shift = {f16_shift(warp_max<4>(top[0])), f16_shift(warp_max<4>(top[1]))};
  const float by[2] = {power_of_two(shift.x), power_of_two(shift.y)};
#pragma unroll
  for (int k = 0; k < K; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 x = unpack2(q[k][i], T());
      q[k][i] = pack2(x.x * by[i % 2], x.y * by[i % 2], __half());
    }
  return shift;
}

/* Dims 16 k ... + 15 of two rows of q, in the order in which the mma meets K's. */
template <bool F8, class T>
__device__ __forceinline__ void load_query(uint32_t (&x)[4], const T *q0, const T *q1, int k,
                                           int head_dim) {
  constexpr int SECOND = F8 ? 2 : 8, STEP = F8 ? 4 : 2; /* this lane's dims of 16 */
  const int dim = k * 16 + (int)threadIdx.x % 4 * STEP;
  x[0] = load_pair(q0, dim, head_dim);
  x[1] = load_pair(q1, dim, head_dim);
  x[2] = load_pair(q0, dim + SECOND, head_dim);
  x[3] = load_pair(q1, dim + SECOND, head_dim);
}

/* The dim of this lane's column `c` (0 or 1) of the n-th mma of P V. */
template <bool F8> __device__ __forceinline__ int dim_of(int n, int c) {
  const int j = threadIdx.x % 4;
  return F8 ? n / 2 * 16 + j * 4 + c * 2 + n % 2 : n * 8 + j * 2 + c;
}

}  // namespace kvl

#endif
