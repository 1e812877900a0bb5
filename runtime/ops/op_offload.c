/* Ops that move KV blocks between the host tier and the device, and ops that decide which
 * blocks to move. Each function checks the shapes and launches a kernel; kvlab.h describes
 * the op. */
#include "args/offload.h"
#include "ops/op_args.h"

/* The memory of an optional tensor that was checked, or NULL. */
static void *ptr_of(const kvl_tensor *t) { return t ? t->ptr : NULL; }

/* Expects pages whose tokens can be moved one by one. */
static void expect_single_tokens(struct kvl__call *c, const char *name,
                                 const struct kvl_pages *pages) {
  if (c->status >= 0 && kvl__is_whole(pages->codec))
    kvl__call_fail(c,
                   "%s is %s, whose numbers and scales lie apart, expected another format "
                   "where single tokens move",
                   name, kvl__codec_name(pages->codec));
}

/* Moves blocks or, by_token, tokens. */
static int move(struct kvl__call c, const kvl_tensor *src, const kvl_tensor *from,
                const kvl_tensor *dst, const kvl_tensor *to, const kvl_format *format,
                int by_token, const kvl_tensor *moved) {
  struct kvl_move_blocks_args args = {.rows = 1};
  args.src = kvl__any_pages_arg(&c, "src", src, format,
                                "blocks_src 2 kv_heads block_size head_dim");
  args.dst = kvl__any_pages_arg(&c, "dst", dst, format,
                                "blocks_dst 2 kv_heads block_size head_dim");
  if (by_token) args.rows = args.src.block_size;
  if (by_token) expect_single_tokens(&c, "src", &args.src);
  kvl__expect_same_pages(&c, "dst", &args.dst, &args.src);
  kvl__arg(&c, "from", from, KVL__I32, "seqs lanes n");
  kvl__arg(&c, "to", to, KVL__I32, "seqs lanes n");
  if (kvl__arg(&c, "moved?", moved, KVL__I64, "1")) args.moved = moved->ptr;
  args.lanes = kvl__dim(&c, "lanes");
  if (args.lanes != 1 && args.lanes != args.src.kv_heads)
    kvl__call_fail(&c, "from is for %lld heads, expected 1 or kv_heads = %d",
                   (long long)args.lanes, args.src.kv_heads);
  if (by_token && args.lanes != args.src.kv_heads)
    kvl__call_fail(&c, "from is for %lld heads, expected kv_heads = %d for tokens",
                   (long long)args.lanes, args.src.kv_heads);
  if (c.status < 0) return c.status;
  args.from = from->ptr;
  args.to = to->ptr;
  args.seqs = kvl__dim(&c, "seqs");
  args.n = kvl__dim(&c, "n");
  return KVL__LAUNCH(&c, move_blocks, args);
}

int kvl_move_blocks(const kvl_tensor *src, const kvl_tensor *from, const kvl_tensor *dst,
                    const kvl_tensor *to, const kvl_format *format, const kvl_tensor *moved) {
  return move((struct kvl__call){.op = "move_blocks"}, src, from, dst, to, format, 0, moved);
}

int kvl_move_tokens(const kvl_tensor *src, const kvl_tensor *from, const kvl_tensor *dst,
                    const kvl_tensor *to, const kvl_format *format, const kvl_tensor *moved) {
  return move((struct kvl__call){.op = "move_tokens"}, src, from, dst, to, format, 1, moved);
}

int kvl_cut_selection(const kvl_cut *a) {
  if (!a) return kvl__missing(__func__, "call");
  struct kvl__call c = {.op = "cut_selection"};
  struct kvl_cut_selection_args args = {.block_size = a->block_size};
  kvl__arg(&c, "tables", a->tables, KVL__I32, "seqs max_blocks");
  kvl__arg(&c, "lens", a->lens, KVL__I32, "seqs");
  kvl__arg(&c, "opens", a->opens, KVL__I32, "seqs 2");
  kvl__arg(&c, "logical", a->logical, KVL__I32, "passes seqs heads n");
  kvl__arg(&c, "physical", a->physical, KVL__I32, "passes seqs heads n");
  kvl__arg(&c, "open_logical", a->open_logical, KVL__I32, "seqs heads n_open");
  kvl__arg(&c, "open_slots", a->open_slots, KVL__I32, "seqs heads n_open");
  if (kvl__arg(&c, "selection?", a->selection, KVL__I32, "seqs heads max_selected")) {
    args.selection = a->selection->ptr;
    args.max_selected = kvl__dim(&c, "max_selected");
  } else if (c.status >= 0 && kvl__dim(&c, "heads") != 1) {
    kvl__call_fail(&c, "logical is for %lld heads, expected 1 without a selection",
                   (long long)kvl__dim(&c, "heads"));
  }
  if (a->block_size < 1 || a->block_size > 4096)
    kvl__call_fail(&c, "block_size is %d, expected 1 ... 4096", a->block_size);
  if (c.status < 0) return c.status;
  args.tables = a->tables->ptr;
  args.lens = a->lens->ptr;
  args.opens = a->opens->ptr;
  args.logical = a->logical->ptr;
  args.physical = a->physical->ptr;
  args.open_logical = a->open_logical->ptr;
  args.open_slots = a->open_slots->ptr;
  args.seqs = kvl__dim(&c, "seqs");
  args.heads = kvl__dim(&c, "heads");
  args.max_blocks = kvl__dim(&c, "max_blocks");
  args.passes = kvl__dim(&c, "passes");
  args.n = kvl__dim(&c, "n");
  args.n_open = kvl__dim(&c, "n_open");
  return KVL__LAUNCH(&c, cut_selection, args);
}

