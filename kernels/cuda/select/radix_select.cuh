/* Finds the `wanted` earliest elements of a row, exactly, ties to the lower index: the shared
 * part of topk and select.
 *
 * A team of TEAM thread blocks (a cluster when there are several) reads a row once and drops
 * nearly all of it at once:
 *   guess    while the row is loading, quantiles of a sample give a bracket around the
 *            wanted-th element, 3 to 4 standard deviations wide. The sample has SAMPLES * 512
 *            elements, or one of 256 where that is more. Elements are ordered by rank and then
 *            by index, and so is the sample: where many are equal, the bracket ends at an index
 *   collect  elements before the bracket are sure, and become bits of a bitmap; those inside
 *            it are listed in shared memory as 64-bit keys (rank, index), which are unique
 *   meet     the blocks send their lists to the first one, which goes on alone
 *   find     a histogram of the listed ranks gives the bin of the wanted-th key; a second
 *            pass over the list gives the few keys of that bin, which are all compared with
 *            each other
 *   write    sums over words give the output index of every bit: index order needs no sort.
 *            The indices of long rows are put side by side in shared memory first
 * If the guess was wrong, or too many elements lie in the bracket (because the sample does
 * not represent the row), retry narrows the bracket exactly, 11 bits of the key at a time,
 * by reading the row again. No atomic decides an order: lists are unordered sets, and bits
 * and counters commute.
 *
 * The cost of a phase is latency: barriers, shuffles, and code that runs only once. So loops
 * stay rolled where unrolling only adds code (8.4 to 7.5 us for a row of 8192), a block has
 * 512 threads, and a team meets by one bulk copy per block rather than by cluster barriers
 * that release memory (each is a MEMBAR.GPU: about 1 us).
 *
 * Source: Floyd and Rivest 1975 (SELECT); Alabi et al. 2012 (radix select). */
#ifndef KVL_CUDA_RADIX_SELECT_CUH
#define KVL_CUDA_RADIX_SELECT_CUH

#include "cuda/select/bitonic.cuh"
#include "cuda/block_scan.cuh"
#include "cuda/team.cuh"

