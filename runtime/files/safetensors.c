/* Reads safetensors files. The whole header is checked before any data is used: the header's
 * length, integer overflow, overlaps, holes, duplicate keys, and dtype and shape against the
 * byte range. A file that changes while it is open is refused (file.h).
 * Format: u64 header length N, little-endian; N bytes of JSON; the data section.
 * Source: the format's README at huggingface/safetensors; its audit of May 2023 names the
 * checks that readers forget. */
#include <ctype.h>

#include "files/checkpoint.h"

enum {
  HEADER_BYTES_MAX = 100000000,        /* the limit of the reference reader */
  PART_BYTES = KVL__ROOM(1 << 20, 24), /* read at once */
};

struct kvl_safetensors {
  struct kvl__checkpoint tensors;
};

/* ---- a strict reader for the header's JSON --------------------------------------------- */

struct json {
  struct kvl__checkpoint *file;
  const char *at, *end, *start;
  int status;
};

static int json_fail(struct json *j, const char *what) {
  if (j->status >= 0)
    j->status = kvl__fail(KVL_ERR_FORMAT, "%s: header: %s at byte %lld", j->file->file.path,
                          what, (long long)(j->at - j->start) + 8);
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

static void entry_fail(struct json *j, const struct kvl__entry *e, const char *what) {
  if (j->status >= 0) j->status = kvl__entry_fail(j->file, e, what);
}

/* Checks that the bytes from e->offset to `end` lie in the file, and are as many as dtype and
 * shape need. */
static void entry_check(struct json *j, struct kvl__entry *e, int64_t end) {
  j->status = kvl__entry_size(j->file, e, 1, (int)kvl_dtype_bytes(e->type));
  if (e->offset > end || end > j->file->bytes_section) {
    entry_fail(j, e, "data_offsets reach outside of the file");
  } else if (end - e->offset != e->bytes) {
    char what[128];
    snprintf(what, sizeof what, "data_offsets span %lld bytes, dtype and shape need %lld",
             (long long)(end - e->offset), (long long)e->bytes);
    entry_fail(j, e, what);
  }
}

/* Reads {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, with each field once,
 * in any order. */
static void entry_read(struct json *j, struct kvl__entry *e) {
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
      entry_fail(j, e, "expected dtype, shape and data_offsets, once each");
    } else if (field == DTYPE) {
      char *text = json_string(j);
      e->type = text ? dtype_of(text) : -1;
      if (text && e->type < 0) entry_fail(j, e, "a dtype that kvlab does not have");
      free(text);
    } else if (field == SHAPE) {
      e->ndim = json_integers(j, e->shape, KVL_DIMS_MAX, "more than 6 dims");
    } else if (json_integers(j, offsets, 2, "more than two data_offsets") != 2) {
      entry_fail(j, e, "data_offsets are not a pair");
    }
    seen |= field;
  } while (j->status >= 0 && json_take(j, ','));
  json_expect(j, '}');
  if (j->status >= 0 && seen != ALL) entry_fail(j, e, "a field is missing");
  if (j->status < 0) return;
  e->offset = offsets[0];
  entry_check(j, e, offsets[1]);
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
  return strcmp(((const struct kvl__entry *)a)->name, ((const struct kvl__entry *)b)->name);
}

static int header_read(struct kvl__checkpoint *f, const char *text, size_t bytes_header) {
  struct json j = {f, text, text + bytes_header, text, KVL_OK};
  int metadata = 0;
  if (bytes_header == 0 || *text != '{') return json_fail(&j, "expected '{'");
  json_expect(&j, '{');
  if (!json_take(&j, '}')) {
    do {
      char *name = json_string(&j);
      json_expect(&j, ':');
      if (j.status >= 0 && !strcmp(name, "__metadata__")) {
        if (metadata++) json_fail(&j, "__metadata__ occurs twice");
        metadata_skip(&j);
      } else if (j.status >= 0) {
        struct kvl__entry *e = kvl__entry_add(f, name, (int64_t)strlen(name), &j.status);
        if (e) entry_read(&j, e);
      }
      free(name);
    } while (j.status >= 0 && json_take(&j, ','));
    json_expect(&j, '}');
  }
  json_space(&j);
  if (j.status >= 0 && j.at != j.end) json_fail(&j, "text after the object");
  if (j.status >= 0) j.status = kvl__entries_check(f, 1);
  if (f->count > 0) qsort(f->entries, (size_t)f->count, sizeof *f->entries, by_name);
  return j.status;
}

/* ---- open, read, close ----------------------------------------------------------------- */

static int file_read(struct kvl__checkpoint *f) {
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
  char *text = kvl__malloc((size_t)header + 1, "a safetensors header");
  if (!text) return KVL_ERR_NO_MEMORY;
  status = kvl__file_read(&f->file, text, (size_t)header, 8);
  if (status >= 0) status = header_read(f, text, (size_t)header);
  free(text);
  return status >= 0 ? kvl__file_unchanged(&f->file) : status;
}

int kvl_safetensors_open(const char *path, kvl_safetensors **out) {
  KVL__NEED(path);
  KVL__NEED(out);
  kvl_safetensors *f = kvl__malloc(sizeof *f, "a safetensors file");
  if (!f) return KVL_ERR_NO_MEMORY;
  *f = (kvl_safetensors){.tensors.count = 0};
  int status = kvl__file_open(path, 8, &f->tensors.file);
  if (status >= 0) status = file_read(&f->tensors);
  if (status < 0) {
    kvl_safetensors_close(f);
    return status;
  }
  *out = f;
  return KVL_OK;
}

void kvl_safetensors_close(kvl_safetensors *file) {
  if (!file) return;
  kvl__checkpoint_close(&file->tensors);
  free(file);
}

int kvl_safetensors_count(const kvl_safetensors *file) {
  KVL__NEED(file);
  return file->tensors.count;
}

int kvl_safetensors_entry_get(const kvl_safetensors *file, int index,
                              kvl_safetensors_entry *out) {
  KVL__NEED(file);
  KVL__NEED(out);
  const struct kvl__entry *e = kvl__entry_at(&file->tensors, index);
  if (!e) return KVL_ERR_INVALID;
  *out = (kvl_safetensors_entry){e->name, {0}, e->offset, e->bytes, e->ndim, e->type};
  memcpy(out->shape, e->shape, sizeof e->shape);
  return KVL_OK;
}

int kvl_safetensors_read(const kvl_safetensors *file, int index, const kvl_tensor *t) {
  KVL__NEED(file);
  const struct kvl__entry *e = kvl__entry_at(&file->tensors, index);
  if (!e) return KVL_ERR_INVALID;
  int status = kvl__entry_fits(e, t, 1u << e->type, kvl_dtype_name(e->type));
  if (status < 0) return status;
  return kvl__entry_read(&file->tensors, e, t, PART_BYTES / e->bytes_block, PART_BYTES, NULL);
}
