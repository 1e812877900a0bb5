/* Hopper's own instructions (sm_90a), one small function each: tensor copies (TMA),
 * tensor-core products of a warpgroup (wgmma), and moving registers between warpgroups.
 *
 * A warpgroup is four neighbouring warps; the first one's number is a multiple of four.
 * Shared memory is named by its 32-bit address. This file compiles for sm_90a only, so
 * kernels keep their bodies inside #if KVL_SM90A.
 *
 * Source    PTX ISA 8.0 and later: cp.async.bulk.tensor, wgmma, setmaxnreg. */
#ifndef KVL_CUDA_HOPPER_CUH
#define KVL_CUDA_HOPPER_CUH

#include <cuda.h>

#include <type_traits>

#include "cuda/barrier.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define KVL_SM90A 1
#else
#define KVL_SM90A 0
#endif

namespace kvl {

constexpr int WARPGROUP = 128;

#if KVL_SM90A

/* ---- copies ---------------------------------------------------------------------------- */

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/* Copies the box at coordinates (c0, 0, 0, c3, c4) to shared memory; the barrier counts its
 * bytes. One thread calls it. */
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap *map, int c0,
                                         int c3, int c4, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile"
      ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4, %5}], [%6];" ::"r"(shared),
      "l"(map), "r"(c0), "r"(0), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}
/* The same for a box at coordinates (0, c1, c2). */
__device__ __forceinline__ void copy_box3(uint32_t shared, const CUtensorMap *map, int c1,
                                          int c2, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile"
               ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
               "l"(map), "r"(0), "r"(c1), "r"(c2), "r"(barrier)
               : "memory");
}
/* The same for a box at coordinates (0, 0, c2, c3, c4). */
__device__ __forceinline__ void copy_box_from(uint32_t shared, const CUtensorMap *map, int c2,
                                              int c3, int c4, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile"
      ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3, %4, %5}], [%6];" ::"r"(shared),
      "l"(map), "r"(0), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}
/* The same for a box at coordinates (0, c1, 0, c3). */
__device__ __forceinline__ void copy_box4(uint32_t shared, const CUtensorMap *map, int c1,
                                          int c3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile"
      ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2, %4}], [%5];" ::"r"(shared),
      "l"(map), "r"(0), "r"(c1), "r"(c3), "r"(barrier)
      : "memory");
}
/* The same copies with a hint, see read_once. */
__device__ __forceinline__ void copy_box3(uint32_t shared, const CUtensorMap *map, int c1,
                                          int c2, uint32_t barrier, uint64_t hint) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile"
               ".mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
               "l"(map), "r"(0), "r"(c1), "r"(c2), "r"(barrier), "l"(hint)
               : "memory");
}
__device__ __forceinline__ void copy_box4(uint32_t shared, const CUtensorMap *map, int c1,
                                          int c3, uint32_t barrier, uint64_t hint) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile"
               ".mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1, {%2, %3, %2, %4}], [%5], %6;" ::"r"(shared),
               "l"(map), "r"(0), "r"(c1), "r"(c3), "r"(barrier), "l"(hint)
               : "memory");
}

/* Reads x. ptxas moves neither this read nor what depends on it across waits. */
__device__ __forceinline__ float load_late(const float &shared) {
  float x;
  asm volatile("ld.volatile.shared.f32 %0, [%1];"
               : "=f"(x)
               : "r"(shared_address(&shared))
               : "memory");
  return x;
}

/* Writes x if it is negative. ptxas moves neither this write nor the computation of x across
 * waits. The write is predicated because a branch would have kept ptxas from using uniform
 * registers. */
__device__ __forceinline__ void store_late_if_negative(const float &shared, float x) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %1, 0f00000000;\n"
               "@p st.volatile.shared.f32 [%0], %1;\n}" ::"r"(shared_address(&shared)),
               "f"(x)
               : "memory");
}

/* Stores four 8 x 8 matrices of 16-bit numbers, each lane one row of 16 bytes' address: lanes
 * 0 ... 7 of the first matrix and so on. A lane holds two neighbours of row lane / 4 of each. */
