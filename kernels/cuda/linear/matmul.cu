/* out = a @ b, or a @ b^T: cuBLAS, fp32 accumulation, no tf32 for f32.
 *   a    f32 f16 bf16   [batch, m, k]
 *   b    like a         [batch, k, n], or [batch, n, k] transposed
 *   out  like a or f32  [batch, m, n]; a stride of 0: one a, or one b, for all
 * and f8e4m3 with b transposed, k a multiple of 16, n of 8 and everything 16-byte aligned:
 *   out  f32 f16 bf16
 * The few rows of a decode step go to linear_wgmma.cuh, or to matvec.cuh where that cannot
 * take them.
 * cuBLAS is column-major: its C = out^T [n, m] = op(b^T) a^T, so b comes first.
 * Limit: tensor cores (f8e4m3, f16, bf16) or fp32 units, memory bandwidth when m is small.
 * Measured: bf16 8192^3 685 to 792 TFLOP/s as power allows, f8e4m3 into bf16 1382, into f32
 * 1268, f32 52. H100 80GB HBM3, 2026-11-21. With f8e4m3, sums move to fp32 registers as they
 * grow; cuBLAS's fast accumulation leaves that out and is no faster here (1311, 1208). */
#include <cublasLt.h>
#include <cublas_v2.h>

#include "args/elementwise.h"
#include "args/linear.h"
#include "cuda/linear/linear_wgmma.cuh"
#include "cuda/linear/matvec.cuh"

KVL_CUDA_KERNEL(fill);

