/* kvlab: paged KV memory, streams and sparse-attention kernels behind one flat C API.
 *
 * The library promises: an op either runs as described or returns a negative status and
 * leaves its outputs alone; results do not depend on thread timing; memory is never
 * reused while a stream may still read it; the CPU and CUDA devices agree within each
 * op's stated tolerance.
 *
 *   kvl_device *dev;                      kvl_device_open("cpu", &dev);
 *   int64_t shape[2] = {4, 64};
 *   kvl_tensor x, w, y;
 *   kvl_tensor_open(dev, KVL_DTYPE_F32, 2, shape, &x);
 *   kvl_tensor_open(dev, KVL_DTYPE_F32, 2, shape, &y);
 *   kvl_tensor_open(dev, KVL_DTYPE_F32, 1, shape + 1, &w);
 *   kvl_fill(&w, 1.0);
 *   kvl_random(&x, KVL_RANDOM_NORMAL, 0.0, 1.0, 42, 0);
 *   if (kvl_rmsnorm(&x, NULL, &w, 1e-5, &y) < 0) puts(kvl_last_error());
 *   kvl_tensor_close(&x); kvl_tensor_close(&w); kvl_tensor_close(&y);
 *   kvl_device_close(dev);
 *
 * Caveats: ops are asynchronous on the device's current stream: synchronise before
 * reading tensor memory from the host (kvl_tensor_read does). Tensors are
 * contiguous and row-major. A kvl_tensor is a handle: copying the struct does not
 * retain its storage. Device handles may be used by one thread at a time.
 *
 * Every function returns >= 0 on success and a negative kvl_status on failure, unless it
 * says otherwise; out parameters come last and are untouched on failure. The words for
 * the calling thread's last failure are in kvl_last_error().
 */
#ifndef KVLAB_H
#define KVLAB_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ffi:begin -- also read by ffi.cdef: no '#', no macros, no 64-bit constants */

/* ---- status ------------------------------------------------------------------- */

/* The hash of the text between the ffi marks of base.h and kvlab.h that the library was built
 * with: the CRC of cksum(1). A caller that reads other headers than that must not go on. */
uint32_t kvl_abi(void);

/* Static text of a status. Never NULL. */
const char *kvl_status_text(int status);

/* Words of this thread's last failure: borrow, valid until its next failing call. */
const char *kvl_last_error(void);

/* Set (1) or clear (0) the interrupt flag; while it is set every op returns
 * KVL_ERR_INTERRUPTED. Safe to call from a signal handler. */
void kvl_interrupt(int set);
int kvl_interrupted(void);

/* Hostile builds only: the n-th allocation from now fails once (0 disarms). Returns
 * KVL_ERR_UNSUPPORTED in other builds. */
int kvl_fail_allocation(int n);

/* Monotonic clock in nanoseconds. */
int64_t kvl_clock_ns(void);

/* ---- device, stream, event ------------------------------------------------------ */

typedef struct kvl_device kvl_device;
typedef struct kvl_stream kvl_stream;
typedef struct kvl_event kvl_event;

typedef struct kvl_device_stats {
  int64_t bytes_live;            /* in tensors now */
  int64_t bytes_live_peak;       /* since open or kvl_device_reset_peak */
  int64_t bytes_cached;          /* held by the allocator, free for reuse */
  int64_t bytes_pinned;          /* in pinned host memory now */
  int64_t bytes_total;           /* of the device */
  int64_t bytes_free;            /* as the device reports it */
  int64_t allocations;           /* calls that reached the device's allocator */
  int64_t launches;              /* ops launched */
} kvl_device_stats;

/* Open "cpu", "cuda" or "cuda:N". Devices are counted: each open needs one close.
 * Errors: INVALID unknown name, DEVICE no such device or the plug-in cannot be loaded. */
int kvl_device_open(const char *name, kvl_device **out);
void kvl_device_close(kvl_device *dev);
const char *kvl_device_name(const kvl_device *dev);          /* "cpu", "cuda:0" */
const char *kvl_device_description(kvl_device *dev);   /* "NVIDIA H100 ...", "AVX-512, 2 threads" */
int kvl_device_is_cpu(const kvl_device *dev);
int kvl_device_stats_get(kvl_device *dev, kvl_device_stats *out);
int kvl_device_reset_peak(kvl_device *dev);
/* Wait for everything on every stream of the device. */
int kvl_device_sync(kvl_device *dev);
/* Give cached memory back to the device. */
int kvl_device_trim(kvl_device *dev);

/* The CPU's instruction set in use: "plain", "avx2" or "avx512"; kvl_cpu_use_isa chooses
 * (for specs and benches). Errors: UNSUPPORTED this machine lacks it. */
const char *kvl_cpu_isa(void);
int kvl_cpu_use_isa(const char *isa);

/* Emulate a link between the CPU device's memory and pinned memory: a transfer takes `us`
 * plus its bytes at `gb_s` (10^9 bytes a second), one at a time in each direction. Events of
 * the CPU device then tell a modelled time: ops take what they took, transfers what the link
 * would; the host's own time does not count, as if it ran ahead of a GPU, but its waits do.
 * Modelled time begins anew at every call. gb_s 0 ends it. Errors: INVALID negative, not
 * finite, gb_s below 1e-6 or us above 1e9. */
int kvl_cpu_link(double gb_s, double us);

/* A FIFO of work. The device's default stream exists from the start; on the CPU it runs
 * on the calling thread, every other CPU stream is a worker thread. */
int kvl_stream_open(kvl_device *dev, kvl_stream **out);
void kvl_stream_close(kvl_stream *stream);
int kvl_stream_sync(kvl_stream *stream);
/* Make `stream` (NULL: the default one) current: allocations, copies and ops go there. */
int kvl_device_use_stream(kvl_device *dev, kvl_stream *stream);
kvl_stream *kvl_device_stream(kvl_device *dev);               /* current; borrow */

int kvl_event_open(kvl_device *dev, kvl_event **out);
void kvl_event_close(kvl_event *event);
/* Mark the present end of `stream`; the event completes when the stream gets there. */
int kvl_event_record(kvl_event *event, kvl_stream *stream);
/* Later work on `stream` waits for the event. The host does not. A never recorded event
 * counts as complete. */
int kvl_stream_wait_event(kvl_stream *stream, kvl_event *event);
int kvl_event_sync(kvl_event *event);                         /* the host waits */
int kvl_event_done(kvl_event *event);                         /* 1 complete, 0 not */
/* Microseconds between two complete events. Errors: INVALID one is not recorded, or
 * kvl_cpu_link was called between them. */
int kvl_event_elapsed_us(kvl_event *from, kvl_event *to, double *us);

/* ---- tensor --------------------------------------------------------------------- */

typedef struct kvl_storage kvl_storage;

/* A contiguous row-major view of reference-counted storage. */
typedef struct kvl_tensor {
  void *ptr;                     /* first element, in the device's memory */
  kvl_storage *storage;          /* NULL: closed */
  kvl_device *device;
  int64_t shape[6];              /* KVL_DIMS_MAX; unused dims are 1 */
  int64_t count;                 /* elements */
  int32_t ndim;
  int32_t dtype;                 /* kvl_dtype */
} kvl_tensor;

int kvl_dtype_bytes(int dtype);
const char *kvl_dtype_name(int dtype);                        /* "bf16" */

/* Uninitialised tensor on the current stream of `dev`.
 * Errors: INVALID ndim or a negative or overflowing shape, NO_MEMORY. */
int kvl_tensor_open(kvl_device *dev, int dtype, int ndim, const int64_t *shape,
                    kvl_tensor *out);
/* Uninitialised tensor in pinned host memory: `dev` reads and writes it over the link, and
 * every op takes it like a tensor of `dev`. huge_pages: ask the system for 2 MiB pages.
 * Errors: as kvl_tensor_open. */
