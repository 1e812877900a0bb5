/* Keeps the tables of a step's sequences on the device up to date. A kvl_tables has a copy
 * of what is on the device, and finds what has changed since: if a sequence only grew, its
 * new blocks; otherwise the entries that differ from the copy. */
#include "memory/sequence.h"

struct kvl_tables {
  int layers, heads, seqs, width;
  int64_t *serial, *edits; /* [seqs]: of the sequence whose tables a row has */
  int32_t *sent;           /* [seqs, layers * heads]: entries that were sent since then */
  int32_t *entries;        /* [layers, seqs * heads, width] */
};

int kvl_tables_open(int layers, int heads, int seqs, int width, kvl_tables **out) {
  KVL__NEED(out);
  if (layers < 1 || heads < 1 || seqs < 1 || width < 1)
    return kvl__fail(KVL_ERR_INVALID, "tables: [%d, %d * %d, %d], expected each >= 1", layers,
                     seqs, heads, width);
  const size_t rows = (size_t)seqs * layers * heads;
  if (rows > INT32_MAX / (size_t)width)
    return kvl__fail(KVL_ERR_INVALID, "tables: [%d, %d * %d, %d], expected < 2^31 entries",
                     layers, seqs, heads, width);
  kvl_tables *t = kvl__malloc(sizeof *t + (size_t)seqs * 2 * sizeof(int64_t) +
                                  rows * sizeof(int32_t) * (1 + (size_t)width),
                              "a copy of block tables");
  if (!t) return KVL_ERR_NO_MEMORY;
  *t = (kvl_tables){.layers = layers, .heads = heads, .seqs = seqs, .width = width};
  t->serial = (int64_t *)(t + 1);
  t->edits = t->serial + seqs;
  t->sent = (int32_t *)(t->edits + seqs);
  t->entries = t->sent + rows;
  kvl_tables_forget(t);
  *out = t;
  return KVL_OK;
}

void kvl_tables_close(kvl_tables *t) { free(t); }

void kvl_tables_forget(kvl_tables *t) {
  if (!t) return;
  const size_t rows = (size_t)t->seqs * t->layers * t->heads;
  memset(t->serial, 0, (size_t)t->seqs * sizeof *t->serial); /* no sequence has this one */
  memset(t->entries, 0xff, rows * t->width * sizeof *t->entries);
}

int kvl_tables_update(kvl_tables *t, kvl_sequence *const *seqs, int n, int32_t *where,
                      int32_t *to, int room) {
  KVL__NEED(t);
  KVL__NEED(seqs);
  KVL__NEED(where);
  KVL__NEED(to);
  if (n < 0 || n > t->seqs)
    return kvl__fail(KVL_ERR_INVALID, "tables: n is %d, expected 0 ... %d", n, t->seqs);
  int count = 0;
  for (int s = 0; s < n; s++) {
    const kvl_sequence *seq = seqs[s];
    if (seq->layers != t->layers || seq->heads != t->heads ||
        kvl_sequence_blocks(seq) > t->width)
      return kvl__fail(KVL_ERR_INVALID,
                       "tables: sequence %d has %d x %d tables of up to %d blocks, expected "
                       "%d x %d of at most %d",
                       s, seq->layers, seq->heads, kvl_sequence_blocks(seq), t->layers,
                       t->heads, t->width);
    const int cuts = seq->cuts;
    int32_t *sent = t->sent + (int64_t)s * cuts;
    if (t->serial[s] != seq->serial || t->edits[s] != seq->edits) {
      t->serial[s] = seq->serial, t->edits[s] = seq->edits;
      memset(sent, 0, (size_t)cuts * sizeof *sent);
    }
    for (int c = 0; c < cuts; c++) {
      const int blocks = kvl__count(seq, c), layer = c / t->heads, head = c % t->heads;
      const int64_t at = (((int64_t)layer * t->seqs + s) * t->heads + head) * t->width;
      const int32_t *row = kvl__table(seq, c);
      for (; sent[c] < blocks; sent[c]++) {
        const int i = sent[c];
        if (t->entries[at + i] == row[i]) continue;
        if (count == room) return count;
        t->entries[at + i] = row[i];
        where[count] = (int32_t)(at + i), to[count] = row[i];
        count++;
      }
    }
  }
  return count;
}

int kvl_sequences_step(kvl_sequence *const *seqs, const int32_t *tokens, int n, int touched,
                       int32_t *lens, int32_t *blocks, int32_t *block_tokens) {
  KVL__NEED(seqs);
  KVL__NEED(tokens);
  KVL__NEED(lens);
  const int layers = n > 0 ? seqs[0]->layers : 0, heads = n > 0 ? seqs[0]->heads : 0;
  for (int layer = 0; layer < layers; layer++) {
    int at = 0;
    for (int s = 0; s < n; s++) {
      const kvl_sequence *seq = seqs[s];
      const int size = seq->pool->block_size;
      /* as many as tokens can lie in, wherever they begin */
      const int pad = tokens[s] > 0 ? (tokens[s] + size - 2) / size + 1 : 0;
      for (int head = 0; head < heads; head++) {
        const int c = layer * heads + head, held = seq->held[c];
        const int first = (held - tokens[s]) / size, last = (held - 1) / size;
        lens[((int64_t)layer * n + s) * heads + head] = held;
        for (int i = 0; i < pad; i++, at++) {
          const int b = first + i < last ? first + i : last;
          if (at >= touched)
            return kvl__fail(KVL_ERR_INVALID, "step: touched is %d, expected more", touched);
          blocks[(int64_t)layer * touched + at] = b == last ? seq->last[c]
                                                            : kvl__table(seq, c)[b];
          block_tokens[(int64_t)layer * touched + at] = held - b * size < size
                                                            ? held - b * size
                                                            : size;
        }
      }
    }
  }
  return KVL_OK;
}
