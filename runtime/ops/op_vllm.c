/* Ops over vLLM's layout of KV memory. Each function checks the shapes and launches a kernel;
 * kvlab.h describes the op. */
#include "args/attention.h"
#include "ops/op_args.h"

static int is_head_dim(int64_t d) {
  static const int vllm[] = {32, 64, 80, 96, 112, 120, 128, 192, 256};
  for (size_t i = 0; i < sizeof vllm / sizeof vllm[0]; i++)
    if (d == vllm[i]) return 1;
  return 0;
}

static struct kvl_vllm_view cache_args(struct kvl__call *c, const kvl_tensor *keys,
                                       const kvl_tensor *values, const kvl_tensor *k_scale,
                                       const kvl_tensor *v_scale) {
  struct kvl_vllm_view view = {0};
  kvl__vector_arg(c, "key_cache", keys, KVL__CACHE,
                  "blocks kv_heads head_dim/x block_size x");
  kvl__vector_arg(c, "value_cache", values, kvl__like(keys),
                  "blocks kv_heads head_dim block_size");
  int given = kvl__arg(c, "k_scale?", k_scale, KVL__F32, "1");
  given += kvl__arg(c, "v_scale?", v_scale, KVL__F32, "1");
  if (c->status < 0) return view;
  int64_t d = kvl__dim(c, "head_dim"), size = kvl__dim(c, "block_size");
  int64_t x = 16 / kvl_dtype_bytes(keys->dtype);
  if (!is_head_dim(d))
    kvl__call_fail(c, "head_dim is %lld, expected 32, 64, 80, 96, 112, 120, 128, 192 or 256",
                   (long long)d);
  if (size != 8 && size != 16 && size != 32)
    kvl__call_fail(c, "block_size is %lld, expected 8, 16 or 32", (long long)size);
  if (d % x)
    kvl__call_fail(c, "head_dim is %lld, expected a multiple of x = %lld for a cache of %s",
                   (long long)d, (long long)x, kvl_dtype_name(keys->dtype));
  if (kvl__dim(c, "x") != x || kvl__dim(c, "head_dim/x") * x != d)
    kvl__call_fail(c,
                   "key_cache has %lld runs of %lld elements a token, expected %lld of "
                   "%lld (16 bytes of %s)",
                   (long long)kvl__dim(c, "head_dim/x"), (long long)kvl__dim(c, "x"),
                   (long long)(d / x), (long long)x, kvl_dtype_name(keys->dtype));
  if (given && keys->dtype != KVL_DTYPE_F8E4M3)
    kvl__call_fail(c, "%s_scale is given for a cache of %s, expected f8e4m3",
                   k_scale ? "k" : "v", kvl_dtype_name(keys->dtype));
  return (struct kvl_vllm_view){.keys = keys->ptr,
                                .values = values->ptr,
                                .k_scale = k_scale ? k_scale->ptr : NULL,
                                .v_scale = v_scale ? v_scale->ptr : NULL,
                                .blocks = keys->shape[0],
                                .kv_heads = (int32_t)keys->shape[1],
                                .head_dim = (int32_t)d,
                                .block_size = (int32_t)size,
                                .dtype = keys->dtype};
}

int kvl_vllm_append(const kvl_tensor *k, const kvl_tensor *v, const kvl_tensor *places,
                    const kvl_tensor *key_cache, const kvl_tensor *value_cache,
                    const kvl_tensor *k_scale, const kvl_tensor *v_scale) {
  struct kvl__call c = {.op = "vllm_append"};
  struct kvl_vllm_view view = cache_args(&c, key_cache, value_cache, k_scale, v_scale);
  kvl__vector_arg(&c, "k", k, kvl__rows_of(key_cache ? key_cache->dtype : KVL_DTYPE_F32),
                  "tokens kv_heads head_dim");
  kvl__vector_arg(&c, "v", v, kvl__like(k), "tokens kv_heads head_dim");
  kvl__arg(&c, "places", places, KVL__I64, "tokens");
  if (c.status < 0) return c.status;
  struct kvl_vllm_append_args args = {view,        k->ptr,      v->ptr,
                                      places->ptr, k->shape[0], k->dtype};
  return KVL__LAUNCH(&c, vllm_append, args);
}

/* Chooses as vLLM does. V1 gives each head of a sequence one thread block; it is chosen if
 * there are enough of these or the sequences are too short to divide. vLLM uses V1 up to 8192
 * tokens, whose logits fit into any GPU's shared memory. */
static int32_t version_for(const struct kvl_vllm_attention_args *a) {
  int64_t longest = a->max_blocks * a->cache.block_size;
  return longest <= 8192 && (longest <= 512 || a->seqs * a->heads > 512) ? 1 : 2;
}

int kvl_vllm_attention(const kvl_vllm *a) {
  if (!a) return kvl__missing(__func__, "call");
  struct kvl__call c = {.op = "vllm_attention"};
  struct kvl_vllm_attention_args args = {.scale = (float)a->scale, .version = a->version};
  args.cache = cache_args(&c, a->key_cache, a->value_cache, a->k_scale, a->v_scale);
  unsigned like = kvl__like(a->key_cache);
  kvl__vector_arg(&c, "q", a->q, like == KVL__F8 ? KVL__FLOAT : like, "seqs heads head_dim");
  kvl__arg(&c, "tables", a->tables, KVL__I32, "seqs max_blocks");
  kvl__arg(&c, "lens", a->lens, KVL__I32, "seqs");
  if (kvl__arg(&c, "alibi?", a->alibi, KVL__F32, "heads")) args.alibi = a->alibi->ptr;
  kvl__vector_arg(&c, "out", a->out, kvl__like(a->q), "seqs heads head_dim");
  args.heads = kvl__dim(&c, "heads");
  if (c.status >= 0 && (args.cache.kv_heads < 1 || args.heads % args.cache.kv_heads))
    kvl__call_fail(&c, "heads is %lld, expected a multiple of kv_heads = %d",
                   (long long)args.heads, args.cache.kv_heads);
  if (a->version < 0 || a->version > 2)
    kvl__call_fail(&c, "version is %d, expected 1, 2 or 0 (vLLM's choice)", a->version);
  if (c.status < 0) return c.status;
  args.q = a->q->ptr;
  args.tables = a->tables->ptr;
  args.lens = a->lens->ptr;
  args.out = a->out->ptr;
  args.seqs = kvl__dim(&c, "seqs");
  args.max_blocks = kvl__dim(&c, "max_blocks");
  args.dtype = a->q->dtype;
  if (args.version == 0) args.version = version_for(&args);
  args.workspace = kvl__call_workspace(&c, KVL_OP_vllm_attention, &args);
  return KVL__LAUNCH(&c, vllm_attention, args);
}
