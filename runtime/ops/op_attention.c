/* Ops over paged KV memory. Each function checks the shapes and launches a kernel; kvlab.h
 * describes the op. Lengths, tables and selections stay on the device, so their values are
 * not checked here. */
#include <math.h>

#include "args/attention.h"
#include "args/select.h"
#include "core/code.h"
#include "hook.h"
#include "ops/op_args.h"

/* The dtypes of a result that may be f32 or like t. */
static unsigned like_or_f32(const kvl_tensor *t) { return kvl__like(t) | KVL__F32; }

static struct kvl_pages cache_arg(struct kvl__call *c, const kvl_tensor *cache,
                                  const kvl_format *format) {
  return kvl__any_pages_arg(c, "cache", cache, format,
                            "blocks 2 kv_heads block_size head_dim");
}

int kvl_pages_of(const kvl_tensor *cache, const kvl_format *format, kvl_pages *out) {
  KVL__NEED(out);
  struct kvl__call c = {.op = "pages_of"};
  struct kvl_pages pages = cache_arg(&c, cache, format);
  if (c.status >= 0) *out = pages;
  return c.status;
}

int kvl_append_kv(const kvl_tensor *k, const kvl_tensor *v, const kvl_tensor *places,
                  const kvl_tensor *cache, const kvl_format *format) {
  struct kvl__call c = {.op = "append_kv"};
  struct kvl_pages view = cache_arg(&c, cache, format);
  kvl__vector_arg(&c, "k", k, kvl__rows_of(view.codec), "tokens kv_heads head_dim");
  kvl__values_arg(&c, v, format, kvl__like(k));
  kvl__arg(&c, "places", places, KVL__I64, "tokens");
  if (c.status < 0) return c.status;
  struct kvl_append_kv_args args = {.cache = view,
                                    .k = k->ptr,
                                    .v = v ? v->ptr : NULL,
                                    .places = places->ptr,
                                    .tokens = k->shape[0],
                                    .dtype = k->dtype};
  return KVL__LAUNCH(&c, append_kv, args);
}

int kvl_copy_blocks(const kvl_tensor *src, const kvl_tensor *dst, const kvl_tensor *cache) {
  struct kvl__call c = {.op = "copy_blocks"};
  kvl__vector_arg(&c, "cache", cache, KVL__ANY, "blocks ...");
  kvl__arg(&c, "src", src, KVL__I32, "n");
  kvl__arg(&c, "dst", dst, KVL__I32, "n");
  const int64_t blocks = kvl__dim(&c, "blocks");
  const int64_t bytes = blocks ? cache->count / blocks * kvl_dtype_bytes(cache->dtype) : 0;
  if (bytes % 16)
    kvl__call_fail(&c, "cache has blocks of %lld bytes, expected a multiple of 16",
                   (long long)bytes);
  if (c.status < 0) return c.status;
  struct kvl_copy_blocks_args args = {cache->ptr, src->ptr, dst->ptr,
                                      blocks,     bytes,    src->count};
  return KVL__LAUNCH(&c, copy_blocks, args);
}

int kvl_read_blocks(const kvl_tensor *cache, const kvl_format *format,
                    const kvl_tensor *blocks, const kvl_tensor *k, const kvl_tensor *v) {
  struct kvl__call c = {.op = "read_blocks"};
  struct kvl_pages view = cache_arg(&c, cache, format);
  kvl__arg(&c, "blocks", blocks, KVL__I32, "n");
  const unsigned dtypes = kvl__read_of(view.codec);
  int given = kvl__vector_arg(&c, "k?", k, dtypes, "n kv_heads block_size head_dim");
  given += kvl__vector_arg(&c, "v?", v, k ? kvl__like(k) : dtypes,
                           "n kv_heads block_size value_dim");
  if (kvl_tensor_is_frozen(k) || kvl_tensor_is_frozen(v))
    kvl__call_fail(&c, "%s is frozen, expected a tensor that may be written",
                   kvl_tensor_is_frozen(k) ? "k" : "v");
  if (c.status < 0) return c.status;
  if (!given) return KVL_OK;
  struct kvl_read_blocks_args args = {.cache = view,
                                      .blocks = blocks->ptr,
                                      .k = k ? k->ptr : NULL,
                                      .v = v ? v->ptr : NULL,
                                      .n = blocks->count,
                                      .dtype = (k ? k : v)->dtype};
  return KVL__LAUNCH(&c, read_blocks, args);
}

