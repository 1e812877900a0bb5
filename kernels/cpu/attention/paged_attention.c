/* out = softmax(scale * q k^T + bias) v over the paged keys of each sequence.
 *
 *  q          f32 f16 bf16  [tokens, heads, head_dim]
 *  cache      f32 f16 bf16 f8e4m3  [blocks, 2, kv_heads, block_size, head_dim]
 *  tables     i32           [seqs, max_blocks]
 *  selection  i32           [seqs, kv_heads or 1, max_selected]
 *  listed     i32           [tokens, kv_heads or 1, max_selected]: tokens, instead of a
 *                           selection (attention_listed.h)
 *  slots      i32           [seqs, kv_heads or 1, max_selected]: the blocks of the selection,
 *                           instead of those in tables; [tokens, ...] with a list
 *  tree       u64           [tokens, words]: which of the newest 64 * words keys a row sees
 *  prev_out   f32           [tokens, heads, head_dim]   joined to the result
 *  prev_lse   f32           [tokens, heads]
 *  out        f32 f16 bf16  [tokens, heads, head_dim]
 *  lse        f32           [tokens, heads]
 *  k_scale, v_scale  f32    [kv_heads] of an f8e4m3 cache, optional: k_scale goes into q,
 *                           v_scale into the result
 * head_dim a multiple of 8 up to 256; any block_size; fp32 accumulation. Where values are the
 * first numbers of their keys, up to 576, and out and prev_out are as long as a value.
 *
 * Bytes   decode: 2 * len * kv_heads * head_dim elements, K and V once
 * Flops   prefill: 4 * head_dim * heads * (pairs of a query row and a key it sees)
 * Limit   decode: memory bandwidth (attention_few.h); prefill: multiply-adds
 *         (attention_many.h)
 * Best    Xeon (Sapphire Rapids), 2026-11-21, AVX-512; both sides of a ratio were measured
 *         in one run; decode of 32/8 heads of 128, 32K tokens per sequence in scattered
 *         blocks of 16:
 *         bf16, 16 cores: 157 GB/s where a plain read loop gets 180 (0.87; AVX2 0.74);
 *         2 cores: 22 of 29 (0.77; AVX2 0.58, plain 0.33); one thread 14 of 19 (0.73)
 *         f8e4m3, 16 cores: 91 GB/s (0.50; AVX2 0.38): bound by its conversion
 *         prefill bf16, 4K causal, 2 cores, relative to OpenBLAS's sgemm: 8/2 heads of 64
 *         1.09 (AVX2 0.66, plain 0.18), of 128 0.96 (0.62, 0.19)
 * Tried   decode, relative to the read bandwidth: no prefetch 0.44; prefetch of the next
 *         tile in bursts 0.60, spread evenly over the loops 0.67; fewer, longer segments
 *         0.75; the first tile of a segment in a burst 0.77; non-temporal prefetch 0.27;
 *         prefetch of every other line 0.55; VDPBF16PS has half the rate of multiply-adds
 *         (notes/20261121-cpu.md)
 *
 * The block list of a sequence is cut into segments, so that a few long sequences still fill
 * the machine. The size of a segment depends on shapes alone, and partial sums are added in
 * ascending order, so that the result does not depend on the number of threads.
 *
 * Source  Dao et al. 2022 (online softmax); Kwon et al. 2023 (paging); Flash-Decoding
 *         (splitting the keys). */
#include "args/attention.h"
#include "cpu/attention/attention_few.h"
#include "cpu/attention/attention_many.h"
#include "cpu/split.h"

/* The least number of tasks wanted, and the least number of tokens in a segment. A task
 * starts on cold memory, so short ones read more slowly: 32K tokens in 64 segments instead of
 * 16 get 0.65 instead of 0.76 of the read bandwidth. */
enum { DECODE_TASKS = 128, PREFILL_TASKS = 64, SEGMENTS_MAX = 128, SEGMENT_TOKENS = 1024 };

