/* Reads GGUF files, the ones of ggml and llama.cpp: metadata, and tensors that may be
 * quantised. Everything before the data is read into memory and checked when a file is
 * opened; the data of a tensor is read when it is asked for, part by part (file.h says why a
 * file is not mapped).
 * Format, little-endian: "GGUF"; u32 version; u64 tensors; u64 metadata; for each of the
 * metadata a key, u32 kind and value; for each tensor its name, u32 dims, u64 sizes (that of
 * neighbours first), u32 type, u64 offset; zeros up to a multiple of general.alignment; data.
 * A string is a u64 length and its bytes. An array is the u32 kind of its values, a u64 count,
 * and the values.
 * Source: docs/gguf.md of ggml. Its reader, too, refuses arrays of arrays, sizes that are no
 * multiple of a type's block, duplicate names, and alignments that are no power of two. */
#include "files/checkpoint.h"
#include "files/dequantise.h"

enum {
  HEADER_BYTES_MAX = 1 << 28,            /* a vocabulary of 262 144 tokens takes 12 MB */
  PART_BYTES = KVL__ROOM(1 << 20, 64),   /* of the header, read at once */
  PART_VALUES = KVL__ROOM(1 << 16, 256), /* of a tensor, read at once */
  ALIGNMENT_DEFAULT = 32,
  GGUF_DIMS_MAX = 4,
};

struct kvl_gguf {
  struct kvl__checkpoint tensors;
  uint8_t *header;
  int64_t bytes_header, capacity_header; /* how much of it was read, and there is room for */
  int64_t alignment;
  kvl_gguf_metadata *metadata;
  int metadata_count, metadata_capacity;
};

/* ---- a cursor over the header ---------------------------------------------------------- */

struct cursor {
  kvl_gguf *f;
  int64_t at; /* in the file */
  int status;
  char what[160]; /* that is being read, for errors: key "x" */
};

static int fail(struct cursor *c, const char *fault) {
  if (c->status >= 0)
    c->status = kvl__fail(KVL_ERR_FORMAT, "%s: %s: %s", c->f->tensors.file.path, c->what,
                          fault);
  return c->status;
}

/* Makes room for n bytes of the header. */
static int grow(kvl_gguf *f, int64_t n) {
  if (n <= f->capacity_header) return KVL_OK;
  int64_t capacity = 2 * f->capacity_header > n ? 2 * f->capacity_header : n;
  void *p = kvl__realloc(f->header, (size_t)capacity, "a GGUF header");
  if (!p) return KVL_ERR_NO_MEMORY;
  f->header = p;
  f->capacity_header = capacity;
  return KVL_OK;
}

/* The next n bytes, valid until the next call; NULL after a failure. */
static const uint8_t *take(struct cursor *c, uint64_t n) {
  kvl_gguf *f = c->f;
  if (c->status < 0) return NULL;
  int64_t left = (int64_t)f->tensors.file.opened.st_size - c->at;
  if (n > (uint64_t)left) {
    fail(c, "it does not end before the file does");
    return NULL;
  }
  int64_t end = c->at + (int64_t)n;
  if (end > HEADER_BYTES_MAX) {
    fail(c, "more than 256 MiB before the tensors' data");
    return NULL;
  }
  if (end > f->bytes_header) {
    int64_t bytes = end + PART_BYTES;
    if (bytes > (int64_t)f->tensors.file.opened.st_size)
      bytes = (int64_t)f->tensors.file.opened.st_size;
    c->status = grow(f, bytes);
    if (c->status >= 0)
      c->status = kvl__file_read(&f->tensors.file, f->header + f->bytes_header,
                                 (size_t)(bytes - f->bytes_header), f->bytes_header);
    if (c->status < 0) return NULL;
    f->bytes_header = bytes;
  }
  const uint8_t *p = f->header + c->at;
  c->at = end;
  return p;
}

/* A number of some bytes; 0 after a failure. */
static uint64_t take_number(struct cursor *c, int bytes) {
  const uint8_t *p = take(c, (uint64_t)bytes);
  uint64_t x = 0;
  for (int i = bytes - 1; p && i >= 0; i--) x = x << 8 | p[i];
  return x;
}

/* A string's bytes, and how many there are. */
static const char *take_string(struct cursor *c, int64_t *length) {
  uint64_t n = take_number(c, 8);
  const char *p = (const char *)take(c, n);
  *length = p ? (int64_t)n : 0;
  return p;
}

