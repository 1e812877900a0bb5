/* Cuts a selection into passes over a ring and the open blocks, see kvl_cut in kvlab.h.
 *   selection     i32  [seqs, heads, max_selected]   NULL: every block
 *   tables        i32  [seqs, max_blocks]
 *   lens          i32  [seqs]
 *   opens         i32  [seqs, 2]   first open logical block, its index in the buffer
 *   logical       i32  [passes, seqs, heads, n]
 *   physical      i32  [passes, seqs, heads, n]
 *   open_logical  i32  [seqs, heads, n_open]
 *   open_slots    i32  [seqs, heads, n_open]
 * The j-th selected block below the open ones becomes entry j % n of pass j / n. All outputs
 * are -1 padded. Blocks that do not fit are dropped; entries past the sequence's last block
 * are skipped.
 * Limit: the bytes written. */
#include "args/offload.h"
#include "cpu/split.h"
#include "cpu/vec.h"

static void cut_row(const struct kvl_cut_selection_args *a, int64_t row) {
  const int64_t rows = a->seqs * a->heads, seq = row / a->heads;
  const int32_t *list = a->selection ? a->selection + row * a->max_selected : NULL;
  const int32_t *table = a->tables + seq * a->max_blocks;
  const int64_t blocks = i64_min((a->lens[seq] + (int64_t)a->block_size - 1) / a->block_size,
                                 a->max_blocks);
  const int64_t first_open = a->opens[2 * seq], first_slot = a->opens[2 * seq + 1];
  const int64_t room = a->passes * a->n;
  int32_t *open_logical = a->open_logical + row * a->n_open;
  int32_t *open_slots = a->open_slots + row * a->n_open;
  int64_t closed = 0, open = 0;

  for (int64_t i = 0; i < (list ? a->max_selected : blocks); i++) {
    int64_t block = list ? list[i] : i;
    if (block < 0 || block >= blocks) continue;
    if (block < first_open && closed < room) {
      int64_t at = (closed / a->n * rows + row) * a->n + closed % a->n;
      a->logical[at] = (int32_t)block;
      a->physical[at] = table[block];
      closed++;
    } else if (block >= first_open && open < a->n_open) {
      open_logical[open] = (int32_t)block;
      open_slots[open] = (int32_t)(first_slot + block - first_open);
      open++;
    }
  }
  for (; closed < room; closed++) {
    int64_t at = (closed / a->n * rows + row) * a->n + closed % a->n;
    a->logical[at] = a->physical[at] = -1;
  }
  for (; open < a->n_open; open++) open_logical[open] = open_slots[open] = -1;
}

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) cut_row(args, row);
  return 0;
}

KVL_CPU_KERNEL(cut_selection) {
  const struct kvl_cut_selection_args *a = args;
  return kvl__split(a->seqs * a->heads, kvl__grain_rows(a->passes * a->n + a->n_open),
                    rows_piece, a);
}
