/* What the kernels over paged KV memory share: the walk from a key's number to its row in
 * the cache, tiles of ragged query rows, asynchronous 16-byte copies into shared memory, and
 * the 16-bit tensor-core instructions. */
#ifndef KVL_CUDA_PAGED_CUH
#define KVL_CUDA_PAGED_CUH

#include "common.cuh"

namespace kvl {

/* How many of 0 ... n-1 satisfy `holds`, which is true up to some index and false after it.
 * All threads of the block call it and get the same answer; every round narrows the range
 * by the block's size, so 128 threads need two rounds up to 16384. */
template <class F> __device__ __forceinline__ int prefix_count(int n, F holds) {
  int low = 0;
  while (n > 0) {
    int step = (n + blockDim.x - 1) / blockDim.x;
    int last = min((int)(threadIdx.x + 1) * step, n) - 1;   /* of this thread's stretch */
    bool whole = (int)threadIdx.x * step < n && holds(low + last);
    int full = min(__syncthreads_count(whole) * step, n);
    low += full;
    n = min(step - 1, n - full);   /* the end of the next stretch is known to be false */
  }
  return low;
}

/* A key's K row (elements from the cache's start) and its position in the sequence. */
struct paged_row {
  int64_t offset;
  int position;        /* -1: no key, whatever memory lies there */
};

/* Where a key lies: token of a physical block, of whatever number the table has. */
struct paged_block {
  int physical, position, token;
};

/* The keys of a sequence, or of its selected blocks, numbered from 0 in ascending position.
 * `keys` is how many numbers there may be: a selection can end before. */
struct paged_keys {
  const kvl_paged_attention_args &a;
  const int32_t *table;               /* of this sequence */
  int64_t list, slot_list;            /* where its selection, and its slots, begin */
  int64_t block_stride, head_offset, blocks;
  int block_size, head_dim, begin, end;   /* positions begin ... end-1 are seen */
  int keys;

  __device__ paged_keys(const kvl_paged_attention_args &args, int64_t seq, int kv_head,
                        int begin_, int end_)
      : a(args), table(a.tables + seq * a.max_blocks), list(0), slot_list(0),
        blocks(a.cache.blocks), block_size(a.cache.block_size), head_dim(a.cache.head_dim),
        begin(begin_) {
    block_stride = 2 * (int64_t)a.cache.kv_heads * block_size * head_dim;
    head_offset = (int64_t)kv_head * block_size * head_dim;
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
  __device__ int64_t to_value() const { return block_stride / 2; }

  /* Finds a key's block, without waiting for what the table says of it. entry is
   * key / block_size. */
  __device__ paged_block look_up(int key, int entry) const {
    const paged_block none = {-1, -1, 0};
    if (key >= keys) return none;
    const int token = key - entry * block_size;
    int block = entry;
    if (a.selection) {
      block = a.selection[list + entry];
      if ((unsigned)block >= (unsigned)blocks_seen()) return none;   /* past its last one */
    }
    return {a.slots ? a.slots[slot_list + entry] : table[block], block * block_size + token,
            token};
  }
  /* Its row, whether the key is seen or not; position -1: there is no block. */
  __device__ paged_row row_of(const paged_block &b) const {
    if (b.physical < 0 || b.physical >= blocks) return {0, -1};   /* no slot, broken table */
    return {b.physical * block_stride + head_offset + (int64_t)b.token * head_dim, b.position};
  }
  __device__ paged_row find(int key) const {
    paged_row row = row_of(look_up(key, key / block_size));
    if (row.position < begin || row.position >= end) row.position = -1;
    return row;
  }
  /* A bit for each of `count` keys from a row of one block on: is it seen? */
  __device__ unsigned seen(const paged_row &row, int count) const {
    if (row.position < 0) return 0;
    const int low = min(max(begin - row.position, 0), count);
    const int high = min(max(end - row.position, 0), count);
    return (1u << high) - (1u << min(low, high));
  }
};

/* The same for a block of threads that walks all of them: `keys` is exact, and the keys
 * before number `first` lie before `begin`. */
struct paged_walk : paged_keys {
  int listed;                         /* selected blocks that begin before `end` */
  int first;

