/* Drops blocks of the host tier from the hot cache: frees their slots, for every KV head.
 *
 *   blocks    i32  [n]                 out of range (-1) is skipped
 *   slot_of   i32  [kv_heads, blocks]
 *   block_of  i32  [kv_heads, slots]
 *   each      1, or the tokens of a block, which have slots of their own
 *
 * Bytes   16 * kv_heads * n, scattered. Limit: the launch, except for long lists. When a
 *         block is named twice, two threads drop it with the same stores. */
#include "args/offload.h"
#include "cuda/elementwise.cuh"

namespace {

struct drop_body {
  kvl_hot_view hot;
  const int32_t *blocks;
  int64_t n;
  template <int N> __device__ void run(int64_t i) const {
    int64_t head, at;
    kvl::divide(i, n * hot.each, &head, &at);
    const int64_t block = (int64_t)blocks[at / hot.each] * hot.each + at % hot.each;
    const int64_t slots = hot.slots;
    if (block < 0 || block >= hot.blocks) return;
    int32_t *slot_of = hot.slot_of + head * hot.blocks + block;
    const int32_t slot = *slot_of;
    if (slot < 0) return;
    if (slot < slots) hot.block_of[head * slots + slot] = -1;
    *slot_of = -1;
  }
};

}  // namespace

KVL_CUDA_KERNEL(hot_drop) {
  const kvl_hot_drop_args &a = *(const kvl_hot_drop_args *)args;
  return kvl::each<1>(drop_body{a.hot, a.blocks, a.n},
                      a.n * a.hot.each * a.hot.memory.kv_heads, false, queue);
}
