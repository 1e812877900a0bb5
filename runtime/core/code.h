/* What ops need to know about code that was compiled at run time. */
#ifndef KVL_CODE_H
#define KVL_CODE_H

#include "core/device.h"

/* The hook in the form that a backend's ops take (kernels/hook.h). NULL: the code is no
 * hook, or is for another kind of device. */
void *kvl__code_hook(const kvl_code *code, const kvl_device *dev);
const char *kvl__code_name(const kvl_code *code);

#endif
