/* A server of HTTP over libmicrohttpd, with one thread that polls all connections.
 *
 * What reaches a caller is whole: libmicrohttpd parses, and collect() below puts the parts of
 * a body together. A connection is suspended while its request waits for an answer. The
 * library's own time-out counts bytes that come at all, so a client could send one a second
 * for ever; `visits` say since when each connection owes a request, and reap() ends those
 * that take too long.
 *
 * The lock is held for moments, never while a client is waited for. libmicrohttpd calls back
 * without locks of its own that suspending or resuming needs. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "http/http.h"

enum {
  NS_SLICE = 50 * 1000 * 1000,
  NS_REAP = 200 * 1000 * 1000,
  BYTES_CONNECTION = 24 * 1024
};

/* ---- connections ----------------------------------------------------------------------- */

static struct kvl__visit *visit_of(kvl_http *http, struct MHD_Connection *c) {
  return http->mhd->MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT)
      ->socket_context;
}

/* Whether one more connection is taken. */
static enum MHD_Result accept_one(void *context, const struct sockaddr *from,
                                  socklen_t length) {
  (void)from, (void)length;
  kvl_http *http = context;
  pthread_mutex_lock(&http->lock);
  int is_room = http->stats.connections < http->connections_max + http->extra_max;
  if (!is_room) http->stats.refused++;
  pthread_mutex_unlock(&http->lock);
  return is_room ? MHD_YES : MHD_NO;
}

static void visit_begins(kvl_http *http, struct MHD_Connection *c, void **own) {
  struct kvl__visit *v = kvl__malloc(sizeof *v, "a connection");
  *own = v;
  pthread_mutex_lock(&http->lock);
  http->stats.accepted++, http->stats.connections++;
  if (v) {
    *v = (struct kvl__visit){
        .file = http->mhd->MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)
                    ->connect_fd,
        .is_extra = http->stats.connections > http->connections_max,
        .ns_since = kvl_clock_ns(),
        .next = http->visits};
    if (v->next) v->next->before = v;
    http->visits = v;
  }
  pthread_mutex_unlock(&http->lock);
}

static void visit_ends(kvl_http *http, void **own) {
  struct kvl__visit *v = *own;
  pthread_mutex_lock(&http->lock);
  http->stats.connections--;
  if (v) {
    if (v->next) v->next->before = v->before;
    if (v->before) v->before->next = v->next;
    else http->visits = v->next;
  }
  pthread_mutex_unlock(&http->lock);
  free(v);
  *own = NULL;
}

static void note_connection(void *context, struct MHD_Connection *c, void **own,
                            enum MHD_ConnectionNotificationCode code) {
  if (code == MHD_CONNECTION_NOTIFY_STARTED) visit_begins(context, c, own);
  else visit_ends(context, own);
}

/* Tells a connection that its request takes too long, and ends it. libmicrohttpd, which
 * still reads from it, then finds its end. */
static void end_visit(kvl_http *http, struct kvl__visit *v) {
  char head[160];
  size_t bytes = strlen(http->too_slow);
  int n = snprintf(head, sizeof head,
                   "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
                   "Content-Length: %zu\r\nConnection: close\r\n\r\n",
                   bytes);
  if (!v->had_request && send(v->file, head, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL) == n)
    (void)!send(v->file, http->too_slow, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  shutdown(v->file, SHUT_RDWR);
  v->ns_since = 0;
  http->stats.too_slow++;
}

/* Ends connections that owe a request for too long. The lock is held. */
static void reap(kvl_http *http) {
  int64_t now = kvl_clock_ns();
  if (now - http->ns_reaped < NS_REAP) return;
  http->ns_reaped = now;
  for (struct kvl__visit *v = http->visits; v; v = v->next)
    if (v->ns_since && now - v->ns_since > http->ns_arrival) end_visit(http, v);
}

/* ---- requests -------------------------------------------------------------------------- */

/* Answers at once, before a body is read; the connection then ends. */
static enum MHD_Result turn_away(kvl_http *http, struct MHD_Connection *c, int status,
                                 const char *body) {
  struct MHD_Response *response = http->mhd->MHD_create_response_from_buffer(
      strlen(body), (void *)(uintptr_t)body, MHD_RESPMEM_PERSISTENT);
  if (!response) return MHD_NO;
  http->mhd->MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                                     "application/json");
  http->mhd->MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
  if (status == 503) http->mhd->MHD_add_response_header(response, "Retry-After", "1");
  enum MHD_Result result = http->mhd->MHD_queue_response(c, (unsigned)status, response);
  http->mhd->MHD_destroy_response(response);
  return result;
}

