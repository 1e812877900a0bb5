/* kvlab: paged KV memory, streams and sparse-attention kernels behind one flat C API.
 *
 * The library promises four things. An op either runs as described, or returns a negative
 * status and leaves its outputs alone. Results do not depend on the timing of threads.
 * Memory is never reused while a stream may still read it. The CPU and CUDA devices agree
 * within the tolerance that each op states.
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
 * Caveats: ops are asynchronous on the device's current stream, so synchronise before you
 * read tensor memory from the host (kvl_tensor_read does so). Tensors are contiguous and
 * row-major. A kvl_tensor is a handle: copying the struct does not retain its storage. A
 * device handle may be used by one thread at a time.
 *
 * Unless it says otherwise, every function returns a value >= 0 on success and a negative
 * kvl_status on failure. Out parameters come last and are left untouched on failure.
 * kvl_last_error() has the message of the calling thread's last failure. */
#ifndef KVLAB_H
#define KVLAB_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ffi:begin -- also read by ffi.cdef: no '#', no macros, no 64-bit constants */

/* ---- status ------------------------------------------------------------------- */

/* The hash that identifies the headers which the library was built with: the CRC of cksum(1)
 * over the text between the ffi marks of base.h and kvlab.h. A caller that has read other
 * headers must stop when the hashes differ. */
uint32_t kvl_abi(void);

/* The name of a status as static text. It is never NULL. */
const char *kvl_status_text(int status);

/* The message of this thread's last failure. The library owns the text; it is valid until
 * the thread's next failing call. */
const char *kvl_last_error(void);

/* Sets (1) or clears (0) the interrupt flag. While the flag is set, every op returns
 * KVL_ERR_INTERRUPTED. It is safe to call this from a signal handler. */
void kvl_interrupt(int set);
int kvl_interrupted(void);
/* Adds `more` to how many holds this thread has. While it has any, kvl_interrupted() is 0
 * in this thread: work that must not stop half-way, such as undoing a failed step, runs to
 * its end, and the interrupt comes after it. Returns the number of holds. */
int kvl_interrupt_hold(int more);

/* Makes the n-th allocation from now fail once; 0 disarms it. Only hostile builds can do
 * this: other builds return KVL_ERR_UNSUPPORTED. */
int kvl_fail_allocation(int n);

/* Reads the monotonic clock, in nanoseconds. */
int64_t kvl_clock_ns(void);

/* ---- device, stream, event ------------------------------------------------------ */

typedef struct kvl_device kvl_device;
typedef struct kvl_stream kvl_stream;
typedef struct kvl_event kvl_event;

typedef struct kvl_device_stats {
  int64_t bytes_live;      /* in tensors now */
  int64_t bytes_live_peak; /* since open or kvl_device_reset_peak */
  int64_t bytes_cached;    /* held by the allocator, free for reuse */
  int64_t bytes_reserved;  /* taken from the device: live, cached, of graphs, and rounding */
  int64_t bytes_pinned;    /* in pinned host memory now */
  int64_t bytes_total;     /* of the device */
  int64_t bytes_free;      /* as the device reports it */
  int64_t allocations;     /* calls that reached the device's allocator */
  int64_t launches;        /* ops launched */
} kvl_device_stats;

/* Opens "cpu", "cuda" or "cuda:N". Devices are reference counted: each open needs one close.
 * Errors: INVALID if the name is unknown; DEVICE if there is no such device or its plug-in
 * cannot be loaded. */
int kvl_device_open(const char *name, kvl_device **out);
void kvl_device_close(kvl_device *dev);
const char *kvl_device_name(const kvl_device *dev);  /* "cpu", "cuda:0" */
const char *kvl_device_description(kvl_device *dev); /* "NVIDIA H100 ..." */
/* What the library, and the device's plug-in if it has one, were built from: configuration,
 * compiler, BLAS and hashes of the sources. Builds with the same text compute the same. */
const char *kvl_device_build(kvl_device *dev);
int kvl_device_is_cpu(const kvl_device *dev);
int kvl_device_stats_get(kvl_device *dev, kvl_device_stats *out);
int kvl_device_reset_peak(kvl_device *dev);
/* Waits until all work on every stream of the device is done. */
int kvl_device_sync(kvl_device *dev);
/* The bytes in tensors of all open devices now. */
int64_t kvl_bytes_live(void);
/* Returns the memory that the allocator has cached to the device. Free memory is cached, for
 * later work on the stream that it was allocated on. It goes back by itself when an
 * allocation finds no room. */
int kvl_device_trim(kvl_device *dev);
/* Limits how many bytes of free storages above 32 MiB stay cached; 0: none. Beyond the
 * limit, storages that were freed first go back to the device. The default limit is half of
 * the device's memory; on the CPU it is a quarter, and the system may take these pages
 * while they are free. The limit is lower while tensors fill the device (at least an
 * eighth). Errors: INVALID if bytes < 0. */
int kvl_device_limit_cache(kvl_device *dev, int64_t bytes);

/* kvl_cpu_isa names the instruction set that the CPU kernels use: "plain", "avx2" or
 * "avx512". kvl_cpu_use_isa chooses one, from the next op on. Errors: UNSUPPORTED if this
 * build or this processor lacks it, INVALID if there is no such set; the words name those
 * that there are. */
const char *kvl_cpu_isa(void);
int kvl_cpu_use_isa(const char *isa);
/* OpenBLAS, which multiplies matrices in f32, chooses its kernels when it is loaded, by the
 * model of the processor. For a model that it does not know it takes very old ones.
 * kvl_cpu_blas names the chosen ones, such as "Haswell". kvl_cpu_blas_better names those that
 * the variable OPENBLAS_CORETYPE should ask for instead; it is NULL if the choice suits the
 * instruction sets of the processor. The executable sets that variable by itself. */
const char *kvl_cpu_blas(void);
const char *kvl_cpu_blas_better(void);

/* Emulates a link between the CPU device's memory and pinned memory. Each transfer takes
 * `us` microseconds plus its bytes at `gb_s` (10^9 bytes a second), and each direction
 * carries one transfer at a time. Events of the CPU device then report a modelled time: an
 * op takes as long as it really took, and a transfer takes as long as the link would need.
 * The host's own time does not count, as if the host ran ahead of a GPU, but the time for
 * which it waits does. Every call restarts the modelled time. gb_s 0 ends the emulation.
 * Errors: INVALID if a number is negative or not finite, gb_s is below 1e-6 or us is above
 * 1e9. */
int kvl_cpu_link(double gb_s, double us);

/* A stream is a FIFO of work. The device's default stream exists from the start. On the CPU
 * the default stream runs on the calling thread, and every other stream has a worker thread.
 */
int kvl_stream_open(kvl_device *dev, kvl_stream **out);
void kvl_stream_close(kvl_stream *stream);
int kvl_stream_sync(kvl_stream *stream);
/* Makes `stream` the current one (NULL: the default stream). Allocations, copies and ops go
 * to the current stream. */
int kvl_device_use_stream(kvl_device *dev, kvl_stream *stream);
kvl_stream *kvl_device_stream(kvl_device *dev); /* current; borrow */

int kvl_event_open(kvl_device *dev, kvl_event **out);
void kvl_event_close(kvl_event *event);
/* Records the present end of `stream`. The event is complete when the stream gets there. */
int kvl_event_record(kvl_event *event, kvl_stream *stream);
/* Makes later work on `stream` wait for the event, without making the host wait. An event
 * that was never recorded counts as complete. */
int kvl_stream_wait_event(kvl_stream *stream, kvl_event *event);
int kvl_event_sync(kvl_event *event); /* the host waits */
int kvl_event_done(kvl_event *event); /* 1 complete, 0 not */
/* Gives the microseconds between two complete events. Errors: INVALID if one of them is not
 * recorded, or if kvl_cpu_link was called between them. */
int kvl_event_elapsed_us(kvl_event *from, kvl_event *to, double *us);

/* ---- tensor --------------------------------------------------------------------- */

typedef struct kvl_storage kvl_storage;

/* A tensor is a contiguous row-major view of reference-counted storage. */
typedef struct kvl_tensor {
  void *ptr;            /* first element, in the device's memory */
  kvl_storage *storage; /* NULL: closed */
  kvl_device *device;
  int64_t shape[6]; /* KVL_DIMS_MAX; unused dims are 1 */
  int64_t count;    /* elements */
  int32_t ndim;
  int32_t dtype; /* kvl_dtype */
} kvl_tensor;

int kvl_dtype_bytes(int dtype);
const char *kvl_dtype_name(int dtype); /* "bf16" */

/* Allocates an uninitialised tensor on the current stream of `dev`. The caller owns it.
 * Errors: INVALID if ndim is wrong or the shape is negative or overflows; NO_MEMORY. */
int kvl_tensor_open(kvl_device *dev, int dtype, int ndim, const int64_t *shape,
                    kvl_tensor *out);
/* Allocates an uninitialised tensor in pinned host memory. `dev` reads and writes it over
 * the link, and every op takes it like a tensor of `dev`. huge_pages asks the system for
 * pages of 2 MiB. Errors: as for kvl_tensor_open. */
int kvl_tensor_open_pinned(kvl_device *dev, int dtype, int ndim, const int64_t *shape,
                           int huge_pages, kvl_tensor *out);
int kvl_tensor_is_pinned(const kvl_tensor *t);
/* frozen 1 declares that nothing will write the tensor, or other tensors of its storage,
 * any more; this is true of a model's weights. Kernels may then read it before earlier ops
 * have ended. Waits until all work on the device has ended. A copy into a frozen tensor is
 * an error, and so is an op that writes its result to one; frozen 0 allows these again.
 * Errors: INVALID if it is closed, or while a graph is recorded. */
int kvl_tensor_freeze(const kvl_tensor *t, int frozen);
int kvl_tensor_is_frozen(const kvl_tensor *t);
/* Releases this handle's reference to the storage. Closing a closed tensor does nothing. */
void kvl_tensor_close(kvl_tensor *t);
/* Makes a view of the elements [start, start + length) of dimension 0. The view retains the
 * storage, so it needs its own close. */
int kvl_tensor_narrow(const kvl_tensor *t, int64_t start, int64_t length, kvl_tensor *out);
/* Makes a view of entry `index` of dimension 0; the view lacks that dimension. */
int kvl_tensor_index(const kvl_tensor *t, int64_t index, kvl_tensor *out);
/* Makes a view with another shape that has the same count of elements. */
int kvl_tensor_reshape(const kvl_tensor *t, int ndim, const int64_t *shape, kvl_tensor *out);
/* Wraps memory of the caller in a tensor. The caller must keep the memory until every view
 * is closed and the device has been synchronised. */
int kvl_tensor_wrap(kvl_device *dev, int dtype, int ndim, const int64_t *shape, void *memory,
                    kvl_tensor *out);

/* dst = src. The two have the same dtype and count and may be on any pair of devices. The
 * copy is asynchronous on the current stream of the CUDA side; between two CPU tensors, of
 * dst's device. A copy from CUDA to the CPU waits until the bytes are there. */
int kvl_copy(const kvl_tensor *src, const kvl_tensor *dst);
/* Copies from (write) or to (read) host memory. After a write the caller may reuse its
 * memory at once; a read waits until the bytes are there. `bytes` must equal the size of the
 * tensor. A read turns every f32 NaN into the one quiet NaN, because LuaJIT takes some other
 * NaNs for values of its own. */
int kvl_tensor_write(const kvl_tensor *t, const void *memory, int64_t bytes);
int kvl_tensor_read(const kvl_tensor *t, void *memory, int64_t bytes);

/* ---- elementwise, reductions, matmul ---------------------------------------------- */
/* Floating-point inputs may be f32, f16 or bf16, and the arithmetic is fp32. `out` may alias
 * an input of the same dtype and shape. */

/* t[...] = value, which is converted to t's dtype. */
int kvl_fill(const kvl_tensor *t, double value);
/* t[i] = start + i * step, for any dtype but f8e4m3. */
int kvl_arange(const kvl_tensor *t, double start, double step);
/* Fills t with random numbers of Philox4x32-10, which are the same bits on every device.
 * Element i uses word (offset + i) of the sequence that belongs to `seed`. UNIFORM: f32, f16
 * or bf16 in (a, b]. NORMAL: mean a, standard deviation b. INTEGER: i32 or i64 in [a, b).
 * Source: Salmon et al. 2011, with the counter layout of cuRAND. */
int kvl_random(const kvl_tensor *t, int kind, double a, double b, uint64_t seed,
               uint64_t offset);
