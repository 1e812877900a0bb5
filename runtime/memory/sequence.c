/* A sequence: the length of its text, and for each cut of the KV memory the blocks that hold
 * its tokens there, in logical order. A cut is one table: all KV has one, or each layer, or
 * each layer and KV head. Cut c of a sequence holds held[c] tokens: all of the text, until
 * some are evicted.
 * Invariant: a cut has ceil(held / block_size) blocks, and the sequence holds one reference
 * on each of them. A block with more references is shared; full blocks are never written
 * again, so only a shared, partly filled last block is ever copied. */
#include "memory/sequence.h"

int kvl_sequence_open(kvl_pool *pool, int layers, int heads, kvl_sequence **out) {
  KVL__NEED(pool);
  KVL__NEED(out);
  if (layers < 1 || heads < 1 || layers > 1 << 12 || heads > 1 << 12)
    return kvl__fail(KVL_ERR_INVALID, "sequence: %d layers of %d heads, expected 1 ... 4096",
                     layers, heads);
  const int cuts = layers * heads;
  kvl_sequence *s = kvl__malloc(sizeof *s + (size_t)cuts * 4 * sizeof *s->held, "a sequence");
  if (!s) return KVL_ERR_NO_MEMORY;
  *s = (kvl_sequence){.pool = pool,
                      .layers = layers,
                      .heads = heads,
                      .cuts = cuts,
                      .serial = ++pool->opened,
                      .lifted = INT32_MAX,
                      .held = (int32_t *)(s + 1)};
  s->base = s->held + cuts;
  s->cap = s->base + cuts;
  s->last = s->cap + cuts;
  memset(s->held, 0, (size_t)cuts * 2 * sizeof *s->held);
  for (int c = 0; c < cuts; c++) s->cap[c] = INT32_MAX;
  pool->holders++;
  *out = s;
  return KVL_OK;
}

static void note_last(kvl_sequence *s, int cut) {
  const int count = kvl__count(s, cut);
  s->last[cut] = count ? kvl__table(s, cut)[count - 1] : -1;
}

/* Makes room for tables of `count` blocks. */
static int grow(kvl_sequence *s, int count) {
  if (count <= s->capacity) return KVL_OK;
  int capacity = s->capacity ? s->capacity : KVL__ROOM(16, 1);
  while (capacity < count) capacity *= 2;
  int32_t *blocks = kvl__realloc(s->blocks, (size_t)s->cuts * capacity * sizeof *blocks,
                                 "the block tables of a sequence");
  if (!blocks) return KVL_ERR_NO_MEMORY;
  for (int c = s->cuts - 1; c > 0; c--) /* the last first: they move up */
    memmove(blocks + (int64_t)c * capacity, blocks + (int64_t)c * s->capacity,
            (size_t)s->capacity * sizeof *blocks);
  s->blocks = blocks;
  s->capacity = capacity;
  return KVL_OK;
}

int kvl_sequence_fork(kvl_sequence *seq, kvl_sequence **out) {
  KVL__NEED(seq);
  KVL__NEED(out);
  kvl_sequence *s;
  int status = kvl_sequence_open(seq->pool, seq->layers, seq->heads, &s);
  if (status < 0) return status;
  status = grow(s, kvl_sequence_blocks(seq));
  if (status < 0) {
    kvl_sequence_close(s);
    return status;
  }
  for (int c = 0; c < s->cuts; c++) {
    const int32_t *from = kvl__table(seq, c);
    for (int i = 0; i < kvl__count(seq, c); i++) {
      kvl__table(s, c)[i] = from[i];
      kvl__pool_hold(s->pool, from[i]);
    }
    s->held[c] = seq->held[c], s->base[c] = seq->base[c], s->cap[c] = seq->cap[c];
    s->last[c] = seq->last[c];
  }
  s->length = seq->length;
  s->floor = seq->floor;
  s->lifted = seq->lifted;
  s->may_share = seq->may_share = 1;
  *out = s;
  return KVL_OK;
}

