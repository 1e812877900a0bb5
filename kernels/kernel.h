/* How kernels are launched. Nothing here knows tensors, Lua or allocation.
 *
 * Every op has a struct of arguments in kernels/args/, one file for each family of ops: raw
 * pointers and sizes, which the runtime checks before it calls a launcher. Kernels of a family
 * lie in the folder of its name, so a change of its arguments recompiles that folder.
 *
 * A launcher is `int name(const void *args, void *queue)`. args points to the op's struct,
 * which is copied before an asynchronous start. queue belongs to the backend: CUDA passes a
 * struct kvl_cuda_queue *, the CPU a struct kvl_cpu_job *. A launcher returns 0 or a negative
 * kvl_status.
 *   CPU   kvl_cpu_<op>_<isa>   kernels/cpu/<family>/<op>.c, compiled once per instruction set
 *   CUDA  kvl_cuda_<op>        kernels/cuda/<family>/<op>.cu; attention/instances/ has those of
 *                              its templates that take minutes to compile
 * Any count may be 0; the op then launches nothing. */
#ifndef KVL_KERNEL_H
#define KVL_KERNEL_H

#include "base.h"

typedef int kvl_kernel(const void *args, void *queue);

/* What a CPU kernel reports about its run: the bytes that it moved over the link, per
 * direction, so that an emulated link can model their time. A kernel adds to the counts; most
 * kernels move nothing. */
enum { KVL_LINK_TO_DEVICE, KVL_LINK_TO_HOST };
struct kvl_cpu_job {
  int64_t bytes_link[2];
};

#endif
