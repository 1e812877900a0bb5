/* out = softmax(scale * q k^T + bias) v over paged keys and values, or over a selection of
 * them. prev_out and prev_lse may give an attention over other keys, which is merged in.
 *
 *   q          f32 f16 bf16  [tokens, heads, head_dim]
 *   cache      pages of q's dtype, f8e4m3 or int8; any codec for f32 q; with k_scale,
 *                            v_scale f32 [kv_heads] of f8e4m3
 *   tables     i32           [seqs, max_blocks]
 *   lens       i32           [seqs]
 *   starts     i32           [seqs + 1]                 NULL: decode
 *   selection  i32           [seqs, kv_heads or 1, max_selected]  optional
 *   listed     i32           [tokens, kv_heads or 1, max_selected]  optional: tokens, instead
 *                            of a selection (instances/listed.cu)
 *   slots      i32           [seqs, kv_heads or 1, max_selected]  optional, replaces tables;
 *                            [tokens, ...] with a list
 *   alibi      f32           [heads]                    optional
 *   prev_out   f32           [tokens, heads, head_dim]  optional; out may be prev_out
 *   prev_lse   f32           [tokens, heads]            optional
 *   out        like q or f32 [tokens, heads, head_dim]
 *   lse        f32           [tokens, heads]            optional
 * q, cache, prev_out and out are 16-byte aligned; head_dim is a multiple of 8 up to 256.
 *
 * Kernels   paged_decode.cuh   16-bit q, decode: tensor cores, split-KV; decode_copies.cuh
 *                              copies keys, decode_rows.cuh computes, decode_packed.cuh over
 *                              int8
 *           paged_split.cuh    divides a decode's work; paged_combine.cuh joins the results
 *           paged_wgmma.cuh    16-bit q on Hopper, several new tokens a sequence or groups of
 *                              more than 16 heads: TMA, wgmma, split-KV where there are few
 *                              rows; wgmma_plan.cuh divides its work
 *           unpack_pages.cuh   before it in long prefills: pages as it reads them fastest
 *           paged_prefill.cuh  16-bit prefill elsewhere, split-KV where there are few tokens
 *           paged_mend.cuh     after both: rows in which V of unseen keys was NaN
 *           paged_f32.cuh      f32 q, decode and prefill, fp32 FMA
 *           latent.cuh         pages whose values are the first numbers of their keys;
 *                              latent_rows.cuh, row by row, what it does not take
 *           hook.cuh           all of them can be compiled with a hook at run time
 * Bytes     decode: 2 * keys * head_dim * element a KV head, once; limit: memory
 * Flops     prefill: 4 * rows * keys * head_dim a head; limit: tensor cores
 * Tolerance 16-bit: P is rounded to q's dtype before P V (in decode over f8e4m3 and int8
 *           to f16; int8's scales come in before), so 2^-9 (bf16) or 2^-12 (f16) of the
 *           largest |v| plus the rounding of out; lse 1e-4.
 *           f32: 1e-5 relative.
 * Best      decode, H100 80GB HBM3, 2026-11-21, bf16, 32/8 heads, head_dim 128, block 16,
 *           random tables, L2 flushed, median of 30; R = read-only sum of the same run:
 *             16 x 32K  0.985 R    1 x 32K   55.2 us   1 x 128K  186 us   8 x 4K  56.1 us
 *             16 x 8K   188 us     64 x 4K   365 us    Zipf batch of 32   0.981 R
 *             selected, 10% of 16 x 32K  86.2 us; 5% of 1 x 128K  21.4 us
 *           f8e4m3 16 x 32K 367 us, 0.949 R of half the bytes; f32 q 16 x 32K 726 us, 0.958 R
 *           (R 3088 GB/s; `kvlab bench` of 066100f, R 3166: 0.99 R and 183, 184, 356 us);
 *           int8 16 x 32K 278 us, 0.88 R of its bytes (H200, R 4535 GB/s, 2026-11-26)
 *           The other shapes, and versions with their times: kernels/dev/decode.cu
 * Source    Dao et al. 2022 (online softmax), Dao 2023 (split-KV decoding), Kwon et al. 2023
 *           (paging), Osama et al. 2023 (stream-K). Deterministic: shares join in order.
 *
 * Grids depend only on sizes that the host knows. Lengths, tables, selections and starts are
 * read on the device, so a captured launch serves later steps. */
