/* Every op has a struct of arguments here: raw pointers and sizes, which the runtime checks
 * before it calls a launcher. Nothing here knows tensors, Lua or allocation.
 *
 * A launcher is `int name(const void *args, void *queue)`. args points to the op's struct,
 * which is copied before an asynchronous start. queue belongs to the backend: CUDA passes a
 * struct kvl_cuda_queue *, the CPU a struct kvl_cpu_job *. A launcher returns 0 or a negative
 * kvl_status.
 *   CPU   kvl_cpu_<op>_<isa>   kernels/cpu/<op>.c, compiled once per instruction set
 *   CUDA  kvl_cuda_<op>        kernels/cuda/<op>.cu; kernels/cuda/instances/ has those of its
 *                              templates that take minutes to compile
 * Shapes, dtypes and meanings are those of runtime/kvlab.h. Optional pointers may be NULL.
 * Any count may be 0; the op then launches nothing. */
#ifndef KVL_KERNELS_H
#define KVL_KERNELS_H

#include "page.h"

/* ORDER kvl_op */
#define KVL_OPS(X)     \
  X(fill)              \
  X(arange)            \
  X(random)            \
  X(cast)              \
  X(unary)             \
  X(binary)            \
  X(where)             \
  X(reduce)            \
  X(softmax)           \
  X(argmax)            \
  X(topk)              \
  X(matmul)            \
  X(linear)            \
  X(gather_rows)       \
  X(scatter_rows)      \
  X(gather)            \
  X(rmsnorm)           \
  X(rope)              \
  X(silu_mul)          \
  X(append_kv)         \
  X(copy_blocks)       \
  X(read_blocks)       \
  X(paged_attention)   \
  X(merge_attention)   \
  X(block_minmax)      \
  X(block_mean)        \
  X(score_minmax)      \
  X(score_mean)        \
  X(score_max_qk)      \
  X(select)            \
  X(move_blocks)       \
  X(cut_selection)     \
  X(hot_resolve)       \
  X(hot_append)        \
  X(hot_drop)          \
  X(vllm_append)       \
  X(vllm_attention)    \
  X(rope_append)       \
  X(hash_rows)         \
  X(block_hash)        \
  X(score_hamming)     \
  X(select_hamming)    \
  X(scatter)           \
  X(trim_selection)    \
  X(quantise_rows)     \
  X(hadamard)          \
  X(index_append)      \
  X(index_gather)      \
  X(mqa_logits)        \
  X(mqa_logits_paged)  \
  X(topk_transform)    \
  X(transform_indices) \
  X(topk_merge)        \
  X(ragged_places)     \
  X(token_attention)   \
  X(strided_copy)      \
  X(cumsum)            \
  X(logsumexp)

enum kvl_op {
#define X(op) KVL_OP_##op,
  KVL_OPS(X)
#undef X
      KVL_OP_COUNT
};

typedef int kvl_kernel(const void *args, void *queue);

/* What a CPU kernel reports about its run: the bytes that it moved over the link, per
 * direction, so that an emulated link can model their time. A kernel adds to the counts; most
 * kernels move nothing. */
enum { KVL_LINK_TO_DEVICE, KVL_LINK_TO_HOST };
struct kvl_cpu_job {
  int64_t bytes_link[2];
};

struct kvl_fill_args {
  void *out;
  int64_t count;
  double value;
  int32_t dtype;
};
struct kvl_arange_args {
  void *out;
  int64_t count;
  double start, step;
  int32_t dtype;
};
struct kvl_random_args {
  void *out;
  int64_t count;
  uint64_t seed, offset;
  double a, b;
  int32_t kind, dtype;
};
struct kvl_cast_args {
  const void *a;
  void *out;
  int64_t count;
  int32_t from, to;
};
struct kvl_unary_args {
  const void *a;
  void *out;
  int64_t count;
  int32_t op, dtype;
};

/* out[i...] = a[i . a_stride] op b[i . b_stride]. Strides are in elements, and 0 broadcasts.
 * If b is NULL, the scalar takes its place. Adjacent dims are merged where the strides of
 * both operands allow it, so ndim is often 1. */
