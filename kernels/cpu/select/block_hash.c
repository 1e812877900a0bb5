/* Hashes the keys of some blocks: each block's mean key, or each of its keys.
 *   cache   f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   blocks  i32                  [n]   physical; out of range (-1) is skipped
 *   rows    i32                  [n]   rows of hashes to write; NULL: those of blocks
 *   tokens  i32                  [n]   valid tokens; the mean of none has the hash 0
 *   planes  f32                  [bits, head_dim]
 *   hashes  u64                  [rows, kv_heads, words] or [.., block_size, words]
 * Exact, because args/select.h fixes the order of the sums. Limit: arithmetic. */
#include "args/select.h"
#include "cpu/select/hash.h"
#include "cpu/split.h"
#include "cpu/strip.h"

/* x += the key of a token, or x = that key. */
static inline KVL_HOT void take_key(float *x, const struct kvl_strips *of, const char *strip,
                                    int64_t token, int add, const int codec) {
  const char *row = strip + token * of->bytes_row;
  float key[HASH_DIM_MAX] __attribute__((aligned(64)));
  if (kvl__packs(codec)) {
    unpack_row(of, row, scales_of(of, strip, token), codec, key);
    row = (const char *)key;
  }
  hash_take(x, row, of->dim, add, rows_dtype(codec));
}

static inline KVL_HOT void item(const struct kvl_block_hash_args *a, int64_t i,
                                const int codec) {
  const int64_t heads = a->cache.kv_heads, size = a->cache.block_size, head = i % heads;
  const int dim = a->cache.key.dim, words = (a->bits + 63) / 64;
  const int64_t block = a->blocks[i / heads], to = a->rows ? a->rows[i / heads] : block;
  if (block < 0 || block >= a->cache.blocks || to < 0 || to >= a->summary_rows) return;
  const int64_t tokens = i64_max(0, i64_min(a->tokens[i / heads], size));
  const char *k = kvl__keys_of(&a->cache, block, head);
  float x[HASH_DIM_MAX] __attribute__((aligned(64)));
  if (a->is_token) {
    for (int64_t t = 0; t < tokens; t++) {
      take_key(x, &a->cache.key, k, t, 0, codec);
      hash_vector(x, a->planes, dim, a->bits,
                  a->hashes + ((to * heads + head) * size + t) * words);
    }
    return;
  }
  memset(x, 0, sizeof x);
  for (int64_t t = 0; t < tokens; t++) take_key(x, &a->cache.key, k, t, 1, codec);
  hash_vector(x, a->planes, dim, a->bits, a->hashes + (to * heads + head) * words);
}

static int items_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_block_hash_args *a = args;
  for (int64_t i = begin; i < end; i++) KVL_BY_CODEC(a->cache.codec, item(a, i, D))
  return 0;
}

KVL_CPU_KERNEL(block_hash) {
  const struct kvl_block_hash_args *a = args;
  int64_t vectors = a->is_token ? a->cache.block_size : 1;
  return kvl__split(a->n * a->cache.kv_heads,
                    kvl__grain_rows(vectors * a->bits * a->cache.key.dim / 8), items_piece,
                    a);
}
