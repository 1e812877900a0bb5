/* Events, and opening a stream of a chosen kind; what callers need of both is in kvlab.h. */
#ifndef KVL_STREAM_H
#define KVL_STREAM_H

#include "core/device.h"

struct kvl_event {
  kvl_device *device;
  void *mark;                    /* of the backend */
  int recorded;
};

/* An URGENT stream's work goes first where both could run. */
int kvl__stream_open(kvl_device *dev, enum kvl_queue_kind kind, kvl_stream **out);

#endif
