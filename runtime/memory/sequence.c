/* A sequence: a length in tokens and the physical blocks that hold them, in logical order.
 * Invariant: count == ceil(length / block_size), and the sequence holds one reference on
 * each of its blocks. A block with more references is shared; full blocks are never
 * written again, so only a shared, partly filled last block is ever copied. */
#include "memory/block_pool.h"

struct kvl_sequence {
  kvl_pool *pool;
  int length, count, capacity;
  int32_t *blocks;
};

static int blocks_for(const kvl_pool *p, int64_t tokens) {
  return (int)((tokens + p->block_size - 1) / p->block_size);
}

int kvl_sequence_open(kvl_pool *pool, kvl_sequence **out) {
  KVL__NEED(pool);
  KVL__NEED(out);
  kvl_sequence *s = kvl__malloc(sizeof *s, "a sequence");
  if (!s) return KVL_ERR_NO_MEMORY;
  *s = (kvl_sequence){.pool = pool};
  pool->holders++;
  *out = s;
  return KVL_OK;
}

static int grow(kvl_sequence *s, int count) {
  if (count <= s->capacity) return KVL_OK;
  int capacity = s->capacity ? s->capacity : KVL__ROOM(16, 1);
  while (capacity < count) capacity *= 2;
  int32_t *blocks = kvl__realloc(s->blocks, (size_t)capacity * sizeof *blocks,
                                 "a block table");
  if (!blocks) return KVL_ERR_NO_MEMORY;
  s->blocks = blocks;
  s->capacity = capacity;
  return KVL_OK;
}

