/* Reading a file that must not change meanwhile; file.h says how and why. */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "files/file.h"

int kvl__file_open(const char *path, int64_t bytes_least, struct kvl__file *out) {
  *out = (struct kvl__file){.fd = -1, .path = kvl__malloc(strlen(path) + 1, "a path")};
  if (!out->path) return KVL_ERR_NO_MEMORY;
  strcpy(out->path, path);
  out->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block */
  if (out->fd < 0) return kvl__fail(KVL_ERR_IO, "%s: %s", path, strerror(errno));
  if (fstat(out->fd, &out->opened) < 0 || !S_ISREG(out->opened.st_mode))
    return kvl__fail(KVL_ERR_IO, "%s: not a regular file", path);
  if (out->opened.st_size < bytes_least)
    return kvl__fail(KVL_ERR_FORMAT, "%s: %lld bytes, expected at least %lld", path,
                     (long long)out->opened.st_size, (long long)bytes_least);
  return KVL_OK;
}

void kvl__file_close(struct kvl__file *f) {
  if (f->fd >= 0) close(f->fd);
  free(f->path);
}

int kvl__file_read(const struct kvl__file *f, void *out, size_t n, int64_t offset) {
  for (size_t at = 0; at < n;) {
    ssize_t got = pread(f->fd, (char *)out + at, n - at, (off_t)(offset + (int64_t)at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return kvl__fail(KVL_ERR_IO, "%s: %s", f->path, strerror(errno));
    if (got == 0)
      return kvl__fail(KVL_ERR_IO,
                       "%s: ends at byte %lld, expected %lld bytes: it was cut off while it "
                       "was open",
                       f->path, (long long)(offset + (int64_t)at),
                       (long long)f->opened.st_size);
    at += (size_t)got;
  }
  return KVL_OK;
}

int kvl__file_unchanged(const struct kvl__file *f) {
  struct stat now;
  if (fstat(f->fd, &now) < 0)
    return kvl__fail(KVL_ERR_IO, "%s: %s", f->path, strerror(errno));
  if (now.st_size != f->opened.st_size)
    return kvl__fail(KVL_ERR_IO,
                     "%s: has %lld bytes, expected %lld: it changed while it was "
                     "open",
                     f->path, (long long)now.st_size, (long long)f->opened.st_size);
  if (now.st_mtim.tv_sec != f->opened.st_mtim.tv_sec ||
      now.st_mtim.tv_nsec != f->opened.st_mtim.tv_nsec)
    return kvl__fail(KVL_ERR_IO, "%s: it was written to while it was open", f->path);
  return KVL_OK;
}
