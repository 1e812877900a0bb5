/* out = softmax(scale * q k^T + bias) v over paged keys and values, or a selection of them,
 * joined to an attention over other keys where prev_out and prev_lse tell of one.
 *
 *   q          f32 f16 bf16  [tokens, heads, head_dim]
 *   cache      like q, or any of them for f32 q  [blocks, 2, kv_heads, block_size, head_dim]
 *   tables     i32           [seqs, max_blocks]
 *   lens       i32           [seqs]
 *   starts     i32           [seqs + 1]                 NULL: decode
 *   selection  i32           [seqs, kv_heads or 1, max_selected]  optional
 *   slots      i32           [seqs, kv_heads or 1, max_selected]  optional, in place of tables
 *   alibi      f32           [heads]                    optional
 *   prev_out   f32           [tokens, heads, head_dim]  optional; out may be prev_out
 *   prev_lse   f32           [tokens, heads]            optional
 *   out        like q or f32 [tokens, heads, head_dim]
 *   lse        f32           [tokens, heads]            optional
 * q, cache, prev_out and out are 16-byte aligned; head_dim is a multiple of 8 up to 256.
 *
 * Kernels   paged_decode.cuh   16-bit decode: split-KV, tensor cores
 *           paged_prefill.cuh  16-bit prefill: 128-row tiles, tensor cores
 *           paged_f32.cuh      f32 q, decode and prefill, fp32 FMA
 *           paged_combine      joins the splits of a decode (paged_output.cuh)
 * Bytes     decode: 2 * keys * head_dim * element a KV head, once; limit: memory
 * Flops     prefill: 4 * rows * keys * head_dim a head; limit: mma.sync
 * Tolerance 16-bit: P is rounded to q's dtype before P V, so 2^-9 (bf16) or 2^-12 (f16) of
 *           the largest |v| plus the rounding of out; lse 1e-4. f32: 1e-5 relative.
 * Best      H100 80GB HBM3, 2026-11-20, bf16, 32/8 heads, head_dim 128, block 16, random
 *           tables, L2 flushed, median of 30; R = read-only sum of the same run, 3096 GB/s:
 *             decode 16 x 32K   716 us  0.968 R     1 x 32K   55.2 us  0.786 R
 *                    1 x 128K   189 us  0.916 R     8 x 4K    54.8 us  0.790 R
 *                    16 x 8K    188 us  0.921 R     64 x 4K   362 us   0.958 R
 *                    10% selected of 16 x 32K  84.3 us  0.823 R of what was selected
 *                    5% selected of 1 x 128K   22.4 us  0.387 R
 *                    f32 q, 16 x 32K  740 us  0.937 R
 *             prefill causal 4K 260, 16K 288, 32K 294 TFLOP/s; f32 q 23 TFLOP/s
 * Tried     splits for 16 x 32K: 2 716, 4 718, 8 725, 16 723, 33 730 us: a split more is a
 *           start and an end more. For 1 x 32K: 32 55.3, 33 55.6 us.
 * Source    Dao et al. 2022 (online softmax), Dao 2023 (split-KV decoding), Kwon et al. 2023
 *           (paging). Deterministic: splits are joined in order.
 *
 * Grids depend on sizes the host knows; lengths, tables, selections and starts are read on
 * the device, so a captured launch serves later steps. */
#include "paged_decode.cuh"
#include "paged_f32.cuh"
#include "paged_prefill.cuh"

