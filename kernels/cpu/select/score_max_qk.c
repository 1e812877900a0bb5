/* The largest q . k of each block's valid tokens, from the keys themselves: the oracle that
 * summaries are measured against.
 *   q       f32 f16 bf16         [seqs, heads, head_dim]
 *   cache   f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *   scores  f32                  [seqs, kv_heads, max_blocks]   -inf past the last block
 * Limit: read bandwidth, every K once.
 * Best   Xeon (Sapphire Rapids), 16 cores, AVX-512, 2026-11-21, group 4, head_dim 128, blocks
 *        of 16 in random order, 16 x 32K tokens, relative to a read loop in the same run:
 *        bf16 0.79, f8e4m3 0.50 (AVX2 0.74, 0.39). That was with loops of its own, which took
 *        26 s to compile; with those of dots.c bf16 and f32 take 0.82 to 1.2 of that time
 *        (shorter the more heads share a key), f8e4m3 1.08 to 1.28 (AVX-512, one core of
 *        another Xeon, 2026-11-26) */
#include "args/select.h"
#include "cpu/select/scores.h"
#include "cpu/strip.h"

/* The score of one block. next: the block after it, whose keys are prefetched. */
static float score_block(const struct score *s, const struct run *r, const char *k,
                         const char *next, int tokens, const float *q) {
  const struct kvl_strips *of = &s->pages->key;
  const int padded = dim_padded(s->head_dim), packed = kvl__packs(s->pages->codec);
  float room[SCORE_TILE * HEAD_DIM_MAX] __attribute__((aligned(64))); /* of packed keys */
  float part[GROUP_MAX * SCORE_TILE] __attribute__((aligned(64)));
  vf best[GROUP_MAX];
  for (int h = 0; h < r->rows; h++) best[h] = vf_set(-INFINITY);
  for (int t = 0; t < tokens; t += SCORE_TILE) {
    const char *x[SCORE_TILE], *soon[SCORE_TILE];
    const int keys = (int)i64_min(SCORE_TILE, (tokens - t + VF - 1) / VF * VF);
    for (int j = 0; j < keys; j++) { /* past the last valid token, repeat it */
      const int64_t token = t + j < tokens ? t + j : tokens - 1;
      x[j] = k + token * of->bytes_row, soon[j] = next + token * of->bytes_row;
      if (!packed) continue;
      float *to = room + j * padded;
      const char *scales = scales_of(of, k, token);
      KVL_BY_PACKED(s->pages->codec, unpack_row(of, x[j], scales, D, to), )
      x[j] = (const char *)to, soon[j] = x[j];
    }
    const struct dots d = {.q = q,
                           .x = x,
                           .soon = soon,
                           .out = part,
                           .out_row = SCORE_TILE,
                           .rows = r->rows,
                           .keys = keys,
                           .dim = s->head_dim,
                           .dtype = s->rows_dtype};
    KVL_CPU_NAME(dots)(&d);
    for (int h = 0; h < r->rows; h++)
      for (int j = 0; j < keys; j += VF)
        best[h] = vf_max(vf_load(part, h * SCORE_TILE + j, KVL_DTYPE_F32), best[h]);
  }
  float joined = s->join == KVL_GROUP_MEAN ? 0 : -INFINITY;
  for (int h = 0; h < r->rows; h++) {
    float of_head = -INFINITY;
    for (int j = 0; j < (int)VF; j++)
      if (best[h][j] > of_head) of_head = best[h][j];
    joined = s->join == KVL_GROUP_MEAN ? joined + of_head
             : of_head > joined        ? of_head
                                       : joined;
  }
  return s->join == KVL_GROUP_MEAN ? joined / (float)r->rows : joined;
}

static int max_qk_piece(const void *args, int64_t begin, int64_t end) {
  const struct score *s = args;
  float q[GROUP_MAX * HEAD_DIM_MAX] __attribute__((aligned(64)));
  for (int64_t item = begin; item < end; item++) {
    const struct run r = run_open(s, item);
    load_group(s, &r, q);
    const char *k = r.begin < r.end ? block_row(s, &r, r.begin) : NULL;
    for (int64_t b = r.begin; b < r.last; b++) {
      const char *next = b + 1 < r.end ? block_row(s, &r, b + 1) : NULL;
      int64_t tokens = i64_min(s->lens[r.seq] - b * s->block_size, s->block_size);
      r.scores[b] = k ? score_block(s, &r, k, next ? next : k, (int)tokens, q) : -INFINITY;
      k = next;
    }
  }
  return 0;
}

KVL_CPU_KERNEL(score_max_qk) {
  const struct kvl_score_max_qk_args *a = args;
  const struct kvl_pages *c = &a->cache;
  struct score s = {
      .q = a->q,
      .tables = a->tables,
      .lens = a->lens,
      .scores = a->scores,
      .seqs = a->seqs,
      .heads = a->heads,
      .kv_heads = c->kv_heads,
      .max_blocks = a->max_blocks,
      .blocks = c->blocks,
      .head_dim = c->key.dim,
      .block_size = c->block_size,
      .join = a->group,
      .dtype = a->dtype,
      .rows = (const char *)c->memory + c->key.begin,
      .bytes_block = c->bytes_page,
      .bytes_head = c->key.bytes,
      .rows_dtype = rows_dtype(c->codec),
      .pages = c,
  };
  return score_run(&s, max_qk_piece);
}