/* A hook, its arguments and its tensors. */
static void hook_args(struct kvl__call *c, const kvl_attention *a,
                      struct kvl_hooked_attention_args *args) {
  if (!a->hook || c->status < 0) return;
  args->hook = kvl__code_hook(a->hook, c->device);
  if (!args->hook)
    kvl__call_fail(c, "hook is %s, expected code that was compiled as a hook for %s",
                   kvl__code_name(a->hook), kvl_device_name(c->device));
  if (a->hook_bytes < 0 || a->hook_bytes > KVL_HOOK_ARGUMENTS_MAX ||
      (a->hook_bytes > 0 && !a->hook_arguments))
    kvl__call_fail(c, "hook_bytes is %d, expected 0 ... %d bytes of hook_arguments",
                   a->hook_bytes, KVL_HOOK_ARGUMENTS_MAX);
  if (a->hook_tensors_count < 0 || a->hook_tensors_count > 8 ||
      (a->hook_tensors_count > 0 && !a->hook_tensors))
    kvl__call_fail(c, "hook_tensors_count is %d, expected 0 ... 8 hook_tensors",
                   a->hook_tensors_count);
  if (c->status < 0) return;
  args->only_keeps = a->hook_only_keeps != 0;
  if (a->hook_bytes > 0) memcpy(args->arguments, a->hook_arguments, (size_t)a->hook_bytes);
  for (int i = 0; i < a->hook_tensors_count; i++)
    kvl__arg(c, "a tensor of the hook", a->hook_tensors[i], KVL__ANY, "...");
}

/* How many heads lists are for: one list for all KV heads, or one for each. */
static int64_t list_heads(struct kvl__call *c, const char *what, const char *dim,
                          const struct kvl_paged_attention_args *args) {
  const int64_t heads = kvl__dim(c, dim);
  if (heads != 1 && heads != args->cache.kv_heads)
    kvl__call_fail(c, "%s for %lld heads, expected 1 or kv_heads = %d", what,
                   (long long)heads, args->cache.kv_heads);
  return heads;
}

