/* Hashes of files and of memory, by which a row of an experiment names what it was computed
 * with and the kernels' cache knows its own; and whether others can write to a path. */
#define XXH_INLINE_ALL
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "core/status.h"

enum { BYTES = 1 << 20 };

/* Adds a file to the state. `bytes` is memory for a part of it. */
static int add_file(XXH3_state_t *state, const char *path, char *bytes) {
  FILE *file = fopen(path, "rbe");
  if (!file) return kvl__fail(KVL_ERR_IO, "%s: %s", path, strerror(errno));
  uint64_t length = 0;
  for (size_t n; (n = fread(bytes, 1, BYTES, file)) > 0; length += n)
    XXH3_128bits_update(state, bytes, n);
  int status = KVL_OK;
  if (ferror(file)) /* a folder can be opened, but not read */
    status = kvl__fail(KVL_ERR_IO, "%s: %s", path, strerror(errno));
  fclose(file);
  XXH3_128bits_update(state, &length, sizeof length);
  return status;
}

int kvl_files_hash(const char *const *paths, int n, kvl_key *hash) {
  if (n < 0) return kvl__fail(KVL_ERR_INVALID, "files_hash: n is %d, expected >= 0", n);
  if ((n > 0 && !paths) || !hash)
    return kvl__fail(KVL_ERR_INVALID, "files_hash: %s missing",
                     hash ? "paths are" : "hash is");
  char *bytes = kvl__malloc(BYTES, "a part of a file");
  if (!bytes) return KVL_ERR_NO_MEMORY;
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  int status = KVL_OK;
  for (int i = 0; i < n && status == KVL_OK; i++)
    status = paths[i] ? add_file(&state, paths[i], bytes)
                      : kvl__fail(KVL_ERR_INVALID, "files_hash: paths[%d] is NULL", i);
  free(bytes);
  if (status < 0) return status;
  XXH128_hash_t h = XXH3_128bits_digest(&state);
  *hash = (kvl_key){h.low64, h.high64};
  return KVL_OK;
}

int kvl_bytes_hash(const void *bytes, size_t size, kvl_key *hash) {
  KVL__NEED(hash);
  if (size > 0) KVL__NEED(bytes);
  XXH128_hash_t h = XXH3_128bits(size > 0 ? bytes : "", size);
  *hash = (kvl_key){h.low64, h.high64};
  return KVL_OK;
}

int kvl_path_is_private(const char *path) {
  struct stat is;
  if (!path || stat(path, &is) < 0) return 0;
  return is.st_uid == geteuid() && !(is.st_mode & (S_IWGRP | S_IWOTH));
}
