/* Products of f32 matrices that fit in the caches, c = keep c + a b, for kernels of many rows
 * (attention_many.h, emission.h). Their limit is multiply-adds. */
#ifndef KVL_CPU_PRODUCT_H
#define KVL_CPU_PRODUCT_H

#include "cpu/vec.h"

/* The registers hold a strip of 6 x PRODUCT_VECS vectors of sums, PRODUCT_VECS vectors of an
 * operand and a broadcast. */
enum { PRODUCT_VECS = VF == 16 ? 4 : 2, PRODUCT_LANES = PRODUCT_VECS * VF };

/* c[i][j] = keep[i] * c[i][j] + sum_t a[i * a_row + t * a_step] * b[t * b_row + j] */
struct product {
  const float *a, *b;
  float *c;
  const float *keep; /* NULL: 0 */
  int64_t a_row, a_step, b_row, c_row;
  int depth;
};

static inline KVL_HOT void strip(const struct product *m, int i0, const int rows,
                                 const int vecs) {
  const float *a = m->a + i0 * m->a_row, *b = m->b;
  const int64_t a_row = m->a_row, a_step = m->a_step, b_row = m->b_row;
  float *c = m->c + i0 * m->c_row;
  vf sum[6][4];
#pragma GCC unroll 6
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vecs; j++)
      sum[i][j] = m->keep ? m->keep[i0 + i] * vf_load(c, i * m->c_row + j * VF, KVL_DTYPE_F32)
                          : vf_set(0);
  for (int t = 0; t < m->depth; t++, a += a_step, b += b_row) {
    vf x[4];
#pragma GCC unroll 4
    for (int j = 0; j < vecs; j++) x[j] = vf_load(b, j * VF, KVL_DTYPE_F32);
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
      for (int j = 0; j < vecs; j++)
        sum[i][j] = vf_fma(vf_set(a[i * a_row]), x[j], sum[i][j]);
  }
#pragma GCC unroll 6
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vecs; j++)
      vf_store(c, i * m->c_row + j * VF, sum[i][j], KVL_DTYPE_F32);
}

static inline KVL_HOT void strips(const struct product *m, int rows, const int vecs) {
  int i = 0;
  for (; i + 6 <= rows; i += 6) strip(m, i, 6, vecs);
  if (i + 4 <= rows) strip(m, i, 4, vecs), i += 4;
  if (i + 2 <= rows) strip(m, i, 2, vecs), i += 2;
  if (i < rows) strip(m, i, 1, vecs);
}

static __attribute__((noinline)) void multiply(struct product m, int rows, int vecs) {
  switch (vecs) {
    case 1: strips(&m, rows, 1); break;
    case 2: strips(&m, rows, 2); break;
#if defined(KVL_ISA_AVX512)
    case 3: strips(&m, rows, 3); break;
    case 4: strips(&m, rows, 4); break;
#endif
  }
}

#endif