int kvl_sequence_share(kvl_sequence *seq, const int32_t *blocks, int n) {
  KVL__NEED(seq);
  if (n > 0) KVL__NEED(blocks);
  kvl_pool *p = seq->pool;
  if (n < 0 || n > p->blocks)
    return kvl__fail(KVL_ERR_INVALID, "share: n is %d, expected 0 ... %d", n, p->blocks);
  if (seq->length % p->block_size)
    return kvl__fail(KVL_ERR_INVALID,
                     "share: the sequence has %d tokens, expected a "
                     "multiple of block_size = %d",
                     seq->length, p->block_size);
  if (seq->floor)
    return kvl__fail(KVL_ERR_INVALID,
                     "share: tokens of the sequence were evicted, expected all of them");
  if ((int64_t)seq->length + (int64_t)n * p->block_size > INT32_MAX)
    return kvl__fail(KVL_ERR_INVALID,
                     "share: %d blocks after %d tokens, expected < "
                     "2^31 tokens in all",
                     n, seq->length);
  for (int64_t i = 0; i < (int64_t)seq->cuts * n; i++) {
    int refs = kvl_pool_block_refs(p, blocks[i]);
    if (refs < 0) return refs;
    if (refs == 0)
      return kvl__fail(KVL_ERR_INVALID, "share: block %d is free, expected one that is held",
                       blocks[i]);
  }
  int status = grow(seq, kvl_sequence_blocks(seq) + n);
  if (status < 0) return status;
  for (int c = 0; c < seq->cuts; c++) {
    int32_t *end = kvl__table(seq, c) + kvl__count(seq, c);
    for (int i = 0; i < n; i++) {
      end[i] = blocks[(int64_t)c * n + i];
      kvl__pool_hold(p, end[i]);
    }
    seq->held[c] += n * p->block_size;
    note_last(seq, c);
  }
  seq->length += n * p->block_size;
  seq->may_share = 1;
  return KVL_OK;
}

/* Cuts the tables down to `held` tokens of one cut. */
static void drop(kvl_sequence *seq, int cut, int held) {
  const int32_t *row = kvl__table(seq, cut);
  const int count = kvl__blocks_for(seq->pool, held), old = kvl__count(seq, cut);
  for (int i = old - 1; i >= count; i--) kvl__pool_release(seq->pool, row[i]);
  seq->edits += count < old;
  seq->held[cut] = held;
  if (count < old) note_last(seq, cut);
}

static void shorten(kvl_sequence *seq, int length) {
  for (int c = 0; c < seq->cuts; c++) drop(seq, c, length ? kvl__held_at(seq, c, length) : 0);
  seq->length = length;
  if (length <= seq->lifted) seq->lifted = INT32_MAX;
  if (length > 0) return;
  seq->floor = 0;
  for (int c = 0; c < seq->cuts; c++) seq->base[c] = 0, seq->cap[c] = INT32_MAX;
}

void kvl_sequence_close(kvl_sequence *seq) {
  if (!seq) return;
  kvl_pool *p = seq->pool;
  const int free_before = p->free_count;
  shorten(seq, 0);
  if (seq->fresh) p->evicted += p->free_count - free_before - seq->fresh;
  kvl__pool_unref(p);
  free(seq->blocks);
  free(seq);
}

int kvl_sequence_length(const kvl_sequence *seq) {
  KVL__NEED(seq);
  return seq->length;
}
static int most_held(const kvl_sequence *seq) {
  int most = 0;
  for (int c = 0; c < seq->cuts; c++) most = seq->held[c] > most ? seq->held[c] : most;
  return most;
}
int kvl_sequence_blocks(const kvl_sequence *seq) {
  KVL__NEED(seq);
  return kvl__blocks_for(seq->pool, most_held(seq));
}

static int check_cut(const kvl_sequence *seq, const char *what, int cut) {
  if (cut >= 0 && cut < seq->cuts) return KVL_OK;
  return kvl__fail(KVL_ERR_INVALID, "%s: cut is %d, expected 0 ... %d", what, cut,
                   seq->cuts - 1);
}

int kvl_sequence_held(const kvl_sequence *seq, int cut) {
  KVL__NEED(seq);
  if (cut == -1) return most_held(seq);
  int status = check_cut(seq, "held", cut);
  return status < 0 ? status : seq->held[cut];
}

/* Whether the last block of a cut is partly full and shared. */
static int is_open_shared(const kvl_sequence *seq, int cut) {
  return seq->held[cut] % seq->pool->block_size && seq->pool->refs[seq->last[cut]] > 1;
}

/* Fails if a token would be written to a page that others share. */
static int expect_own_pages(kvl_sequence *seq) {
  if (!seq->may_share) return KVL_OK;
  for (int c = 0; c < seq->cuts; c++)
    for (int i = 0; i < kvl__count(seq, c); i++)
      if (seq->pool->refs[kvl__table(seq, c)[i]] > 1)
        return kvl__fail(KVL_ERR_INVALID,
                         "append: a token would be evicted from block %d, which is shared: "
                         "unshare the sequence first",
                         kvl__table(seq, c)[i]);
  seq->may_share = 0;
  return KVL_OK;
}

