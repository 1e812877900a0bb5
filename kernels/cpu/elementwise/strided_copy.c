/* out[i . out_stride] = a[i . a_stride] over a shape: transpositions, broadcasts, and parts of
 * tensors along any dim.
 *   a, out  any dtype  elements of 1, 2, 4 or 8 bytes, strided
 * Where both are contiguous along the last dim, rows are copied whole. Else the last two dims
 * are walked in tiles of TILE x TILE, so that the cache lines of both sides are used while
 * they are in L1.
 * Limit: read plus write bandwidth for rows, L1 misses for transpositions. */
#include "args/elementwise.h"
#include "cpu/convert.h"
#include "cpu/split.h"

enum { TILE = 32 };

/* One tile: m places along the last dim but one, n along the last. */
#define COPY(T)                                                                        \
  do {                                                                                 \
    const T *from = (const T *)g->a + ia;                                              \
    T *to = (T *)g->out + io;                                                          \
    if (g->out_stride[last] == 1 && g->a_stride[last] == 1 &&                          \
        n * (int64_t)sizeof(T) >= 64) {                                                \
      for (int64_t i = 0; i < m; i++)                                                  \
        memcpy(to + i * om, from + i * am, (size_t)n * sizeof(T));                     \
    } else {                                                                           \
      for (int64_t i = 0; i < m; i++)                                                  \
        for (int64_t j = 0; j < n; j++)                                                \
          to[i * om + j * g->out_stride[last]] = from[i * am + j * g->a_stride[last]]; \
    }                                                                                  \
  } while (0)

static void copy_tile(const struct kvl_strided_copy_args *g, int64_t ia, int64_t io,
                      int64_t m, int64_t n) {
  const int last = g->ndim - 1;
  const int64_t am = last > 0 ? g->a_stride[last - 1] : 0;
  const int64_t om = last > 0 ? g->out_stride[last - 1] : 0;
  switch (g->bytes_element) {
    case 8: COPY(uint64_t); break;
    case 4: COPY(uint32_t); break;
    case 2: COPY(uint16_t); break;
    default: COPY(uint8_t);
  }
}

/* How the last two dims are cut: [height, width] in tiles of [tall, wide]. */
struct tiling {
  int64_t height, width, tall, wide, down, across;
};
static struct tiling tiling_of(const struct kvl_strided_copy_args *g) {
  const int last = g->ndim - 1;
  struct tiling t = {.height = last > 0 ? g->shape[last - 1] : 1, .width = g->shape[last]};
  const int rows = g->a_stride[last] <= 1 && g->out_stride[last] == 1;
  t.wide = rows ? KVL_GRAIN : TILE;
  t.tall = rows ? kvl__grain_rows(i64_min(t.width, t.wide)) : TILE;
  t.down = (t.height + t.tall - 1) / t.tall;
  t.across = (t.width + t.wide - 1) / t.wide;
  return t;
}

static int tiles_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_strided_copy_args *g = args;
  const struct tiling t = tiling_of(g);
  const int last = g->ndim - 1;
  for (int64_t at = begin; at < end; at++) {
    int64_t j = at % t.across * t.wide, i = at / t.across % t.down * t.tall;
    int64_t rest = at / t.across / t.down;
    int64_t ia = j * g->a_stride[last], io = j * g->out_stride[last];
    if (last > 0) ia += i * g->a_stride[last - 1], io += i * g->out_stride[last - 1];
    for (int d = last - 2; d >= 0; d--) {
      ia += rest % g->shape[d] * g->a_stride[d];
      io += rest % g->shape[d] * g->out_stride[d];
      rest /= g->shape[d];
    }
    copy_tile(g, ia, io, i64_min(t.tall, t.height - i), i64_min(t.wide, t.width - j));
  }
  return 0;
}

KVL_CPU_KERNEL(strided_copy) {
  const struct kvl_strided_copy_args *g = args;
  if (g->count == 0) return 0;
  const struct tiling t = tiling_of(g);
  int64_t tiles = t.down * t.across * (g->count / (t.height * t.width));
  int64_t elements = i64_min(t.tall, t.height) * i64_min(t.wide, t.width);
  return kvl__split(tiles, kvl__grain_rows(elements), tiles_piece, g);
}
