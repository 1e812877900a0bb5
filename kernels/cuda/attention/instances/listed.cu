/* The kernels for attention over listed tokens: which of them takes a call, and its launch.
 *
 * Kernels   listed_mma.cuh   16-bit q: tensor cores, asynchronous copies; listed_products.cuh
 *                            multiplies tiles, listed_packed.cuh knows the scales of int8
 *           listed_warps.cuh   int8 and groups of up to eight heads
 *           listed_f32.cuh   f32 q, more rows than a 32-bit index can count, or rows of more
 *                            than 256 bytes where tiles are small
 *           listed.cuh       the source of keys, and what joins the parts of a list
 * Bytes     2 max_selected head_dim element per token and KV head, once for all heads of the
 *           group. int8 also reads the scales, head_dim / 32 bytes of each row, for which
 *           memory may transfer 32 bytes. Limit: memory for a few tokens; L2 for tokens of a
 *           prompt, which share keys
 * Tolerance as paged_attention.cu
 * Best      32/8 heads, head_dim 128, lists of 2048, a table for each row, L2 flushed. H200,
 *           2026-11-28: bf16 1, 4, 16 and 64 rows 11.6, 15.5, 38.0 and 119 us, f8e4m3 12.0, 16.2,
 *           25.9 and 71.3, int8 13.5, 18.7, 36.2 and 101; 4096 rows of a prompt of 64K over
 *           bf16 4.0 ms. notes/20261126-lists.md and 20261128-lists.md have what was tried
 * Source    Dao et al. 2022 (online softmax); the lists are those of DeepSeek-V3.2's DSA */
#include "cuda/attention/listed_launch.cuh"

#include "cuda/attention/hook_launch.cuh"
#include "cuda/attention/listed_f32.cuh"
#include "cuda/attention/listed_warps.cuh"
#include "cuda/attention/listed_mma.cuh"