namespace kvl {

/* Loads elements that are WARP apart. */
template <int N, class T>
__device__ __forceinline__ void load_apart(float (&to)[N], const T *p) {
#pragma unroll
  for (int j = 0; j < N; j++) to[j] = to_float(p[j * WARP]);
}

/* The index in the row of element `number` of the sample. It lies anywhere within its part
 * of the row, so that a periodic row does not bias the sample. It ascends with the number. */
__host__ __device__ constexpr uint32_t sampled(uint32_t number, uint32_t part) {
  return number * part + (uint32_t)((uint64_t)(number * 0x9E3779B1u) * part >> 32);
}

/* One thread block calls emit(place, index) for all elements of a row that are eligible, that
 * is neither -inf nor NaN; places count from 0 in index order. Returns how many there are.
 * memory: 128 bytes of shared memory that nobody uses any more. These bytes are not static,
 * because the searches take all that a thread block can have. */
template <class ROW, class F>
__device__ __forceinline__ uint32_t write_eligible(const ROW &row, uint32_t width,
                                                   char *memory, F emit) {
  int(*sums)[WARP] = (int(*)[WARP])memory;
  __syncthreads();
  uint32_t count = 0;
#pragma unroll 1
  for (uint32_t at = 0; at < width; at += TEAM_THREADS) {
    const uint32_t i = at + threadIdx.x;
    int before[1] = {i < width && rank_of(to_float(row[(int)i])) < RANK_LEAST}, total[1];
    const bool take = before[0];
    block_scan<1>(before, total, sums);
    if (take) emit(count + (uint32_t)before[0], i);
    count += (uint32_t)total[0];
  }
  return count;
}

/* EACH: elements that a thread has in flight at a time. SAMPLES: elements of the sample that
 * a thread takes. ROW: a pointer to f32 or bf16, or a type that is added to and indexed like
 * one, with its own opaque and load_apart. */
template <int EACH, int TEAM, int SAMPLES, class ROW = const float *> struct radix_select {
  static constexpr int THREADS = TEAM_THREADS, WARPS = THREADS / WARP, BATCH = EACH * WARP;
  static constexpr int DIGIT = 11, BINS = 1 << DIGIT, FEW = 256;
  /* IS_LONG: rows may need more samples than SAMPLES. IS_WIDE: the bracket may end at an
   * index; shorter rows fit the list whatever they hold. IS_DEALT: see collect. */
  static constexpr bool IS_LONG = SAMPLES > 2, IS_WIDE = SAMPLES > 1, IS_DEALT = TEAM > 2;
  static constexpr int SAMPLES_LOG = SAMPLES == 1   ? 9
                                     : SAMPLES == 2 ? 10
                                     : SAMPLES == 4 ? 11
                                                    : 12;
  static_assert(BINS == 4 * THREADS, "a thread looks at four bins");
  static_assert(SAMPLES * THREADS == 1 << SAMPLES_LOG, "");

  struct found_bin {
    uint32_t bin, before, count; /* before: elements in lower bins */
  };
  struct shared_memory {
    alignas(16) uint32_t count[BINS];
    sort_key few[FEW], edge;
    uint64_t barrier;
    uint32_t warps[3][WARP], listed, sure, few_count;
    found_bin found[2];
  };
  struct alignas(16) list_head {
    uint32_t listed, sure;
  };

  shared_memory &s;
  char *lists;
  const uint32_t width, stretch, words;
  const bool has_window; /* the bitmap covers only a window of the row */
  uint32_t capacity;
  uint32_t *bits;
  const ROW row;
  const int lane, warp, block; /* block: its number in the team */
  const uint32_t flip;         /* the sign bit when the least come first */
  uint32_t begin, end, stride; /* the distance between this warp's batches of the row */
  const int samples_log;       /* the sample has 2^n elements */
  uint32_t index_low, among, wanted;
  uint32_t sure, listed; /* found before the bracket; in it */
  uint32_t own;          /* how many keys the list of this warp has */
  bool is_one;           /* there is one list, in the first block; else one per block */
  bool is_listed;        /* nothing comes before the bracket: all that is taken is listed */
  float x[EACH], sample[SAMPLES]; /* a batch of the row; of the sample */
  sort_key edge;                  /* keys up to this one are taken */

  __host__ __device__ static uint32_t stretch_of(int64_t width) {
    constexpr int all_warps = TEAM * WARPS, unit = TEAM > 1 ? 4 * WARP : WARP;
    return (uint32_t)((width + all_warps * unit - 1) / (all_warps * unit) * unit);
  }
  /* The shape of a call, fitted to a shorter row: every warp has a part of that row. */
  __device__ static team_shape fitted(team_shape shape, uint32_t width) {
    shape.stretch = stretch_of((int32_t)width);
    shape.words = min(shape.words, TEAM * WARPS * (shape.stretch / WARP));
    return shape;
  }
  /* sorted: for how many keys the caller wants memory instead of the bitmap, or 0. If the
   * bitmap does not fit and few elements are wanted, they are sorted by their indices. If
   * many are wanted, the bitmap is written one window at a time, and each window reads the
   * row again. */
  static team_shape shape_of(int64_t width, int64_t wanted_most, uint32_t sorted,
                             const kvl_cuda_queue *q) {
    constexpr uint32_t window = 4096; /* words, which are also room for as many indices */
    /* More would leave an L1 too small for the loads in flight: 21 us of 95 for 2^20. */
    const uint32_t room = min((uint32_t)q->shared_optin, 194u << 10);
    team_shape shape;
    shape.stretch = stretch_of(width);
    const uint32_t words = sorted ? WARPS : TEAM * WARPS * (shape.stretch / WARP);
    const bool is_many = TEAM > 1 || width > 1 << 17 || (wanted_most > 4096 && !sorted);
    const bool is_few = wanted_most <= window;
    for (bool is_whole : {true, false})
      for (uint32_t keys = is_many ? 16384 : 8192; keys >= 4096; keys /= 2) {
        if (is_whole && is_few && is_many && keys < 16384) break; /* rather sort indices */
        shape.capacity = keys / TEAM;
        if (TEAM == 1 && width < keys) shape.capacity = ((uint32_t)width + 1) & ~1u;
        shape.words = is_whole || words < window ? words : window;
        uint32_t bytes_lists = TEAM * (sizeof(list_head) + shape.capacity * sizeof(sort_key));
        uint32_t bytes_last = (uint32_t)sizeof(sort_key) * sorted; /* or the bitmap */
        if (bytes_last < 4 * shape.words) bytes_last = 4 * shape.words;
        shape.bytes_shared = (uint32_t)sizeof(shared_memory) + bytes_lists + bytes_last;
        if (shape.bytes_shared <= (is_few ? room : (uint32_t)q->shared_optin)) return shape;
      }
    return shape;
  }

  __device__ __forceinline__ sort_key *list_of(int b) {
    return (sort_key *)(lists + b * (sizeof(list_head) + capacity * sizeof(sort_key)) +
                        sizeof(list_head));
  }
  __device__ __forceinline__ list_head &head_of(int b) {
    return *(list_head *)(lists + b * (sizeof(list_head) + capacity * sizeof(sort_key)));
  }

  /* Starts to read the row. */
  __device__ __forceinline__ radix_select(char *memory, ROW row_, uint32_t width_,
                                          const team_shape &shape, bool largest)
      : s(*(shared_memory *)memory), lists(memory + sizeof(shared_memory)), width(width_),
        stretch(shape.stretch), words(shape.words), has_window(words * WARP < width_),
        capacity(shape.capacity),
        bits((uint32_t *)(lists + TEAM * (sizeof(list_head) + capacity * sizeof(sort_key)))),
        row(row_), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP),
        block(TEAM > 1 ? blockIdx.x % TEAM : 0), flip(largest ? 0 : 0x80000000u),
        samples_log(samples_log_of(width_)) {
#pragma unroll
    for (int j = 0; j < SAMPLES; j++) {
      const uint32_t i = sample_index(j * THREADS + threadIdx.x);
      sample[j] = i < width ? to_float(row[i]) : 0.f;
    }
    begin = min((uint32_t)(warp * TEAM + block) * (is_dealt() ? BATCH : stretch), width);
    end = is_dealt() ? width : min(begin + stretch, width);
    stride = is_dealt() ? TEAM * WARPS * BATCH : BATCH;
    load(x, row + begin + lane, begin);
    ((uint4 *)s.count)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    clear();
    if (TEAM > 1) {
      if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.barrier), TEAM - 1);
        barrier_init_done();
      }
      cluster_arrive();
    }
  }

  /* A warp has a stretch of the row. Of a long row the warps of a large team have every so
   * many batches, so that a row in order fills the small lists of all blocks alike. */
  __device__ __forceinline__ bool is_dealt() const {
    return IS_DEALT && IS_LONG && width > 1 << 18;
  }
  __device__ __forceinline__ uint32_t sample_index(uint32_t number) const {
    const uint32_t part = max(width >> samples_log, 1u);
    return IS_WIDE ? sampled(number, part) : number * part;
  }
  /* p points to this lane's first element; `at` is the number of the warp's first. */
  __device__ __forceinline__ void load(float (&to)[EACH], ROW p, uint32_t at) const {
    if (at + BATCH <= end) {
      load_apart(to, p);
    } else {
#pragma unroll
      for (int j = 0; j < EACH; j++)
        to[j] = at + j * WARP + lane < end ? to_float(p[j * WARP]) : 0.f;
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < words; i += THREADS) bits[i] = 0;
    if (threadIdx.x == 0) s.listed = s.sure = s.few_count = 0;
  }
  __device__ __forceinline__ float turned(float y) const {
    return __uint_as_float(__float_as_uint(y) ^ flip);
  }
  __device__ __forceinline__ sort_key key_of(float y, uint32_t i) const {
    return (sort_key)rank_of(turned(y)) << 32 | i;
  }
  __device__ __forceinline__ bool takes_part(uint32_t i) const {
    return i - index_low < among;
  }
  __device__ __forceinline__ sort_key last_key(uint32_t rank) const {
    return (sort_key)rank << 32 | (width - 1);
  }
  /* Calls f(key) for this thread's share of the listed keys. */
  template <class F> __device__ __forceinline__ void keys(F f) {
    constexpr int SIDE = TEAM > 1 ? WARPS / TEAM : WARPS; /* warps per list */
    const bool apart = TEAM > 1 && !is_one;
    const sort_key *list = list_of(apart ? warp / SIDE : 0);
    const uint32_t step = apart ? SIDE * WARP : THREADS;
#pragma unroll 1
    for (uint32_t i = threadIdx.x & (step - 1); i < own; i += step) f(list[i]);
  }

  /* For a team that finds nothing: no block may end while another may access its memory. */
  __device__ __forceinline__ void leave() const {
    if (TEAM > 1) cluster_wait();
  }

  /* Finds the key up to which elements are taken, among the elements index_low ...
   * index_low + among - 1. list_all: all taken elements are listed, and there is no bitmap.
   * Returns false for the blocks of the team that are done. */
  __device__ __forceinline__ bool find(uint32_t index_low_, uint32_t among_, uint32_t wanted_,
                                       bool list_all) {
    index_low = index_low_, among = among_, wanted = wanted_;
    uint32_t from = 0;
    sort_key low = 0, high = last_key(RANK_NAN);
    guess(list_all, &from, &low, &high);
    is_listed = low == 0;
    collect(low, high);
    bool fits = true;
    is_one = TEAM == 1;
    if (TEAM > 1) {
      if (!meet(&fits)) return false;
    } else {
      __syncthreads();
      own = listed = s.listed, sure = s.sure;
      fits = listed <= capacity;
    }
    if (!fits || wanted <= sure || wanted > sure + listed) {
      retry(&low, &high, list_all);
      from = (uint32_t)(low >> 32);
    }
    uint32_t need = wanted - sure, count = listed;
    from = max(from, (uint32_t)(low >> 32));
    if (count > need && (uint32_t)(high >> 32) > from) { /* by rank first */
      const int shift = shift_of((uint32_t)(high >> 32) - from);
      keys([&](sort_key key) {
        uint32_t rank = (uint32_t)(key >> 32);
        atomicAdd(&s.count[(max(rank, from) - from) >> shift], 1u);
      });
      __syncthreads();
      const uint32_t target[1] = {need};
      locate(target);
      const found_bin found = s.found[0];
      const uint32_t offset = found.bin << shift;
      if (found.bin > 0) low = (sort_key)(from + offset) << 32;
      high = min(high, last_key(from + min(offset + ((1u << shift) - 1), RANK_NAN - from)));
      need -= found.before;
      count = found.count;
    }
    if (count > need && count > FEW && low >> 32 < from) { /* equal numbers */
      uint32_t least = RANK_NAN, most = 0;
      keys([&](sort_key key) { least = min(least, (uint32_t)(key >> 32)); });
      range(&least, &most);
      low = max(low, (sort_key)least << 32);
    }
    while (count > need && count > FEW) {
      auto all = [&](auto f) { keys(f); };
      count = narrow(all, &low, &high, &need);
    }
    edge = high;
    const bool is_whole = count == need;
    keys([&](sort_key key) {
      if (key < low || (is_whole && key <= high)) {
        if (!list_all) mark(key);
      } else if (key <= high) s.few[atomicAdd(&s.few_count, 1u)] = key;
    });
    __syncthreads();
    if (!is_whole) { /* compare all of the few with each other */
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
        sort_key key = s.few[i];
        uint32_t before = 0;
#pragma unroll 1
        for (uint32_t j = 0; j < count; j++) before += s.few[j] < key;
        if (before < need && !list_all) mark(key);
        if (before + 1 == need) s.edge = key;
      }
      __syncthreads();
      edge = s.edge;
    }
    return true;
  }

  __device__ __forceinline__ void mark(sort_key key) {
    uint32_t index = (uint32_t)key;
    if (!has_window) atomicOr(&bits[index / WARP], 1u << index % WARP);
  }

  /* Calls emit(place, index) for all that are taken; places count from 0 in index order. */
  template <class F> __device__ __forceinline__ void write(F emit) {
    if (has_window && is_listed && wanted <= words) {
      write_listed(emit);
      return;
    }
    uint32_t places = 0, first = 0; /* where the present window begins */
    do {
      if (has_window) mark_window(first);
      places += write_words(first, places, emit);
      first += words * WARP;
      if (has_window) __syncthreads();
    } while (first < width && has_window);
  }

  /* ---- its parts ---- */

  static __device__ __forceinline__ int shift_of(uint32_t length) {
    return max(0, 32 - DIGIT - __clz(length));
  }
  static __device__ __forceinline__ int shift_of(sort_key length) {
    return max(0, 64 - DIGIT - __clzll(length));
  }

  static __device__ __forceinline__ int samples_log_of(uint32_t width) {
    return IS_LONG ? max(SAMPLES_LOG, 32 - __clz((max(width, 1u) - 1) >> 8)) : SAMPLES_LOG;
  }

  /* The least and the greatest over the block; has a barrier. */
  __device__ __forceinline__ void range(uint32_t *least, uint32_t *most) {
    *least = __reduce_min_sync(ALL_LANES, *least);
    *most = __reduce_max_sync(ALL_LANES, *most);
    if (lane == 0) s.warps[0][warp] = *least, s.warps[1][warp] = *most;
    __syncthreads();
    *least = __reduce_min_sync(ALL_LANES, lane < WARPS ? s.warps[0][lane] : RANK_NAN);
    *most = __reduce_max_sync(ALL_LANES, lane < WARPS ? s.warps[1][lane] : 0u);
  }
  /* The sum of x over the threads before this one, and over all; has a barrier. */
  __device__ __forceinline__ uint32_t warps_before(uint32_t x, uint32_t *total = nullptr) {
    uint32_t upto = warp_scan(x);
    if (lane == WARP - 1) s.warps[2][warp] = upto;
    __syncthreads();
    uint32_t of_warp = lane < WARPS ? s.warps[2][lane] : 0;
    if (total) *total = __reduce_add_sync(ALL_LANES, of_warp);
    return upto - x + __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0);
  }

  /* Sorts the indices of the listed keys in place of the bitmap: the indices' range is cut
   * into equal bins, and an index goes to its bin, behind the smaller ones there. */
  template <class F> __device__ __forceinline__ void write_listed(F emit) {
    uint32_t least = ~0u, most = 0;
    auto taken = [&](auto f) {
      keys([&](sort_key key) {
        if (key <= edge) f((uint32_t)key);
      });
    };
    taken([&](uint32_t i) { least = min(least, i), most = max(most, i); });
    least = min(least, RANK_NAN);
    range(&least, &most);
    const int shift = shift_of(most - least);
    taken([&](uint32_t i) { atomicAdd(&s.count[(i - least) >> shift], 1u); });
    __syncthreads();
    uint4 &four = ((uint4 *)s.count)[threadIdx.x];
    const uint4 own_bins = four;
    const uint32_t at = warps_before(own_bins.x + own_bins.y + own_bins.z + own_bins.w);
    four = make_uint4(at, at + own_bins.x, at + own_bins.x + own_bins.y,
                      at + own_bins.x + own_bins.y + own_bins.z);
    __syncthreads();
    taken([&](uint32_t i) { bits[atomicAdd(&s.count[(i - least) >> shift], 1u)] = i; });
    __syncthreads(); /* each counter is now the end of its bin */
#pragma unroll 1
    for (uint32_t j = threadIdx.x; j < wanted; j += THREADS) {
      const uint32_t i = bits[j], bin = (i - least) >> shift;
      const uint32_t to = s.count[bin];
      uint32_t place = bin ? s.count[bin - 1] : 0;
#pragma unroll 1
      for (uint32_t other = place; other < to; other++) place += bits[other] < i;
      emit(place, i);
    }
  }

  /* Sets the bits of the elements from `first` on. */
  __device__ __forceinline__ void mark_window(uint32_t first) {
#pragma unroll 1
    for (uint32_t w = warp; w < words; w += WARPS) {
      uint32_t i = first + w * WARP + lane;
      bool take = i < width && takes_part(i) && key_of(to_float(row[i]), i) <= edge;
      uint32_t word = __ballot_sync(ALL_LANES, take);
      if (lane == 0) bits[w] = word;
    }
    __syncthreads();
  }

  /* A warp has words / WARPS words. If these are few or dense, or the lists' memory has no
   * room for all indices, it does word after word. */
  template <class F>
  __device__ __forceinline__ uint32_t write_words(uint32_t first, uint32_t places, F emit) {
    const uint32_t share = words / WARPS, from = warp * share;
    uint32_t mine = 0, total;
#pragma unroll 4
    for (uint32_t w = lane; w < share; w += WARP) mine += __popc(bits[from + w]);
    uint32_t place = __shfl_sync(ALL_LANES, warps_before(mine, &total), 0);
    const uint32_t room = (uint32_t)((char *)bits - lists) / sizeof(uint32_t);
    if (share >= WARP && total <= min(8 * words, room)) {
      write_staged(first, places, total, place, emit);
      return total;
    }
    place += places;
#pragma unroll 4
    for (uint32_t w = from; w < from + share; w++) {
      const uint32_t word = bits[w];
      if (word >> lane & 1)
        emit(place + __popc(word & ((1u << lane) - 1)), first + w * WARP + lane);
      place += __popc(word);
    }
    return total;
  }
  /* Puts the indices of the bits in order into the lists' memory, and then all threads emit
   * them side by side. place: how many bits the warps before this one have. A lane takes
   * NEXT words at a time: few, so that it never has most of the bits, and an odd number, so
   * that no banks conflict. */
  template <class F>
  __device__ __forceinline__ void write_staged(uint32_t first, uint32_t places,
                                               uint32_t total, uint32_t place, F emit) {
    constexpr int NEXT = 5;
    uint32_t *const staged = (uint32_t *)lists;
    const uint32_t share = words / WARPS, last = (warp + 1) * share;
#pragma unroll 1
    for (uint32_t w = warp * share; w < last; w += WARP * NEXT) {
      const uint32_t from = w + lane * NEXT;
      uint32_t word[NEXT], count = 0;
#pragma unroll
      for (int j = 0; j < NEXT; j++) {
        word[j] = from + j < last ? bits[from + j] : 0;
        count += __popc(word[j]);
      }
      if (!__any_sync(ALL_LANES, count)) continue;
      const uint32_t upto = warp_scan(count);
      uint32_t at = place + upto - count;
#pragma unroll
      for (int j = 0; j < NEXT; j++)
#pragma unroll 1
        for (; word[j]; word[j] &= word[j] - 1)
          staged[at++] = first + (from + j) * WARP + __ffs(word[j]) - 1;
      place += __shfl_sync(ALL_LANES, upto, WARP - 1);
    }
    __syncthreads();
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < total; i += THREADS) emit(places + i, staged[i]);
  }

  /* Guesses two keys between which the wanted-th key is likely to lie: quantiles of a
   * sample. `from` is the rank where they begin, or one before it; low is 0 when all before
   * high is to be listed. */
  __device__ __forceinline__ void guess(bool list_all, uint32_t *from, sort_key *low,
                                        sort_key *high) {
    uint32_t rank[SAMPLES], least = RANK_NAN, most = 0;
#pragma unroll
    for (int j = 0; j < SAMPLES; j++)
      rank[j] = sample_rank(j * THREADS + threadIdx.x, sample[j]);
    auto samples = [&](auto f) { /* f(rank or RANK_NONE) */
#pragma unroll
                                 for (int j = 0; j < SAMPLES; j++) f(rank[j]);
                                 if constexpr (IS_LONG)
                                   more_samples(SAMPLES, [&](uint32_t r, uint32_t) { f(r); });
    };
    int here = 0;
    samples([&](uint32_t r) {
      here += r != RANK_NONE;
      least = min(least, r);
      most = max(most, r == RANK_NONE ? 0 : r);
    });
    here = __reduce_add_sync(ALL_LANES, here);
    if (lane == 0) s.warps[2][warp] = here;
    range(&least, &most);
    const uint32_t any = __reduce_add_sync(ALL_LANES, lane < WARPS ? s.warps[2][lane] : 0);
    if (any == 0) return;
    const float part = __fdividef((float)among, (float)any); /* elements per sample */
    const float at = __fdividef((float)wanted, part), spread = at * rsqrtf(at);
    uint32_t target[2] = {(uint32_t)fmaxf(at - 3.f * spread, 1.f),
                          (uint32_t)(at + 4.f * spread + 3.f)};
    const uint32_t low_first = target[0];
    const bool is_open = target[1] > any; /* past the end of the sample */
    const float room = TEAM * capacity, few = room / 8, expected = target[1] * part;
    uint32_t start = least, length = most - least;
    bool is_crowded = false;
    uint32_t low_length = 0, low_count = 0, low_target = 0; /* the bin at `from` */
    for (bool is_same = true;;) { /* is_same: so far both targets are in one bin */
      const int shift = shift_of(length);
      samples([&](uint32_t r) {
        if (r - start <= length && r != RANK_NONE)
          atomicAdd(&s.count[(r - start) >> shift], 1u);
      });
      __syncthreads();
      locate(target);
      const found_bin before = s.found[0], last_bin = s.found[1];
      if (is_same) {
        const uint32_t offset = before.bin << shift;
        *from = start + offset;
        low_length = min((1u << shift) - 1, length - offset);
        low_count = before.count, low_target = target[0] - before.before;
      }
      if (is_open) break;
      is_same = is_same && before.bin == last_bin.bin;
      start += last_bin.bin << shift;
      length = min((1u << shift) - 1, length - (last_bin.bin << shift));
      target[1] -= last_bin.before;
      target[0] = is_same ? target[0] - before.before : 1;
      is_crowded = last_bin.count * part > few;
      if (shift == 0 || !is_crowded) break;
    }
    if (!is_open) *high = last_key(start + length);
    const float listed_most = has_window ? room * 0.6f : min(room * 0.6f, among * 0.125f);
    const bool has_low = !list_all && expected > listed_most;
    if (has_low) *low = (sort_key)*from << 32;
    const bool is_low_crowded = has_low && low_count * part > few &&
                                expected - (float)(low_first - low_target) * part >
                                    listed_most;
    if (IS_WIDE && (is_crowded || is_low_crowded)) {
#pragma unroll 1 /* so that the code exists once */
      for (int is_last = is_low_crowded ? 0 : 1; is_last < 1 + is_crowded; is_last++) {
        const sort_key key = among_equals(is_last ? start : *from, is_last ? 0 : low_length,
                                          is_last ? target[1] : low_target, few / part,
                                          is_last);
        if (is_last) *high = key;
        else *low = key;
      }
    }
  }

  /* A bound of the window where many samples are equal or nearly so. Narrows the ranks
   * start ... start + length to bins with the target-th sample until the bin has few samples.
   * The bound is the last key of that bin (is_last), or its first one. If one rank alone has
   * more samples, the bound is a key of this rank, with an index next to the sample's. */
  __device__ __forceinline__ sort_key among_equals(uint32_t start, uint32_t length,
                                                   uint32_t target, float few, bool is_last) {
    uint32_t count = ~0u;
    auto find_bin = [&](int shift, bool by_index) {
      more_samples(0, [&](uint32_t r, uint32_t number) {
        const uint32_t at = by_index ? number : r - start;
        if (r != RANK_NONE && r - start <= length) atomicAdd(&s.count[at >> shift], 1u);
      });
      __syncthreads();
      const uint32_t only[1] = {target};
      locate(only);
      return s.found[0];
    };
#pragma unroll 1
    while (length > 0 && count > few) {
      const int shift = shift_of(length);
      const found_bin found = find_bin(shift, false);
      const uint32_t offset = found.bin << shift;
      start += offset;
      length = min((1u << shift) - 1, length - offset);
      count = found.count, target -= found.before;
    }
    if (count <= few) return is_last ? last_key(start + length) : (sort_key)start << 32;
    const int shift = shift_of((1u << samples_log) - 1);
    const found_bin found = find_bin(shift, true);
    const uint32_t past = is_last ? 1 : 0;
    const uint32_t i = sample_index((found.bin + past) << shift) - past;
    return (sort_key)start << 32 | min(i, width - 1);
  }

  /* Calls f(rank or RANK_NONE, number) for this thread's samples but the first `done`. */
  template <class F> __device__ __forceinline__ void more_samples(uint32_t done, F f) const {
#pragma unroll 1
    for (uint32_t n = done * THREADS + threadIdx.x; n < 1u << samples_log; n += 2 * THREADS) {
      float y[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint32_t i = sample_index(n + j * THREADS);
        y[j] = i < width ? to_float(row[i]) : 0.f;
      }
#pragma unroll
      for (int j = 0; j < 2; j++) f(sample_rank(n + j * THREADS, y[j]), n + j * THREADS);
    }
  }
  __device__ __forceinline__ uint32_t sample_rank(uint32_t number, float y) const {
    const uint32_t i = sample_index(number);
    return i < width && takes_part(i) ? rank_of(turned(y)) : RANK_NONE;
  }

  /* Lists the keys low ... high of this warp's stretch, whose first batch is in x, and marks
   * the sure ones, which come before low. */
  __device__ __forceinline__ void collect(sort_key low, sort_key high) {
    const uint32_t first = (uint32_t)(low >> 32), last = (uint32_t)(high >> 32);
    const uint32_t low_index = (uint32_t)low, high_index = (uint32_t)high;
    const bool is_plain = first <= RANK_LEAST && last < RANK_NAN &&
                          (IS_WIDE || (low_index == 0 && high_index >= width - 1));
    const uint32_t stop = min(end, index_low + among);
    uint32_t marked = 0;
    ROW p = row + begin + lane;
    sort_key *list = list_of(block);
    const uint32_t step = IS_DEALT && IS_LONG ? stride : BATCH;
    opaque(p);
#pragma unroll 1
    for (uint32_t at = begin; at < end; at += step, p = p + step) {
      float next[EACH];
      if (at + step < end) load(next, p + step, at + step);
      uint32_t mask = 0, before = 0;
      /* Equal numbers: does the batch lie past the last one, or from the first one on? */
      const bool is_past = IS_WIDE && at > high_index, is_from = !IS_WIDE || at >= low_index;
      const bool is_clear = !IS_WIDE || ((is_past || at + BATCH - 1 <= high_index) &&
                                         (is_from || at + BATCH <= low_index));
      if (is_plain && is_clear && at >= index_low && at + BATCH <= stop) {
        const float least = number_of(min(last - is_past, RANK_LEAST));
#pragma unroll
        for (int j = 0; j < EACH; j++) mask |= turned(x[j]) >= least ? 1u << j : 0;
        if (low > 0) {
          const float surely = number_of(first - is_from);
#pragma unroll
          for (int j = 0; j < EACH; j++) before |= turned(x[j]) >= surely ? 1u << j : 0;
        }
      } else {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
          uint32_t i = at + j * WARP + lane;
          sort_key key = key_of(x[j], i);
          bool inside = i < end && takes_part(i);
          mask |= inside && key <= high ? 1u << j : 0;
          before |= inside && key < low ? 1u << j : 0;
        }
      }
      if (low > 0) {
        mask &= ~before;
        marked += __popc(before);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
          unsigned word = __ballot_sync(ALL_LANES, before >> j & 1);
          if (lane == 0 && word && !has_window) bits[at / 32 + j] = word;
        }
      }
      if (__any_sync(ALL_LANES, mask)) {
        int mine = __popc(mask), upto = warp_scan(mine);
        uint32_t place = 0;
        if (lane == WARP - 1) place = atomicAdd(&s.listed, (uint32_t)upto);
        place = __shfl_sync(ALL_LANES, place, WARP - 1) + upto - mine;
#pragma unroll 1
        for (; mask; mask &= mask - 1, place++) {
          uint32_t i = (__ffs(mask) - 1) * WARP;
          if (place < capacity) list[place] = key_of(to_float(p[i]), at + i + lane);
        }
      }
