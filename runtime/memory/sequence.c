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
  kvl_sequence *s = kvl__malloc(sizeof *s + (size_t)cuts * sizeof *s->held, "a sequence");
  if (!s) return KVL_ERR_NO_MEMORY;
  *s = (kvl_sequence){.pool = pool,
                      .layers = layers,
                      .heads = heads,
                      .cuts = cuts,
                      .serial = ++pool->opened,
                      .held = (int32_t *)(s + 1)};
  memset(s->held, 0, (size_t)cuts * sizeof *s->held);
  pool->holders++;
  *out = s;
  return KVL_OK;
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

int kvl_sequence_fork(const kvl_sequence *seq, kvl_sequence **out) {
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
    s->held[c] = seq->held[c];
  }
  s->length = seq->length;
  s->floor = seq->floor;
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
  }
  seq->length += n * p->block_size;
  return KVL_OK;
}

/* Cuts the tables down to `held` tokens of one cut. */
static void drop(kvl_sequence *seq, int cut, int held) {
  const int32_t *row = kvl__table(seq, cut);
  const int count = kvl__blocks_for(seq->pool, held), old = kvl__count(seq, cut);
  for (int i = old - 1; i >= count; i--) kvl__pool_release(seq->pool, row[i]);
  seq->edits += count < old;
  seq->held[cut] = held;
}

void kvl_sequence_close(kvl_sequence *seq) {
  if (!seq) return;
  kvl_sequence_truncate(seq, 0);
  kvl__pool_unref(seq->pool);
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

/* The last block of a cut is partly full and shared. */
static int is_open_shared(const kvl_sequence *seq, int cut) {
  const int size = seq->pool->block_size;
  return seq->held[cut] % size &&
         seq->pool->refs[kvl__table(seq, cut)[kvl__count(seq, cut) - 1]] > 1;
}

/* Lengthens one sequence. Returns how many copies take the place of last blocks; copies =
 * {from, to, ...}. Its places are those of cut after cut: a layer's begin `layer` entries
 * after the one's before, and the heads of a layer lie one after the other. */
static int append(kvl_sequence *seq, int tokens, int64_t *places, int64_t layer,
                  int32_t *copies) {
  kvl_pool *p = seq->pool;
  if (tokens < 0 || tokens > INT32_MAX - seq->length)
    return kvl__fail(KVL_ERR_INVALID, "append: tokens is %d, expected 0 ... %d", tokens,
                     INT32_MAX - seq->length);
  if (tokens == 0) return 0;
  const int size = p->block_size;
  int64_t need = 0;
  for (int c = 0; c < seq->cuts; c++)
    need += kvl__blocks_for(p, (int64_t)seq->held[c] + tokens) - kvl__count(seq, c) +
            is_open_shared(seq, c);
  int status = grow(
      seq, kvl__blocks_for(p, (int64_t)kvl_sequence_blocks(seq) * size + tokens) + 1);
  if (status < 0) return status; /* one more: room for the copy */
  status = kvl__pool_expect(p, need);
  if (status < 0) return status;
  int copied = 0;
  for (int c = 0; c < seq->cuts; c++) {
    int32_t *row = kvl__table(seq, c);
    const int old = kvl__count(seq, c), shared = is_open_shared(seq, c), held = seq->held[c];
    const int count = kvl__blocks_for(p, (int64_t)held + tokens);
    kvl__pool_take(p, count - old + shared, row + old);
    if (shared) {
      int32_t *copy = copies + 2 * copied++;
      copy[0] = row[old - 1], copy[1] = row[count];
      kvl__pool_release(p, copy[0]);
      row[old - 1] = copy[1];
    }
    int64_t *at = places + c / seq->heads * layer + (int64_t)(c % seq->heads) * tokens;
    for (int i = 0; i < tokens; i++) {
      int index = held + i;
      at[i] = (int64_t)row[index / size] * size + index % size;
    }
    seq->held[c] += tokens;
  }
  seq->edits += copied > 0;
  seq->length += tokens;
  return copied;
}

/* Puts the shared block back in the place of its copy, if `copy` made the last block of a cut
 * that is partly full. */
static int unshare_undone(kvl_sequence *seq, int cut, const int32_t *copy) {
  if (seq->held[cut] % seq->pool->block_size == 0) return 0;
  int32_t *last = kvl__table(seq, cut) + kvl__count(seq, cut) - 1;
  if (copy[1] != *last) return 0;
  kvl__pool_hold(seq->pool, copy[0]);
  kvl__pool_release(seq->pool, *last);
  *last = copy[0];
  seq->edits++;
  return 1;
}

int kvl_sequences_append(kvl_sequence *const *seqs, const int32_t *tokens, int n,
                         int64_t *places, int32_t *copies) {
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
    int status = append(seqs[i], tokens[i], places, layer, copies + 2 * copied);
    if (status < 0) {
      for (int j = i - 1; j >= 0; j--) { /* newest first: copies is a stack */
        for (int c = seqs[j]->cuts - 1; c >= 0 && tokens[j] > 0; c--) {
          drop(seqs[j], c, seqs[j]->held[c] - tokens[j]);
          if (copied > 0) copied -= unshare_undone(seqs[j], c, copies + 2 * (copied - 1));
        }
        seqs[j]->length -= tokens[j];
      }
      return status;
    }
    copied += status;
    places += (int64_t)tokens[i] * seqs[i]->heads;
  }
  return copied;
}

/* Whether the sequence can be shortened to `length`, and still has what it has to hold. */
static int check_cut_off(const kvl_sequence *seq, const char *what, int length) {
  if (length < 0 || length > seq->length)
    return kvl__fail(KVL_ERR_INVALID, "%s: length is %d, expected 0 ... %d", what, length,
                     seq->length);
  if (length < seq->floor && length > 0)
    return kvl__fail(KVL_ERR_INVALID,
                     "%s: length is %d, expected 0 or %d ... %d: tokens were evicted at %d",
                     what, length, seq->floor, seq->length, seq->floor);
  return KVL_OK;
}

int kvl_sequence_truncate(kvl_sequence *seq, int length) {
  KVL__NEED(seq);
  int status = check_cut_off(seq, "truncate", length);
  if (status < 0) return status;
  for (int c = 0; c < seq->cuts; c++)
    drop(seq, c, length ? seq->held[c] - (seq->length - length) : 0);
  seq->length = length;
  if (length == 0) seq->floor = 0;
  return KVL_OK;
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
    int status = check_cut_off(seqs[i], "rewind", lengths[i]);
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
    kvl_sequence_truncate(seqs[i], lengths[i]);
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
