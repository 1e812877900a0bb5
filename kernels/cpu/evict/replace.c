/* Finds where the new token of each row goes: to the end, or, in a row that is full, to the
 * place of the token with the lowest score, and saves the token that was there. See
 * kvl_replace in runtime/kvlab.h.
 * Limit: reads the scores and the positions of full rows once. */
#include "cpu/evict/token.h"
#include "cpu/split.h"
#include "cpu/vec.h"

static int rows_piece(const void *args, int64_t begin, int64_t end) {
  const struct kvl_replace_args *a = args;
  for (int64_t r = begin; r < end; r++) {
    const int32_t count = kvl__row_tokens(a, r);
    if (count < 1) {
      kvl__put_nowhere(a, r);
      continue;
    }
    int32_t index = count - 1;
    if (a->wanted[r] < 0) {
      struct kvl_worth least = kvl__worth(a, r, 0);
      for (int32_t i = 1; i < count; i++) {
        struct kvl_worth one = kvl__worth(a, r, i);
        if (kvl__goes_before(one, least)) least = one;
      }
      index = least.index;
    }
    kvl__put_new(a, r, index);
    if (a->saved.memory) copy_token(&a->cache, a->places[r], &a->saved, r);
  }
  return 0;
}

KVL_CPU_KERNEL(replace) {
  const struct kvl_replace_args *a = args;
  return kvl__split(a->rows, kvl__grain_rows(a->n), rows_piece, a);
}