/* out = a, converted to out's dtype. The two have the same count. Any pair of f32 f16 bf16
 * i32 i64 u8 will do, as will f32, f16 or bf16 to or from f8e4m3 (saturating). */
int kvl_cast(const kvl_tensor *a, const kvl_tensor *out);
int kvl_unary(int op, const kvl_tensor *a, const kvl_tensor *out);
/* out = a op b with NumPy's broadcasting. a and b have one dtype of f32 f16 bf16 i32 i64.
 * out has the same dtype; for comparisons it may be u8 (0 or 1). */
int kvl_binary(int op, const kvl_tensor *a, const kvl_tensor *b, const kvl_tensor *out);
int kvl_binary_scalar(int op, const kvl_tensor *a, double b, const kvl_tensor *out);
/* out = cond ? a : b, where cond is u8 and all four shapes are equal. */
int kvl_where(const kvl_tensor *cond, const kvl_tensor *a, const kvl_tensor *b,
              const kvl_tensor *out);
/* The same, where an operand that is NULL is replaced by a number, converted to out's
 * dtype. */
int kvl_where_scalar(const kvl_tensor *cond, const kvl_tensor *a, double a_value,
                     const kvl_tensor *b, double b_value, const kvl_tensor *out);
/* ---- copies with another shape: any dtype; out may not share memory with a */
/* out = a with two dimensions swapped. Both count from 0. */
int kvl_transpose(const kvl_tensor *a, int dim0, int dim1, const kvl_tensor *out);
/* out = a, broadcast to out's shape as NumPy does. */
int kvl_expand(const kvl_tensor *a, const kvl_tensor *out);
/* out = the entries start, start + 1, ... of a along dimension `dim`, as many as out has.
 * put_part writes all of a to those entries of out; the others stay. The sizes of all other
 * dimensions are equal. */
int kvl_take_part(const kvl_tensor *a, int dim, int64_t start, const kvl_tensor *out);
int kvl_put_part(const kvl_tensor *a, int dim, int64_t start, const kvl_tensor *out);
/* out = the sums of a's elements up to each one, along dimension `dim`. Floats are added in
 * double, and every sum is rounded once. Whole numbers wrap. out may be a.
 *  a    f32 f16 bf16 i32 i64
 *  out  like a, of a's shape */
int kvl_cumsum(const kvl_tensor *a, int dim, const kvl_tensor *out);
/* Reduces dimension `dim` of a (f32 f16 bf16, or i32 for SUM MAX MIN). out has a's shape
 * without that dimension, and a's dtype or f32. An empty dimension gives 0 for SUM, NaN for
 * MEAN, -inf for MAX and +inf for MIN (INVALID for MAX and MIN of i32). */
int kvl_reduce(int op, const kvl_tensor *a, int dim, const kvl_tensor *out);
/* out = log(sum(e^a)) along dimension `dim` (f32 f16 bf16). out has a's shape without that
 * dimension, and a's dtype or f32. Nothing, or only -inf, gives -inf; NaN gives NaN. */
int kvl_logsumexp(const kvl_tensor *a, int dim, const kvl_tensor *out);
/* out = softmax of scale * a over the last dimension. A row that is all -inf gives zeros. */
int kvl_softmax(const kvl_tensor *a, double scale, const kvl_tensor *out);
/* The index of the largest (argmin: the least) element of each row. Of equal elements the
 * lower index wins. NaN never wins; a row of NaN gives 0.
 *  a    f32 f16 bf16 i32  [..., n]    n >= 1
 *  out  i32               [...] */
int kvl_argmax(const kvl_tensor *a, const kvl_tensor *out);
int kvl_argmin(const kvl_tensor *a, const kvl_tensor *out);
/* Draws an index of each row with the chances softmax(scores): the index i with the largest
 * scores[i] - log(-log(1 - u[i])), where u[i] is number (word + i) of the row's seed, as
 * kvl_random draws it from (0, 1]. -inf is drawn only where nothing is above it, NaN only where
 * there is nothing else.
 *  scores   f32  [rows, n]   1 <= n < 2^31
 *  numbers  i64  [rows, 2]   seed and word of each row
 *  out      i32  [rows]
 * With the same numbers, two distributions whose chances differ by d in all (half the sum of
 * the differences) draw the same index with probability (1 - d) / (1 + d) or more.
 * Source: Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030; Daliri et al. 2024,
 * arXiv:2408.07978. */
int kvl_draw(const kvl_tensor *scores, const kvl_tensor *numbers, const kvl_tensor *out);
/* The exact top-k of each row. Values come in descending order (in ascending order for
 * KVL_TOPK_LEAST), equal values by the lower index first, NaN last; k = n sorts the row.
 * `which` is LEAST or LARGEST. Combined with BY_INDEX (bitwise or) it gives the same k in
 * the order of their indices, which is several times faster where k is large.
 *  a        f32 i32  [rows, n]
 *  values   like a   [rows, k]   may be NULL
 *  indices  i32      [rows, k]   0 <= k <= n */
enum { KVL_TOPK_LEAST = 0, KVL_TOPK_LARGEST = 1, KVL_TOPK_BY_INDEX = 2 };
int kvl_topk(const kvl_tensor *a, int which, const kvl_tensor *values,
             const kvl_tensor *indices);
/* out = a @ b, or a @ b^T with transpose_b. Sums are accumulated in fp32.
 *  a    f32 f16 bf16  [m, k] or [batch, m, k]
 *  b    like a        [k, n] ([n, k] if transposed), or [batch, ...]
 *  out  like a, or f32  [m, n], or [batch, m, n] if a or b is a batch: one without is the
 *                     same for every batch
 * Two f8e4m3 tensors, [m, k] and a transposed [n, k], multiply into f32, f16 or bf16. k must
 * then be a multiple of 16 and n of 8, and every tensor must begin at a multiple of 16
 * bytes. Errors: UNSUPPORTED for f8e4m3 on a GPU before sm_89. */
int kvl_matmul(const kvl_tensor *a, const kvl_tensor *b, int transpose_b,
               const kvl_tensor *out);
/* out[i] = src[index[i]] for whole rows of dimension 0. An index that is out of range gives
 * zeros.
 *  src    any  [rows, ...]
 *  index  i32  [n]
 *  out    like src [n, ...] */
int kvl_gather_rows(const kvl_tensor *src, const kvl_tensor *index, const kvl_tensor *out);
/* dst[index[i]] = src[i] for whole rows. An index that is out of range is skipped. If an
 * index occurs more than once, its last row wins. */
int kvl_scatter_rows(const kvl_tensor *src, const kvl_tensor *index, const kvl_tensor *dst);
/* out[r][j] = src[r][index[r][j]]. An index that is out of range gives zero.
 *  src    f32 f16 bf16 i32  [rows, n]
 *  index  i32               [rows, m]
 *  out    like src          [rows, m] */
int kvl_gather(const kvl_tensor *src, const kvl_tensor *index, const kvl_tensor *out);
/* dst[r][index[r][j]] = src[r][j], or += with `add`. An index that is out of range is
 * skipped. No index may occur twice in a row.
 *  src    f32 i32   [rows, m]
 *  index  i32       [rows, m]
 *  dst    like src  [rows, n] */
int kvl_scatter(const kvl_tensor *src, const kvl_tensor *index, int add,
                const kvl_tensor *dst);

/* ---- transformer ops ---------------------------------------------------------------- */

/* out = x / sqrt(mean(x^2) + eps) * weight over the last dimension. With `residual`, the op
 * first adds x to residual in place (residual += x) and then normalises that sum.
 *  x, out    f32 f16 bf16  [rows, dim]
 *  residual  like x        [rows, dim]   may be NULL
 *  weight    like x or f32 [dim]. If it has fewer numbers, only the first numbers of a row
 *            are normalised, and the others stay as they are: then out is x, and there is
 *            no residual */
int kvl_rmsnorm(const kvl_tensor *x, const kvl_tensor *residual, const kvl_tensor *weight,
                double eps, const kvl_tensor *out);
/* LayerNorm over the last dimension: out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight
 * + bias.
 *  x, out        f32 f16 bf16  [rows, dim]   out may be x
 *  weight, bias  like x or f32 [dim]         both of one dtype
 *  Source  Ba, Kiros and Hinton 2016 */
int kvl_layernorm(const kvl_tensor *x, const kvl_tensor *weight, const kvl_tensor *bias,
                  double eps, const kvl_tensor *out);
/* A matrix for each head: out[t][h] = x[t][h] @ weight[h], which takes the first k numbers of
 * x[t][h]; the numbers behind them follow unchanged. With transpose_weight, x @ weight^T.
 * Sums are accumulated in fp32. out shares no memory with x or weight.
 *  x       f32 f16 bf16  [tokens, heads, k + rest]
 *  weight  like x        [heads, k, n], or [heads, n, k]
 *  out     like x        [tokens, heads, n + rest]
 * Source: the absorbed form of latent attention, DeepSeek-AI 2024 (DeepSeek-V2,
 * arXiv:2405.04434). */
int kvl_head_matmul(const kvl_tensor *x, const kvl_tensor *weight, int transpose_weight,
                    const kvl_tensor *out);
/* A projection and what belongs to it in one op: y = h @ weight^T + bias, where h is x, or
 * rmsnorm(x) if there is a norm, rounded to x's dtype. Sums are accumulated in fp32. `form`
 * is a kvl_linear_form: out = y; out += y; or out[r][j] = silu(y[r][j]) * y[r][outputs + j],
 * where weight has 2 * outputs rows (SwiGLU, Shazeer 2020). Where the op computes y on its
 * own first, it rounds y to x's dtype. out shares no memory with x, weight, norm or bias.
 *  x       f32 f16 bf16   [rows, k]
 *  norm    like x or f32  [k]           may be NULL; then eps is not used
 *  weight  like x         [n, k]        n = outputs, or 2 * outputs
 *  bias    like x         [n]           may be NULL
 *  out     like x, or f32 [rows, outputs] */
int kvl_linear(const kvl_tensor *x, const kvl_tensor *norm, double eps,
               const kvl_tensor *weight, const kvl_tensor *bias, int form,
               const kvl_tensor *out);
/* kvl_linear in the plain form, with y divided by columns over several tensors: outs[0] takes
 * the first columns, outs[1] the next ones. Together they have n columns. This is how one call makes
 * q, k and v.
 *  outs  like x, or f32, each  [rows, its own columns]  1 to 5 tensors that share no memory
 *                                                       with each other or with an input */
int kvl_linear_parts(const kvl_tensor *x, const kvl_tensor *norm, double eps,
                     const kvl_tensor *weight, const kvl_tensor *bias,
                     const kvl_tensor *const *outs, int parts);
/* Chooses the experts of each row: the `active` ones whose score, with the bias added, is best,
 * in falling order. Of equal ones the first wins; a score of NaN is below every number. Scores
 * and weights are computed in fp32, and the bias is not part of the weights. With a softmax, a
 * logit of NaN or +inf makes all scores of its row NaN. chosen and weights share no memory with
 * each other or with an input.
 *  logits   f32 f16 bf16  [rows, experts]   1 to 4096 experts
 *  bias     f32           [experts]         may be NULL
 *  chosen   i32           [rows, active + shared]   1 <= active <= the experts of open groups
 *  weights  f32           [rows, active + shared]
 * Source: DeepSeek-AI 2024 (DeepSeek-V3, arXiv:2412.19437). */
int kvl_route(const kvl_tensor *logits, const kvl_tensor *bias, const kvl_router *router,
              const kvl_tensor *chosen, const kvl_tensor *weights);
/* A layer of experts: y[r] = sum of weights[r][j] * down[e] (silu(g) * u) over j, where e is
 * chosen[r][j], and g and u are the halves of gate_up[e] x[r]. form is KVL_LINEAR_PLAIN for
 * out = y, or KVL_LINEAR_ADD for out += y. An expert that no row has chosen is not read. A
 * choice out of range adds nothing. Sums are accumulated in fp32; silu(g) * u is rounded to x's
 * dtype, and on a GPU so is what an expert gives. out shares no memory with an input.
 *  x        f32 f16 bf16  [rows, k]
 *  chosen   i32           [rows, active]
 *  weights  f32           [rows, active]
 *  gate_up  like x        [experts, 2 * inner, k]   1 to 4096 experts
 *  down     like x        [experts, k, inner]
 *  out      like x        [rows, k]
 * Source: Shazeer et al. 2017 (arXiv:1701.06538); Jiang et al. 2024 (Mixtral,
 * arXiv:2401.04088). */
int kvl_experts(const kvl_tensor *x, const kvl_tensor *chosen, const kvl_tensor *weights,
                const kvl_tensor *gate_up, const kvl_tensor *down, int form,
                const kvl_tensor *out);