static void count(kvl_http *http, int64_t *counter) {
  pthread_mutex_lock(&http->lock);
  ++*counter;
  pthread_mutex_unlock(&http->lock);
}

/* The headers of a request are there. */
static enum MHD_Result begin(kvl_http *http, struct MHD_Connection *c, const char *path,
                             const char *method, void **own) {
  struct kvl__visit *v = visit_of(http, c);
  if (!v) return MHD_NO;
  if (v->is_extra) {
    count(http, &http->stats.refused);
    return turn_away(http, c, 503, http->too_many);
  }
  const char *announced = http->mhd->MHD_lookup_connection_value(
      c, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);
  if (announced && strtoull(announced, NULL, 10) > (uint64_t)http->bytes_body) {
    count(http, &http->stats.too_large);
    return turn_away(http, c, 413, http->too_large);
  }
  pthread_mutex_lock(&http->lock);
  *own = v->exchange = kvl__exchange_open(http, c, v->file, method, path);
  pthread_mutex_unlock(&http->lock);
  return *own ? MHD_YES : MHD_NO;
}

/* Keeps a part of a body. What is beyond the limit is read, but not kept. */
static enum MHD_Result collect(kvl_http *http, kvl_http_exchange *e, const char *part,
                               size_t *bytes) {
  size_t need = e->bytes_body + *bytes;
  if (need > (size_t)http->bytes_body) e->is_too_large = 1;
  if (e->is_too_large) {
    *bytes = 0;
    return MHD_YES;
  }
  if (need > e->room_body) {
    size_t room = need + need / 2 + 1024;
    char *grown = kvl__realloc(e->body, room, "the body of a request");
    if (!grown) return MHD_NO;
    e->body = grown, e->room_body = room;
  }
  memcpy(e->body + e->bytes_body, part, *bytes);
  e->bytes_body = need, *bytes = 0;
  return MHD_YES;
}

/* The request is there: it waits for the caller. */
static enum MHD_Result arrive(kvl_http *http, struct MHD_Connection *c,
                              kvl_http_exchange *e) {
  if (e->is_too_large) {
    count(http, &http->stats.too_large);
    return turn_away(http, c, 413, http->too_large);
  }
  pthread_mutex_lock(&http->lock);
  enum MHD_Result result = MHD_NO;
  if (!http->is_closing) {
    http->mhd->MHD_suspend_connection(c);
    visit_of(http, c)->ns_since = 0;
    e->is_suspended = e->has_arrived = 1, e->refs = 2;
    if (http->last) http->last->next = e;
    else http->first = e;
    http->last = e;
    http->stats.requests++;
    pthread_cond_signal(&http->arrived);
    result = MHD_YES;
  }
  pthread_mutex_unlock(&http->lock);
  return result;
}

/* The caller has answered, or will not. */
static enum MHD_Result give_answer(kvl_http *http, struct MHD_Connection *c,
                                   kvl_http_exchange *e) {
  pthread_mutex_lock(&http->lock);
  struct MHD_Response *response = http->is_closing || e->is_queued ? NULL : e->response;
  int status = e->status;
  e->is_queued = 1;
  pthread_mutex_unlock(&http->lock);
  if (!response) return MHD_NO;
  return http->mhd->MHD_queue_response(c, (unsigned)status, response);
}

/* Called by libmicrohttpd for the headers of a request, for each part of its body, at its
 * end, and once more after it was resumed. */
static enum MHD_Result serve(void *context, struct MHD_Connection *c, const char *path,
                             const char *method, const char *version, const char *part,
                             size_t *bytes, void **own) {
  (void)version;
  kvl_http *http = context;
  kvl_http_exchange *e = *own;
  if (!e) return begin(http, c, path, method, own);
  if (*bytes > 0) return collect(http, e, part, bytes);
  return e->has_arrived ? give_answer(http, c, e) : arrive(http, c, e);
}

