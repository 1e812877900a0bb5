/* The CPU as a device of the runtime; it is linked in. */
#ifndef KVL_CPU_BACKEND_H
#define KVL_CPU_BACKEND_H

#include "core/backend.h"

extern const kvl_backend kvl__backend_cpu;

#endif
