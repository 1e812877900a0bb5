/* The table of tensors of a file, its checks, and reading; checkpoint.h says what for. */
#include "files/checkpoint.h"

void kvl__checkpoint_close(struct kvl__checkpoint *f) {
  for (int i = 0; i < f->count; i++) free(f->entries[i].name);
  free(f->entries);
  kvl__file_close(&f->file);
}

void *kvl__one_more(void *list, int count, int *capacity, size_t bytes, int *status) {
  if (count < *capacity) return list;
  int room = *capacity ? 2 * *capacity : KVL__ROOM(64, 1);
  void *grown = kvl__realloc(list, (size_t)room * bytes, "the index of a file");
  if (!grown) *status = KVL_ERR_NO_MEMORY;
  else *capacity = room;
  return grown ? grown : list;
}

void *kvl__sorted(void *list, int count, size_t bytes,
                  int (*order)(const void *, const void *), int *status) {
  void **pointers = kvl__malloc((size_t)count * sizeof *pointers, "the index of a file");
  if (!pointers) *status = KVL_ERR_NO_MEMORY;
  for (int i = 0; pointers && i < count; i++) pointers[i] = (char *)list + (size_t)i * bytes;
  if (pointers) qsort(pointers, (size_t)count, sizeof *pointers, order);
  return pointers;
}

void kvl__name_words(const char *kind, const char *name, int64_t length, char *out,
                     size_t size) {
  char plain[128];
  int n = 0;
  for (; n < length && n < (int)sizeof plain; n++)
    plain[n] = name[n] >= 32 && name[n] < 127 ? name[n] : '?';
  snprintf(out, size, "%s \"%.*s\"", kind, n, plain);
}

int kvl__entry_fail(const struct kvl__checkpoint *f, const struct kvl__entry *e,
                    const char *fault) {
  char words[160];
  kvl__name_words("tensor", e->name, (int64_t)strlen(e->name), words, sizeof words);
  return kvl__fail(KVL_ERR_FORMAT, "%s: %s: %s", f->file.path, words, fault);
}

struct kvl__entry *kvl__entry_add(struct kvl__checkpoint *f, const char *name, int64_t length,
                                  int *status) {
  f->entries = kvl__one_more(f->entries, f->count, &f->capacity, sizeof *f->entries, status);
  char *copy = kvl__malloc((size_t)length + 1, "a tensor's name");
  if (!copy) *status = KVL_ERR_NO_MEMORY;
  if (*status < 0) {
    free(copy);
    return NULL;
  }
  memcpy(copy, name, (size_t)length);
  copy[length] = 0;
  struct kvl__entry *e = &f->entries[f->count++];
  *e = (struct kvl__entry){.name = copy, .shape = {1, 1, 1, 1, 1, 1}};
  return e;
}

int kvl__entry_size(const struct kvl__checkpoint *f, struct kvl__entry *e, int values,
                    int bytes) {
  int64_t blocks = 1;
  int is_over = 0;
  e->values = values, e->bytes_block = bytes;
  for (int i = 0; i < e->ndim; i++)
    is_over |= __builtin_mul_overflow(blocks, e->shape[i] / (i < e->ndim - 1 ? 1 : values),
                                      &blocks);
  is_over |= __builtin_mul_overflow(blocks, bytes, &e->bytes);
  if (!is_over && blocks <= INT64_MAX / 4 / values) return KVL_OK; /* as f32, too */
  return kvl__entry_fail(f, e, "its shape has more than 2^63 bytes");
}

static int by_name(const void *a, const void *b) {
  return strcmp((*(struct kvl__entry *const *)a)->name,
                (*(struct kvl__entry *const *)b)->name);
}

static int by_offset(const void *a, const void *b) {
  const struct kvl__entry *x = *(struct kvl__entry *const *)a,
                          *y = *(struct kvl__entry *const *)b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty tensors first */
}

int kvl__entries_check(const struct kvl__checkpoint *f, int is_packed) {
  int status = KVL_OK;
  struct kvl__entry **list = kvl__sorted(f->entries, f->count, sizeof **list, by_offset,
                                         &status);
  int64_t end = 0;
  for (int i = 0; i < f->count && status >= 0; i++) {
    if (list[i]->offset < end)
      status = kvl__entry_fail(f, list[i], "its data overlaps another tensor's");
    else if (is_packed && list[i]->offset > end)
      status = kvl__entry_fail(f, list[i], "there is a hole before its data");
    end = list[i]->offset + list[i]->bytes;
  }
  if (status >= 0 && is_packed && end != f->bytes_section)
    status = kvl__fail(KVL_ERR_FORMAT, "%s: %lld bytes of data, the tensors take %lld",
                       f->file.path, (long long)f->bytes_section, (long long)end);
  if (list) qsort(list, (size_t)f->count, sizeof *list, by_name);
  for (int i = 1; i < f->count && status >= 0; i++)
    if (!by_name(&list[i - 1], &list[i]))
      status = kvl__entry_fail(f, list[i], "the name occurs twice");
  free(list);
  return status;
}

const struct kvl__entry *kvl__entry_at(const struct kvl__checkpoint *f, int index) {
  if (index >= 0 && index < f->count) return &f->entries[index];
  kvl__fail(KVL_ERR_INVALID, "%s: entry is %d, expected 0 ... %d", f->file.path, index,
            f->count - 1);
  return NULL;
}

int kvl__entry_fits(const struct kvl__entry *e, const kvl_tensor *t, uint32_t dtypes,
                    const char *words) {
  if (!t || !t->storage) return kvl__fail(KVL_ERR_INVALID, "%s: t is closed", e->name);
  if ((uint32_t)t->dtype < 32 && dtypes >> t->dtype & 1 && t->ndim == e->ndim &&
      !memcmp(t->shape, e->shape, sizeof e->shape[0] * (size_t)e->ndim))
    return KVL_OK;
  char got[96];
  return kvl__fail(KVL_ERR_INVALID, "%s: t is %s, expected %s with the file's shape", e->name,
                   kvl__tensor_words(t, got, sizeof got), words);
}

int kvl__entry_read(const struct kvl__checkpoint *f, const struct kvl__entry *e,
                    const kvl_tensor *t, int64_t most, size_t bytes, kvl__convert *convert) {
  void *memory = kvl__malloc(bytes, "a part of a tensor");
  if (!memory) return KVL_ERR_NO_MEMORY;
  int status = kvl__file_unchanged(&f->file);
  for (int64_t at = 0; status >= 0 && at < t->count; at += most) {
    kvl_tensor part = *t; /* a view of t's elements, without a reference of its own */
    part.ndim = 1;
    part.count = part.shape[0] = t->count - at < most ? t->count - at : most;
    part.ptr = (char *)t->ptr + at * kvl_dtype_bytes(t->dtype);
    int64_t n = part.count / e->values * e->bytes_block;
    status = kvl__file_read(&f->file, memory, (size_t)n,
                            f->section + e->offset + at / e->values * e->bytes_block);
    if (status >= 0)
      status = convert ? convert(e, memory, &part) : kvl_tensor_write(&part, memory, n);
  }
  free(memory);
  return status >= 0 ? kvl__file_unchanged(&f->file) : status;
}
