/* What files of tensors have in common: the table of their tensors, its checks, and reading a
 * tensor part by part. A function that returns a pointer returns NULL after a failure, for
 * which it sets *status if it takes that. */
#ifndef KVL_CHECKPOINT_H
#define KVL_CHECKPOINT_H

#include "core/tensor.h"
#include "files/file.h"

struct kvl__entry {
  char *name;
  int64_t shape[KVL_DIMS_MAX]; /* 1 from ndim on */
  int64_t offset, bytes;       /* in the data section */
  int32_t ndim, type;          /* type: the format's number of it */
  int32_t values, bytes_block; /* a row is stored in blocks of `values` numbers */
};

struct kvl__checkpoint {
  struct kvl__file file;
  int64_t section, bytes_section; /* where the data begins, and how long it is */
  struct kvl__entry *entries;
  int count, capacity;
};

void kvl__checkpoint_close(struct kvl__checkpoint *f);

/* A list with room for one more element; after a failure the list as it was. */
void *kvl__one_more(void *list, int count, int *capacity, size_t bytes, int *status);
/* Pointers to the elements of a list, sorted, for the caller to free. */
void *kvl__sorted(void *list, int count, size_t bytes,
                  int (*order)(const void *, const void *), int *status);

/* Writes `kind "name"` for an error, with ? in place of characters that are not plain, and
 * without the end of a long name. */
void kvl__name_words(const char *kind, const char *name, int64_t length, char *out,
                     size_t size);
/* Fails with FORMAT: the file, the entry, and what is wrong with it. */
int kvl__entry_fail(const struct kvl__checkpoint *f, const struct kvl__entry *e,
                    const char *fault);

/* A new entry with a copy of a name, valid until the next one is added. */
struct kvl__entry *kvl__entry_add(struct kvl__checkpoint *f, const char *name, int64_t length,
                                  int *status);
/* Sets values and bytes_block of an entry, and its bytes. */
int kvl__entry_size(const struct kvl__checkpoint *f, struct kvl__entry *e, int values,
                    int bytes_block);
/* Checks that no tensors overlap and no name occurs twice and, if is_packed, that the tensors
 * take the whole data section. */
int kvl__entries_check(const struct kvl__checkpoint *f, int is_packed);

const struct kvl__entry *kvl__entry_at(const struct kvl__checkpoint *f, int index);
/* Checks that a tensor has an entry's shape, and a dtype whose bit is set in `dtypes`. */
int kvl__entry_fits(const struct kvl__entry *e, const kvl_tensor *t, uint32_t dtypes,
                    const char *words);
/* Converts the blocks of an entry and writes them to t. The blocks lie at the start of
 * `memory`; the conversion may use the rest. */
typedef int kvl__convert(const struct kvl__entry *e, void *memory, const kvl_tensor *t);
/* Reads an entry into t, `most` numbers at a time, through `bytes` of memory, few enough to
 * stay in the processor's cache. convert is NULL if t has the type of the file. */
int kvl__entry_read(const struct kvl__checkpoint *f, const struct kvl__entry *e,
                    const kvl_tensor *t, int64_t most, size_t bytes, kvl__convert *convert);

#endif