int kvl_paged_attention(const kvl_attention *a) {
  if (!a) return kvl__missing(__func__, "call");
  struct kvl__call c = {.op = "paged_attention"};
  struct kvl_hooked_attention_args hooked = {.base = {.scale = (float)a->scale,
                                                      .soft_cap = (float)a->soft_cap,
                                                      .causal = a->causal != 0,
                                                      .window = a->window}};
  struct kvl_paged_attention_args *args = &hooked.base;
  args->cache = cache_arg(&c, a->cache, a->format);
  kvl__vector_arg(&c, "q", a->q, kvl__rows_of(args->cache.codec), "tokens heads head_dim");
  if (a->window < 0) kvl__call_fail(&c, "window is %d, expected >= 0", a->window);
  if (!(a->soft_cap >= 0 && a->soft_cap < INFINITY))
    kvl__call_fail(&c, "soft_cap is %g, expected >= 0 and finite", a->soft_cap);
  kvl__arg(&c, "tables", a->tables, KVL__I32, "seqs max_blocks");
  kvl__arg(&c, "lens", a->lens, KVL__I32, "seqs");
  kvl__expect_groups(&c);
  args->seqs = kvl__dim(&c, "seqs");
  args->tokens = kvl__dim(&c, "tokens");
  if (kvl__arg(&c, "starts?", a->starts, KVL__I32, "seqs+1")) {
    if (a->starts->count != args->seqs + 1)
      kvl__call_fail(&c, "starts has %lld entries, expected seqs + 1 = %lld",
                     (long long)a->starts->count, (long long)args->seqs + 1);
    args->starts = a->starts->ptr;
  } else if (c.status >= 0 && args->tokens != args->seqs) {
    kvl__call_fail(&c, "q has %lld rows for %lld sequences, expected one each, or starts",
                   (long long)args->tokens, (long long)args->seqs);
  }
  if (a->selection && a->listed)
    kvl__call_fail(&c, "selection and listed are given, expected one of the two");
  if (kvl__arg(&c, "selection?", a->selection, KVL__I32,
               "seqs selection_heads max_selected")) {
    args->selection = a->selection->ptr;
    args->selection_heads = list_heads(&c, "selection is", "selection_heads", args);
    args->max_selected = kvl__dim(&c, "max_selected");
  }
  if (kvl__arg(&c, "listed?", a->listed, KVL__I32, "tokens list_heads max_selected")) {
    args->listed = a->listed->ptr;
    args->selection_heads = list_heads(&c, "listed is", "list_heads", args);
    args->max_selected = kvl__dim(&c, "max_selected");
  }
  if (kvl__arg(
          &c, "slots?", a->slots, KVL__I32,
          a->listed ? "tokens slot_heads max_selected" : "seqs slot_heads max_selected")) {
    if (!a->selection && !a->listed)
      kvl__call_fail(&c, "slots are given without a selection or a list");
    args->slots = a->slots->ptr;
    args->slot_heads = list_heads(&c, "slots are", "slot_heads", args);
  }
  if (kvl__vector_arg(&c, "prev_out?", a->prev_out, KVL__F32, "tokens heads value_dim"))
    args->prev_out = a->prev_out->ptr;
  if (kvl__arg(&c, "prev_lse?", a->prev_lse, KVL__F32, "tokens heads"))
    args->prev_lse = a->prev_lse->ptr;
  if (!a->prev_out != !a->prev_lse)
    kvl__call_fail(&c, "prev_%s is given without prev_%s", a->prev_out ? "out" : "lse",
                   a->prev_out ? "lse" : "out");
  if (a->prev_lse && a->lse && a->prev_lse->ptr == a->lse->ptr)
    kvl__call_fail(&c, "lse is prev_lse, expected another tensor");
  if (kvl__arg(&c, "alibi?", a->alibi, KVL__F32, "heads")) args->alibi = a->alibi->ptr;
  kvl__vector_arg(&c, "out", a->out, like_or_f32(a->q), "tokens heads value_dim");
  if (kvl__arg(&c, "lse?", a->lse, KVL__F32, "tokens heads")) args->lse = a->lse->ptr;
  args->max_blocks = kvl__dim(&c, "max_blocks");
  if (kvl__arg(&c, "tree?", a->tree, KVL__U64, "tokens words")) {
    args->tree = a->tree->ptr;
    args->tree_words = (int32_t)kvl__dim(&c, "words");
    if (args->tree_words != 1 && args->tree_words != 2)
      kvl__call_fail(&c, "tree has %d words for a row, expected 1 or 2", args->tree_words);
    if (a->alibi || a->window > 0)
      kvl__call_fail(&c, "tree is given with %s, expected one of the two",
                     a->alibi ? "alibi" : "a window");
  }
  if (kvl__arg(&c, "scores?", a->scores, KVL__F32, "tokens heads room")) {
    const int64_t room = args->max_blocks * args->cache.block_size;
    if (kvl__dim(&c, "room") != room)
      kvl__call_fail(&c, "scores has room for %lld keys, expected %lld",
                     (long long)kvl__dim(&c, "room"), (long long)room);
    hooked.scores = a->scores->ptr;
  }
  hook_args(&c, a, &hooked);
  if (c.status < 0) return c.status;
  args->q = a->q->ptr;
  args->tables = a->tables->ptr;
  args->lens = a->lens->ptr;
  args->out = a->out->ptr;
  args->heads = kvl__dim(&c, "heads");
  args->dtype = a->q->dtype;
  args->out_dtype = a->out->dtype;
  args->workspace = kvl__call_workspace(&c, KVL_OP_paged_attention, args);
  return KVL__LAUNCH(&c, paged_attention, hooked);
}

