/* Flash decoding for 16-bit q and a cache of 16-bit numbers, f8e4m3 or int8, on the tensor
 * cores.
 *
 * The teams of paged_split.cuh are warps of one thread block. Every warp is its own pipeline:
 * it walks over its tiles of KEYS keys, from sequence to sequence, and keeps the copies of
 * one or two tiles (K and V) in flight into its own ring in shared memory; those of the next
 * sequence follow directly. Up to 16 query heads of a group are the 16 rows of the mma, so K
 * and V are read once. A decode is bound by memory, so smaller groups waste nothing that
 * matters. At the end of a sequence the team joins its partial softmaxes through the memory
 * of the tiles that it just used.
 *
 * Much of a short decode is start and end, where a warp only runs one instruction after the
 * other. So the host does every division that it can, and the loop over tiles contains the
 * code for the look-up, the fetch and the end of a sequence only once. The start is before
 * that loop, with its own look-up and fetch, and runs while earlier kernels still run.
 *
 * A warp has two halves: decode_copies.cuh looks up keys and copies K and V, decode_rows.cuh
 * computes, or decode_packed.cuh over packed numbers. This file has its start, its loop over
 * tiles and the end of a sequence.
 *
 * K and V of f8e4m3 and int8 stay bytes until they are on their way to the tensor cores, see
 * paged.cuh. The scales of int8 are copied beside their tile, and a group of up to eight heads
 * has a kernel of its own there. */
#ifndef KVL_CUDA_PAGED_DECODE_CUH
#define KVL_CUDA_PAGED_DECODE_CUH

#include "cuda/barrier.cuh"
#include "cuda/attention/decode_copies.cuh"
#include "cuda/attention/decode_packed.cuh"
#include "cuda/attention/decode_rows.cuh"