/* Rotates the pairs (first + i, first + pairs + i) of each head by positions[t] * inv_freq[i],
 * in place. Other numbers stay as they are. Source: Su et al. 2021, in the half-split form of
 * Hugging Face.
 *  x          f32 f16 bf16  [tokens, heads, head_dim]
 *  positions  i32           [tokens]
 *  inv_freq   f32           [pairs]      first + 2 * pairs <= head_dim
 *  first      0 if heads are rotated from their first number on */
int kvl_rope(const kvl_tensor *x, const kvl_tensor *positions, const kvl_tensor *inv_freq,
             int64_t first);
/* out = silu(gate) * up, all f32, f16 or bf16 [rows, dim] with equal shapes and dtypes. */
int kvl_silu_mul(const kvl_tensor *gate, const kvl_tensor *up, const kvl_tensor *out);

/* ---- block pool and sequences (host side) ---------------------------------------------- */

typedef struct kvl_pool kvl_pool;
typedef struct kvl_sequence kvl_sequence;
typedef struct kvl_tables kvl_tables;

/* Opens the bookkeeping of `blocks` blocks of `block_size` (1 ... 4096) tokens each. An
 * allocation fails if it would leave fewer than `watermark` blocks free. Errors: INVALID,
 * NO_MEMORY. */
int kvl_pool_open(int blocks, int block_size, int watermark, kvl_pool **out);
/* Closes the caller's handle. Sequences of the pool keep it alive. */
void kvl_pool_close(kvl_pool *pool);
int kvl_pool_blocks_free(const kvl_pool *pool);

/* Blocks of steps that fail count in blocks_peak; an eviction that is undone does not count
 * in blocks_evicted. */
typedef struct kvl_pool_stats {
  int64_t blocks_held;    /* now */
  int64_t blocks_peak;    /* the most at once, since open or kvl_pool_reset_peak */
  int64_t blocks_evicted; /* that evictions gave back, less those that they took */
} kvl_pool_stats;
int kvl_pool_stats_get(const kvl_pool *pool, kvl_pool_stats *out);
/* Starts blocks_peak again from what is held now. */
int kvl_pool_reset_peak(kvl_pool *pool);

/* The number of references to a block. Errors: INVALID if the block is out of range. */
int kvl_pool_block_refs(const kvl_pool *pool, int block);
/* Adds (hold) or drops (release) one reference to a block that is not free. A cache of
 * prefixes uses them to keep a block after the sequence that filled it is gone. Errors:
 * INVALID. */
int kvl_pool_hold(kvl_pool *pool, int block);
int kvl_pool_release(kvl_pool *pool, int block);

/* Opens an empty sequence. It has a block table for each of `heads` KV heads of each of
 * `layers` layers (1 and 1: one for all KV; heads 1: one for each layer). The table of layer l
 * and head h is its cut l * heads + h. Errors: INVALID, NO_MEMORY. */
int kvl_sequence_open(kvl_pool *pool, int layers, int heads, kvl_sequence **out);
/* Opens a sequence of the same tokens that shares every block with seq. */
int kvl_sequence_fork(kvl_sequence *seq, kvl_sequence **out);
/* Lengthens a sequence of whole blocks by n full blocks in each cut. Another holder has
 * these blocks already; the sequence shares them. blocks: i32[cuts, n]. Errors: INVALID if
 * the sequence's length is not a multiple of block_size, or a block is free or out of
 * range; NO_MEMORY. */
int kvl_sequence_share(kvl_sequence *seq, const int32_t *blocks, int n);
/* Closes the sequence and drops its references to blocks. NULL is allowed. */
void kvl_sequence_close(kvl_sequence *seq);
int kvl_sequence_length(const kvl_sequence *seq); /* tokens of its text */
int kvl_sequence_blocks(const kvl_sequence *seq); /* of the cut that holds most */
/* The number of tokens that a cut holds; of cut -1 the most that any holds. Errors: INVALID. */
int kvl_sequence_held(const kvl_sequence *seq, int cut);
/* Lengthens n sequences, sequence i by tokens[i] >= 0. The call lengthens all of them or
 * none.
 *  seqs    n different sequences of one pool, with the same numbers of layers and heads
 *  tokens  i32[n]
 *  replaces  whether sequences that hold as many tokens as they may (kvl_sequence_keep)
 *          hold no more: a new token (at most one) replaces another. 0: they hold all new
 *          tokens, those of a prompt, and the caps no longer apply
 *  places  i64[layers, heads * sum of tokens]
 *                              place (block * block_size + offset) of each new token,
 *                              sequence after sequence and head after head. -1 in a cut
 *                              that is full: the token replaces another
 *  copies  i32[2 * n * cuts]   pairs (from, to): a last block that was shared and partly full
 *                              was replaced; copy its memory before you append
 * Returns the number of pairs. Errors: INVALID, NO_BLOCKS, NO_MEMORY. */
int kvl_sequences_append(kvl_sequence *const *seqs, const int32_t *tokens, int n,
                         int replaces, int64_t *places, int32_t *copies);
/* Shortens the sequence to `length` tokens and frees the blocks past them. Errors: INVALID if
 * other tokens were evicted since. */
int kvl_sequence_truncate(kvl_sequence *seq, int length);
/* Undoes an append: shortens sequence i to lengths[i] tokens, its former length, and puts
 * each shared block back in place of its copy.
 *  seqs     n sequences of the append
 *  lengths  i32[n]
 *  copies   i32[2 * pairs]  the pairs that the append wrote; the caller has held every
 *                           `from` since (kvl_pool_hold)
 * Errors: INVALID; then nothing has changed. */
int kvl_sequences_rewind(kvl_sequence *const *seqs, const int32_t *lengths, int n,
                         const int32_t *copies, int pairs);
/* Evicts tokens for good. Cut c keeps kept[c] of its tokens, and holds at most caps[c] from
 * now on: tokens that are appended later replace others. A cut that keeps fewer tokens than
 * it holds gets new blocks, whose memory the caller fills. The old blocks belong to
 * `before`, which the caller closes when the eviction is final, or gives to
 * kvl_sequence_restore. May take blocks of the watermark. The length of the text does not
 * change. Errors: INVALID, NO_BLOCKS, NO_MEMORY; then nothing has changed. */
int kvl_sequence_keep(kvl_sequence *seq, const int32_t *kept, const int32_t *caps,
                      kvl_sequence **before);
/* Undoes an eviction, after everything that came after it was undone. Close `before` then.
 * Errors: INVALID. */
int kvl_sequence_restore(kvl_sequence *seq, kvl_sequence *before);
/* How many blocks the largest cut would have after an append of `tokens` tokens. */
int kvl_sequence_grown(const kvl_sequence *seq, int tokens, int replaces);
/* Replaces at most `room` blocks that are shared by new ones: copies gets pairs (from, to),
 * whose memory the caller copies. Returns how many pairs there are; if it is `room`, there
 * may be more. Errors: NO_BLOCKS, after which `copies` is not known: close the sequence. */
int kvl_sequence_unshare(kvl_sequence *seq, int32_t *copies, int room);
/* Writes the block table of a cut, padded with -1 to `width`. Returns how many blocks it has.
 * Errors: INVALID if the table is longer. */
int kvl_sequence_table(const kvl_sequence *seq, int cut, int32_t *row, int width);

/* Knows which block tables are on the device, i32 [layers, seqs * heads, width]: entry
 * (l, s * heads + h) is the table of layer l and head h of sequence s of a step. Entries past
 * a table's end are undefined. Errors: INVALID, NO_MEMORY. */
int kvl_tables_open(int layers, int heads, int seqs, int width, kvl_tables **out);
void kvl_tables_close(kvl_tables *tables);
/* Writes what must change on the device for a step of n sequences: at most `room` numbers
 * of entries, and their blocks. Returns how many it wrote; if it is `room`, there may be
 * more, which the next call writes. Errors: INVALID. */
int kvl_tables_update(kvl_tables *tables, kvl_sequence *const *seqs, int n, int32_t *where,
                      int32_t *to, int room);
/* Forgets what is on the device, because updates were lost. */
void kvl_tables_forget(kvl_tables *tables);
/* Describes a step after its append of tokens[i] to sequence i, layer after layer.
 *  lens                  i32[layers, n * heads]  tokens that are held
 *  blocks, block_tokens  i32[layers, touched]    blocks that got tokens, and how many valid
 *                        tokens each has. For each sequence and head there are as many as
 *                        its new tokens can lie in; if they lie in fewer, the last block is
 *                        repeated
 * Errors: INVALID if touched is less than that. */
int kvl_sequences_step(kvl_sequence *const *seqs, const int32_t *tokens, int n, int touched,
                       int32_t *lens, int32_t *blocks, int32_t *block_tokens);

/* ---- paged KV ops --------------------------------------------------------------------- */
/* These ops share their arguments.
 *
 * cache is one layer's KV memory, [blocks, ...], and format says what its pages are. Without
 * a format (NULL) the shape and the dtype of cache say it: f32, f16, bf16 or f8e4m3 [blocks,
 * 2, kv_heads, block_size, head_dim], K then V. head_dim, which is key_dim and value_dim of a
 * format, is a multiple of 8 (of 16 for f8e4m3 and int8) from 8 to 256. An f8e4m3 cache holds
 * k / k_scale[kv_head] and v / v_scale[kv_head]. Other caches have no scales by KV head.
 * Summaries and scores of an f8e4m3 cache are in the cache's own units: a scale > 0 does not
 * change the order of a KV head's blocks. Memory of int8 is u8 [blocks, ...]; its format must
 * be given, and block_size is a multiple of 8.
 *
 * A format may say that a value is the first value_dim numbers of its key, as that of a latent
 * is (is_shared). Its pages hold keys alone, of f32, f16, bf16 or f8_latent; key_dim and
 * value_dim are multiples of 8 (value_dim of 16 for f8_latent, whose memory is u8), key_dim up
 * to 576. kvl_append_kv, kvl_rope_append, kvl_read_blocks and kvl_paged_attention take such
 * pages; their results have the length value_dim. So do the ops that move
 * blocks or tokens, and the hot cache; summaries and scores, because they read keys alone; and
 * hashes, of a key_dim of up to 256, but not over f8_latent. Other ops refuse them.
 *
 * cache, q, k, v, out and summary begin at a multiple of 16 bytes.
 *
 * tables is i32 [seqs, max_blocks]: the physical blocks of each sequence in logical order.
 * lens is i32 [seqs]: tokens, with lens[s] <= max_blocks * block_size. Logical block b of
 * sequence s holds the tokens from b * block_size on. Nothing past lens[s] influences a
 * result, whatever its bits are. */

/* A codec of pages: its name, its number, whether it packs numbers beside scales that multiply
 * them, and whether the scales of a block lie behind all of its rows. */
typedef struct kvl_codec_info {
  const char *name;
  int32_t codec, packs, scales_apart;
} kvl_codec_info;

/* Fills `out` with the first n codecs. Returns how many there are. */
int kvl_codecs(kvl_codec_info *out, int n);

/* The bytes of a page. Errors: INVALID if there can be no such pages; the words say why. */
int64_t kvl_format_bytes_page(const kvl_format *format);

/* The struct that kernels from Lua get instead of a cache and its format. Errors: INVALID. */
int kvl_pages_of(const kvl_tensor *cache, const kvl_format *format, kvl_pages *out);

/* cache[place] = k, v. A token whose place is < 0 is skipped.
 *  k, v              like cache or f32 (f8e4m3 cache: f32 f16 bf16)
 *                    [tokens, kv_heads, head_dim]   v is NULL if values are shared
 *  places             i64 [tokens]  the place of each token, block * block_size + offset */
int kvl_append_kv(const kvl_tensor *k, const kvl_tensor *v, const kvl_tensor *places,
                  const kvl_tensor *cache, const kvl_format *format);
/* kvl_rope of q and k and then kvl_append_kv, in one launch and with the same bits as the
 * two. Where values are the first numbers of their keys, the numbers behind the values are
 * rotated (first = value_dim), else those from 0 on. q is rotated in place. k is rotated on
 * its way into the cache; the arguments k and v stay as they are. No two tokens may have
 * the same place. There are at most 128 pairs.
 *  q                    like k  [tokens, heads, head_dim]
 *  k, v, places         as for kvl_append_kv
 *  positions, inv_freq  as for kvl_rope */
int kvl_rope_append(const kvl_tensor *q, const kvl_tensor *k, const kvl_tensor *v,
                    const kvl_tensor *positions, const kvl_tensor *inv_freq,
                    const kvl_tensor *places, const kvl_tensor *cache,
                    const kvl_format *format);
