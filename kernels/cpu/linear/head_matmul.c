/* Rows of each head times a matrix of that head; see cuda/linear/head_matmul.cu for the shapes.
 * The kernel of matmul does the work, with rows that are apart. Limit: that of matmul. */
#include "args/linear.h"
#include "cpu/split.h"
#include "cpu/vec.h"

kvl_kernel KVL_CPU_NAME(matmul);
size_t KVL_CPU_WORKSPACE_NAME(matmul)(const void *args);

KVL_CPU_WORKSPACE(head_matmul) {
  const struct kvl_matmul_args product = kvl__head_products(args);
  return KVL_CPU_WORKSPACE_NAME(matmul)(&product);
}

/* Pieces are tokens. */
static int copy_rests(const void *args, int64_t begin, int64_t end) {
  const struct kvl_head_matmul_args *g = args;
  const size_t bytes = (size_t)g->rest * kvl__float_bytes(g->dtype);
  for (int64_t row = begin * g->heads; row < end * g->heads; row++)
    memcpy(at(g->out, row * (g->n + g->rest) + g->n, g->dtype),
           at_const(g->x, row * (g->k + g->rest) + g->k, g->dtype), bytes);
  return 0;
}

KVL_CPU_KERNEL(head_matmul) {
  const struct kvl_head_matmul_args *g = args;
  const struct kvl_matmul_args product = kvl__head_products(g);
  int status = KVL_CPU_NAME(matmul)(&product, queue);
  if (status < 0 || g->rest == 0) return status;
  return kvl__split(g->tokens, kvl__grain_rows(g->heads * g->rest), copy_rests, g);
}
