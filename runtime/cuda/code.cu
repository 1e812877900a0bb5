/* Kernels that were compiled at run time, as cubins. */
#include <stdio.h>
#include <string.h>

#include "cuda/architecture.cuh"
#include "cuda/backend.cuh"
#include "cuda/driver.cuh"

namespace kvl_cuda {

namespace {

struct code {
  CUlibrary library;
  CUkernel kernel;    /* kvl_code; NULL: the library is a hook of attention */
  int shared_allowed; /* bytes of dynamic shared memory that it has asked for */
};

int failed(CUresult error, const char *what) {
  return fail(error == CUDA_ERROR_OUT_OF_MEMORY ? KVL_ERR_NO_MEMORY : KVL_ERR_DEVICE,
              "%s: %s", what, kvl::driver_words(error));
}

}  // namespace

int code_open(void *ctx, const void *image, size_t bytes, void **out) {
  int status = enter(ctx);
  if (status < 0) return status;
  const kvl::library_functions &f = kvl::the_driver();
  if (!f.found())
    return fail(KVL_ERR_UNSUPPORTED, "kernels made at run time need a driver of CUDA 12.0");
  code *c = new (std::nothrow) code();
  if (!c) return fail(KVL_ERR_NO_MEMORY, "out of host memory");
  CUresult error = f.load(&c->library, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (error != CUDA_SUCCESS) {
    delete c;
    return failed(error, "loading a cubin");
  }
  /* A hook's kernel has the name of its shape, which the op asks for; there is no kvl_code. */
  static const char section[] = ".text.kvl_code", entry[] = ".entry kvl_code(";
  if (memmem(image, bytes, section, sizeof section) ||
      memmem(image, bytes, entry, sizeof entry - 1)) {
    error = f.get_kernel(&c->kernel, c->library, "kvl_code");
    if (error != CUDA_SUCCESS) {
      f.unload(c->library);
      delete c;
      return failed(error, "a cubin's kvl_code");
    }
  }
  *out = c;
  return KVL_OK;
}

void code_close(void *handle) {
  code *c = (code *)handle;
  kvl::the_driver().unload(c->library);
  delete c;
}

void *code_hook(void *handle) {
  const code *c = (const code *)handle;
  return c->kernel ? nullptr : (void *)c->library;
}

int code_launch(void *ctx, void *queue, void *handle, const void *args, size_t size,
                const kvl_grid *grid) {
  (void)size; /* args are copied before the call returns */
  if (grid->x <= 0 || grid->y <= 0 || grid->z <= 0) return KVL_OK;
  int status = enter(ctx);
  if (status < 0) return status;
  const device_ctx *d = (const device_ctx *)ctx;
  code *c = (code *)handle;
  const kvl::library_functions &f = kvl::the_driver();
  if (grid->bytes_shared > kvl::SHARED_UNASKED && grid->bytes_shared > c->shared_allowed) {
    CUresult error = f.set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                     grid->bytes_shared, c->kernel, d->index);
    if (error != CUDA_SUCCESS) return failed(error, "asking for shared memory");
    c->shared_allowed = grid->bytes_shared;
  }
  CUlaunchAttribute attribute = {};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config = {};
  config.gridDimX = (unsigned)grid->x;
  config.gridDimY = (unsigned)grid->y;
  config.gridDimZ = (unsigned)grid->z;
  config.blockDimX = (unsigned)grid->threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = (unsigned)grid->bytes_shared;
  config.hStream = ((const kvl_cuda_queue *)queue)->stream;
  config.attrs = &attribute;
  config.numAttrs = grid->programmatic && d->code >= 90 ? 1 : 0;
  void *params[] = {(void *)args};
  CUresult error = f.launch(&config, (CUfunction)c->kernel, params, nullptr);
  return error == CUDA_SUCCESS ? KVL_OK : failed(error, "launching");
}

/* A hook is compiled into kernels with the tile sizes of the plug-in. If the device would
 * have other tiles, the code is compiled for the plug-in's architecture. Code for sm_90
 * runs faster as sm_90a, which later devices do not run. */
int target(void *ctx, char *text, size_t size) {
  const device_ctx *d = (const device_ctx *)ctx;
  if (kvl::tiles_of(d->code) != kvl::tiles_of(d->capability))
    snprintf(text, size, "compute_%d", d->code);
  else snprintf(text, size, "sm_%d%s", d->capability, d->capability == 90 ? "a" : "");
  return KVL_OK;
}

}  // namespace kvl_cuda
