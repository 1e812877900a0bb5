/* Inputs that come late. A kernel may guess before earlier kernels have ended
 *   (programmatic.cuh), so a check has to give it old inputs to guess from: late_inputs
 *   late;
 *   late.add(lens, count);             each input that the kernel may read early
 *   late.spoil(kind);                  now the inputs have other contents
 *   late.write(&queue);                a kernel that lets the next one start, waits, and
 *   launch(...);                       only then writes what should be there */
#ifndef KVL_DEV_LATE_CUH
#define KVL_DEV_LATE_CUH

#include "dev.cuh"
#include "cuda/programmatic.cuh"

namespace dev {

struct late_pieces {
  enum { MOST = 6 };
  uint32_t *to[MOST];
  const uint32_t *from[MOST];
  size_t words[MOST];
  int count = 0;
};

__global__ void write_late(const __grid_constant__ late_pieces p, uint64_t ns) {
  kvl::let_next_start();
  kvl::wait_for_previous();
  auto now = [] {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
  };
  for (const uint64_t begin = now(); now() - begin < ns;) {}
  for (int i = 0; i < p.count; i++)
    for (size_t w = threadIdx.x; w < p.words[i]; w += blockDim.x) p.to[i][w] = p.from[i][w];
}

class late_inputs {
  late_pieces p;
  std::vector<std::vector<uint32_t>> kinds[2]; /* what lies there before: [kind][input] */

public:
  enum { KINDS = 2 }; /* the input backwards; its halves, rounded down */
  template <class T> void add(const T *input, size_t count) {
    if (!input || count == 0) return;
    const std::vector<T> right = download(input, count);
    std::vector<T> other(right.rbegin(), right.rend());
    for (auto &kind : kinds) {
      const uint32_t *bits = (const uint32_t *)other.data();
      kind.emplace_back(bits, bits + count * sizeof(T) / 4);
      for (size_t i = 0; i < count; i++) other[i] = right[i] / 2;
    }
    p.to[p.count] = (uint32_t *)input;
    p.from[p.count] = (const uint32_t *)upload(right);
    p.words[p.count++] = count * sizeof(T) / 4;
  }
  void spoil(int kind) {
    for (int i = 0; i < p.count; i++)
      DEV_CHECK(
          cudaMemcpy(p.to[i], kinds[kind][i].data(), p.words[i] * 4, cudaMemcpyHostToDevice));
  }
  void write(const kvl_cuda_queue *q) {
    if (kvl::launch_programmatic(write_late, 1, 256, 0, q, p, (uint64_t)20000) < 0) exit(1);
  }
  ~late_inputs() {
    for (int i = 0; i < p.count; i++) DEV_CHECK(cudaFree((void *)p.from[i]));
  }
};

}  // namespace dev

#endif
