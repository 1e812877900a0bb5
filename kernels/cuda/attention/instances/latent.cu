/* Attention over pages whose values are the first numbers of their keys: which kernel takes a
 * call, and its launch. latent.cuh has 16-bit queries on Hopper, over pages of their dtype or of
 * f8_latent with values of 512 numbers; latent_rows.cuh has everything else. */
#include "cuda/attention/latent_launch.cuh"

#include "cuda/attention/hook_launch.cuh"
#include "cuda/attention/latent.cuh"
#include "cuda/attention/latent_rows.cuh"
#include "cuda/attention/wgmma_launch.cuh"

namespace kvl {
namespace {

constexpr int VALUES = latent_shape<64>::D;
static_assert(latent_shape<64>::KEY_DIMS == LATENT_VALUES_MOST);

bool is_f8(const kvl_paged_attention_args &a) { return a.cache.codec == KVL_CODEC_F8_LATENT; }

bool takes(const kvl_paged_attention_args &a, int device) {
  if (!is_hopper_device(device) || a.dtype == KVL_DTYPE_F32) return false;
  if (a.cache.blocks * a.cache.bytes_page / a.cache.key.bytes_row > INT_MAX)
    return false; /* more rows than bring_latents can number */
  return is_f8(a) ? a.cache.value.dim == VALUES
                  : a.cache.codec == a.dtype && a.cache.value.dim <= VALUES;
}

/* The result of f with the shape for a call. A hook is compiled for one, by the same rules
 * (print/cuda_attention.lua). */
template <bool F8, class F> auto with_rows(const kvl_paged_attention_args &a, F f) {
  const int64_t group = a.heads / a.cache.kv_heads;
  const bool one = a.listed || !a.starts; /* token for a tile */
  if (one && group <= 16) return f(latent_shape<16, F8>());
  if (one && group <= 32) return f(latent_shape<32, F8>());
  return f(latent_shape<64, F8>());
}
template <class F> auto with_shape(const kvl_paged_attention_args &a, F f) {
  return is_f8(a) ? with_rows<true>(a, f) : with_rows<false>(a, f);
}

/* Maps the pages as [strips of all blocks, block_size / 8, key_dim / 64, 8, 64]: a box has
 * `parts` times 64 numbers of `groups` times eight keys, and what lies outside is 0. */
template <class T>
int map_latents(const kvl_pages &c, int groups, int parts, CUtensorMap *map) {
  *map = {};
  if (groups == 0) return KVL_OK;
  const cuuint64_t bytes_row = c.key.bytes_row;
  const cuuint64_t dims[5] = {64, 8, (cuuint64_t)c.key.dim / 64, (cuuint64_t)c.block_size / 8,
                              (cuuint64_t)c.blocks * kvl__strips(&c)};
  const cuuint64_t strides[4] = {bytes_row, 128, 8 * bytes_row, (cuuint64_t)c.key.bytes};
  const cuuint32_t box[5] = {64, 8, (cuuint32_t)parts, (cuuint32_t)groups, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult r = encode_map()(
      map,
      same<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
      c.memory, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? KVL_OK : kvl__cuda_check(cudaErrorInvalidValue);
}

template <class shape>
size_t plan_of(const kvl_paged_attention_args &a, int device, int sm_count,
               wgmma_plan &plan) {
  const size_t bytes = plan_wgmma<shape>(a, false, device, sm_count, plan);
  /* Boxes also bring neighbouring keys, and keys that no window or tree shows. */
  const bool is_apart = a.listed || a.window > 0 || (a.tree && !a.starts);
  if (shape::F8 || is_apart || a.cache.key.dim % 64) plan.box = 0;
  return bytes;
}

/* Joins divided work, and computes the rows again whose sums are not finite. With a hook that
 * may hide keys, its own kernel does the latter. */
template <class T, class C>
int finish_tiles(const kvl_hooked_attention_args &h, const wgmma_plan &plan,
                 const kvl_cuda_queue *q) {
  const kvl_paged_attention_args &a = h.base;
  const bool hides = h.hook && !h.only_keeps, whole = plan.has_whole();
  if (plan.divided > 0) {
    const int status = launch_wgmma_combine(a, plan, hides || whole, q);
    if (status < 0) return status;
  }
  if (hides) return launch_hooked_mend<T, C>(h, q);
  return whole && !a.listed ? launch_mend<T, C, VALUES>(a, q) : (int)KVL_OK;
}

template <class T, class C, class shape>
int launch_tiles(const kvl_hooked_attention_args &h, const kvl_cuda_queue *q) {
  constexpr auto kernel = latent_attention<T, shape>;
  const kvl_paged_attention_args &a = h.base;
  wgmma_plan plan;
  plan_of<shape>(a, q->device, q->sm_count, plan);
  wgmma_maps maps;
  int status = map_latents<T>(a.cache, plan.box, latent_parts(0), &maps.rows);
  if (status == KVL_OK)
    status = map_latents<T>(a.cache, plan.box, latent_parts(LATENT_LAST), &maps.last);
  if (status == KVL_OK && plan.counter)
    status = kvl__cuda_check(cudaMemsetAsync(plan.counter, 0, sizeof(int), q->stream));
  if (status < 0) return status;
  const bool divides = !plan.has_whole(); /* everything */
  const int blocks = plan.blocks(q->sm_count);
  if (h.hook) {
    hook_kernel k = {"", blocks, 1, shape::THREADS, shape::SHARED_BYTES, divides};
    snprintf(k.name, sizeof k.name, "latent_%d_%s%s", shape::ROWS, type_name<T>,
             codec_suffix<C>);
    status = launch_hooked(h, k, &a, &maps, q, &plan);
  } else {
    status = allow_shared<kernel>(q, shape::SHARED_BYTES);
    if (status == KVL_OK) status = prefer_shared<kernel>(q);
    if (status < 0) return status;
    if (divides)
      status = launch_programmatic(kernel, blocks, shape::THREADS, shape::SHARED_BYTES, q, a,
                                   maps, plan);
    else kernel<<<blocks, shape::THREADS, shape::SHARED_BYTES, q->stream>>>(a, maps, plan);
  }
  return status < 0 ? status : finish_tiles<T, C>(h, plan, q);
}

template <class T>
int launch_16bit(const kvl_hooked_attention_args &h, const kvl_cuda_queue *q) {
  return with_shape(h.base, [&](auto of) {
    using shape = decltype(of);
    using C = std::conditional_t<shape::F8, f8_latent, T>;
    return launch_tiles<T, C, shape>(h, q);
  });
}

template <class T, class C>
__global__ void __launch_bounds__(LATENT_ROW_WARPS *WARP)
    latent_rows(const __grid_constant__ kvl_paged_attention_args a) {
  attend_latent_rows<T, C>(a, no_hook());
}

template <class T, class C>
int launch_rows(const kvl_hooked_attention_args &h, const kvl_cuda_queue *q) {
  const kvl_paged_attention_args &a = h.base;
  const int blocks = grid(a.tokens * a.heads, LATENT_ROW_WARPS, q);
  const int threads = LATENT_ROW_WARPS * WARP;
  if (!h.hook) return launch_programmatic(latent_rows<T, C>, blocks, threads, 0, q, a);
  hook_kernel k = {"", blocks, 1, threads, 0, true};
  snprintf(k.name, sizeof k.name, "latent_%s_%s", type_name<T>, type_name<C>);
  return launch_hooked(h, k, &a, nullptr, q);
}

}  // namespace

int launch_latent(const kvl_hooked_attention_args &h, const kvl_cuda_queue *q) {
  const kvl_paged_attention_args &a = h.base;
  const bool is_bf16 = a.dtype == KVL_DTYPE_BF16;
  if (takes(a, q->device))
    return is_bf16 ? launch_16bit<__nv_bfloat16>(h, q) : launch_16bit<__half>(h, q);
  if (is_f8(a)) KVL_CUDA_BY_FLOAT(a.dtype, T, { return (launch_rows<T, f8_latent>(h, q)); })
  if (is_bf16) return launch_rows<__nv_bfloat16, __nv_bfloat16>(h, q);
  if (a.dtype == KVL_DTYPE_F16) return launch_rows<__half, __half>(h, q);
  KVL_CUDA_BY_FLOAT(a.cache.codec, C, { return launch_rows<float, C>(h, q); })
}

size_t latent_bytes(const kvl_hooked_attention_args &h, int device, int sm_count) {
  const kvl_paged_attention_args &a = h.base;
  if (!takes(a, device)) return 0;
  return with_shape(a, [&](auto shape) {
    wgmma_plan plan;
    return plan_of<decltype(shape)>(a, device, sm_count, plan);
  });
}

}  // namespace kvl
