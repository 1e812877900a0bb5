/* kvlab: what kernels and their callers share: statuses, dtypes, the operations of tensor
 * ops, and budgets. Kernels include this header and no other part of the API, so a change of
 * kvlab.h does not recompile them. */
#ifndef KVL_BASE_H
#define KVL_BASE_H

#ifndef KVL_HAS_INTS /* kernels from Lua bring their own */
#include <stddef.h>
#include <stdint.h>
#endif

/* ffi:begin -- also read by ffi.cdef: no '#', no macros, no 64-bit constants */

enum { KVL_DIMS_MAX = 6 };             /* dims of a tensor */
enum { KVL_CODE_ARGUMENTS_MAX = 512 }; /* bytes, see kvl_code_launch */

/* ORDER kvl_status */
typedef enum kvl_status {
  KVL_OK = 0,
  KVL_ERR_INVALID = -1,     /* an argument is wrong */
  KVL_ERR_NO_MEMORY = -2,   /* device or host memory is exhausted */
  KVL_ERR_NO_BLOCKS = -3,   /* the block pool is exhausted */
  KVL_ERR_IO = -4,          /* a file cannot be read */
  KVL_ERR_FORMAT = -5,      /* a file has a wrong format or wrong contents */
  KVL_ERR_DEVICE = -6,      /* the device or its driver failed, or is not there */
  KVL_ERR_UNSUPPORTED = -7, /* valid, but not in this build or on this device */
  KVL_ERR_INTERRUPTED = -8, /* kvl_interrupt(1) was called */
} kvl_status;

/* ORDER kvl_dtype */
typedef enum kvl_dtype {
  KVL_DTYPE_F32 = 0,
  KVL_DTYPE_F16 = 1,
  KVL_DTYPE_BF16 = 2,
  KVL_DTYPE_F8E4M3 = 3,
  KVL_DTYPE_I32 = 4,
  KVL_DTYPE_I64 = 5,
  KVL_DTYPE_U8 = 6,
  KVL_DTYPE_U64 = 7,
} kvl_dtype;

/* How the numbers of a page of KV memory are stored. A codec that stores them like a dtype
 * has the number of that dtype. KVL_CODEC_INT8 stores whole numbers of 8 bits, and beside
 * them a bf16 scale for each token and 64 of its numbers. KVL_CODEC_F8_LATENT is for shared
 * values: it stores the value of a token in f8e4m3 with an f32 scale for each 128 of its
 * numbers, and the key's other numbers in bf16. Pages of both are u8 [blocks, bytes]. */
typedef enum kvl_codec {
  KVL_CODEC_F32 = KVL_DTYPE_F32,
  KVL_CODEC_F16 = KVL_DTYPE_F16,
  KVL_CODEC_BF16 = KVL_DTYPE_BF16,
  KVL_CODEC_F8E4M3 = KVL_DTYPE_F8E4M3,
  KVL_CODEC_INT8 = 16,
  KVL_CODEC_F8_LATENT = 17,
} kvl_codec;

/* What a page of KV memory holds: the keys and values of block_size tokens in one layer. */
typedef struct kvl_format {
  int32_t codec; /* kvl_codec */
  int32_t kv_heads, block_size;
  int32_t key_dim, value_dim; /* numbers of a key, and of a value */
  int32_t is_shared;          /* a value is the first value_dim numbers of its key */
  const struct kvl_tensor *k_scale, *v_scale; /* f32 [kv_heads] of f8e4m3; NULL: 1 */
} kvl_format;

/* Where keys, or values, lie in a page: a strip of rows for each KV head, one row a token. */
typedef struct kvl_strips {
  int64_t begin, bytes; /* from the page's start to the first strip; of one strip */
  int32_t bytes_row, dim;
  int32_t scales, groups; /* from a strip's start to its scales; scales of a row, or 0 */
  int32_t packed;         /* of f8_latent: numbers of a row that are in 8 bits */
} kvl_strips;

