/* The warps that bring keys of f8_latent to latent.cuh: rows of 512 numbers in 8 bits, their
 * four scales, and up to 64 numbers in bf16. All become numbers of q's dtype, rounded once.
 *
 * Each of four or eight warps has its share of every tile, from the look-up of its keys to their
 * last number, so that they never wait for each other. The 8-bit numbers arrive in the
 * upper half of the memory that they will fill: 64 numbers of eight keys, then the next 64.
 * A step reads 512 bytes and writes the 1024 bytes that they become, from the lowest on;
 * what it overwrites was read in this step or before. The numbers behind the values are
 * copied to their final place.
 *
 * Budget    a tile has 32768 numbers in 8 bits, which take about 3.5 issue slots for each lane
 *           and number: 900 of the 2200 cycles that products of 64 rows take. Four warps need
 *           3800, because one warp to a scheduler waits for its own results: they are the limit
 *           from 64 rows on (notes/20261127-latents.md) */
#ifndef KVL_CUDA_LATENT_CONVERT_CUH
#define KVL_CUDA_LATENT_CONVERT_CUH

#include "cuda/attention/latent_memory.cuh"

namespace kvl {

#if KVL_SM90A

/* Four numbers times their scale. */
template <class T> __device__ __forceinline__ uint2 scaled_f8(uint32_t x, float scale) {
  const uint2 y = halves_of(x);
  const float2 a = unpack2(y.x, __half()), b = unpack2(y.y, __half());
  return make_uint2(pack2(a.x * scale, a.y * scale, T()),
                    pack2(b.x * scale, b.y * scale, T()));
}

/* One of the warps. Lane l looks up key l % KEYS of the warp's, and has SCALES of its four
 * scales, the first of which has the number l / KEYS * SCALES. */
template <class T, class shape> struct latent_converter {
  static constexpr int KEYS = shape::KEYS / shape::COPIERS, SCALES = KEYS / 8;
  const kvl_paged_attention_args &a;
  const wgmma_plan &plan;
  latent_memory<shape> &memory;
  const int warp, lane;
  int64_t row; /* of this lane's key, in bytes from the start of the memory; -1: none */
  float scales[SCALES];

  __device__ latent_converter(const kvl_paged_attention_args &a_, const wgmma_plan &plan_,
                              latent_memory<shape> &memory_, int warp_)
      : a(a_), plan(plan_), memory(memory_), warp(warp_), lane(threadIdx.x % WARP) {}

  __device__ __forceinline__ void look(const latent_look_up &look_up, int kv_head) {
    row = look_up.block < 0
              ? -1
              : kvl__row_at(&a.cache, &a.cache.key, look_up.block, kv_head, look_up.token);
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
      scales[i] = 0.f;
      if (row >= 0)
        scales[i] = __ldg((const float *)((const char *)a.cache.memory + row + shape::D) +
                          lane / KEYS * SCALES + i);
    }
  }
  /* 16 bytes of a key's row, or zeros. */
  __device__ __forceinline__ void copy(uint32_t to, int key, int bytes, bool inside) const {
    const int64_t at = __shfl_sync(ALL_LANES, (long long)row, key);
    copy_async(to, (const char *)a.cache.memory + (at < 0 ? 0 : at) + bytes,
               at >= 0 && inside);
  }
  __device__ __forceinline__ uint32_t room(int stage, int piece) const {
    return memory.keys(stage) + latent_piece_at(piece) + warp * SCALES * latent_group(piece);
  }
  __device__ __forceinline__ void copy_rest(int stage) const {
    const bool inside = lane % 8 < (a.cache.key.dim - shape::D) / 8;
    const uint32_t to = room(stage, LATENT_LAST) + swizzled<8>(lane / 8, lane % 8);
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) /* keys 4 * i + lane / 8 */
      copy((to ^ i % 2 * 64) + i * 512, 4 * i + lane / 8, shape::D + 16 + lane % 8 * 16,
           inside);
  }
  __device__ __forceinline__ void copy_piece(int stage, int piece) const {
    const uint32_t to = room(stage, piece) + latent_group(0) / 2 + lane % 16 / 4 * 512 +
                        lane / 16 * 64 + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) /* keys 2 * i + lane / 16 */
      copy(to + i / 4 * latent_group(0) + i % 4 * 128, 2 * i + lane / 16,
           piece * 256 + lane % 16 * 16, true);
  }
  /* Converts the numbers behind the values to f16, in place. */
  __device__ __forceinline__ void convert_rest(int stage) const {
    const uint32_t at = room(stage, LATENT_LAST) + lane * 16;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
      uint4 x = load_shared(at + i * 512);
      uint32_t *const words = &x.x;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float2 y = unpack2(words[e], __nv_bfloat16());
        words[e] = pack2(y.x, y.y, T());
      }
      store_shared(at + i * 512, x);
    }
  }
  /* The scale of 128 numbers, the `half` of a piece, of key lane / 4 of eight. */
  __device__ __forceinline__ float scale_of(int piece, int half, int eight) const {
    const int number = piece * 2 + half;
    return __shfl_sync(ALL_LANES, scales[half % SCALES],
                       number / SCALES * KEYS + eight * 8 + lane / 4);
  }
  __device__ __forceinline__ void convert_piece(int stage, int piece) const {
#pragma unroll 1 /* more code would not fit in the instruction cache */
    for (int eight = 0; eight < KEYS / 8; eight++) {
      const uint32_t room8 = room(stage, piece) + eight * latent_group(0);
      const uint32_t from = room8 + latent_group(0) / 2 + lane * 16;
      const uint32_t to = room8 + swizzled<8>(lane / 4, lane % 4 * 2);
      const float by[2] = {scale_of(piece, 0, eight), scale_of(piece, 1, eight)};
      uint4 next = load_shared(from);
#pragma unroll
      for (int part = 0; part < 4; part++) {
        const float scale = by[part / 2];
        const uint4 x = next;
        if (part < 3) next = load_shared(from + (part + 1) * 512);
        const uint2 c0 = scaled_f8<T>(x.x, scale), c1 = scaled_f8<T>(x.y, scale);
        const uint2 c2 = scaled_f8<T>(x.z, scale), c3 = scaled_f8<T>(x.w, scale);
        __syncwarp(); /* the other lanes have read what this step overwrites */
        store_shared(to + part * 1024, make_uint4(c0.x, c0.y, c1.x, c1.y));
        store_shared((to ^ 16) + part * 1024, make_uint4(c2.x, c2.y, c3.x, c3.y));
      }
    }
  }

  __device__ __forceinline__ void bring_tile(int s, uint32_t free, int index) {
    barrier_wait(memory.empty(s, LATENT_LAST), free);
    copy_rest(s);
    copy_commit();
    barrier_wait(memory.empty(s, 0), free);
    copy_piece(s, 0);
    copy_commit();
    barrier_wait(memory.empty(s, 1), free); /* all of the last tile here was read */
    copy_piece(s, 1);
    copy_commit();
    if (lane < KEYS) memory.indices[s][warp * KEYS + lane] = index;
    const int2 span = {__reduce_min_sync(ALL_LANES, index),
                       __reduce_max_sync(ALL_LANES, index)};
    if (lane == 0) memory.spans[s][warp] = span;
    copy_wait<2>();
    if constexpr (!same<T, __nv_bfloat16>) convert_rest(s);
    /* The warps that multiply order these writes before their products. */
    barrier_arrive_warp(memory.full(s, LATENT_LAST), lane);
    copy_wait<1>();
    __syncwarp();
#pragma unroll 1
    for (int piece = 0; piece < 2; piece++) {
      convert_piece(s, piece);
      barrier_arrive_warp(memory.full(s, piece), lane);
      copy_wait<0>();
      __syncwarp();
    }
  }
  __device__ __forceinline__ void bring() {
    latent_stage<shape> stage;
    latent_look_up look_up(a, plan);
    uint32_t step = 0;
    auto bring_work = [&](const wgmma_work &w) {
      look_up.begin_work(w, warp * KEYS + lane % KEYS, shape::KEYS);
      look(look_up, w.kv_head);
      barrier_wait(memory.q_empty(), (step++ & 1) ^ 1);
      copy_queries<T>(a, memory, w, warp, shape::COPIERS);
      barrier_arrive_copied(memory.q_full());
      for (int tile = 0; tile < w.tiles; tile++) {
        stage.next(tile);
        bring_tile(stage.now, stage.parity() ^ 1, look_up.index);
        stage.done();
        look_up.go_on();
        look_up.ask();
        look(look_up, w.kv_head);
      }
    };
    if (warp == shape::COPIERS - 1) find_work(a, plan, memory, bring_work);
    else each_work(memory, bring_work);
  }
};

#endif

}  // namespace kvl

#endif