int kvl_tensor_open_pinned(kvl_device *dev, int dtype, int ndim, const int64_t *shape,
                           int huge_pages, kvl_tensor *out);
int kvl_tensor_is_pinned(const kvl_tensor *t);
/* Drop this handle's hold on the storage; closing a closed tensor does nothing. */
void kvl_tensor_close(kvl_tensor *t);
/* View of elements [start, start + length) of dimension 0; retains the storage. */
int kvl_tensor_narrow(const kvl_tensor *t, int64_t start, int64_t length,
                      kvl_tensor *out);
/* View of entry `index` of dimension 0, with that dimension removed. */
int kvl_tensor_index(const kvl_tensor *t, int64_t index, kvl_tensor *out);
/* View with another shape of the same count. */
int kvl_tensor_reshape(const kvl_tensor *t, int ndim, const int64_t *shape,
                       kvl_tensor *out);
/* Wrap memory that the caller lends until every view is closed and the device synced. */
int kvl_tensor_wrap(kvl_device *dev, int dtype, int ndim, const int64_t *shape,
                    void *memory, kvl_tensor *out);

/* dst = src; same dtype and count; any pair of devices. Asynchronous on the current
 * stream of the CUDA side (of dst's device between two CPU tensors); waits when the bytes
 * go from CUDA to the CPU. */
int kvl_copy(const kvl_tensor *src, const kvl_tensor *dst);
/* Copy from or to host memory. write: the memory may be reused at return;
 * read: waits until the bytes are there. `bytes` must equal the tensor's size. Every f32
 * NaN is read as the one quiet NaN: LuaJIT takes some others for values of its own. */
int kvl_tensor_write(const kvl_tensor *t, const void *memory, int64_t bytes);
int kvl_tensor_read(const kvl_tensor *t, void *memory, int64_t bytes);

/* ---- elementwise, reductions, matmul ---------------------------------------------- */
/* Floating inputs may be f32, f16 or bf16; arithmetic is fp32; `out` may alias an input
 * of the same dtype and shape. */

/* t[...] = value, converted to t's dtype. */
int kvl_fill(const kvl_tensor *t, double value);
/* t[i] = start + i * step, any dtype but f8e4m3. */
int kvl_arange(const kvl_tensor *t, double start, double step);
/* Philox4x32-10, the same bits on every device. Element i uses word (offset + i) of the
 * sequence of `seed`. UNIFORM: f32/f16/bf16 in (a, b]; NORMAL: mean a, deviation b;
 * INTEGER: i32 or i64 in [a, b). Source: Salmon et al. 2011; cuRAND's counter layout. */
int kvl_random(const kvl_tensor *t, int kind, double a, double b, uint64_t seed,
               uint64_t offset);
/* out = a converted to out's dtype: any pair of f32 f16 bf16 i32 i64 u8, and
 * f32/f16/bf16 <-> f8e4m3 (saturating). Same count. */
int kvl_cast(const kvl_tensor *a, const kvl_tensor *out);
int kvl_unary(int op, const kvl_tensor *a, const kvl_tensor *out);
/* out = a op b with NumPy's broadcasting. a, b: one dtype of f32 f16 bf16 i32 i64.
 * out: the same dtype, or u8 (0 or 1) for comparisons. */
int kvl_binary(int op, const kvl_tensor *a, const kvl_tensor *b, const kvl_tensor *out);
int kvl_binary_scalar(int op, const kvl_tensor *a, double b, const kvl_tensor *out);
/* out = cond ? a : b; cond u8; four equal shapes. */
int kvl_where(const kvl_tensor *cond, const kvl_tensor *a, const kvl_tensor *b,
              const kvl_tensor *out);
/* Reduce dimension `dim` of a (f32 f16 bf16, or i32 for SUM MAX MIN); out has a's shape
 * without it, and a's dtype or f32. An empty dimension gives 0 for SUM and NaN for MEAN,
 * -inf for MAX, +inf for MIN (INVALID for i32 MAX and MIN). */
int kvl_reduce(int op, const kvl_tensor *a, int dim, const kvl_tensor *out);
/* Softmax over the last dimension of scale * a. A row of -inf gives zeros. */
int kvl_softmax(const kvl_tensor *a, double scale, const kvl_tensor *out);
/*  a    f32 f16 bf16  [..., n]
 *  out  i32           [...]       ties to the lower index; NaN never wins; n >= 1 */
int kvl_argmax(const kvl_tensor *a, const kvl_tensor *out);
/* Exact top-k of each row, in descending order (ascending for KVL_TOPK_LEAST), ties to the
 * lower index, NaN last. k = n sorts. `which` is LEAST or LARGEST, with BY_INDEX (or'ed) the
 * same k in index order: several times faster where k is large.
 *  a        f32  [rows, n]
 *  values   f32  [rows, k]   may be NULL
 *  indices  i32  [rows, k]   0 <= k <= n */
enum { KVL_TOPK_LEAST = 0, KVL_TOPK_LARGEST = 1, KVL_TOPK_BY_INDEX = 2 };
int kvl_topk(const kvl_tensor *a, int which, const kvl_tensor *values,
             const kvl_tensor *indices);
/* out = a @ b, or a @ b^T for transpose_b; fp32 accumulation.
 *  a    f32 f16 bf16  [m, k] or [batch, m, k]
 *  b    like a        [k, n] ([n, k] transposed), 2-D for every batch or [batch, ...]
 *  out  like a, or f32  [m, n] or [batch, m, n]
 * f8e4m3 [m, k] by [n, k] transposed into f32, f16 or bf16: k a multiple of 16, n of 8, all at
 * multiples of 16 bytes. Errors: UNSUPPORTED on a GPU before sm_89. */
int kvl_matmul(const kvl_tensor *a, const kvl_tensor *b, int transpose_b,
               const kvl_tensor *out);
/* out[i] = src[index[i]]: whole rows of dimension 0; an index out of range gives zeros.
 *  src    any  [rows, ...]
 *  index  i32  [n]
 *  out    like src [n, ...] */
int kvl_gather_rows(const kvl_tensor *src, const kvl_tensor *index,
                    const kvl_tensor *out);
/* dst[index[i]] = src[i]; an index out of range is skipped; duplicates: the last wins. */
int kvl_scatter_rows(const kvl_tensor *src, const kvl_tensor *index,
                     const kvl_tensor *dst);
/* out[r][j] = src[r][index[r][j]]; an index out of range gives zero.
 *  src f32 f16 bf16 i32 [rows, n] · index i32 [rows, m] · out like src [rows, m] */
int kvl_gather(const kvl_tensor *src, const kvl_tensor *index, const kvl_tensor *out);
/* dst[r][index[r][j]] = src[r][j], or += it where `add`; an index out of range is skipped, and
 * no index comes twice in a row.
 *  src f32 i32 [rows, m] · index i32 [rows, m] · dst like src [rows, n] */
int kvl_scatter(const kvl_tensor *src, const kvl_tensor *index, int add,
                const kvl_tensor *dst);

/* ---- transformer ops ---------------------------------------------------------------- */

/* out = x / sqrt(mean(x^2) + eps) * weight over the last dimension. With `residual`,
 * first residual += x, in place, and the sum is what is normalised.
 *  x, out    f32 f16 bf16  [rows, dim]
 *  residual  like x        [rows, dim]   may be NULL
 *  weight    like x or f32 [dim] */
int kvl_rmsnorm(const kvl_tensor *x, const kvl_tensor *residual, const kvl_tensor *weight,
                double eps, const kvl_tensor *out);
/* Rotate pairs (i, i + dim/2) of each head by positions[t] * inv_freq[i], in place; the
 * dims past 2 * pairs stay. Source: Su et al. 2021, the half-split form of Hugging Face.
 *  x          f32 f16 bf16  [tokens, heads, head_dim]
 *  positions  i32           [tokens]
 *  inv_freq   f32           [pairs]      pairs <= head_dim / 2 */