/* ---- hot cache ------------------------------------------------------------------------- */

static struct kvl_hot_view hot_arg(struct kvl__call *c, const kvl_hot *h) {
  struct kvl_hot_view view = {.each = 1};
  view.memory = kvl__any_pages_arg(c, "memory", h->memory, h->format,
                                   h->by_token ? "slot_blocks 2 kv_heads block_size head_dim"
                                               : "slots 2 kv_heads block_size head_dim");
  if (h->by_token && c->status >= 0) view.each = view.memory.block_size;
  if (h->by_token) expect_single_tokens(c, "memory", &view.memory);
  kvl__arg(c, "slot_of", h->slot_of, KVL__I32, "kv_heads blocks");
  kvl__arg(c, "block_of", h->block_of, KVL__I32, "kv_heads slots");
  kvl__arg(c, "order", h->order, KVL__I32, "kv_heads slots");
  kvl__arg(c, "priority?", h->priority, KVL__F32, "kv_heads blocks");
  kvl__arg(c, "counters", h->counters, KVL__I64, "5");
  kvl__arg(c, "ahead?", h->ahead, KVL__I32, "kv_heads slots");
  kvl__arg(c, "uses?", h->uses, KVL__F32, "kv_heads blocks");
  kvl__arg(c, "age?", h->age, KVL__F32, "kv_heads blocks");
  if (c->status < 0) return view;
  view.slot_of = h->slot_of->ptr;
  view.block_of = h->block_of->ptr;
  view.order = h->order->ptr;
  view.priority = ptr_of(h->priority);
  view.counters = h->counters->ptr;
  view.ahead = ptr_of(h->ahead);
  view.uses = ptr_of(h->uses);
  view.age = ptr_of(h->age);
  view.blocks = kvl__dim(c, "blocks");
  view.slots = kvl__dim(c, "slots");
  if (view.slots > view.memory.blocks * view.each)
    kvl__call_fail(c, "order has %lld slots, expected at most the %lld tokens of memory",
                   (long long)view.slots, (long long)(view.memory.blocks * view.each));
  if (view.blocks % view.each)
    kvl__call_fail(c, "slot_of is for %lld tokens, expected a multiple of block_size = %lld",
                   (long long)view.blocks, (long long)view.each);
  return view;
}

int kvl_hot_resolve(const kvl_hot *hot, const kvl_resolve *a) {
  KVL__NEED(hot);
  if (!a) return kvl__missing(__func__, "call");
  struct kvl__call c = {.op = "hot_resolve"};
  struct kvl_hot_resolve_args args = {.hot = hot_arg(&c, hot)};
  kvl__arg(&c, "selection", a->selection, KVL__I32, "seqs selection_heads n");
  kvl__arg(&c, "tables", a->tables, KVL__I32, "seqs max_blocks");
  kvl__arg(&c, "slots", a->slots, KVL__I32, "seqs kv_heads n");
  kvl__arg(&c, "miss_from", a->miss_from, KVL__I32, "1 kv_heads misses");
  kvl__arg(&c, "miss_to", a->miss_to, KVL__I32, "1 kv_heads misses");
  int parted = kvl__arg(&c, "hit_logical?", a->hit_logical, KVL__I32, "seqs kv_heads n");
  parted += kvl__arg(&c, "hit_slots?", a->hit_slots, KVL__I32, "seqs kv_heads n");
  parted += kvl__arg(&c, "miss_logical?", a->miss_logical, KVL__I32, "seqs kv_heads n");
  parted += kvl__arg(&c, "miss_slots?", a->miss_slots, KVL__I32, "seqs kv_heads n");
  if (c.status >= 0 && parted != 0 && parted != 4)
    kvl__call_fail(&c,
                   "%d of hit_logical, hit_slots, miss_logical and miss_slots are given, "
                   "expected all or none",
                   parted);
  args.selection_heads = kvl__dim(&c, "selection_heads");
  if (args.selection_heads != 1 && args.selection_heads != args.hot.memory.kv_heads)
    kvl__call_fail(&c, "selection is for %lld heads, expected 1 or kv_heads = %d",
                   (long long)args.selection_heads, args.hot.memory.kv_heads);
  args.seqs = kvl__dim(&c, "seqs");
  args.n = kvl__dim(&c, "n");
  args.max_blocks = kvl__dim(&c, "max_blocks");
  args.is_ahead = a->is_ahead != 0;
  int64_t most = args.seqs * args.n;
  if (c.status >= 0 && kvl__dim(&c, "misses") != most)
    kvl__call_fail(&c, "miss_from has %lld entries per KV head, expected seqs * n = %lld",
                   (long long)kvl__dim(&c, "misses"), (long long)most);
  if (c.status >= 0 && most > args.hot.slots)
    kvl__call_fail(
        &c,
        "%lld sequences may select %lld %s each, expected at most the %lld slots of "
        "the hot cache in all",
        (long long)args.seqs, (long long)args.n, args.hot.each > 1 ? "tokens" : "blocks",
        (long long)args.hot.slots);
  if (c.status < 0) return c.status;
  args.selection = a->selection->ptr;
  args.tables = a->tables->ptr;
  args.slots = a->slots->ptr;
  args.miss_from = a->miss_from->ptr;
  args.miss_to = a->miss_to->ptr;
  args.hit_logical = ptr_of(a->hit_logical);
  args.hit_slots = ptr_of(a->hit_slots);
  args.miss_logical = ptr_of(a->miss_logical);
  args.miss_slots = ptr_of(a->miss_slots);
  args.workspace = kvl__call_workspace(&c, KVL_OP_hot_resolve, &args);
  return KVL__LAUNCH(&c, hot_resolve, args);
}

