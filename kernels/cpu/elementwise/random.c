/* out[i] from word (offset + i) of the Philox sequence of `seed`; see philox.h.
 *   out  f32 f16 bf16 (uniform, normal), i32 i64 (integer)  [count]
 * UNIFORM  a + (b - a) u, u in (0, 1], one fused multiply-add in f32
 * NORMAL   a + b n, likewise; words 0 and 1 of a block make the normals of elements 0 and
 *          1, words 2 and 3 those of 2 and 3, wherever `offset` starts
 * INTEGER  a + floor(word * (b - a) / 2^32)
 * Blocks of four words are generated STRIP at a time, in a loop over blocks that the compiler
 * turns into vector code. Every instruction set gives the same bits.
 * Limit: arithmetic. */
#include "args/elementwise.h"
#include "philox.h"
#include "cpu/split.h"
#include "cpu/vec.h"

enum { STRIP = 64 };

static void words(uint64_t seed, uint64_t first, uint32_t w[4][STRIP]) {
  for (int l = 0; l < STRIP; l++) {
    uint32_t x[4];
    kvl__philox(seed, first + (uint64_t)l, x);
    for (int j = 0; j < 4; j++) w[j][l] = x[j];
  }
}

/* Writes the elements of the strip in order: f[4 * block + word]. */
static void floats(const struct kvl_random_args *a, const uint32_t w[4][STRIP], float *f) {
  float x[4][STRIP], low = (float)a->a;
  if (a->kind == KVL_RANDOM_UNIFORM) {
    float width = (float)(a->b - a->a);
    for (int j = 0; j < 4; j++)
      for (int l = 0; l < STRIP; l++) x[j][l] = KVL_FMA(width, kvl__uniform(w[j][l]), low);
  } else {
    float deviation = (float)a->b;
    for (int j = 0; j < 4; j += 2)
      for (int l = 0; l < STRIP; l++) {
        float n0, n1;
        kvl__normal2(w[j][l], w[j + 1][l], &n0, &n1);
        x[j][l] = KVL_FMA(deviation, n0, low);
        x[j + 1][l] = KVL_FMA(deviation, n1, low);
      }
  }
  for (int l = 0; l < STRIP; l++)
    for (int j = 0; j < 4; j++) f[4 * l + j] = x[j][l];
}

static void wholes(const struct kvl_random_args *a, const uint32_t w[4][STRIP], int64_t *f) {
  int64_t low = (int64_t)a->a;
  uint64_t range = (uint64_t)((int64_t)a->b - low);
  for (int l = 0; l < STRIP; l++)
    for (int j = 0; j < 4; j++) f[4 * l + j] = low + (int64_t)(w[j][l] * range >> 32);
}

static inline KVL_HOT void store(void *out, int64_t i, const float *f, int n,
                                 const int dtype) {
  for (int e = 0; e < n; e += VF) {
    int left = vf_left(e, n);
    vf_store_n(at(out, i + e, dtype), vf_load_n(f + e, left, KVL_DTYPE_F32), left, dtype);
  }
}

static int random_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_random_args *a = args;
  uint32_t w[4][STRIP];
  float f[4 * STRIP];
  int64_t whole[4 * STRIP];
  for (int64_t i = begin; i < end;) {
    uint64_t word = a->offset + (uint64_t)i;
    int skip = (int)(word % 4), n = (int)i64_min(end - i, 4 * STRIP - skip);
    words(a->seed, word / 4, w);
    if (a->kind != KVL_RANDOM_INTEGER) {
      floats(a, w, f);
      KVL_BY_FLOAT(a->dtype, store(a->out, i, f + skip, n, D))
    } else {
      wholes(a, w, whole);
      for (int e = 0; e < n; e++)
        if (a->dtype == KVL_DTYPE_I64) ((int64_t *)a->out)[i + e] = whole[skip + e];
        else ((int32_t *)a->out)[i + e] = (int32_t)whole[skip + e];
    }
    i += n;
  }
  return 0;
}

KVL_CPU_KERNEL(random) {
  const struct kvl_random_args *a = args;
  return kvl__split(a->count, KVL_GRAIN / 4, random_piece, a);
}
