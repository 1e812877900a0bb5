/* Reads safetensors files. The whole header is checked before any data is used: the header's
 * length, integer overflow, overlaps, holes, duplicate keys, and dtype and shape against the
 * byte range. A file that changes while it is open is refused (file.h).
 * Format: u64 header length N, little-endian; N bytes of JSON; the data section.
 * Source: the format's README at huggingface/safetensors; its audit of May 2023 names the
 * checks that readers forget. */
#include <ctype.h>

#include "core/tensor.h"
#include "files/file.h"

enum {
  HEADER_BYTES_MAX = 100000000,        /* the limit of the reference reader */
  PART_BYTES = KVL__ROOM(1 << 20, 24), /* read at once */
};

struct kvl_safetensors {
  struct kvl__file file;
  char *header;
  int64_t section; /* where the data begins */
  int64_t bytes_section;
  kvl_safetensors_entry *entries;
  int count, capacity;
};

/* ---- a strict reader for the header's JSON --------------------------------------------- */

struct json {
  const char *path;
  const char *at, *end, *start;
  int status;
};

static int json_fail(struct json *j, const char *what) {
  if (j->status >= 0)
    j->status = kvl__fail(KVL_ERR_FORMAT, "%s: header: %s at byte %lld", j->path, what,
                          (long long)(j->at - j->start) + 8);
  return j->status;
}

static void json_space(struct json *j) {
  while (j->at < j->end && strchr(" \t\r\n", *j->at) && *j->at) j->at++;
}

static int json_take(struct json *j, char c) {
  json_space(j);
  if (j->status < 0 || j->at == j->end || *j->at != c) return 0;
  j->at++;
  return 1;
}

static void json_expect(struct json *j, char c) {
  char what[32];
  snprintf(what, sizeof what, "expected '%c'", c);
  if (!json_take(j, c)) json_fail(j, what);
}

/* Decodes one of \b \f \n \r \t \" \\ \/ or a \u escape below 128, which is enough because
 * names are plain text. Returns 0 for any other. */
static char json_escape(struct json *j) {
  static const char from[] = "bfnrt\"\\/", to[] = "\b\f\n\r\t\"\\/";
  if (j->at == j->end) return 0;
  char c = *j->at++;
  const char *p = strchr(from, c);
  if (c && p) return to[p - from];
  if (c == 'u' && j->end - j->at >= 4) {
    char hex[5] = {j->at[0], j->at[1], j->at[2], j->at[3], 0}, *stop;
    long code = strtol(hex, &stop, 16);
    if (!*stop && isxdigit((unsigned char)hex[0]) && code > 0 && code < 128) {
      j->at += 4;
      return (char)code;
    }
  }
  return 0;
}

/* Reads a string into memory that the caller frees. Returns NULL after a failure. */
static char *json_string(struct json *j) {
  json_expect(j, '"');
  if (j->status < 0) return NULL;
  const char *close = j->at;
  while (close < j->end && *close != '"') close += *close == '\\' ? 2 : 1;
  if (close >= j->end) {
    json_fail(j, "a string does not end");
    return NULL;
  }
  char *text = kvl__malloc((size_t)(close - j->at) + 1, "a tensor's name");
  if (!text) {
    j->status = KVL_ERR_NO_MEMORY;
    return NULL;
  }
  size_t n = 0;
  while (j->at < close) {
    char c = *j->at++;
    if ((unsigned char)c < 32) json_fail(j, "a control character in a string");
    if (c == '\\' && !(c = json_escape(j))) json_fail(j, "an escape that is not supported");
    text[n++] = c;
  }
  text[n] = 0;
  j->at = close + 1;
  if (j->status >= 0) return text;
  free(text);
  return NULL;
}

/* Reads a whole number 0 ... 2^63 - 1 without sign, fraction or exponent. */
static int64_t json_integer(struct json *j) {
  json_space(j);
  int64_t n = 0;
  const char *first = j->at;
  for (; j->at < j->end && *j->at >= '0' && *j->at <= '9'; j->at++) {
    if (__builtin_mul_overflow(n, 10, &n) || __builtin_add_overflow(n, *j->at - '0', &n)) {
      json_fail(j, "a number beyond 2^63");
      return 0;
    }
  }
  if (j->at == first) json_fail(j, "expected a whole number");
  else if (*first == '0' && j->at - first > 1) json_fail(j, "a number with a leading zero");
  return n;
}

