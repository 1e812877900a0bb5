/* Tells what the plug-in was built from. It is a file of its own because sources.h changes
 * with every change of a kernel. */
#include "backend.cuh"
#include "sources.h"

#define TEXT_(...) #__VA_ARGS__
#define TEXT(...) TEXT_(__VA_ARGS__)

const char *kvl_cuda::build() {
  return "CUDA " TEXT(__CUDACC_VER_MAJOR__) "." TEXT(__CUDACC_VER_MINOR__) "." TEXT(
      __CUDACC_VER_BUILD__) ", for " TEXT(__CUDA_ARCH_LIST__) ", sources " KVL_SOURCES_CUDA;
}
