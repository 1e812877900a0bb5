/* Joins two attentions over disjoint keys: each output has the weight e^lse.
 *   out_a, out_b, out  f32 f16 bf16  [rows, head_dim]   out may be out_a
 *   lse_a, lse_b, lse  f32           [rows]             lse may be lse_a, or NULL
 * A side with lse -inf saw no keys and leaves the other one exactly as it is. If both are
 * -inf, the result is 0 with lse -inf. Limit: bandwidth. Source: Dao et al. 2022. */
#include "args/attention.h"
#include "cpu/split.h"
#include "cpu/vec.h"

static inline KVL_HOT void merge_row(const struct kvl_merge_attention_args *a, int64_t row,
                                     float weight_a, float weight_b, const int dtype) {
  for (int64_t d = 0; d < a->head_dim; d += VF) {
    int64_t i = row * a->head_dim + d;
    int lanes = vf_left(d, a->head_dim);
    vf x = vf_load_n(at_const(a->out_a, i, dtype), lanes, dtype);
    vf y = vf_load_n(at_const(a->out_b, i, dtype), lanes, dtype);
    /* a weight of 0 hides whatever the side holds, even NaN */
    vf sum = weight_b == 0   ? weight_a * x
             : weight_a == 0 ? weight_b * y
                             : weight_a * x + weight_b * y;
    if (weight_a == 0 && weight_b == 0) sum = vf_set(0);
    vf_store_n(at(a->out, i, dtype), sum, lanes, dtype);
  }
}

static inline KVL_HOT void merge_rows(const struct kvl_merge_attention_args *a, int64_t begin,
                                      int64_t end, const int dtype) {
  for (int64_t row = begin; row < end; row++) {
    float la = a->lse_a[row], lb = a->lse_b[row], top = la > lb ? la : lb, lse = top;
    float weight_a = lb == -INFINITY, weight_b = la == -INFINITY;
    if (la == -INFINITY && lb == -INFINITY) {
      weight_a = weight_b = 0;
    } else if (la != -INFINITY && lb != -INFINITY) {
      float x = expf(la - top), y = expf(lb - top);
      weight_a = x / (x + y), weight_b = y / (x + y);
      lse = top + logf(x + y);
    }
    merge_row(a, row, weight_a, weight_b, dtype);
    if (a->lse) a->lse[row] = lse;
  }
}

static int merge_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_merge_attention_args *a = args;
  KVL_BY_FLOAT(a->dtype, merge_rows(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(merge_attention) {
  const struct kvl_merge_attention_args *a = args;
  return kvl__split(a->rows, kvl__grain_rows(a->head_dim), merge_piece, a);
}
