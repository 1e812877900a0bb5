/* out[r] = an index of row r, drawn with the chances softmax(scores[r]): the index where
 * the sum of the score and a Gumbel-distributed number is largest. See kvl__race in
 * philox.h.
 *   scores   f32  [rows, n]
 *   numbers  i64  [rows, 2]  a seed, and the word of it that index 0 uses
 *   out      i32  [rows]     the lower index among equals; NaN never wins
 * Scores that could not win with any random number are skipped a strip at a time. For the
 * others, the exponent of the uniform number u bounds the sum, since -ln(-ln(1 - u)) <
 * -ln(u). Only the few that are left need logarithms. Every instruction set gives the same
 * indices. Limit: arithmetic, the words of Philox.
 * Source: Gumbel 1954; Maddison, Tarlow, Minka 2014, arXiv:1411.0030. */
#include "args/elementwise.h"
#include "philox.h"
#include "cpu/split.h"
#include "cpu/vec.h"

enum { STRIP = 32, WIDTH = 4 * STRIP }; /* blocks of four words, and scores */

typedef union {
  float f[WIDTH];
  uint32_t bits[WIDTH];
} strip_t;

static inline KVL_HOT void uniforms(uint64_t seed, uint64_t block, strip_t *u) {
  uint32_t w[4][STRIP];
  for (int l = 0; l < STRIP; l++) {
    uint32_t x[4];
    kvl__philox(seed, block + (uint64_t)l, x);
    for (int j = 0; j < 4; j++) w[j][l] = x[j];
  }
  for (int l = 0; l < STRIP; l++)
    for (int j = 0; j < 4; j++) u->f[4 * l + j] = kvl__uniform(w[j][l]);
}

/* Whether a score is above `least`. */
static inline KVL_HOT int any_above(const float *scores, int count, float least) {
  int any = 0;
  for (int e = 0; e < count; e++) any |= scores[e] > least;
  return any;
}

/* An upper bound of a score's random number: u >= 2^-k gives k ln 2. */
static inline KVL_HOT void bound(const float *scores, const uint32_t *bits, int count,
                                 float *bounds) {
  for (int e = 0; e < count; e++)
    bounds[e] = scores[e] +
                KVL_FMA((float)(127 - (int32_t)(bits[e] >> 23)), 0.693147182f, 1e-4f);
}

static int32_t draw_row(const float *scores, int64_t n, uint64_t seed, uint64_t offset) {
  float best = -INFINITY, bounds[WIDTH];
  strip_t u;
  int64_t at = -1;
  int skip = (int)(offset % 4), count;
  for (int64_t i = 0; i < n; i += count, skip = 0) {
    count = (int)i64_min(n - i, WIDTH - skip);
    if (!any_above(scores + i, count, best - KVL_RACE_MOST)) continue;
    uniforms(seed, (offset + (uint64_t)i) / 4, &u);
    bound(scores + i, u.bits + skip, count, bounds);
    if (!any_above(bounds, count, best)) continue;
    for (int e = 0; e < count; e++) {
      if (!(bounds[e] > best)) continue;
      float sum = KVL_ADD(scores[i + e], kvl__race(u.f[skip + e]));
      if (sum > best) best = sum, at = i + e;
    }
  }
  for (int64_t i = 0; at < 0 && i < n; i++)
    if (scores[i] == scores[i]) at = i; /* none is above -inf */
  return at < 0 ? 0 : (int32_t)at;
}

static int draw_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_draw_args *g = args;
  for (int64_t r = begin; r < end; r++)
    g->out[r] = draw_row(g->scores + r * g->n, g->n, (uint64_t)g->numbers[2 * r],
                         (uint64_t)g->numbers[2 * r + 1]);
  return 0;
}

KVL_CPU_KERNEL(draw) {
  const struct kvl_draw_args *g = args;
  return kvl__split(g->rows, kvl__grain_rows(4 * g->n), draw_piece, g);
}