__device__ __forceinline__ void store_matrices(uint32_t shared, const uint32_t (&x)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

/* ---- registers ------------------------------------------------------------------------- */

/* All four warps of a warpgroup call it; N is a multiple of 8. */
template <int N> __device__ __forceinline__ void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- products of a warpgroup ----------------------------------------------------------- */

/* Describes a matrix in shared memory to wgmma. Its rows have 128 (64, 32) bytes; eight rows
 * are one atom of 1024 (512, 256) bytes, aligned to its size, and 16-byte piece p of row r is
 * at p ^ r (p ^ r / 2, p ^ r / 4), as a copy with a swizzle of that width leaves it. If k runs
 * along the rows, `step` is the distance between atoms of the other dimension. If k runs down
 * the rows, `step` is the distance between atoms along k, and `across` that between atoms of
 * the other dimension. */
template <int ROW_BYTES = 128>
__device__ __forceinline__ uint64_t matrix_at(uint32_t shared, int step, int across = 16) {
  constexpr uint64_t swizzle = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3;
  return (uint64_t)(shared >> 4) | (uint64_t)(across >> 4) << 16 |
         (uint64_t)(step >> 4) << 32 | swizzle << 62;
}

/* The same with k along the rows, and atoms one after the other. */
template <int ROW_BYTES> __device__ __forceinline__ uint64_t rows_at(uint32_t shared) {
  return matrix_at<ROW_BYTES>(shared, 8 * ROW_BYTES);
}

/* The matrix that lies `bytes` further on. */
__device__ __forceinline__ uint64_t matrix_plus(uint64_t matrix, int bytes) {
  return matrix >> 32 << 32 | ((uint32_t)matrix + (bytes >> 4));
}

/* Call it before the first product, and when a product's registers were touched since. */
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most N committed groups are in flight. */
template <int N> __device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Products change registers without the compiler's knowledge: nothing moves across this. */
template <int N> __device__ __forceinline__ void settle(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define KVL_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KVL_D8(i)                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
      "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KVL_D16(i) KVL_D8(i), KVL_D8(i + 8)
#define KVL_D32(i) KVL_D16(i), KVL_D16(i + 16)
#define KVL_D64 KVL_D32(0), KVL_D32(32)
#define KVL_NAMES_4 "%0,%1,%2,%3"
#define KVL_NAMES_8 KVL_NAMES_4 ",%4,%5,%6,%7"
#define KVL_NAMES_12 KVL_NAMES_8 ",%8,%9,%10,%11"
#define KVL_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define KVL_NAMES_32 \
  KVL_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define KVL_NAMES_40 KVL_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define KVL_NAMES_48 KVL_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define KVL_NAMES_64 \
  KVL_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define KVL_NAMES_96                                                                      \
  KVL_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81" \
               ",%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define KVL_NAMES_128                                                                    \
  KVL_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110" \
               ",%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124"  \
               ",%125,%126,%127"
/* d[64 x N] = a b^T (+ d) with k 16; a and b are in shared memory with k along the rows; sums
 * are fp32. Warp w of the group holds rows 16 w ... 16 w + 15 of d, and lane l has rows l/4
 * and l/4 + 8 of these: d[4 n] and d[4 n + 1] are columns 8 n + 2 (l%4) and the next one of
 * the first row, d[4 n + 2] and d[4 n + 3] the same columns of the second. */
#define KVL_SHARED_PRODUCT(N, TYPE, NAMES, A, B, ADD, ...)                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                           \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES \
               "}, " A ", " B ", p, 1, 1, 0, 0;\n}"                                       \
               : __VA_ARGS__                                                              \
               : "l"(a), "l"(b), "r"((int)add))
template <class T, int N>
__device__ __forceinline__ void product(float (&d)[N], uint64_t a, uint64_t b, bool add) {
  constexpr bool half = std::is_same_v<T, __half>;
  if constexpr (N == 4) {
    if constexpr (half)
      KVL_SHARED_PRODUCT(8, "f16", KVL_NAMES_4, "%4", "%5", "%6", KVL_D4(0));
    else KVL_SHARED_PRODUCT(8, "bf16", KVL_NAMES_4, "%4", "%5", "%6", KVL_D4(0));
  } else if constexpr (N == 8) {
    if constexpr (half)
      KVL_SHARED_PRODUCT(16, "f16", KVL_NAMES_8, "%8", "%9", "%10", KVL_D8(0));
    else KVL_SHARED_PRODUCT(16, "bf16", KVL_NAMES_8, "%8", "%9", "%10", KVL_D8(0));
  } else if constexpr (N == 12) {
    if constexpr (half)
      KVL_SHARED_PRODUCT(24, "f16", KVL_NAMES_12, "%12", "%13", "%14", KVL_D8(0), KVL_D4(8));
    else
      KVL_SHARED_PRODUCT(24, "bf16", KVL_NAMES_12, "%12", "%13", "%14", KVL_D8(0), KVL_D4(8));
  } else if constexpr (N == 16) {
    if constexpr (half)
      KVL_SHARED_PRODUCT(32, "f16", KVL_NAMES_16, "%16", "%17", "%18", KVL_D16(0));
    else KVL_SHARED_PRODUCT(32, "bf16", KVL_NAMES_16, "%16", "%17", "%18", KVL_D16(0));
  } else if constexpr (N == 32) {
    if constexpr (half)
      KVL_SHARED_PRODUCT(64, "f16", KVL_NAMES_32, "%32", "%33", "%34", KVL_D32(0));
    else KVL_SHARED_PRODUCT(64, "bf16", KVL_NAMES_32, "%32", "%33", "%34", KVL_D32(0));
  } else if constexpr (N == 40) {
    if constexpr (half)
      KVL_SHARED_PRODUCT(80, "f16", KVL_NAMES_40, "%40", "%41", "%42", KVL_D32(0),
                         KVL_D8(32));
    else
      KVL_SHARED_PRODUCT(80, "bf16", KVL_NAMES_40, "%40", "%41", "%42", KVL_D32(0),
                         KVL_D8(32));
  } else if constexpr (N == 48) {
    if constexpr (half)
      KVL_SHARED_PRODUCT(96, "f16", KVL_NAMES_48, "%48", "%49", "%50", KVL_D32(0),
                         KVL_D16(32));
    else
      KVL_SHARED_PRODUCT(96, "bf16", KVL_NAMES_48, "%48", "%49", "%50", KVL_D32(0),
                         KVL_D16(32));
  } else {
    static_assert(N == 64, "8, 16, 24, 32, 64, 80, 96 or 128 columns");
    if constexpr (half)
      KVL_SHARED_PRODUCT(128, "f16", KVL_NAMES_64, "%64", "%65", "%66", KVL_D64);
    else KVL_SHARED_PRODUCT(128, "bf16", KVL_NAMES_64, "%64", "%65", "%66", KVL_D64);
  }
}

/* d[64 x N] += a^T b^T, with a in shared memory with k down the rows, and b with k along them. */
#define KVL_TURNED_PRODUCT(N, TYPE, NAMES, A, B, ...)                                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                 \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES \
               "}, " A ", " B ", p, 1, 1, 1, 0;\n}"                                       \
               : __VA_ARGS__                                                              \
               : "l"(a), "l"(b))