/* Copies whole blocks, dst[i] = src[i]; no block may be both. src and dst are i32 [n]; a
 * pair with -1 is skipped. cache is [blocks, ...] of any dtype, and a block a multiple of 16
 * bytes: a copy does not look into pages. */
int kvl_copy_blocks(const kvl_tensor *src, const kvl_tensor *dst, const kvl_tensor *cache);

/* Reads the keys and values of some blocks out of their pages. They are in the units of the
 * cache: a format's scales by KV head are not applied.
 *  blocks  i32  [n]   physical blocks; for -1 and any other number that is no block: zeros
 *  k, v    f32 f16 bf16, or like cache  [n, kv_heads, block_size, head_dim or value_dim]
 *               one dtype; either may be NULL */
int kvl_read_blocks(const kvl_tensor *cache, const kvl_format *format,
                    const kvl_tensor *blocks, const kvl_tensor *k, const kvl_tensor *v);

/* out = softmax(scale * q k^T + bias) v over every block of each sequence, over a selection
 * of blocks, or over listed tokens. Sums are accumulated in fp32.
 *  q          f32 f16 bf16  [tokens, heads, head_dim]   heads % kv_heads == 0
 *  cache      like q, or f8e4m3; any of them when q is f32
 *  tables     i32  [seqs, max_blocks]
 *  lens       i32  [seqs]
 *  starts     i32  [seqs + 1]  rows of q: sequence s owns rows starts[s] ... starts[s+1]-1,
 *                  which are its newest tokens. NULL: decode, one row per sequence
 *  selection  i32  [seqs, kv_heads or 1, max_selected]  logical blocks in ascending order,
 *                  padded with -1; NULL: every block
 *  listed     i32  [tokens, kv_heads or 1, max_selected]  the tokens that each row of q reads,
 *                  by their index in its sequence, in any order, such as those that an
 *                  indexer selects; -1, and any other number that is no token which the row
 *                  may see, adds nothing. A token that is listed twice counts twice. Instead
 *                  of a selection. NULL: no list
 *  slots      i32  [seqs, kv_heads or 1, max_selected]  the physical block of each selected
 *                  block, used instead of tables (for slots of a ring or a hot cache). With a
 *                  list [tokens, ...]: where each listed token lies, block * block_size +
 *                  offset. NULL: tables is used
 *  alibi      f32  [heads] slopes; bias = slope * (key position - query position);
 *                  NULL: no bias
 *  prev_out   f32  [tokens, heads, head_dim]  the result of an attention over other keys,
 *  prev_lse   f32  [tokens, heads]   which is merged into this one; give both or neither.
 *                  out may alias prev_out, but lse may not alias prev_lse
 *  out        like q, or f32  [tokens, heads, head_dim]
 *  lse        f32  [tokens, heads]  log of the softmax's denominator; may be NULL
 * A token has an index, its number among those that its sequence holds, and a position, its
 * number in the text.
 * causal: a row sees the keys at indices <= its own; otherwise it sees every key of the
 * sequence. window: a row does not see keys at positions <= its own - window; 0: no window.
 * soft_cap: a score s = scale * q k becomes soft_cap * tanh(s / soft_cap) before the ALiBi
 * bias is added; 0: no cap.
 * tree       u64  [tokens, words], words 1 or 2: which of the newest keys of its sequence each
 *                  row sees, when these are the tokens of a draft tree. Bit i (bit i % 64 of
 *                  word i / 64) stands for the key at index lens[s] - 1 - i; 0 hides it.
 *                  Keys further back than that are not hidden. NULL: no tree. A tree works
 *                  neither with alibi nor with a window, because the positions of its tokens
 *                  are not known here
 * A row that sees no key gets out 0 and lse -inf.
 *
 * hook: NULL, or code that changes the scores before the softmax (kvl_code_open). Its
 * `hook_bytes` bytes of arguments are copied; it reads `hook_tensors_count` tensors. With
 * hook_only_keeps, it changes no score, and is needed only because scores are stored.
 *  scores     f32  [tokens, heads, max_blocks * block_size]  receives the scores that the
 *                  softmax saw, by the index of their key; for keys that a row does not
 *                  see, the contents are undefined. NULL: they are not stored. A GPU stores
 *                  them only in decode, and with a hook */
typedef struct kvl_attention {
  const kvl_tensor *q, *cache, *tables, *lens, *starts, *selection, *listed, *slots, *alibi;
  const kvl_tensor *prev_out, *prev_lse, *out, *lse, *scores, *tree;
  const kvl_format *format; /* of cache, see above */
  double scale, soft_cap;
  int32_t causal, window;
  struct kvl_code *hook;
  const void *hook_arguments;
  kvl_tensor *const *hook_tensors;
  int32_t hook_bytes, hook_tensors_count;
  int32_t hook_only_keeps, reserved;
} kvl_attention;
int kvl_paged_attention(const kvl_attention *call);

/* Merges two attentions over disjoint keys. out may alias out_a, and lse may alias lse_a.
 *  out_a, out_b, out  f32 f16 bf16  [tokens, heads, head_dim]  one dtype
 *  lse_a, lse_b, lse  f32           [tokens, heads]     lse may be NULL */
int kvl_merge_attention(const kvl_tensor *out_a, const kvl_tensor *lse_a,
                        const kvl_tensor *out_b, const kvl_tensor *lse_b,
                        const kvl_tensor *out, const kvl_tensor *lse);

/* Takes the elementwise minimum and maximum of K over the valid tokens of the given blocks.
 *  blocks   i32  [n]   physical blocks; -1 is skipped
 *  tokens   i32  [n]   valid tokens of each; 0 gives min +inf, max -inf (f8e4m3: 448, -448)
 *  rows     i32  [n]   the row of the summary for each; -1 is skipped. NULL: as blocks
 *  summary  like cache; of int8 f32, f16 or bf16  [rows, 2, kv_heads, head_dim] */
int kvl_block_minmax(const kvl_tensor *cache, const kvl_format *format,
                     const kvl_tensor *blocks, const kvl_tensor *tokens,
                     const kvl_tensor *rows, const kvl_tensor *summary);
/* Takes the mean of K over the valid tokens of the given blocks; 0 tokens give 0. The
 * arguments are those of kvl_block_minmax, but summary is like cache or f32 [rows, kv_heads,
 * head_dim]. */
int kvl_block_mean(const kvl_tensor *cache, const kvl_format *format,
                   const kvl_tensor *blocks, const kvl_tensor *tokens, const kvl_tensor *rows,
                   const kvl_tensor *summary);

/* Score every block of every sequence. Entries past a sequence's last block get -inf.
 *  q        f32 f16 bf16  [seqs, heads, head_dim]
 *  scores   f32           [seqs, kv_heads, max_blocks]
 * minmax: sum_d max(q_d * min_d, q_d * max_d)   (Quest, Tang et al. 2024). mean: q . mean.
 * max_qk: the largest q . k of the block's valid tokens, read from the cache itself. */
int kvl_score_minmax(const kvl_tensor *q, const kvl_tensor *summary, const kvl_tensor *tables,
                     const kvl_tensor *lens, int block_size, int group,
                     const kvl_tensor *scores);
int kvl_score_mean(const kvl_tensor *q, const kvl_tensor *summary, const kvl_tensor *tables,
                   const kvl_tensor *lens, int block_size, int group,
                   const kvl_tensor *scores);
int kvl_score_max_qk(const kvl_tensor *q, const kvl_tensor *cache, const kvl_format *format,
                     const kvl_tensor *tables, const kvl_tensor *lens, int group,
                     const kvl_tensor *scores);

/* ---- hashes --------------------------------------------------------------------------- */
/* These ops hash a vector x by random planes: bit b of the hash is 1 where planes[b] . x >
 * 0. The share of bits in which two hashes differ estimates the angle between their vectors,
 * divided by pi. A word has 64 bits, and bit 0 is the lowest. A hash of 32 bits is one word
 * whose upper half is 0. The sign is that of a sum in one fixed order (see args/select.h), so
 * every device gives the same bits.
 *  planes  f32  [bits, head_dim]   bits: 32, or a multiple of 64 up to 1024
 *  words   (bits + 63) / 64
 * Source: Charikar 2002 (random hyperplanes). */

/* Hashes each row of x.
 *  x       f32 f16 bf16  [rows, head_dim]
 *  hashes  u64           [rows, words] */
int kvl_hash_rows(const kvl_tensor *x, const kvl_tensor *planes, const kvl_tensor *hashes);
/* Hashes K. blocks, tokens and rows are those of kvl_block_minmax. hashes has one of two
 * forms:
 *  hashes  u64  [rows, kv_heads, words]              the mean of a block's valid tokens
 *          u64  [rows, kv_heads, block_size, words]  each valid token; the hashes of other
 *                                                    tokens stay as they are */
int kvl_block_hash(const kvl_tensor *cache, const kvl_format *format,
                   const kvl_tensor *blocks, const kvl_tensor *tokens, const kvl_tensor *rows,
                   const kvl_tensor *planes, const kvl_tensor *hashes);
/* Scores every block of every sequence by the number of bits in which its hash differs from
 * the query's hash, negated: 0 is the best score. Entries past a sequence's last block get
 * -inf. With token hashes, a block gets the score of its best valid token.
 *  q_hashes  u64  [seqs, kv_heads, words]
 *  hashes    u64  [blocks, kv_heads, words] or [blocks, kv_heads, block_size, words]
 *  scores    f32  [seqs, kv_heads or 1, max_blocks]   1: the best score of the KV heads */
int kvl_score_hamming(const kvl_tensor *q_hashes, const kvl_tensor *hashes,
                      const kvl_tensor *tables, const kvl_tensor *lens, int block_size,
                      const kvl_tensor *scores);

/* The number of blocks that a budget lets a policy select from a sequence of n blocks (see
 * kvl_budget). */
int kvl_budget_blocks(const kvl_budget *budget, int n);

/* Selects the first `sink` blocks, the last `recent` blocks and the blocks with the highest
 * scores, exactly. Of equal scores the lower index comes first. A score of -inf or NaN says
 * that a block is not eligible: it is never selected, whatever the budget, except as a sink
 * or a recent block. Rows with fewer than max_selected blocks are padded with -1. With
 * limits, each list has its own number in place of the budget's ratio (f32) or blocks (i32);
 * min_blocks, sink and recent hold for all of them. The device reads limits, so their values
 * are not checked: one that is negative or NaN counts as 0.
 *  scores     f32      [seqs, kv_heads or 1, max_blocks]   1: for all lists
 *  lens       i32      [seqs]
 *  limits     f32 i32  [seqs or 1, lists]  may be NULL
 *  selection  i32      [seqs, lists, max_selected]  ascending; lists is kv_heads or 1. Make
 *                      it wide enough for every budget: blocks past max_selected are dropped,
 *                      the lowest scores first
 *  counts     i32      [seqs, lists]  may be NULL */
int kvl_select(const kvl_tensor *scores, const kvl_tensor *lens, int block_size,
               const kvl_budget *budget, const kvl_tensor *limits,
               const kvl_tensor *selection, const kvl_tensor *counts);

/* One launch that selects exactly what these three ops would select, without writing the
 * scores: kvl_hash_rows of the mean query of each KV head's group, kvl_score_hamming and
 * kvl_select. A block whose entry in tables is no block is eligible here, and comes last.
 *  q                  f32 f16 bf16  [seqs, heads, head_dim]   heads % kv_heads == 0
 *  planes, hashes     as above
 *  tables, lens       as for kvl_score_hamming; budget and limits as for kvl_select
 *  selection, counts  as for kvl_select; selection_heads is kv_heads or 1 */
typedef struct kvl_hamming {
  const kvl_tensor *q, *planes, *hashes, *tables, *lens, *limits, *selection, *counts;
  kvl_budget budget;
  int32_t block_size;
  int32_t reserved;
} kvl_hamming;
int kvl_select_hamming(const kvl_hamming *call);

/* Shortens selections in place (top-p). Each keeps the fewest blocks whose weights add up to
 * `mass` (0 ... 1) times the sum over all blocks of the sequence. The first `sink` and last
 * `recent` blocks stay; of the other blocks the heaviest are kept, and of equal weights the
 * lower index. If the selected weights do not reach that sum, or mass is 1, the whole
 * selection stays.
 *  weights    f32  [seqs, kv_heads or 1, max_blocks]    1: for all lists. A weight that is
 *                                                       not > 0 counts as 0
 *  lens       i32  [seqs]
 *  selection  i32  [seqs, lists, max_selected]          as kvl_select writes it
 *  counts     i32  [seqs, lists]  may be NULL */
