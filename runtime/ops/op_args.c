/* The checks of arguments that many ops share. */
#include "ops/op_args.h"

unsigned kvl__rows_of(int codec) {
  return kvl__bits(codec) == 8 ? KVL__FLOAT : 1u << codec | KVL__F32;
}

unsigned kvl__read_of(int codec) {
  return kvl__packs(codec) ? KVL__FLOAT : 1u << codec | KVL__FLOAT;
}

static unsigned memory_of(int codec) { return kvl__packs(codec) ? KVL__U8 : 1u << codec; }

#define NAMED(number, name, kind, bits, group) \
  {name, KVL_CODEC_##number, (group) > 0, KVL__##kind == KVL__WHOLE},
static const kvl_codec_info codecs[] = {KVL_CODECS(NAMED)};
enum { CODECS = sizeof codecs / sizeof codecs[0] };

int kvl_codecs(kvl_codec_info *out, int n) {
  if (n > 0) KVL__NEED(out);
  if (n > 0) memcpy(out, codecs, sizeof *out * (size_t)(n < CODECS ? n : CODECS));
  return CODECS;
}

/* The entry of a codec, or NULL. */
static const kvl_codec_info *find_codec(int codec) {
  for (int i = 0; i < CODECS; i++)
    if (codecs[i].codec == codec) return &codecs[i];
  return NULL;
}

const char *kvl__codec_name(int codec) {
  const kvl_codec_info *found = find_codec(codec);
  return found ? found->name : "no codec";
}

/* Fails a call for a format whose codec is none. */
static void fail_codec(struct kvl__call *c, const char *name, int codec) {
  char known[64] = "";
  for (int i = 0; i < CODECS; i++)
    snprintf(known + strlen(known), sizeof known - strlen(known), "%s%d",
             i == 0            ? ""
             : i == CODECS - 1 ? " or "
                               : ", ",
             codecs[i].codec);
  kvl__call_fail(c, "%s has codec %d, expected %s", name, codec, known);
}

void kvl__expect_head_dim(struct kvl__call *c, int most) {
  int64_t d = kvl__dim(c, "head_dim");
  if (c->status >= 0 && (d < 8 || d > most || d % 8))
    kvl__call_fail(c, "head_dim is %lld, expected a multiple of 8 from 8 to %d", (long long)d,
                   most);
}

/* The format that the shape and dtype of a tensor [blocks, 2, kv_heads, block_size,
 * head_dim] mean. */
static kvl_format format_of(const kvl_tensor *memory) {
  int32_t dim = (int32_t)memory->shape[4];
  return (kvl_format){.codec = memory->dtype,
                      .kv_heads = (int32_t)memory->shape[2],
                      .block_size = (int32_t)memory->shape[3],
                      .key_dim = dim,
                      .value_dim = dim};
}

/* Values are rows of their own, as long as keys, or the first numbers of their keys. */
static void expect_values(struct kvl__call *c, const char *name, const kvl_format *f) {
  if (!f->is_shared && f->value_dim != f->key_dim)
    kvl__call_fail(c, "%s has keys of %d numbers and values of %d, expected values like keys",
                   name, f->key_dim, f->value_dim);
  if (!f->is_shared) {
    if (kvl__is_latent(f->codec))
      kvl__call_fail(c, "%s is %s, expected values that are the first numbers of keys", name,
                     kvl__codec_name(f->codec));
    return;
  }
  if (f->value_dim < 8 || f->value_dim > f->key_dim || f->value_dim % 8)
    kvl__call_fail(c,
                   "%s has values of %d numbers, expected a multiple of 8 from 8 to the "
                   "%d of a key, of which they are the first",
                   name, f->value_dim, f->key_dim);
  const int is_latent = kvl__is_latent(f->codec);
  if (kvl__bits(f->codec) == 8 && !is_latent)
    kvl__call_fail(c, "%s is %s with shared values, expected f32, f16, bf16 or f8_latent",
                   name, kvl__codec_name(f->codec));
  if (is_latent && f->value_dim % 16)
    kvl__call_fail(c, "%s has values of %d numbers, expected a multiple of 16 for %s", name,
                   f->value_dim, kvl__codec_name(f->codec));
}

static void expect_format(struct kvl__call *c, const char *name, const kvl_format *f) {
  if (!find_codec(f->codec)) fail_codec(c, name, f->codec);
  if (f->kv_heads < 0)
    kvl__call_fail(c, "%s has %d kv_heads, expected 0 or more", name, f->kv_heads);
  if (f->block_size < 1 || f->block_size > 4096)
    kvl__call_fail(c, "block_size is %d, expected 1 ... 4096", f->block_size);
  if (c->status >= 0) expect_values(c, name, f);
  const int of_8_bits = kvl__bits(f->codec) == 8 && !kvl__is_latent(f->codec);
  if (c->status >= 0 && of_8_bits && f->key_dim % 16)
    kvl__call_fail(c, "head_dim is %d, expected a multiple of 16 for an %s %s", f->key_dim,
                   kvl__codec_name(f->codec), name);
  if (c->status >= 0 && kvl__is_whole(f->codec) && f->block_size % 8)
    kvl__call_fail(c, "block_size is %d, expected a multiple of 8 for an %s %s",
                   f->block_size, kvl__codec_name(f->codec), name);
}

static void expect_no_scales(struct kvl__call *c, const kvl_format *f) {
  if ((f->k_scale || f->v_scale) && f->codec != KVL_CODEC_F8E4M3)
    kvl__call_fail(c, "%s_scale is given for a cache of %s, expected f8e4m3",
                   f->k_scale ? "k" : "v", kvl__codec_name(f->codec));
}

/* Checks the scales of a format and sets them in a view of its pages. */
static void scale_args(struct kvl__call *c, struct kvl_pages *view, const kvl_format *f) {
  kvl__arg(c, "k_scale?", f->k_scale, KVL__F32, "kv_heads");
  kvl__arg(c, "v_scale?", f->v_scale, KVL__F32, "kv_heads");
  expect_no_scales(c, f);
  if (c->status < 0) return;
  if (f->k_scale) view->k_scale = f->k_scale->ptr;
  if (f->v_scale) view->v_scale = f->v_scale->ptr;
}

int64_t kvl_format_bytes_page(const kvl_format *format) {
  KVL__NEED(format);
  struct kvl__call c = {.op = "format"};
  expect_format(&c, "format", format);
  expect_no_scales(&c, format);
  if (format->key_dim < 1)
    kvl__call_fail(&c, "key_dim is %d, expected 1 or more", format->key_dim);
  const int most = format->is_shared ? KVL__LATENT_MAX : KVL__HEAD_DIM_MAX;
  if (format->key_dim > most)
    kvl__call_fail(&c, "head_dim is %d, expected %d at most%s", format->key_dim, most,
                   format->is_shared ? "" : ", or values that are the first numbers of keys");
  return c.status < 0 ? c.status : kvl__pages(format).bytes_page;
}

/* Checks memory of pages that a format describes. Its first dim is blocks. */
static void expect_memory(struct kvl__call *c, const char *name, const kvl_tensor *memory,
                          const kvl_format *f, const char *blocks) {
  if (!kvl__vector_arg(c, name, memory, memory_of(f->codec), "...")) return;
  if (memory->ndim < 1) kvl__call_fail(c, "%s has no dims, expected blocks", name);
  kvl__bind(c, name, blocks, memory->shape[0]);
  kvl__bind(c, name, "kv_heads", f->kv_heads);
  kvl__bind(c, name, "block_size", f->block_size);
  kvl__bind(c, name, "head_dim", f->key_dim);
  kvl__bind(c, name, "value_dim", f->value_dim);
  const int64_t page = kvl__pages(f).bytes_page;
  const int64_t bytes = memory->count * kvl_dtype_bytes(memory->dtype);
  if (bytes != memory->shape[0] * page)
    kvl__call_fail(c, "%s has %lld bytes for %lld blocks, expected %lld for each", name,
                   (long long)bytes, (long long)memory->shape[0], (long long)page);
}

struct kvl_pages kvl__any_pages_arg(struct kvl__call *c, const char *name,
                                    const kvl_tensor *memory, const kvl_format *format,
                                    const char *shape) {
  struct kvl_pages view = {0};
  kvl_format plain;
  if (format) {
    expect_format(c, name, format);
    expect_memory(c, name, memory, format, shape);
  } else if (kvl__vector_arg(c, name, memory, KVL__CACHE, shape)) {
    plain = format_of(memory), format = &plain;
    kvl__expect_head_dim(c, KVL__HEAD_DIM_MAX);
    expect_format(c, name, format);
    kvl__bind(c, name, "value_dim", format->value_dim);
  }
  const int is_shared = c->status >= 0 && format->is_shared;
  kvl__expect_head_dim(c, is_shared ? KVL__LATENT_MAX : KVL__HEAD_DIM_MAX);
  if (c->status < 0) return view;
  view = kvl__pages(format);
  view.memory = memory->ptr;
  view.blocks = memory->shape[0];
  view.pinned = kvl_tensor_is_pinned(memory);
  scale_args(c, &view, format);
  return view;
}

struct kvl_pages kvl__pages_arg(struct kvl__call *c, const char *name,
                                const kvl_tensor *memory, const kvl_format *format,
                                const char *shape) {
  const struct kvl_pages view = kvl__any_pages_arg(c, name, memory, format, shape);
  if (c->status >= 0 && format && format->is_shared)
    kvl__call_fail(c, "%s has shared values, expected values of their own", name);
  return view;
}

void kvl__values_arg(struct kvl__call *c, const kvl_tensor *v, const kvl_format *format,
                     unsigned dtypes) {
  if (!format || !format->is_shared)
    kvl__vector_arg(c, "v", v, dtypes, "tokens kv_heads head_dim");
  else if (v)
    kvl__call_fail(c, "v is given, expected none: values are the first numbers of keys");
}

void kvl__expect_same_pages(struct kvl__call *c, const char *name, const struct kvl_pages *p,
                            const struct kvl_pages *other) {
  if (p->codec != other->codec)
    kvl__call_fail(c, "%s is %s, expected %s", name, kvl__codec_name(p->codec),
                   kvl__codec_name(other->codec));
}

void kvl__expect_groups(struct kvl__call *c) {
  int64_t heads = kvl__dim(c, "heads"), kv_heads = kvl__dim(c, "kv_heads");
  if (c->status >= 0 && (kv_heads < 1 || heads < 1 || heads % kv_heads))
    kvl__call_fail(c, "heads is %lld, expected 1 or more, a multiple of kv_heads = %lld",
                   (long long)heads, (long long)kv_heads);
}

void kvl__expect_block_size(struct kvl__call *c, int block_size) {
  if (block_size < 1 || block_size > 4096)
    kvl__call_fail(c, "block_size is %d, expected 1 ... 4096", block_size);
}

void kvl__expect_budget(struct kvl__call *c, const kvl_budget *b) {
  if (!b) {
    kvl__call_fail(c, "budget is missing");
    return;
  }
  if (!(b->ratio <= 1) || (b->ratio < 0 && b->blocks < 0))
    kvl__call_fail(c,
                   "budget is ratio %g, blocks %d, expected a ratio of 0 ... 1 or, with "
                   "a negative ratio, blocks >= 0",
                   b->ratio, b->blocks);
  if (b->min_blocks < 0 || b->sink < 0 || b->recent < 0)
    kvl__call_fail(c, "budget has min_blocks %d, sink %d, recent %d, expected >= 0",
                   b->min_blocks, b->sink, b->recent);
}

struct kvl_limits kvl__limits_arg(struct kvl__call *c, const kvl_tensor *limits) {
  struct kvl_limits of = {0};
  if (!kvl__arg(c, "limits?", limits, KVL__F32 | KVL__I32, "limit_seqs selection_heads"))
    return of;
  const int64_t rows = kvl__dim(c, "limit_seqs"), seqs = kvl__dim(c, "seqs");
  if (rows != seqs && rows != 1)
    kvl__call_fail(c, "limits are for %lld sequences, expected %lld or 1", (long long)rows,
                   (long long)seqs);
  of.of = limits->ptr;
  of.seq_step = rows == 1 ? 0 : limits->shape[1];
  of.are_ratios = limits->dtype == KVL_DTYPE_F32;
  return of;
}
