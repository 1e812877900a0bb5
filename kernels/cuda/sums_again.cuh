/* What the tensor cores cannot do: leave V of a key out of one row of a tile and keep it in
 * another. A row gives the keys that it does not see the weight 0, but 0 * NaN and 0 * inf
 * are NaN. So a prefill looks at its sums when they are done. If one of them is NaN, and V of
 * a key that is hidden from some row is not finite, the rows' sums are computed again, from
 * global memory, one key after the other, without the keys that are hidden.
 *
 * This costs nothing but the look where all numbers are finite. Where NaN is what rows see, it
 * costs a search among the hidden keys, which lie beside the causal edge and the window's. */
#ifndef KVL_CUDA_SUMS_AGAIN_CUH
#define KVL_CUDA_SUMS_AGAIN_CUH

#include "paged.cuh"

namespace kvl {

/* Tells all lanes of a warp whether one of its sums is NaN or infinite. x(i) are a lane's N
 * numbers, of two rows as an mma has them. What is in rows that do not exist does not count:
 * they may see keys that do not exist. */
template <int N, class F>
__device__ __forceinline__ bool any_not_finite(bool has0, bool has1, F x) {
  float zero[2] = {};
#pragma unroll
  for (int i = 0; i < N; i++) zero[i / 2 & 1] += x(i) * 0.f;
  return __any_sync(ALL_LANES, (has0 && zero[0] != 0.f) || (has1 && zero[1] != 0.f));
}

/* A row of V from one lane, for all lanes. */
template <class C> __device__ __forceinline__ const C *row_of_lane(const C *row, int lane) {
  return (const C *)__shfl_sync(ALL_LANES, (unsigned long long)row, lane);
}

/* Is V of a hidden key not finite? A warp calls it. hidden(key) gives a lane the row of V of
 * that key among 0 ... keys-1, or NULL if there is no such key or all rows see it. */
template <class C, class F>
__device__ __forceinline__ bool hides_poison(int keys, int dim, F hidden) {
  const int lane = threadIdx.x % WARP;
#pragma unroll 1
  for (int first = 0; first < keys; first += WARP) {
    const C *const row = first + lane < keys ? hidden(first + lane) : nullptr;
#pragma unroll 1
    for (unsigned rest = __ballot_sync(ALL_LANES, row != nullptr); rest; rest &= rest - 1) {
      const C *const v = row_of_lane(row, __ffs(rest) - 1);
      bool finite = true;
      for (int d = lane; d < dim; d += WARP) finite = finite && to_float(v[d]) * 0.f == 0.f;
      if (!__all_sync(ALL_LANES, finite)) return true;
    }
  }
  return false;
}

/* The sums of one row: a lane gets dims `lane`, `lane` + 32, ... A warp calls it.
 * weigh(key, v) gives a lane the weight of a key and its row of V, or NULL if the row does not
 * see it. Keys are taken from the last to the first, until all sums are NaN. */
template <class C, int N, class F>
__device__ __forceinline__ void row_again(float (&sums)[N], int keys, int dim, F weigh) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < N; i++) sums[i] = 0.f;
#pragma unroll 1
  for (int first = (keys - 1) / WARP * WARP; first >= 0; first -= WARP) {
    const C *row = nullptr;
    const float weight = first + lane < keys ? weigh(first + lane, row) : 0.f;
    bool all_nan = true;
#pragma unroll 1
    for (unsigned rest = __ballot_sync(ALL_LANES, row != nullptr); rest; rest &= rest - 1) {
      const int from = __ffs(rest) - 1;
      const C *const v = row_of_lane(row, from);
      const float by = __shfl_sync(ALL_LANES, weight, from);
#pragma unroll
      for (int i = 0; i < N; i++)
        if (i * WARP + lane < dim) sums[i] += by * to_float(v[i * WARP + lane]);
    }
#pragma unroll
    for (int i = 0; i < N; i++)
      all_nan = all_nan && (i * WARP + lane >= dim || sums[i] != sums[i]);
    if (__all_sync(ALL_LANES, all_nan)) return;
  }
}

/* Puts the sums of row_again where the results of an mma have NaN: sum_at(n, c) is this lane's
 * element of dim 8 n + 2 (lane % 4) + c of the row, which the lanes with `own` hold. */
template <int D, int N, class F>
__device__ __forceinline__ void mend_row(const float (&sums)[N], bool own, F sum_at) {
  const int pair = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float sum = __shfl_sync(ALL_LANES, sums[n / 4], n % 4 * 8 + pair + c);
      float &x = sum_at(n, c);
      if (own && x != x) x = sum;
    }
}

}  // namespace kvl

#endif