struct kvl_binary_args {
  const void *a, *b;
  void *out;
  double scalar;
  int64_t shape[KVL_DIMS_MAX], a_stride[KVL_DIMS_MAX], b_stride[KVL_DIMS_MAX];
  int64_t count;
  int32_t ndim, op, dtype, out_dtype;
};
struct kvl_where_args {
  const uint8_t *cond;
  const void *a, *b; /* NULL: the value, converted to dtype, takes its place */
  void *out;
  double a_value, b_value;
  int64_t count;
  int32_t dtype;
};
/* out[i . out_stride] = a[i . a_stride] for all i within shape. Strides are in elements; those
 * of `a` may be 0. No two i write to the same place. The last dim is the one along which out
 * is contiguous, or has the smallest stride. Among the others, the one along which `a` has the
 * smallest stride is the last but one. */
struct kvl_strided_copy_args {
  const void *a;
  void *out;
  int64_t shape[KVL_DIMS_MAX], a_stride[KVL_DIMS_MAX], out_stride[KVL_DIMS_MAX];
  int64_t count;
  int32_t ndim, bytes_element;
};
/* a [outer, n, inner] -> out [outer, inner] */
struct kvl_reduce_args {
  const void *a;
  void *out;
  int64_t outer, n, inner;
  void *workspace; /* here and below: of the size that kvl_backend's workspace() returns */
  int32_t op, dtype, out_dtype;
};
struct kvl_softmax_args {
  const void *a;
  void *out;
  int64_t rows, n;
  void *workspace;
  float scale;
  int32_t dtype, out_dtype;
};
struct kvl_argmax_args {
  const void *a;
  int32_t *out;
  int64_t rows, n;
  void *workspace;
  int32_t dtype, least; /* least: argmin */
};
/* a [outer, n, inner] -> out of the same shape */
struct kvl_cumsum_args {
  const void *a;
  void *out;
  int64_t outer, n, inner;
  int32_t dtype;
};
/* a [outer, n, inner] -> out [outer, inner] */
struct kvl_logsumexp_args {
  const void *a;
  void *out;
  int64_t outer, n, inner;
  void *workspace;
  int32_t dtype, out_dtype;
};
struct kvl_topk_args {
  const void *a; /* f32 or i32 */
  void *values;  /* optional, like a */
  int32_t *indices;
  int64_t rows, n, k;
  void *workspace;
  int32_t largest, by_index, dtype;
};
/* Batch strides are in elements. With b_stride 0, all batches share b. */
struct kvl_matmul_args {
  const void *a, *b;
  void *out;
  int64_t batch, m, n, k, a_stride, b_stride, out_stride;
  void *workspace;
  int32_t transpose_b, dtype, out_dtype;
};
/* norm may be f32 beside 16-bit rows, and so may out. form is a kvl_linear_form; a plain one
 * may have several parts: outs[i] [rows, columns[i]] takes the next columns[i] of the result,
 * and out is outs[0]. frozen: nothing that is under way writes the weight. */
enum { KVL_LINEAR_PARTS = 3 };
struct kvl_linear_args {
  const void *x, *weight;
  const void *norm, *bias; /* optional */
  void *out;
  int64_t rows, n, k; /* n: rows of weight */
  void *workspace;
  float eps;
  int32_t form, frozen, dtype, norm_dtype, out_dtype, parts;
  void *outs[KVL_LINEAR_PARTS];
  int64_t columns[KVL_LINEAR_PARTS];
};
/* The i-th part as a call of its own. */
static inline struct kvl_linear_args kvl__linear_part(const struct kvl_linear_args *g,
                                                      int i) {
  struct kvl_linear_args part = *g;
  int64_t before = 0, element = g->dtype == KVL_DTYPE_F32 ? 4 : 2;
  if (g->parts == 1) return part;
  for (int j = 0; j < i; j++) before += g->columns[j];
  part.weight = (const char *)g->weight + before * g->k * element;
  if (g->bias) part.bias = (const char *)g->bias + before * element;
  part.n = g->columns[i];
  part.out = g->outs[i];
  part.parts = 1;
  return part;
}
/* A row is bytes_row bytes long. */
struct kvl_gather_rows_args {
  const void *src;
  const int32_t *index;
  void *out;
  int64_t n, rows, bytes_row; /* rows: of src */
};
struct kvl_scatter_rows_args {
  const void *src;
  const int32_t *index;
  void *out;
  int64_t n, rows, bytes_row; /* rows: of out */
  void *workspace;
};
struct kvl_gather_args {
  const void *src;
  const int32_t *index;
  void *out;
  int64_t rows, n, m;
  int32_t bytes_element;
};
struct kvl_scatter_args {
  const void *src;
  const int32_t *index;
  void *out;
  int64_t rows, n, m; /* m: of src */
  int32_t add, dtype;
};
struct kvl_rmsnorm_args {
  const void *x;
  void *residual; /* optional, in place */
  const void *weight;
  void *out;
  int64_t rows, dim;
  float eps;
  int32_t dtype, weight_dtype;
};
struct kvl_rope_args {
  void *x;
  const int32_t *positions;
  const float *inv_freq;
  int64_t tokens, heads, head_dim, pairs;
  int32_t dtype;
};
struct kvl_silu_mul_args {
  const void *gate, *up;
  void *out;
  int64_t count;
  int32_t dtype;
};

