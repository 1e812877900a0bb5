/* A server of HTTP over libmicrohttpd, with one thread that polls all connections.
 *
 * A caller gets only whole requests: libmicrohttpd parses, and collect() below puts the
 * parts of a body together. A connection is suspended while its request waits for an
 * answer. The library's own time-out begins again with every byte, so a client could send
 * one byte a second for ever. `visits` say since when each connection owes a request, and
 * reap() ends connections that take too long.
 *
 * The lock is held only for moments, never while waiting for a client. When libmicrohttpd
 * calls back, it holds none of the locks that suspending or resuming needs. */
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
  NS_CLOSE = 1000 * 1000 * 1000, /* for answers that were not sent when a server closes */
  BYTES_CONNECTION = 24 * 1024,
  BYTES_DROPPED = 1024 * 1024 /* of a body beyond its limit, so that its client sees why */
};

/* ORDER kvl_http_early */
static const struct {
  int code;
  const char *words;
} STATUS[KVL_HTTP_EARLY] = {{503, "Service Unavailable"}, {413, "Content Too Large"},
                            {408, "Request Timeout"},     {400, "Bad Request"},
                            {400, "Bad Request"},         {400, "Bad Request"},
                            {400, "Bad Request"},         {417, "Expectation Failed"}};

/* A connection, from accept to close. */
struct visit {
  int file;
  int is_extra;                /* beyond the limit: its request gets 503 */
  int had_request;             /* one was answered before */
  int is_told;                 /* it was refused; what still comes is read and dropped */
  kvl_http_exchange *exchange; /* that is open */
  int64_t ns_since; /* since when a request is awaited; 0 while one is being answered */
  struct visit *before, *next;
};

struct kvl_http {
  struct MHD_Daemon *daemon;
  struct kvl__shared *shared;
  pthread_cond_t changed; /* a request has arrived, or an exchange is over */
  int port, connections_max, extra_max;
  int64_t bytes_body, ns_arrival, ns_reaped;
  char *early[KVL_HTTP_EARLY];
  struct visit *visits;
  kvl_http_exchange *first, *last; /* requests that wait for the caller */
  kvl_http_stats stats;
};

/* ---- connections ----------------------------------------------------------------------- */

static struct visit *visit_of(struct MHD_Connection *c) {
  return kvl__mhd.MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT)
      ->socket_context;
}

/* Whether one more connection is taken. */
static enum MHD_Result accept_one(void *context, const struct sockaddr *from,
                                  socklen_t length) {
  (void)from, (void)length;
  kvl_http *http = context;
  pthread_mutex_lock(&http->shared->lock);
  int is_room = !http->shared->is_closing &&
                http->stats.connections < http->connections_max + http->extra_max;
  if (!is_room) http->stats.refused++;
  pthread_mutex_unlock(&http->shared->lock);
  return is_room ? MHD_YES : MHD_NO;
}

static void visit_begins(kvl_http *http, struct MHD_Connection *c, void **own) {
  struct visit *v = kvl__malloc(sizeof *v, "a connection");
  *own = v;
  pthread_mutex_lock(&http->shared->lock);
  http->stats.accepted++, http->stats.connections++;
  if (v) {
    *v = (struct visit){
        .file = kvl__mhd.MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)
                    ->connect_fd,
        .is_extra = http->stats.connections > http->connections_max,
        .ns_since = kvl_clock_ns(),
        .next = http->visits};
    if (v->next) v->next->before = v;
    http->visits = v;
  }
  pthread_mutex_unlock(&http->shared->lock);
}

static void visit_ends(kvl_http *http, void **own) {
  struct visit *v = *own;
  pthread_mutex_lock(&http->shared->lock);
  http->stats.connections--;
  if (v) {
    if (v->next) v->next->before = v->before;
    if (v->before) v->before->next = v->next;
    else http->visits = v->next;
  }
  pthread_mutex_unlock(&http->shared->lock);
  free(v);
  *own = NULL;
}

static void note_connection(void *context, struct MHD_Connection *c, void **own,
                            enum MHD_ConnectionNotificationCode code) {
  if (code == MHD_CONNECTION_NOTIFY_STARTED) visit_begins(context, c, own);
  else visit_ends(context, own);
}

/* Answers a connection whose request libmicrohttpd is still reading, so that it takes no
 * answer of ours. The connection has to end then. */
