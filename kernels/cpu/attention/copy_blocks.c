/* Copies whole blocks: block dst[i] = block src[i].
 *   src, dst  i32  [n]   -1 is skipped; no block is in both
 *   memory    [blocks], of bytes_block bytes each
 * Limit: read plus write bandwidth. The work is divided by the bytes of a block and not by
 * the list, so that the last of two entries with the same dst wins. */
#include "args/attention.h"
#include "cpu/split.h"
#include "cpu/vec.h"

static int copy_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_copy_blocks_args *a = args;
  const int64_t bytes = a->bytes_block;
  for (int64_t i = 0; i < a->n; i++) {
    int64_t src = a->src[i], dst = a->dst[i];
    if (src < 0 || src >= a->blocks || dst < 0 || dst >= a->blocks) continue;
    memcpy((char *)a->memory + dst * bytes + begin,
           (const char *)a->memory + src * bytes + begin, (size_t)(end - begin));
  }
  return 0;
}

KVL_CPU_KERNEL(copy_blocks) {
  const struct kvl_copy_blocks_args *a = args;
  int64_t grain = 4LL * KVL_GRAIN / i64_max(1, a->n);
  return kvl__split(a->bytes_block, i64_max(4096, grain), copy_piece, a);
}