int kvl_rope(const kvl_tensor *x, const kvl_tensor *positions,
             const kvl_tensor *inv_freq);
/* out = silu(gate) * up; f32 f16 bf16 [rows, dim], equal shapes and dtypes. */
int kvl_silu_mul(const kvl_tensor *gate, const kvl_tensor *up, const kvl_tensor *out);

/* ---- block pool and sequences (host side) ---------------------------------------------- */

typedef struct kvl_pool kvl_pool;
typedef struct kvl_sequence kvl_sequence;

/* Bookkeeping for `blocks` blocks of `block_size` (1 ... 4096) tokens. An allocation that
 * would leave fewer than `watermark` blocks free fails. Errors: INVALID, NO_MEMORY. */
int kvl_pool_open(int blocks, int block_size, int watermark, kvl_pool **out);
/* Sequences keep their pool alive. */
void kvl_pool_close(kvl_pool *pool);
int kvl_pool_blocks_free(const kvl_pool *pool);
/* References held on a block. Errors: INVALID out of range. */
int kvl_pool_block_refs(const kvl_pool *pool, int block);
/* One reference more, one less, on a block that is not free: what a cache of prefixes keeps
 * after the sequence that filled a block is gone. Errors: INVALID. */
int kvl_pool_hold(kvl_pool *pool, int block);
int kvl_pool_release(kvl_pool *pool, int block);

int kvl_sequence_open(kvl_pool *pool, kvl_sequence **out);
/* A sequence of the same tokens that shares every block. */
int kvl_sequence_fork(const kvl_sequence *seq, kvl_sequence **out);
/* Lengthen a sequence of whole blocks by n full blocks that are held elsewhere, and share
 * them. Errors: INVALID its length is no multiple of block_size, a block is free or out of
 * range; NO_MEMORY. */
int kvl_sequence_share(kvl_sequence *seq, const int32_t *blocks, int n);
/* Gives its references back. NULL is fine. */
void kvl_sequence_close(kvl_sequence *seq);
int kvl_sequence_length(const kvl_sequence *seq);             /* tokens */
int kvl_sequence_blocks(const kvl_sequence *seq);             /* blocks held */
/* Lengthen n sequences, sequence i by tokens[i] >= 0: all of them or none.
 *  seqs    n sequences of one pool, no one twice
 *  tokens  i32[n]
 *  slots   i64[sum of tokens]  physical slot (block * block_size + offset) of each new
 *                              token, sequence after sequence
 *  copies  i32[2 * n]          pairs (from, to): a shared, partly filled last block was
 *                              replaced; its memory has to be copied before the append
 * Returns how many pairs. Errors: INVALID, NO_BLOCKS, NO_MEMORY. */
int kvl_sequences_append(kvl_sequence *const *seqs, const int32_t *tokens, int n,
                         int64_t *slots, int32_t *copies);
/* Shorten to `length` tokens, freeing blocks past it. */
int kvl_sequence_truncate(kvl_sequence *seq, int length);
/* Write the block table, padded with -1 to `width`. Errors: INVALID it does not fit. */
int kvl_sequence_table(const kvl_sequence *seq, int32_t *row, int width);

/* ---- paged KV ops --------------------------------------------------------------------- */
/* cache is one layer's KV memory: f32 f16 bf16 f8e4m3 [blocks, 2, kv_heads, block_size,
 * head_dim] (K then V). head_dim: a multiple of 8 (f8e4m3: of 16), 8 ... 256. What an f8e4m3
 * cache holds is k / k_scale[kv_head] and v / v_scale[kv_head], with scales f32 [kv_heads]
 * that belong to it (NULL: 1); other caches have none. Summaries and scores of such a cache
 * are in its own units: a scale > 0 does not change the order of a KV head's blocks. cache,
 * q, k, v, out and summary begin at a multiple of 16 bytes. tables: i32 [seqs, max_blocks],
 * physical blocks in logical order. lens: i32 [seqs] tokens, lens[s] <= max_blocks *
 * block_size. Logical block b of sequence s holds tokens b * block_size and on; what lies
 * past lens[s] is never read into a result, whatever its bits. */

/* cache[slot] = k, v; slot < 0 is skipped.
 *  k, v              like cache or f32 (f8e4m3 cache: f32 f16 bf16)
 *                    [tokens, kv_heads, head_dim]
 *  slots             i64 [tokens]
 *  k_scale, v_scale  f32 [kv_heads] of an f8e4m3 cache, see above; NULL */
int kvl_append_kv(const kvl_tensor *k, const kvl_tensor *v, const kvl_tensor *slots,
                  const kvl_tensor *cache, const kvl_tensor *k_scale,
                  const kvl_tensor *v_scale);
/* kvl_rope of q and k, then kvl_append_kv of them, in one launch and with the same bits: q is
 * rotated in place, k on its way into the cache, and k and v stay as they are. No two slots
 * are the same.
 *  q                    like k  [tokens, heads, head_dim]
 *  k, v, slots, scales  as for kvl_append_kv
 *  positions, inv_freq  as for kvl_rope */
int kvl_rope_append(const kvl_tensor *q, const kvl_tensor *k, const kvl_tensor *v,
                    const kvl_tensor *positions, const kvl_tensor *inv_freq,
                    const kvl_tensor *slots, const kvl_tensor *cache,
                    const kvl_tensor *k_scale, const kvl_tensor *v_scale);
/* Copy whole blocks: dst[i] = src[i]; no block is both. src, dst: i32 [n], -1 skipped. */
int kvl_copy_blocks(const kvl_tensor *src, const kvl_tensor *dst,
                    const kvl_tensor *cache);

/* out = softmax(scale * q k^T + bias) v over the blocks of each sequence, or over a
 * selection of them; fp32 accumulation.
 *  q          f32 f16 bf16  [tokens, heads, head_dim]   heads % kv_heads == 0
 *  cache      like q, or f8e4m3; any of them when q is f32
 *  tables     i32  [seqs, max_blocks]
 *  lens       i32  [seqs]
 *  starts     i32  [seqs + 1]  rows of q: sequence s owns starts[s] ... starts[s+1]-1, its
 *                  last ones being its newest tokens. NULL: decode, one row a sequence
 *  selection  i32  [seqs, kv_heads or 1, max_selected]  ascending logical blocks, -1
 *                  padded; NULL: every block
 *  slots      i32  [seqs, kv_heads or 1, max_selected]  the physical block of each selected
 *                  one, in place of tables (ring slots, hot cache). NULL: tables says
 *  alibi      f32  [heads] slopes, NULL: none; bias = slope * (key position - query
 *                  position)
 *  prev_out   f32  [tokens, heads, head_dim]  an attention over other keys, joined to this
 *  prev_lse   f32  [tokens, heads]   one; both or neither. out may alias prev_out, lse may
 *                  not alias prev_lse
 *  out        like q, or f32  [tokens, heads, head_dim]
 *  lse        f32  [tokens, heads]  log of the softmax's denominator; may be NULL
 * causal: a row sees keys at positions <= its own; else every key of the sequence.
 * window: it sees no key at positions <= its own - window; 0: no window.
 * soft_cap: a score s = scale * q k becomes soft_cap * tanh(s / soft_cap) before the ALiBi
 * bias is added; 0: it stays.
 * k_scale, v_scale: f32 [kv_heads] of an f8e4m3 cache, NULL: 1.
 * A row that sees nothing gets out 0 and lse -inf. */
typedef struct kvl_attention {
  const kvl_tensor *q, *cache, *tables, *lens, *starts, *selection, *slots, *alibi;
  const kvl_tensor *prev_out, *prev_lse, *out, *lse, *k_scale, *v_scale;
  double scale, soft_cap;
  int32_t causal, window;
} kvl_attention;
int kvl_paged_attention(const kvl_attention *call);

