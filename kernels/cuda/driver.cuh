/* Functions of the CUDA driver, found at run time: kvlab does not link to it. */
#ifndef KVL_CUDA_DRIVER_CUH
#define KVL_CUDA_DRIVER_CUH

#include <cuda.h>
#include <cuda_runtime.h>

namespace kvl {

/* The driver's function of this name, as of a CUDA version; NULL if it has none. */
template <class F> F *driver_function(const char *name, unsigned version) {
  void *f = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaError_t e = cudaGetDriverEntryPointByVersion(name, &f, version, cudaEnableDefault,
                                                   &result);
  return e == cudaSuccess && result == cudaDriverEntryPointSuccess ? (F *)f : nullptr;
}

/* Those that load and launch kernels which were compiled while the program runs. */
struct library_functions {
  CUresult (*load)(CUlibrary *, const void *, CUjit_option *, void **, unsigned,
                   CUlibraryOption *, void **, unsigned);
  CUresult (*unload)(CUlibrary);
  CUresult (*get_kernel)(CUkernel *, CUlibrary, const char *);
  CUresult (*set_attribute)(CUfunction_attribute, int, CUkernel, CUdevice);
  CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
  CUresult (*error_name)(CUresult, const char **);
  bool found() const { return load && unload && get_kernel && set_attribute && launch; }
};

inline const library_functions &the_driver() {
  static const library_functions f = {
      driver_function<decltype(cuLibraryLoadData)>("cuLibraryLoadData", 12000),
      driver_function<decltype(cuLibraryUnload)>("cuLibraryUnload", 12000),
      driver_function<decltype(cuLibraryGetKernel)>("cuLibraryGetKernel", 12000),
      driver_function<decltype(cuKernelSetAttribute)>("cuKernelSetAttribute", 12000),
      driver_function<decltype(cuLaunchKernelEx)>("cuLaunchKernelEx", 12000),
      driver_function<decltype(cuGetErrorName)>("cuGetErrorName", 12000),
  };
  return f;
}

inline const char *driver_words(CUresult error) {
  const char *name = nullptr;
  if (the_driver().error_name) the_driver().error_name(error, &name);
  return name ? name : "unknown error";
}

}  // namespace kvl

#endif