/* ---- metadata -------------------------------------------------------------------------- */

static int bytes_of_kind(int kind) { /* 0: not of one size */
  static const int bytes[] = {1, 1, 2, 2, 4, 4, 4,
                              1, 0, 0, 8, 8, 8}; /* ORDER kvl_gguf_kind */
  return kind >= 0 && kind <= KVL_GGUF_F64 ? bytes[kind] : 0;
}

/* Passes over `count` values of a kind. */
static void skip_values(struct cursor *c, int kind, int64_t count) {
  int64_t length;
  if (kind == KVL_GGUF_STRING) {
    for (int64_t i = 0; i < count && c->status >= 0; i++) take_string(c, &length);
    return;
  }
  int bytes = bytes_of_kind(kind);
  if (!bytes) {
    fail(c, kind == KVL_GGUF_ARRAY ? "an array of arrays" : "a kind that GGUF does not have");
    return;
  }
  const uint8_t *p = take(c, (uint64_t)count * (uint64_t)bytes);
  for (int64_t i = 0; p && kind == KVL_GGUF_BOOL && i < count; i++)
    if (p[i] > 1) fail(c, "a boolean that is neither 0 nor 1");
}

/* Reads a key and its value. The header may still move until it is complete, so `key` and
 * `values` hold offsets in place of pointers until then. */
static void take_metadata(struct cursor *c) {
  kvl_gguf *f = c->f;
  kvl_gguf_metadata m = {.count = 1};
  snprintf(c->what, sizeof c->what, "key %d", f->metadata_count);
  const char *key = take_string(c, &m.bytes_key);
  if (!key) return;
  kvl__name_words("key", key, m.bytes_key, c->what, sizeof c->what);
  m.key = (const char *)(uintptr_t)(c->at - m.bytes_key);
  m.kind = (int32_t)take_number(c, 4);
  if (m.kind == KVL_GGUF_ARRAY) {
    m.is_array = 1;
    m.kind = (int32_t)take_number(c, 4);
    uint64_t count = take_number(c, 8);
    if (count > HEADER_BYTES_MAX) fail(c, "it does not end before the file does");
    m.count = (int64_t)count;
  }
  m.values = (const void *)(uintptr_t)c->at;
  skip_values(c, m.kind, m.count);
  f->metadata = kvl__one_more(f->metadata, f->metadata_count, &f->metadata_capacity, sizeof m,
                              &c->status);
  if (c->status >= 0) f->metadata[f->metadata_count++] = m;
}

static int by_key(const void *a, const void *b) {
  const kvl_gguf_metadata *x = *(kvl_gguf_metadata *const *)a,
                          *y = *(kvl_gguf_metadata *const *)b;
  if (x->bytes_key != y->bytes_key) return x->bytes_key < y->bytes_key ? -1 : 1;
  return memcmp(x->key, y->key, (size_t)x->bytes_key);
}

/* Offsets become pointers, and no key may occur twice. */
static void finish_metadata(struct cursor *c) {
  kvl_gguf *f = c->f;
  for (int i = 0; i < f->metadata_count; i++) {
    f->metadata[i].key = (const char *)f->header + (uintptr_t)f->metadata[i].key;
    f->metadata[i].values = f->header + (uintptr_t)f->metadata[i].values;
  }
  kvl_gguf_metadata **list = kvl__sorted(f->metadata, f->metadata_count, sizeof **list,
                                         by_key, &c->status);
  for (int i = 1; list && i < f->metadata_count; i++)
    if (!by_key(&list[i - 1], &list[i])) {
      kvl__name_words("key", list[i]->key, list[i]->bytes_key, c->what, sizeof c->what);
      fail(c, "it occurs twice");
    }
  free(list);
}

/* ---- tensors --------------------------------------------------------------------------- */

static void check_shape(struct cursor *c, struct kvl__entry *e) {
  const struct kvl__stored *type = kvl__stored_type((uint32_t)e->type);
  char text[96];
  int64_t row = e->ndim > 0 ? e->shape[e->ndim - 1] : 1;
  if (!type) {
    snprintf(text, sizeof text, "type %d, which kvlab does not know", e->type);
    fail(c, text);
  } else if (e->ndim > 0 && row % type->values) {
    snprintf(text, sizeof text, "rows of %lld numbers, but %s has them in blocks of %d",
             (long long)row, type->name, type->values);
    fail(c, text);
  } else if (row % type->values) {
    fail(c, "a single number in blocks");
  } else {
    c->status = kvl__entry_size(&c->f->tensors, e, type->values, type->bytes);
  }
}