int kvl_merge_attention(const kvl_tensor *out_a, const kvl_tensor *lse_a,
                        const kvl_tensor *out_b, const kvl_tensor *lse_b,
                        const kvl_tensor *out, const kvl_tensor *lse) {
  struct kvl__call c = {.op = "merge_attention"};
  kvl__vector_arg(&c, "out_a", out_a, KVL__FLOAT, "tokens heads head_dim");
  kvl__arg(&c, "lse_a", lse_a, KVL__F32, "tokens heads");
  kvl__vector_arg(&c, "out_b", out_b, kvl__like(out_a), "tokens heads head_dim");
  kvl__arg(&c, "lse_b", lse_b, KVL__F32, "tokens heads");
  kvl__vector_arg(&c, "out", out, kvl__like(out_a), "tokens heads head_dim");
  kvl__arg(&c, "lse?", lse, KVL__F32, "tokens heads");
  if (c.status < 0) return c.status;
  struct kvl_merge_attention_args args = {
      out_a->ptr,   out_b->ptr,      lse_a->ptr,  lse_b->ptr, out->ptr, lse ? lse->ptr : NULL,
      lse_a->count, out_a->shape[2], out_a->dtype};
  return KVL__LAUNCH(&c, merge_attention, args);
}

/* ---- block summaries and scores -------------------------------------------------------- */

int kvl_block_minmax(const kvl_tensor *cache, const kvl_format *format,
                     const kvl_tensor *blocks, const kvl_tensor *tokens,
                     const kvl_tensor *rows, const kvl_tensor *summary) {
  struct kvl__call c = {.op = "block_minmax"};
  struct kvl_pages view = cache_arg(&c, cache, format);
  kvl__arg(&c, "blocks", blocks, KVL__I32, "n");
  kvl__arg(&c, "tokens", tokens, KVL__I32, "n");
  kvl__arg(&c, "rows?", rows, KVL__I32, "n");
  kvl__vector_arg(&c, "summary", summary,
                  kvl__packs(view.codec) ? KVL__FLOAT : 1u << view.codec,
                  "summary_rows 2 kv_heads head_dim");
  if (c.status < 0) return c.status;
  struct kvl_block_minmax_args args = {
      view,         blocks->ptr,   tokens->ptr,       rows ? rows->ptr : NULL,
      summary->ptr, blocks->count, summary->shape[0], summary->dtype};
  return KVL__LAUNCH(&c, block_minmax, args);
}

int kvl_block_mean(const kvl_tensor *cache, const kvl_format *format,
                   const kvl_tensor *blocks, const kvl_tensor *tokens, const kvl_tensor *rows,
                   const kvl_tensor *summary) {
  struct kvl__call c = {.op = "block_mean"};
  struct kvl_pages view = cache_arg(&c, cache, format);
  kvl__arg(&c, "blocks", blocks, KVL__I32, "n");
  kvl__arg(&c, "tokens", tokens, KVL__I32, "n");
  kvl__arg(&c, "rows?", rows, KVL__I32, "n");
  kvl__vector_arg(&c, "summary", summary, kvl__rows_of(view.codec),
                  "summary_rows kv_heads head_dim");
  if (c.status < 0) return c.status;
  struct kvl_block_mean_args args = {
      view,         blocks->ptr,   tokens->ptr,       rows ? rows->ptr : NULL,
      summary->ptr, blocks->count, summary->shape[0], summary->dtype};
  return KVL__LAUNCH(&c, block_mean, args);
}