/* out = softmax(scale * q k^T) v over listed tokens: what an indexer selected for each row, be
 * it a decoded token or one of a prompt. Whoever writes the list has left out what a row must
 * not see; a token that comes twice counts twice.
 *  q      f32 f16 bf16  [rows, heads, head_dim]   heads % kv_heads == 0
 *  cache  as for kvl_paged_attention
 *  slots  i32  [rows, k], or [rows, kv_heads, k] for a list a KV head: block * block_size +
 *              offset of each token, in any order; -1, or any number that is no slot: nothing
 *  out    like q, or f32  [rows, heads, head_dim]
 *  lse    f32  [rows, heads]   may be NULL
 * A row that sees nothing gets out 0 and lse -inf. */
int kvl_token_attention(const kvl_tensor *q, const kvl_tensor *cache, const kvl_tensor *slots,
                        double scale, const kvl_tensor *k_scale, const kvl_tensor *v_scale,
                        const kvl_tensor *out, const kvl_tensor *lse);

/* Join two attentions over disjoint keys: out may alias out_a, lse may alias lse_a.
 *  out_a, out_b, out  f32 f16 bf16  [tokens, heads, head_dim]  one dtype
 *  lse_a, lse_b, lse  f32           [tokens, heads]     lse may be NULL */
int kvl_merge_attention(const kvl_tensor *out_a, const kvl_tensor *lse_a,
                        const kvl_tensor *out_b, const kvl_tensor *lse_b,
                        const kvl_tensor *out, const kvl_tensor *lse);

/* Elementwise min and max of K over the valid tokens of the given blocks.
 *  blocks   i32  [n]   physical; -1 is skipped
 *  tokens   i32  [n]   valid tokens; 0 gives min +inf, max -inf (f8e4m3: 448, -448)
 *  rows     i32  [n]   where in the summary each goes; -1 is skipped. NULL: like blocks
 *  summary  like cache  [rows, 2, kv_heads, head_dim] */
int kvl_block_minmax(const kvl_tensor *cache, const kvl_tensor *blocks,
                     const kvl_tensor *tokens, const kvl_tensor *rows,
                     const kvl_tensor *summary);
/* Mean of K; 0 tokens give 0. summary  like cache or f32  [rows, kv_heads, head_dim] */
int kvl_block_mean(const kvl_tensor *cache, const kvl_tensor *blocks,
                   const kvl_tensor *tokens, const kvl_tensor *rows,
                   const kvl_tensor *summary);

/* Score every block of every sequence; blocks past the last get -inf.
 *  q        f32 f16 bf16  [seqs, heads, head_dim]
 *  scores   f32           [seqs, kv_heads, max_blocks]
 * minmax: sum_d max(q_d * min_d, q_d * max_d)   (Quest, Tang et al. 2024)
 * mean:   q . mean
 * max_qk: the largest q . k of the block's valid tokens, read from the cache itself */
int kvl_score_minmax(const kvl_tensor *q, const kvl_tensor *summary,
                     const kvl_tensor *tables, const kvl_tensor *lens, int block_size,
                     int group, const kvl_tensor *scores);
int kvl_score_mean(const kvl_tensor *q, const kvl_tensor *summary,
                   const kvl_tensor *tables, const kvl_tensor *lens, int block_size,
                   int group, const kvl_tensor *scores);
int kvl_score_max_qk(const kvl_tensor *q, const kvl_tensor *cache,
                     const kvl_tensor *tables, const kvl_tensor *lens, int group,
                     const kvl_tensor *scores);

/* ---- hashes --------------------------------------------------------------------------- */
/* A hash of a vector x by random planes: bit b is 1 where planes[b] . x > 0; the share of bits
 * in which two hashes differ estimates the angle between their vectors over pi. 64 bits a word,
 * bit 0 the lowest; the upper half of the word of 32 bits is 0. The sign is that of a sum in
 * one fixed order, see kernels.h: the same bits on every device.
 *  planes  f32  [bits, head_dim]   bits: 32, or a multiple of 64 up to 1024
 *  words   (bits + 63) / 64
 * Source: Charikar 2002 (random hyperplanes). */

/*  x       f32 f16 bf16  [rows, head_dim]
 *  hashes  u64           [rows, words] */
int kvl_hash_rows(const kvl_tensor *x, const kvl_tensor *planes, const kvl_tensor *hashes);
/* Hashes of K: blocks, tokens and rows as for kvl_block_minmax. Either form:
 *  hashes  u64  [rows, kv_heads, words]              of the mean of a block's valid tokens
 *          u64  [rows, kv_heads, block_size, words]  of each of them; others stay as they are */
int kvl_block_hash(const kvl_tensor *cache, const kvl_tensor *blocks,
                   const kvl_tensor *tokens, const kvl_tensor *rows,
                   const kvl_tensor *planes, const kvl_tensor *hashes);
/* Score every block of every sequence by how many bits of its hash are not those of the
 * query's, negative: 0 is the best, blocks past the last get -inf. Of token hashes, the best
 * of the block's valid tokens counts.
 *  q_hashes  u64  [seqs, kv_heads, words]
 *  hashes    u64  [blocks, kv_heads, words] or [blocks, kv_heads, block_size, words]
 *  scores    f32  [seqs, kv_heads or 1, max_blocks]   1: the best of the KV heads */
int kvl_score_hamming(const kvl_tensor *q_hashes, const kvl_tensor *hashes,
                      const kvl_tensor *tables, const kvl_tensor *lens, int block_size,
                      const kvl_tensor *scores);

/* How many blocks of a sequence of n blocks a budget lets a policy select (see kvl_budget). */
int kvl_budget_blocks(const kvl_budget *budget, int n);

/* The first `sink` and last `recent` blocks and the highest scores, exactly; ties to the
 * lower index, NaN last. Rows shorter than max_selected are padded with -1.
 *  scores     f32  [seqs, kv_heads or 1, max_blocks]
 *  lens       i32  [seqs]
 *  selection  i32  [seqs, same, max_selected]  ascending. Every budget must fit; what
 *                  exceeds max_selected is dropped from the low scores
 *  counts     i32  [seqs, same]  may be NULL */
int kvl_select(const kvl_tensor *scores, const kvl_tensor *lens, int block_size,
               const kvl_budget *budget, const kvl_tensor *selection,
               const kvl_tensor *counts);

/* kvl_hash_rows of the mean query of each KV head's group, kvl_score_hamming and kvl_select in
 * one launch that writes no scores, and exactly their selection.
 *  q                  f32 f16 bf16  [seqs, heads, head_dim]   heads % kv_heads == 0
 *  planes, hashes     as above; tables, lens and budget as for kvl_score_hamming, kvl_select
 *  selection, counts  as for kvl_select; selection_heads is kv_heads or 1 */
typedef struct kvl_hamming {
  const kvl_tensor *q, *planes, *hashes, *tables, *lens, *selection, *counts;
  kvl_budget budget;
  int32_t block_size;
  int32_t reserved;
} kvl_hamming;
int kvl_select_hamming(const kvl_hamming *call);

/* Shorten selections, in place, to the fewest blocks whose weights reach `mass` (0 ... 1) of
 * the sum over all blocks of their sequence (top-p): the first `sink` and last `recent` blocks
 * stay; of the others the heaviest are kept, ties to the lower index. Where the selection has
 * less than that, and with mass 1, all of it stays.
 *  weights    f32  [seqs, kv_heads or 1, max_blocks]    what is not > 0 counts as 0
 *  lens       i32  [seqs]
 *  selection  i32  [seqs, same, max_selected]           as kvl_select writes it
 *  counts     i32  [seqs, same]  may be NULL */
int kvl_trim_selection(const kvl_tensor *weights, const kvl_tensor *lens, int block_size,
                       double mass, int sink, int recent, const kvl_tensor *selection,
                       const kvl_tensor *counts);