/* Reads [n, n, ...], at most `max` numbers, and returns how many there are. */
static int json_integers(struct json *j, int64_t *out, int max, const char *what) {
  int n = 0;
  json_expect(j, '[');
  if (json_take(j, ']')) return 0;
  do {
    int64_t value = json_integer(j);
    if (n == max) json_fail(j, what);
    else out[n++] = value;
  } while (j->status >= 0 && json_take(j, ','));
  json_expect(j, ']');
  return n;
}

/* ---- entries --------------------------------------------------------------------------- */

static int dtype_of(const char *name) { /* of a name in the file; -1: none */
  static const struct {
    const char *name;
    int dtype;
  } known[] = {
      {"F32", KVL_DTYPE_F32},        {"F16", KVL_DTYPE_F16}, {"BF16", KVL_DTYPE_BF16},
      {"F8_E4M3", KVL_DTYPE_F8E4M3}, {"I32", KVL_DTYPE_I32}, {"I64", KVL_DTYPE_I64},
      {"U8", KVL_DTYPE_U8},          {"BOOL", KVL_DTYPE_U8}, {"U64", KVL_DTYPE_U64},
  };
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
    if (!strcmp(known[i].name, name)) return known[i].dtype;
  return -1;
}

static int entry_fail(struct json *j, const char *name, const char *what) {
  if (j->status >= 0)
    j->status = kvl__fail(KVL_ERR_FORMAT, "%s: tensor \"%s\": %s", j->path, name, what);
  return j->status;
}

static void entry_check(struct json *j, const kvl_safetensors *f,
                        const kvl_safetensors_entry *e, int64_t end) {
  int64_t bytes = kvl_dtype_bytes(e->dtype);
  for (int i = 0; i < e->ndim; i++)
    if (__builtin_mul_overflow(bytes, e->shape[i], &bytes)) {
      entry_fail(j, e->name, "its shape has more than 2^63 bytes");
      return;
    }
  if (e->offset > end || end > f->bytes_section) {
    entry_fail(j, e->name, "data_offsets reach outside of the file");
  } else if (end - e->offset != bytes) {
    char what[128];
    snprintf(what, sizeof what, "data_offsets span %lld bytes, dtype and shape need %lld",
             (long long)(end - e->offset), (long long)bytes);
    entry_fail(j, e->name, what);
  }
}

/* Reads {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, with each field once,
 * in any order. */
static void entry_read(struct json *j, const kvl_safetensors *f, kvl_safetensors_entry *e) {
  enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4, ALL = 7 };
  int seen = 0;
  int64_t offsets[2] = {0, 0};
  json_expect(j, '{');
  do {
    char *key = json_string(j);
    json_expect(j, ':');
    if (j->status < 0) {
      free(key);
      return;
    }
    int field = !strcmp(key, "dtype")          ? DTYPE
                : !strcmp(key, "shape")        ? SHAPE
                : !strcmp(key, "data_offsets") ? OFFSETS
                                               : 0;
    free(key);
    if (!field || (seen & field)) {
      entry_fail(j, e->name, "expected dtype, shape and data_offsets, once each");
    } else if (field == DTYPE) {
      char *text = json_string(j);
      e->dtype = text ? dtype_of(text) : -1;
      if (text && e->dtype < 0) entry_fail(j, e->name, "a dtype that kvlab does not have");
      free(text);
    } else if (field == SHAPE) {
      e->ndim = json_integers(j, e->shape, KVL_DIMS_MAX, "more than 6 dims");
    } else if (json_integers(j, offsets, 2, "more than two data_offsets") != 2) {
      entry_fail(j, e->name, "data_offsets are not a pair");
    }
    seen |= field;
  } while (j->status >= 0 && json_take(j, ','));
  json_expect(j, '}');
  if (j->status >= 0 && seen != ALL) entry_fail(j, e->name, "a field is missing");
  if (j->status < 0) return;
  for (int i = e->ndim; i < KVL_DIMS_MAX; i++) e->shape[i] = 1;
  e->offset = offsets[0];
  e->bytes = offsets[1] - offsets[0];
  entry_check(j, f, e, offsets[1]);
}