namespace {

enum {
  WORKSPACE = 32 << 20,    /* what NVIDIA recommends on Hopper */
  SHARED_LEAST = 99 << 10, /* every device from sm_80 on grants a block this much */
};

cudaDataType_t type_of(int dtype) {
  if (dtype == KVL_DTYPE_F32) return CUDA_R_32F;
  return dtype == KVL_DTYPE_F16 ? CUDA_R_16F : CUDA_R_16BF;
}
size_t bytes_of(int dtype) { return dtype == KVL_DTYPE_F32 ? 4 : 2; }

/* Multiplies matrices [first, first + count) of the batch. */
int multiply(const kvl_matmul_args *g, const kvl_cuda_queue *q, int64_t first,
             int64_t count) {
  const float one = 1, old = g->adds ? 1 : 0;
  size_t in = bytes_of(g->dtype), to = bytes_of(g->out_dtype);
  const char *a = (const char *)g->a + (size_t)(first * g->a_stride) * in;
  const char *b = (const char *)g->b + (size_t)(first * g->b_stride) * in;
  char *out = (char *)g->out + (size_t)(first * g->out_stride) * to;
  cudaDataType_t type = type_of(g->dtype);
  return kvl__cuda_blas_check(
      cublasGemmStridedBatchedEx_64(
          q->blas, g->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, g->n, g->m, g->k,
          &one, b, type, g->transpose_b ? g->k : g->n, g->b_stride, a, type, g->a_row,
          g->a_stride, &old, out, type_of(g->out_dtype), g->out_row, g->out_stride, count,
          CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
      "cublasGemmStridedBatchedEx");
}

/* ---- f8e4m3: cublasLt ---------------------------------------------------------------- */

/* Describes a matrix of `rows` rows in memory; they are columns to the column-major
 * library. */
void layout(cublasLtMatrixLayoutOpaque_t *l, cudaDataType_t type, int64_t rows,
            int64_t columns, int64_t row) {
  cublasLtMatrixLayoutInit(l, type, (uint64_t)columns, (uint64_t)rows, row);
}

int multiply_f8(const kvl_matmul_args *g, const kvl_cuda_queue *q, int64_t i) {
  const float one = 1, zero = 0;
  const cublasOperation_t transpose = CUBLAS_OP_T;
  const uint64_t bytes = WORKSPACE;
  const char *a = (const char *)g->a + i * g->a_stride;
  const char *b = (const char *)g->b + i * g->b_stride;
  char *out = (char *)g->out + (size_t)(i * g->out_stride) * bytes_of(g->out_dtype);
  cublasLtMatmulDescOpaque_t call;
  cublasLtMatrixLayoutOpaque_t a_is, b_is, out_is;
  cublasLtMatmulPreferenceOpaque_t wish;
  cublasLtMatmulHeuristicResult_t best;
  int found = 0;
  cublasLtMatmulDescInit(&call, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  cublasLtMatmulDescSetAttribute(&call, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                 sizeof transpose);
  layout(&a_is, CUDA_R_8F_E4M3, g->m, g->k, g->a_row);
  layout(&b_is, CUDA_R_8F_E4M3, g->n, g->k, g->k);
  layout(&out_is, type_of(g->out_dtype), g->m, g->n, g->out_row);
  cublasLtMatmulPreferenceInit(&wish);
  cublasLtMatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                       &bytes, sizeof bytes);
  /* A cuBLAS handle also serves as a cublasLt handle. */
  cublasLtHandle_t lt = (cublasLtHandle_t)q->blas;
  int status = cublasLtMatmulAlgoGetHeuristic(lt, &call, &b_is, &a_is, &out_is, &out_is,
                                              &wish, 1, &best, &found);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatmul(lt, &call, &one, b, &b_is, a, &a_is, &zero, out, &out_is, out,
                            &out_is, &best.algo, g->workspace, bytes, q->stream);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return KVL_ERR_UNSUPPORTED; /* before sm_89 */
  return kvl__cuda_blas_check(status, "cublasLtMatmul");
}

}  // namespace

KVL_CUDA_WORKSPACE(matmul) {
  (void)sm_count;
  const kvl_matmul_args *g = (const kvl_matmul_args *)args;
  if (g->batch == 0 || g->m == 0 || g->n == 0 || g->k == 0) return 0;
  return kvl::takes_matvec(*g, SHARED_LEAST) ? 0 : WORKSPACE;
}

KVL_CUDA_KERNEL(matmul) {
  const kvl_matmul_args *g = (const kvl_matmul_args *)args;
  kvl_cuda_queue *q = (kvl_cuda_queue *)queue;
  if (g->batch == 0 || g->m == 0 || g->n == 0) return KVL_OK;
  if (g->k == 0 && g->adds) return KVL_OK;
  if (g->k == 0) { /* an empty sum; cuBLAS wants leading dimensions above 0 */
    kvl_fill_args zero = {g->out, g->batch * g->m * g->n, 0, g->out_dtype};
    return kvl_cuda_fill(&zero, queue);
  }
  if (g->transpose_b && g->batch == 1 && !g->adds && g->a_row == g->k && g->out_row == g->n) {
    kvl_linear_args linear = {};
    linear.x = g->a, linear.weight = g->b, linear.out = g->out, linear.parts = 1;
    linear.rows = g->m, linear.n = g->n, linear.k = g->k, linear.form = KVL_LINEAR_PLAIN;
    linear.dtype = linear.norm_dtype = g->dtype, linear.out_dtype = g->out_dtype;
    if (kvl::takes_linear_wgmma(linear, q)) return kvl::launch_linear_wgmma(linear, q);
  }
  if (!g->adds && kvl::takes_matvec(*g, q->shared_optin)) return kvl::launch_matvec(*g, q);
  int status = kvl__cuda_blas(q);
  if (g->dtype == KVL_DTYPE_F8E4M3) {
    for (int64_t i = 0; i < g->batch && status == KVL_OK; i++) status = multiply_f8(g, q, i);
    return status == KVL_OK ? kvl__cuda_launched() : status;
  }
  if (status == KVL_OK)
    status = kvl__cuda_blas_check(cublasSetWorkspace(q->blas, g->workspace, WORKSPACE),
                                  "cublasSetWorkspace");
  enum { BATCH_MAX = 65535 }; /* some cuBLAS kernels put the batch in a grid dimension */
  for (int64_t i = 0; i < g->batch && status == KVL_OK; i += BATCH_MAX)
    status = multiply(g, q, i, g->batch - i < BATCH_MAX ? g->batch - i : BATCH_MAX);
  return status == KVL_OK ? kvl__cuda_launched() : status;
}