struct kvl_append_kv_args {
  struct kvl_pages cache;
  const void *k, *v;
  const int64_t *places;
  int64_t tokens;
  int32_t dtype; /* of k and v */
};
struct kvl_rope_append_args {
  struct kvl_pages cache;
  void *q; /* changed in place; k and v stay as they are */
  const void *k, *v;
  const int32_t *positions;
  const float *inv_freq;
  const int64_t *places;
  int64_t tokens, heads, pairs; /* heads: of q */
  int32_t dtype;                /* of q, k and v */
};
struct kvl_copy_blocks_args {
  void *memory;
  const int32_t *src, *dst;
  int64_t blocks, bytes_block, n;
};
struct kvl_read_blocks_args {
  struct kvl_pages cache;
  const int32_t *blocks;
  void *k, *v; /* optional [n, kv_heads, block_size, head_dim] */
  int64_t n;
  int32_t dtype; /* of k and v */
};
struct kvl_paged_attention_args {
  struct kvl_pages cache;
  const void *q;
  const int32_t *tables;            /* [seqs, max_blocks] */
  const int32_t *lens;              /* [seqs] */
  const int32_t *starts;            /* optional [seqs + 1]; NULL: tokens == seqs */
  const int32_t *selection;         /* optional [seqs, selection_heads, max_selected] */
  const int32_t *slots;             /* optional [seqs, slot_heads, max_selected] */
  const float *alibi;               /* optional [heads] */
  const float *prev_out, *prev_lse; /* optional: merged with the result */
  void *out;
  float *lse; /* optional [tokens, heads] */
  void *workspace;
  int64_t tokens, seqs, heads, max_blocks, max_selected, selection_heads, slot_heads;
  float scale, soft_cap;                    /* soft_cap 0: none */
  int32_t causal, window, dtype, out_dtype; /* window 0: none. dtype: of q */
  const uint64_t *tree;                     /* optional [tokens, tree_words] */
  int32_t tree_words;                       /* 0: no tree */
};
struct kvl_token_attention_args {
  struct kvl_pages cache;
  const void *q;
  const int32_t *places; /* [rows, place_heads, k] */
  void *out;
  float *lse;                          /* optional [rows, heads] */
  int64_t rows, heads, place_heads, k; /* place_heads: 1 or kv_heads */
  float scale;
  int32_t dtype, out_dtype; /* dtype: of q */
};
struct kvl_merge_attention_args {
  const void *out_a, *out_b;
  const float *lse_a, *lse_b;
  void *out;
  float *lse;             /* optional */
  int64_t rows, head_dim; /* rows = tokens * heads */
  int32_t dtype;
};
struct kvl_block_minmax_args {
  struct kvl_pages cache;
  const int32_t *blocks, *tokens;
  const int32_t *rows; /* of the summary; NULL: blocks */
  void *summary;       /* cache's dtype */
  int64_t n, summary_rows;
};
struct kvl_block_mean_args {
  struct kvl_pages cache;
  const int32_t *blocks, *tokens;
  const int32_t *rows; /* of the summary; NULL: blocks */
  void *summary;
  int64_t n, summary_rows;
  int32_t summary_dtype;
};
struct kvl_score_minmax_args {
  const void *q, *summary;
  const int32_t *tables, *lens;
  float *scores;
  int64_t seqs, heads, kv_heads, head_dim, max_blocks, blocks;
  int32_t block_size, group, dtype, summary_dtype;
};
struct kvl_score_mean_args {
  const void *q, *summary;
  const int32_t *tables, *lens;
  float *scores;
  int64_t seqs, heads, kv_heads, head_dim, max_blocks, blocks;
  int32_t block_size, group, dtype, summary_dtype;
};
struct kvl_score_max_qk_args {
  struct kvl_pages cache;
  const void *q;
  const int32_t *tables, *lens;
  float *scores;
  int64_t seqs, heads, max_blocks;
  int32_t group, dtype;
};
struct kvl_select_args {
  const float *scores;
  const int32_t *lens;
  int32_t *selection;
  int32_t *counts; /* optional */
  int64_t seqs, selection_heads, max_blocks, max_selected;
  kvl_budget budget;
  void *workspace;
  int32_t block_size;
};
struct kvl_trim_selection_args {
  const float *weights;
  const int32_t *lens;
  int32_t *selection;
  int32_t *counts; /* optional */
  int64_t seqs, heads, max_blocks, max_selected;
  double mass;
  int32_t block_size, sink, recent;
};