int kvl_trim_selection(const kvl_tensor *weights, const kvl_tensor *lens, int block_size,
                       double mass, int sink, int recent, const kvl_tensor *selection,
                       const kvl_tensor *counts);

/* ---- eviction -------------------------------------------------------------------------- */
/* A sequence may hold fewer tokens than its text has. Then the index of a token, its number
 * among those that are held, is not its position in the text. */

/* Copies keys and values of tokens, of every KV head: token to[i] of dst is token from[i] of
 * src, each by its place, block * block_size + offset. An entry that is out of range on either
 * side is skipped. No token may be written twice, or be both read and written.
 *  src, dst  like a cache, or as format says; may be the same memory
 *  from, to  i64  [n] */
int kvl_copy_tokens(const kvl_tensor *src, const kvl_tensor *from, const kvl_tensor *dst,
                    const kvl_tensor *to, const kvl_format *format);

/* Finds the places of a step's new tokens, one for each row, after the append. If wanted is
 * a place, the row has room: the new token is its last, with index lens - 1. If it is
 * negative, the row is full: the new token replaces the one with the lowest score; among
 * equal scores, the one that comes first in the text. NaN counts as the lowest score. The
 * tokens at positions below `sink` and the newest `recent`, the new one included, stay as
 * long as there are others.
 *  scores        f32  [rows, n]  NULL: the positions, so that the oldest token goes
 *  score_firsts  i32  [rows, 1]  NULL, or scores is [1, n], and those of row r begin at
 *                                 score_firsts[r]
 *  positions     f32  [1, cells]  those of row r begin at firsts[r]. Changed: that of the new
 *                                 token is written
 *  firsts        i32  [rows, 1]
 *  tables        i32  [rows, max_blocks]
 *  lens, now     i32  [rows]      tokens that a row holds; the new token's position
 *  wanted        i64  [rows]      as kvl_sequences_append wrote it
 *  index         i32  [rows]      the new token's index
 *  replaced      f32  [rows]      the former position there
 *  places        i64  [rows]
 *  blocks        i32  [rows]      the block that the new token lies in
 *  block_tokens  i32  [rows]      valid tokens in it
 *  cache, saved  like a cache, or as format says; saved may be NULL. The former token at
 *                places[r] is copied to token r of saved, as kvl_copy_tokens does */
typedef struct kvl_replacement {
  const kvl_tensor *scores, *score_firsts, *positions, *firsts, *tables, *lens, *now;
  const kvl_tensor *wanted, *index, *replaced, *places, *blocks, *block_tokens;
  const kvl_tensor *cache, *saved;
  const kvl_format *format;
  int32_t block_size, sink, recent;
  int32_t reserved;
} kvl_replacement;
int kvl_replace(const kvl_replacement *call);

/* Sets rows of numbers in a memory, or adds to them, and saves the old numbers:
 * before[r][i] = memory[firsts[r] + i], which becomes values[r][i] or, with is_add, the sum
 * of both. A number that lies outside of the memory is skipped. No two rows may overlap.
 *  memory  f32  [1, cells]
 *  firsts  i32  [rows, 1]
 *  values  f32  [rows, n]
 *  fresh   i32  [rows, 1]  NULL, or with is_add: memory[firsts[r] + fresh[r]] counts as
 *                          `initial` in the sum, whatever it is; -1 for none
 *  before  f32  [rows, n]  NULL: nothing is saved */
int kvl_update_rows(const kvl_tensor *memory, const kvl_tensor *firsts,
                    const kvl_tensor *values, int is_add, const kvl_tensor *fresh,
                    double initial, const kvl_tensor *before);

/* ---- index-K: what a lightning indexer scores with ------------------------------------- */
/* An indexer scores every token by one small key that all of the indexer's heads share;
 * attention then reads only the tokens with the best scores. The keys are f8e4m3 with one
 * scale per token, x ~ k * scale. The index-K memory of a layer is u8 [blocks, block_size *
 * (dim + 4)]. Each block holds its block_size keys first, dim bytes each, and then their f32
 * scales. dim is 32, 64 or 128. keys, q and the memory begin at a multiple of 16 bytes. The
 * argument places is i64 [n]: the place of each token, block * block_size + offset. Source:
 * DeepSeek-V3.2 (DSA) and its pool of blocks in SGLang. */

/* Quantises each row by its largest |x|, amax: scale = max(amax, 1e-4) / 448, out = x /
 * scale, saturating. With is_ue8m0, the scale is rounded up to a power of two (UE8M0, an
 * exponent alone; it is still stored as f32). A NaN stays NaN and does not count for amax.
 * Every device gives the same bits.
 *  x       f32 f16 bf16  [..., dim]
 *  out     f8e4m3        [..., dim]
 *  scales  f32           [...] */
int kvl_quantise_rows(const kvl_tensor *x, int is_ue8m0, const kvl_tensor *out,
                      const kvl_tensor *scales);
/* out = scale * H x along the last dim, where H is the Walsh-Hadamard matrix in Sylvester's
 * order. With scale dim^-0.5 this is a rotation, which spreads large values of a few dims
 * over all dims. Sums are f32 in one fixed order, so every device gives the same bits. out
 * may be x.
 *  x, out  f32 f16 bf16  [..., dim]   dim: a power of two up to 1024 */
int kvl_hadamard(const kvl_tensor *x, double scale, const kvl_tensor *out);
/* Queries as kvl_mqa_logits takes them: each row of q quantised as kvl_quantise_rows does, and
 * out_weights = weights * factor * its scale. If `rotates`, rows are rotated first, as by
 * kvl_hadamard with dim^-0.5. out_weights may be weights.
 *  q                     f32 f16 bf16  [rows, heads, dim]
 *  weights, out_weights  f32           [rows, heads]
 *  out                   f8e4m3        [rows, heads, dim] */
int kvl_index_queries(const kvl_tensor *q, const kvl_tensor *weights, double factor,
                      int rotates, int is_ue8m0, const kvl_tensor *out,
                      const kvl_tensor *out_weights);
/* cache[place] = k, quantised as kvl_quantise_rows does, after a rotation if `rotates` (see
 * kvl_index_queries). A token whose place is < 0 is skipped. No two tokens may have the same
 * place.
 *  k      f32 f16 bf16  [n, dim]
 *  cache  u8            [blocks, block_size * (dim + 4)] */
int kvl_index_append(const kvl_tensor *k, const kvl_tensor *places, int rotates, int is_ue8m0,
                     const kvl_tensor *cache);
/* Reads the keys and scales at the places in `places`. A number that is no place in the cache
 * gives zeros.
 *  k       f8e4m3  [n, dim]
 *  scales  f32     [n] */
int kvl_index_gather(const kvl_tensor *cache, const kvl_tensor *places, const kvl_tensor *k,
                     const kvl_tensor *scales);

/* logits[r][j] = scales[j] * sum over heads h of weights[r][h] * max(q[r][h] . k[j], 0), for
 * max(starts[r], 0) <= j < min(ends[r], tokens, columns). The other columns stay as they
 * are. Sums are f32. The sum over dims is as exact as the device's multiplication: Hopper's
 * tensor cores keep about 14 bits of a sum of f8e4m3 products. The sum over heads has a
 * fixed order of its own, which does not change from run to run or with the rows and columns
 * of a call.
 *  q        f8e4m3  [rows, heads, dim]   heads 1 ... 64; weights may include q's scale
 *  weights  f32     [rows, heads]
 *  k        f8e4m3  [tokens, dim]
 *  scales   f32     [tokens]
 *  starts   i32     [rows]
 *  ends     i32     [rows]
 *  logits   f32 bf16  [rows, columns] */
int kvl_mqa_logits(const kvl_tensor *q, const kvl_tensor *weights, const kvl_tensor *k,
                   const kvl_tensor *scales, const kvl_tensor *starts, const kvl_tensor *ends,
                   const kvl_tensor *logits);
/* As kvl_mqa_logits, with the keys in index-K memory. rows = sequences * each, and row r
 * scores the first lens[r] tokens of sequence r / each, as far as the sequence's table and
 * the columns go. Where an entry of the table is no block, its tokens get -inf.
 *  cache   u8   [blocks, block_size * (dim + 4)]
 *  tables  i32  [sequences, max_blocks]
 *  lens    i32  [rows] */
int kvl_mqa_logits_paged(const kvl_tensor *q, const kvl_tensor *weights,
                         const kvl_tensor *cache, const kvl_tensor *tables,
                         const kvl_tensor *lens, const kvl_tensor *logits);
/* ---- tokens by top-k ------------------------------------------------------------------- */
/* These ops turn a row of logits, one per token, into the tokens that sparse attention
 * reads. The tokens of row r are the columns starts[r] ... starts[r] + lens[r] - 1, cut to
 * the columns that exist. Their indices count from 0 at starts[r]. The contents of other
 * columns do not matter. The top-k is exact: of equal logits the lower index wins, and -0
 * equals 0. A token whose logit is -inf or NaN is not eligible: it is never taken, however
 * few others there are. Indices come in ascending order, padded with -1.
 * Source: the top-k and its transforms in SGLang's NSA indexer; that top-k is unordered and
 * drops candidates past 16384. */

/* Says what the op writes instead of indices. With NULL, or with all three tensors NULL,
 * it writes the indices.
 *  tables        i32  [sequences, width]  PAGED: the place of the token, tables[s][p /
 *                     block_size] * block_size + p % block_size, with s = row_sequence[r];
 *                     -1 where the table has no block. Tables are read in place
 *  row_sequence  i32  [rows]  NULL: each sequence has rows / sequences rows in turn
 *  offsets       i32  [rows]  RAGGED: p + offsets[r]; not together with tables */
typedef struct kvl_transform {
  const kvl_tensor *tables, *row_sequence, *offsets;
  int32_t block_size; /* of tables; 1 ... 4096 */
  int32_t reserved;
} kvl_transform;

/* Finds the k = out.shape[1] largest logits of each row.
 *  logits  f32 bf16  [rows, n]
 *  starts  i32       [rows]  NULL: 0
 *  lens    i32       [rows]
 *  out     i32       [rows, k] */
int kvl_topk_transform(const kvl_tensor *logits, const kvl_tensor *starts,
                       const kvl_tensor *lens, const kvl_transform *transform,
                       const kvl_tensor *out);
/* Applies the transformation alone.
 *  indices  i32  [rows, k]  an index < 0 gives -1; NULL: 0 ... lens[r] - 1
 *  lens     i32  [rows]     given when indices is NULL, and else NULL
 *  out      i32  [rows, k]  may be indices */
int kvl_transform_indices(const kvl_tensor *indices, const kvl_tensor *lens,
                          const kvl_transform *transform, const kvl_tensor *out);
/* A running top-k, for rows that are never in memory as a whole. It merges the columns first
 * ... first + n - 1 with the k largest logits of the columns before them. If first is 0,
 * the kept values and indices are not read.
 *  logits           f32 bf16  [rows, n]
 *  starts, lens     i32  [rows]     in columns of the whole row; starts may be NULL
 *  kept_values      f32  [rows, k]  result of the call before; anything when first is 0
 *  kept_indices     i32  [rows, k]
 *  values           f32  [rows, k]  padded with -inf; not the memory of kept_values
 *  indices          i32  [rows, k]  not the memory of kept_indices */
int kvl_topk_merge(const kvl_tensor *logits, int64_t first, const kvl_tensor *starts,
                   const kvl_tensor *lens, const kvl_tensor *kept_values,
                   const kvl_tensor *kept_indices, const kvl_tensor *values,
                   const kvl_tensor *indices);
/* Writes the places of a range of tokens of every sequence, one sequence after the other:
 * out[ends[s - 1] + i] is the place of token starts[s] + i of sequence s, as PAGED above.
 * Entries from ends[sequences - 1] on get -1.
 *  tables  i32      [sequences, width]
 *  starts  i32      [sequences]
 *  ends    i32      [sequences]  cumulative lengths
 *  out     i32 i64  [n] */
int kvl_ragged_places(const kvl_tensor *tables, int block_size, const kvl_tensor *starts,
                      const kvl_tensor *ends, const kvl_tensor *out);