struct plan {
  int64_t entries;  /* blocks of the list in a segment */
  int64_t segments; /* of the longest list that the shapes allow */
};

/* Does a task's list begin at its window instead of its first (selected) block? */
static int walks_window(const struct kvl_paged_attention_args *a) {
  return a->window > 0 && a->causal && !a->selection;
}

/* The largest number of blocks from the first key that a task's rows see to the last one. */
static int64_t window_blocks(const struct kvl_paged_attention_args *a) {
  int64_t group = a->heads / a->cache.kv_heads, size = a->cache.block_size;
  int64_t span = a->starts ? (TASK_ROWS + group - 1) / group : 0;
  return ((int64_t)a->window + span + size - 1) / size + 1;
}

/* Blocks of the longest list that the shapes allow. */
static int64_t list_blocks(const struct kvl_paged_attention_args *a) {
  if (a->selection) return i64_min(a->max_selected, a->max_blocks);
  return walks_window(a) ? i64_min(window_blocks(a), a->max_blocks) : a->max_blocks;
}

static struct plan plan_make(const struct kvl_paged_attention_args *a) {
  int64_t kv_heads = a->cache.kv_heads, size = a->cache.block_size;
  int64_t tiles = a->seqs, tasks = DECODE_TASKS;
  if (a->starts) {
    tiles += a->tokens * (a->heads / kv_heads) / TASK_ROWS;
    tasks = PREFILL_TASKS;
  }
  int64_t list = list_blocks(a);
  int64_t segments = tiles > 0 ? tasks / (tiles * kv_heads) : 1;
  if (segments < 1) segments = 1;
  if (segments > SEGMENTS_MAX) segments = SEGMENTS_MAX;
  int64_t entries = (list + segments - 1) / segments;
  int64_t least = (SEGMENT_TOKENS + size - 1) / size;
  if (entries < least) entries = least;
  return (struct plan){entries, list > entries ? (list + entries - 1) / entries : 1};
}

/* Partial sums: values f32 [tokens * heads, segments, head_dim], then top and sum
 * f32 [tokens * heads, segments, 2]. */
KVL_CPU_WORKSPACE(paged_attention) {
  const struct kvl_paged_attention_args *a = args;
  struct plan plan = plan_make(a);
  if (plan.segments == 1 || a->listed) return 0;
  return (size_t)(a->tokens * a->heads * plan.segments) * (a->cache.value.dim + 2) *
         sizeof(float);
}

static inline float *partial_values(const struct kvl_paged_attention_args *a,
                                    struct plan plan, int64_t row, int64_t segment) {
  return (float *)a->workspace + (row * plan.segments + segment) * a->cache.value.dim;
}
static inline float *partial_state(const struct kvl_paged_attention_args *a, struct plan plan,
                                   int64_t row, int64_t segment) {
  return (float *)a->workspace + a->tokens * a->heads * plan.segments * a->cache.value.dim +
         (row * plan.segments + segment) * 2;
}

static int32_t sequence_len(const struct kvl_paged_attention_args *a, int64_t seq) {
  int64_t room = a->max_blocks * a->cache.block_size, len = a->lens[seq];
  return len < 0 ? 0 : len > room ? (int32_t)room : (int32_t)len;
}

/* The number of segments that the block list of (seq, kv_head) fills, at least 1. */
static int64_t segments_used(const struct kvl_paged_attention_args *a, struct plan plan,
                             int64_t seq, int64_t kv_head) {
  int64_t n = (sequence_len(a, seq) + a->cache.block_size - 1) / a->cache.block_size;
  if (a->selection) {
    int64_t head = a->selection_heads > 1 ? kv_head : 0;
    int64_t row = seq * a->selection_heads + head;
    const int32_t *list = a->selection + row * a->max_selected;
    n = list_blocks(a);
    while (n > 0 && list[n - 1] < 0) n--;
  } else if (walks_window(a)) {
    n = i64_min(n, window_blocks(a));
  }
  n = (n + plan.entries - 1) / plan.entries;
  return n > 1 ? n : 1;
}