/* Lengthens one sequence. Returns how many copies replace last blocks; copies = {from, to,
 * ...}. The places are written cut after cut: those of a layer begin `layer` entries after
 * those of the previous layer, and the heads of a layer follow one another. */
static int append(kvl_sequence *seq, int tokens, int replaces, int64_t *places, int64_t layer,
                  int32_t *copies) {
  kvl_pool *p = seq->pool;
  if (tokens < 0 || tokens > INT32_MAX - seq->length)
    return kvl__fail(KVL_ERR_INVALID, "append: tokens is %d, expected 0 ... %d", tokens,
                     INT32_MAX - seq->length);
  if (tokens == 0) return 0;
  const int size = p->block_size, lifted = seq->lifted;
  if (!replaces && seq->floor && lifted == INT32_MAX) seq->lifted = seq->length;
  int64_t need = 0;
  int widest = 0, is_full = 0;
  for (int c = 0; c < seq->cuts; c++) {
    const int held = kvl__held_at(seq, c, (int64_t)seq->length + tokens);
    is_full |= held < seq->held[c] + tokens;
    widest = held > widest ? held : widest;
    need += kvl__blocks_for(p, held) - kvl__count(seq, c) +
            (held > seq->held[c] && is_open_shared(seq, c));
  }
  int status = is_full ? expect_own_pages(seq) : KVL_OK;
  if (is_full && tokens > 1)
    status = kvl__fail(
        KVL_ERR_INVALID,
        "append: tokens is %d, expected 1: each takes the place of another one", tokens);
  if (status == KVL_OK) status = grow(seq, kvl__blocks_for(p, widest) + 1);
  if (status == KVL_OK) status = kvl__pool_expect(p, need); /* one more: room for the copy */
  if (status < 0) {
    seq->lifted = lifted;
    return status;
  }
  int copied = 0;
  for (int c = 0; c < seq->cuts; c++) {
    int64_t *at = places + c / seq->heads * layer + (int64_t)(c % seq->heads) * tokens;
    const int held = seq->held[c], now = kvl__held_at(seq, c, (int64_t)seq->length + tokens);
    if (now == held) {
      at[0] = -1;
      continue;
    }
    if (held % size && now - held == 1 && !is_open_shared(seq, c)) { /* the usual case */
      at[0] = (int64_t)seq->last[c] * size + held % size;
      seq->held[c] = now;
      continue;
    }
    int32_t *row = kvl__table(seq, c);
    const int old = kvl__count(seq, c), shared = is_open_shared(seq, c);
    const int count = kvl__blocks_for(p, now);
    kvl__pool_take(p, count - old + shared, row + old);
    if (shared) {
      int32_t *copy = copies + 2 * copied++;
      copy[0] = row[old - 1], copy[1] = row[count];
      kvl__pool_release(p, copy[0]);
      row[old - 1] = copy[1];
    }
    for (int i = 0; i < tokens; i++) {
      int index = held + i;
      at[i] = (int64_t)row[index / size] * size + index % size;
    }
    seq->held[c] = now;
    note_last(seq, c);
  }
  seq->edits += copied > 0;
  seq->length += tokens;
  return copied;
}

/* Puts the shared block back in place of its copy, if `copy` is the last, partly full block
 * of a cut. */
static int unshare_undone(kvl_sequence *seq, int cut, const int32_t *copy) {
  if (seq->held[cut] % seq->pool->block_size == 0) return 0;
  int32_t *last = kvl__table(seq, cut) + kvl__count(seq, cut) - 1;
  if (copy[1] != *last) return 0;
  kvl__pool_hold(seq->pool, copy[0]);
  kvl__pool_release(seq->pool, *last);
  *last = seq->last[cut] = copy[0];
  seq->may_share = 1;
  seq->edits++;
  return 1;
}