/* ---- vLLM layout ----------------------------------------------------------------------- */
/* PagedAttention V1 and V2 of vLLM over vLLM's own layout of KV memory, as a baseline. One
 * layer is:
 *  key_cache    f32 f16 bf16 f8e4m3  [blocks, kv_heads, head_dim / x, block_size, x]
 *  value_cache  like key_cache       [blocks, kv_heads, head_dim, block_size]
 * Here x = 16 / bytes of an element. head_dim is one of 32 64 80 96 112 120 128 192 256 and
 * a multiple of x; block_size is 8, 16 or 32. An f8e4m3 cache holds k / k_scale[0] and v /
 * v_scale[0], where the scales are f32 [1] (NULL: 1). Other caches have no scales. Source:
 * vllm-project/vllm, csrc/attention. */

/* key_cache[place], value_cache[place] = k, v. A token whose place is < 0 is skipped.
 *  k, v   like the caches or f32 (f8e4m3 caches: f32 f16 bf16)  [tokens, kv_heads, head_dim]
 *  places  i64  [tokens]  the place of each token, block * block_size + offset */
int kvl_vllm_append(const kvl_tensor *k, const kvl_tensor *v, const kvl_tensor *places,
                    const kvl_tensor *key_cache, const kvl_tensor *value_cache,
                    const kvl_tensor *k_scale, const kvl_tensor *v_scale);

/* Decode: out = softmax(scale * q k^T + bias) v over every block of each sequence.
 *  q       like the caches (f8e4m3 caches: f32 f16 bf16)  [seqs, heads, head_dim]
 *  tables  i32  [seqs, max_blocks]   an entry that is no block holds no keys
 *  lens    i32  [seqs]
 *  alibi   f32  [heads] slopes; NULL: none
 *  out     like q  [seqs, heads, head_dim]   0 for a sequence without keys
 * version 1 makes one pass over a sequence and holds all of its logits in shared memory.
 * Version 2 divides a sequence into partitions of 512 tokens, which a second kernel merges.
 * Version 0 chooses as vLLM does: with longest = max_blocks * block_size, it takes version 1
 * where longest <= 8192 and (longest <= 512 or seqs * heads > 512), and version 2 elsewhere.
 * On the CPU the versions are the same. Errors: INVALID; NO_MEMORY; UNSUPPORTED if version 1
 * needs more shared memory (4 * longest bytes) than a thread block may have (on an H100:
 * past about 57 thousand tokens). */
typedef struct kvl_vllm {
  const kvl_tensor *q, *key_cache, *value_cache, *tables, *lens, *alibi, *out;
  const kvl_tensor *k_scale, *v_scale;
  double scale;
  int32_t version;
  int32_t reserved;
} kvl_vllm;
int kvl_vllm_attention(const kvl_vllm *call);

/* ---- kernels made at run time ---------------------------------------------------------- */

/* Machine code that was compiled while the program runs. It is a kernel, with the entry
 * kvl_code, or a hook of kvl_paged_attention (kernels/hook.h):
 *   cpu    a shared library with int kvl_code(const void *arguments, void *queue), which
 *          returns 0 or a negative kvl_status, or with a kvl_hook, kvl_code_hook
 *   cuda   a cubin with extern "C" __global__ void kvl_code(struct arguments), or with the
 *          attention kernel of one shape, into which a hook was compiled
 * Nothing checks what the code does with memory. */
typedef struct kvl_code kvl_code;

/* The hash of kvlab's headers that such code is compiled with, as of this build. */
const char *kvl_code_headers(void);

/* Loads code for a device's kind of processor from an image of `bytes` bytes, which is
 * copied. `name` stands in messages. Errors: INVALID, DEVICE (the image is not one, or has
 * neither a kernel nor a hook). */
int kvl_code_open(kvl_device *dev, const char *name, const void *image, size_t bytes,
                  kvl_code **out);
/* Launches it on the device's current stream. `arguments`: its struct, `size` bytes, copied.
 * `tensors`: the n tensors that it reads or writes; their memory is kept until it has ended.
 * Errors: INVALID for a tensor that is closed or on another device, size out of range, a hook;
 * DEVICE; INTERRUPTED. */
int kvl_code_launch(kvl_code *code, kvl_device *dev, const void *arguments, size_t size,
                    kvl_tensor *const *tensors, int n, const kvl_grid *grid);
/* Unloads it. No launch of it may be under way, and no graph may hold one. NULL is allowed. */
void kvl_code_close(kvl_code *code);
/* The target that a compiler must be told: "sm_90a", or plain, avx2, avx512. Writes at most
 * `size` bytes. */
int kvl_device_target(kvl_device *dev, char *text, size_t size);

/* ---- graphs ---------------------------------------------------------------------------- */

/* A graph records the work that is launched between begin and end instead of running it; a
 * replay then runs all of it without the host. Ops read lengths, tables and selections from
 * the device, so one recorded step serves later steps. Until it is closed, the graph holds the
 * memory that it reads and writes, whoever frees it, and what was allocated while it was
 * recorded. Another stream takes part if it waits for an event that was recorded on the stream
 * of begin; that stream must wait for it in turn before the end. */
typedef struct kvl_graph kvl_graph;

/* Starts to record the work that goes to the device's current stream. Until the end, it is
 * an error to read from or write to the host, or to wait. Errors: INVALID if the device is
 * recording already; DEVICE. */
int kvl_graph_begin(kvl_device *dev);
int kvl_device_is_recording(const kvl_device *dev);
/* Ends the recording, also after a failure during it. Errors: INVALID if no recording was
 * begun; DEVICE. */
int kvl_graph_end(kvl_device *dev, kvl_graph **out);
/* Runs the graph on the stream that it was recorded on, which must be the current one.
 * Errors: INVALID if another stream is current; DEVICE; INTERRUPTED. */
int kvl_graph_replay(kvl_graph *graph);
/* Waits for the graph's last replay and frees it. NULL is allowed. */
void kvl_graph_close(kvl_graph *graph);

/* ---- host tier and ring ---------------------------------------------------------------- */
/* The host tier is KV memory in pinned host memory, with one pinned tensor [blocks, 2,
 * kv_heads, block_size, head_dim] per layer. Block tables name its blocks. */

/* dst[to[i]] = src[from[i]] between two memories of one layer, either of which may be
 * pinned. It moves whole blocks, or K and V of single KV heads. A pair is skipped if either
 * side is -1 or out of range. No block may be written twice.
 *  src    pages of format, see "paged KV ops"  [blocks_src, ...]
 *  dst    like src                             [blocks_dst, ...]
 *  from   i32  [seqs, 1 or kv_heads, n]   entry (s, g, i) moves KV head g, or all of them
 *  to     i32  like from
 *  moved  i64  [1]  the bytes copied are added to it; may be NULL */
int kvl_move_blocks(const kvl_tensor *src, const kvl_tensor *from, const kvl_tensor *dst,
                    const kvl_tensor *to, const kvl_format *format, const kvl_tensor *moved);
/* The same for single tokens, block * block_size + offset of either side. No int8.
 *  from, to  i32  [seqs, kv_heads, n] */
int kvl_move_tokens(const kvl_tensor *src, const kvl_tensor *from, const kvl_tensor *dst,
                    const kvl_tensor *to, const kvl_format *format, const kvl_tensor *moved);

/* Divides a selection for attention over a ring: into passes of `n` blocks that come from
 * the host tier, and the open blocks, which lie in a buffer on the device. heads is 1 or
 * kv_heads.
 *  selection     i32  [seqs, heads, max_selected]  NULL: every block, and heads is 1
 *  tables        i32  [seqs, max_blocks]
 *  lens          i32  [seqs]
 *  opens         i32  [seqs, 2]   first open logical block, and its index in the buffer;
 *                the blocks from there to the last lie side by side in the buffer
 *  logical       i32  [passes, seqs, heads, n]     ascending, padded with -1
 *  physical      i32  [passes, seqs, heads, n]     their physical blocks by tables, padded
 *                with -1. Blocks that do not fit into the passes are dropped
 *  open_logical  i32  [seqs, heads, n_open]        selected blocks from opens[s][0] on
 *  open_slots    i32  [seqs, heads, n_open]        their index in the buffer */
typedef struct kvl_cut {
  const kvl_tensor *selection, *tables, *lens, *opens;
  const kvl_tensor *logical, *physical, *open_logical, *open_slots;
  int32_t block_size;
  int32_t reserved;
} kvl_cut;
int kvl_cut_selection(const kvl_cut *call);

/* A ring has slots on the device, through which blocks of the host tier pass. Each slot has
 * a stream and two events, ready and compute-done. The ring also has one stream that takes
 * blocks to the host, with an event offload-done for each layer. Source: the SparsePolicy
 * engine of a nano-vllm fork. */
typedef struct kvl_ring kvl_ring;
/* In place of a slot in kvl_ring_wait and kvl_ring_done: the work between the two is on the
 * buffer. A trace shows it; nothing else happens. */
enum { KVL_RING_BUFFER = -1 };

/* Opens a ring over memory, pages of format [slots, blocks, ...], which the ring retains. It
 * reads no scales. Errors: INVALID, NO_MEMORY, DEVICE. */
int kvl_ring_open(const kvl_tensor *memory, const kvl_format *format, int layers,
                  kvl_ring **out);
/* Waits for the ring's copies and closes it. NULL is allowed. */
void kvl_ring_close(kvl_ring *ring);
/* Copies blocks[0 ... n-1] of a layer of the host tier into the slot, in this order. The
 * device's copy engine does it: a run of neighbouring blocks is one copy, which is best for
 * large blocks. The load starts after the last kvl_ring_planned, the slot's compute-done and
 * the layer's offload-done. When it is over, it records ready. */
int kvl_ring_load(kvl_ring *ring, int slot, int layer, const kvl_tensor *cache,
                  const int32_t *blocks, int n);
/* As kvl_ring_load, but by kvl_move_blocks, for indices that are on the device: slot[to] =
 * cache[from]. It also starts after the load before it. */
int kvl_ring_gather(kvl_ring *ring, int slot, int layer, const kvl_tensor *cache,
                    const kvl_tensor *from, const kvl_tensor *to);
/* Tells the ring that everything that later loads need is complete at the present end of the
 * current stream: the indices, and blocks of the host tier that were written there. Call it
 * once per step, before the loads. */
int kvl_ring_planned(kvl_ring *ring);
/* Makes the current stream wait for the slot's load. */
int kvl_ring_wait(kvl_ring *ring, int slot);
/* Tells the ring that no work after the present end of the current stream reads the slot
 * (this is compute-done). Call it before the next load of the slot. */
int kvl_ring_done(kvl_ring *ring, int slot);
/* Copies buffer[from[i]] to cache[to[i]] on the offload stream, after all work that the
 * current stream has been given, and then records the layer's offload-done. from and to are
 * those of kvl_move_blocks. blocks is NULL, or to's n values on the host: with them the copy
 * engine can copy large blocks, and from must be 0 ... n-1. */
int kvl_ring_offload(kvl_ring *ring, int layer, const kvl_tensor *buffer,
                     const kvl_tensor *from, const kvl_tensor *cache, const kvl_tensor *to,
                     const int32_t *blocks);
/* Makes the current stream wait for the layer's offload-done. Call it before the buffer is
 * overwritten. */
int kvl_ring_wait_offload(kvl_ring *ring, int layer);
/* Gives the bytes moved since open, in each direction. It waits for the ring's streams. */
int kvl_ring_bytes(kvl_ring *ring, int64_t *to_device, int64_t *to_host);

/* ORDER kvl_span_kind */
typedef enum kvl_span_kind {
  KVL_SPAN_LOAD,
  KVL_SPAN_COMPUTE,
  KVL_SPAN_OFFLOAD,
} kvl_span_kind;

/* A span is one load, computation or offload, from its begin to its end on the device, in
 * microseconds since the trace began. COMPUTE spans go from kvl_ring_wait to kvl_ring_done.
 * slot is -1 for OFFLOAD and for computation over the buffer; the layer of the latter is -1
 * too. */
typedef struct kvl_span {
  double begin_us, end_us;
  int32_t kind, slot, layer, blocks;
} kvl_span;

/* Starts a trace that keeps the next `spans` spans; 0 ends it. Errors: NO_MEMORY, DEVICE. */
int kvl_ring_trace(kvl_ring *ring, int spans);
/* Copies at most n complete spans of the trace into out, in the order in which they were
 * issued. It waits for them and returns how many it copied. */
int kvl_ring_trace_get(kvl_ring *ring, kvl_span *out, int n);

/* ---- hot cache ------------------------------------------------------------------------- */
/* A hot cache keeps blocks of the host tier on the device. Every KV head has slots of its
 * own: slot s of head g may hold another block than slot s of head g'. kvl_hot_append keeps
 * the slots equal to the host tier. A caller that writes the host tier by other means must
 * call kvl_hot_drop. None of these functions waits or reads values back to the host, so all
 * of them can be recorded in a graph. */

