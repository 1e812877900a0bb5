/* Rotates the pairs (first + i, first + pairs + i) of every head by positions[t] *
 * inv_freq[i], in place: the half-split form of Hugging Face; other numbers stay as they are.
 *   x          f32 f16 bf16  [tokens, heads, head_dim]
 *   positions  i32           [tokens]
 *   inv_freq   f32           [pairs]
 * A token's sines and cosines are computed once for all its heads.
 * Limit: read plus write bandwidth. Source: Su et al. 2021, arXiv:2104.09864. */
#include "args/linear.h"
#include "cpu/linear/rope.h"

static inline KVL_HOT void tokens(const struct kvl_rope_args *a, int64_t begin, int64_t end,
                                  const int dtype) {
  float s[STRIP], c[STRIP];
  for (int64_t t = begin; t < end; t++)
    for (int64_t i = 0; i < a->pairs; i += STRIP) {
      int n = (int)i64_min(STRIP, a->pairs - i);
      sincos_strip((float)a->positions[t], a->inv_freq + i, n, s, c);
      for (int64_t h = 0; h < a->heads; h++) {
        int64_t low = (t * a->heads + h) * a->head_dim + a->first + i;
        rotate(at(a->x, low, dtype), at(a->x, low + a->pairs, dtype), n, s, c, dtype);
      }
    }
}

static int rope_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_rope_args *a = args;
  KVL_BY_FLOAT(a->dtype, tokens(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(rope) {
  const struct kvl_rope_args *a = args;
  return kvl__split(a->tokens, kvl__grain_rows(a->heads * a->pairs * 2), rope_piece, a);
}
