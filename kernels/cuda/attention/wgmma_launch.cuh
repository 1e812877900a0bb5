/* The host's side of paged_wgmma.cuh: which calls it takes, the shape of the kernel and the
 * plan of the work for a call, the map of the cache for TMA, and the launches. */
#ifndef KVL_CUDA_WGMMA_LAUNCH_CUH
#define KVL_CUDA_WGMMA_LAUNCH_CUH

#include "args/attention.h"
#include "cuda/launch.cuh"
#include "cuda/attention/paged_wgmma.cuh"
#include "cuda/attention/paged_mend.cuh"

namespace kvl {

/* Maps the cache as [strips of all blocks, block_size / 8, parts, 8, numbers], so that a box of
 * `groups` times eight tokens arrives as [groups, parts] atoms. `numbers` may be fewer than the
 * ATOM of a box: then the others are zeros. 8-bit numbers are not swizzled, and scales of packed
 * ones lie outside. */
template <class T, class shape>
int map_rows(const kvl_pages &c, int groups, int parts_, int numbers, CUtensorMap *map) {
  const cuuint64_t bytes = shape::BYTES ? 1 : 2, bytes_row = c.key.bytes_row;
  const cuuint64_t parts = parts_;
  const cuuint64_t dims[5] = {(cuuint64_t)numbers, 8, parts, (cuuint64_t)c.block_size / 8,
                              (cuuint64_t)c.blocks * kvl__strips(&c)};
  const cuuint64_t strides[4] = {bytes_row, bytes * shape::ATOM, 8 * bytes_row,
                                 (cuuint64_t)c.key.bytes};
  const cuuint32_t box[5] = {shape::ATOM, 8, (cuuint32_t)parts, (cuuint32_t)groups, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult r = encode_map()(
      map,
      shape::BYTES                ? CU_TENSOR_MAP_DATA_TYPE_UINT8
      : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      5, c.memory, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      shape::BYTES        ? CU_TENSOR_MAP_SWIZZLE_NONE
      : shape::ATOM == 64 ? CU_TENSOR_MAP_SWIZZLE_128B
                          : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? KVL_OK : kvl__cuda_check(cudaErrorInvalidValue);
}

/* The numbers of a row, with those that fill it up. */
inline int row_numbers(const kvl_pages &c) {
  return c.key.bytes_row * 8 / kvl__bits(c.codec);
}

/* Rows of fewer numbers than D have two maps: of all atoms but the last, and of the last, at the
 * end of which zeros arrive. Copies of single rows need no map. */
template <class T, class shape>
int map_cache(const kvl_pages &c, int groups, wgmma_maps *maps) {
  *maps = {};
  if (groups == 0) return KVL_OK;
  if (row_numbers(c) == shape::D)
    return map_rows<T, shape>(c, groups, shape::PARTS, shape::ATOM, &maps->rows);
  int status = map_rows<T, shape>(c, groups, 1, c.key.dim, &maps->last);
  if (shape::PARTS > 1 && status == KVL_OK)
    status = map_rows<T, shape>(c, groups, shape::PARTS - 1, shape::ATOM, &maps->rows);
  return status;
}

inline int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }

/* Whether TMA copies the cache in boxes of eight tokens or more. Otherwise it is copied row by
 * row. */
inline bool wgmma_boxes(const kvl_pages &c) {
  return c.block_size % 8 == 0 && !c.pinned && c.blocks > 0 &&
         c.blocks * kvl__strips(&c) <= INT_MAX && encode_map();
}

/* Without a bias, products are masked before they are scaled, so the scale has to be positive.
 * One new token of at most 16 heads a KV head is for paged_decode.cuh.
 * lua/kvlab/kernel/print/cuda_attention.lua relies on the rule for calls with a hook. */
inline bool wgmma_takes(const kvl_paged_attention_args &a, int device, bool hooked) {
  const kvl_pages &c = a.cache;
  if (!is_hopper_device(device) || a.dtype == KVL_DTYPE_F32) return false;
  if (c.codec != a.dtype && kvl__bits(c.codec) != 8) return false;
  const bool packs = kvl__packs(c.codec);
  if (!wgmma_boxes(c)) {
    if (packs && !hooked) return false;
    const int64_t most_rows = packs ? INT_MAX : UINT32_MAX;
    if (c.blocks * c.bytes_page / c.key.bytes_row >= most_rows)
      return false; /* more rows than a producer can number */
  }
  if (hooked) return a.starts || a.heads / c.kv_heads > 16;
  return (a.starts || a.tree || a.heads / c.kv_heads > 16) && a.scale > 1e-6f;
}
/* About how many tiles of tokens a call has. */
inline int64_t busy_entries(const kvl_paged_attention_args &a, int tokens_tile) {
  const int64_t full = (a.tokens + tokens_tile - 1) / tokens_tile;
  return full > a.seqs ? full : a.seqs;
}
/* Do the new tokens of a sequence fill at most so many query rows? */
inline bool few_rows(const kvl_paged_attention_args &a, int rows) {
  const int group = (int)(a.heads / a.cache.kv_heads);
  return group <= rows && busy_entries(a, a.starts ? rows / group : 1) == a.seqs;
}

/* How many lanes are best processed side by side: as many as leave few SMs without work.
 * The KV heads of a block are neighbours in memory, and are then read at about the same
 * time. */
inline int lanes_beside(int lanes, int sm_count) {
  int side = lanes;
  while (lanes % side || sm_count / side * side * 16 < sm_count * 15) side--;
  return side;
}

/* Uses up to 6% fewer shares if equal items are then not cut, or all cut in the same way,
 * because large partial results take long. */
inline int whole_shares(int shares, int64_t items) {
  for (int n = shares; n * 100 >= shares * 94; n--)
    if (items % n == 0 || n % items == 0) return n;
  return shares;
}

/* The device's L2 cache in bytes. */
inline int64_t l2_bytes(int device) {
  int bytes = 0;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device);
  return bytes;
}

/* Has a call a bias, besides a hook? */
inline bool wgmma_biased(const kvl_paged_attention_args &a) {
  return a.alibi || a.soft_cap > 0.f || a.tree;
}

/* Places the partial results of divided work; returns their bytes. */
template <class shape>
size_t place_parts(const kvl_paged_attention_args &a, wgmma_plan &plan, char *at) {
  plan.rows = (int)(a.tokens < plan.tokens_tile ? a.tokens : plan.tokens_tile) * plan.heads;
  /* A share reads at least 8 times the bytes of its partial result. For latents there is
   * no such minimum, because a tile takes long. */
  const int bytes = (shape::BYTES ? 2 : 4) * shape::KEYS; /* a tile's, for one dim */
  plan.least = shape::LATENTS ? 1 : (8 * 4 * plan.rows + bytes - 1) / bytes;
  const size_t parts = (size_t)2 * plan.shares * plan.side * plan.rows;
  plan.out = (float *)at;
  plan.lse = plan.out + parts * shape::D;
  plan.cuts = (wgmma_cut *)(plan.lse + parts);
  return parts * (shape::D + 1) * sizeof(float) +
         (size_t)plan.divided * plan.lanes * sizeof(wgmma_cut);
}

/* How many entries to divide after rounds of whole items: those that are left over, if SMs would
 * otherwise have no work for 3% of the time or more. 0 if items may differ much in length, for
 * then the last ones are short. */
inline int entries_left(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                        int64_t busy, int64_t room, int sm_count) {
  const int64_t items = busy * plan.lanes, left = items % sm_count;
  if (a.causal && !a.listed && room * a.seqs < 2 * a.tokens) return 0;
  if (left == 0 || (sm_count - left) * 32 < items) return 0;
  return ceil_div(left, plan.lanes);
}

/* Plans the work of a call; returns the bytes of its workspace, which must be 16-byte aligned
 * and may be NULL when only its size is asked for. */
template <class shape>
size_t plan_wgmma(const kvl_paged_attention_args &a, bool hooked, int device, int sm_count,
                  wgmma_plan &plan) {
  const int group = (int)(a.heads / a.cache.kv_heads);
  plan = {};
  plan.consumers = shape::CONSUMERS;
  int most_rows = shape::ROWS; /* of an item */
  const int subgroups = ceil_div(group, shape::ROWS);
  plan.group = group;
  plan.heads = short_divisor(ceil_div(group, subgroups));
  plan.last_heads = short_divisor(group - (subgroups - 1) * plan.heads);
  /* A consumer without rows would take part of the tensor cores' time. Few rows without a bias
   * wait for memory. */
  const bool narrows = !shape::LATENTS && (hooked || wgmma_biased(a));
  while (plan.consumers > 1 && (most_rows / plan.heads.by * plan.heads <= most_rows - 64 ||
                                (narrows && few_rows(a, most_rows - 64))))
    plan.consumers--, most_rows -= 64;
  plan.by_block = divisor(a.cache.block_size);
  /* A box lies in one share. */
  const int most_keys = shape::KEYS / shape::SHARES;
  const bool fills = shape::LATENTS || row_numbers(a.cache) == shape::D;
  plan.box = !wgmma_boxes(a.cache) ? 0
             : fills               ? common_divisor(a.cache.block_size, most_keys) / 8
                                   : 1;
  plan.fills = fills;
  const bool listed = shape::LATENTS && a.listed; /* a list is one token's */
  plan.tokens_tile = a.starts && !listed ? most_rows / plan.heads.by : 1;
  plan.by_tile = divisor(plan.tokens_tile);
  plan.by_subgroups = divisor(subgroups);
  plan.lanes = a.cache.kv_heads * subgroups;
  plan.by_lanes = divisor(plan.lanes);
  plan.entries = (int)(a.starts ? a.tokens / plan.tokens_tile + a.seqs : a.seqs);
  char *at = (char *)a.workspace;
  const size_t notes = note_bytes(a);
  plan.notes = (uint8_t *)at;
  at += notes;
  const int64_t busy = busy_entries(a, plan.tokens_tile);
  const int64_t room = listed ? a.max_selected
                              : (a.selection ? a.max_selected : a.max_blocks) *
                                    a.cache.block_size;
  if (busy * plan.lanes < 2 * sm_count || busy == a.seqs) {
    const bool beside = shape::LATENTS || few_rows(a, shape::ROWS);
    plan.side = beside ? lanes_beside(plan.lanes, sm_count) : 1;
    plan.by_side = divisor(plan.side);
    plan.shares = sm_count / plan.side;
    /* The tiles of one sequence have the same keys: with whole shares for each of them, these
     * keys are read at about the same time. */
    if (a.seqs == 1 && busy <= plan.shares / 4) plan.shares = plan.shares / busy * busy;
    if (shape::LATENTS) plan.shares = whole_shares(plan.shares, busy * plan.groups());
    const int64_t tiles = plan.entries * (room / shape::KEYS + 1) * plan.groups();
    if (tiles < plan.shares) plan.shares = (int)tiles;
    plan.divided = plan.entries;
    return notes + place_parts<shape>(a, plan, at);
  }
  /* Takes as many KV heads at once as half of the L2 holds, if these are enough work. */
  const int64_t bytes = room * 2 * a.cache.key.bytes_row;
  int64_t section = l2_bytes(device) / 2 / (bytes > 0 ? bytes : 1) * subgroups;
  const int64_t enough = (4 * sm_count + busy - 1) / busy;
  if (section < enough) section = enough;
  plan.section = (int)(section < plan.lanes ? section : plan.lanes);
  size_t parts = 0;
  plan.divided = entries_left(a, plan, busy, room, sm_count);
  if (plan.divided > 0) {
    plan.side = 1, plan.shares = sm_count;
    parts = place_parts<shape>(a, plan, at);
  }
  if (plan.section == plan.lanes) return notes + parts;
  plan.counter = (int *)(at + parts);
  return notes + parts + sizeof(int);
}

/* Joins the partial results of divided work. Rows whose sums are not finite are computed again,
 * or only noted. */
int launch_wgmma_combine(const kvl_paged_attention_args &a, const wgmma_plan &plan,
                         bool notes, const kvl_cuda_queue *q);

/* Launches a call that is planned. start(grid, programmatic, map) launches the attention. With a
 * hook, noted rows are left to the caller. */
template <class T, class shape, class F>
int launch_planned(const kvl_paged_attention_args &a, const wgmma_plan &plan, bool hooked,
                   const kvl_cuda_queue *q, F start) {
  wgmma_maps map;
  int status = map_cache<T, shape>(a.cache, plan.box, &map);
  if (status < 0) return status;
  if (plan.counter)
    status = kvl__cuda_check(cudaMemsetAsync(plan.counter, 0, sizeof(int), q->stream));
  if (status < 0) return status;
  status = start(plan.blocks(q->sm_count), !plan.has_whole(), map);
  if (status == KVL_OK && plan.divided > 0)
    status = launch_wgmma_combine(a, plan, hooked || plan.has_whole(), q);
  if (status < 0 || hooked || !plan.has_whole()) return status;
  if (shape::F8 && a.dtype == KVL_DTYPE_BF16) return launch_mend<__nv_bfloat16, f8e4m3>(a, q);
  return launch_mend<T, typename shape::template cache<T>>(a, q);
}

template <class T, class shape, bool BIASED>
int launch_shape(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  constexpr auto kernel = paged_wgmma<T, shape, BIASED>;
  wgmma_plan plan;
  plan_wgmma<shape>(a, false, q->device, q->sm_count, plan);
  return launch_planned<T, shape>(
      a, plan, false, q, [&](int grid, bool programmatic, const wgmma_maps &map) {
        int status = allow_shared<paged_wgmma<T, shape, BIASED>>(q, shape::SHARED_BYTES);
        if (status == KVL_OK) status = prefer_shared<paged_wgmma<T, shape, BIASED>>(q);
        if (status < 0) return status;
        if (programmatic)
          return launch_programmatic(kernel, grid, shape::THREADS, shape::SHARED_BYTES, q, a,
                                     map, plan);
        kernel<<<grid, shape::THREADS, shape::SHARED_BYTES, q->stream>>>(a, map, plan);
        return (int)KVL_OK;
      });
}

/* The result of f with D of the kernel for a head_dim, as a constant: the smallest that
 * holds it, except for 72 to 88, where the last 32 numbers would be small copies. */
template <class F> auto with_wgmma_dim(const kvl_pages &c, F f) {
  const int dim = row_numbers(c);
  if (dim <= 64) return f(std::integral_constant<int, 64>());
  if (dim == 96) return f(std::integral_constant<int, 96>());
  if (dim <= 128) return f(std::integral_constant<int, 128>());
  if (dim <= 192) return f(std::integral_constant<int, 192>());
  return f(std::integral_constant<int, 256>());
}

/* The result of f with the shape for a call that wgmma_takes; C as in wgmma_shape. A hook is
 * compiled for one, by the same rules (print/cuda_attention.lua). */
template <int D, class C, class F>
auto with_wgmma_shape(const kvl_paged_attention_args &a, bool hooked, F f) {
  using many = wgmma_shape<D, C>;
  if constexpr (many::HAS_BY_ROW)
    if (!hooked && !wgmma_boxes(a.cache)) return f(wgmma_shape<D, C, WGMMA_BY_ROW>());
  if constexpr (many::HAS_FEW) {
    using few = wgmma_shape<D, C, WGMMA_FEW>;
    if (few_rows(a, few::ROWS) && (hooked ? !a.starts : !wgmma_biased(a))) return f(few());
  }
  if constexpr (many::HAS_PLAIN)
    if (!hooked && !wgmma_biased(a)) return f(wgmma_shape<D, C, WGMMA_PLAIN>());
  return f(many());
}
template <int D, class F>
auto with_wgmma_shape(const kvl_paged_attention_args &a, bool hooked, F f) {
  return with_codec<void>(a.cache.codec, [&](auto of) {
    return with_wgmma_shape<D, typename decltype(of)::C>(a, hooked, f);
  });
}

/* The bytes of the workspace of a call that wgmma_takes. */
inline size_t wgmma_bytes(const kvl_paged_attention_args &a, int device, int sm_count,
                          bool hooked) {
  return with_wgmma_dim(a.cache, [&](auto dim) {
    return with_wgmma_shape<dim.value>(a, hooked, [&](auto shape) {
      wgmma_plan plan;
      return plan_wgmma<decltype(shape)>(a, hooked, device, sm_count, plan);
    });
  });
}

template <class T, class C, int D>
int launch_wgmma_dim(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  return with_wgmma_shape<D, C>(a, false, [&](auto s) {
    using shape = decltype(s);
    if constexpr (shape::HAS_PLAIN) {
      return launch_shape<T, shape, true>(a, q);
    } else {
      if constexpr (shape::HAS_BIAS)
        if (wgmma_biased(a)) return launch_shape<T, shape, true>(a, q);
      return launch_shape<T, shape, false>(a, q);
    }
  });
}

/* Launches a call that wgmma_takes; C as in wgmma_shape. Over f8e4m3, T is __half for both
 * dtypes of q. instances/paged_wgmma_*.cu define it, so that the kernels are compiled side by
 * side. */
template <class T, class C>
int launch_wgmma(const kvl_paged_attention_args &a, const kvl_cuda_queue *q);

}  // namespace kvl

#endif