int kvl_sequences_append(kvl_sequence *const *seqs, const int32_t *tokens, int n,
                         int replaces, int64_t *places, int32_t *copies) {
  KVL__NEED(seqs);
  KVL__NEED(tokens);
  int copied = 0;
  int64_t layer = 0;
  for (int i = 0; i < n; i++) {
    KVL__NEED(seqs[i]);
    if (seqs[i]->layers != seqs[0]->layers || seqs[i]->heads != seqs[0]->heads)
      return kvl__fail(KVL_ERR_INVALID,
                       "append: sequence %d has %d x %d tables, expected "
                       "%d x %d, as the first has",
                       i, seqs[i]->layers, seqs[i]->heads, seqs[0]->layers, seqs[0]->heads);
    layer += tokens[i] > 0 ? (int64_t)tokens[i] * seqs[i]->heads : 0;
  }
  for (int i = 0; i < n; i++) {
    int status = append(seqs[i], tokens[i], replaces, places, layer, copies + 2 * copied);
    if (status < 0) {
      for (int j = i - 1; j >= 0; j--) { /* newest first: copies is a stack */
        for (int c = seqs[j]->cuts - 1; c >= 0 && tokens[j] > 0; c--) {
          const int held = kvl__held_at(seqs[j], c, (int64_t)seqs[j]->length - tokens[j]);
          if (held == seqs[j]->held[c]) continue;
          drop(seqs[j], c, held);
          if (copied > 0) copied -= unshare_undone(seqs[j], c, copies + 2 * (copied - 1));
        }
        seqs[j]->length -= tokens[j];
        if (tokens[j] > 0 && seqs[j]->length <= seqs[j]->lifted) seqs[j]->lifted = INT32_MAX;
      }
      return status;
    }
    copied += status;
    places += (int64_t)tokens[i] * seqs[i]->heads;
  }
  return copied;
}

/* Fails unless the sequence can be shortened to `length` and still has all tokens that it
 * would then hold. A rewind may go back further, because it undoes evictions, too. */
static int check_shorter(const kvl_sequence *seq, const char *what, int length,
                         int is_rewind) {
  if (length < 0 || length > seq->length)
    return kvl__fail(KVL_ERR_INVALID, "%s: length is %d, expected 0 ... %d", what, length,
                     seq->length);
  int first = seq->floor;
  for (int c = 0; c < seq->cuts && !is_rewind && first < seq->length; c++)
    if (kvl__held_at(seq, c, seq->length) < seq->base[c] + seq->length - seq->floor)
      first = seq->length < seq->lifted ? seq->length : seq->lifted; /* some were replaced */
  if (length < first && length > 0) {
    char range[32] = "";
    if (first < seq->length) snprintf(range, sizeof range, "%d ... ", first);
    return kvl__fail(KVL_ERR_INVALID,
                     "%s: length is %d, expected 0 or %s%d: what an eviction left is not cut",
                     what, length, range, seq->length);
  }
  return KVL_OK;
}

int kvl_sequence_truncate(kvl_sequence *seq, int length) {
  KVL__NEED(seq);
  int status = check_shorter(seq, "truncate", length, 0);
  if (status == KVL_OK) shorten(seq, length);
  return status;
}

int kvl_sequences_rewind(kvl_sequence *const *seqs, const int32_t *lengths, int n,
                         const int32_t *copies, int pairs) {
  if (n > 0) {
    KVL__NEED(seqs);
    KVL__NEED(lengths);
  }
  if (pairs > 0) KVL__NEED(copies);
  for (int i = 0; i < n; i++) {
    KVL__NEED(seqs[i]);
    int status = check_shorter(seqs[i], "rewind", lengths[i], 1);
    if (status < 0) return status;
  }
  for (int i = 0; i < pairs && n > 0; i++) {
    int refs = kvl_pool_block_refs(seqs[0]->pool, copies[2 * i]);
    if (refs < 0) return refs;
    if (refs == 0)
      return kvl__fail(KVL_ERR_INVALID, "rewind: block %d is free, expected one that is held",
                       copies[2 * i]);
  }
  for (int i = n - 1; i >= 0; i--) {
    shorten(seqs[i], lengths[i]);
    for (int c = 0; c < seqs[i]->cuts; c++)
      for (int j = 0; j < pairs; j++)
        if (unshare_undone(seqs[i], c, copies + 2 * j)) break;
  }
  return KVL_OK;
}

int kvl_sequence_table(const kvl_sequence *seq, int cut, int32_t *row, int width) {
  KVL__NEED(seq);
  KVL__NEED(row);
  int status = check_cut(seq, "table", cut);
  if (status < 0) return status;
  const int count = kvl__count(seq, cut);
  if (count > width)
    return kvl__fail(KVL_ERR_INVALID,
                     "table: the sequence has %d blocks, expected at most width = %d", count,
                     width);
  for (int i = 0; i < width; i++) row[i] = i < count ? kvl__table(seq, cut)[i] : -1;
  return count;
}

/* ---- eviction -------------------------------------------------------------------------- */