int kvl_sequence_fork(const kvl_sequence *seq, kvl_sequence **out) {
  KVL__NEED(seq);
  KVL__NEED(out);
  kvl_sequence *s;
  int status = kvl_sequence_open(seq->pool, &s);
  if (status < 0) return status;
  status = grow(s, seq->count);
  if (status < 0) {
    kvl_sequence_close(s);
    return status;
  }
  for (int i = 0; i < seq->count; i++) {
    s->blocks[i] = seq->blocks[i];
    kvl__pool_hold(s->pool, s->blocks[i]);
  }
  s->count = seq->count;
  s->length = seq->length;
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
  if ((int64_t)seq->length + (int64_t)n * p->block_size > INT32_MAX)
    return kvl__fail(KVL_ERR_INVALID,
                     "share: %d blocks after %d tokens, expected < "
                     "2^31 tokens in all",
                     n, seq->length);
  for (int i = 0; i < n; i++) {
    int refs = kvl_pool_block_refs(p, blocks[i]);
    if (refs < 0) return refs;
    if (refs == 0)
      return kvl__fail(KVL_ERR_INVALID, "share: block %d is free, expected one that is held",
                       blocks[i]);
  }
  int status = grow(seq, seq->count + n);
  if (status < 0) return status;
  for (int i = 0; i < n; i++) {
    seq->blocks[seq->count++] = blocks[i];
    kvl__pool_hold(p, blocks[i]);
  }
  seq->length += n * p->block_size;
  return KVL_OK;
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
int kvl_sequence_blocks(const kvl_sequence *seq) {
  KVL__NEED(seq);
  return seq->count;
}

/* Lengthens one sequence. Returns 1 if a copy takes the place of its last block; then copy =
 * {from, to}. */
static int append(kvl_sequence *seq, int tokens, int64_t *places, int32_t *copy) {
  kvl_pool *p = seq->pool;
  if (tokens < 0 || tokens > INT32_MAX - seq->length)
    return kvl__fail(KVL_ERR_INVALID, "append: tokens is %d, expected 0 ... %d", tokens,
                     INT32_MAX - seq->length);
  if (tokens == 0) return 0;
  int size = p->block_size, old = seq->count;
  int shared = seq->length % size && p->refs[seq->blocks[old - 1]] > 1;
  int count = blocks_for(p, (int64_t)seq->length + tokens);
  int status = grow(seq, count + 1); /* one more: room for the copy */
  if (status < 0) return status;
  status = kvl__pool_take(p, count - old + shared, seq->blocks + old);
  if (status < 0) return status;
  if (shared) {
    copy[0] = seq->blocks[old - 1];
    copy[1] = seq->blocks[count];
    kvl__pool_release(p, copy[0]);
    seq->blocks[old - 1] = copy[1];
  }
  for (int i = 0; i < tokens; i++) {
    int position = seq->length + i;
    places[i] = (int64_t)seq->blocks[position / size] * size + position % size;
  }
  seq->count = count;
  seq->length += tokens;
  return shared;
}

/* Whether `copy` is the pair that the append of `tokens` to seq made. */
static int made_copy(const kvl_sequence *seq, int tokens, const int32_t *copy) {
  int before = seq->length - tokens, size = seq->pool->block_size;
  return before % size && seq->blocks[before / size] == copy[1];
}

/* Takes back an append that made `copied` copies (0 or 1). */
static void undo(kvl_sequence *seq, int tokens, int copied, const int32_t *copy) {
  kvl_sequence_truncate(seq, seq->length - tokens);
  if (!copied) return;
  kvl__pool_hold(seq->pool, copy[0]);
  kvl__pool_release(seq->pool, copy[1]);
  seq->blocks[seq->count - 1] = copy[0];
}

int kvl_sequences_append(kvl_sequence *const *seqs, const int32_t *tokens, int n,
                         int64_t *places, int32_t *copies) {
  KVL__NEED(seqs);
  KVL__NEED(tokens);
  int copied = 0;
  for (int i = 0; i < n; i++) {
    int status = append(seqs[i], tokens[i], places, copies + 2 * copied);
    if (status < 0) {
      for (int j = i - 1; j >= 0; j--) { /* newest first: copies is a stack */
        int32_t *last = copies + 2 * (copied - 1);
        int mine = copied > 0 && tokens[j] > 0 && made_copy(seqs[j], tokens[j], last);
        undo(seqs[j], tokens[j], mine, last);
        copied -= mine;
      }
      return status;
    }
    copied += status;
    places += tokens[i];
  }
  return copied;
}

int kvl_sequence_truncate(kvl_sequence *seq, int length) {
  KVL__NEED(seq);
  if (length < 0 || length > seq->length)
    return kvl__fail(KVL_ERR_INVALID, "truncate: length is %d, expected 0 ... %d", length,
                     seq->length);
  int count = blocks_for(seq->pool, length);
  for (int i = seq->count - 1; i >= count; i--) kvl__pool_release(seq->pool, seq->blocks[i]);
  seq->count = count;
  seq->length = length;
  return KVL_OK;
}

/* Puts the shared block back in the place of its copy, if one of the pairs made the last
 * block of seq. */
static void unshare_undone(kvl_sequence *seq, const int32_t *copies, int pairs) {
  if (seq->length % seq->pool->block_size == 0) return;
  int32_t *last = seq->blocks + seq->count - 1;
  for (int i = 0; i < pairs; i++) {
    if (copies[2 * i + 1] != *last) continue;
    kvl__pool_hold(seq->pool, copies[2 * i]);
    kvl__pool_release(seq->pool, *last);
    *last = copies[2 * i];
    return;
  }
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
    if (lengths[i] < 0 || lengths[i] > seqs[i]->length)
      return kvl__fail(KVL_ERR_INVALID, "rewind: length %d is %d, expected 0 ... %d", i,
                       lengths[i], seqs[i]->length);
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
    unshare_undone(seqs[i], copies, pairs);
  }
  return KVL_OK;
}

int kvl_sequence_table(const kvl_sequence *seq, int32_t *row, int width) {
  KVL__NEED(seq);
  KVL__NEED(row);
  if (seq->count > width)
    return kvl__fail(KVL_ERR_INVALID,
                     "table: the sequence has %d blocks, expected at most width = %d",
                     seq->count, width);
  for (int i = 0; i < width; i++) row[i] = i < seq->count ? seq->blocks[i] : -1;
  return seq->count;
}