static kvl_safetensors_entry *entry_add(struct json *j, kvl_safetensors *f, char *name) {
  if (f->count == f->capacity) {
    int capacity = f->capacity ? 2 * f->capacity : KVL__ROOM(64, 1);
    void *p = kvl__realloc(f->entries, (size_t)capacity * sizeof *f->entries,
                           "a safetensors index");
    if (!p) {
      j->status = KVL_ERR_NO_MEMORY;
      return NULL;
    }
    f->entries = p;
    f->capacity = capacity;
  }
  kvl_safetensors_entry *e = &f->entries[f->count++];
  *e = (kvl_safetensors_entry){.name = name};
  return e;
}

/* Skips "__metadata__", a map of strings to strings, but checks its form. */
static void metadata_skip(struct json *j) {
  json_expect(j, '{');
  if (json_take(j, '}')) return;
  do {
    free(json_string(j));
    json_expect(j, ':');
    free(json_string(j));
  } while (j->status >= 0 && json_take(j, ','));
  json_expect(j, '}');
}

static int by_name(const void *a, const void *b) {
  return strcmp(((const kvl_safetensors_entry *)a)->name,
                ((const kvl_safetensors_entry *)b)->name);
}

static int by_offset(const void *a, const void *b) {
  const kvl_safetensors_entry *x = a, *y = b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty tensors first */
}

static void entries_sort(kvl_safetensors *f, int (*order)(const void *, const void *)) {
  if (f->count > 0) qsort(f->entries, (size_t)f->count, sizeof *f->entries, order);
}

/* Checks that no name occurs twice, and that the byte ranges cover the data section without
 * overlap or hole. */
static void index_check(struct json *j, kvl_safetensors *f) {
  int64_t end = 0;
  entries_sort(f, by_offset);
  for (int i = 0; i < f->count && j->status >= 0; i++) {
    if (f->entries[i].offset != end)
      entry_fail(j, f->entries[i].name,
                 f->entries[i].offset < end ? "its bytes overlap another tensor's"
                                            : "there is a hole before its bytes");
    end = f->entries[i].offset + f->entries[i].bytes;
  }
  if (j->status >= 0 && end != f->bytes_section)
    j->status = kvl__fail(KVL_ERR_FORMAT, "%s: %lld bytes of data, the tensors take %lld",
                          f->file.path, (long long)f->bytes_section, (long long)end);
  entries_sort(f, by_name);
  for (int i = 1; i < f->count && j->status >= 0; i++)
    if (!by_name(&f->entries[i - 1], &f->entries[i]))
      entry_fail(j, f->entries[i].name, "the name occurs twice");
}

static int header_read(kvl_safetensors *f, size_t bytes_header) {
  const char *text = f->header;
  struct json j = {f->file.path, text, text + bytes_header, text, KVL_OK};
  int metadata = 0;
  if (bytes_header == 0 || *text != '{') return json_fail(&j, "expected '{'");
  json_expect(&j, '{');
  if (!json_take(&j, '}')) {
    do {
      char *name = json_string(&j);
      json_expect(&j, ':');
      if (j.status < 0) {
        free(name);
      } else if (!strcmp(name, "__metadata__")) {
        free(name);
        if (metadata++) json_fail(&j, "__metadata__ occurs twice");
        metadata_skip(&j);
      } else {
        kvl_safetensors_entry *e = entry_add(&j, f, name);
        if (e) entry_read(&j, f, e);
        else free(name);
      }
    } while (j.status >= 0 && json_take(&j, ','));
    json_expect(&j, '}');
  }
  json_space(&j);
  if (j.status >= 0 && j.at != j.end) json_fail(&j, "text after the object");
  if (j.status >= 0) index_check(&j, f);
  return j.status;
}

/* ---- open, read, close ----------------------------------------------------------------- */

