/* The note is the file PATH-unsynced. It holds the kernel's id of this start of the machine.
 * It is created by a rename, so it appears whole, however its writer ends. */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/unsynced.h"

enum { ID_BYTES = 36 }; /* a UUID in text */

static int io_fail(const char *path, const char *what) {
  return kvl__fail(KVL_ERR_IO, "%s: %s: %s", path, what, strerror(errno));
}

static int join(const char *path, const char *end, char out[PATH_MAX]) {
  if (snprintf(out, PATH_MAX, "%s%s", path, end) < PATH_MAX) return KVL_OK;
  errno = ENAMETOOLONG;
  return io_fail(path, "name");
}

static int read_start(char id[ID_BYTES]) {
  static const char path[] = "/proc/sys/kernel/random/boot_id";
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t n = fd < 0 ? -1 : read(fd, id, ID_BYTES);
  int status = n == ID_BYTES ? KVL_OK : io_fail(path, "read");
  if (fd >= 0) close(fd);
  return status;
}

/* A file's name is on the disk when its folder is synced. */
static int sync_folder(const char *path) {
  char name[PATH_MAX];
  int status = join(path, "", name);
  if (status < 0) return status;
  int fd = open(dirname(name), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  status = fd >= 0 && !fsync(fd) ? KVL_OK : io_fail(path, "sync of its folder");
  if (fd >= 0) close(fd);
  return status;
}

/* Handles a note that is open and locked. Returns 1 if it removed the file that the note is
 * about, and the note; 0 if the note is of this start; 2 if the note was removed while we
 * waited for the lock. */
static int recover_locked(const char *path, const char *note, int fd) {
  char then[ID_BYTES], now[ID_BYTES];
  struct stat ours, theirs;
  int status = read_start(now);
  if (status < 0) return status;
  if (fstat(fd, &ours) < 0) return io_fail(note, "fstat");
  if (stat(note, &theirs) < 0 || ours.st_ino != theirs.st_ino) return 2;
  ssize_t n = read(fd, then, sizeof then);
  if (n == ID_BYTES && !memcmp(then, now, sizeof then)) return 0;
  if (unlink(path) < 0 && errno != ENOENT) return io_fail(path, "remove");
  if (unlink(note) < 0) return io_fail(note, "remove");
  return 1;
}

int kvl__unsynced_recover(const char *path) {
  char note[PATH_MAX];
  int status = join(path, "-unsynced", note);
  if (status < 0) return status;
  do {
    int fd = open(note, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT ? 0 : io_fail(note, "open");
    status = flock(fd, LOCK_EX) < 0 ? io_fail(note, "lock") : recover_locked(path, note, fd);
    close(fd);
  } while (status == 2);
  return status;
}

int kvl__unsynced_note(const char *path) {
  char note[PATH_MAX], fresh[PATH_MAX], id[ID_BYTES];
  int status = join(path, "-unsynced", note);
  if (status < 0 || !access(note, F_OK)) return status;
  if ((status = join(path, "-unsynced.new", fresh)) < 0) return status;
  if ((status = read_start(id)) < 0) return status;
  int fd = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return io_fail(fresh, "open");
  if (write(fd, id, sizeof id) != (ssize_t)sizeof id || fsync(fd) < 0)
    status = io_fail(fresh, "write");
  close(fd);
  if (status >= 0 && rename(fresh, note) < 0) status = io_fail(fresh, "rename");
  return status < 0 ? status : sync_folder(path);
}

void kvl__unsynced_clear(const char *path) {
  char note[PATH_MAX];
  if (join(path, "-unsynced", note) >= 0) unlink(note);
}
