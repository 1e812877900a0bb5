/* Attention over listed tokens: the source of keys, and how thread blocks share a list.
 *
 * A thread block takes one token of q, one KV head and some heads of its group. When there are
 * few tokens, up to CLUSTER_MOST blocks share a list. They form a cluster and join their partial
 * softmaxes through each other's shared memory, with no workspace and no second kernel. */
#ifndef KVL_CUDA_LISTED_CUH
#define KVL_CUDA_LISTED_CUH

#include "args/attention.h"
#include "cuda/attention/hook.cuh"
#include "cuda/attention/paged_output.cuh"
#include "cuda/divide.cuh"

namespace kvl {

struct listed_plan {
  uint8_t *notes; /* of rows to mend, or NULL: with a hook and 16-bit queries */
  divisor block;  /* tokens per block */
  divisor splits; /* how many thread blocks share a list */
  int subgroups;  /* how many thread blocks share a group of heads */

  /* What this block takes: a token of q, a part of its list, a KV head, heads of its group. */
  __device__ int64_t token() const { return splits.quotient(blockIdx.x); }
  __device__ int split() const {
    return blockIdx.x - splits.quotient(blockIdx.x) * splits.by;
  }
  __device__ int kv_head() const {
    return subgroups == 1 ? blockIdx.y : blockIdx.y / (uint32_t)subgroups;
  }
  __device__ int subgroup() const { return blockIdx.y - kv_head() * subgroups; }
};

struct plain_divisor { /* where speed does not matter */
  uint32_t by;
  __device__ uint32_t quotient(uint32_t x) const { return x / by; }
};

/* The tokens that a row of q lists, numbered by their entry. */
template <class By = divisor> struct listed_keys {
  const kvl_paged_attention_args &a;
  const int32_t *list, *slots, *table; /* slots: or NULL */
  By block;                            /* tokens per block */
  int kv_head, keys;
  query_sight sight;

  __device__ listed_keys(const kvl_paged_attention_args &args, const By &by, int64_t token,
                         int head)
      : a(args), block(by), kv_head(head), keys((int)args.max_selected), sight(args, token) {
    const int64_t places = a.slot_heads;
    list = list_of(a, token, head);
    slots = a.slots ? a.slots + (token * places + (places > 1 ? head : 0)) * a.max_selected
                    : nullptr;
    table = a.tables + max(sight.seq, (int64_t)0) * a.max_blocks;
    sight.limit = (int)min((int64_t)sight.limit, a.max_blocks * block.by - 1);
    if (sight.seq < 0) keys = 0;
  }
  static __device__ const int32_t *list_of(const kvl_paged_attention_args &a, int64_t token,
                                           int head) {
    const int64_t lists = a.selection_heads;
    return a.listed + (token * lists + (lists > 1 ? head : 0)) * a.max_selected;
  }
  __device__ int64_t to_value() const { return kvl__to_value(&a.cache, kv_head); }

  /* Loads entry `key` without waiting for it; and the index in a loaded entry, -1 if the
   * row sees no such token. */
  __device__ int entry_of(int key) const { return key < keys ? list[key] : -1; }
  __device__ int token_of(int entry) const { return sight.sees(a, entry) ? entry : -1; }
  /* Loads its block from the table, or its place (block * block_size + offset) from its
   * slot. Unchecked, without waiting for the value. */
  __device__ int said_of(int key, int index) const {
    return index < 0 ? -1 : slots ? slots[key] : table[block.quotient(index)];
  }
  /* Its block, -1 if that does not exist, and its offset there. */
  __device__ void locate(int index, int said, int *physical, int *token) const {
    const int at = slots ? said : index, in = (int)block.quotient((uint32_t)max(at, 0));
    *token = at - in * (int)block.by;
    *physical = slots && said >= 0 ? in : said;
    if (*physical < 0 || *physical >= a.cache.blocks) *physical = -1;
  }
  /* The offset of its row from the first row of the cache, in units of row_unit bytes. A
   * unit is a row, unless there are scales behind the rows of each strip. There must be a
   * block. */
  template <bool PACKS> __device__ uint32_t row_unit() const {
    return PACKS ? 16 : a.cache.key.bytes_row;
  }
  template <bool PACKS> __device__ uint32_t row_place(int physical, int token) const {
    const kvl_pages &c = a.cache;
    if constexpr (!PACKS)
      return (physical * (uint32_t)kvl__strips(&c) + kv_head) * block.by + token;
    return physical * (uint32_t)(c.bytes_page / 16) + kv_head * (uint32_t)(c.key.bytes / 16) +
           token * (uint32_t)(c.key.bytes_row / 16);
  }
  /* Its row. */
  __device__ paged_row row_of(int index, int said) const {
    int physical, token;
    locate(index, said, &physical, &token);
    if (physical < 0) return {0, -1, 0};
    return {kvl__row_at(&a.cache, &a.cache.key, physical, kv_head, token), index, token};
  }
  __device__ paged_row find(int key) const {
    const int index = token_of(entry_of(key));
    return row_of(index, said_of(key, index));
  }
};

/* The tiles that a block takes of its list. */
struct listed_share {
  int begin, end;
  __device__ __forceinline__ listed_share(const listed_plan &plan, int64_t keys, int tile) {
    const int all = (int)((uint32_t)(keys + tile - 1) / tile);
    const int each = (int)plan.splits.quotient(all + plan.splits.by - 1);
    begin = min(plan.split() * each, all);
    end = min(begin + each, all);
  }
};

/* Has the L2 fetch this thread block's share of its sequence's table, in which it will look
 * up a few keys. In a decode step, the sequence is known before anything else. It is called
 * before wait_for_previous. */
__device__ __forceinline__ void ask_for_table(const kvl_paged_attention_args &a,
                                              const listed_plan &plan, int64_t token) {
  if (plan.splits.by == 1 || a.starts || a.slots || threadIdx.x != 0) return;
  const uint32_t blocks = (uint32_t)min(a.max_blocks, 8 * a.max_selected); /* enough */
  const uint32_t bytes = (plan.splits.quotient(blocks * 4) + 31) / 16 * 16;
  const char *const table = (const char *)(a.tables + token * a.max_blocks);
  const uint64_t from = (uint64_t)(table + plan.split() * (bytes - 16)) / 16 * 16;
  const uint64_t end = (uint64_t)(a.tables + a.seqs * a.max_blocks); /* nothing is past it */
  if (from + 16 <= end)
    prefetch_bulk((const char *)from, (uint32_t)min((uint64_t)bytes, (end - from) / 16 * 16));
}

/* ---- thread blocks that share a list ---------------------------------------------------- */

/* A barrier of the cluster, or of the block when that is all of it; and the address of
 * another block's shared memory. */
__device__ __forceinline__ void splits_sync(int splits) {
#if __CUDA_ARCH__ >= 900
  if (splits > 1) {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::
                     : "memory");
    return;
  }
#endif
  __syncthreads();
}
template <class P>
__device__ __forceinline__ const P *shared_of(const P *mine, int splits, int rank) {
#if __CUDA_ARCH__ >= 900
  if (splits > 1) {
    uint64_t other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(mine), "r"(rank));
    return (const P *)other;
  }
