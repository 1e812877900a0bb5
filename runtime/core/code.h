/* What ops know of code that was compiled at run time. */
#ifndef KVL_CODE_H
#define KVL_CODE_H

#include "core/device.h"

/* What a hook is to a backend's ops (kernels/hook.h). NULL: it is none, or for another kind
 * of device. */
void *kvl__code_hook(const kvl_code *code, const kvl_device *dev);
const char *kvl__code_name(const kvl_code *code);

#endif
