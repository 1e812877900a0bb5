/* Arguments of the ops that move blocks between tiers, and of the hot cache.
 * Shapes, dtypes and meanings are those of runtime/kvlab.h; optional pointers may be NULL. */
#ifndef KVL_ARGS_OFFLOAD_H
#define KVL_ARGS_OFFLOAD_H

#include "page.h"

struct kvl_move_blocks_args {
  struct kvl_pages src, dst; /* may differ in memory, blocks and pinned only */
  const int32_t *from, *to;  /* [seqs, lanes, n] */
  int64_t *moved;            /* optional */
  int64_t seqs, lanes, n;    /* lanes: 1 or kv_heads */
  int64_t rows; /* 1 to move blocks, else the tokens of a block, which then move one by one */
};
struct kvl_cut_selection_args {
  const int32_t *selection; /* optional [seqs, heads, max_selected] */
  const int32_t *tables, *lens;
  const int32_t *opens;               /* [seqs, 2] */
  int32_t *logical, *physical;        /* [passes, seqs, heads, n] */
  int32_t *open_logical, *open_slots; /* [seqs, heads, n_open] */
  int64_t seqs, heads, max_selected, max_blocks, passes, n, n_open;
  int32_t block_size;
};

/* One layer of a hot cache, see runtime/kvlab.h. Where slots hold single tokens, a block below
 * is a token: number `block * each + offset` of the host tier, and slot s is in block s / each
 * of memory. */
struct kvl_hot_view {
  struct kvl_pages memory;
  int32_t *slot_of;          /* [kv_heads, blocks] */
  int32_t *block_of, *order; /* [kv_heads, slots] */
  const float *priority;     /* optional [kv_heads, blocks] */
  int64_t *counters;         /* [5] */
  int32_t *ahead;            /* optional [kv_heads, slots] */
  float *uses, *age;         /* optional [kv_heads, blocks] */
  int64_t blocks;            /* of the host tier */
  int64_t each;              /* how many of these a block has: 1, or its tokens */
  int64_t slots;             /* of each KV head */
};
struct kvl_hot_resolve_args {
  struct kvl_hot_view hot;
  const int32_t *selection;     /* [seqs, selection_heads, n] */
  const int32_t *tables;        /* [seqs, max_blocks] */
  int32_t *slots;               /* [seqs, kv_heads, n] */
  int32_t *miss_from, *miss_to; /* [kv_heads, seqs * n] */
  int32_t *hit_logical, *hit_slots, *miss_logical, *miss_slots; /* all or none */
  void *workspace;
  int64_t seqs, selection_heads, n, max_blocks;
  int32_t is_ahead;
};
struct kvl_hot_append_args {
  struct kvl_hot_view hot;
  struct kvl_pages cache;  /* the host tier */
  struct kvl_pages buffer; /* kv NULL: none */
  const void *k, *v;
  const int64_t *places; /* of the host tier */
  const int64_t *buffer_places;
  int64_t tokens;
  int32_t dtype; /* of k and v */
};
struct kvl_hot_drop_args {
  struct kvl_hot_view hot;
  const int32_t *blocks;
  int64_t n;
};
struct kvl_scatter_scores_args {
  const float *scores;   /* [seqs, heads, max_blocks] */
  const int32_t *tables; /* [seqs, max_blocks] */
  float *out;            /* [kv_heads, blocks] */
  int64_t seqs, heads, kv_heads, max_blocks, blocks;
};

#endif