/* One layer of a hot cache.
 *  memory    like the host tier  [slots, ...]
 *  slot_of   i32  [kv_heads, blocks]  the slot that holds a block of the host tier; -1: none
 *  block_of  i32  [kv_heads, slots]   the block that a slot holds; -1: the slot is free
 *  order     i32  [kv_heads, slots]   every slot once, the least recently used first
 *  priority  f32  [kv_heads, blocks]  the lowest is evicted first, equal ones by order; NULL:
 *                 the least recently used is. Free slots are always taken before any
 *  counters  i64  [5]  to which are added: hits, misses, evictions, bytes from the host, and
 *                 slots that were filled ahead and are hit for the first time
 *  ahead     i32  [kv_heads, slots]   1: filled ahead and not hit since; NULL: not kept
 *  uses      f32  [kv_heads, blocks]  how many calls have selected the block since it got
 *                 its slot; NULL: not kept. Calls that are ahead do not count
 *  age       f32  [kv_heads, blocks]  how many calls ago the block was last selected; NULL:
 *                 not kept. Only calls that are not ahead make a block older, but a block
 *                 that a call ahead selects has age 0, too. Blocks without a slot have no
 *                 meaningful uses and age. Either tensor may also be the priority
 *  by_token  1: a slot holds one token instead of a block. Slot s is the token at offset
 *            s % block_size of block s / block_size of memory. Wherever these functions say
 *            block of the host tier, token block * block_size + offset is meant, and
 *            selections have indices of tokens, in any order, instead of logical blocks.
 *            Only kvl_hot_drop still takes blocks. No int8 */
typedef struct kvl_hot {
  const kvl_tensor *memory, *slot_of, *block_of, *order, *priority, *counters, *ahead;
  const kvl_tensor *uses, *age;
  const kvl_format *format; /* of memory and the host tier */
  int32_t by_token, reserved;
} kvl_hot;

/* Gives every selected block a slot and evicts others for it. A call never evicts a block
 * that it selects, and a block that several sequences share counts once. seqs * n <= slots.
 *  selection     i32  [seqs, 1 or kv_heads, n]   logical blocks, ascending, padded with -1
 *  tables        i32  [seqs, max_blocks]
 *  slots         i32  [seqs, kv_heads, n]        the slot of each, padded with -1
 *  miss_from     i32  [1, kv_heads, seqs * n]    blocks to fetch: kvl_move_blocks takes them
 *  miss_to       i32  [1, kv_heads, seqs * n]    from the host tier to memory; padded with -1
 *  hit_logical, hit_slots, miss_logical, miss_slots   i32 [seqs, kv_heads, n]: the selection
 *                divided into the blocks that were present and those to fetch, ascending,
 *                padded with -1; give all four or none
 *  is_ahead      1: nothing reads these blocks yet, but a later step may. The slots that are
 *                filled are marked in hot->ahead, and marks of other slots stay */
typedef struct kvl_resolve {
  const kvl_tensor *selection, *tables, *slots, *miss_from, *miss_to;
  const kvl_tensor *hit_logical, *hit_slots, *miss_logical, *miss_slots;
  int32_t is_ahead, reserved;
} kvl_resolve;
int kvl_hot_resolve(const kvl_hot *hot, const kvl_resolve *call);
/* Does kvl_append_kv to three memories: to the host tier `cache`; to the slots that hold the
 * tokens' blocks; and to `buffer`, which is memory of other blocks, at the places
 * buffer_places, i64 [tokens]. buffer may be NULL. */
int kvl_hot_append(const kvl_hot *hot, const kvl_tensor *k, const kvl_tensor *v,
                   const kvl_tensor *places, const kvl_tensor *cache,
                   const kvl_tensor *buffer_places, const kvl_tensor *buffer);
/* Removes blocks, i32 [n], from the hot cache; -1 is skipped. Their slots become free. */
int kvl_hot_drop(const kvl_hot *hot, const kvl_tensor *blocks);
/* Writes the scores of a step's logical blocks to the rows of the blocks themselves:
 * out[head][tables[s][b]] = scores[s][head][b]. An entry of tables that is out of range is
 * skipped, and the other numbers of out stay. Where several sequences have a block at the same
 * b, the last one wins; a block must not be at two different b.
 *  scores  f32  [seqs, 1 or kv_heads, max_blocks]
 *  tables  i32  [seqs, max_blocks]
 *  out     f32  [kv_heads, blocks] */
int kvl_scatter_scores(const kvl_tensor *scores, const kvl_tensor *tables,
                       const kvl_tensor *out);

/* ---- block store ----------------------------------------------------------------------- */
/* A block store keeps blocks longer than a request, a process or a machine lives, and finds
 * them by their tokens. A record holds the bytes of one block in one layer. Its name is the
 * block's key and a part, which is the layer.
 *
 * A store is a cache, so a record may vanish at any time. A record that is read is exactly
 * what was put: each carries its length and a checksum of its name and bytes, and a record
 * that does not match them is a miss. Failures outside the program (a full disk, a server
 * that went away) also cause misses, and are counted. Status codes are only for mistakes of
 * the caller, for memory, and for open and sync. */

/* A key names a block by all tokens up to its end. It is the XXH3-128 of the key of its
 * parent, the block before it (lo, then hi, both little-endian), and of its own tokens (i32,
 * little-endian). */
typedef struct kvl_key {
  uint64_t lo, hi;
} kvl_key;

/* Computes the keys of the full blocks of `count` tokens. Tokens past the last full block
 * have none. The first block's parent is *parent. Where parent is NULL, it is the XXH3-128
 * of `model`: a text with everything that makes KV incompatible, such as the model's name,
 * dtype, block_size and layout.
 *  keys  [count / block_size]
 * Returns the number of keys. Errors: INVALID. */
int kvl_block_keys(const char *model, const kvl_key *parent, const int32_t *tokens, int count,
                   int block_size, kvl_key *keys);

typedef struct kvl_store kvl_store;

/* The counters count since open, for this handle. bytes_held and records cover the whole
 * store, including records of other handles. Bytes are those of the blocks, without what a
 * store adds to them. */
typedef struct kvl_store_stats {
  int64_t hits, misses, puts, evictions;
  int64_t damaged; /* records that differ from what was put; also misses */
  int64_t errors;  /* failures outside the program; an outage is one */
  int64_t bytes_read, bytes_written;
  int64_t bytes_held, records; /* -1: not known */
} kvl_store_stats;

/* Opens a store by its URL:
 *  memory:     a store in this process
 *  lmdb:PATH   a file, with PATH-lock beside it, created where there is none. Several
 *              processes may have it open, each of them once. A process that is killed loses
 *              at most the record that it was writing; docs/store.md says what a power
 *              failure loses
 *  redis://[user:password@]host[:port][/db]   a server that machines share; %XX in user and
 *              password stands for a byte
 *  rediss://   the same through TLS, where hiredis has it
 * capacity is the number of bytes of blocks that the store holds before it evicts the least
 * recently used; 0: no limit. For Redis it must be 0, because a Redis server has its own
 * limit (maxmemory). timeout_ms is the longest time that connecting and each command of
 * Redis may take, in milliseconds; 0: 1000. Errors: INVALID, NO_MEMORY, IO, FORMAT. */
int kvl_store_open(const char *url, int64_t capacity, int timeout_ms, kvl_store **out);
/* Syncs and closes the store. NULL is allowed. Many threads may call the other functions at
 * once, but close must be the last call. */
void kvl_store_close(kvl_store *store);
/* Stores n bytes in the record and replaces what it held. Returns 1, or 0 if they could not
 * be stored. Errors: INVALID (also if n exceeds the capacity), NO_MEMORY. */
int kvl_store_put(kvl_store *store, const kvl_key *key, int part, const void *bytes,
                  int64_t n);
/* Copies a record of exactly n bytes. Returns 1, or 0 for a miss, which leaves `bytes`
 * alone. Errors: INVALID. */
int kvl_store_get(kvl_store *store, const kvl_key *key, int part, void *bytes, int64_t n);
/* found[i] = whether there is a record (keys[i], part). The bytes of the records are not
 * read. found may be NULL. Returns the number of records that exist from the first key on
 * without a gap. Errors: INVALID. */
int kvl_store_find(kvl_store *store, const kvl_key *keys, int n, int part, uint8_t *found);
/* Removes a record. Returns 1, or 0 if there was none. Errors: INVALID. */
int kvl_store_remove(kvl_store *store, const kvl_key *key, int part);
/* Syncs an lmdb store, so that earlier records survive a power failure. It does
 * nothing for other stores. Errors: INVALID, IO. */
int kvl_store_sync(kvl_store *store);
int kvl_store_stats_get(kvl_store *store, kvl_store_stats *out);
/* Copies the message of the last problem, on any thread, that was counted as damaged or as
 * an error. It is cut to `size` bytes with the final 0. Returns its length, or 0 if there
 * was no problem. */
int kvl_store_problem(kvl_store *store, char *text, int size);
/* ---- prefetch -------------------------------------------------------------------------- */
/* A prefetcher brings blocks from a store into KV memory while other threads compute. A task
 * names keys, and the blocks of the memory that they go to. Tasks wait in a queue: the
 * lowest priority is first, and of equal priorities the task that was submitted first. Each
 * worker thread takes the first task and reads its records layer by layer, so that layer 0
 * of all its blocks comes first. It copies them to the device on a queue of its own while it
 * reads on. If the host can write to the memory (pinned memory and the CPU's), it reads
 * directly into it. A task writes only after all work that was given, before its
 * submission, to streams that use the memory. Code that reads the blocks must wait for the
 * task's ticket.
 *
 * It is no error if a key lacks the record of a layer: its block is then missing, and the
 * contents of its memory mean nothing. If the store or the device fails, the task fails, and
 * the ticket says why.
 *
 * Several threads may call a prefetcher and its tickets at once. submit, wait, wait_layer
 * and close use the device, so nobody else may use it meanwhile. cancel, reprioritise and
 * stats do not use it.
 *
 * While kvl_cpu_link emulates a link, a prefetcher of the CPU device has no threads. Its
 * tasks run in the order of the queue, inside the calls that wait for a task or find the
 * queue full, so that modelled times are the same in every run. A transfer begins as soon as
 * the work that was submitted to the memory's streams before the task is over, however late
 * the host waits for it. */

typedef struct kvl_prefetch kvl_prefetch;
typedef struct kvl_ticket kvl_ticket;

/* Priorities with a name. Any other number is a priority, too. */
enum {
  KVL_PREFETCH_URGENT = 0,
  KVL_PREFETCH_HIGH = 1,
  KVL_PREFETCH_NORMAL = 2,
  KVL_PREFETCH_LOW = 3
};

typedef struct kvl_prefetch_options {
  int64_t bytes_staging; /* pinned memory for records in flight, of all workers */
  int32_t workers;       /* 1 ... 64 */
  int32_t max_pending;   /* tasks that may wait, 1 ... 2^20 */
} kvl_prefetch_options;

/* Opens a prefetcher, which keeps the store alive. Errors: INVALID, NO_MEMORY, DEVICE. */
int kvl_prefetch_open(kvl_device *dev, kvl_store *store, const kvl_prefetch_options *options,
                      kvl_prefetch **out);
/* Closes the prefetcher: cancels the tasks that wait, stops the running tasks at their next
 * record, and returns when nothing runs. Tickets stay valid. NULL is allowed. */
void kvl_prefetch_close(kvl_prefetch *prefetch);

/* A task of a prefetcher.
 *  memory   any  [layers, blocks, ...] of any format; retained until the task is over. Its
 *                layer l gets the records of part first_layer + l
 *  keys     [n]
 *  blocks   [n]  the block that each key goes to; all different */
typedef struct kvl_prefetch_task {
  const kvl_tensor *memory;
  const kvl_key *keys;
  const int32_t *blocks;
  int64_t request; /* the request it belongs to, for cancel, reprioritise */
  int32_t n, first_layer, priority, reserved;
} kvl_prefetch_task;

/* Copies a task into the queue. While max_pending tasks wait, the caller waits too, for at
 * most timeout_us microseconds (< 0: as long as it takes). Returns 1, or 0 if there was no
 * room in that time. out receives the task's ticket, which the caller owns; it may be NULL.
 * Errors: INVALID, NO_MEMORY, DEVICE, INTERRUPTED. */
int kvl_prefetch_submit(kvl_prefetch *prefetch, const kvl_prefetch_task *task,
                        int64_t timeout_us, kvl_ticket **out);
