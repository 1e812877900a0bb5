/* The parts of a server of HTTP: connections (http.c), which libmicrohttpd's thread serves, a
 * look at the headers of each request (headers.c), and exchanges (exchange.c), which a caller
 * answers. */
#ifndef KVL_HTTP_H
#define KVL_HTTP_H

#include <pthread.h>

#include "core/status.h"
#include "http/microhttpd.h"

/* A connection, from accept to close. */
struct kvl__visit {
  int file;
  int is_extra;                /* beyond the limit: its request gets 503 */
  int had_request;             /* one was answered before */
  int is_told;                 /* it was turned away; what still comes is read and dropped */
  kvl_http_exchange *exchange; /* that is open */
  int64_t ns_since; /* since when a request is awaited; 0 while one is being answered */
  struct kvl__visit *before, *next;
};

struct kvl_http {
  const struct kvl__mhd *mhd;
  struct MHD_Daemon *daemon;
  pthread_mutex_t lock;   /* guards everything below, and all exchanges */
  pthread_cond_t changed; /* a request has arrived, or an exchange is over */
  int refs;               /* the caller's, and that of each exchange */
  int is_closing;         /* nothing new is taken; what was answered is still sent */
  int is_over;            /* nothing is sent either */
  int port, connections_max, extra_max;
  int64_t bytes_body, ns_arrival, ns_reaped;
  char *early[KVL_HTTP_EARLY];
  struct kvl__visit *visits;
  kvl_http_exchange *first, *last; /* requests that wait for the caller */
  kvl_http_stats stats;
};

struct kvl_http_exchange {
  kvl_http *http;
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

/* headers.c. Why a request is turned away, one of kvl_http_early; -1: it is not. */
int kvl__headers_check(kvl_http *http, struct MHD_Connection *c, const char *method,
                       const char *version);

/* exchange.c */
kvl_http_exchange *kvl__exchange_open(kvl_http *http, struct MHD_Connection *connection,
                                      int file, const char *method, const char *path);
/* With the lock held; may free the exchange. */
void kvl__exchange_unref(kvl_http_exchange *e);
/* Lets libmicrohttpd go on with an exchange that it waits for. The lock is held. */
void kvl__exchange_resume(kvl_http_exchange *e);
/* Drops a reference to the server; unlocks it. */
void kvl__http_leave(kvl_http *http);

#endif