/* ---- index-K: what a lightning indexer scores with ------------------------------------------ */
/* An indexer scores every token by one small key that all its heads share, and attention looks
 * at the best. Its keys are f8e4m3 with a scale a token, x ~ k * scale. index-K memory of a
 * layer is u8 [blocks, block_size * (dim + 4)]: of a block first the block_size keys, dim bytes
 * each, then their f32 scales. dim is 32, 64 or 128; keys, q and the memory begin at a multiple
 * of 16 bytes. slots: i64 [n], block * block_size + offset, as everywhere.
 * Source: DeepSeek-V3.2 (DSA) and its pool of blocks in SGLang. */

/* Each row by its largest |x|: scale = max(amax, 1e-4) / 448, out = x / scale, saturating; NaN
 * stays, and is not the largest. The same bits on every device.
 *  x       f32 f16 bf16  [..., dim]
 *  out     f8e4m3        [..., dim]
 *  scales  f32           [...] */
int kvl_quantise_rows(const kvl_tensor *x, const kvl_tensor *out, const kvl_tensor *scales);
/* out = scale * H x along the last dim, H the Walsh-Hadamard matrix in Sylvester's order: with
 * scale dim^-0.5 a rotation, which spreads what a few dims have over all of them. Sums are f32
 * in one order: the same bits on every device. out may be x.
 *  x, out  f32 f16 bf16  [..., dim]   dim a power of two up to 1024 */
int kvl_hadamard(const kvl_tensor *x, double scale, const kvl_tensor *out);
/* cache[slot] = k, as kvl_quantise_rows quantises it; slot < 0 is skipped; no two are the same.
 *  k      f32 f16 bf16  [n, dim]
 *  cache  u8            [blocks, block_size * (dim + 4)] */
int kvl_index_append(const kvl_tensor *k, const kvl_tensor *slots, const kvl_tensor *cache);
/* The keys at slots and their scales; zeros for a slot that is none.
 *  k       f8e4m3  [n, dim]
 *  scales  f32     [n] */
int kvl_index_gather(const kvl_tensor *cache, const kvl_tensor *slots, const kvl_tensor *k,
                     const kvl_tensor *scales);

/* logits[r][j] = scales[j] * sum over heads h of weights[r][h] * max(q[r][h] . k[j], 0), for
 * max(starts[r], 0) <= j < min(ends[r], tokens, columns); the other columns stay as they are.
 * Sums are f32: over dims as the device multiplies (Hopper's tensor cores keep about 14 bits
 * of a sum of products of f8e4m3), over heads in an order of its own, which does not change
 * from run to run nor with the rows and columns of a call.
 *  q        f8e4m3  [rows, heads, dim]   heads 1 ... 64; weights may hold q's scale
 *  weights  f32     [rows, heads]
 *  k        f8e4m3  [tokens, dim]
 *  scales   f32     [tokens]
 *  starts   i32     [rows]
 *  ends     i32     [rows]
 *  logits   f32 bf16  [rows, columns] */
int kvl_mqa_logits(const kvl_tensor *q, const kvl_tensor *weights, const kvl_tensor *k,
                   const kvl_tensor *scales, const kvl_tensor *starts, const kvl_tensor *ends,
                   const kvl_tensor *logits);
/* The same over index-K memory: row r looks at the first lens[r] tokens of sequence r / each,
 * where rows = sequences * each, as far as its table and the columns go. Tokens of an entry
 * that is no block get -inf.
 *  cache   u8   [blocks, block_size * (dim + 4)]
 *  tables  i32  [sequences, max_blocks]
 *  lens    i32  [rows] */
int kvl_mqa_logits_paged(const kvl_tensor *q, const kvl_tensor *weights,
                         const kvl_tensor *cache, const kvl_tensor *tables,
                         const kvl_tensor *lens, const kvl_tensor *logits);
/* ---- tokens by top-k --------------------------------------------------------------------- */
/* From a row of logits, one a token, to the tokens that sparse attention reads. A row's tokens
 * are columns starts[r] ... starts[r] + lens[r] - 1 (cut to the columns that there are) and
 * their positions count from 0 at starts[r]; what other columns hold does not matter. Exact:
 * ties go to the lower position, NaN counts below -inf, -0 is 0. Positions come in ascending
 * order, then -1. Source: the top-k and its transforms of SGLang's NSA indexer, whose own is
 * unordered and drops candidates past 16384. */

/* What positions become; NULL or all NULL: they stay.
 *  tables        i32  [sequences, width]  PAGED: the slot, tables[s][p / block_size] *
 *                     block_size + p % block_size, of sequence s = row_sequence[r]; -1 where
 *                     the table has no block. Tables are read in place
 *  row_sequence  i32  [rows]  NULL: rows / sequences rows of each in turn
 *  offsets       i32  [rows]  RAGGED: p + offsets[r]; not beside tables */
typedef struct kvl_transform {
  const kvl_tensor *tables, *row_sequence, *offsets;
  int32_t block_size;            /* of tables; 1 ... 4096 */
  int32_t reserved;
} kvl_transform;

/* The k = out.shape[1] largest logits of each row. A row of at most k tokens takes all of
 * them, and its logits are not read.
 *  logits  f32 bf16  [rows, n]
 *  starts  i32       [rows]  NULL: 0
 *  lens    i32       [rows]
 *  out     i32       [rows, k] */
int kvl_topk_transform(const kvl_tensor *logits, const kvl_tensor *starts,
                       const kvl_tensor *lens, const kvl_transform *transform,
                       const kvl_tensor *out);
/* The transformation alone.
 *  positions  i32  [rows, k]  < 0 gives -1; NULL: 0 ... lens[r] - 1
 *  lens       i32  [rows]     where positions is NULL, else NULL
 *  out        i32  [rows, k]  may be positions */
int kvl_transform_indices(const kvl_tensor *positions, const kvl_tensor *lens,
                          const kvl_transform *transform, const kvl_tensor *out);
/* Running top-k of rows that never are in memory whole: joins columns first ... first + n - 1
 * to the k largest of the columns before, which are not read where first is 0.
 *  logits           f32 bf16  [rows, n]
 *  starts, lens     i32  [rows]     in columns of the whole row; starts may be NULL
 *  kept_values      f32  [rows, k]  of the call before; any for first = 0
 *  kept_positions   i32  [rows, k]
 *  values           f32  [rows, k]  -inf padded; other memory than what is kept
 *  positions        i32  [rows, k] */
int kvl_topk_merge(const kvl_tensor *logits, int64_t first, const kvl_tensor *starts,
                   const kvl_tensor *lens, const kvl_tensor *kept_values,
                   const kvl_tensor *kept_positions, const kvl_tensor *values,
                   const kvl_tensor *positions);
/* Slots of a stretch of every sequence, one behind the other: out[ends[s - 1] + i] is that of
 * token starts[s] + i of sequence s, as PAGED above; what is past ends[sequences - 1] gets -1.
 *  tables  i32      [sequences, width]
 *  starts  i32      [sequences]
 *  ends    i32      [sequences]  cumulative lengths
 *  out     i32 i64  [n] */
int kvl_ragged_slots(const kvl_tensor *tables, int block_size, const kvl_tensor *starts,
                     const kvl_tensor *ends, const kvl_tensor *out);

/* ---- vLLM layout ------------------------------------------------------------------------ */
/* PagedAttention V1 and V2 of vLLM over its own layout of KV memory: a baseline. One layer:
 *  key_cache    f32 f16 bf16 f8e4m3  [blocks, kv_heads, head_dim / x, block_size, x]
 *  value_cache  like key_cache       [blocks, kv_heads, head_dim, block_size]
 * with x = 16 / bytes of an element. head_dim: 32 64 80 96 112 120 128 192 256, a multiple of
 * x; block_size: 8 16 32. An f8e4m3 cache holds k / k_scale[0] and v / v_scale[0]; scales are
 * f32 [1], NULL: 1; other caches have none. Source: vllm-project/vllm, csrc/attention. */

