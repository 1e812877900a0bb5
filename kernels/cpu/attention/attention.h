/* What the two inner loops of paged attention share: the rows of a task, the walk over the
 * keys that they see, and the state of an online softmax.
 *
 * A task is (sequence, KV head, tile of rows, segment of the block list). Its rows are
 * consecutive pairs (query row, head of the group), ordered by query row, so that indices
 * ascend and all rows of the tile read the same K and V. */
#ifndef KVL_CPU_ATTENTION_H
#define KVL_CPU_ATTENTION_H

#include "args/attention.h"
#include "cpu/dots.h"
#include "cpu/lanes.h"
#include "cpu/strip.h"
#include "hook.h"

/* A tile has enough keys to pay for the rescaling of the softmax, and so few that their K and
 * V stay in the first-level cache at head_dim 64. A task has enough rows to pay for
 * converting K and V once per task, and so few that Q and the sums stay in the second-level
 * cache. With AVX-512 a panel of attend_many has 64 rows, too many for 16 of them. */
enum { TILE_KEYS = 64, TASK_ROWS = 128, FEW_ROWS = VF == 16 ? 16 : 8 };

struct task {
  const struct kvl_paged_attention_args *args;
  const struct kvl_hooked_attention_args
      *hooked;        /* NULL: neither a hook nor scores to store */
  int64_t seq, token; /* token: row of q that row 0 belongs to */
  int64_t row;        /* index of row 0 in the sequence's query rows x group */
  int kv_head, group, rows;
  int32_t len;
  int32_t index[TASK_ROWS] __attribute__((aligned(64))); /* their own */
  int32_t first[TASK_ROWS] __attribute__((aligned(64))); /* of the window, or 0 */
  float slope[TASK_ROWS] __attribute__((aligned(64)));   /* ALiBi, or 0 */
};

/* The sums of one task. Row r of `values` is dim_padded(dim of a value) long, and still to be
 * divided by sum[r]. Weights are e^(score - top). */
struct sums {
  float values[TASK_ROWS * HEAD_DIM_MAX] __attribute__((aligned(64)));
  float top[TASK_ROWS] __attribute__((aligned(64)));
  float sum[TASK_ROWS] __attribute__((aligned(64)));
};

static inline int64_t task_token(const struct task *t, int i) {
  return t->token + (t->row + i) / t->group;
}
static inline int64_t task_head(const struct task *t, int i) {
  return (int64_t)t->kv_head * t->group + (t->row + i) % t->group;
}

/* ---- keys ------------------------------------------------------------------------- */

/* The addresses of some valid keys, of one block or of several, and of their scales if the
 * codec packs numbers. The V of a key, and its scales, lie key_walk's `value` bytes after
 * those of its K. */
struct key_tile {
  const char *k[TILE_KEYS], *scales[TILE_KEYS];
  int32_t index[TILE_KEYS];
  int n;
};

struct key_walk {
  const char *cache; /* K of this KV head in block 0 */
  const int32_t *table, *selection;
  const int32_t *listed; /* tokens, instead of blocks */
  /* The block of each entry of the selection, or where each listed token lies: block *
   * block_size + offset. NULL: as in table. */
  const int32_t *slots;
  int64_t blocks, bytes_block, bytes_token, value;
  int64_t scales, bytes_scales; /* from a strip to its scales; of a token, or 0 */
  int64_t entry, entry_end;     /* index into the selection, or logical block */
  int64_t start, end;           /* indices of keys that some row may see */
  int64_t index;                /* of the next token of the open block */
  int64_t left;                 /* tokens of the open block still to come */
  const char *next, *next_scales;
  int32_t block_size;
};

/* Opens the next block that exists. Returns 0 if there is none. Entries of the table,
 * selection or slots that are out of range are skipped, because their memory must not be
 * read. */
