/* out = a @ b, or a @ b^T: cuBLAS, fp32 accumulation, no tf32 for f32.
 *   a    f32 f16 bf16   [batch, m, k]
 *   b    like a         [batch, k, n], or [batch, n, k] transposed; one b for a stride of 0
 *   out  like a or f32  [batch, m, n]
 * cuBLAS is column-major: its C = out^T [n, m] = op(b^T) a^T, so b comes first.
 * Limit: tensor cores (f16, bf16) or fp32 units, memory bandwidth when m is small.
 * Measured: bf16 8192^3 814 TFLOP/s, f32 52. H100 80GB HBM3, 2026-11-20. */
#include <cublas_v2.h>

#include "common.cuh"

namespace {

cudaDataType_t type_of(int dtype) {
  if (dtype == KVL_DTYPE_F32) return CUDA_R_32F;
  return dtype == KVL_DTYPE_F16 ? CUDA_R_16F : CUDA_R_16BF;
}
size_t bytes_of(int dtype) { return dtype == KVL_DTYPE_F32 ? 4 : 2; }

/* Matrices [first, first + count) of the batch. */
int multiply(const kvl_matmul_args *g, const kvl_cuda_queue *q, int64_t first,
             int64_t count) {
  const float one = 1, zero = 0;
  size_t in = bytes_of(g->dtype), to = bytes_of(g->out_dtype);
  const char *a = (const char *)g->a + (size_t)(first * g->a_stride) * in;
  const char *b = (const char *)g->b + (size_t)(first * g->b_stride) * in;
  char *out = (char *)g->out + (size_t)(first * g->out_stride) * to;
  cudaDataType_t type = type_of(g->dtype);
  return kvl__cuda_blas_check(
      cublasGemmStridedBatchedEx_64(
          q->blas, g->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, g->n, g->m,
          g->k, &one, b, type, g->transpose_b ? g->k : g->n, g->b_stride, a, type, g->k,
          g->a_stride, &zero, out, type_of(g->out_dtype), g->n, g->out_stride, count,
          CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
      "cublasGemmStridedBatchedEx");
}

}  // namespace

KVL_CUDA_KERNEL(matmul) {
  const kvl_matmul_args *g = (const kvl_matmul_args *)args;
  kvl_cuda_queue *q = (kvl_cuda_queue *)queue;
  if (g->batch == 0 || g->m == 0 || g->n == 0) return KVL_OK;
  if (g->k == 0) { /* a sum of nothing; cuBLAS wants leading dimensions above 0 */
    kvl_fill_args zero = {g->out, g->batch * g->m * g->n, 0, g->out_dtype};
    return kvl_cuda_fill(&zero, queue);
  }
  int status = kvl__cuda_blas(q);
  enum { BATCH_MAX = 65535 };   /* some of its kernels put the batch in a grid dimension */
  for (int64_t i = 0; i < g->batch && status == KVL_OK; i += BATCH_MAX)
    status = multiply(g, q, i, g->batch - i < BATCH_MAX ? g->batch - i : BATCH_MAX);
  return status == KVL_OK ? kvl__cuda_launched() : status;
}