/* key_cache[slot], value_cache[slot] = k, v; slot < 0 is skipped.
 *  k, v   like the caches or f32 (f8e4m3 caches: f32 f16 bf16)  [tokens, kv_heads, head_dim]
 *  slots  i64  [tokens]  block * block_size + offset */
int kvl_vllm_append(const kvl_tensor *k, const kvl_tensor *v, const kvl_tensor *slots,
                    const kvl_tensor *key_cache, const kvl_tensor *value_cache,
                    const kvl_tensor *k_scale, const kvl_tensor *v_scale);

/* Decode: out = softmax(scale * q k^T + bias) v over every block of each sequence.
 *  q       like the caches (f8e4m3 caches: f32 f16 bf16)  [seqs, heads, head_dim]
 *  tables  i32  [seqs, max_blocks]   an entry that is no block holds no keys
 *  lens    i32  [seqs]
 *  alibi   f32  [heads] slopes, NULL: none
 *  out     like q  [seqs, heads, head_dim]   0 for a sequence without keys
 * version: 1, one pass over a sequence, whose logits are in shared memory all at once; 2,
 * partitions of 512 tokens, joined by a second kernel; 0, vLLM's choice: with longest =
 * max_blocks * block_size, 1 where longest <= 8192 and (longest <= 512 or seqs * heads >
 * 512), else 2. On the CPU they are the same. Errors: INVALID, NO_MEMORY; UNSUPPORTED 4 *
 * longest bytes are more than a thread block may have (version 1 on an H100: past about 57
 * thousand tokens). */
typedef struct kvl_vllm {
  const kvl_tensor *q, *key_cache, *value_cache, *tables, *lens, *alibi, *out;
  const kvl_tensor *k_scale, *v_scale;
  double scale;
  int32_t version;
  int32_t reserved;
} kvl_vllm;
int kvl_vllm_attention(const kvl_vllm *call);

/* ---- graphs ------------------------------------------------------------------------------ */

/* What is launched between begin and end is recorded and not run; a replay runs all of it
 * without the host. Ops read lengths, tables and selections from the device, so a recorded
 * step serves later ones. The graph keeps the memory that was allocated while it was
 * recorded. Other streams take part when they wait for an event recorded on the stream of
 * begin, and that stream waits for them before the end. */
typedef struct kvl_graph kvl_graph;

/* Record what goes to the device's current stream. Reading from or writing to the host, and
 * waiting, are errors until the end. Errors: INVALID recording already, DEVICE. */
int kvl_graph_begin(kvl_device *dev);
int kvl_device_is_recording(const kvl_device *dev);
/* End the recording, also after a failure inside it. Errors: INVALID none was begun, DEVICE. */
int kvl_graph_end(kvl_device *dev, kvl_graph **out);
/* Run it on the stream that it was recorded on, which must be the current one. Errors:
 * INVALID another stream is current, DEVICE, INTERRUPTED. */
int kvl_graph_replay(kvl_graph *graph);
/* Waits for its last replay. NULL is fine. */
void kvl_graph_close(kvl_graph *graph);

/* ---- host tier and ring ------------------------------------------------------------------- */
/* The host tier is KV memory in pinned host memory, one pinned tensor [blocks, 2, kv_heads,
 * block_size, head_dim] a layer. Block tables name its blocks. */

/* dst[to[i]] = src[from[i]] between two memories of one layer, either of them pinned; whole
 * blocks, or K and V of single KV heads. -1 or out of range on either side is skipped; no
 * block is written twice.
 *  src    f32 f16 bf16  [blocks_src, 2, kv_heads, block_size, head_dim]
 *  dst    like src      [blocks_dst, 2, kv_heads, block_size, head_dim]
 *  from   i32  [seqs, 1 or kv_heads, n]   entry (s, g, i) moves KV head g, or all of them
 *  to     i32  like from
 *  moved  i64  [1]  the bytes copied are added to it; may be NULL */
int kvl_move_blocks(const kvl_tensor *src, const kvl_tensor *from, const kvl_tensor *dst,
                    const kvl_tensor *to, const kvl_tensor *moved);

/* Cut a selection for attention over a ring: passes of `n` blocks that come from the host
 * tier, and the open blocks, which lie in a buffer on the device. heads is 1 or kv_heads.
 *  selection     i32  [seqs, heads, max_selected]  NULL: every block, and heads is 1
 *  tables        i32  [seqs, max_blocks]
 *  lens          i32  [seqs]
 *  opens         i32  [seqs, 2]   first open logical block, and its index in the buffer;
 *                the blocks from there to the last lie in the buffer in a row
 *  logical       i32  [passes, seqs, heads, n]     ascending, -1 padded
 *  physical      i32  [passes, seqs, heads, n]     their blocks by tables, -1 padded. Blocks
 *                that do not fit into the passes are dropped
 *  open_logical  i32  [seqs, heads, n_open]        those at or past opens[s][0]
 *  open_slots    i32  [seqs, heads, n_open]        their index in the buffer */
typedef struct kvl_cut {
  const kvl_tensor *selection, *tables, *lens, *opens;
  const kvl_tensor *logical, *physical, *open_logical, *open_slots;
  int32_t block_size;
  int32_t reserved;
} kvl_cut;
int kvl_cut_selection(const kvl_cut *call);

/* Slots on the device that blocks of the host tier pass through, each with a stream and the
 * events ready and compute-done; and a stream that takes blocks to the host, with an event
 * offload-done a layer. Source: the SparsePolicy engine of a nano-vllm fork. */
typedef struct kvl_ring kvl_ring;
enum { KVL_RING_BUFFER = -1 };   /* in place of a slot: compute over the buffer, for a trace */

/* A ring over memory  f32 f16 bf16 [slots, blocks, 2, kv_heads, block_size, head_dim], which
 * it retains. Errors: INVALID, NO_MEMORY, DEVICE. */
int kvl_ring_open(const kvl_tensor *memory, int layers, kvl_ring **out);
/* Waits for what is under way. NULL is fine. */
void kvl_ring_close(kvl_ring *ring);
/* Copy blocks[0 ... n-1] of a layer of the host tier into the slot, in this order, by the
 * device's copy engine: a run of neighbours is one copy, best for large blocks. Starts after
 * the last kvl_ring_planned, the slot's compute-done and the layer's offload-done; then
 * records ready. */
int kvl_ring_load(kvl_ring *ring, int slot, int layer, const kvl_tensor *cache,
                  const int32_t *blocks, int n);
/* The same by kvl_move_blocks, for blocks that the device knows: slot[to] = cache[from]. Also
 * starts after the load before it. */
int kvl_ring_gather(kvl_ring *ring, int slot, int layer, const kvl_tensor *cache,
                    const kvl_tensor *from, const kvl_tensor *to);
/* What later loads need is complete at the present end of the current stream: indices, and
 * blocks of the host tier that were written there. Call it once a step, before the loads. */
int kvl_ring_planned(kvl_ring *ring);
/* The current stream waits for the slot's load. */
int kvl_ring_wait(kvl_ring *ring, int slot);
/* What the current stream has been given so far is the last that reads the slot. Call it
 * before the next load of the slot. */
int kvl_ring_done(kvl_ring *ring, int slot);
/* Copy buffer[from[i]] to cache[to[i]] on the offload stream, after what the current stream
 * has been given; then record the layer's offload-done. from and to as in kvl_move_blocks;
 * blocks (NULL, or to's n values on the host) lets large ones go by the copy engine, and then
 * from must be 0 ... n-1. */
int kvl_ring_offload(kvl_ring *ring, int layer, const kvl_tensor *buffer,
                     const kvl_tensor *from, const kvl_tensor *cache, const kvl_tensor *to,
                     const int32_t *blocks);
/* The current stream waits for the layer's offload-done: before the buffer is overwritten. */
int kvl_ring_wait_offload(kvl_ring *ring, int layer);
/* Bytes moved since open. Waits for the ring's streams. */
int kvl_ring_bytes(kvl_ring *ring, int64_t *to_device, int64_t *to_host);

