/* Failure messages, host allocation that can be made to fail, and checks for bugs of the
 * library itself. Every other file of runtime/ builds on this one. */
#ifndef KVL_STATUS_H
#define KVL_STATUS_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvlab.h"

#ifdef KVL_DEBUG /* for a caller's bug inside the library, never for outside failures */
#define KVL_CHECK(condition)                                                     \
  do {                                                                           \
    if (!(condition)) {                                                          \
      fprintf(stderr, "%s:%d: KVL_CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      abort();                                                                   \
    }                                                                            \
  } while (0)
#else
#define KVL_CHECK(condition) ((void)0)
#endif

/* The number of entries that a container starts with, or holds. It is one or two in a
 * hostile build, so that containers grow and callers wait all the time. */
#ifdef KVL_HOSTILE
#define KVL__ROOM(normal, hostile) (hostile)
#else
#define KVL__ROOM(normal, hostile) (normal)
#endif

/* Records the message of a failure and returns `status`. */
int kvl__fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Records that `function` got NULL as its argument `name`. Returns the status. */
int kvl__missing(const char *function, const char *name);
/* Ends a function of kvlab.h with this failure if a pointer that it needs is NULL. */
#define KVL__NEED(pointer)                                   \
  do {                                                       \
    if (!(pointer)) return kvl__missing(__func__, #pointer); \
  } while (0)

/* The configuration, compiler and hash of the sources of this library. */
const char *kvl__build(void);

/* malloc and realloc that record NO_MEMORY and obey kvl_fail_allocation. The error names the
 * thing as `what`. */
void *kvl__malloc(size_t bytes, const char *what);
void *kvl__realloc(void *p, size_t bytes, const char *what);
/* Returns 1 if the next allocation has been told to fail. */
int kvl__allocation_fails(void);

#endif