/* Checks the arguments that all scores have in common. The caller checks the summary. */
static void score_args(struct kvl__call *c, const kvl_tensor *q, const kvl_tensor *tables,
                       const kvl_tensor *lens, int group, const kvl_tensor *scores) {
  kvl__vector_arg(c, "q", q, KVL__FLOAT, "seqs heads head_dim");
  kvl__arg(c, "tables", tables, KVL__I32, "seqs max_blocks");
  kvl__arg(c, "lens", lens, KVL__I32, "seqs");
  kvl__arg(c, "scores", scores, KVL__F32, "seqs kv_heads max_blocks");
  kvl__expect_head_dim(c, KVL__LATENT_MAX);
  kvl__expect_groups(c);
  if (group != KVL_GROUP_MAX && group != KVL_GROUP_MEAN)
    kvl__call_fail(c, "group is %d, expected %d (max) or %d (mean)", group, KVL_GROUP_MAX,
                   KVL_GROUP_MEAN);
}

#define SCORE_SUMMARY_ARGS                                                               \
  {                                                                                      \
    q->ptr, summary->ptr, tables->ptr, lens->ptr, scores->ptr, kvl__dim(&c, "seqs"),     \
        kvl__dim(&c, "heads"), kvl__dim(&c, "kv_heads"), kvl__dim(&c, "head_dim"),       \
        kvl__dim(&c, "max_blocks"), kvl__dim(&c, "blocks"), block_size, group, q->dtype, \
        summary->dtype                                                                   \
  }

int kvl_score_minmax(const kvl_tensor *q, const kvl_tensor *summary, const kvl_tensor *tables,
                     const kvl_tensor *lens, int block_size, int group,
                     const kvl_tensor *scores) {
  struct kvl__call c = {.op = "score_minmax"};
  kvl__vector_arg(&c, "summary", summary, KVL__CACHE, "blocks 2 kv_heads head_dim");
  score_args(&c, q, tables, lens, group, scores);
  kvl__expect_block_size(&c, block_size);
  if (c.status < 0) return c.status;
  struct kvl_score_minmax_args args = {SCORE_SUMMARY_ARGS};
  return KVL__LAUNCH(&c, score_minmax, args);
}

int kvl_score_mean(const kvl_tensor *q, const kvl_tensor *summary, const kvl_tensor *tables,
                   const kvl_tensor *lens, int block_size, int group,
                   const kvl_tensor *scores) {
  struct kvl__call c = {.op = "score_mean"};
  kvl__vector_arg(&c, "summary", summary, KVL__FLOAT, "blocks kv_heads head_dim");
  score_args(&c, q, tables, lens, group, scores);
  kvl__expect_block_size(&c, block_size);
  if (c.status < 0) return c.status;
  struct kvl_score_mean_args args = {SCORE_SUMMARY_ARGS};
  return KVL__LAUNCH(&c, score_mean, args);
}

int kvl_score_max_qk(const kvl_tensor *q, const kvl_tensor *cache, const kvl_format *format,
                     const kvl_tensor *tables, const kvl_tensor *lens, int group,
                     const kvl_tensor *scores) {
  struct kvl__call c = {.op = "score_max_qk"};
  struct kvl_pages view = cache_arg(&c, cache, format);
  score_args(&c, q, tables, lens, group, scores);
  if (c.status < 0) return c.status;
  struct kvl_score_max_qk_args args = {view,
                                       q->ptr,
                                       tables->ptr,
                                       lens->ptr,
                                       scores->ptr,
                                       kvl__dim(&c, "seqs"),
                                       kvl__dim(&c, "heads"),
                                       kvl__dim(&c, "max_blocks"),
                                       group,
                                       q->dtype};
  return KVL__LAUNCH(&c, score_max_qk, args);
}

/* ---- selection ------------------------------------------------------------------------- */

int kvl_budget_blocks(const kvl_budget *budget, int n) {
  struct kvl__call c = {.op = "budget"};
  kvl__expect_budget(&c, budget);
  if (n < 0) kvl__call_fail(&c, "n is %d, expected >= 0", n);
  return c.status < 0 ? c.status : kvl__budget_blocks(*budget, n);
}