typedef enum kvl_span_kind {     /* ORDER kvl_span_kind */
  KVL_SPAN_LOAD, KVL_SPAN_COMPUTE, KVL_SPAN_OFFLOAD,
} kvl_span_kind;

/* One thing that happened, from begin to end on the device, in microseconds since the trace
 * began. COMPUTE spans go from kvl_ring_wait to kvl_ring_done. slot is -1 for OFFLOAD and for
 * compute over the buffer, whose layer is -1. */
typedef struct kvl_span {
  double begin_us, end_us;
  int32_t kind, slot, layer, blocks;
} kvl_span;

/* Keep the next `spans` spans; 0 ends it. Errors: NO_MEMORY, DEVICE. */
int kvl_ring_trace(kvl_ring *ring, int spans);
/* Copy at most n complete spans of the trace into out, in the order they were issued; waits
 * for them. Returns how many. */
int kvl_ring_trace_get(kvl_ring *ring, kvl_span *out, int n);

/* ---- hot cache ------------------------------------------------------------------------------ */
/* Blocks of the host tier that stay on the device. Every KV head has slots of its own: slot
 * s of head g may hold another block than slot s of head g'. What a slot holds is kept equal
 * to the host tier by kvl_hot_append; who writes the host tier by other means calls
 * kvl_hot_drop. Nothing here waits or looks at the host, so all of it can be recorded. */

/* One layer.
 *  memory    like the host tier  [slots, 2, kv_heads, block_size, head_dim]
 *  slot_of   i32  [kv_heads, blocks]  slot that holds a block of the host tier, -1: none
 *  block_of  i32  [kv_heads, slots]   the other way round; -1: free
 *  order     i32  [kv_heads, slots]   every slot once, the least recently used first
 *  priority  f32  [kv_heads, blocks]  the lowest is evicted first, ties by order; NULL: the
 *                 least recently used. Free slots go before any
 *  counters  i64  [5]  added to: hits, misses, evictions, bytes from the host, and slots
 *                 that were filled ahead and are hit for the first time
 *  ahead     i32  [kv_heads, slots]   1: filled ahead and not hit since; NULL: not kept */
typedef struct kvl_hot {
  const kvl_tensor *memory, *slot_of, *block_of, *order, *priority, *counters, *ahead;
} kvl_hot;

/* Give every selected block a slot, evicting others: blocks that this call selects are never
 * evicted by it, and a block that several sequences share is one. seqs * n <= slots.
 *  selection     i32  [seqs, 1 or kv_heads, n]   logical, ascending, -1 padded
 *  tables        i32  [seqs, max_blocks]
 *  slots         i32  [seqs, kv_heads, n]        the slot of each, -1 padded
 *  miss_from     i32  [1, kv_heads, seqs * n]    blocks to fetch: kvl_move_blocks from the
 *  miss_to       i32  [1, kv_heads, seqs * n]    host tier to memory; -1 padded
 *  hit_logical, hit_slots, miss_logical, miss_slots   i32 [seqs, kv_heads, n]: the selection
 *                parted into what was there and what has to be fetched, ascending, -1
 *                padded; all four or none
 *  is_ahead      1: nothing reads these blocks yet, a later step may: slots that are
 *                filled are marked in hot->ahead, and marks of others stay */
typedef struct kvl_resolve {
  const kvl_tensor *selection, *tables, *slots, *miss_from, *miss_to;
  const kvl_tensor *hit_logical, *hit_slots, *miss_logical, *miss_slots;
  int32_t is_ahead, reserved;
} kvl_resolve;
int kvl_hot_resolve(const kvl_hot *hot, const kvl_resolve *call);
/* kvl_append_kv, with its scales, to the host tier `cache`, to the slots that hold the blocks,
 * and at buffer_slots, i64 [tokens], to `buffer`, memory of other blocks; NULL: to none. */
int kvl_hot_append(const kvl_hot *hot, const kvl_tensor *k, const kvl_tensor *v,
                   const kvl_tensor *slots, const kvl_tensor *cache,
                   const kvl_tensor *buffer_slots, const kvl_tensor *buffer,
                   const kvl_tensor *k_scale, const kvl_tensor *v_scale);
/* Forget blocks: i32 [n], -1 is skipped. Their slots are free. */
int kvl_hot_drop(const kvl_hot *hot, const kvl_tensor *blocks);

/* ---- block store ------------------------------------------------------------------------ */
/* Blocks that outlive a request, a process or a machine, found by the tokens that they hold. A
 * record is the bytes of one block in one layer, named by the block's key and a part, the
 * layer. A store is a cache: a record may be gone at any time; but what is read is what was
 * put, whole, because each carries its length and a checksum of its name and bytes, and one
 * that does not fit is a miss. What the world does to a store (a full disk, a server that went
 * away) makes misses and is counted; statuses are for the caller's mistakes, memory, open and
 * sync. */

/* Names a block by all tokens up to its end: the XXH3-128 of its parent's key (lo, then hi,
 * both little-endian) and its own tokens (i32, little-endian). */
typedef struct kvl_key { uint64_t lo, hi; } kvl_key;

/* Keys of the full blocks of `count` tokens; tokens past the last full block have none. The
 * first block's parent is *parent or, where that is NULL, the XXH3-128 of `model`: a text with
 * all that makes KV incompatible, such as the model's name, dtype, block_size and layout.
 *  keys  [count / block_size]
 * Returns how many. Errors: INVALID. */
int kvl_block_keys(const char *model, const kvl_key *parent, const int32_t *tokens, int count,
                   int block_size, kvl_key *keys);

typedef struct kvl_store kvl_store;

/* Numbers since open, of this handle; what is held, by whomever it was put. Bytes are those of
 * the blocks, without what a store adds to them. */
typedef struct kvl_store_stats {
  int64_t hits, misses, puts, evictions;
  int64_t damaged;               /* records that were not what was put: misses, too */
  int64_t errors;                /* of the world's; an outage of a server is one */
  int64_t bytes_read, bytes_written;
  int64_t bytes_held, records;   /* -1: not known */
} kvl_store_stats;

/* Open by URL:
 *  memory:     of this process
 *  lmdb:PATH   a file and PATH-lock beside it, made where there is none; several processes may
 *              have it open, each of them once. Killing one at any time costs at most the
 *              record it was writing; docs/store.md has what a power failure costs
 *  redis://[user:password@]host[:port][/db]   shared by machines; %XX in user and password
 * capacity: bytes of blocks held before the least recently used are evicted, 0 for no limit;
 * a Redis server has its own (maxmemory), and here it must be 0. timeout_ms: the most that
 * connecting and each command may take, for Redis; 0 for 1000.
 * Errors: INVALID, NO_MEMORY, IO, FORMAT. */
int kvl_store_open(const char *url, int64_t capacity, int timeout_ms, kvl_store **out);
/* Syncs. NULL is fine. All else may be called by many threads at once; this comes last. */
void kvl_store_close(kvl_store *store);
/* Put n bytes in place of what the record held. Returns 1, or 0 when it could not be stored.
 * Errors: INVALID (also: more than the capacity), NO_MEMORY. */
int kvl_store_put(kvl_store *store, const kvl_key *key, int part, const void *bytes,
                  int64_t n);
/* Copy a record of exactly n bytes. Returns 1, or 0 for a miss, which leaves `bytes` alone.
 * Errors: INVALID. */
int kvl_store_get(kvl_store *store, const kvl_key *key, int part, void *bytes, int64_t n);
/* found[i] = whether there is a record (keys[i], part); its bytes are not read. found may be
 * NULL. Returns how many there are from the first key on without a gap. Errors: INVALID. */
