/* A note beside a file that it has been written to, but not synced to the disk, since the
 * machine was started. When the machine goes down meanwhile, the next start finds a note of an
 * earlier one, and knows that the file may be torn. */
#ifndef KVL_UNSYNCED_H
#define KVL_UNSYNCED_H

#include "core/status.h"

/* Before the file is opened: when its note is of an earlier start of the machine, remove the
 * file and the note. Returns 1 when it did, else 0. Errors: IO. */
int kvl__unsynced_recover(const char *path);
/* Before bytes are written that are not synced: see to it that a note is there, on the disk.
 * With clear, one at a time, in all processes. Errors: IO. */
int kvl__unsynced_note(const char *path);
/* All that was written is synced: no note. */
void kvl__unsynced_clear(const char *path);

#endif