static inline int walk_block(struct key_walk *w) {
  while (w->left == 0 && w->entry < w->entry_end) {
    int64_t entry = w->entry++, logical = w->selection ? w->selection[entry] : entry;
    int64_t begin = logical * w->block_size, end = begin + w->block_size;
    if (logical < 0 || begin >= w->end || end <= w->start) continue;
    int64_t block = w->slots ? w->slots[entry] : w->table[logical];
    if (block < 0 || block >= w->blocks) continue;
    w->index = begin > w->start ? begin : w->start;
    const char *strip = w->cache + block * w->bytes_block;
    w->next = strip + (w->index - begin) * w->bytes_token;
    w->next_scales = strip + w->scales + (w->index - begin) * w->bytes_scales;
    w->left = (end < w->end ? end : w->end) - w->index;
  }
  return w->left > 0;
}

/* Takes the next tokens of a list, without those that no row may see. */
static inline void walk_listed(struct key_walk *w, struct key_tile *tile) {
  int n = 0;
  for (; n < TILE_KEYS && w->entry < w->entry_end; w->entry++) {
    const int64_t index = w->listed[w->entry];
    if (index < w->start || index >= w->end) continue;
    const int64_t size = w->block_size, slot = w->slots ? w->slots[w->entry] : 0;
    const int64_t token = (w->slots ? slot : index) % size;
    const int64_t block = w->slots ? slot / size : w->table[index / size];
    if (slot < 0 || block < 0 || block >= w->blocks) continue;
    const char *strip = w->cache + block * w->bytes_block;
    tile->k[n] = strip + token * w->bytes_token;
    tile->scales[n] = strip + w->scales + token * w->bytes_scales;
    tile->index[n++] = (int32_t)index;
  }
  tile->n = n;
}

static inline void walk_tile(struct key_walk *w, struct key_tile *tile) {
  if (w->listed) {
    walk_listed(w, tile);
    return;
  }
  int n = 0;
  while (n < TILE_KEYS && walk_block(w)) {
    int take = w->left < TILE_KEYS - n ? (int)w->left : TILE_KEYS - n;
    for (int i = 0; i < take; i++) {
      tile->k[n + i] = w->next + i * w->bytes_token;
      tile->index[n + i] = (int32_t)(w->index + i);
    }
    for (int i = 0; w->bytes_scales > 0 && i < take; i++)
      tile->scales[n + i] = w->next_scales + i * w->bytes_scales;
    w->next += take * w->bytes_token;
    w->next_scales += take * w->bytes_scales;
    w->index += take;
    w->left -= take;
    n += take;
  }
  tile->n = n;
}

/* Unpacks the K of a tile, or the V that lie `value` bytes further on, into rows of `step`
 * floats. Prefetches those of the next tile. */
static inline void unpack_tile(const struct kvl_strips *of, const struct key_tile *tile,
                               const struct key_tile *next, int64_t value, int codec,
                               float *out, int step) {
  for (int k = 0; k < tile->n; k++) {
    const char *row = tile->k[k] + value;
    const char *scales = of->groups > 0 ? tile->scales[k] + value : NULL;
    KVL_BY_PACKED(codec, unpack_row(of, row, scales, D, out + k * step), )
    if (next && k < next->n) {
      prefetch(next->k[k] + value, 0, of->bytes_row);
      if (scales) prefetch(next->scales[k] + value, 0, 1);
    }
  }
}

/* The task's row of a list [seqs, heads, max_selected]; heads is 1 if all KV heads share a
 * row. */
static inline int64_t list_row(const struct task *t, int64_t heads) {
  return t->seq * heads + (heads > 1 ? t->kv_head : 0);
}

