/* Finds the nearest entries of a list by whole-number distances, in index order. A team of
 * thread blocks does it, each with the distances of one stretch of the list: the blocks share
 * their histograms, and each warp finds the edge and writes its part. Of the entries at the
 * distance of the edge, the first ones are taken. */
#ifndef KVL_CUDA_NEAREST_CUH
#define KVL_CUDA_NEAREST_CUH

#include "cuda/block_scan.cuh"
#include "cuda/team.cuh"

namespace kvl {

constexpr int NEAREST_THREADS = 512; /* of one block */
constexpr int NEAREST_COPIES = 4;    /* of a histogram, so that warps collide less often */
constexpr int NEAREST_RUN = 8;       /* neighbours that a lane takes together */

/* Bit i: neighbour i of NEAREST_RUN is nearer than the edge, or at the edge. */
struct run_bits {
  uint32_t nearer, equal;
};
__device__ __forceinline__ run_bits compare_run(const uint8_t *d, uint32_t edge) {
  const uint2 x = *(const uint2 *)d;
  edge *= 0x01010101u;
  /* Turns the ones of eight bytes into eight bits. */
  auto join = [](uint32_t low, uint32_t high) {
    return low * 0x10204080u >> 28 | high * 0x10204080u >> 28 << 4;
  };
  return {join(__vsetltu4(x.x, edge), __vsetltu4(x.y, edge)),
          join(__vseteq4(x.x, edge), __vseteq4(x.y, edge))};
}
__device__ __forceinline__ run_bits compare_run(const uint16_t *d, uint32_t edge) {
  const pack<uint16_t, NEAREST_RUN> x = load_pack<NEAREST_RUN>(d);
  run_bits bits = {0, 0};
#pragma unroll
  for (int i = 0; i < NEAREST_RUN; i++) {
    bits.nearer |= (uint32_t)(x.at[i] < edge) << i;
    bits.equal |= (uint32_t)(x.at[i] == edge) << i;
  }
  return bits;
}
__device__ __forceinline__ uint32_t both_counts(const run_bits &x) { /* 16 bits each */
  return (uint32_t)__popc(x.nearer) | (uint32_t)__popc(x.equal) << 16;
}

/* The edge of a list: the distance of the farthest entry that is taken. All nearer entries are
 * taken, and `ties` of the entries at this distance. */
struct list_edge {
  uint32_t distance, ties;
};
/* Counts of the entries that come before some index of the list: how many are nearer than the
 * edge, and how many are at its distance. */
struct list_before {
  uint32_t nearer, equal;
  __device__ __forceinline__ uint32_t place(const list_edge &edge) const {
    return nearer + min(equal, edge.ties);
  }
  __device__ __forceinline__ void add(uint32_t both) {
    nearer += both & 0xFFFF, equal += both >> 16;
  }
  __device__ __forceinline__ void add_of_warp(uint32_t both) {
    nearer += __reduce_add_sync(ALL_LANES, both & 0xFFFF);
    equal += __reduce_add_sync(ALL_LANES, both >> 16);
  }
};

__device__ __forceinline__ void add_to(uint4 &sum, const uint4 &x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

/* Sends the sum of the NEAREST_COPIES histograms [size] to all blocks of the team, and waits
 * for theirs. Begins with a barrier. */
__device__ __forceinline__ void share_counts(const uint32_t *mine, uint32_t *counts, int size,
                                             int team, int rank, uint64_t *barrier) {
  __syncthreads();
  if (team == 1) return;
  const uint32_t own_barrier = shared_address(barrier);
  if (threadIdx.x == 0) barrier_arrive_expect(own_barrier, team * size * 4);
#pragma unroll 1
  for (int to = threadIdx.x / 64; to < team; to += NEAREST_THREADS / 64)
#pragma unroll 1
    for (int i = threadIdx.x % 64 * 4; i < size; i += 64 * 4) {
      uint4 sum = *(const uint4 *)(mine + i);
#pragma unroll
      for (int c = 1; c < NEAREST_COPIES; c++)
        add_to(sum, *(const uint4 *)(mine + c * size + i));
      send_quad(to, sum, counts + rank * size + i, barrier);
    }
  barrier_wait(own_barrier, 0);
}

/* Finds the edge of the nearest `wanted` entries of a list whose histogram is the sum of
 * `parts` histograms, `stride` apart, and counts how many entries of the first `rank` parts
 * come before it. Every warp does this on its own. */
__device__ __forceinline__ void find_edge(const uint32_t *counts, int parts, int stride,
                                          int bins, int rank, uint32_t wanted,
                                          list_edge &edge, list_before &before) {
  const int lane = threadIdx.x % WARP;
  uint32_t passed = 0;
  before = {0, 0};
#pragma unroll 1
  for (int first = 0; first < bins; first += 4 * WARP) {
    uint4 all = make_uint4(0, 0, 0, 0), own = all;
    const int bin = first + 4 * lane;
    if (bin < bins)
#pragma unroll 4
      for (int r = 0; r < parts; r++) {
        const uint4 x = *(const uint4 *)(counts + r * stride + bin);
        add_to(all, x);
        if (r < rank) add_to(own, x);
      }
    const uint32_t sum = all.x + all.y + all.z + all.w;
    const uint32_t upto = passed + warp_scan(sum), start = upto - sum;
    const int owner = __ffs(__ballot_sync(ALL_LANES, start < wanted && wanted <= upto)) - 1;
    passed = __shfl_sync(ALL_LANES, upto, WARP - 1);
    /* i: which of the owner's four bins has the edge. Then counts before it and in it. */
    const uint32_t at[3] = {start + all.x, start + all.x + all.y,
                            start + all.x + all.y + all.z};
    const int i = (wanted > at[0]) + (wanted > at[1]) + (wanted > at[2]);
    uint32_t nearer = own.x + own.y + own.z + own.w;
    if (lane == owner)
      nearer = (i > 0 ? own.x : 0) + (i > 1 ? own.y : 0) + (i > 2 ? own.z : 0);
    if (owner >= 0 && lane > owner) nearer = 0;
    before.nearer += __reduce_add_sync(ALL_LANES, nearer);
    if (owner < 0) continue;
    const uint32_t nearer_all = i == 0 ? start : i == 1 ? at[0] : i == 2 ? at[1] : at[2];
    const uint32_t equal = i == 0 ? own.x : i == 1 ? own.y : i == 2 ? own.z : own.w;
    edge.distance = __shfl_sync(ALL_LANES, bin + i, owner);
    edge.ties = wanted - __shfl_sync(ALL_LANES, nearer_all, owner);
    before.equal = __shfl_sync(ALL_LANES, equal, owner);
    return;
  }
}

/* Writes the entries that are taken of one list, whose `count` distances belong to blocks
 * `first` and on. `per` warps share the work; this is number `part`. `before` then counts
 * these entries, too. In shared memory: found has a number per warp, list has room for WARP
 * runs. It has one barrier. */
template <class D>
__device__ __forceinline__ void write_list(const D *kept, int count, const list_edge &edge,
                                           int part, int per, int first, int32_t *places,
                                           list_before &before, uint32_t *found,
                                           int32_t *list) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int share = ((count + per - 1) / per + NEAREST_RUN - 1) / NEAREST_RUN * NEAREST_RUN;
  const int from = part * share, upto = min(from + share, count);
  uint32_t mine = 0;
#pragma unroll 1
  for (int at = from + lane * NEAREST_RUN; at < upto; at += WARP * NEAREST_RUN)
    mine += both_counts(compare_run(kept + at, edge.distance));
  mine = __reduce_add_sync(ALL_LANES, mine);
  if (lane == 0) found[warp] = mine;
  __syncthreads();
  const uint32_t other = lane < per ? found[warp - part + lane] : 0;
  list_before here = before;
  here.add_of_warp(lane < part ? other : 0);
  before.add_of_warp(other);
#pragma unroll 1
  for (int at = from; at < upto; at += WARP * NEAREST_RUN) {
    const int own = at + lane * NEAREST_RUN;
    run_bits bits = {0, 0};
    if (own < upto) bits = compare_run(kept + own, edge.distance);
    const uint32_t both = both_counts(bits), scan = warp_scan(both);
    list_before mine = here;
    mine.add(scan - both);
    uint32_t room = edge.ties - min(edge.ties, mine.equal);
#pragma unroll 1
    while (__popc(bits.equal) > room) bits.equal ^= 0x80000000u >> __clz(bits.equal);
    const uint32_t taken = bits.nearer | bits.equal, start = here.place(edge);
    int32_t *place = list + mine.place(edge) - start;
#pragma unroll
    for (int i = 0; i < NEAREST_RUN; i++)
      if (taken >> i & 1) *place++ = first + own + i;
    __syncwarp();
    here.add(__shfl_sync(ALL_LANES, scan, WARP - 1));
    const uint32_t total = here.place(edge) - start;
#pragma unroll 1
    for (uint32_t i = lane; i < total; i += WARP) places[start + i] = list[i];
    __syncwarp();
  }
}

}  // namespace kvl

#endif