/* Cancels every task of a request. A waiting task is over at once. A running task stops at
 * its next record, unless that record was its last. A task owns its blocks until its ticket
 * says that it is over. Returns the number of tasks that were not over. */
int kvl_prefetch_cancel(kvl_prefetch *prefetch, int64_t request);
/* Gives the waiting tasks of a request another priority. Among equal priorities they keep
 * the order in which they were submitted. Returns the number of these tasks. */
int kvl_prefetch_reprioritise(kvl_prefetch *prefetch, int64_t request, int priority);

typedef struct kvl_prefetch_stats {
  int64_t submitted, completed, cancelled, failed; /* tasks */
  int64_t hits, misses;          /* records found; keys that lacked a record */
  int64_t bytes;                 /* read */
  int64_t waits;                 /* calls that waited for a ticket or a layer */
  double us_stalled;             /* the time that the host spent in these waits */
  int64_t pending, pending_peak; /* tasks waiting in the queue */
} kvl_prefetch_stats;
int kvl_prefetch_stats_get(kvl_prefetch *prefetch, kvl_prefetch_stats *out);

/* ORDER kvl_prefetch_state */
typedef enum kvl_prefetch_state {
  KVL_PREFETCH_WAITING,
  KVL_PREFETCH_RUNNING,
  KVL_PREFETCH_COMPLETED,
  KVL_PREFETCH_CANCELLED,
  KVL_PREFETCH_FAILED,
} kvl_prefetch_state;

/* The outcome of a task. A block has arrived when all of its layers have. */
typedef struct kvl_prefetch_result {
  const uint8_t *arrived;       /* [n] 1 or 0: borrow, until the ticket is closed */
  int64_t bytes;                /* read */
  double us_queued, us_reading; /* in the queue; reading the store */
  double us_copying;            /* copying, on the queue of the device */
  int32_t state, n;             /* COMPLETED or CANCELLED */
  int32_t blocks, leading;      /* that arrived; that arrived before the first gap */
  int32_t missing;              /* keys that lacked a record */
  int32_t reserved;
} kvl_prefetch_result;

/* Waits until the task and its copies are over, for at most timeout_us microseconds (0: only
 * ask; < 0: as long as it takes). Returns 1, or 0 if the task is not over in that time.
 * Errors: the failure of the store or the device, with its message; INTERRUPTED. */
int kvl_ticket_wait(kvl_ticket *ticket, int64_t timeout_us, kvl_prefetch_result *out);
/* Waits until the layer (counted as parts are) has been read, and makes `stream` (NULL: the
 * current stream) wait for its copies; the host does not wait for those. Returns 1, or 0 if
 * some block of the layer will not come, because a key lacked a record or the task was
 * cancelled. Errors: as for kvl_ticket_wait. */
int kvl_ticket_wait_layer(kvl_ticket *ticket, int layer, kvl_stream *stream);
/* As kvl_prefetch_cancel, for this task alone. Returns 1, or 0 if it was over. */
int kvl_ticket_cancel(kvl_ticket *ticket);
/* Frees the ticket; its task goes on. NULL is allowed. */
void kvl_ticket_close(kvl_ticket *ticket);

/* ---- files ------------------------------------------------------------------------------ */

/* Computes the XXH3-128 of the contents of n files, each followed by its length (u64,
 * little-endian). Errors: INVALID, IO, NO_MEMORY. */
int kvl_files_hash(const char *const *paths, int n, kvl_key *hash);
/* The same of `size` bytes of memory. */
int kvl_bytes_hash(const void *bytes, size_t size, kvl_key *hash);
/* 1 if path is a folder or a file that belongs to this user and that no other user may write
 * to, else 0. */
int kvl_path_is_private(const char *path);

/* ---- safetensors ----------------------------------------------------------------------- */

typedef struct kvl_safetensors kvl_safetensors;
typedef struct kvl_safetensors_entry {
  const char *name; /* borrow, until close */
  int64_t shape[6];
  int64_t offset, bytes; /* in the file's data section */
  int32_t ndim, dtype;
} kvl_safetensors_entry;

/* Opens a file and checks its whole header: length, overflow, overlaps, holes, duplicate
 * keys, and dtype and shape against the byte range. Errors: IO; FORMAT, with a message that
 * names the file, the tensor and the fault; NO_MEMORY. */
int kvl_safetensors_open(const char *path, kvl_safetensors **out);
void kvl_safetensors_close(kvl_safetensors *file);
int kvl_safetensors_count(const kvl_safetensors *file);
int kvl_safetensors_entry_get(const kvl_safetensors *file, int index,
                              kvl_safetensors_entry *out);
/* Reads entry `index` into t, which has the same dtype and shape. Errors: IO, also when the
 * file has changed since it was opened. */
int kvl_safetensors_read(const kvl_safetensors *file, int index, const kvl_tensor *t);

/* ---- GGUF ------------------------------------------------------------------------------ */

typedef struct kvl_gguf kvl_gguf;
typedef struct kvl_gguf_entry {
  const char *name;      /* borrow, until close */
  const char *type_name; /* such as "Q4_1", valid for ever */
  int64_t shape[6]; /* row-major: the last dim is the one whose elements are neighbours */
  int64_t offset, bytes; /* in the file's data section */
  int32_t ndim, type;    /* type: ggml's number of it */
} kvl_gguf_entry;

/* The numbers are those of the format. */
typedef enum kvl_gguf_kind {
  KVL_GGUF_U8 = 0,
  KVL_GGUF_I8 = 1,
  KVL_GGUF_U16 = 2,
  KVL_GGUF_I16 = 3,
  KVL_GGUF_U32 = 4,
  KVL_GGUF_I32 = 5,
  KVL_GGUF_F32 = 6,
  KVL_GGUF_BOOL = 7,
  KVL_GGUF_STRING = 8,
  KVL_GGUF_ARRAY = 9,
  KVL_GGUF_U64 = 10,
  KVL_GGUF_I64 = 11,
  KVL_GGUF_F64 = 12,
} kvl_gguf_kind;

/* One key of the metadata, and its value or values. At `values` are `count` numbers side by
 * side, little-endian and not aligned, or as many strings: a u64 length and that many bytes. */
typedef struct kvl_gguf_metadata {
  const char *key; /* borrow, until close, as values; not ended by a zero byte */
  const void *values;
  int64_t bytes_key, count;
  int32_t kind;     /* kvl_gguf_kind of each value, never ARRAY */
  int32_t is_array; /* 0: it is a single value, and count is 1 */
} kvl_gguf_metadata;

/* Opens a file of version 2 or 3, little-endian, and checks everything before its data: counts,
 * lengths of strings, types, overflow, alignment, duplicate keys and names, and that tensors
 * lie inside the file and do not overlap. Errors: IO; FORMAT, with a message that names the
 * file, the key or tensor, and the fault; NO_MEMORY. */
int kvl_gguf_open(const char *path, kvl_gguf **out);
void kvl_gguf_close(kvl_gguf *file);
int kvl_gguf_count(const kvl_gguf *file); /* of tensors, in the file's order */
int kvl_gguf_entry_get(const kvl_gguf *file, int index, kvl_gguf_entry *out);
int kvl_gguf_metadata_count(const kvl_gguf *file);
int kvl_gguf_metadata_get(const kvl_gguf *file, int index, kvl_gguf_metadata *out);
/* Reads entry `index` into t, f32, f16 or bf16 of the same shape. Quantised numbers are
 * computed in f32 on the host and rounded to nearest even. Types that can be read: F32 F16 BF16
 * Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q6_K. Errors: UNSUPPORTED for any other type; IO, also when the
 * file has changed since it was opened. */
int kvl_gguf_read(const kvl_gguf *file, int index, const kvl_tensor *t);

/* ---- HTTP ------------------------------------------------------------------------------ */
/* A server of HTTP 1.1. libmicrohttpd does it, on a thread of its own: it accepts, parses,
 * reads requests and writes answers while the caller computes. It is opened at run time, with
 * the first server. Whole requests wait in a queue until the caller takes them; each is an
 * exchange, which the caller answers and closes. Nothing here waits for a client, so a slow
 * one holds up no other.
 *
 * A server is for one thread. Exchanges may outlive it; they are then over. */

typedef struct kvl_http kvl_http;
typedef struct kvl_http_exchange kvl_http_exchange;

/* Why a request is refused before the caller sees it. Its connection then ends.
 * ORDER kvl_http_early */
enum {
  KVL_HTTP_TOO_MANY,          /* 503: a connection beyond the limit */
  KVL_HTTP_TOO_LARGE,         /* 413: the body is longer than bytes_body */
  KVL_HTTP_TOO_SLOW,          /* 408: it did not arrive within us_arrival */
  KVL_HTTP_MALFORMED,         /* 400: characters that no method or header may have */
  KVL_HTTP_HEADER_TWICE,      /* 400: a header that may be there once */
  KVL_HTTP_LENGTH_UNCLEAR,    /* 400: two ways to tell where the body ends, or none */
  KVL_HTTP_NO_HOST,           /* 400: HTTP 1.1 without Host */
  KVL_HTTP_WRONG_EXPECTATION, /* 417: Expect is not 100-continue */
  KVL_HTTP_EARLY              /* how many there are */
};

typedef struct kvl_http_options {
  const char *address; /* to listen on, a number such as 127.0.0.1 or ::1 */
  int32_t port;        /* 0: any that is free */
  int32_t connections; /* at once. A request of the next few is turned away, and what is
                        * beyond these is closed at once */
  int64_t bytes_body;  /* of a request; a request that announces more is refused before its
                        * body is read, and one that turns out to be longer while it is read */
  int64_t us_arrival;  /* a request must be there so long after its connection, or after
                        * the answer before it */
  int64_t us_taking;   /* how long a client may read nothing of an answer */
  const char *early[KVL_HTTP_EARLY]; /* the bodies of the answers to refused requests, JSON */
} kvl_http_options;

/* Texts are "" where the request has no such header. All are valid until the exchange is
 * closed. */
typedef struct kvl_http_request {
  const char *method;
  const char *path; /* as it was sent, without what follows a '?' */
  const char *authorization;
  const char *host;
  const char *origin;
  const char *body;
  int64_t bytes_body;
} kvl_http_request;

typedef struct kvl_http_stats {
  int64_t connections; /* now */
  int64_t accepted;    /* connections so far */
  int64_t requests;    /* that arrived so far */
  int64_t refused;     /* connections and requests that were too many */
  int64_t too_large;   /* requests with 413 */
  int64_t too_slow;    /* connections whose request did not arrive in time */
  int64_t malformed;   /* requests whose headers are not HTTP, or not clear */
} kvl_http_stats;

/* Errors: INVALID for options; UNSUPPORTED where there is no libmicrohttpd, with the name of
 * its package; IO if the address and port cannot be listened on; NO_MEMORY. */
int kvl_http_open(const kvl_http_options *options, kvl_http **out);
/* Sends finished answers, for a second at most, and ends all connections. */
void kvl_http_close(kvl_http *http);
int kvl_http_port(const kvl_http *http);
int kvl_http_stats_get(kvl_http *http, kvl_http_stats *out);
/* Takes the request that arrived first. Returns 1, or 0 if none arrives within timeout_us.
 * Call it often, also with timeout 0, because it also ends connections that are too slow.
 * Errors: INTERRUPTED. */
int kvl_http_next(kvl_http *http, int64_t timeout_us, kvl_http_exchange **out);

int kvl_http_exchange_request(const kvl_http_exchange *exchange, kvl_http_request *out);
/* Answers with a body, which is copied. `header` is one more header, "Name: value", or NULL.
 * Errors: INVALID if there was an answer before, or the status is not 200 ... 599. */
int kvl_http_exchange_answer(kvl_http_exchange *exchange, int status, const char *type,
                             const char *header, const char *body, int64_t bytes);
/* Begins an answer whose body comes in parts, with status 200. Errors: as above. */
int kvl_http_exchange_begin(kvl_http_exchange *exchange, const char *type);
/* Adds to the body. Returns how many bytes wait for the client, at most INT32_MAX; 0 when the
 * client is gone. Errors: INVALID before kvl_http_exchange_begin; NO_MEMORY. */
int kvl_http_exchange_send(kvl_http_exchange *exchange, const char *bytes, int64_t count);
/* 1 when the client has closed its connection, or its sending half of it; else 0. */
int kvl_http_exchange_is_gone(kvl_http_exchange *exchange);
/* Declares the body complete; the caller must not use the exchange any more. Without an
 * answer, the connection is closed. */
void kvl_http_exchange_close(kvl_http_exchange *exchange);

/* ffi:end */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
