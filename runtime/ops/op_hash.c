/* Ops that hash keys, and that score and select blocks by the hashes. Each function checks
 * the shapes and launches a kernel; kvlab.h describes the op. */
#include "args/select.h"
#include "ops/op_args.h"

static int words_of(int64_t bits) { return (int)((bits + 63) / 64); }

/* Checks planes [bits, head_dim] and returns the number of bits. */
static int planes_arg(struct kvl__call *c, const kvl_tensor *planes) {
  if (!kvl__vector_arg(c, "planes", planes, KVL__F32, "bits head_dim")) return 0;
  int64_t bits = planes->shape[0], dim = planes->shape[1];
  if (bits != 32 && (bits < 64 || bits % 64 || bits > KVL_HASH_BITS_MAX))
    kvl__call_fail(c, "planes has %lld bits, expected 32 or a multiple of 64 up to %d",
                   (long long)bits, KVL_HASH_BITS_MAX);
  if (dim < 8 || dim > 256 || dim % 8)
    kvl__call_fail(c, "head_dim is %lld, expected a multiple of 8 from 8 to 256",
                   (long long)dim);
  return (int)bits;
}

static void expect_words(struct kvl__call *c, int64_t bits) {
  if (c->status >= 0 && kvl__dim(c, "words") != words_of(bits))
    kvl__call_fail(c, "hashes have %lld words, expected %d for %lld planes",
                   (long long)kvl__dim(c, "words"), words_of(bits), (long long)bits);
}

/* Checks hashes in either form, per block or per token, and returns a view of them. */
static struct kvl_hash_view hashes_arg(struct kvl__call *c, const kvl_tensor *hashes,
                                       const char *block_form, const char *token_form) {
  int is_token = hashes && hashes->ndim == 4;
  if (!kvl__vector_arg(c, "hashes", hashes, KVL__U64, is_token ? token_form : block_form))
    return (struct kvl_hash_view){0};
  return (struct kvl_hash_view){.hashes = hashes->ptr,
                                .blocks = hashes->shape[0],
                                .kv_heads = (int)hashes->shape[1],
                                .tokens = is_token ? (int)hashes->shape[2] : 1,
                                .words = (int)hashes->shape[hashes->ndim - 1],
                                .is_token = is_token};
}

static struct kvl_hash_view block_hashes_arg(struct kvl__call *c, const kvl_tensor *hashes,
                                             int block_size) {
  struct kvl_hash_view view = hashes_arg(c, hashes, "blocks kv_heads words",
                                         "blocks kv_heads block_size words");
  if (block_size < 1 || block_size > 4096)
    kvl__call_fail(c, "block_size is %d, expected 1 ... 4096", block_size);
  if (view.is_token && view.tokens != block_size)
    kvl__call_fail(c, "hashes are of blocks of %d tokens, expected block_size = %d",
                   view.tokens, block_size);
  if (c->status >= 0 && (view.words < 1 || view.words > KVL_HASH_BITS_MAX / 64))
    kvl__call_fail(c, "hashes have %d words, expected 1 ... %d", view.words,
                   KVL_HASH_BITS_MAX / 64);
  return view;
}

/* Checks that there is a list for each KV head or one for all; returns how many. */
static int64_t heads_arg(struct kvl__call *c, const char *name, const char *dim) {
  int64_t heads = kvl__dim(c, dim), kv_heads = kvl__dim(c, "kv_heads");
  if (c->status >= 0 && heads != 1 && heads != kv_heads)
    kvl__call_fail(c, "%s has %lld heads, expected kv_heads = %lld or 1", name,
                   (long long)heads, (long long)kv_heads);
  return heads;
}

int kvl_hash_rows(const kvl_tensor *x, const kvl_tensor *planes, const kvl_tensor *hashes) {
  struct kvl__call c = {.op = "hash_rows"};
  kvl__vector_arg(&c, "x", x, KVL__FLOAT, "rows head_dim");
  int bits = planes_arg(&c, planes);
  kvl__arg(&c, "hashes", hashes, KVL__U64, "rows words");
  expect_words(&c, bits);
  if (c.status < 0) return c.status;
  struct kvl_hash_rows_args args = {
      x->ptr, planes->ptr, hashes->ptr, x->shape[0], (int32_t)x->shape[1], bits, x->dtype};
  return KVL__LAUNCH(&c, hash_rows, args);
}

