/* The functions of libmicrohttpd that are used here. The library is opened with the first
 * server, so that nobody else needs or loads it. */
#ifndef KVL_MICROHTTPD_H
#define KVL_MICROHTTPD_H

#include <microhttpd.h>

#define KVL__MHD_FUNCTIONS(X)          \
  X(MHD_start_daemon)                  \
  X(MHD_stop_daemon)                   \
  X(MHD_get_daemon_info)               \
  X(MHD_get_connection_info)           \
  X(MHD_lookup_connection_value)       \
  X(MHD_get_connection_values_n)       \
  X(MHD_create_response_from_buffer)   \
  X(MHD_create_response_from_callback) \
  X(MHD_add_response_header)           \
  X(MHD_queue_response)                \
  X(MHD_destroy_response)              \
  X(MHD_suspend_connection)            \
  X(MHD_resume_connection)

struct kvl__mhd {
#define FIELD(name) __typeof__(name) *name;
  KVL__MHD_FUNCTIONS(FIELD)
#undef FIELD
};

extern struct kvl__mhd kvl__mhd;

/* Opens the library, if nobody has. Its error, UNSUPPORTED, names the package. */
int kvl__mhd_load(void);

#endif