static int64_t query_rows(const struct kvl_paged_attention_args *a, int64_t seq,
                          int64_t *first) {
  *first = a->starts ? a->starts[seq] : seq;
  int64_t rows = a->starts ? a->starts[seq + 1] - *first : 1;
  return *first < 0 || rows < 0 || *first + rows > a->tokens ? 0 : rows;
}

/* ---- one task ----------------------------------------------------------------------- */

/* Writes v_scale * values / sum, joined to the previous attention, or zeros if neither saw a
 * key. The previous attention counts as a segment whose sum is 1. If it saw no key, prev_out
 * may hold anything. This works row by row, so that out may be prev_out. */
static void row_write(const struct kvl_paged_attention_args *a, int64_t row,
                      const float *values, float top, float sum) {
  const int dim = a->cache.value.dim;
  const float *prev = NULL, *scales = a->cache.v_scale;
  float keep = 1, weight = 0, unit = 1;
  if (scales) unit = scales[row % a->heads / (a->heads / a->cache.kv_heads)];
  if (a->prev_lse && a->prev_lse[row] != -INFINITY) {
    prev = a->prev_out + row * dim;
    float both = sum == 0 || a->prev_lse[row] > top ? a->prev_lse[row] : top;
    keep = sum == 0 ? 0 : expf(top - both);
    weight = expf(a->prev_lse[row] - both);
    sum = sum * keep + weight;
    top = both;
  }
  for (int d = 0; d < dim; d += VF) {
    int lanes = vf_left(d, dim);
    vf x = keep * unit * vf_load(values, d, KVL_DTYPE_F32);
    if (prev) x += weight * vf_load_n(prev + d, lanes, KVL_DTYPE_F32);
    x = sum == 0 ? vf_set(0) : x / sum;
    vf_store_n(at(a->out, row * dim + d, a->out_dtype), x, lanes, a->out_dtype);
  }
  if (a->lse) a->lse[row] = sum == 0 ? -INFINITY : top + logf(sum);
}

/* Sets what the first `rows` rows of a task see. `first` is the index of the sequence's
 * first query row. Rows past the last one repeat it. */
static void set_rows(struct task *t, int32_t first, int rows) {
  const struct kvl_paged_attention_args *a = t->args;
  for (int i = 0; i < rows; i++) {
    int r = i < t->rows ? i : t->rows - 1;
    t->index[i] = first + (int32_t)((t->row + r) / t->group);
    t->first[i] = kvl__window_begin(a->window, t->index[i]);
    t->slope[i] = a->alibi ? a->alibi[task_head(t, r)] : 0;
  }
}

static void attend(const struct task *t, struct key_walk walk, struct sums *sums) {
  if (t->rows > FEW_ROWS) attend_many(t, walk, sums);
  else KVL_CPU_NAME(attend_few)(t, walk, sums);
}

#include "cpu/attention/attention_listed.h"

/* Attends from one tile of a sequence's rows to segment `segment` of its block list. The rows
 * are pairs (query row, head of the group), TASK_ROWS in a tile; tiles are counted from the
 * last one. */
