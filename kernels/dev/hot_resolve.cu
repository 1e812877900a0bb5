/* hot_resolve: which slot of a hot cache a selected block gets, and who is evicted.
 *
 * The shipped kernel (kernels/cuda/hot_resolve.cu) against bookkeeping that walks lists, over
 * long sequences of calls, some of them ahead of a step: every array and counter is equal
 * after every call. Then times: entries of all sequences (each KV head), hits among them.
 *
 * Limit: latency, see the kernel's head, which has the times. Predicted 9 us for 3280 entries
 * from seven cold accesses of 0.8 us and the launch: it takes 19; with 410 entries, 14, so
 * the barriers and walks between the accesses cost as much as these. */
#include "../cuda/hot_resolve.cu"

#include "dev.cuh"

namespace {

struct shape {
  int heads, blocks, slots, seqs, n;
  bool has_priority;
};

struct rng {
  uint64_t state;
  int operator()(int n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (int)((state >> 33) % (uint64_t)n);
  }
};

/* All arrays of one layer's cache and of one call, on the host. */
struct state {
  std::vector<int32_t> slot_of, block_of, order, ahead, selection, slots, from, to;
  std::vector<int64_t> counters = std::vector<int64_t>(5);
  std::vector<float> priority;
  explicit state(const shape &c)
      : slot_of(c.heads * c.blocks, -1), block_of(c.heads * c.slots, -1),
        ahead(c.heads * c.slots), selection(c.seqs * c.heads * c.n),
        slots(c.seqs * c.heads * c.n), from(c.heads * c.seqs * c.n),
        to(c.heads * c.seqs * c.n), priority(c.heads * c.blocks) {
    for (int g = 0; g < c.heads; g++) {
      std::vector<int32_t> row = dev::shuffled(c.slots, g + 7);
      order.insert(order.end(), row.begin(), row.end());
    }
  }
};

/* ---- the slow reference ---------------------------------------------------------------- */

void resolve_slowly(const shape &c, state &s, bool is_ahead) {
  const int room = c.seqs * c.n;
  for (int g = 0; g < c.heads; g++) {
    int32_t *slot_of = &s.slot_of[g * c.blocks], *block_of = &s.block_of[g * c.slots];
    int32_t *order = &s.order[g * c.slots], *ahead = &s.ahead[g * c.slots];
    std::vector<int32_t> missing;
    std::vector<char> used(c.slots);
    auto block_at = [&](int seq, int i) {
      return s.selection[(seq * c.heads + g) * c.n + i];
    };
    for (int e = 0; e < room; e++) {
      int32_t block = block_at(e / c.n, e % c.n);
      if (block < 0) continue;
      if (slot_of[block] < 0) {
        if (std::find(missing.begin(), missing.end(), block) == missing.end())
          missing.push_back(block);
        continue;
      }
      used[slot_of[block]] = 1;
      s.counters[0]++;
      if (!is_ahead && ahead[slot_of[block]]) {
        ahead[slot_of[block]] = 0;
        s.counters[4]++;
      }
    }
    s.counters[1] += missing.size();
    std::vector<int> places; /* of candidates in `order` */
    for (int p = 0; p < c.slots; p++)
      if (!used[order[p]]) places.push_back(p);
    std::stable_sort(places.begin(), places.end(), [&](int x, int y) {
      int32_t bx = block_of[order[x]], by = block_of[order[y]];
      if (bx < 0 || by < 0 || !c.has_priority) return bx < 0 && by >= 0;
      return s.priority[g * c.blocks + bx] < s.priority[g * c.blocks + by];
    });
    places.resize(missing.size());
    std::sort(places.begin(), places.end());
    std::fill_n(&s.from[g * room], room, -1);
    std::fill_n(&s.to[g * room], room, -1);
    for (size_t m = 0; m < missing.size(); m++) {
      int32_t slot = order[places[m]];
      if (block_of[slot] >= 0) {
        slot_of[block_of[slot]] = -1;
        s.counters[2]++;
      }
      block_of[slot] = missing[m];
      slot_of[missing[m]] = slot;
      ahead[slot] = is_ahead;
      used[slot] = 1;
      s.from[g * room + m] = missing[m];
      s.to[g * room + m] = slot;
    }
    std::stable_partition(order, order + c.slots, [&](int32_t slot) { return !used[slot]; });
    for (int e = 0; e < room; e++) {
      int32_t block = block_at(e / c.n, e % c.n);
      s.slots[((e / c.n) * c.heads + g) * c.n + e % c.n] = block < 0 ? -1 : slot_of[block];
    }
  }
}

/* ---- the kernel ------------------------------------------------------------------------- */

struct device_state {
  kvl_hot_resolve_args args = {};
  int32_t *selection;
  device_state(const shape &c, const state &s) {
    std::vector<int32_t> tables; /* logical blocks are physical ones */
    for (int i = 0; i < c.seqs; i++)
      for (int b = 0; b < c.blocks; b++) tables.push_back(b);
    kvl_hot_view &hot = args.hot;
    hot.memory.kv_heads = c.heads, hot.memory.blocks = c.slots, hot.blocks = c.blocks;
    hot.slot_of = dev::upload(s.slot_of), hot.block_of = dev::upload(s.block_of);
    hot.order = dev::upload(s.order), hot.ahead = dev::upload(s.ahead);
    hot.counters = dev::upload(s.counters);
    hot.priority = c.has_priority ? dev::upload(s.priority) : nullptr;
    args.selection = selection = dev::upload(s.selection);
    args.tables = dev::upload(tables);
    args.slots = dev::alloc<int32_t>(s.slots.size());
    args.miss_from = dev::alloc<int32_t>(s.from.size());
    args.miss_to = dev::alloc<int32_t>(s.to.size());
    args.seqs = c.seqs, args.selection_heads = c.heads, args.n = c.n;
    args.max_blocks = c.blocks;
    args.workspace = dev::alloc<char>((size_t)64 << 20);
  }
  void resolve(const kvl_cuda_queue *q) {
    if (kvl_cuda_hot_resolve(&args, (void *)q) < 0) exit(1);
  }
};

int wrong = 0, compared = 0;
template <class T>
void expect(const T *got, const std::vector<T> &want, const char *what, int call) {
  compared++;
  if (dev::download(got, want.size()) == want) return;
  if (wrong++ < 20) printf("WRONG %s after call %d\n", what, call);
}

/* Ascending, mostly of the first blocks; -1 padded. */
void choose(const shape &c, state &s, rng &r) {
  for (int row = 0; row < c.seqs * c.heads; row++) {
    std::vector<int32_t> list;
    int count = r(3) == 0 ? r(c.n + 1) : c.n;
    for (int i = 0; i < count; i++)
      list.push_back(r(r(4) ? std::min(2 * c.n, c.blocks) : c.blocks));
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    list.resize(c.n, -1);
    std::copy(list.begin(), list.end(), &s.selection[row * c.n]);
  }
}

void check(const shape &c, const kvl_cuda_queue *q, int calls) {
  rng r = {(uint64_t)c.slots * 31 + c.n};
  state s(c);
  for (float &x : s.priority) x = (float)r(9) - 4;
  device_state d(c, s);
  for (int call = 0; call < calls; call++) {
    choose(c, s, r);
    d.args.is_ahead = r(3) == 0;
    DEV_CHECK(cudaMemcpy(d.selection, s.selection.data(), s.selection.size() * 4,
                         cudaMemcpyHostToDevice));
    d.resolve(q);
    resolve_slowly(c, s, d.args.is_ahead);
    expect(d.args.slots, s.slots, "slots", call);
    expect(d.args.miss_from, s.from, "miss_from", call);
    expect(d.args.miss_to, s.to, "miss_to", call);
    expect(d.args.hot.slot_of, s.slot_of, "slot_of", call);
    expect(d.args.hot.block_of, s.block_of, "block_of", call);
    expect(d.args.hot.order, s.order, "order", call);
    expect(d.args.hot.ahead, s.ahead, "ahead", call);
    expect(d.args.hot.counters, s.counters, "counters", call);
  }
}

/* Every call misses `misses` entries of each head: a part of the selections moves on through
 * more blocks than there are slots. */
void time_shape(dev::bench &b, const shape &c, const kvl_cuda_queue *q, int misses) {
  const int each = misses / c.seqs, fixed = c.seqs * c.n, turns = misses ? 200 : 1;
  state s(c);
  std::vector<int32_t> all;
  for (int turn = 0; turn < turns; turn++)
    for (int row = 0; row < c.seqs * c.heads; row++)
      for (int i = 0; i < c.n; i++) {
        int seq = row / c.heads, moving = i - (c.n - each);
        int at = (turn * c.seqs + seq) * each + moving;
        all.push_back(moving < 0 ? seq * c.n + i : fixed + at % (c.blocks - fixed));
      }
  device_state d(c, s);
  const int32_t *selections = dev::upload(all);
  int calls = 0;
  auto run = [&] {
    d.args.selection = selections + (size_t)(calls++ % turns) * s.selection.size();
    d.resolve(q);
  };
  for (int turn = 0; turn < turns; turn++) run();
  double us = b.time(run);
  printf("%d heads, %d slots, %d entries, %4d misses%s  %.1f us\n", c.heads, c.slots,
         c.seqs * c.n, misses, c.has_priority ? ", priorities" : "", us);
}

}  // namespace

int main() {
  cudaDeviceProp prop;
  DEV_CHECK(cudaGetDeviceProperties(&prop, 0));
  kvl_cuda_queue q = {};
  q.sm_count = prop.multiProcessorCount;
  q.shared_optin = (int)prop.sharedMemPerBlockOptin;
  for (bool has_priority : {false, true}) {
    check({1, 40, 12, 1, 4, has_priority}, &q, 60);
    check({3, 60, 17, 2, 5, has_priority}, &q, 60);
    check({2, 30, 8, 1, 8, has_priority}, &q, 60);
    check({8, 2000, 1000, 4, 150, has_priority}, &q, 40);
    check({2, 8000, 5000, 2, 2500, has_priority}, &q, 10);
  }
  printf("%d arrays compared, %d wrong\n", compared, wrong);
  if (wrong) return 1;
  dev::bench b;
  for (bool has_priority : {false, true})
    for (int seqs : {1, 8}) {
      shape c = {8, 16384, 4096, seqs, 410, has_priority};
      if (seqs * c.n > c.slots / 2) c.slots = 2 * seqs * c.n;
      time_shape(b, c, &q, 0);
      time_shape(b, c, &q, seqs * 40);
    }
}