int kvl_hot_append(const kvl_hot *hot, const kvl_tensor *k, const kvl_tensor *v,
                   const kvl_tensor *places, const kvl_tensor *cache,
                   const kvl_tensor *buffer_places, const kvl_tensor *buffer) {
  KVL__NEED(hot);
  struct kvl__call c = {.op = "hot_append"};
  struct kvl_hot_append_args args = {.hot = hot_arg(&c, hot)};
  args.cache = kvl__any_pages_arg(
      &c, "cache", cache, hot->format,
      hot->by_token ? "cache_blocks" : "blocks 2 kv_heads block_size head_dim");
  if (c.status >= 0 && args.cache.blocks * args.hot.each != args.hot.blocks)
    kvl__call_fail(&c, "cache has %lld blocks, expected %lld", (long long)args.cache.blocks,
                   (long long)(args.hot.blocks / args.hot.each));
  kvl__expect_same_pages(&c, "cache", &args.cache, &args.hot.memory);
  kvl__vector_arg(&c, "k", k, kvl__rows_of(args.cache.codec), "tokens kv_heads head_dim");
  kvl__values_arg(&c, v, hot->format, kvl__like(k));
  kvl__arg(&c, "places", places, KVL__I64, "tokens");
  if (buffer) {
    args.buffer = kvl__any_pages_arg(&c, "buffer", buffer, hot->format,
                                     "buffer_blocks 2 kv_heads block_size head_dim");
    kvl__expect_same_pages(&c, "buffer", &args.buffer, &args.cache);
    kvl__arg(&c, "buffer_places", buffer_places, KVL__I64, "tokens");
  }
  if (c.status < 0) return c.status;
  args.buffer_places = ptr_of(buffer_places);
  args.k = k->ptr;
  args.v = ptr_of(v);
  args.places = places->ptr;
  args.tokens = k->shape[0];
  args.dtype = k->dtype;
  return KVL__LAUNCH(&c, hot_append, args);
}

int kvl_hot_drop(const kvl_hot *hot, const kvl_tensor *blocks) {
  KVL__NEED(hot);
  struct kvl__call c = {.op = "hot_drop"};
  struct kvl_hot_drop_args args = {.hot = hot_arg(&c, hot)};
  kvl__arg(&c, "blocks", blocks, KVL__I32, "n");
  if (c.status < 0) return c.status;
  args.blocks = blocks->ptr;
  args.n = blocks->count;
  return KVL__LAUNCH(&c, hot_drop, args);
}

int kvl_scatter_scores(const kvl_tensor *scores, const kvl_tensor *tables,
                       const kvl_tensor *out) {
  struct kvl__call c = {.op = "scatter_scores"};
  struct kvl_scatter_scores_args args = {0};
  kvl__arg(&c, "scores", scores, KVL__F32, "seqs heads max_blocks");
  kvl__arg(&c, "tables", tables, KVL__I32, "seqs max_blocks");
  kvl__arg(&c, "out", out, KVL__F32, "kv_heads blocks");
  args.heads = kvl__dim(&c, "heads");
  args.kv_heads = kvl__dim(&c, "kv_heads");
  if (args.heads != 1 && args.heads != args.kv_heads)
    kvl__call_fail(&c, "scores are for %lld heads, expected 1 or kv_heads = %lld",
                   (long long)args.heads, (long long)args.kv_heads);
  if (c.status < 0) return c.status;
  args.scores = scores->ptr;
  args.tables = tables->ptr;
  args.out = out->ptr;
  args.seqs = kvl__dim(&c, "seqs");
  args.max_blocks = kvl__dim(&c, "max_blocks");
  args.blocks = kvl__dim(&c, "blocks");
  return KVL__LAUNCH(&c, scatter_scores, args);
}