static void tell(kvl_http *http, struct visit *v, int why) {
  char head[160];
  size_t bytes = strlen(http->early[why]);
  int n = snprintf(head, sizeof head,
                   "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\n"
                   "Content-Length: %zu\r\nConnection: close\r\n\r\n",
                   STATUS[why].code, STATUS[why].words, bytes);
  if (send(v->file, head, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL) == n)
    (void)!send(v->file, http->early[why], bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  v->is_told = 1;
}

/* Ends a connection whose request takes too long. libmicrohttpd, which still reads from it,
 * then finds its end. */
static void end_visit(kvl_http *http, struct visit *v) {
  if (!v->had_request && !v->is_told) tell(http, v, KVL_HTTP_TOO_SLOW);
  shutdown(v->file, SHUT_RDWR);
  v->ns_since = 0;
  http->stats.too_slow++;
}

/* Ends connections that owe a request for too long. The lock is held. */
static void reap(kvl_http *http) {
  int64_t now = kvl_clock_ns();
  if (now - http->ns_reaped < NS_REAP) return;
  http->ns_reaped = now;
  for (struct visit *v = http->visits; v; v = v->next)
    if (v->ns_since && now - v->ns_since > http->ns_arrival) end_visit(http, v);
}

/* ---- requests -------------------------------------------------------------------------- */

static void count(kvl_http *http, int64_t *counter) {
  pthread_mutex_lock(&http->shared->lock);
  ++*counter;
  pthread_mutex_unlock(&http->shared->lock);
}

/* Answers at once, before a body is read; the connection then ends. */
static enum MHD_Result turn_away(kvl_http *http, struct MHD_Connection *c, int why) {
  count(http, why == KVL_HTTP_TOO_MANY    ? &http->stats.refused
              : why == KVL_HTTP_TOO_LARGE ? &http->stats.too_large
                                          : &http->stats.malformed);
  struct MHD_Response *response = kvl__mhd.MHD_create_response_from_buffer(
      strlen(http->early[why]), http->early[why], MHD_RESPMEM_PERSISTENT);
  if (!response) return MHD_NO;
  kvl__mhd.MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                                   "application/json");
  kvl__mhd.MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
  if (why == KVL_HTTP_TOO_MANY)
    kvl__mhd.MHD_add_response_header(response, "Retry-After", "1");
  enum MHD_Result result = kvl__mhd.MHD_queue_response(c, (unsigned)STATUS[why].code,
                                                       response);
  kvl__mhd.MHD_destroy_response(response);
  return result;
}

/* The headers of a request are there. */
static enum MHD_Result begin(kvl_http *http, struct MHD_Connection *c, const char *path,
                             const char *method, const char *version, void **own) {
  struct visit *v = visit_of(c);
  if (!v) return MHD_NO;
  int why = v->is_extra ? KVL_HTTP_TOO_MANY
                        : kvl__headers_check(c, method, version, http->bytes_body);
  if (why >= 0) return turn_away(http, c, why);
  pthread_mutex_lock(&http->shared->lock);
  *own = v->exchange = kvl__exchange_open(http->shared, c, v->file, method, path);
  pthread_mutex_unlock(&http->shared->lock);
  return *own ? MHD_YES : MHD_NO;
}

/* A body is longer than it may be, though it did not say so in front. */
static enum MHD_Result drop(kvl_http *http, struct MHD_Connection *c, size_t total) {
  pthread_mutex_lock(&http->shared->lock);
  struct visit *v = visit_of(c);
  if (!v->is_told) {
    http->stats.too_large++;
    tell(http, v, KVL_HTTP_TOO_LARGE);
    shutdown(v->file, SHUT_WR);
  }
  pthread_mutex_unlock(&http->shared->lock);
  return total > (size_t)http->bytes_body + BYTES_DROPPED ? MHD_NO : MHD_YES;
}