/* The walk of task `t` over entries [begin, end) of its block list. */
static inline struct key_walk walk_open(const struct task *t, int64_t begin, int64_t end) {
  const struct kvl_paged_attention_args *a = t->args;
  const struct kvl_pages *c = &a->cache;
  const int64_t key = kvl__strip_at(c, &c->key, 0, t->kv_head);
  int64_t seen = t->len;
  if (a->causal && t->index[t->rows - 1] + 1 < seen) seen = t->index[t->rows - 1] + 1;
  int64_t list = a->max_selected * list_row(t, a->selection_heads);
  int64_t slots = a->max_selected * list_row(t, a->slot_heads);
  int64_t entries = a->selection || a->listed ? a->max_selected : a->max_blocks;
  return (struct key_walk){
      .cache = (const char *)c->memory + key,
      .table = a->tables + t->seq * a->max_blocks,
      .selection = a->selection ? a->selection + list : NULL,
      .slots = a->slots ? a->slots + slots : NULL,
      .blocks = c->blocks,
      .bytes_block = c->bytes_page,
      .bytes_token = c->key.bytes_row,
      .scales = c->key.scales,
      .bytes_scales = 2 * c->key.groups,
      .value = kvl__strip_at(c, &c->value, 0, t->kv_head) - key,
      .entry = begin,
      .entry_end = end < entries ? end : entries,
      .start = t->first[0],
      .end = seen,
      .block_size = c->block_size,
  };
}

/* ---- scores ----------------------------------------------------------------------- */

/* The factor of q with which its dot products with stored keys are scores or, if there is a
 * soft cap, arguments of its tanh. */
static inline float query_scale(const struct task *t) {
  const struct kvl_paged_attention_args *a = t->args;
  float scale = a->cache.k_scale ? a->scale * a->cache.k_scale[t->kv_head] : a->scale;
  return a->soft_cap > 0 ? scale / a->soft_cap : scale;
}

/* The first index that a draft tree says something about; without one, INT32_MAX. */
static inline int32_t tree_begin(const struct task *t) {
  return t->args->tree ? t->len - 64 * t->args->tree_words : INT32_MAX;
}

/* Does the tree hide the key at `index`, which is tree_begin or later, from row r? */
static inline int tree_hides(const struct task *t, int r, int32_t index) {
  const uint64_t *seen = t->args->tree + task_token(t, r) * t->args->tree_words;
  int32_t back = t->len - 1 - index;
  return !(seen[back / 64] >> (back % 64) & 1);
}

/* May part of the tile be hidden from a row that sees indices [first, own]? Indices ascend,
 * except in a list; a list has only tokens that its row sees, unless a tree hides some. */
static inline int hides_keys(const struct task *t, const struct key_tile *tile, int n,
                             int32_t first, int32_t own) {
  if (t->args->listed) return t->args->tree != NULL;
  return (t->args->causal && tile->index[n - 1] > own) || tile->index[0] < first ||
         tile->index[n - 1] >= tree_begin(t);
}

/* Calls the hook for row r of the task and the keys of a tile. */
static inline void hook_row(const struct task *t, int r, const int32_t *indices, int n,
                            float *scores) {
  const struct kvl_paged_attention_args *a = t->args;
  const struct kvl_hook_row row = {.seq = t->seq,
                                   .kv_heads = a->cache.kv_heads,
                                   .kv_head = t->kv_head,
                                   .head = (int32_t)((t->row + r) % t->group),
                                   .length = t->len,
                                   .query_index = t->index[r]};
  ((kvl_hook *)t->hooked->hook)(t->hooked->arguments, &row, indices, n, scores);
}

/* The address at which the score of row r and the key at index 0 is stored. */
static inline float *kept_scores(const struct task *t, int r) {
  const struct kvl_paged_attention_args *a = t->args;
  int64_t row = task_token(t, r) * a->heads + task_head(t, r);
  return t->hooked->scores + row * a->max_blocks * a->cache.block_size;
}

/* Attends from up to FEW_ROWS rows to the keys of a walk (attention_few.h). */
void KVL_CPU_NAME(attend_few)(const struct task *t, struct key_walk walk, struct sums *s);

static inline void sums_clear(struct sums *s, int rows, int padded) {
  memset(s->values, 0, (size_t)rows * padded * sizeof(float));
  for (int i = 0; i < rows; i++) s->top[i] = -INFINITY, s->sum[i] = 0;
}

#endif