int kvl_sequence_keep(kvl_sequence *seq, const int32_t *kept, const int32_t *caps,
                      kvl_sequence **before) {
  KVL__NEED(seq);
  KVL__NEED(kept);
  KVL__NEED(caps);
  KVL__NEED(before);
  kvl_pool *p = seq->pool;
  int64_t need = 0;
  for (int c = 0; c < seq->cuts; c++) {
    if (kept[c] < 1 || kept[c] > seq->held[c] || caps[c] < kept[c])
      return kvl__fail(KVL_ERR_INVALID,
                       "keep: cut %d keeps %d of its %d tokens and at most %d from now on, "
                       "expected 1 <= kept <= held, and at most no less",
                       c, kept[c], seq->held[c], caps[c]);
    if (kept[c] < seq->held[c]) need += kvl__blocks_for(p, kept[c]);
  }
  if (need > p->free_count)
    return kvl__fail(KVL_ERR_NO_BLOCKS,
                     "out of blocks: an eviction needs %lld, %d of %d free", (long long)need,
                     p->free_count, p->blocks);
  kvl_sequence *old;
  int status = kvl_sequence_open(p, seq->layers, seq->heads, &old);
  if (status == KVL_OK) status = grow(old, seq->capacity);
  if (status < 0) {
    kvl_sequence_close(old);
    return status;
  }
  old->length = seq->length, old->floor = seq->floor, old->lifted = seq->lifted;
  for (int c = 0; c < seq->cuts; c++) {
    old->base[c] = seq->base[c], old->cap[c] = seq->cap[c];
    if (kept[c] < seq->held[c]) { /* the old blocks are those of `old` now */
      memcpy(kvl__table(old, c), kvl__table(seq, c),
             (size_t)kvl__count(seq, c) * sizeof *seq->blocks);
      old->held[c] = seq->held[c], old->last[c] = seq->last[c];
      seq->held[c] = kept[c];
      kvl__pool_take(p, kvl__count(seq, c), kvl__table(seq, c));
      old->fresh += kvl__count(seq, c);
      note_last(seq, c);
    }
    seq->base[c] = kept[c], seq->cap[c] = caps[c];
  }
  seq->floor = seq->length;
  seq->lifted = INT32_MAX;
  seq->edits++;
  *before = old;
  return KVL_OK;
}

int kvl_sequence_restore(kvl_sequence *seq, kvl_sequence *before) {
  KVL__NEED(seq);
  KVL__NEED(before);
  if (seq->pool != before->pool || seq->cuts != before->cuts || before->length != seq->length)
    return kvl__fail(KVL_ERR_INVALID,
                     "restore: the sequences have %d tables and %d tokens, and %d and %d, "
                     "expected what keep made of this sequence, with its length",
                     seq->cuts, seq->length, before->cuts, before->length);
  for (int c = 0; c < seq->cuts; c++) {
    if (before->held[c]) {
      drop(seq, c, 0);
      seq->held[c] = before->held[c], seq->last[c] = before->last[c];
      memcpy(kvl__table(seq, c), kvl__table(before, c),
             (size_t)kvl__count(seq, c) * sizeof *seq->blocks);
      before->held[c] = 0;
    }
    seq->base[c] = before->base[c], seq->cap[c] = before->cap[c];
  }
  seq->floor = before->floor, seq->lifted = before->lifted;
  seq->edits++;
  before->fresh = 0;
  return KVL_OK;
}

int kvl_sequence_grown(const kvl_sequence *seq, int tokens, int replaces) {
  KVL__NEED(seq);
  int64_t most = 0;
  for (int c = 0; c < seq->cuts; c++) {
    const int64_t held = replaces ? kvl__held_at(seq, c, (int64_t)seq->length + tokens)
                                  : (int64_t)seq->held[c] + tokens;
    most = held > most ? held : most;
  }
  return kvl__blocks_for(seq->pool, most);
}

int kvl_sequence_unshare(kvl_sequence *seq, int32_t *copies, int room) {
  KVL__NEED(seq);
  KVL__NEED(copies);
  kvl_pool *p = seq->pool;
  int count = 0;
  for (int c = 0; c < seq->cuts; c++)
    for (int i = 0; i < kvl__count(seq, c); i++) {
      int32_t *block = kvl__table(seq, c) + i;
      if (p->refs[*block] < 2) continue;
      if (count == room) return count;
      int status = kvl__pool_expect(p, 1);
      if (status < 0) return status;
      copies[2 * count] = *block;
      kvl__pool_take(p, 1, copies + 2 * count + 1);
      kvl__pool_release(p, *block);
      *block = copies[2 * count++ + 1];
      note_last(seq, c);
      seq->edits++;
    }
  seq->may_share = 0;
  return count;
}
