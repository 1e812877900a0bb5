/* Keys of blocks, and checksums of records. A key depends on every token up to the end of
 * its block, as K and V of the block do, so equal keys mean equal KV. The hash is XXH3,
 * which has been fixed since xxHash 0.8. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "store/store.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "keys and records are little-endian, as in memory");
_Static_assert(sizeof(kvl_key) == 16, "a key is hashed as 16 bytes");

static kvl_key hash(const kvl_key *parent, const int32_t *tokens, int n) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  XXH3_128bits_update(&state, parent, sizeof *parent);
  XXH3_128bits_update(&state, tokens, (size_t)n * sizeof *tokens);
  XXH128_hash_t h = XXH3_128bits_digest(&state);
  return (kvl_key){h.low64, h.high64};
}

int kvl_block_keys(const char *model, const kvl_key *parent, const int32_t *tokens, int count,
                   int block_size, kvl_key *keys) {
  if (!parent && !model)
    return kvl__fail(KVL_ERR_INVALID, "block_keys: model and parent are both missing");
  if (block_size < 1)
    return kvl__fail(KVL_ERR_INVALID, "block_keys: block_size is %d, expected >= 1",
                     block_size);
  if (count < 0)
    return kvl__fail(KVL_ERR_INVALID, "block_keys: count is %d, expected >= 0", count);
  int n = count / block_size;
  if (n > 0 && (!tokens || !keys))
    return kvl__fail(KVL_ERR_INVALID, "block_keys: %s missing",
                     tokens ? "keys are" : "tokens are");
  kvl_key last;
  if (parent) {
    last = *parent;
  } else {
    XXH128_hash_t h = XXH3_128bits(model, strlen(model));
    last = (kvl_key){h.low64, h.high64};
  }
  for (int i = 0; i < n; i++)
    keys[i] = last = hash(&last, tokens + (size_t)i * (size_t)block_size, block_size);
  return n;
}

uint64_t kvl__record_checksum(const struct kvl__name *name, const void *bytes, size_t n) {
  return XXH3_64bits_withSeed(bytes, n, XXH3_64bits(name->bytes, sizeof name->bytes));
}