#pragma unroll
      for (int j = 0; j < EACH; j++) x[j] = next[j];
    }
    if (low > 0) {
      marked = __reduce_add_sync(ALL_LANES, marked);
      if (lane == 0 && marked) atomicAdd(&s.sure, marked);
    }
  }

  /* Sends what the blocks have found to the first block. Returns false for the others, which
   * stay until it has arrived. */
  __device__ __forceinline__ bool meet(bool *fits) {
    if (block > 0) fence_async();
    __syncthreads();
    cluster_wait(); /* the first block's barrier exists */
    if (block > 0) {
      /* Pieces of the bitmap that this block has marked, in bits, and how far apart they are */
      const uint32_t piece = is_dealt() ? BATCH : stretch, batches = (width - 1) / BATCH + 1;
      const uint32_t pieces = !s.sure || has_window ? 0
                              : is_dealt()          ? (batches + TEAM - 1 - block) / TEAM
                                                    : WARPS;
      for (uint32_t i = threadIdx.x; i < pieces; i += THREADS)
        send_to_leader(bits + (i * TEAM + block) * piece / WARP, piece / 8, &s.barrier);
      if (threadIdx.x == 0) {
        const uint32_t bytes_words = pieces * piece / 8;
        const uint32_t bytes = sizeof(list_head) + (min(s.listed, capacity) + 1) / 2 * 16;
        head_of(block) = {s.listed, s.sure};
        fence_async();
        leader_expects(&s.barrier, bytes + bytes_words);
        send_to_leader(&head_of(block), bytes, &s.barrier);
      }
      cluster_arrive();
      cluster_wait();
      return false;
    }
    barrier_wait(shared_address(&s.barrier), 0);
    cluster_arrive();
    list_head head = {0, 0}; /* of block `lane` */
    if (lane == 0) head = {s.listed, s.sure};
    else if (lane < TEAM) head = head_of(lane);
    listed = __reduce_add_sync(ALL_LANES, head.listed);
    sure = __reduce_add_sync(ALL_LANES, head.sure);
    own = __shfl_sync(ALL_LANES, head.listed, warp * TEAM / WARPS);
    *fits = !__any_sync(ALL_LANES, head.listed > capacity);
    return true;
  }

  /* For a wrong guess, or too many keys in it: searches the row itself. */
  __device__ __forceinline__ void retry(sort_key *low, sort_key *high, bool list_all) {
    uint32_t need = wanted, count;
    if (wanted <= sure) *high = *low - 1, *low = 0;
    else if (wanted > sure + listed) {
      *low = *high + 1, *high = last_key(RANK_NAN);
      need -= sure + listed;
    } else need -= sure;
    const uint32_t whole = (width + THREADS - 1) / THREADS * WARP;
    begin = min(warp * whole, width);
    end = min(begin + whole, width);
    stride = BATCH;
    if (!is_one) capacity *= TEAM, is_one = true;
    auto all = [&](auto f) {
#pragma unroll 1
      for (uint32_t at = begin; at < end; at += BATCH) {
        load(x, row + at + lane, at);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
          uint32_t i = at + j * WARP + lane;
          if (i < end && takes_part(i)) f(key_of(x[j], i));
        }
      }
    };
    do count = narrow(all, low, high, &need);
    while (count > capacity / 2);
    if (list_all || wanted - need + count <= capacity) *low = 0;
    is_listed = *low == 0;
    clear();
    __syncthreads();
    load(x, row + begin + lane, begin);
    collect(*low, *high);
    __syncthreads();
    own = listed = s.listed, sure = s.sure;
  }

  /* Counts the keys of [low, high] in bins and narrows the range to the bin with the need-th
   * key. Returns how many keys that has. */
  template <class K>
  __device__ __forceinline__ uint32_t narrow(K all, sort_key *low, sort_key *high,
                                             uint32_t *need) {
    const sort_key from = *low, length = *high - from;
    const int shift = shift_of(length);
    all([&](sort_key key) {
      if (key - from <= length) atomicAdd(&s.count[(key - from) >> shift], 1u);
    });
    __syncthreads();
    const uint32_t target[1] = {*need};
    locate(target);
    const found_bin found = s.found[0];
    const sort_key offset = (sort_key)found.bin << shift;
    *low = from + offset;
    *high = from + min(offset + (((sort_key)1 << shift) - 1), length);
    if (*low >> 32 == *high >> 32) *high = min(*high, last_key((uint32_t)(*high >> 32)));
    *need -= found.before;
    return found.count;
  }

  /* Finds the bins of the target-th elements (counted from 1); clears s.count. Call it after
   * a barrier; it ends with one. */
  template <int N> __device__ __forceinline__ void locate(const uint32_t (&target)[N]) {
    uint4 &four = ((uint4 *)s.count)[threadIdx.x];
    const uint32_t at[4] = {four.x, four.y, four.z, four.w};
    const uint32_t sum = at[0] + at[1] + at[2] + at[3];
    four = make_uint4(0, 0, 0, 0);
    uint32_t upto = warp_scan(sum);
    if (lane == WARP - 1) s.warps[0][warp] = upto;
    __syncthreads();
    upto += __reduce_add_sync(ALL_LANES, lane < warp ? s.warps[0][lane] : 0);
#pragma unroll
    for (int k = 0; k < N; k++) {
      uint32_t before = upto - sum;
      if (before < target[k] && target[k] <= upto) { /* true for one thread */
        uint32_t bin = threadIdx.x * 4, count = at[0];
#pragma unroll
        for (int j = 1; j < 4; j++)
          if (target[k] > before + count) before += count, count = at[j], bin++;
        s.found[k] = {bin, before, count};
      }
    }
    __syncthreads();
  }
};

}  // namespace kvl

#endif
