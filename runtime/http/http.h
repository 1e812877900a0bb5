/* The parts of the server in http.c: the check of each request's headers (headers.c), and
 * exchanges (exchange.c), which a caller answers. Neither knows the server. */
#ifndef KVL_HTTP_H
#define KVL_HTTP_H

#include <pthread.h>

#include "core/status.h"
#include "http/microhttpd.h"

/* headers.c. Why a request is turned away, one of kvl_http_early; -1: it is not. A body has
 * `most` bytes at most. */
int kvl__headers_check(struct MHD_Connection *c, const char *method, const char *version,
                       int64_t most);

/* What a server and its exchanges share. The last of them frees it. */
struct kvl__shared {
  pthread_mutex_t lock; /* guards everything of the server and of its exchanges */
  int refs;             /* one of the server, and one of each exchange */
  int is_closing;       /* nothing new is taken; what was answered is still sent */
  int is_over;          /* nothing is sent either */
};

struct kvl_http_exchange {
  struct kvl__shared *shared;
  struct MHD_Connection *connection; /* NULL once it is over */
  int file;
  int refs;                  /* libmicrohttpd's and the caller's */
  int has_arrived;           /* the whole request; libmicrohttpd's thread alone uses this */
  int is_suspended;          /* libmicrohttpd waits for the caller */
  int has_answer, is_queued; /* the caller answered; libmicrohttpd was given the answer */
  int is_stream, is_ended;
  int status;
  struct MHD_Response *response;
  char *method, *path, *authorization, *host, *origin, *body;
  size_t bytes_body, room_body;
  char *out; /* of a stream: what libmicrohttpd has not taken yet */
  size_t first_out, bytes_out, room_out;
  kvl_http_exchange *next;
};

/* exchange.c. All are called with the lock held. The first unlocks, and frees what nobody
 * refers to. */
void kvl__shared_unlock(struct kvl__shared *s);
kvl_http_exchange *kvl__exchange_open(struct kvl__shared *s,
                                      struct MHD_Connection *connection, int file,
                                      const char *method, const char *path);
/* May free the exchange. */
void kvl__exchange_unref(kvl_http_exchange *e);
/* Lets libmicrohttpd go on with an exchange that it waits for. */
void kvl__exchange_resume(kvl_http_exchange *e);

#endif