#include "args/attention.h"
#include "cuda/attention/hook_launch.cuh"
#include "cuda/attention/latent_launch.cuh"
#include "cuda/attention/listed_launch.cuh"
#include "cuda/attention/paged_combine.cuh"
#include "cuda/attention/paged_decode.cuh"
#include "cuda/attention/paged_f32.cuh"
#include "cuda/attention/paged_mend.cuh"
#include "cuda/attention/paged_prefill.cuh"
#include "cuda/attention/unpack_pages.cuh"
#include "cuda/attention/wgmma_launch.cuh"

namespace kvl {
namespace {

using hooked = kvl_hooked_attention_args;

/* How many query rows a decode kernel packs together: a group's K and V are read once for
 * each pack. */
int decode_rows(const kvl_paged_attention_args &a) {
  int group = (int)(a.heads / a.cache.kv_heads);
  if (a.dtype != KVL_DTYPE_F32) return 16;
  return group <= 4 ? 4 : 8;
}

/* The shape of the decode kernel for a call; the size of the workspace depends on it, too. */
struct decode_kind {
  int tile_keys, warps, blocks, most_team, bytes_shared; /* blocks: per SM at once */
};
/* The most bytes of shared memory that a thread block has beside its tiles. */
constexpr int BESIDE = PLAN_LENGTHS * 4 + 2560;
/* With small tiles, an SM takes two thread blocks if it has room for them. */
template <class S, tile_size TILES> decode_kind kind_of(int device) {
  int blocks = S::BLOCKS, sm_bytes = 0;
  if (TILES == SMALL_TILES) {
    cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (2 * (S::SHARED_BYTES + BESIDE + 1024) <= sm_bytes) blocks = 2;
  }
  return {S::KEYS, S::WARPS, blocks, S::TEAM, S::SHARED_BYTES};
}
template <tile_size TILES, template <int, class, tile_size> class S, class C>
decode_kind kind_of_dim(int d, int device) {
  return d <= 64    ? kind_of<S<64, C, TILES>, TILES>(device)
         : d <= 128 ? kind_of<S<128, C, TILES>, TILES>(device)
                    : kind_of<S<256, C, TILES>, TILES>(device);
}
template <int D, class C, tile_size TILES> using f32_shape_of = f32_shape<C, D, TILES>;
template <int D, class C, tile_size TILES>
using few_rows_of = decode_shape<D, C, packs<C> ? 8 : 16, TILES>;
template <int D, class C, tile_size TILES> using rows_of = decode_shape<D, C, 16, TILES>;
/* Over packed numbers, groups of up to eight heads have a kernel of their own. */
constexpr int FEW_ROWS = 8;
decode_kind decode_kind_of(const kvl_paged_attention_args &a, int device) {
  const int codec = a.cache.codec, dim = a.cache.key.dim;
  const int group = (int)(a.heads / a.cache.kv_heads);
  return with_tiles(code_for(device), [&](auto tiles) {
    constexpr tile_size TILES = tiles.value;
    if (a.dtype == KVL_DTYPE_F32 && codec == KVL_CODEC_F32)
      return kind_of_dim<TILES, f32_shape_of, float>(dim, device);
    return with_codec<__half>(codec, [&](auto of) {
      using C = typename decltype(of)::C;
      return a.dtype == KVL_DTYPE_F32 ? kind_of_dim<TILES, f32_shape_of, C>(dim, device)
             : group <= FEW_ROWS      ? kind_of_dim<TILES, few_rows_of, C>(dim, device)
                                      : kind_of_dim<TILES, rows_of, C>(dim, device);
    });
  });
}

/* How many rows of partial results the workspace holds. */
int64_t count_parts(const kvl_paged_attention_args &a, const split_place &p) {
  return (p.shares + (a.seqs < p.shares ? a.seqs : p.shares)) * (int64_t)p.units.by * p.rows;
}
/* Does a decode note rows to be computed again? A hook may hide a key from one head and
 * show it to another. */
bool decode_notes(const hooked &h) {
  return h.hook && !h.only_keeps && h.base.dtype != KVL_DTYPE_F32;
}
size_t place_bytes(const hooked &h, const split_place &p) {
  const kvl_paged_attention_args &a = h.base;
  const size_t notes = decode_notes(h) ? note_bytes(a) : 0;
  if (p.shares == 1) return notes;
  return notes + count_parts(a, p) * (a.cache.key.dim + 1) * sizeof(float);
}

/* How many shares a decode is cut into: as many as a unit has teams on the device at once,
 * unless some of the shares would be empty. */
split_place decode_place(const hooked &h, int device, int sm_count) {
  const kvl_paged_attention_args &a = h.base;
  const int group = (int)(a.heads / a.cache.kv_heads), rows = decode_rows(a);
  const decode_kind kind = decode_kind_of(a, device);
  split_place p = {};
  const int subgroups = ceil_div(group, rows), units = a.cache.kv_heads * subgroups;
  p.group = group;
  p.rows = group < rows ? group : rows;
  p.units = divisor(units);
  p.subgroups = divisor(subgroups);
  p.block = divisor(a.cache.block_size);
  const int64_t room = a.max_blocks * a.cache.block_size;
  p.most_keys = (int)(room < INT_MAX ? room : INT_MAX);
  p.chunk = a.seqs <= PLAN_LENGTHS ? ceil_div(a.seqs, WARP)
                                   : WARP * ceil_div(a.seqs, WARP * PLAN_CHUNKS);
  p.chunks = ceil_div(a.seqs, p.chunk);
  while (1 << p.tile_shift < kind.tile_keys) p.tile_shift++;
  /* With more warps in a team there are fewer partial results to join. A team gets as many
   * warps as leave every sequence four shares. */
  const int64_t warps = (int64_t)sm_count * kind.blocks * kind.warps;
  while (p.team() < kind.most_team) p.team_shift++;
  while (p.team() > 1 && warps / p.team() / units < 4 * a.seqs) p.team_shift--;
  /* A share reads at least 8 times the bytes of its partial result. */
  const int bytes = kvl__bits(a.cache.codec) / 8;
  p.least = ceil_div(8 * p.rows * (int)sizeof(float), 2 * bytes * kind.tile_keys);
  if (p.least < p.team()) p.least = p.team();
  const int64_t keys = (a.selection ? a.max_selected : a.max_blocks) * a.cache.block_size;
  const int64_t tiles = a.seqs * (ceil_div(keys, kind.tile_keys) + 1) / p.least;
  const int64_t most = warps / p.team() / units, shares = tiles < most ? tiles : most;
  p.shares = shares < 1 ? 1 : (int)shares;
  char *at = (char *)a.workspace;
  if (decode_notes(h)) p.notes = (uint8_t *)at, at += note_bytes(a);
  p.out = (float *)at;
  p.lse = p.out + count_parts(a, p) * a.cache.key.dim;
  return p;
}

int launch_combine(const kvl_paged_attention_args &a, const split_place &p,
                   const kvl_cuda_queue *q) {
  if (p.shares == 1) return KVL_OK;
  int status = prefer_shared<paged_combine>(q);
  if (status < 0) return status;
  int64_t cuts = a.seqs < p.shares ? a.seqs : p.shares, parts = p.shares / cuts + 2;
  const int dim_lanes = combine_dim_lanes(parts);
  int64_t items = cuts * p.units.by * p.rows * ceil_div(a.cache.key.dim / 4, dim_lanes);
  int64_t blocks = ceil_div(items, COMBINE_WARPS), full = 4 * (int64_t)q->sm_count;
  return launch_programmatic(paged_combine, (unsigned)(blocks < full ? blocks : full),
                             COMBINE_WARPS * WARP, 0, q, a, p, dim_lanes);
}

/* How many thread blocks a decode has. */
int decode_blocks(const split_place &p, int warps) {
  return ceil_div((int64_t)p.shares * p.units.by, warps / p.team());
}

template <int D, class C, int R, tile_size TILES> constexpr bool decode_fits_in() {
  using shape = decode_shape<D, C, R, TILES>;
  static_assert(sizeof(decode_memory<shape>) <= BESIDE);
  return fits(TILES, shape::SHARED_BYTES + BESIDE, shape::THREADS, shape::REGISTERS);
}
template <int D, class C, int R>
constexpr bool decode_fits =
    decode_fits_in<D, C, R, SMALL_TILES>() && decode_fits_in<D, C, R, LARGE_TILES>();

/* R: rows that the kernel takes at once. */
template <class T, int D, class C, int R>
int launch_decode(const hooked &h, const kvl_cuda_queue *q) {
  const kvl_paged_attention_args &a = h.base;
  const decode_kind kind = decode_kind_of(a, q->device);
  const split_place place = decode_place(h, q->device, q->sm_count);
  const int blocks = decode_blocks(place, kind.warps), threads = kind.warps * WARP;
  static_assert(decode_fits<D, C, R>);
  if (h.hook) {
    hook_kernel k = {"", blocks, 1, threads, kind.bytes_shared, true};
    snprintf(k.name, sizeof k.name, "decode_%s_%d%s%s", type_name<T>, D, codec_suffix<C>,
             !packs<C>       ? ""
             : R == FEW_ROWS ? "_8"
                             : "_16");
    int status = launch_hooked(h, k, &a, &place, q);
    return status < 0 ? status : launch_combine(a, place, q);
  }
  int status = allow_shared<paged_decode<T, D, C, R>>(q, kind.bytes_shared);
  if (status == KVL_OK) status = prefer_shared<paged_decode<T, D, C, R>>(q);
  if (status < 0) return status;
  status = launch_programmatic(paged_decode<T, D, C, R>, blocks, threads, kind.bytes_shared,
                               q, a, place);
  return status < 0 ? status : launch_combine(a, place, q);
}
template <class T, int D, class C>
int launch_decode_rows(const hooked &h, const kvl_cuda_queue *q) {
  if constexpr (packs<C>)
    if (h.base.heads / h.base.cache.kv_heads <= FEW_ROWS)
      return launch_decode<T, D, C, FEW_ROWS>(h, q);
  return launch_decode<T, D, C, 16>(h, q);
}

/* The grid of paged_prefill, and what its shares leave. */
struct prefill_place {
  dim3 grid;
  int subgroups;
  prefill_parts parts;
  size_t bytes; /* of the workspace */
};
/* A device has as many shares as it runs thread blocks at once, one on an SM. */
template <class shape>
prefill_place place_prefill(const kvl_paged_attention_args &a, int sm_count) {
  prefill_place p = {};
  const int group = (int)(a.heads / a.cache.kv_heads), dim = a.cache.key.dim;
  const int tokens_tile = shape::ROWS / group > 1 ? shape::ROWS / group : 1;
  p.subgroups = ceil_div(group, shape::ROWS);
  const int lanes = a.cache.kv_heads * p.subgroups;
  const int64_t shares = sm_count / (busy_entries(a, tokens_tile) * lanes);
  p.parts.shares = shares < 1 ? 1 : shares > WARP ? WARP : (int)shares;
  p.grid = dim3((unsigned)(a.tokens / tokens_tile + a.seqs), lanes, p.parts.shares);
  /* A share reads at least 8 times the bytes of its part. */
  const int64_t most = (a.tokens < tokens_tile ? a.tokens : tokens_tile) * group;
  const int rows = (int)(most < shape::ROWS ? most : shape::ROWS);
  p.parts.least = ceil_div(8 * rows * (int)sizeof(float),
                           2 * kvl__bits(a.cache.codec) / 8 * shape::KEYS);
  const int64_t parts = p.parts.shares * a.tokens * a.heads;
  p.parts.notes = (uint8_t *)a.workspace;
  p.bytes = p.parts.shares == 1 ? note_bytes(a) : (size_t)(parts + 15) / 16 * 16;
  p.parts.out = (float *)(p.parts.notes + p.bytes);
  p.parts.lse = p.parts.out + parts * dim;
  if (p.parts.shares > 1) p.bytes += parts * (dim + 1) * sizeof(float);
  return p;
}

/* Joins the shares' parts of each row. A warp takes some dims of a row, as in paged_combine;
 * the warp with the first dims joins the notes. */
__global__ void __launch_bounds__(COMBINE_WARPS *WARP, 4)
    prefill_combine(const __grid_constant__ kvl_paged_attention_args a,
                    const __grid_constant__ prefill_parts parts, int dim_lanes) {
  let_next_start();
  wait_for_previous();
  const combine_lanes lanes(dim_lanes);
  const int head_dim = a.cache.value.dim, lane = threadIdx.x % WARP;
  const int pieces = (head_dim / 4 + dim_lanes - 1) / dim_lanes;
  const int heads = (int)a.heads, rows = (int)a.tokens * heads;
  const int first = a.starts[0] * heads, end = a.starts[a.seqs] * heads;
  for (int item = first * pieces + blockIdx.x * COMBINE_WARPS + threadIdx.x / WARP;
       item < end * pieces; item += gridDim.x * COMBINE_WARPS) {
    const int row = item / pieces, piece = item - row * pieces;
    const bool mends = __any_sync(ALL_LANES,
                                  lane < parts.shares && parts.notes[lane * rows + row]);
    auto part = [&](int i) { return (uint32_t)(i * rows + row); };
    join_parts(lanes, parts.out, parts.lse, head_dim, piece, piece + 1, parts.shares, part,
               [&](int dim, float(&x)[4], float m, float sum) {
                 if (lanes.mine == 0 && dim < head_dim && writes_row(a, mends))
                   write_row(a, end_row(a, row, m, sum), row, dim, x);
               });
    if (piece == 0 && lane == 0 && mends) parts.notes[row] = 1;
  }
}

int launch_prefill_combine(const kvl_paged_attention_args &a, const prefill_parts &parts,
                           const kvl_cuda_queue *q) {
  if (parts.shares == 1) return KVL_OK;
  const int dim_lanes = combine_dim_lanes(parts.shares);
  const int64_t items = a.tokens * a.heads * ceil_div(a.cache.value.dim / 4, dim_lanes);
  const int64_t blocks = ceil_div(items, COMBINE_WARPS), full = 4 * (int64_t)q->sm_count;
  return launch_programmatic(prefill_combine, (unsigned)(blocks < full ? blocks : full),
                             COMBINE_WARPS * WARP, 0, q, a, parts, dim_lanes);
}

template <class T, int D, class C, tile_size TILES>
int launch_prefill(const hooked &h, const kvl_cuda_queue *q) {
  using shape = prefill_shape<D, TILES>;
  static_assert(fits(TILES,
                     shape::SHARED_BYTES + sizeof(row_lists<shape::KEYS, packs<C>>) + 256,
                     shape::THREADS));
  const kvl_paged_attention_args &a = h.base;
  const prefill_place p = place_prefill<shape>(a, q->sm_count);
  int status;
  if (h.hook) {
    hook_kernel k = {"", (int)p.grid.x, (int)p.grid.y, shape::THREADS, shape::SHARED_BYTES};
    k.grid_z = (int)p.grid.z;
    snprintf(k.name, sizeof k.name, "prefill_%s_%d%s", type_name<T>, D, codec_suffix<C>);
    status = launch_hooked(h, k, &a, &p.subgroups, q, &p.parts);
    return status < 0 ? status : launch_prefill_combine(a, p.parts, q);
  }
  status = allow_shared<paged_prefill<T, D, C>>(q, shape::SHARED_BYTES);
  if (status < 0) return status;
  paged_prefill<T, D, C>
      <<<p.grid, shape::THREADS, shape::SHARED_BYTES, q->stream>>>(a, p.subgroups, p.parts);
  status = launch_prefill_combine(a, p.parts, q);
  return status < 0 ? status : launch_mend<T, C>(a, q);
}

constexpr int F32_PREFILL_ROWS = 8;

template <class T, int D, tile_size TILES>
int launch_f32_prefill(const hooked &h, const kvl_cuda_queue *q) {
  using shape = f32_shape<T, D, TILES>;
  constexpr int THREADS = shape::THREADS, BYTES = shape::SHARED_BYTES;
  static_assert(fits(TILES, BYTES + BESIDE, THREADS, shape::REGISTERS));
  constexpr int ROWS = F32_PREFILL_ROWS;
  const kvl_paged_attention_args &a = h.base;
  const int group = (int)(a.heads / a.cache.kv_heads), subgroups = ceil_div(group, ROWS);
  const int tokens_tile = ROWS / group > 1 ? ROWS / group : 1;
  const dim3 grid((unsigned)(a.tokens / tokens_tile + a.seqs), a.cache.kv_heads * subgroups);
  if (h.hook) {
    hook_kernel k = {"", (int)grid.x, (int)grid.y, THREADS, BYTES};
    snprintf(k.name, sizeof k.name, "f32_prefill_%s_%d_%d", type_name<T>, D, ROWS);
    return launch_hooked(h, k, &a, &subgroups, q);
  }
  int status = allow_shared<paged_f32_prefill<T, D, ROWS>>(q, BYTES);
  if (status < 0) return status;
  paged_f32_prefill<T, D, ROWS><<<grid, THREADS, BYTES, q->stream>>>(a, subgroups);
  return KVL_OK;
}

template <class T, int D, int ROWS>
int launch_f32_decode(const hooked &h, const kvl_cuda_queue *q) {
  const kvl_paged_attention_args &a = h.base;
  const decode_kind kind = decode_kind_of(a, q->device);
  const split_place place = decode_place(h, q->device, q->sm_count);
  const int blocks = decode_blocks(place, kind.warps);
  const int threads = kind.warps * WARP, bytes = kind.bytes_shared;
  int status;
  if (h.hook) {
    hook_kernel k = {"", blocks, 1, threads, bytes, true};
    snprintf(k.name, sizeof k.name, "f32_decode_%s_%d_%d", type_name<T>, D, ROWS);
    status = launch_hooked(h, k, &a, &place, q);
  } else {
    status = allow_shared<paged_f32_decode<T, D, ROWS>>(q, bytes);
    if (status < 0) return status;
    status = launch_programmatic(paged_f32_decode<T, D, ROWS>, blocks, threads, bytes, q, a,
                                 place);
  }
  return status < 0 ? status : launch_combine(a, place, q);
}

template <class T, int D> int launch_f32(const hooked &h, const kvl_cuda_queue *q) {
  if (h.base.starts)
    return with_tiles(
        q->code, [&](auto tiles) { return launch_f32_prefill<T, D, tiles.value>(h, q); });
  return decode_rows(h.base) == 4 ? launch_f32_decode<T, D, 4>(h, q)
                                  : launch_f32_decode<T, D, 8>(h, q);
}

template <class T> int launch_f32_dim(const hooked &h, const kvl_cuda_queue *q) {
  int d = h.base.cache.key.dim;
  if (d <= 64) return launch_f32<T, 64>(h, q);
  if (d <= 128) return launch_f32<T, 128>(h, q);
  return launch_f32<T, 256>(h, q);
}

/* A decode waits for memory, so padding its dims costs nothing. */
template <class T, class C> int launch_decode_dim(const hooked &h, const kvl_cuda_queue *q) {
  int d = h.base.cache.key.dim;
  if (d <= 64) return launch_decode_rows<T, 64, C>(h, q);
  if (d <= 128) return launch_decode_rows<T, 128, C>(h, q);
  return launch_decode_rows<T, 256, C>(h, q);
}

/* The result of f with D of the kernel of a prefill, as a constant. */
template <class F> auto with_prefill_dim(int d, F f) {
  if (d <= 64) return f(std::integral_constant<int, 64>());
  if (d <= 96) return f(std::integral_constant<int, 96>());
  if (d <= 128) return f(std::integral_constant<int, 128>());
  if (d <= 192) return f(std::integral_constant<int, 192>());
  return f(std::integral_constant<int, 256>());
}
template <class T, class C> int launch_prefill_dim(const hooked &h, const kvl_cuda_queue *q) {
  return with_tiles(q->code, [&](auto tiles) {
    return with_prefill_dim(h.base.cache.key.dim, [&](auto dim) {
      return launch_prefill<T, dim.value, C, tiles.value>(h, q);
    });
  });
}
size_t prefill_bytes(const kvl_paged_attention_args &a, int device, int sm_count) {
  return with_tiles(code_for(device), [&](auto tiles) {
    return with_prefill_dim(a.cache.key.dim, [&](auto dim) {
      return place_prefill<prefill_shape<dim.value, tiles.value>>(a, sm_count).bytes;
    });
  });
}

/* Does paged_wgmma.cuh take a call? It keeps no scores. */
bool by_wgmma(const hooked &h, int device) {
  return !h.scores && wgmma_takes(h.base, device, h.hook);
}

template <class T, int D> int launch_hooked_wgmma(const hooked &h, const kvl_cuda_queue *q) {
  const kvl_paged_attention_args &a = h.base;
  return with_wgmma_shape<D>(a, true, [&](auto s) {
    using shape = decltype(s);
    wgmma_plan plan;
    plan_wgmma<shape>(a, true, q->device, q->sm_count, plan);
    return launch_planned<T, shape>(
        a, plan, true, q, [&](int grid, bool programmatic, const wgmma_maps &map) {
          hook_kernel k = {"", grid, 1, shape::THREADS, shape::SHARED_BYTES, programmatic};
          snprintf(k.name, sizeof k.name, "wgmma_%s%s_%d%s", shape::FEW ? "few_" : "",
                   type_name<T>, D, codec_suffix<typename shape::C>);
          return launch_hooked(h, k, &a, &map, q, &plan);
        });
  });
}

template <class T> int launch_16bit_prefill(const hooked &h, const kvl_cuda_queue *q) {
  const kvl_paged_attention_args &a = h.base;
  if (by_wgmma(h, q->device)) {
    if (!h.hook)
      return with_codec<void>(a.cache.codec, [&](auto of) {
        using C = typename decltype(of)::C;
        return launch_wgmma<std::conditional_t<same<C, f8e4m3>, __half, T>, C>(a, q);
      });
    return with_wgmma_dim(a.cache,
                          [&](auto dim) { return launch_hooked_wgmma<T, dim.value>(h, q); });
  }
  return with_codec<T>(a.cache.codec, [&](auto of) {
    return launch_prefill_dim<T, typename decltype(of)::C>(h, q);
  });
}

template <class T> int launch_16bit_decode(const hooked &h, const kvl_cuda_queue *q) {
  if (h.base.tree)
    return kvl_cuda::fail(KVL_ERR_UNSUPPORTED,
                          "a tree of one new token a sequence: give starts, too");
  return with_codec<T>(h.base.cache.codec, [&](auto of) {
    return launch_decode_dim<T, typename decltype(of)::C>(h, q);
  });
}

/* The same prefill over unpacked pages (unpack_pages.cuh). */
hooked after_unpacking(const hooked &h) {
  const unpacked_place place = place_unpacked(h.base);
  hooked after = h;
  after.base.cache = place.pages;
  if (h.base.selection) {
    after.base.slots = place.places;
    after.base.slot_heads = place.lanes;
  } else {
    after.base.tables = place.places;
  }
  after.base.workspace = (char *)h.base.workspace + place.bytes;
  return after;
}
/* From how many products of numbers on a call over these pages takes less time if it unpacks them
 * first: early where the kernels would convert numbers or have longer rows, late where rows would
 * only be copied in more pieces. */
int64_t unpack_from(const kvl_paged_attention_args &a) {
  constexpr int64_t EARLY = 1ll << 33, LATE = 1ll << 36, NEVER = INT64_MAX;
  const kvl_pages &c = a.cache;
  const int dim = c.key.dim, row = unpacked_row(dim);
  const bool is_f8 = c.codec == KVL_CODEC_F8E4M3;
  if (is_f8 && (c.k_scale || c.v_scale)) return NEVER; /* the kernels apply these to scores */
  if (kvl__packs(c.codec) || c.pinned) return EARLY;
  if (is_f8) return dim == 96 || dim == 128 ? NEVER : EARLY;
  if (row_numbers(c) == row) return NEVER;
  return with_wgmma_dim(c, [](auto d) { return (int)d.value; }) > row ? EARLY : LATE;
}
/* Does a call do so? It then has at least so many query rows a sequence and KV head, and the pages
 * take at most so many bytes. */
constexpr int64_t UNPACK_ROWS = 1024, UNPACK_MOST = 1 << 30;

bool unpacks(const hooked &h, int device) {
  const kvl_paged_attention_args &a = h.base;
  if (h.hook || is_latent(a) || a.listed || !a.starts) return false;
  const int64_t rows = a.tokens * a.heads;
  const int64_t keys = (a.selection ? a.max_selected : a.max_blocks) * a.cache.block_size;
  return rows >= UNPACK_ROWS * a.seqs * a.cache.kv_heads && a.seqs > 0 &&
         (double)rows * keys * a.cache.key.dim >= (double)unpack_from(a) &&
         place_unpacked(a).bytes <= UNPACK_MOST && by_wgmma(after_unpacking(h), device);
}
template <class T, class C>
int launch_unpack(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  const unpacked_place place = place_unpacked(a);
  const dim3 grid((unsigned)place.pages.blocks, place.lanes);
  return launch_programmatic(unpack_pages<T, C>, grid, UNPACK_THREADS, 0, q, a, place);
}

template <class T> int launch_16bit(const hooked &h, const kvl_cuda_queue *q) {
  if (unpacks(h, q->device)) {
    const int status = with_codec<T>(h.base.cache.codec, [&](auto of) {
      return launch_unpack<T, typename decltype(of)::C>(h.base, q);
    });
    return status < 0 ? status : launch_16bit<T>(after_unpacking(h), q);
  }
  const kvl_paged_attention_args &a = h.base;
  const bool is_decode = !a.listed && !a.starts && !by_wgmma(h, q->device);
  const int status = a.listed    ? launch_listed(h, q)
                     : is_decode ? launch_16bit_decode<T>(h, q)
                                 : launch_16bit_prefill<T>(h, q);
  const bool mends = is_decode ? decode_notes(h) : h.hook != nullptr;
  if (status < 0 || !mends) return status;
  return with_codec<void>(a.cache.codec, [&](auto of) {
    return launch_hooked_mend<T, typename decltype(of)::C>(h, q);
  });
}

int launch(const hooked &h, const kvl_cuda_queue *q) {
  const kvl_paged_attention_args &a = h.base;
  if (h.scores && (!h.hook || a.starts))
    return kvl_cuda::fail(KVL_ERR_UNSUPPORTED,
                          "scores are kept by a hook's kernel, and in decode alone");
  if (a.tokens == 0 || a.seqs == 0 || a.heads == 0) return KVL_OK;
  if (!aligned16(a.q, a.cache.memory, a.prev_out, a.out))
    return kvl__cuda_check(cudaErrorMisalignedAddress);
  int status = KVL_ERR_UNSUPPORTED;
  if (is_latent(a)) status = launch_latent(h, q);
  else if (a.listed && !lists_by_mma(a, q)) status = launch_listed(h, q);
  else if (a.dtype == KVL_DTYPE_BF16) status = launch_16bit<__nv_bfloat16>(h, q);
  else if (a.dtype == KVL_DTYPE_F16) status = launch_16bit<__half>(h, q);
  else { KVL_CUDA_BY_CODEC(a.cache.codec, C, status = launch_f32_dim<C>(h, q);) }
  return status < 0 ? status : kvl__cuda_launched();
}

size_t workspace_bytes(const hooked &h, int device, int sm_count) {
  const kvl_paged_attention_args &a = h.base;
  if (a.tokens == 0 || a.seqs == 0 || a.heads == 0) return 0;
  if (is_latent(a)) return latent_bytes(h, device, sm_count);
  if (a.listed) return h.hook ? note_bytes(a) : 0;
  if (by_wgmma(h, device)) return wgmma_bytes(a, device, sm_count, h.hook);
  if (!a.starts) return place_bytes(h, decode_place(h, device, sm_count));
  return a.dtype == KVL_DTYPE_F32 ? 0 : prefill_bytes(a, device, sm_count);
}

}  // namespace
}  // namespace kvl

KVL_CUDA_WORKSPACE(paged_attention) {
  const kvl_hooked_attention_args &h = *(const kvl_hooked_attention_args *)args;
  int device = 0;
  cudaGetDevice(&device);
  if (!kvl::unpacks(h, device)) return kvl::workspace_bytes(h, device, sm_count);
  return kvl::place_unpacked(h.base).bytes +
         kvl::workspace_bytes(kvl::after_unpacking(h), device, sm_count);
}

KVL_CUDA_KERNEL(paged_attention) {
  const kvl_hooked_attention_args &h = *(const kvl_hooked_attention_args *)args;
  return kvl::launch(h, (const kvl_cuda_queue *)queue);
}