/* Expects as many heads as lists, or one for all lists. */
static int64_t expect_list_heads(struct kvl__call *c, const char *name, const char *dim) {
  const int64_t heads = kvl__dim(c, dim), lists = kvl__dim(c, "selection_heads");
  if (heads != lists && heads != 1)
    kvl__call_fail(c, "%s are for %lld heads, expected %lld or 1", name, (long long)heads,
                   (long long)lists);
  return heads;
}

int kvl_select(const kvl_tensor *scores, const kvl_tensor *lens, int block_size,
               const kvl_budget *budget, const kvl_tensor *limits,
               const kvl_tensor *selection, const kvl_tensor *counts) {
  struct kvl__call c = {.op = "select"};
  kvl__arg(&c, "scores", scores, KVL__F32, "seqs score_heads max_blocks");
  kvl__arg(&c, "lens", lens, KVL__I32, "seqs");
  kvl__arg(&c, "selection", selection, KVL__I32, "seqs selection_heads max_selected");
  kvl__arg(&c, "counts?", counts, KVL__I32, "seqs selection_heads");
  const int64_t score_heads = expect_list_heads(&c, "scores", "score_heads");
  const struct kvl_limits of_lists = kvl__limits_arg(&c, limits);
  kvl__expect_block_size(&c, block_size);
  kvl__expect_budget(&c, budget);
  if (c.status < 0) return c.status;
  struct kvl_select_args args = {.scores = scores->ptr,
                                 .lens = lens->ptr,
                                 .selection = selection->ptr,
                                 .counts = counts ? counts->ptr : NULL,
                                 .seqs = kvl__dim(&c, "seqs"),
                                 .selection_heads = kvl__dim(&c, "selection_heads"),
                                 .max_blocks = kvl__dim(&c, "max_blocks"),
                                 .max_selected = kvl__dim(&c, "max_selected"),
                                 .score_heads = score_heads,
                                 .limits = of_lists,
                                 .budget = *budget,
                                 .block_size = block_size};
  args.workspace = kvl__call_workspace(&c, KVL_OP_select, &args);
  return KVL__LAUNCH(&c, select, args);
}

int kvl_trim_selection(const kvl_tensor *weights, const kvl_tensor *lens, int block_size,
                       double mass, int sink, int recent, const kvl_tensor *selection,
                       const kvl_tensor *counts) {
  struct kvl__call c = {.op = "trim_selection"};
  kvl__arg(&c, "weights", weights, KVL__F32, "seqs weight_heads max_blocks");
  kvl__arg(&c, "lens", lens, KVL__I32, "seqs");
  kvl__arg(&c, "selection", selection, KVL__I32, "seqs selection_heads max_selected");
  kvl__arg(&c, "counts?", counts, KVL__I32, "seqs selection_heads");
  const int64_t weight_heads = expect_list_heads(&c, "weights", "weight_heads");
  kvl__expect_block_size(&c, block_size);
  if (!(mass >= 0 && mass <= 1)) kvl__call_fail(&c, "mass is %g, expected 0 ... 1", mass);
  if (sink < 0 || recent < 0)
    kvl__call_fail(&c, "sink is %d and recent %d, expected >= 0", sink, recent);
  if (c.status < 0) return c.status;
  struct kvl_trim_selection_args args = {weights->ptr,
                                         lens->ptr,
                                         selection->ptr,
                                         counts ? counts->ptr : NULL,
                                         kvl__dim(&c, "seqs"),
                                         kvl__dim(&c, "selection_heads"),
                                         kvl__dim(&c, "max_blocks"),
                                         kvl__dim(&c, "max_selected"),
                                         weight_heads,
                                         mass,
                                         block_size,
                                         sink,
                                         recent};
  return KVL__LAUNCH(&c, trim_selection, args);
}
