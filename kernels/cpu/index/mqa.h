/* Logits of an indexer, for mqa_logits and mqa_logits_paged. They multiply a tile of keys by
 * the heads of one row of q at a time.
 *
 * The lanes of a vector are tokens of the tile, so that relu, weights and the sum over heads
 * stay in a lane. All arithmetic is f32: sums over dims in their order, then over heads in
 * their order, then the scale. */
#ifndef KVL_CPU_MQA_H
#define KVL_CPU_MQA_H

#include "cpu/split.h"
#include "cpu/vec.h"

enum {
  MQA_TOKENS = 64, /* of a tile */
  MQA_DIM_MAX = 128,
  MQA_HEADS_MAX = 64,
  MQA_HEADS = 4,                  /* heads that are computed together */
  MQA_VECTORS = VF == 16 ? 4 : 2, /* vectors of tokens that are computed together */
};
_Static_assert(MQA_TOKENS % (MQA_VECTORS * VF) == 0, "a tile leaves no rest");

struct mqa_tile {
  float keys[MQA_DIM_MAX * MQA_TOKENS] __attribute__((aligned(64))); /* [dim, token] */
  float scales[MQA_TOKENS] __attribute__((aligned(64)));
  uint8_t known[MQA_TOKENS];
};

/* A row of q, padded with heads of zeros to a multiple of MQA_HEADS. */
struct mqa_row {
  float q[MQA_HEADS_MAX * MQA_DIM_MAX] __attribute__((aligned(64)));
  float weights[MQA_HEADS_MAX];
  int heads, dim;
};

/* Sets token t of the tile. key NULL: the token does not exist, and its logit is -inf. */
static inline void mqa_take_key(struct mqa_tile *tile, int t, const uint8_t *key, float scale,
                                int dim) {
  float x[MQA_DIM_MAX] __attribute__((aligned(64))) = {0};
  if (key)
    for (int d = 0; d < dim; d += VF)
      vf_store(x, d, vf_load(key, d, KVL_DTYPE_F8E4M3), KVL_DTYPE_F32);
  for (int d = 0; d < dim; d++) tile->keys[d * MQA_TOKENS + t] = x[d];
  tile->scales[t] = scale;
  tile->known[t] = key != NULL;
}

static inline void mqa_take_row(struct mqa_row *row, const uint8_t *q, const float *weights,
                                int heads, int dim) {
  row->heads = (heads + MQA_HEADS - 1) / MQA_HEADS * MQA_HEADS;
  row->dim = dim;
  for (int i = 0; i < heads * dim; i += VF)
    vf_store(row->q, i, vf_load(q, i, KVL_DTYPE_F8E4M3), KVL_DTYPE_F32);
  memcpy(row->weights, weights, (size_t)heads * sizeof(float));
  memset(row->q + heads * dim, 0, (size_t)((row->heads - heads) * dim) * sizeof(float));
  memset(row->weights + heads, 0, (size_t)(row->heads - heads) * sizeof(float));
}

/* Computes the logits of all tokens of the tile, also of those that do not exist. */
static inline KVL_HOT void mqa_multiply(const struct mqa_tile *tile,
                                        const struct mqa_row *row, float *logits) {
  const int dim = row->dim;
  for (int t = 0; t < MQA_TOKENS; t += MQA_VECTORS * VF) {
    vf sum[MQA_VECTORS] = {0};
    for (int h = 0; h < row->heads; h += MQA_HEADS) {
      vf dot[MQA_HEADS][MQA_VECTORS] = {{{0}}};
      for (int d = 0; d < dim; d++) {
        vf k[MQA_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < MQA_VECTORS; v++)
          k[v] = vf_load(tile->keys, d * MQA_TOKENS + t + v * VF, KVL_DTYPE_F32);
#pragma GCC unroll 4
        for (int i = 0; i < MQA_HEADS; i++) {
          vf q = vf_set(row->q[(h + i) * dim + d]);
#pragma GCC unroll 4
          for (int v = 0; v < MQA_VECTORS; v++) dot[i][v] = vf_fma(q, k[v], dot[i][v]);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < MQA_HEADS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < MQA_VECTORS; v++) /* keeps NaN: see vf_max */
          sum[v] = vf_fma(vf_set(row->weights[h + i]), vf_max(vf_set(0), dot[i][v]), sum[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < MQA_VECTORS; v++) {
      const int at = t + v * VF;
      vf_store(logits, at, sum[v] * vf_load(tile->scales, at, KVL_DTYPE_F32), KVL_DTYPE_F32);
    }
  }
}

/* Stores the part of columns [begin, end) that lies in the tile, which starts at column
 * `first`: column j goes to out[at_row + j]. */
static inline void mqa_store(const struct mqa_tile *tile, const float *logits, int64_t first,
                             int64_t begin, int64_t end, void *out, int64_t at_row,
                             int dtype) {
  for (int64_t j = i64_max(begin, first); j < i64_min(end, first + MQA_TOKENS); j++) {
    const int t = (int)(j - first);
    f32_store(out, at_row + j, tile->known[t] ? logits[t] : -INFINITY, dtype);
  }
}

#endif