/* A request is over, its answer sent or not. */
static void finish(void *context, struct MHD_Connection *c, void **own,
                   enum MHD_RequestTerminationCode code) {
  (void)code;
  kvl_http *http = context;
  kvl_http_exchange *e = *own;
  if (!e) return;
  pthread_mutex_lock(&http->lock);
  struct kvl__visit *v = visit_of(http, c);
  if (v) v->ns_since = kvl_clock_ns(), v->had_request = 1, v->exchange = NULL;
  e->connection = NULL;
  kvl__exchange_unref(e);
  *own = NULL;
  pthread_mutex_unlock(&http->lock);
}

/* ---- the server ------------------------------------------------------------------------ */

void kvl__http_leave(kvl_http *http) {
  int left = --http->refs;
  pthread_mutex_unlock(&http->lock);
  if (left > 0) return;
  pthread_cond_destroy(&http->arrived);
  pthread_mutex_destroy(&http->lock);
  free(http->too_many), free(http->too_large), free(http->too_slow);
  free(http);
}

/* A socket that listens. */
static int listen_on(const char *address, int port, int *port_out) {
  struct sockaddr_storage at = {0};
  struct sockaddr_in *v4 = (struct sockaddr_in *)&at;
  struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&at;
  socklen_t length = sizeof *v4;
  if (inet_pton(AF_INET, address, &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET, v4->sin_port = htons((uint16_t)port);
  } else if (inet_pton(AF_INET6, address, &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6, v6->sin6_port = htons((uint16_t)port);
    length = sizeof *v6;
  } else {
    return kvl__fail(KVL_ERR_INVALID,
                     "http: address is \"%s\", expected a number such as 127.0.0.1 or ::1",
                     address);
  }
  int one = 1, file = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (file >= 0) setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (file < 0 || bind(file, (struct sockaddr *)&at, length) || listen(file, 4096) ||
      getsockname(file, (struct sockaddr *)&at, &length)) {
    int reason = errno;
    if (file >= 0) close(file);
    return kvl__fail(KVL_ERR_IO, "http: cannot listen on %s, port %d: %s", address, port,
                     strerror(reason));
  }
  *port_out = ntohs(at.ss_family == AF_INET ? v4->sin_port : v6->sin6_port);
  return file;
}

/* Lets this process have as many files as it may, for connections. */
static void raise_files(int need) {
  struct rlimit files;
  if (getrlimit(RLIMIT_NOFILE, &files) || files.rlim_cur >= (rlim_t)need) return;
  files.rlim_cur = files.rlim_max < (rlim_t)need ? files.rlim_max : (rlim_t)need;
  setrlimit(RLIMIT_NOFILE, &files);
}

static int start(kvl_http *http, int file, int64_t us_taking) {
  http->daemon = http->mhd->MHD_start_daemon(
      MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0, accept_one, http, serve,
      http, MHD_OPTION_LISTEN_SOCKET, file, MHD_OPTION_CONNECTION_LIMIT,
      (unsigned)(http->connections_max + http->extra_max + 1), MHD_OPTION_CONNECTION_TIMEOUT,
      (unsigned)(us_taking / 1000000 + 1), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
      (size_t)BYTES_CONNECTION, MHD_OPTION_NOTIFY_CONNECTION, note_connection, http,
      MHD_OPTION_NOTIFY_COMPLETED, finish, http, MHD_OPTION_END);
  if (http->daemon) return KVL_OK; /* which closes the socket, at its end */
  return kvl__fail(KVL_ERR_IO, "http: libmicrohttpd cannot start: %s", strerror(errno));
}

static int check_options(const kvl_http_options *o) {
  if (!o->address || !o->too_many || !o->too_large || !o->too_slow)
    return kvl__fail(KVL_ERR_INVALID, "kvl_http_open: a text of the options is NULL");
  if (o->port < 0 || o->port > 65535 || o->connections < 1 || o->connections > 1 << 20 ||
      o->bytes_body < 0 || o->us_arrival < 1 || o->us_taking < 1)
    return kvl__fail(KVL_ERR_INVALID,
                     "kvl_http_open: port is %d, connections %d, bytes_body %lld, us_arrival "
                     "%lld and us_taking %lld, expected 0 ... 65535, 1 ... 2^20, and numbers "
                     "that are not negative",
                     o->port, o->connections, (long long)o->bytes_body,
                     (long long)o->us_arrival, (long long)o->us_taking);
  return KVL_OK;
}

int kvl_http_open(const kvl_http_options *options, kvl_http **out) {
  KVL__NEED(options);
  KVL__NEED(out);
  int status = check_options(options), port = 0;
  if (status < 0) return status;
  const struct kvl__mhd *mhd = kvl__mhd_load();
  if (!mhd) return KVL_ERR_UNSUPPORTED;
  kvl_http *http = kvl__malloc(sizeof *http, "a server");
  if (!http) return KVL_ERR_NO_MEMORY;
  *http = (kvl_http){.mhd = mhd,
                     .refs = 1,
                     .connections_max = options->connections,
                     .extra_max = 8 + options->connections / 8,
                     .bytes_body = options->bytes_body,
                     .ns_arrival = options->us_arrival * 1000,
                     .too_many = strdup(options->too_many),
                     .too_large = strdup(options->too_large),
                     .too_slow = strdup(options->too_slow)};
  pthread_mutex_init(&http->lock, NULL);
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC); /* the clock of kvl_clock_ns */
  pthread_cond_init(&http->arrived, &attr);
  pthread_condattr_destroy(&attr);
  raise_files(http->connections_max + http->extra_max + 64);
  int file = listen_on(options->address, options->port, &port);
  status = file;
  if (file >= 0) status = start(http, file, options->us_taking);
  if (status < 0) {
    pthread_mutex_lock(&http->lock);
    kvl__http_leave(http);
    return status;
  }
  http->port = port;
  *out = http;
  return KVL_OK;
}

void kvl_http_close(kvl_http *http) {
  if (!http) return;
  pthread_mutex_lock(&http->lock);
  http->is_closing = 1;
  while (http->first) { /* nobody will take them */
    kvl_http_exchange *e = http->first;
    http->first = e->next;
    e->refs--;
  }
  http->last = NULL;
  for (struct kvl__visit *v = http->visits; v; v = v->next)
    if (v->exchange) kvl__exchange_resume(v->exchange); /* none may be suspended now */
  pthread_mutex_unlock(&http->lock);
  http->mhd->MHD_stop_daemon(http->daemon); /* it calls finish() for every exchange */
  pthread_mutex_lock(&http->lock);
  kvl__http_leave(http);
}

int kvl_http_port(const kvl_http *http) {
  KVL__NEED(http);
  return http->port;
}

int kvl_http_stats_get(kvl_http *http, kvl_http_stats *out) {
  KVL__NEED(http);
  KVL__NEED(out);
  pthread_mutex_lock(&http->lock);
  *out = http->stats;
  pthread_mutex_unlock(&http->lock);
  return KVL_OK;
}

int kvl_http_next(kvl_http *http, int64_t timeout_us, kvl_http_exchange **out) {
  KVL__NEED(http);
  KVL__NEED(out);
  int64_t now = kvl_clock_ns(), end = now + timeout_us * 1000;
  int result = 0;
  pthread_mutex_lock(&http->lock);
  reap(http);
  while (!http->first && now < end && !kvl_interrupted()) {
    int64_t until = now + NS_SLICE < end ? now + NS_SLICE : end; /* a signal ends no wait */
    struct timespec at = {until / 1000000000, until % 1000000000};
    pthread_cond_timedwait(&http->arrived, &http->lock, &at);
    reap(http);
    now = kvl_clock_ns();
  }
  kvl_http_exchange *e = http->first;
  if (kvl_interrupted()) {
    result = kvl__fail(KVL_ERR_INTERRUPTED, "kvl_http_next: interrupted");
  } else if (e) {
    http->first = e->next;
    if (!e->next) http->last = NULL;
    e->next = NULL;
    *out = e, result = 1;
  }
  pthread_mutex_unlock(&http->lock);
  return result;
}