int kvl_store_find(kvl_store *store, const kvl_key *keys, int n, int part, uint8_t *found);
/* Returns 1, or 0 when there was none. Errors: INVALID. */
int kvl_store_remove(kvl_store *store, const kvl_key *key, int part);
/* What was put before survives a power failure: of an lmdb store; others do nothing.
 * Errors: INVALID, IO. */
int kvl_store_sync(kvl_store *store);
int kvl_store_stats_get(kvl_store *store, kvl_store_stats *out);
/* Words of the last problem that was counted as damaged or as an error, by any thread, cut to
 * `size` with the final 0. Returns their length; 0 when there was none. */
int kvl_store_problem(kvl_store *store, char *text, int size);
/* ---- prefetch ---------------------------------------------------------------------------- */
/* Brings blocks from a store into KV memory while others compute. A task names keys and the
 * blocks of memory that they go to. Tasks wait in a queue, the lowest priority first and
 * among equals the first submitted; each worker thread takes the first, reads its records
 * layer by layer, so that layer 0 of all its blocks comes first, and copies them to the device
 * on a queue of its own while it reads on. What the host can write, pinned memory and the
 * CPU's, is read into in place. A task writes after everything that was given to streams that
 * use the memory before it was submitted; who reads the blocks waits for its ticket.
 *
 * A key that lacks a record of a layer is no error: its block is missing, and what its memory
 * holds then means nothing. A failing store or device fails the task, and the ticket says why.
 *
 * Several threads may call an engine and its tickets at once. submit, wait, wait_layer and
 * close use the device, which meanwhile nobody else may do. cancel, reprioritise and stats do
 * not. While kvl_cpu_link emulates a link, an engine of the CPU device has no threads: its
 * tasks run, in the order of the queue, in calls that wait for one or find the queue full, so
 * that modelled times are the same in every run. A transfer begins when what was submitted to
 * the memory's streams before the task is over, however late the host waits for it. */

typedef struct kvl_prefetch kvl_prefetch;
typedef struct kvl_ticket kvl_ticket;

/* Levels of the seed; any other number is a priority, too. */
enum { KVL_PREFETCH_URGENT = 0, KVL_PREFETCH_HIGH = 1, KVL_PREFETCH_NORMAL = 2,
       KVL_PREFETCH_LOW = 3 };

typedef struct kvl_prefetch_options {
  int64_t bytes_staging;         /* pinned memory for records on their way, all workers' */
  int32_t workers;               /* 1 ... 64 */
  int32_t max_pending;           /* tasks that may wait, 1 ... 2^20 */
} kvl_prefetch_options;

/* The engine keeps the store alive. Errors: INVALID, NO_MEMORY, DEVICE. */
int kvl_prefetch_open(kvl_device *dev, kvl_store *store, const kvl_prefetch_options *options,
                      kvl_prefetch **out);
/* Cancels what waits, stops what runs at its next record, and returns when nothing is under
 * way. Tickets stay valid. NULL is fine. */
void kvl_prefetch_close(kvl_prefetch *engine);

/*  memory   any  [layers, blocks, 2, kv_heads, block_size, head_dim]; retained until the
 *                task is over. Its layer l gets the records of part first_layer + l
 *  keys     [n]
 *  blocks   [n]  where each key's block goes; no one twice */
typedef struct kvl_prefetch_task {
  const kvl_tensor *memory;
  const kvl_key *keys;
  const int32_t *blocks;
  int64_t request;               /* whose it is, for cancel and reprioritise */
  int32_t n, first_layer, priority, reserved;
} kvl_prefetch_task;

/* Queue a task, which is copied. While max_pending tasks wait, so does the caller, at most
 * timeout_us (< 0: as long as it takes). Returns 1, or 0 when there was no room in that time.
 * out: its ticket, or NULL. Errors: INVALID, NO_MEMORY, DEVICE, INTERRUPTED. */
int kvl_prefetch_submit(kvl_prefetch *engine, const kvl_prefetch_task *task,
                        int64_t timeout_us, kvl_ticket **out);
/* Cancel every task of a request: one that waits is over at once, one that runs stops at its
 * next record, unless that was its last. Its blocks belong to the task until its ticket says
 * that it is over. Returns how many were not over. */
int kvl_prefetch_cancel(kvl_prefetch *engine, int64_t request);
/* Give the waiting tasks of a request another priority; among equals they keep the order in
 * which they were submitted. Returns how many. */
int kvl_prefetch_reprioritise(kvl_prefetch *engine, int64_t request, int priority);

typedef struct kvl_prefetch_stats {
  int64_t submitted, completed, cancelled, failed;   /* tasks */
  int64_t hits, misses;          /* records that were found; keys that lacked one */
  int64_t bytes;                 /* read */
  int64_t waits;                 /* for tickets and layers that were not ready */
  double us_stalled;             /* the host's time in them */
  int64_t pending, pending_peak; /* tasks waiting in the queue */
} kvl_prefetch_stats;
int kvl_prefetch_stats_get(kvl_prefetch *engine, kvl_prefetch_stats *out);

typedef enum kvl_prefetch_state {   /* ORDER kvl_prefetch_state */
  KVL_PREFETCH_WAITING, KVL_PREFETCH_RUNNING, KVL_PREFETCH_COMPLETED,
  KVL_PREFETCH_CANCELLED, KVL_PREFETCH_FAILED,
} kvl_prefetch_state;

/* Blocks have arrived when all of their layers have. */
typedef struct kvl_prefetch_result {
  const uint8_t *arrived;        /* [n] 1 or 0: borrow, until the ticket is closed */
  int64_t bytes;                 /* read */
  double us_queued, us_reading;  /* before it ran; in the store */
  double us_copying;             /* on the device's queue, while there was something to copy */
  int32_t state, n;              /* COMPLETED or CANCELLED */
  int32_t blocks, leading;       /* that arrived; those before the first that did not */
  int32_t missing;               /* keys that lacked a record */
  int32_t reserved;
} kvl_prefetch_result;

/* Wait until the task is over and its copies, too, at most timeout_us (0: ask, < 0: as long as
 * it takes). Returns 1, or 0 when it is not over in that time. Errors: what the store or the
 * device failed with, with its words; INTERRUPTED. */
int kvl_ticket_wait(kvl_ticket *ticket, int64_t timeout_us, kvl_prefetch_result *out);
/* Wait until the layer (counted as parts are) has been read, and have `stream` (NULL: the
 * current one) wait for its copies; the host does not. Returns 1, or 0 when some block of it
 * will not come: a key lacked a record, or the task was cancelled. Errors: as for
 * kvl_ticket_wait. */
int kvl_ticket_wait_layer(kvl_ticket *ticket, int layer, kvl_stream *stream);
/* As kvl_prefetch_cancel, for this task. Returns 1, or 0 when it was over. */
int kvl_ticket_cancel(kvl_ticket *ticket);
/* Forget the ticket; its task goes on. NULL is fine. */
void kvl_ticket_close(kvl_ticket *ticket);

/* ---- safetensors ------------------------------------------------------------------------- */

typedef struct kvl_safetensors kvl_safetensors;
typedef struct kvl_safetensors_entry {
  const char *name;              /* borrow, until close */
  int64_t shape[6];
  int64_t offset, bytes;         /* in the file's data section */
  int32_t ndim, dtype;
} kvl_safetensors_entry;

/* Map a file and check its header whole: length, overflow, overlaps, holes, duplicate
 * keys, dtype and shape against the byte range.
 * Errors: IO, FORMAT (the words name the file, the tensor and what is wrong), NO_MEMORY. */
int kvl_safetensors_open(const char *path, kvl_safetensors **out);
void kvl_safetensors_close(kvl_safetensors *file);
int kvl_safetensors_count(const kvl_safetensors *file);
int kvl_safetensors_entry_get(const kvl_safetensors *file, int index,
                              kvl_safetensors_entry *out);
/* Copy entry `index` into t: same dtype and shape. */
int kvl_safetensors_read(const kvl_safetensors *file, int index, const kvl_tensor *t);

/* ffi:end */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