static void task_run(const struct kvl_hooked_attention_args *hooked, struct plan plan,
                     int64_t seq, int64_t kv_head, int64_t tile_from_end, int64_t segment) {
  const struct kvl_paged_attention_args *a = &hooked->base;
  int64_t group = a->heads / a->cache.kv_heads, first;
  int64_t rows = query_rows(a, seq, &first), all = rows * group;
  int64_t tile = (all + TASK_ROWS - 1) / TASK_ROWS - 1 - tile_from_end;
  int64_t used = segments_used(a, plan, seq, kv_head);
  if (tile < 0 || segment >= used) return;
  struct task t = {.args = a,
                   .hooked = hooked->hook || hooked->scores ? hooked : NULL,
                   .seq = seq,
                   .token = first,
                   .row = tile * TASK_ROWS,
                   .kv_head = (int)kv_head,
                   .group = (int)group,
                   .len = sequence_len(a, seq)};
  t.rows = all - t.row < TASK_ROWS ? (int)(all - t.row) : TASK_ROWS;
  set_rows(&t, (int32_t)(t.len - rows), TASK_ROWS);
  struct sums sums;
  int64_t begin = segment * plan.entries;
  if (walks_window(a)) begin += t.first[0] / a->cache.block_size;
  attend(&t, walk_open(&t, begin, begin + plan.entries), &sums);
  int padded = dim_padded(a->cache.value.dim);
  for (int i = 0; i < t.rows; i++) {
    int64_t row = task_token(&t, i) * a->heads + task_head(&t, i);
    const float *values = sums.values + i * padded;
    if (used == 1) {
      row_write(a, row, values, sums.top[i], sums.sum[i]);
    } else {
      memcpy(partial_values(a, plan, row, segment), values, a->cache.value.dim * 4);
      float *state = partial_state(a, plan, row, segment);
      state[0] = sums.top[i], state[1] = sums.sum[i];
    }
  }
}

/* ---- merging ------------------------------------------------------------------------- */

static void merge_row(const struct kvl_paged_attention_args *a, struct plan plan, int64_t row,
                      int64_t used) {
  float values[HEAD_DIM_MAX] = {0}, top = -INFINITY, sum = 0;
  for (int64_t s = 0; s < used; s++) top = fmaxf(top, partial_state(a, plan, row, s)[0]);
  for (int64_t s = 0; s < used; s++) {
    const float *state = partial_state(a, plan, row, s);
    const float *part = partial_values(a, plan, row, s);
    float weight = state[0] == -INFINITY && state[1] == 0 ? 0 : expf(state[0] - top);
    sum += weight * state[1];
    for (int d = 0; d < a->cache.value.dim; d++) values[d] += weight * part[d];
  }
  row_write(a, row, values, top, sum);
}

static void merge_sequence(const struct kvl_paged_attention_args *a, struct plan plan,
                           int64_t seq, int64_t kv_head) {
  int64_t used = segments_used(a, plan, seq, kv_head), first;
  int64_t rows = query_rows(a, seq, &first), group = a->heads / a->cache.kv_heads;
  if (used == 1) return;
  for (int64_t i = 0; i < rows * group; i++)
    merge_row(a, plan, (first + i / group) * a->heads + kv_head * group + i % group, used);
}

KVL_CPU_KERNEL(paged_attention) {
  const struct kvl_hooked_attention_args *hooked = args;
  const struct kvl_paged_attention_args *a = &hooked->base;
  if (a->tokens == 0 || a->seqs == 0) return 0;
  if (a->listed) return run_listed(hooked);
  struct plan plan = plan_make(a);
  int64_t kv_heads = a->cache.kv_heads, group = a->heads / kv_heads, longest = 0, first;
  for (int64_t s = 0; s < a->seqs; s++) {
    int64_t rows = query_rows(a, s, &first) * group;
    if (rows > longest) longest = rows;
  }
  /* The last rows of a causal prefill see the most keys: start with those. */
  int64_t per_tile = a->seqs * kv_heads * plan.segments;
  int64_t tasks = (longest + TASK_ROWS - 1) / TASK_ROWS * per_tile;
#pragma omp parallel for schedule(dynamic) if (tasks > 1)
  for (int64_t i = 0; i < tasks; i++)
    task_run(hooked, plan, i % per_tile / (kv_heads * plan.segments),
             i / plan.segments % kv_heads, i / per_tile, i % plan.segments);
  if (plan.segments == 1) return 0;
#pragma omp parallel for schedule(dynamic)
  for (int64_t i = 0; i < a->seqs * kv_heads; i++)
    merge_sequence(a, plan, i / kv_heads, i % kv_heads);
  return 0;
}