  /* All threads of the block call this: it searches the selection together. */
  __device__ paged_walk(const kvl_paged_attention_args &args, int64_t seq, int kv_head,
                        int end_, int begin_ = 0)
      : paged_keys(args, seq, kv_head, max(begin_, 0), end_), listed(0), first(begin) {
    if (!a.selection) return;
    const int32_t *selection = a.selection + list;
    const int seen = blocks_seen(), before = begin / block_size;
    listed = prefix_count((int)a.max_selected, [=](int i) {
      return (unsigned)selection[i] < (unsigned)seen;
    });
    keys = listed * block_size;
    first = begin == 0 ? 0 : block_size * prefix_count(listed, [=](int i) {
      return selection[i] < before;
    });
  }
};

/* The first position that a query at `position` sees. */
__device__ __forceinline__ int window_begin(const kvl_paged_attention_args &a, int position) {
  return a.window > 0 ? max(position - a.window + 1, 0) : 0;
}

/* ---- query tiles ------------------------------------------------------------------------ */

/* The tile of query tokens that block `index` of the grid takes: the tiles of sequence s
 * are numbered from starts[s] / tokens_tile + s on, which leaves room for its ragged end
 * and needs no scan. Returns the sequence, or -1 where there is nothing to do. */
struct query_tile {
  int64_t seq, token0;
  int tokens, position0;   /* position of token0; negative when q has more rows than keys */
};
__device__ __forceinline__ query_tile find_tile(const kvl_paged_attention_args &a,
                                                int64_t index, int tokens_tile) {
  query_tile t = {-1, 0, 0, 0};
  int before = prefix_count((int)a.seqs, [&](int s) {
    return (int64_t)(a.starts[s] / tokens_tile) + s <= index;
  });
  if (before == 0) return t;
  int s = before - 1, start = a.starts[s], end = a.starts[s + 1];
  int64_t token = start + (index - (start / tokens_tile + s)) * tokens_tile;
  if (token >= end) return t;
  t.seq = s;
  t.token0 = token;
  t.tokens = (int)min((int64_t)tokens_tile, end - token);
  t.position0 = a.lens[s] - (end - (int)token);
  return t;
}

/* ---- shared memory --------------------------------------------------------------------- */

/* Copy 16 bytes into shared memory, past L1; zeros when `valid` is false. */
__device__ __forceinline__ void copy_async(uint32_t shared, const void *global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Wait until at most N of this thread's groups are under way. */
template <int N> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

/* Where 16-byte piece `piece` of row `row` lies in a tile of rows of PIECES pieces. The
 * low three bits are mixed with the row so that eight rows of one column, which ldmatrix
 * reads at once, lie in different banks. PIECES is a multiple of 8. */
template <int PIECES> __device__ __forceinline__ uint32_t tile_byte(int row, int piece) {
  return (uint32_t)(row * PIECES + (piece ^ (row & 7))) * 16;
}
/* Pieces a tile's row takes for up to D 16-bit numbers. */
template <int D> constexpr int TILE_PIECES = (D / 8 + 7) / 8 * 8;

/* ---- tensor cores ---------------------------------------------------------------------- */

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}

/* c[16 x 8] += a[16 x 16] b[16 x 8], fp32 sums. In a warp, lane l has rows l/4 and l/4 + 8
 * and columns 2 (l%4), +1 of c: c[0..1] of the first row, c[2..3] of the second. */
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1, __half) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1, __nv_bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack2(float low, float high, __half) {
  __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&x);
}
__device__ __forceinline__ uint32_t pack2(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&x);
}

__device__ __forceinline__ float2 unpack2(uint32_t x, __half) {
  return __half22float2(*reinterpret_cast<__half2 *>(&x));
}
__device__ __forceinline__ float2 unpack2(uint32_t x, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&x));
}

/* ---- numbers --------------------------------------------------------------------------- */

/* Four sums over LANES lanes each; a lane gets the one numbered by its two top bits, with
 * 5 shuffles in place of 16. */
template <int LANES>
__device__ __forceinline__ float sum_of_four(const float (&x)[4], int lane) {
  bool high = lane & (LANES / 2), odd = lane & (LANES / 4);
  float keep0 = high ? x[2] : x[0], keep1 = high ? x[3] : x[1];
  keep0 += __shfl_xor_sync(ALL_LANES, high ? x[0] : x[2], LANES / 2);
  keep1 += __shfl_xor_sync(ALL_LANES, high ? x[1] : x[3], LANES / 2);
  float sum = odd ? keep1 : keep0;
  sum += __shfl_xor_sync(ALL_LANES, odd ? keep0 : keep1, LANES / 4);
  return warp_sum<LANES / 4>(sum);
}