/* A bit of a hash is the sign of a sum. Every device adds in the order given here, so that
 * all of them find the same bit. Products are rounded before they are added. Part p of
 * KVL_HASH_PARTS adds the products of dims p, p + 16, ... in this order; then parts p and
 * p + 8 are added, p and p + 4, p and p + 2, p and p + 1. To hash a mean of tokens, or of the
 * heads of a group, their sum is taken, in their order: dividing it by their number would not
 * change a sign. */
enum { KVL_HASH_PARTS = 16, KVL_HASH_BITS_MAX = 1024 };
/* If all KV heads share one list, select_hamming takes at most this many words of query
 * hashes, kv_heads * words. */
enum { KVL_HASH_QUERY_MAX = 2048 };

struct kvl_hash_rows_args {
  const void *x;
  const float *planes;
  uint64_t *hashes;
  int64_t rows;
  int32_t head_dim, bits, dtype;
};
struct kvl_block_hash_args {
  struct kvl_pages cache;
  const int32_t *blocks, *tokens;
  const int32_t *rows; /* of the hashes; NULL: blocks */
  const float *planes;
  uint64_t *hashes;
  int64_t n, summary_rows;
  int32_t bits, is_token; /* is_token: one hash per token */
};
/* Hashes [blocks, kv_heads, tokens, words]. tokens is 1, or block_size if every token has a
 * hash. */
struct kvl_hash_view {
  const uint64_t *hashes;
  int64_t blocks;
  int32_t kv_heads, tokens, words;
  int32_t is_token;
};
struct kvl_score_hamming_args {
  const uint64_t *q; /* [seqs, kv_heads, words] */
  struct kvl_hash_view hashes;
  const int32_t *tables, *lens;
  float *scores; /* [seqs, score_heads, max_blocks] */
  int64_t seqs, score_heads, max_blocks;
  int32_t block_size;
};
struct kvl_select_hamming_args {
  const void *q;
  const float *planes;
  struct kvl_hash_view hashes;
  const int32_t *tables, *lens;
  int32_t *selection;
  int32_t *counts; /* optional */
  int64_t seqs, heads, selection_heads, max_blocks, max_selected;
  kvl_budget budget;
  int32_t block_size, head_dim, bits, dtype;
};

struct kvl_quantise_rows_args {
  const void *x;
  void *out;
  float *scales;
  int64_t rows, dim;
  int32_t dtype; /* of x */
  int32_t is_ue8m0;
};
/* A row whose largest |x| is amax gets the scale max(amax, KVL_INDEX_AMAX_LEAST) / 448, with
 * is_ue8m0 rounded up to a power of two, and x / scale is rounded to f8e4m3. The bits of a
 * positive f32 rounded up to a power of two: */
#define KVL_UE8M0_BITS(bits) (((bits) + 0x007FFFFFu) & 0x7F800000u)
#define KVL_INDEX_AMAX_LEAST 1e-4f
struct kvl_hadamard_args {
  const void *x;
  void *out;
  int64_t rows;
  float scale;
  int32_t dim, dtype; /* of x and out */
};
/* One layer's index-K memory, see runtime/kvlab.h. The key of block b and offset t begins at
 * byte b * block_size * (dim + 4) + t * dim, and its scale at byte b * block_size * (dim +
 * 4) + block_size * dim + 4 * t. */
