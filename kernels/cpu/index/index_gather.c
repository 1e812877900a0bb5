/* k, scales = cache[places]. A place that does not exist gives zeros.
 *   cache   u8      [blocks, block_size * (dim + 4)]   a block's keys, then its scales
 *   places  i64     [n]
 *   k       f8e4m3  [n, dim]
 *   scales  f32     [n]
 * Exact. Limit: read plus write bandwidth. */
#include "args/index.h"
#include "cpu/index/index.h"
#include "cpu/split.h"

static int places_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_index_gather_args *a = args;
  const size_t dim = (size_t)a->cache.dim;
  for (int64_t i = begin; i < end; i++) {
    struct index_place from = index_of_place(&a->cache, a->places[i]);
    uint8_t *k = a->k + i * (int64_t)dim;
    if (from.key) memcpy(k, from.key, dim);
    else memset(k, 0, dim);
    a->scales[i] = from.key ? *from.scale : 0;
  }
  return 0;
}

KVL_CPU_KERNEL(index_gather) {
  const struct kvl_index_gather_args *a = args;
  return kvl__split(a->n, kvl__grain_rows(a->cache.dim), places_piece, a);
}