static void take_entry(struct cursor *c) {
  struct kvl__checkpoint *f = &c->f->tensors;
  int64_t length;
  snprintf(c->what, sizeof c->what, "tensor %d", f->count);
  const char *text = take_string(c, &length);
  if (!text) return;
  kvl__name_words("tensor", text, length, c->what, sizeof c->what);
  if (memchr(text, 0, (size_t)length)) fail(c, "a zero byte in its name");
  struct kvl__entry *e = kvl__entry_add(f, text, length, &c->status);
  if (!e) return;
  uint64_t ndim = take_number(c, 4);
  if (ndim > GGUF_DIMS_MAX) fail(c, "more than 4 dims");
  e->ndim = (int32_t)ndim;
  for (int i = e->ndim - 1; i >= 0 && c->status >= 0; i--) {
    uint64_t size = take_number(c, 8);
    if (size > INT64_MAX) fail(c, "its shape has more than 2^63 bytes");
    e->shape[i] = (int64_t)size;
  }
  e->type = (int32_t)take_number(c, 4);
  uint64_t offset = take_number(c, 8);
  if (offset > INT64_MAX) fail(c, "its data lies outside of the file");
  e->offset = (int64_t)offset;
  if (c->status >= 0) check_shape(c, e);
}

/* Whether tensors lie inside the file, aligned and without overlap, and no name is there
 * twice. */
static int check_entries(const struct kvl__checkpoint *f, int64_t alignment) {
  for (int i = 0; i < f->count; i++) {
    const struct kvl__entry *e = &f->entries[i];
    if (e->offset % alignment)
      return kvl__entry_fail(f, e, "its offset is no multiple of the alignment");
    if (e->offset > f->bytes_section || e->bytes > f->bytes_section - e->offset)
      return kvl__entry_fail(f, e, "its data lies outside of the file");
  }
  return kvl__entries_check(f, 0);
}

/* ---- open and close -------------------------------------------------------------------- */

static void check_version(struct cursor *c) {
  snprintf(c->what, sizeof c->what, "header");
  const uint8_t *magic = take(c, 4);
  if (magic && memcmp(magic, "GGUF", 4)) fail(c, "it does not begin with GGUF");
  uint64_t version = take_number(c, 4);
  char text[64];
  snprintf(text, sizeof text, "version %llu, expected 2 or 3", (unsigned long long)version);
  if (version && !(version & 0xffff)) fail(c, "big-endian, expected little-endian");
  else if (version != 2 && version != 3) fail(c, text);
}

static void set_alignment(struct cursor *c) {
  static const char key[] = "general.alignment";
  kvl_gguf *f = c->f;
  f->alignment = ALIGNMENT_DEFAULT;
  for (int i = 0; i < f->metadata_count; i++) {
    const kvl_gguf_metadata *m = &f->metadata[i];
    if (m->bytes_key != sizeof key - 1 || memcmp(m->key, key, sizeof key - 1)) continue;
    const uint8_t *p = m->values;
    snprintf(c->what, sizeof c->what, "key \"%s\"", key);
    if (m->kind != KVL_GGUF_U32 || m->is_array) {
      fail(c, "expected a u32");
      return;
    }
    uint32_t alignment = p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24;
    if (!alignment || alignment & (alignment - 1)) fail(c, "it is no power of two");
    else f->alignment = alignment;
  }
}

static int read_header(kvl_gguf *f) {
  struct cursor c = {.f = f};
  check_version(&c);
  uint64_t tensors = take_number(&c, 8), keys = take_number(&c, 8);
  if (tensors > HEADER_BYTES_MAX || keys > HEADER_BYTES_MAX)
    fail(&c, "more tensors or keys than the file has room for");
  for (uint64_t i = 0; i < keys && c.status >= 0; i++) take_metadata(&c);
  for (uint64_t i = 0; i < tensors && c.status >= 0; i++) take_entry(&c);
  if (c.status < 0) return c.status;
  finish_metadata(&c);
  if (c.status >= 0) set_alignment(&c);
  if (c.status < 0) return c.status;
  f->tensors.section = (c.at + f->alignment - 1) / f->alignment * f->alignment;
  f->tensors.bytes_section = (int64_t)f->tensors.file.opened.st_size - f->tensors.section;
  int status = check_entries(&f->tensors, f->alignment);
  return status < 0 ? status : kvl__file_unchanged(&f->tensors.file);
}

