/* cache[place] = k in f8e4m3, with a scale of its own.
 *   k       f32 f16 bf16  [n, dim]
 *   places  i64           [n]   block * block_size + offset; < 0 is skipped; all different
 *   cache   u8            [blocks, block_size * (dim + 4)]   a block's keys, then its scales
 * Exact, like quantise_rows. Limit: read bandwidth. Source: SGLang's index-K pool. */
#include "args/index.h"
#include "cpu/index/index.h"
#include "cpu/index/quantise.h"
#include "cpu/split.h"

static int tokens_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_index_append_args *a = args;
  const int dim = a->cache.dim;
  for (int64_t i = begin; i < end; i++) {
    struct index_place to = index_of_place(&a->cache, a->places[i]);
    if (!to.key) continue;
    KVL_BY_FLOAT(a->dtype, *to.scale = index_row(at_const(a->k, i * dim, D), to.key, dim,
                                                 a->rotates, a->is_ue8m0, D))
  }
  return 0;
}

KVL_CPU_KERNEL(index_append) {
  const struct kvl_index_append_args *a = args;
  return kvl__split(a->n, kvl__grain_rows(a->cache.dim), tokens_piece, a);
}