template <class T, int N>
__device__ __forceinline__ void product_turned(float (&d)[N], uint64_t a, uint64_t b) {
  constexpr bool half = std::is_same_v<T, __half>;
  if constexpr (N == 8) {
    if constexpr (half) KVL_TURNED_PRODUCT(16, "f16", KVL_NAMES_8, "%8", "%9", KVL_D8(0));
    else KVL_TURNED_PRODUCT(16, "bf16", KVL_NAMES_8, "%8", "%9", KVL_D8(0));
  } else {
    static_assert(N == 16, "16 or 32 columns");
    if constexpr (half) KVL_TURNED_PRODUCT(32, "f16", KVL_NAMES_16, "%16", "%17", KVL_D16(0));
    else KVL_TURNED_PRODUCT(32, "bf16", KVL_NAMES_16, "%16", "%17", KVL_D16(0));
  }
}

/* d[64 x N] = a b (+ d). a is in registers (four 16-bit pairs, laid out like two neighbouring n
 * of d), b in shared memory with k down the rows. */
#define KVL_REGISTER_PRODUCT(N, TYPE, NAMES, A, B, ADD, ...)                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                           \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES \
               "}, {" A "}, " B ", p, 1, 1, 1;\n}"                                        \
               : __VA_ARGS__                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))