namespace kvl {
namespace {

using hooked = kvl_hooked_attention_args;

/* How many of `blocks` thread blocks share a list: the number with which the last of all
 * clusters is estimated to end first. A block takes as long as START tiles beside its own, and
 * a share has at least two tiles. A GPU before Hopper has no clusters. */
template <auto kernel>
int splits_of(const kvl_paged_attention_args &a, int64_t blocks, int tile, int threads,
              int bytes, const kvl_cuda_queue *q) {
  constexpr int64_t START = 4;
  const int64_t tiles = ceil_div(a.max_selected, tile);
  int best = 1;
  int64_t least = INT64_MAX;
  for (int splits = 1; splits <= CLUSTER_MOST && is_hopper(q); splits++) {
    if (splits > 1 && tiles < 2 * splits) break;
    const int clusters = clusters_at_once<kernel>(splits, threads, bytes, q);
    if (clusters == 0) continue;
    const int64_t time = ceil_div(blocks, clusters) * (START + ceil_div(tiles, splits));
    if (time < least) best = splits, least = time;
  }
  return best;
}

/* Launches a kernel, or the one with the hook whose name is `name`. rows: heads of a block;
 * tile: keys for which a block is started, about as many as its warps take at once. */
template <auto kernel>
int launch(const hooked &h, const char *name, int rows, int tile, int threads, int bytes,
           const kvl_cuda_queue *q) {
  const kvl_paged_attention_args &a = h.base;
  listed_plan plan = {};
  if (h.hook && lists_by_mma(a, q)) plan.notes = (uint8_t *)a.workspace;
  plan.block = divisor(a.cache.block_size);
  plan.subgroups = ceil_div(a.heads / a.cache.kv_heads, rows);
  const int64_t units = (int64_t)a.cache.kv_heads * plan.subgroups;
  int status = allow_shared<kernel>(q, bytes);
  if (status == KVL_OK) status = prefer_shared<kernel>(q);
  if (status < 0) return status;
  const int splits = splits_of<kernel>(a, a.tokens * units, tile, threads, bytes, q);
  plan.splits = divisor(splits);
  const dim3 grid((unsigned)(a.tokens * splits), (unsigned)units);
  if (h.hook) {
    hook_kernel k = {"", (int)grid.x, (int)grid.y, threads, bytes, true, splits};
    snprintf(k.name, sizeof k.name, "%s", name);
    return launch_hooked(h, k, &a, &plan, q);
  }
  return launch_clusters(kernel, splits, grid, threads, bytes, q, a, plan);
}

template <class T, class C, int D, int MW>
int launch_mma(const hooked &h, const kvl_cuda_queue *q) {
  char name[64];
  snprintf(name, sizeof name, "listed_%s_%d_%d%s", type_name<T>, D, MW, codec_suffix<C>);
  return with_tiles(q->code, [&](auto tiles) {
    using shape = listed_shape<D, MW, C, tiles.value>;
    static_assert(!shape::FITS ||
                  fits(tiles.value, shape::SHARED_BYTES + sizeof(listed_tiles<shape>) + 1024,
                       shape::THREADS));
    static_assert(sizeof(listed_tiles<shape>) + 1024 <= 24 << 10, "see SHARED_UNASKED");
    return launch<listed_mma<T, C, D, MW>>(h, name, shape::ROWS, shape::KEYS, shape::THREADS,
                                           shape::SHARED_BYTES, q);
  });
}

template <class T, class C, int D>
int launch_warps(const hooked &h, const kvl_cuda_queue *q) {
  char name[64];
  snprintf(name, sizeof name, "listed_warps_%s_%d%s", type_name<T>, D, codec_suffix<C>);
  return with_tiles(q->code, [&](auto tiles) {
    using shape = warps_shape<D, C, tiles.value>;
    static_assert(fits(tiles.value,
                       shape::SHARED_BYTES + shape::WARPS * sizeof(warp_tiles<shape>) + 1024,
                       shape::THREADS));
    return launch<listed_warps<T, C, D>>(h, name, shape::ROWS, shape::KEYS * shape::WARPS / 2,
                                         shape::THREADS, shape::SHARED_BYTES, q);
  });
}

template <class T, class C, int D>
int launch_group(const hooked &h, const kvl_cuda_queue *q) {
  const int64_t group = h.base.heads / h.base.cache.kv_heads;
  if constexpr (packs<C>) {
    if (group <= 8) return launch_warps<T, C, D>(h, q);
  }
  if (group <= 16) return launch_mma<T, C, D, 1>(h, q);
  if (group <= 32) return launch_mma<T, C, D, 2>(h, q);
  return launch_mma<T, C, D, 4>(h, q);
}

template <class T, class C> int launch_dim(const hooked &h, const kvl_cuda_queue *q) {
  const int d = h.base.cache.key.dim;
  if (d <= 64) return launch_group<T, C, 64>(h, q);
  if (d <= 128) return launch_group<T, C, 128>(h, q);
  return launch_group<T, C, 256>(h, q);
}

template <class C, int D, int ROWS> int launch_f32(const hooked &h, const kvl_cuda_queue *q) {
  char name[64];
  snprintf(name, sizeof name, "f32_listed_%s_%d_%d", type_name<C>, D, ROWS);
  return with_tiles(q->code, [&](auto tiles) {
    using shape = f32_shape<C, D, tiles.value>;
    return launch<listed_f32<C, D, ROWS>>(h, name, ROWS, shape::KEYS * shape::WARPS,
                                          shape::THREADS, shape::SHARED_BYTES, q);
  });
}

template <class C, int D> int launch_f32_group(const hooked &h, const kvl_cuda_queue *q) {
  if (h.base.heads / h.base.cache.kv_heads <= 4) return launch_f32<C, D, 4>(h, q);
  return launch_f32<C, D, 8>(h, q);
}

template <class C> int launch_f32_dim(const hooked &h, const kvl_cuda_queue *q) {
  const int d = h.base.cache.key.dim;
  if (d <= 64) return launch_f32_group<C, 64>(h, q);
  if (d <= 128) return launch_f32_group<C, 128>(h, q);
  return launch_f32_group<C, 256>(h, q);
}

/* Whether 32 bits are enough for every listed_keys::row_place of a cache. They are not if the
 * cache has more than 64 GiB in one layer. */
bool numbers_rows(const kvl_pages &p) {
  const int64_t page = kvl__packs(p.codec) ? p.bytes_page / 16
                                           : (int64_t)kvl__strips(&p) * p.block_size;
  return p.blocks * page < (int64_t)1 << 32;
}

template <class T> int launch_16bit(const hooked &h, const kvl_cuda_queue *q) {
  return with_codec<T>(h.base.cache.codec, [&](auto of) {
    using C = typename decltype(of)::C;
    return lists_by_mma(h.base, q) ? launch_dim<T, C>(h, q) : launch_f32_dim<C>(h, q);
  });
}

}  // namespace

bool lists_by_mma(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  return a.dtype != KVL_DTYPE_F32 && numbers_rows(a.cache) &&
         (tiles_of(q->code) == LARGE_TILES || a.cache.key.bytes_row <= 256);
}

int launch_listed(const hooked &h, const kvl_cuda_queue *q) {
  const kvl_paged_attention_args &a = h.base;
  if (a.dtype == KVL_DTYPE_BF16) return launch_16bit<__nv_bfloat16>(h, q);
  if (a.dtype == KVL_DTYPE_F16) return launch_16bit<__half>(h, q);
  KVL_CUDA_BY_CODEC(a.cache.codec, C, return launch_f32_dim<C>(h, q);)
}

}  // namespace kvl