static int file_read(kvl_safetensors *f) {
  unsigned char length[8];
  int status = kvl__file_read(&f->file, length, sizeof length, 0);
  if (status < 0) return status;
  uint64_t header = 0, rest = (uint64_t)f->file.opened.st_size - 8;
  for (int i = 7; i >= 0; i--) header = header << 8 | length[i];
  if (header > HEADER_BYTES_MAX || header > rest)
    return kvl__fail(KVL_ERR_FORMAT,
                     "%s: header length is %llu, expected at most %d, and at most the %llu "
                     "bytes that follow",
                     f->file.path, (unsigned long long)header, HEADER_BYTES_MAX,
                     (unsigned long long)rest);
  f->section = 8 + (int64_t)header;
  f->bytes_section = (int64_t)(rest - header);
  f->header = kvl__malloc((size_t)header + 1, "a safetensors header");
  if (!f->header) return KVL_ERR_NO_MEMORY;
  status = kvl__file_read(&f->file, f->header, (size_t)header, 8);
  if (status >= 0) status = header_read(f, (size_t)header);
  free(f->header);
  f->header = NULL;
  return status >= 0 ? kvl__file_unchanged(&f->file) : status;
}

int kvl_safetensors_open(const char *path, kvl_safetensors **out) {
  KVL__NEED(path);
  KVL__NEED(out);
  kvl_safetensors *f = kvl__malloc(sizeof *f, "a safetensors file");
  if (!f) return KVL_ERR_NO_MEMORY;
  *f = (kvl_safetensors){.count = 0};
  int status = kvl__file_open(path, 8, &f->file);
  if (status >= 0) status = file_read(f);
  if (status < 0) {
    kvl_safetensors_close(f);
    return status;
  }
  *out = f;
  return KVL_OK;
}

void kvl_safetensors_close(kvl_safetensors *file) {
  if (!file) return;
  for (int i = 0; i < file->count; i++) free((char *)file->entries[i].name);
  free(file->entries);
  free(file->header);
  kvl__file_close(&file->file);
  free(file);
}

int kvl_safetensors_count(const kvl_safetensors *file) {
  KVL__NEED(file);
  return file->count;
}

int kvl_safetensors_entry_get(const kvl_safetensors *file, int index,
                              kvl_safetensors_entry *out) {
  KVL__NEED(file);
  KVL__NEED(out);
  if (index < 0 || index >= file->count)
    return kvl__fail(KVL_ERR_INVALID, "%s: entry is %d, expected 0 ... %d", file->file.path,
                     index, file->count - 1);
  *out = file->entries[index];
  return KVL_OK;
}

/* Reads a tensor's bytes part by part, through memory that stays in the processor's cache. */
static int read_tensor(const kvl_safetensors *f, const kvl_safetensors_entry *e,
                       const kvl_tensor *t) {
  int64_t bytes_one = kvl_dtype_bytes(e->dtype), most = PART_BYTES / bytes_one;
  void *memory = kvl__malloc(PART_BYTES, "a part of a tensor");
  if (!memory) return KVL_ERR_NO_MEMORY;
  int status = kvl__file_unchanged(&f->file);
  for (int64_t at = 0; status >= 0 && at < t->count; at += most) {
    kvl_tensor part = *t; /* a view of t's elements, without a reference of its own */
    part.ndim = 1;
    part.count = part.shape[0] = t->count - at < most ? t->count - at : most;
    part.ptr = (char *)t->ptr + at * bytes_one;
    int64_t n = part.count * bytes_one;
    status = kvl__file_read(&f->file, memory, (size_t)n,
                            f->section + e->offset + at * bytes_one);
    if (status >= 0) status = kvl_tensor_write(&part, memory, n);
  }
  free(memory);
  return status >= 0 ? kvl__file_unchanged(&f->file) : status;
}

int kvl_safetensors_read(const kvl_safetensors *file, int index, const kvl_tensor *t) {
  KVL__NEED(file);
  kvl_safetensors_entry e;
  int status = kvl_safetensors_entry_get(file, index, &e);
  if (status < 0) return status;
  if (!t || !t->storage) return kvl__fail(KVL_ERR_INVALID, "%s: t is closed", e.name);
  if (t->dtype != e.dtype || t->ndim != e.ndim ||
      memcmp(t->shape, e.shape, sizeof e.shape[0] * (size_t)e.ndim)) {
    char got[96];
    return kvl__fail(KVL_ERR_INVALID, "%s: t is %s, expected %s with the file's shape",
                     e.name, kvl__tensor_words(t, got, sizeof got), kvl_dtype_name(e.dtype));
  }
  return read_tensor(file, &e, t);
}