/* Keeps a part of a body. */
static enum MHD_Result collect(kvl_http *http, struct MHD_Connection *c, kvl_http_exchange *e,
                               const char *part, size_t *bytes) {
  size_t need = e->bytes_body + *bytes;
  if (need > (size_t)http->bytes_body) {
    free(e->body);
    e->body = NULL, e->room_body = 0, e->bytes_body = need, *bytes = 0;
    return drop(http, c, need);
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
  pthread_mutex_lock(&http->shared->lock);
  struct visit *v = visit_of(c);
  enum MHD_Result result = MHD_NO;
  if (!http->shared->is_closing && !v->is_told) {
    kvl__mhd.MHD_suspend_connection(c);
    v->ns_since = 0;
    e->is_suspended = e->has_arrived = 1, e->refs = 2;
    if (http->last) http->last->next = e;
    else http->first = e;
    http->last = e;
    http->stats.requests++;
    pthread_cond_signal(&http->changed);
    result = MHD_YES;
  }
  pthread_mutex_unlock(&http->shared->lock);
  return result;
}

/* The caller has answered, or will not. */
static enum MHD_Result give_answer(kvl_http *http, struct MHD_Connection *c,
                                   kvl_http_exchange *e) {
  pthread_mutex_lock(&http->shared->lock);
  struct MHD_Response *response = http->shared->is_over || e->is_queued ? NULL : e->response;
  int status = e->status;
  e->is_queued = 1;
  pthread_mutex_unlock(&http->shared->lock);
  if (!response) return MHD_NO;
  return kvl__mhd.MHD_queue_response(c, (unsigned)status, response);
}

/* Called by libmicrohttpd for the headers of a request, for each part of its body, at its
 * end, and once more after it was resumed. */
static enum MHD_Result serve(void *context, struct MHD_Connection *c, const char *path,
                             const char *method, const char *version, const char *part,
                             size_t *bytes, void **own) {
  kvl_http *http = context;
  kvl_http_exchange *e = *own;
  if (!e) return begin(http, c, path, method, version, own);
  if (*bytes > 0) return collect(http, c, e, part, bytes);
  return e->has_arrived ? give_answer(http, c, e) : arrive(http, c, e);
}

/* A request is over, its answer sent or not. */
static void finish(void *context, struct MHD_Connection *c, void **own,
                   enum MHD_RequestTerminationCode code) {
  (void)code;
  kvl_http *http = context;
  kvl_http_exchange *e = *own;
  if (!e) return;
  pthread_mutex_lock(&http->shared->lock);
  struct visit *v = visit_of(c);
  if (v) v->ns_since = kvl_clock_ns(), v->had_request = 1, v->exchange = NULL;
  e->connection = NULL;
  kvl__exchange_unref(e);
  *own = NULL;
  pthread_cond_signal(&http->changed);
  pthread_mutex_unlock(&http->shared->lock);
}

/* ---- the server ------------------------------------------------------------------------ */

static void http_free(kvl_http *http) {
  pthread_mutex_lock(&http->shared->lock);
  http->shared->refs--;
  kvl__shared_unlock(http->shared);
  pthread_cond_destroy(&http->changed);
  for (int i = 0; i < KVL_HTTP_EARLY; i++) free(http->early[i]);
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

/* Leaves a path as it was sent: decoding could put a NUL into it, where it would end. */
static size_t keep_escapes(void *context, struct MHD_Connection *c, char *text) {
  (void)context, (void)c;
  return strlen(text);
}

static int start(kvl_http *http, int file, int64_t us_taking) {
  http->daemon = kvl__mhd.MHD_start_daemon(
      MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0, accept_one, http, serve,
      http, MHD_OPTION_LISTEN_SOCKET, file, MHD_OPTION_CONNECTION_LIMIT,
      (unsigned)(http->connections_max + http->extra_max + 1), MHD_OPTION_CONNECTION_TIMEOUT,
      (unsigned)(us_taking / 1000000 + 1), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
      (size_t)BYTES_CONNECTION, MHD_OPTION_NOTIFY_CONNECTION, note_connection, http,
      MHD_OPTION_NOTIFY_COMPLETED, finish, http, MHD_OPTION_UNESCAPE_CALLBACK, keep_escapes,
      NULL, MHD_OPTION_END);
  if (http->daemon) return KVL_OK; /* which closes the socket, at its end */
  return kvl__fail(KVL_ERR_IO, "http: libmicrohttpd cannot start: %s", strerror(errno));
}

static int check_options(const kvl_http_options *o) {
  int is_whole = o->address != NULL;
  for (int i = 0; i < KVL_HTTP_EARLY; i++) is_whole = is_whole && o->early[i];
  if (!is_whole)
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

static int copy_early(kvl_http *http, const kvl_http_options *o) {
  for (int i = 0; i < KVL_HTTP_EARLY; i++) {
    const size_t bytes = strlen(o->early[i]) + 1;
    char *copy = kvl__malloc(bytes, "an early answer");
    if (!copy) return KVL_ERR_NO_MEMORY;
    http->early[i] = memcpy(copy, o->early[i], bytes);
  }
  return KVL_OK;
}

int kvl_http_open(const kvl_http_options *options, kvl_http **out) {
  KVL__NEED(options);
  KVL__NEED(out);
  int status = check_options(options);
  if (status < 0) return status;
  status = kvl__mhd_load();
  if (status < 0) return status;
  kvl_http *http = kvl__malloc(sizeof *http, "a server");
  struct kvl__shared *shared = kvl__malloc(sizeof *shared, "a server");
  if (!http || !shared) {
    free(http), free(shared);
    return KVL_ERR_NO_MEMORY;
  }
  *shared = (struct kvl__shared){.lock = PTHREAD_MUTEX_INITIALIZER, .refs = 1};
  *http = (kvl_http){.shared = shared,
                     .connections_max = options->connections,
                     .extra_max = 8 + options->connections / 8,
                     .bytes_body = options->bytes_body,
                     .ns_arrival = options->us_arrival * 1000};
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC); /* the clock of kvl_clock_ns */
  pthread_cond_init(&http->changed, &attr);
  pthread_condattr_destroy(&attr);
  raise_files(http->connections_max + http->extra_max + 64);
  status = copy_early(http, options);
  int file = status < 0 ? status : listen_on(options->address, options->port, &http->port);
  status = file < 0 ? file : start(http, file, options->us_taking);
  if (status < 0) {
    http_free(http);
    return status;
  }
  *out = http;
  return KVL_OK;
}

/* Whether an answer is complete, and not sent to its end. */
static int is_sending(const kvl_http *http) {
  for (const struct visit *v = http->visits; v; v = v->next)
    if (v->exchange && v->exchange->has_answer && v->exchange->is_ended) return 1;
  return 0;
}

/* Waits until something has changed, NS_SLICE at most, since a signal ends no wait. The lock
 * is held. */
static int64_t wait_for_change(kvl_http *http, int64_t now, int64_t end) {
  int64_t until = now + NS_SLICE < end ? now + NS_SLICE : end;
  struct timespec at = {until / 1000000000, until % 1000000000};
  pthread_cond_timedwait(&http->changed, &http->shared->lock, &at);
  return kvl_clock_ns();
}

void kvl_http_close(kvl_http *http) {
  if (!http) return;
  pthread_mutex_lock(&http->shared->lock);
  http->shared->is_closing = 1;
  while (http->first) { /* nobody will take them */
    kvl_http_exchange *e = http->first;
    http->first = e->next;
    e->refs--;
  }
  http->last = NULL;
  for (struct visit *v = http->visits; v; v = v->next)
    if (v->exchange) kvl__exchange_resume(v->exchange); /* none may be suspended now */
  for (int64_t now = kvl_clock_ns(), end = now + NS_CLOSE; is_sending(http) && now < end;)
    now = wait_for_change(http, now, end);
  http->shared->is_over = 1;
  pthread_mutex_unlock(&http->shared->lock);
  kvl__mhd.MHD_stop_daemon(http->daemon); /* it calls finish() for every exchange */
  http_free(http);
}

int kvl_http_port(const kvl_http *http) {
  KVL__NEED(http);
  return http->port;
}

int kvl_http_stats_get(kvl_http *http, kvl_http_stats *out) {
  KVL__NEED(http);
  KVL__NEED(out);
  pthread_mutex_lock(&http->shared->lock);
  *out = http->stats;
  pthread_mutex_unlock(&http->shared->lock);
  return KVL_OK;
}

int kvl_http_next(kvl_http *http, int64_t timeout_us, kvl_http_exchange **out) {
  KVL__NEED(http);
  KVL__NEED(out);
  int64_t now = kvl_clock_ns(), end = now + timeout_us * 1000;
  int result = 0;
  pthread_mutex_lock(&http->shared->lock);
  reap(http);
  while (!http->first && now < end && !kvl_interrupted()) {
    now = wait_for_change(http, now, end);
    reap(http);
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
  pthread_mutex_unlock(&http->shared->lock);
  return result;
}
