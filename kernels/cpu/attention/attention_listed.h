/* Attention over listed tokens: every row of q reads those that its list names. The inner
 * loops are those of other attention, for which a row of q is a sequence of its own; the walk
 * over the keys follows the list instead of the blocks.
 *
 * Limit   memory, which is read in scattered runs of head_dim elements
 *
 * paged_attention.c alone includes this file. */
#ifndef KVL_CPU_ATTENTION_LISTED_H
#define KVL_CPU_ATTENTION_LISTED_H

#include "cpu/attention/attention.h"
#include "cpu/split.h"

/* The sequence that row `token` of q belongs to, and the number of its rows after this one;
 * -1 if there is none. */
static int64_t sequence_of(const struct kvl_paged_attention_args *a, int64_t token,
                           int64_t *after) {
  *after = 0;
  if (!a->starts) return token;
  int64_t low = 0, high = a->seqs + 1; /* how many starts are not behind the token? */
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (a->starts[middle] <= token) low = middle + 1;
    else high = middle;
  }
  if (low == 0 || low > a->seqs) return -1;
  *after = a->starts[low] - token - 1;
  return low - 1;
}

/* The walk over a row's list for a KV head. All rows of the task are heads of one token. */
static struct key_walk open_list(const struct task *t) {
  const struct kvl_paged_attention_args *a = t->args;
  struct key_walk walk = walk_open(t, 0, a->max_selected);
  const int64_t lists = a->selection_heads, slots = a->slot_heads;
  walk.listed = a->listed +
                a->max_selected * (t->token * lists + (lists > 1 ? t->kv_head : 0));
  if (a->slots)
    walk.slots = a->slots +
                 a->max_selected * (t->token * slots + (slots > 1 ? t->kv_head : 0));
  return walk;
}

/* Attends for one token with up to TASK_ROWS heads of a KV head's group, from `first` on. */
static void attend_listed(const struct kvl_hooked_attention_args *hooked, int64_t token,
                          int64_t kv_head, int first) {
  const struct kvl_paged_attention_args *a = &hooked->base;
  const int group = (int)(a->heads / a->cache.kv_heads);
  int64_t after, seq = sequence_of(a, token, &after);
  if (seq < 0) return;
  struct task t = {.args = a,
                   .hooked = hooked->hook || hooked->scores ? hooked : NULL,
                   .seq = seq,
                   .token = token,
                   .row = first,
                   .kv_head = (int)kv_head,
                   .group = group,
                   .rows = (int)i64_min(TASK_ROWS, group - first),
                   .len = sequence_len(a, seq)};
  set_rows(&t, (int32_t)(t.len - 1 - after), TASK_ROWS);
  struct sums sums;
  attend(&t, open_list(&t), &sums);
  const int padded = dim_padded(a->cache.value.dim);
  for (int i = 0; i < t.rows; i++)
    row_write(a, token * a->heads + task_head(&t, i), sums.values + i * padded, sums.top[i],
              sums.sum[i]);
}

/* A task is a token and a KV head. Consecutive tasks share a token's list. */
static int attend_lists(const void *args, int64_t begin, int64_t end) {
  const struct kvl_hooked_attention_args *hooked = args;
  const int64_t kv_heads = hooked->base.cache.kv_heads, group = hooked->base.heads / kv_heads;
  for (int64_t i = begin; i < end; i++)
    for (int64_t first = 0; first < group; first += TASK_ROWS)
      attend_listed(hooked, i / kv_heads, i % kv_heads, (int)first);
  return 0;
}

static int run_listed(const struct kvl_hooked_attention_args *hooked) {
  const struct kvl_paged_attention_args *a = &hooked->base;
  const int64_t work = a->max_selected * (a->cache.key.dim + a->cache.value.dim) *
                       (a->heads / a->cache.kv_heads);
  return kvl__split(a->tokens * a->cache.kv_heads, kvl__grain_rows(work), attend_lists,
                    hooked);
}

#endif
