/* out = x / sqrt(mean(x^2) + eps) * weight for rows of dim. With `residual`, it first
 * computes residual += x in place, and then normalises that sum as it was stored. With
 * `bias`, it is a LayerNorm: the mean of x is subtracted first, and bias is added last.
 *   x, out    f32 f16 bf16  [rows, dim]   out may be x
 *   residual  like x        [rows, dim]   optional
 *   weight    like x or f32 [dim]         bias like weight, optional; without a residual
 * Rows of x, residual and out may be apart (row).
 * Two passes over a row, the second from cache. Each lane adds up RUN squares in f32, and
 * those sums are added in double.
 * Limit: read plus write bandwidth. Source: Zhang and Sennrich 2019. */
#include "args/linear.h"
#include "cpu/lanes.h"
#include "cpu/split.h"

static inline KVL_HOT float mean_of(const void *x, int64_t dim, const int dtype) {
  double sum = 0;
  for (int64_t i = 0; i < dim; i += VF)
    sum += vf_sum(vf_load_n(at_const(x, i, dtype), vf_left(i, dim), dtype));
  return (float)(sum / (double)dim);
}

/* Adds x to residual, if there is one, and returns the mean of the squares of the result. If it
 * is centred, they are those of its distances from `mean`. */
static inline KVL_HOT float mean_square(const void *x, void *residual, int64_t dim,
                                        int is_centred, float mean, const int dtype) {
  float ones[VF];
  for (int i = 0; i < VF; i++) ones[i] = 1;
  double sum = 0;
  for (int64_t i = 0; i < dim;) {
    vf s = {0};
    for (int64_t end = i64_min(dim, i + RUN * VF); i < end; i += VF) {
      int left = vf_left(i, dim);
      vf v = vf_load_n(at_const(x, i, dtype), left, dtype);
      if (residual) {
        void *p = at(residual, i, dtype);
        vf_store_n(p, v + vf_load_n(p, left, dtype), left, dtype);
        v = vf_load_n(p, left, dtype);
      }
      if (is_centred)
        v = (v - mean) * vf_load_n(ones, left, KVL_DTYPE_F32); /* 0 past the row */
      s = vf_fma(v, v, s);
    }
    sum += vf_sum(s);
  }
  return (float)(sum / (double)dim);
}

static inline KVL_HOT void rows(const struct kvl_rmsnorm_args *a, int64_t begin, int64_t end,
                                const int dtype) {
  for (int64_t r = begin; r < end; r++) {
    const void *x = at_const(a->x, r * a->row, dtype);
    void *residual = a->residual ? at(a->residual, r * a->row, dtype) : NULL;
    void *out = at(a->out, r * a->row, dtype);
    const float mean = a->bias ? mean_of(x, a->dim, dtype) : 0;
    const float squares = mean_square(x, residual, a->dim, a->bias != NULL, mean, dtype);
    const float scale = 1.0f / sqrtf(squares + a->eps);
    if (residual) x = residual;
    for (int64_t i = 0; i < a->dim; i += VF) {
      int left = vf_left(i, a->dim);
      vf w = vf_load_n(at_const(a->weight, i, a->weight_dtype), left, a->weight_dtype);
      vf v = vf_load_n(at_const(x, i, dtype), left, dtype);
      v = (v - mean) * scale * w;
      if (a->bias)
        v += vf_load_n(at_const(a->bias, i, a->weight_dtype), left, a->weight_dtype);
      vf_store_n(at(out, i, dtype), v, left, dtype);
    }
  }
}

static int rmsnorm_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_rmsnorm_args *a = args;
  KVL_BY_FLOAT(a->dtype, rows(a, begin, end, D))
  return 0;
}

KVL_CPU_KERNEL(rmsnorm) {
  const struct kvl_rmsnorm_args *a = args;
  if (a->dim == 0) return 0;
  return kvl__split(a->rows, kvl__grain_rows(a->dim), rmsnorm_piece, a);
}