#endif
  return mine;
}

/* Joins the partial softmaxes of rows row0 ... row0 + count - 1 of [tokens, heads], and writes
 * them. All blocks that share the list call it, and each writes its part.
 *   states  (m, l)  [(r / R * W + w) * R + r % R] of row r and warp w
 *   sums    f32     the same, [.., D]; rotated: dim d is at d ^ (r % 8 * 8) */
template <int W, int R, int D, bool ROTATED, int THREADS>
__device__ __forceinline__ void join_listed(const kvl_paged_attention_args &a,
                                            const listed_plan &plan, int64_t row0, int count,
                                            const float2 *states, const float *sums,
                                            float value_scale) {
  const int splits = plan.splits.by, split = plan.split();
  splits_sync(splits);
  for (int i = (split * THREADS + (int)threadIdx.x) * 4; i < count * D;
       i += splits * THREADS * 4) {
    const int r = i / D, dim = i % D, first = r / R * W * R + r % R;
    if (dim >= a.cache.value.dim) continue;
    float m = -INFINITY, l = 0.f, x[4] = {};
    for (int s = 0; s < splits; s++) {
      const float2 *const other = shared_of(states, splits, s);
#pragma unroll
      for (int w = 0; w < W; w++) m = fmaxf(m, other[first + w * R].x);
    }
    for (int s = 0; s < splits; s++) {
      const float2 *const other = shared_of(states, splits, s);
      const float *const parts = shared_of(sums, splits, s);
#pragma unroll
      for (int w = 0; w < W; w++) {
        const float2 state = other[first + w * R];
        const float weight = exp2_fast(state.x - finite_shift(m));
        float part[4];
        load_floats(parts + (first + w * R) * D + (ROTATED ? dim ^ (r & 7) * 8 : dim), part);
        l += weight * state.y;
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] += weight * part[e];
      }
    }
    if (plan.notes) { /* see paged_mend.cuh */
      if (dim == 0) plan.notes[row0 + r] = l != l;
      if (!writes_row(a, l != l)) continue;
    }
    row_end end = end_row(a, row0 + r, m, l);
    end.scale *= value_scale;
    write_row(a, end, row0 + r, dim, x);
  }
  splits_sync(splits); /* others may still read this block's memory */
}

}  // namespace kvl

#endif