namespace kvl {

/* While a warp computes a tile it keeps one more in flight. If its share has more tiles per
 * warp than this, it keeps two in flight, which then gains 0.5%. Otherwise two lose 3%: one
 * tile makes 64 KiB per SM; with 128 KiB the first tile is computed 3 us later, and some
 * SMs run ahead of the others. */
constexpr uint32_t LONG_SHARE = 96;

/* What the warps of a thread block have in shared memory beside their rings. */
template <class S> struct decode_memory {
  int kept[PLAN_LENGTHS];           /* see split_plan */
  float2 states[S::WARPS][S::ROWS]; /* (m, l) of the warps' rows, */
  int sums_at[S::WARPS];            /* and the stages with their sums */
};

/* Which task a warp's team has, and the warp's number in the team. */
template <class S> struct decode_task {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int team, member, unit, kv_head;
  uint32_t share;
  __device__ __forceinline__ explicit decode_task(const split_place &place) {
    team = warp >> place.team_shift;
    member = warp - (team << place.team_shift);
    const int task = blockIdx.x * (S::WARPS >> place.team_shift) + team;
    share = place.units.quotient(task);
    unit = task - (int)(share * place.units.by);
    kv_head = place.subgroups.quotient(unit);
  }
};

/* R: how many query rows the kernel takes at once. */
template <class T, int D, class C, class H, int R> struct decode_warp {
  using shape = decode_shape<D, C, R>;
  static constexpr int STAGES = shape::STAGES;
  static constexpr bool BEGINS_LATE = D > 128 || shape::BYTES == 1; /* registers are short */

  const kvl_paged_attention_args &a;
  const split_place &place;
  decode_memory<shape> &memory;
  char *const shared; /* the rings of all warps */
  const decode_task<shape> task;
  decode_copies<D, C, H, R> copies;
  std::conditional_t<packs<C>, decode_packed<T, D, C, H, R>, decode_rows<T, D, C, H>> rows;
  uint32_t seq_begin; /* the number of the sequence's first tile */
  int seq, length, tiles;
  int used; /* the last tile's stage; -1: nothing of this sequence is computed yet */

  __device__ __forceinline__ decode_warp(const kvl_paged_attention_args &args,
                                         const split_place &place_, const H &hook,
                                         decode_memory<shape> &memory_, char *shared_)
      : a(args), place(place_), memory(memory_), shared(shared_), task(place_),
        copies(args, place_, memory_.kept, task.kv_head,
               shared_address(shared_ + task.warp * STAGES * shape::STAGE_BYTES),
               (int *)(shared_ + shape::RING_BYTES) + task.warp * STAGES * shape::KEYS),
        rows(args, place_, hook, task.unit, task.kv_head) {}

  __device__ __forceinline__ char *stage_memory(int stage) const {
    return shared + (task.warp * STAGES + stage) * shape::STAGE_BYTES;
  }
  __device__ __forceinline__ void begin_sequence() {
    used = -1;
    rows.begin_sequence(seq);
  }

  /* Finds the warp's share and begins to copy its first tile. Returns whether it has one.
   *
   * While the kernels ahead still run, the share is found by lengths that may change. If
   * only a table is needed to find the keys, the first tile is looked up, too, and the L2
   * is asked to fetch it. This guess is checked while its copies are under way: by each
   * warp or, if the thread block shares the lengths, by all of its warps together. */
  __device__ __forceinline__ bool start() {
    const bool is_few = place.is_few(),
               early_look_up = place.by_lane() && !a.selection && !a.slots;
    const int lane = task.lane;
#pragma unroll 1
    for (bool early = place.by_lane();; early = false) {
      if (!early) wait_for_previous();
      seq = copies.find_share(task.share, task.member, seq_begin);
      length = copies.ahead_length, tiles = copies.ahead_tiles;
      if (!early_look_up) wait_for_previous();
      copies.template look_up<true>();
      const paged_block guess = copies.found;
      copies.take_batch();
      if (early && early_look_up && copies.runs && copies.now.index >= 0) copies.ask_ahead();
      wait_for_previous(); /* after the first time this costs nothing */
      int length_now = copies.plan.early, physical_now = guess.physical;
      if (early && is_few && lane < a.seqs) length_now = read_early(a.lens + lane);
      if (early && early_look_up && guess.index >= 0)
        physical_now = read_early(copies.keys_ahead().table +
                                  place.block.quotient(guess.index));
      let_next_start(); /* after the wait: paged_combine reads the lengths */
      copies.fetch(0);
      copy_commit();
      if constexpr (!BEGINS_LATE) begin_sequence();
      if (!early) break;
      const bool old = length_now != copies.plan.early || physical_now != guess.physical;
      if (!(is_few ? __any_sync(ALL_LANES, old)
                   : __syncthreads_or(old || copies.plan.is_old())))
        break;
      copy_wait<0>();
      __syncwarp();
    }
    return task.share < copies.plan.shares;
  }

  /* The first tile is on its way. The first `depth` - 1 steps fetch, all others compute as
   * well. The compiler must not know this, or it would make a copy of the code for each
   * kind. */
  __device__ __forceinline__ void run() {
    const uint32_t share_begin = copies.share_begin, share_end = copies.share_end;
    uint32_t tile = share_begin + task.member;
    const uint32_t tiles_each = (share_end - share_begin) >> place.team_shift;
    const int depth = STAGES > 2 && tiles_each > LONG_SHARE ? STAGES - 1 : 1;
    int stage = 0, fetch_stage = 1, step;
    auto after = [](int s) { return STAGES == 2 ? s ^ 1 : s + 1 == STAGES ? 0 : s + 1; };
    bool fresh = BEGINS_LATE; /* nothing of this sequence is computed yet */
    if constexpr (STAGES > 2) asm volatile("mov.u32 %0, 1;" : "=r"(step));
    else step = 1;
    for (;;) {
      const uint32_t piece_end = min(share_end, seq_begin + tiles);
      if (fresh) begin_sequence();
      fresh = false;
      if (step < depth || tile < piece_end) {
        if (step >= depth) {
          if (depth == 1) copy_wait<0>();
          else copy_wait<STAGES - 2>();
        }
        __syncwarp(); /* all copies have arrived, and the last tile was read */
        copies.fetch(STAGES == 2 ? stage ^ 1 : fetch_stage);
        copy_commit();
        fetch_stage = after(fetch_stage);
        if (step < depth) {
          step++;
          continue;
        }
      }
      if (tile < piece_end) {
        rows.attend(stage_memory(stage), copies.indices + stage * shape::KEYS, seq, length);
        used = stage;
        stage = after(stage);
        tile += place.team();
        if (tile < piece_end) continue;
      }
      end_of_sequence();
      if (piece_end == share_end) break;
      named_sync(task.team + 1, place.team() * WARP); /* the sums were read */
      seq_begin += tiles;
      length = copies.plan.length_of(++seq);
      tiles = copies.plan.tiles(length);
      fresh = true;
    }
  }

  /* The sequence or the share ends here: the team joins its warps' softmaxes. */
  __device__ __forceinline__ void end_of_sequence() {
    const query_rows unit = unit_rows(place, seq, task.unit);
    rows.end_sums();
    __syncwarp(); /* the last tile was read */
    rows.keep_states(memory.states[task.warp]);
    if (task.lane == 0) memory.sums_at[task.warp] = task.warp * STAGES + used;
    if (used >= 0) rows.keep_sums((float *)stage_memory(used), unit.count);
    named_sync(task.team + 1, place.team() * WARP);
    join(unit);
  }
  __device__ __forceinline__ void join(const query_rows &unit) {
    const bool starts = copies.share_begin <= seq_begin,
               ends = seq_begin + tiles <= copies.share_end;
    const int64_t own_part = starts && ends
                                 ? -1
                                 : place.part(task.share, seq, a.seqs, task.unit, starts);
    const int first = task.warp - task.member, end = first + place.team();
#pragma unroll 1
    for (int i = (task.member * WARP + task.lane) * 4; i < unit.count * D;
         i += place.team() * WARP * 4) {
      const int r = i / D, dim = i % D;
      if (dim >= a.cache.key.dim) continue;
      float m = -INFINITY, l = 0.f, x[4] = {};
#pragma unroll 1
      for (int w = first; w < end; w++) m = fmaxf(m, memory.states[w][r].x);
#pragma unroll 1
      for (int w = first; w < end; w++) {
        const float2 state = memory.states[w][r];
        if (state.y == 0.f) continue; /* it had no tile of this sequence, or no key */
        const float weight = exp2_fast(state.x - m);
        float part[4];
        load_floats((const float *)(shared + memory.sums_at[w] * shape::STAGE_BYTES) + r * D +
                        (dim ^ (r & 7) * 8),
                    part);
        l += weight * state.y;
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] += weight * part[e];
      }
      write_part(a, place, own_part, unit, r, dim, x, m, l, rows.value_scale);
    }
  }
};

template <class T, int D, class C, int R = 16, class H>
__device__ __forceinline__ void decode(const kvl_paged_attention_args &a,
                                       const split_place &place, const H &hook) {
  extern __shared__ __align__(128) char shared[];
  __shared__ decode_memory<decode_shape<D, C, R>> memory;
  decode_warp<T, D, C, H, R> warp(a, place, hook, memory, shared);
  if (warp.start()) warp.run();
}

template <class T, int D, class C, int R = 16>
__global__ void __maxnreg__((decode_shape<D, C, R>::REGISTERS))
    paged_decode(const __grid_constant__ kvl_paged_attention_args a,
                 const __grid_constant__ split_place place) {
  decode<T, D, C, R>(a, place, no_hook());
}

}  // namespace kvl

#endif