struct kvl_index_view {
  uint8_t *memory;
  int64_t blocks;
  int32_t block_size, dim;
};
struct kvl_index_append_args {
  struct kvl_index_view cache;
  const void *k;
  const int64_t *places;
  int64_t n;
  int32_t dtype; /* of k */
  int32_t is_ue8m0;
};
struct kvl_index_gather_args {
  struct kvl_index_view cache;
  const int64_t *places;
  uint8_t *k;
  float *scales;
  int64_t n;
};
struct kvl_mqa_logits_args {
  const uint8_t *q, *k;
  const float *weights, *scales;
  const int32_t *starts, *ends;
  void *logits;
  int64_t rows, tokens, columns;
  int32_t heads, dim, dtype; /* of logits */
};
struct kvl_mqa_logits_paged_args {
  struct kvl_index_view cache;
  const uint8_t *q;
  const float *weights;
  const int32_t *tables, *lens;
  void *logits;
  int64_t sequences, each, max_blocks, columns; /* rows: sequences * each */
  int32_t heads, dtype;
};

/* How positions of tokens are transformed, see kvl_transform. */
struct kvl_transform_view {
  const int32_t *tables;       /* optional [sequences, width] */
  const int32_t *row_sequence; /* optional [rows] */
  const int32_t *offsets;      /* optional [rows] */
  int64_t sequences, width;
  int64_t rows_each; /* rows per sequence, if row_sequence is NULL */
  int32_t block_size;
};
struct kvl_topk_transform_args {
  const void *logits;    /* [rows, n] */
  const int32_t *starts; /* optional [rows] */
  const int32_t *lens;
  int32_t *out; /* [rows, k] */
  struct kvl_transform_view transform;
  int64_t rows, n, k;
  int32_t dtype;
};
struct kvl_transform_indices_args {
  const int32_t *positions; /* optional [rows, k] */
  const int32_t *lens;      /* [rows], without positions */
  int32_t *out;             /* [rows, k] */
  struct kvl_transform_view transform;
  int64_t rows, k;
};
struct kvl_topk_merge_args {
  const void *logits;    /* [rows, n]: columns first ... first + n - 1 */
  const int32_t *starts; /* optional [rows] */
  const int32_t *lens;
  const float *kept_values; /* [rows, k] */
  const int32_t *kept_positions;
  float *values; /* [rows, k] */
  int32_t *positions;
  int64_t rows, n, k, first;
  int32_t dtype;
};
struct kvl_ragged_places_args {
  const int32_t *tables;        /* [sequences, width] */
  const int32_t *starts, *ends; /* [sequences] */
  void *out;                    /* [n] */
  int64_t sequences, width, n;
  int32_t block_size, bytes_place;
};

struct kvl_move_blocks_args {
  struct kvl_pages src, dst; /* may differ in kv, blocks and pinned only */
  const int32_t *from, *to;  /* [seqs, lanes, n] */
  int64_t *moved;            /* optional */
  int64_t seqs, lanes, n;    /* lanes: 1 or kv_heads */
};
struct kvl_cut_selection_args {
  const int32_t *selection; /* optional [seqs, heads, max_selected] */
  const int32_t *tables, *lens;
  const int32_t *opens;               /* [seqs, 2] */
  int32_t *logical, *physical;        /* [passes, seqs, heads, n] */
  int32_t *open_logical, *open_slots; /* [seqs, heads, n_open] */
  int64_t seqs, heads, max_selected, max_blocks, passes, n, n_open;
  int32_t block_size;
};

/* One layer of a hot cache, see runtime/kvlab.h. */
struct kvl_hot_view {
  struct kvl_pages memory;   /* its .blocks is the number of slots */
  int32_t *slot_of;          /* [kv_heads, blocks] */
  int32_t *block_of, *order; /* [kv_heads, slots] */
  const float *priority;     /* optional [kv_heads, blocks] */
  int64_t *counters;         /* [5] */
  int32_t *ahead;            /* optional [kv_heads, slots] */
  int64_t blocks;            /* of the host tier */
};
struct kvl_hot_resolve_args {
  struct kvl_hot_view hot;
  const int32_t *selection;     /* [seqs, selection_heads, n] */
  const int32_t *tables;        /* [seqs, max_blocks] */
  int32_t *slots;               /* [seqs, kv_heads, n] */
  int32_t *miss_from, *miss_to; /* [kv_heads, seqs * n] */
  int32_t *hit_logical, *hit_slots, *miss_logical, *miss_slots; /* all or none */
  void *workspace;
  int64_t seqs, selection_heads, n, max_blocks;
  int32_t is_ahead;
};
struct kvl_hot_append_args {
  struct kvl_hot_view hot;
  struct kvl_pages cache;  /* the host tier */
  struct kvl_pages buffer; /* kv NULL: none */
  const void *k, *v;
  const int64_t *places; /* of the host tier */
  const int64_t *buffer_places;
  int64_t tokens;
  int32_t dtype; /* of k and v */
};
struct kvl_hot_drop_args {
  struct kvl_hot_view hot;
  const int32_t *blocks;
  int64_t n;
};

