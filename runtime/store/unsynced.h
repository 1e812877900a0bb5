/* A note beside a file says that the file has been written to, but not synced to the disk,
 * since the machine was started. If the machine goes down before the sync, the next start
 * finds a note of an earlier start and knows that the file may be torn. */
#ifndef KVL_UNSYNCED_H
#define KVL_UNSYNCED_H

#include "core/status.h"

/* Call this before the file is opened. If its note is of an earlier start of the machine, it
 * removes the file and the note. Returns 1 if it did, else 0. Errors: IO. */
int kvl__unsynced_recover(const char *path);
/* Call this before bytes are written that are not synced. It makes sure that a note is on
 * the disk. Calls of this function and of clear must not overlap, in any of the processes.
 * Errors: IO. */
int kvl__unsynced_note(const char *path);
/* Removes the note, once everything that was written is synced. */
void kvl__unsynced_clear(const char *path);

#endif