int kvl_block_hash(const kvl_tensor *cache, const kvl_format *format,
                   const kvl_tensor *blocks, const kvl_tensor *tokens, const kvl_tensor *rows,
                   const kvl_tensor *planes, const kvl_tensor *hashes) {
  struct kvl__call c = {.op = "block_hash"};
  struct kvl_pages view = kvl__any_pages_arg(&c, "cache", cache, format,
                                             "blocks 2 kv_heads block_size head_dim");
  if (c.status >= 0 && kvl__is_latent(view.codec))
    kvl__call_fail(&c, "cache is %s, expected f32, f16, bf16, f8e4m3 or int8",
                   kvl__codec_name(view.codec));
  kvl__arg(&c, "blocks", blocks, KVL__I32, "n");
  kvl__arg(&c, "tokens", tokens, KVL__I32, "n");
  kvl__arg(&c, "rows?", rows, KVL__I32, "n");
  int bits = planes_arg(&c, planes);
  struct kvl_hash_view to = hashes_arg(&c, hashes, "hash_rows kv_heads words",
                                       "hash_rows kv_heads block_size words");
  expect_words(&c, bits);
  if (c.status < 0) return c.status;
  struct kvl_block_hash_args args = {
      view,        blocks->ptr, tokens->ptr,   rows ? rows->ptr : NULL,
      planes->ptr, hashes->ptr, blocks->count, to.blocks,
      bits,        to.is_token};
  return KVL__LAUNCH(&c, block_hash, args);
}

int kvl_score_hamming(const kvl_tensor *q_hashes, const kvl_tensor *hashes,
                      const kvl_tensor *tables, const kvl_tensor *lens, int block_size,
                      const kvl_tensor *scores) {
  struct kvl__call c = {.op = "score_hamming"};
  kvl__arg(&c, "q_hashes", q_hashes, KVL__U64, "seqs kv_heads words");
  struct kvl_hash_view view = block_hashes_arg(&c, hashes, block_size);
  kvl__arg(&c, "tables", tables, KVL__I32, "seqs max_blocks");
  kvl__arg(&c, "lens", lens, KVL__I32, "seqs");
  kvl__arg(&c, "scores", scores, KVL__F32, "seqs score_heads max_blocks");
  int64_t heads = heads_arg(&c, "scores", "score_heads");
  if (c.status < 0) return c.status;
  struct kvl_score_hamming_args args = {q_hashes->ptr, view,
                                        tables->ptr,   lens->ptr,
                                        scores->ptr,   kvl__dim(&c, "seqs"),
                                        heads,         kvl__dim(&c, "max_blocks"),
                                        block_size};
  return KVL__LAUNCH(&c, score_hamming, args);
}

int kvl_select_hamming(const kvl_hamming *s) {
  if (!s) return kvl__missing(__func__, "call");
  struct kvl__call c = {.op = "select_hamming"};
  kvl__vector_arg(&c, "q", s->q, KVL__FLOAT, "seqs heads head_dim");
  int bits = planes_arg(&c, s->planes);
  struct kvl_hash_view view = block_hashes_arg(&c, s->hashes, s->block_size);
  expect_words(&c, bits);
  kvl__expect_groups(&c);
  kvl__arg(&c, "tables", s->tables, KVL__I32, "seqs max_blocks");
  kvl__arg(&c, "lens", s->lens, KVL__I32, "seqs");
  kvl__arg(&c, "selection", s->selection, KVL__I32, "seqs selection_heads max_selected");
  kvl__arg(&c, "counts?", s->counts, KVL__I32, "seqs selection_heads");
  int64_t heads = heads_arg(&c, "selection", "selection_heads");
  if (c.status >= 0 && heads == 1 && (int64_t)view.kv_heads * view.words > KVL_HASH_QUERY_MAX)
    kvl__call_fail(&c,
                   "hashes have %d kv_heads of %d words, expected at most %d words in all "
                   "for one list",
                   view.kv_heads, view.words, KVL_HASH_QUERY_MAX);
  const struct kvl_limits limits = kvl__limits_arg(&c, s->limits);
  kvl__expect_budget(&c, &s->budget);
  if (c.status < 0) return c.status;
  struct kvl_select_hamming_args args = {.q = s->q->ptr,
                                         .planes = s->planes->ptr,
                                         .hashes = view,
                                         .tables = s->tables->ptr,
                                         .lens = s->lens->ptr,
                                         .selection = s->selection->ptr,
                                         .counts = s->counts ? s->counts->ptr : NULL,
                                         .seqs = kvl__dim(&c, "seqs"),
                                         .heads = kvl__dim(&c, "heads"),
                                         .selection_heads = heads,
                                         .max_blocks = kvl__dim(&c, "max_blocks"),
                                         .max_selected = kvl__dim(&c, "max_selected"),
                                         .limits = limits,
                                         .budget = s->budget,
                                         .block_size = s->block_size,
                                         .head_dim = (int32_t)s->q->shape[2],
                                         .bits = bits,
                                         .dtype = s->q->dtype};
  return KVL__LAUNCH(&c, select_hamming, args);
}