/* Memory of pages of one layer, as kernels see it; kernels/page.h finds rows in it. */
typedef struct kvl_pages {
  void *memory;
  int64_t blocks, bytes_page;
  kvl_strips key, value;
  int32_t kv_heads, block_size;
  int32_t codec;                  /* kvl_codec */
  int32_t pinned;                 /* in host memory: all reads and writes cross the link */
  const float *k_scale, *v_scale; /* optional [kv_heads]: they multiply what is stored */
} kvl_pages;

/* ORDER kvl_unary_op */
typedef enum kvl_unary_op {
  KVL_UNARY_NEG,
  KVL_UNARY_ABS,
  KVL_UNARY_EXP,
  KVL_UNARY_LOG,
  KVL_UNARY_SQRT,
  KVL_UNARY_RSQRT,
  KVL_UNARY_SIGMOID,
  KVL_UNARY_SILU,
  KVL_UNARY_TANH,
  KVL_UNARY_RELU,
  KVL_UNARY_FLOOR,
} kvl_unary_op;

/* ORDER kvl_binary_op */
typedef enum kvl_binary_op {
  KVL_BINARY_ADD,
  KVL_BINARY_SUB,
  KVL_BINARY_MUL,
  KVL_BINARY_DIV,
  KVL_BINARY_MAX,
  KVL_BINARY_MIN,
  KVL_BINARY_POW,
  KVL_BINARY_EQ,
  KVL_BINARY_NE,
  KVL_BINARY_LT,
  KVL_BINARY_LE,
  KVL_BINARY_GT,
  KVL_BINARY_GE,
} kvl_binary_op;

/* ORDER kvl_reduce_op */
typedef enum kvl_reduce_op {
  KVL_REDUCE_SUM,
  KVL_REDUCE_MEAN,
  KVL_REDUCE_MAX,
  KVL_REDUCE_MIN,
} kvl_reduce_op;

/* ORDER kvl_random_kind */
typedef enum kvl_random_kind {
  KVL_RANDOM_UNIFORM,
  KVL_RANDOM_NORMAL,
  KVL_RANDOM_INTEGER,
} kvl_random_kind;

/* ORDER kvl_group: how query heads of a KV head combine */
typedef enum kvl_group {
  KVL_GROUP_MAX,
  KVL_GROUP_MEAN,
} kvl_group;

/* ORDER kvl_linear_form: what becomes of the products of kvl_linear */
typedef enum kvl_linear_form {
  KVL_LINEAR_PLAIN,  /* out = y */
  KVL_LINEAR_ADD,    /* out += y */
  KVL_LINEAR_SWIGLU, /* out = silu(first half of y) * second half */
} kvl_linear_form;

/* How a router chooses among experts. A score is the softmax over all logits, or the sigmoid of
 * one. If there are several groups of neighbouring experts, only those of the open_groups best
 * groups can be chosen; a group is as good as its best expert, or with a sigmoid as its two
 * best together. Weights are the scores of the chosen ones, divided by their sum if is_normed,
 * times `factor`. `shared` experts, which have no logits and whose numbers follow those of all
 * others, are then chosen by every row, with weight 1. */
typedef struct kvl_router {
  int32_t is_sigmoid, is_normed, groups, open_groups, shared;
  float factor;
} kvl_router;

/* A budget says how many of a sequence's n blocks may be selected: ceil(ratio * n), or
 * `blocks` if ratio < 0. The number is at least min_blocks, at least sink + recent, and at
 * most n. */
typedef struct kvl_budget {
  double ratio;
  int32_t blocks, min_blocks, sink, recent;
} kvl_budget;

/* How many thread blocks (at most 65535 along y and z), threads of each, and bytes of dynamic
 * shared memory. programmatic: the kernel may start before the one ahead of it in the stream
 * has ended, and waits for it itself. The CPU does not look at it. */
typedef struct {
  int64_t x, y, z;
  int32_t threads, bytes_shared, programmatic, reserved;
} kvl_grid;

/* ffi:end */

/* For functions that both devices use: nvcc compiles them for the GPU, too. */
#ifdef __CUDACC__
#define KVL_INLINE static __host__ __device__ inline
#else
#define KVL_INLINE static inline
#endif

#endif