/* Four maxima over the lanes' two top bits; a lane gets the one numbered by its own. */
template <int LANES>
__device__ __forceinline__ float max_of_four(const float (&x)[4], int lane) {
  bool high = lane & (LANES / 2), odd = lane & (LANES / 4);
  float keep0 = high ? x[2] : x[0], keep1 = high ? x[3] : x[1];
  keep0 = fmaxf(keep0, __shfl_xor_sync(ALL_LANES, high ? x[0] : x[2], LANES / 2));
  keep1 = fmaxf(keep1, __shfl_xor_sync(ALL_LANES, high ? x[1] : x[3], LANES / 2));
  float other = __shfl_xor_sync(ALL_LANES, odd ? keep0 : keep1, LANES / 4);
  return fmaxf(odd ? keep1 : keep0, other);
}

__device__ __forceinline__ float load_any(const void *p, int dtype, int64_t at) {
  if (dtype == KVL_DTYPE_F32) return ((const float *)p)[at];
  if (dtype == KVL_DTYPE_F16) return to_float(((const __half *)p)[at]);
  return to_float(((const __nv_bfloat16 *)p)[at]);
}

__device__ __forceinline__ float exp2_fast(float x) {   /* 2 ulp; exp2(-inf) = 0 */
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

/* Softmax in base 2: `shift` is the running maximum, or 0 while nothing was seen, so that
 * exp2(-inf - shift) is 0 and never NaN. */
__device__ __forceinline__ float finite_shift(float m) { return m == -INFINITY ? 0.f : m; }

/* Of two rows a thread has elements 0, 1 and 2, 3 of each tile of an mma's result. */
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
/* Scores to weights, which are added to the rows' sums. */
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

/* out += P V of 16 rows: their weights of 8 * KEYS8 keys, and V of these, which lie in a tile
 * of shared memory from row `first` on. */
template <class T, int PIECES, int KEYS8, int DIMS8>
__device__ __forceinline__ void add_values(float (&out)[DIMS8][4], const float (&s)[KEYS8][4],
                                           uint32_t v_at, int first, int lane) {
#pragma unroll
  for (int k = 0; k < KEYS8 / 2; k++) {
    /* The scores' layout is what the next mma wants of its left side. */
    const uint32_t p[4] = {
        pack2(s[2 * k][0], s[2 * k][1], T()), pack2(s[2 * k][2], s[2 * k][3], T()),
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

/* tanh with a relative error of about 1e-6: tanh.approx is off by 5e-4, which a cap of 50
 * would make 0.02 of a score. */
__device__ __forceinline__ float tanh_fast(float x) {
  if (fabsf(x) < 0.25f) {
    float y = x * x;
    return x + x * y * (-1.f / 3 + y * (2.f / 15 + y * (-17.f / 315)));
  }
  return 1.f - __fdividef(2.f, exp2_fast(2.f * LOG2E * x) + 1.f);
}

/* From q k to a score in base 2, before ALiBi: scaled, and capped where cap is not 0. */
struct score_rule {
  float scale, cap;
  __device__ explicit score_rule(const kvl_paged_attention_args &a)
      : scale(a.soft_cap > 0.f ? a.scale / a.soft_cap : a.scale * LOG2E),
        cap(a.soft_cap * LOG2E) {}
  __device__ float operator()(float dot) const {
    return cap == 0.f ? dot * scale : cap * tanh_fast(dot * scale);
  }
};

/* A 32-bit pair of neighbours of a row of q, or 0 outside of it. */
template <class T>
__device__ __forceinline__ uint32_t load_pair(const T *row, int at, int head_dim) {
  return row && at < head_dim ? *reinterpret_cast<const uint32_t *>(row + at) : 0u;
}

/* Kernels that are to run side by side on an SM want all of its shared memory set up as
 * such. */
template <auto kernel> int prefer_shared(const kvl_cuda_queue *q) {
  static unsigned preferred = 0;   /* one bit a device; setting it twice does no harm */
  unsigned bit = 1u << (q->device & 31);
  if (preferred & bit) return KVL_OK;
  int status = kvl__cuda_check(cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  if (status == KVL_OK) preferred |= bit;
  return status;
}

/* Dynamic shared memory past 48 KiB has to be asked for, once per kernel and device. */
template <auto kernel> int allow_shared(const kvl_cuda_queue *q, int bytes) {
  static unsigned allowed = 0;
  unsigned bit = 1u << (q->device & 31);
  if (bytes <= 48 << 10 || (allowed & bit)) return KVL_OK;
  int status = kvl__cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (status == KVL_OK) allowed |= bit;
  return status;
}

}  // namespace kvl

#endif