namespace kvl {
namespace {

int ceil_div(int64_t a, int64_t b) { return (int)((a + b - 1) / b); }

/* Query rows a decode kernel packs, and so how often a group's K and V are read. */
int decode_rows(const kvl_paged_attention_args &a) {
  int group = (int)(a.heads / a.cache.kv_heads);
  if (a.dtype != KVL_DTYPE_F32) return 16;
  return group == 1 ? 1 : group <= 4 ? 4 : 8;
}

/* Splits of a decode: the fewest that keep the device's two blocks an SM nearly as busy as
 * the best choice would, with at least 256 keys each if every table were full. */
int decode_splits(const kvl_paged_attention_args &a, int sm_count) {
  if (a.starts || a.heads == 0) return 1;
  int64_t group = a.heads / a.cache.kv_heads, slots = 2 * (int64_t)sm_count;
  int64_t blocks = a.seqs * a.cache.kv_heads * ceil_div(group, decode_rows(a));
  int64_t keys = (a.selection ? a.max_selected : a.max_blocks) * a.cache.block_size;
  int most = (int)(keys / 256 < 1 ? 1 : keys / 256 > 128 ? 128 : keys / 256), splits = 1;
  auto busy = [&](int n) {
    int64_t waves = (blocks * n + slots - 1) / slots;
    return waves ? (double)(blocks * n) / (double)(waves * slots) : 1.0;
  };
  double best = 0;
  for (int n = 1; n <= most; n++) best = busy(n) > best ? busy(n) : best;
  while (splits < most && busy(splits) < 0.95 * best) splits++;
  return splits;
}

size_t splits_bytes(const kvl_paged_attention_args &a, int splits) {
  if (splits == 1) return 0;
  return (size_t)(a.tokens * a.heads * splits * (a.cache.head_dim + 1)) * sizeof(float);
}

int launch_combine(const kvl_paged_attention_args &a, const split_place &place,
                   const kvl_cuda_queue *q) {
  if (place.splits == 1) return KVL_OK;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)(a.tokens * a.heads));
  config.blockDim = dim3(COMBINE_WARPS * WARP);
  config.stream = q->stream;
  cudaLaunchAttribute early[1];
  early[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = early;
  config.numAttrs = q->shared_optin > 200 << 10;   /* Hopper and later: 227 KiB */
  return kvl__cuda_check(cudaLaunchKernelEx(&config, paged_combine, a, place));
}

template <class T, int D>
int launch_decode(const kvl_paged_attention_args &a, const kvl_cuda_queue *q, int splits) {
  using shape = decode_shape<D>;
  int subgroups = ceil_div(a.heads / a.cache.kv_heads, shape::ROWS);
  split_place place = workspace_place(a, splits);
  int status = allow_shared<paged_decode<T, D>>(q, shape::SHARED_BYTES);
  if (status < 0) return status;
  dim3 grid((unsigned)(a.seqs * splits), a.cache.kv_heads * subgroups);
  paged_decode<T, D><<<grid, shape::WARPS * WARP, shape::SHARED_BYTES, q->stream>>>(
      a, place, subgroups);
  return launch_combine(a, place, q);
}

template <class T, int D>
int launch_prefill(const kvl_paged_attention_args &a, const kvl_cuda_queue *q) {
  using shape = prefill_shape<D>;
  int group = (int)(a.heads / a.cache.kv_heads), subgroups = ceil_div(group, shape::ROWS);
  int tokens_tile = shape::ROWS / group > 1 ? shape::ROWS / group : 1;
  int status = allow_shared<paged_prefill<T, D>>(q, shape::SHARED_BYTES);
  if (status < 0) return status;
  dim3 grid((unsigned)(a.tokens / tokens_tile + a.seqs), a.cache.kv_heads * subgroups);
  paged_prefill<T, D><<<grid, shape::THREADS, shape::SHARED_BYTES, q->stream>>>(a, subgroups);
  return KVL_OK;
}

template <class T, int D, int ROWS>
int launch_f32(const kvl_paged_attention_args &a, const kvl_cuda_queue *q, int splits) {
  using shape = f32_shape<T, D>;
  int group = (int)(a.heads / a.cache.kv_heads), subgroups = ceil_div(group, ROWS);
  int tokens_tile = ROWS / group > 1 ? ROWS / group : 1;
  split_place place = workspace_place(a, splits);
  int status = allow_shared<paged_f32<T, D, ROWS>>(q, shape::SHARED_BYTES);
  if (status < 0) return status;
  int64_t tiles = a.starts ? a.tokens / tokens_tile + a.seqs : a.seqs * splits;
  dim3 grid((unsigned)tiles, a.cache.kv_heads * subgroups);
  paged_f32<T, D, ROWS><<<grid, shape::WARPS * WARP, shape::SHARED_BYTES, q->stream>>>(
      a, place, subgroups);
  return launch_combine(a, place, q);
}

template <class T, int D>
int launch_f32_rows(const kvl_paged_attention_args &a, const kvl_cuda_queue *q, int splits) {
  int rows = a.starts ? 8 : decode_rows(a);
  if (rows == 1) return launch_f32<T, D, 1>(a, q, splits);
  if (rows == 4) return launch_f32<T, D, 4>(a, q, splits);
  return launch_f32<T, D, 8>(a, q, splits);
}

template <class T>
int launch_f32_dim(const kvl_paged_attention_args &a, const kvl_cuda_queue *q, int splits) {
  int d = a.cache.head_dim;
  if (d <= 64) return launch_f32_rows<T, 64>(a, q, splits);
  if (d <= 128) return launch_f32_rows<T, 128>(a, q, splits);
  return launch_f32_rows<T, 256>(a, q, splits);
}

template <class T>
int launch_16bit(const kvl_paged_attention_args &a, const kvl_cuda_queue *q, int splits) {
  int d = a.cache.head_dim;
  if (a.starts) {
    if (d <= 64) return launch_prefill<T, 64>(a, q);
    if (d <= 96) return launch_prefill<T, 96>(a, q);
    if (d <= 128) return launch_prefill<T, 128>(a, q);
    if (d <= 192) return launch_prefill<T, 192>(a, q);
    return launch_prefill<T, 256>(a, q);
  }
  /* Decode waits for memory: padded dims cost it nothing. */
  if (d <= 64) return launch_decode<T, 64>(a, q, splits);
  if (d <= 128) return launch_decode<T, 128>(a, q, splits);
  return launch_decode<T, 256>(a, q, splits);
}

int launch(const kvl_paged_attention_args &a, const kvl_cuda_queue *q, int splits) {
  if (a.tokens == 0 || a.seqs == 0 || a.heads == 0) return KVL_OK;
  if (!aligned16(a.q, a.cache.kv, a.prev_out, a.out))
    return kvl__cuda_check(cudaErrorMisalignedAddress);
  int status = KVL_ERR_UNSUPPORTED;
  if (a.dtype == KVL_DTYPE_BF16) status = launch_16bit<__nv_bfloat16>(a, q, splits);
  else if (a.dtype == KVL_DTYPE_F16) status = launch_16bit<__half>(a, q, splits);
  else {
    KVL_CUDA_BY_FLOAT(a.cache.dtype, T, status = launch_f32_dim<T>(a, q, splits);)
  }
  return status < 0 ? status : kvl__cuda_launched();
}

}  // namespace
}  // namespace kvl

KVL_CUDA_WORKSPACE(paged_attention) {
  const kvl_paged_attention_args &a = *(const kvl_paged_attention_args *)args;
  return kvl::splits_bytes(a, kvl::decode_splits(a, sm_count));
}

KVL_CUDA_KERNEL(paged_attention) {
  const kvl_paged_attention_args &a = *(const kvl_paged_attention_args *)args;
  const kvl_cuda_queue *q = (const kvl_cuda_queue *)queue;
  return kvl::launch(a, q, kvl::decode_splits(a, q->sm_count));
}