template <class T, int N>
__device__ __forceinline__ void product(float (&d)[N], const uint32_t (&a)[4], uint64_t b,
                                        bool add = true) {
  constexpr bool half = std::is_same_v<T, __half>;
  if constexpr (N == 32) {
    if constexpr (half)
      KVL_REGISTER_PRODUCT(64, "f16", KVL_NAMES_32, "%32,%33,%34,%35", "%36", "%37",
                           KVL_D32(0));
    else
      KVL_REGISTER_PRODUCT(64, "bf16", KVL_NAMES_32, "%32,%33,%34,%35", "%36", "%37",
                           KVL_D32(0));
  } else if constexpr (N == 48) {
    if constexpr (half)
      KVL_REGISTER_PRODUCT(96, "f16", KVL_NAMES_48, "%48,%49,%50,%51", "%52", "%53",
                           KVL_D32(0), KVL_D16(32));
    else
      KVL_REGISTER_PRODUCT(96, "bf16", KVL_NAMES_48, "%48,%49,%50,%51", "%52", "%53",
                           KVL_D32(0), KVL_D16(32));
  } else if constexpr (N == 64) {
    if constexpr (half)
      KVL_REGISTER_PRODUCT(128, "f16", KVL_NAMES_64, "%64,%65,%66,%67", "%68", "%69",
                           KVL_D64);
    else
      KVL_REGISTER_PRODUCT(128, "bf16", KVL_NAMES_64, "%64,%65,%66,%67", "%68", "%69",
                           KVL_D64);
  } else if constexpr (N == 96) {
    if constexpr (half)
      KVL_REGISTER_PRODUCT(192, "f16", KVL_NAMES_96, "%96,%97,%98,%99", "%100", "%101",
                           KVL_D64, KVL_D32(64));
    else
      KVL_REGISTER_PRODUCT(192, "bf16", KVL_NAMES_96, "%96,%97,%98,%99", "%100", "%101",
                           KVL_D64, KVL_D32(64));
  } else {
    static_assert(N == 128, "64, 96, 128, 192 or 256 columns");
    if constexpr (half)
      KVL_REGISTER_PRODUCT(256, "f16", KVL_NAMES_128, "%128,%129,%130,%131", "%132", "%133",
                           KVL_D64, KVL_D32(64), KVL_D32(96));
    else
      KVL_REGISTER_PRODUCT(256, "bf16", KVL_NAMES_128, "%128,%129,%130,%131", "%132", "%133",
                           KVL_D64, KVL_D32(64), KVL_D32(96));
  }
}

/* d[64 x N] = a b^T (+ d) of f8e4m3 with k 32; a and b are in shared memory with k along the
 * rows; d as above. Sums are fp32, but keep only about 14 bits from step to step. */
#define KVL_F8_PRODUCT(N, NAMES, A, B, ADD, ...)                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"           \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3" \
               " {" NAMES "}, " A ", " B ", p, 1, 1;\n}"                  \
               : __VA_ARGS__                                              \
               : "l"(a), "l"(b), "r"((int)add))
template <int N>
__device__ __forceinline__ void product_f8(float (&d)[N], uint64_t a, uint64_t b, bool add) {
  if constexpr (N == 16) {
    KVL_F8_PRODUCT(32, KVL_NAMES_16, "%16", "%17", "%18", KVL_D8(0), KVL_D8(8));
  } else if constexpr (N == 32) {
    KVL_F8_PRODUCT(64, KVL_NAMES_32, "%32", "%33", "%34", KVL_D32(0));
  } else {
    static_assert(N == 64, "32, 64 or 128 columns");
    KVL_F8_PRODUCT(128, KVL_NAMES_64, "%64", "%65", "%66", KVL_D64);
  }
}

#undef KVL_F8_PRODUCT
#undef KVL_REGISTER_PRODUCT
#undef KVL_TURNED_PRODUCT
#undef KVL_SHARED_PRODUCT
#undef KVL_NAMES_128
#undef KVL_NAMES_96
#undef KVL_NAMES_64
#undef KVL_NAMES_48
#undef KVL_NAMES_32
#undef KVL_NAMES_16
#undef KVL_NAMES_12
#undef KVL_NAMES_8
#undef KVL_NAMES_4
#undef KVL_D64
#undef KVL_D32
#undef KVL_D16
#undef KVL_D8
#undef KVL_D4

#endif

#ifndef __CUDACC_RTC__ /* NVRTC compiles kernels alone */

/* ---- the host's side ------------------------------------------------------------------- */

using encode_map_function = CUresult(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                     const cuuint64_t *, const cuuint64_t *,
                                     const cuuint32_t *, const cuuint32_t *,
                                     CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
/* The driver's function, found at run time: kvlab does not link to it. NULL: it has none. */
inline encode_map_function *encode_map() {
  static encode_map_function *found = [] {
    void *f = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                                     cudaEnableDefault, &result);
    return e == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? (encode_map_function *)f
               : nullptr;
  }();
  return found;
}

#endif

}  // namespace kvl

#endif
