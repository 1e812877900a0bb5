/* Describes a tensor for messages: "bf16 [3, 4]". */
#ifndef KVL_TENSOR_H
#define KVL_TENSOR_H

#include <stddef.h>

#include "kvlab.h"

const char *kvl__tensor_words(const kvl_tensor *t, char *text, size_t size);

#endif
