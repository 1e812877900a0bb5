/* Attention over lists of tokens: checks the shapes and launches the kernel. kvlab.h
 * describes the op. The places stay on the device, so their values are not checked here. */
#include "args/attention.h"
#include "ops/op_args.h"

int kvl_token_attention(const kvl_tensor *q, const kvl_tensor *cache,
                        const kvl_format *format, const kvl_tensor *places, double scale,
                        const kvl_tensor *out, const kvl_tensor *lse) {
  struct kvl__call c = {.op = "token_attention"};
  struct kvl_token_attention_args args = {.scale = (float)scale, .place_heads = 1};
  args.cache = kvl__pages_arg(&c, "cache", cache, format,
                              "blocks 2 kv_heads block_size head_dim");
  kvl__vector_arg(&c, "q", q, kvl__rows_of(args.cache.codec), "rows heads head_dim");
  kvl__expect_groups(&c);
  if (places && places->ndim == 3) {
    kvl__arg(&c, "places", places, KVL__I32, "rows kv_heads k");
    args.place_heads = args.cache.kv_heads;
  } else {
    kvl__arg(&c, "places", places, KVL__I32, "rows k");
  }
  kvl__vector_arg(&c, "out", out, kvl__like(q) | KVL__F32, "rows heads head_dim");
  if (kvl__arg(&c, "lse?", lse, KVL__F32, "rows heads")) args.lse = lse->ptr;
  if (c.status >= 0 && args.cache.blocks * args.cache.block_size > INT32_MAX)
    kvl__call_fail(&c, "cache has %lld blocks of %d tokens, expected at most 2^31 - 1 places",
                   (long long)args.cache.blocks, args.cache.block_size);
  if (c.status < 0) return c.status;
  args.q = q->ptr;
  args.places = places->ptr;
  args.out = out->ptr;
  args.rows = kvl__dim(&c, "rows");
  args.heads = kvl__dim(&c, "heads");
  args.k = kvl__dim(&c, "k");
  args.dtype = q->dtype;
  args.out_dtype = out->dtype;
  return KVL__LAUNCH(&c, token_attention, args);
}
