/* A file that is read by pread and that must stay as it is while it is open. Data is not read
 * through a map, because reading a map of a file that somebody cuts off kills the process,
 * and because a map's pages count as memory of the process while they are read. */
#ifndef KVL_FILE_H
#define KVL_FILE_H

#include <sys/stat.h>

#include "core/status.h"

struct kvl__file {
  char *path;
  int fd;
  struct stat opened; /* the file as it was when it was opened */
};

/* Opens a regular file of at least bytes_least bytes. Errors: IO, FORMAT, NO_MEMORY. Close it
 * after a failure too. */
int kvl__file_open(const char *path, int64_t bytes_least, struct kvl__file *out);
void kvl__file_close(struct kvl__file *f);

/* Reads n bytes at an offset. Errors: IO, also when the file ends before. */
int kvl__file_read(const struct kvl__file *f, void *out, size_t n, int64_t offset);

/* Fails with IO if somebody has changed the file since it was opened, so that no tensor is
 * made of two versions of it. */
int kvl__file_unchanged(const struct kvl__file *f);

#endif
