/* The block pool records which blocks of paged KV memory are free and how many references
 * each block has. It handles block numbers, never the memory itself. Invariant: a block is in
 * the free list exactly when its reference count is 0. */
#include "memory/block_pool.h"

int kvl_pool_open(int blocks, int block_size, int watermark, kvl_pool **out) {
  KVL__NEED(out);
  if (blocks < 1)
    return kvl__fail(KVL_ERR_INVALID, "pool: blocks is %d, expected >= 1", blocks);
  if (block_size < 1 || block_size > 4096)
    return kvl__fail(KVL_ERR_INVALID, "pool: block_size is %d, expected 1 ... 4096",
                     block_size);
  if (watermark < 0 || watermark >= blocks)
    return kvl__fail(KVL_ERR_INVALID, "pool: watermark is %d, expected 0 ... %d", watermark,
                     blocks - 1);
  if ((int64_t)blocks * block_size > INT32_MAX)
    return kvl__fail(KVL_ERR_INVALID, "pool: %d blocks of %d tokens, expected < 2^31 tokens",
                     blocks, block_size);
  size_t bytes = sizeof(kvl_pool) + (size_t)blocks * 2 * sizeof(int32_t);
  kvl_pool *p = kvl__malloc(bytes, "a block pool");
  if (!p) return KVL_ERR_NO_MEMORY;
  *p = (kvl_pool){.blocks = blocks,
                  .block_size = block_size,
                  .watermark = watermark,
                  .free_count = blocks,
                  .holders = 1};
  p->refs = (int32_t *)(p + 1);
  p->free_list = p->refs + blocks;
  memset(p->refs, 0, (size_t)blocks * sizeof *p->refs);
  for (int i = 0; i < blocks; i++) p->free_list[i] = blocks - 1 - i; /* 0 is taken first */
  *out = p;
  return KVL_OK;
}

void kvl__pool_unref(kvl_pool *p) {
  if (--p->holders == 0) free(p);
}

void kvl_pool_close(kvl_pool *pool) {
  if (pool) kvl__pool_unref(pool);
}

int kvl_pool_blocks_free(const kvl_pool *pool) {
  KVL__NEED(pool);
  return pool->free_count;
}

int kvl_pool_stats_get(const kvl_pool *pool, kvl_pool_stats *out) {
  KVL__NEED(pool);
  KVL__NEED(out);
  *out = (kvl_pool_stats){.blocks_held = pool->blocks - pool->free_count,
                          .blocks_peak = pool->held_peak,
                          .blocks_evicted = pool->evicted};
  return KVL_OK;
}

int kvl_pool_reset_peak(kvl_pool *pool) {
  KVL__NEED(pool);
  pool->held_peak = pool->blocks - pool->free_count;
  return KVL_OK;
}

int kvl_pool_block_refs(const kvl_pool *pool, int block) {
  KVL__NEED(pool);
  if (block < 0 || block >= pool->blocks)
    return kvl__fail(KVL_ERR_INVALID, "pool: block is %d, expected 0 ... %d", block,
                     pool->blocks - 1);
  return pool->refs[block];
}

/* Returns how many references a block has; it is an error if the block is free. */
static int held(const kvl_pool *pool, int block) {
  int refs = kvl_pool_block_refs(pool, block);
  if (refs != 0) return refs;
  return kvl__fail(KVL_ERR_INVALID, "pool: block %d is free, expected one that is held",
                   block);
}

int kvl_pool_hold(kvl_pool *pool, int block) {
  int refs = held(pool, block);
  if (refs < 0) return refs;
  kvl__pool_hold(pool, block);
  return KVL_OK;
}

int kvl_pool_release(kvl_pool *pool, int block) {
  int refs = held(pool, block);
  if (refs < 0) return refs;
  kvl__pool_release(pool, block);
  return KVL_OK;
}

int kvl__pool_expect(const kvl_pool *p, int64_t n) {
  if (n <= p->free_count - p->watermark || n <= 0) return KVL_OK;
  return kvl__fail(KVL_ERR_NO_BLOCKS,
                   "out of blocks: %lld wanted, %d of %d free, %d kept as watermark",
                   (long long)n, p->free_count, p->blocks, p->watermark);
}

void kvl__pool_take(kvl_pool *p, int n, int32_t *out) {
  for (int i = 0; i < n; i++) {
    out[i] = p->free_list[--p->free_count];
    KVL_CHECK(p->refs[out[i]] == 0);
    p->refs[out[i]] = 1;
  }
  const int held = p->blocks - p->free_count;
  if (held > p->held_peak) p->held_peak = held;
}

void kvl__pool_hold(kvl_pool *p, int32_t block) { p->refs[block]++; }

void kvl__pool_release(kvl_pool *p, int32_t block) {
  KVL_CHECK(p->refs[block] > 0);
  if (--p->refs[block] == 0) p->free_list[p->free_count++] = block;
}
