/* The inside of events, and a way to open a stream of a chosen kind. kvlab.h has the
 * functions for callers. */
#ifndef KVL_STREAM_H
#define KVL_STREAM_H

#include "core/device.h"

struct kvl_event {
  kvl_device *device;
  void *mark; /* of the backend */
  int recorded;
};

/* If work of two streams could run, that of an URGENT stream goes first. */
int kvl__stream_open(kvl_device *dev, enum kvl_queue_kind kind, kvl_stream **out);

#endif