int kvl_gguf_open(const char *path, kvl_gguf **out) {
  KVL__NEED(path);
  KVL__NEED(out);
  kvl_gguf *f = kvl__malloc(sizeof *f, "a GGUF file");
  if (!f) return KVL_ERR_NO_MEMORY;
  *f = (kvl_gguf){.header = NULL};
  int status = kvl__file_open(path, 24, &f->tensors.file);
  if (status >= 0) status = read_header(f);
  if (status < 0) {
    kvl_gguf_close(f);
    return status;
  }
  *out = f;
  return KVL_OK;
}

void kvl_gguf_close(kvl_gguf *file) {
  if (!file) return;
  free(file->metadata);
  free(file->header);
  kvl__checkpoint_close(&file->tensors);
  free(file);
}

int kvl_gguf_count(const kvl_gguf *file) {
  KVL__NEED(file);
  return file->tensors.count;
}

int kvl_gguf_metadata_count(const kvl_gguf *file) {
  KVL__NEED(file);
  return file->metadata_count;
}

int kvl_gguf_entry_get(const kvl_gguf *file, int index, kvl_gguf_entry *out) {
  KVL__NEED(file);
  KVL__NEED(out);
  const struct kvl__entry *e = kvl__entry_at(&file->tensors, index);
  if (!e) return KVL_ERR_INVALID;
  const char *type = kvl__stored_type((uint32_t)e->type)->name;
  *out = (kvl_gguf_entry){e->name, type, {0}, e->offset, e->bytes, e->ndim, e->type};
  memcpy(out->shape, e->shape, sizeof e->shape);
  return KVL_OK;
}

int kvl_gguf_metadata_get(const kvl_gguf *file, int index, kvl_gguf_metadata *out) {
  KVL__NEED(file);
  KVL__NEED(out);
  if (index < 0 || index >= file->metadata_count)
    return kvl__fail(KVL_ERR_INVALID, "%s: metadata is %d, expected 0 ... %d",
                     file->tensors.file.path, index, file->metadata_count - 1);
  *out = file->metadata[index];
  return KVL_OK;
}

/* ---- read ------------------------------------------------------------------------------ */

/* The memory that a tensor is read through. */
struct part {
  uint8_t stored[4 * PART_VALUES];
  float floats[PART_VALUES];
  uint16_t rounded[PART_VALUES];
};

static int convert(const struct kvl__entry *e, void *memory, const kvl_tensor *t) {
  struct part *p = memory;
  const struct kvl__stored *type = kvl__stored_type((uint32_t)e->type);
  type->unpack(p->stored, t->count / type->values, p->floats);
  if (t->dtype == KVL_DTYPE_F32) return kvl_tensor_write(t, p->floats, 4 * t->count);
  kvl__round_floats(p->floats, t->count, t->dtype, p->rounded);
  return kvl_tensor_write(t, p->rounded, 2 * t->count);
}

int kvl_gguf_read(const kvl_gguf *file, int index, const kvl_tensor *t) {
  KVL__NEED(file);
  const struct kvl__entry *e = kvl__entry_at(&file->tensors, index);
  if (!e) return KVL_ERR_INVALID;
  int status = kvl__entry_fits(e, t,
                               1 << KVL_DTYPE_F32 | 1 << KVL_DTYPE_F16 | 1 << KVL_DTYPE_BF16,
                               "f32, f16 or bf16");
  if (status < 0) return status;
  const struct kvl__stored *type = kvl__stored_type((uint32_t)e->type);
  if (!type->unpack)
    return kvl__fail(
        KVL_ERR_UNSUPPORTED,
        "%s: tensor \"%s\" is stored as %s, expected F32, F16, BF16, Q8_0, Q4_0, "
        "Q4_1, Q5_0, Q5_1, Q4_K or Q6_K",
        file->tensors.file.path, e->name, type->name);
  return kvl__entry_read(&file->tensors, e, t, PART_VALUES, sizeof(struct part), convert);
}