/* One layer's KV memory in vLLM's layout, see runtime/kvlab.h. In either cache, one KV head
 * of one block takes head_dim * block_size elements. Compute offsets in int64. */
struct kvl_vllm_view {
  void *keys, *values;
  const float *k_scale, *v_scale; /* optional [1], of an f8e4m3 cache */
  int64_t blocks;
  int32_t kv_heads, head_dim, block_size, dtype;
};
struct kvl_vllm_append_args {
  struct kvl_vllm_view cache;
  const void *k, *v;
  const int64_t *places;
  int64_t tokens;
  int32_t dtype; /* of k and v */
};
struct kvl_vllm_attention_args {
  struct kvl_vllm_view cache;
  const void *q;
  const int32_t *tables, *lens;
  const float *alibi; /* optional [heads] */
  void *out;
  void *workspace;
  int64_t seqs, heads, max_blocks;
  float scale;
  int32_t version, dtype; /* version: 1 or 2. dtype: of q and out */
};

/* How many blocks of a sequence of n blocks may be selected: the only definition, for both
 * devices. */
KVL_INLINE int32_t kvl__budget_blocks(kvl_budget b, int32_t n) {
  int32_t k = b.blocks;
  if (b.ratio >= 0) {
    /* ceil, with room for the rounding error of ratio * n: 0.1 * 30 must be 3 */
    double x = b.ratio * n - 1e-9 * (n + 1);
    k = (int32_t)x;
    if (x > k) k++;
  }
  if (k < b.min_blocks) k = b.min_blocks;
  if (k < b.sink + b.recent) k = b.sink + b.recent;
  return k < n ? k : n;
}

/* The part of a tile that belongs to a row. The tile has the columns first ... first + n - 1.
 * `count` columns belong to the row, from column `begin` of the tile on; `before` columns of
 * the row lie before the tile. */
struct kvl_window {
  int64_t begin, count, before;
};
KVL_INLINE struct kvl_window kvl__window(int32_t start, int32_t len, int64_t first,
                                         int64_t n) {
  struct kvl_window w;
  int64_t from = start > 0 ? start : 0, to = from + (len > 0 ? len : 0);
  int64_t low = from - first, high = to - first;
  if (low < 0) low = 0;
  if (low > n) low = n;
  if (high > n) high = n;
  w.begin = low;
  w.count = high > low ? high - low : 0;
  w.before = from < first ? (to < first ? to : first) - from : 0;
  return w;
}

/* The transform of one row. */
struct kvl_row_transform {
  const int32_t *table;
  int64_t width;
  int32_t block_size; /* 0: offset is added */
  int32_t offset;
};
KVL_INLINE struct kvl_row_transform kvl__row_transform(const struct kvl_transform_view *t,
                                                       int64_t row) {
  struct kvl_row_transform r = {0, 0, 0, 0};
  if (t->tables) {
    int64_t s = t->row_sequence ? t->row_sequence[row] : row / t->rows_each;
    r.block_size = t->block_size;
    if (s >= 0 && s < t->sequences) r.table = t->tables + s * t->width, r.width = t->width;
  } else if (t->offsets) {
    r.offset = t->offsets[row];
  }
  return r;
}
KVL_INLINE int32_t kvl__transformed(struct kvl_row_transform t, int32_t position) {
  if (position < 0) return -1;
  if (t.block_size == 0) return position + t.offset;
  /* unsigned division is faster */
  uint32_t p = (uint32_t)position, size = (uint32_t)t.block_size;
  if ((int64_t)(p / size) >= t.width) return -1;
  int32_t block = t.table[p / size];
  return block < 0 ? -1 : block * t.block_size + (int32_t)(p % size);
}

#endif
