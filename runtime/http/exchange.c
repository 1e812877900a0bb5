/* Exchanges: a request that arrived, and its answer.
 *
 * libmicrohttpd suspends a connection while the caller makes up its answer, and a stream
 * whenever nothing is left to write. A suspended connection is touched only by the code
 * that resumes it, so its socket stays open; the caller has to ask whether the client is
 * still there. */
#define _GNU_SOURCE /* POLLRDHUP */
#include <poll.h>

#include "http/http.h"

enum { BYTES_PART = 16 * 1024 };

/* ---- life ------------------------------------------------------------------------------ */

/* A copy of a header, "" where there is none; NULL when memory is out. */
static char *header_of(struct MHD_Connection *c, const char *name) {
  const char *text = kvl__mhd.MHD_lookup_connection_value(c, MHD_HEADER_KIND, name);
  return strdup(text ? text : "");
}

static void exchange_free(kvl_http_exchange *e) {
  if (e->response) kvl__mhd.MHD_destroy_response(e->response);
  free(e->method), free(e->path), free(e->authorization), free(e->host), free(e->origin);
  free(e->body), free(e->out);
  free(e);
}

kvl_http_exchange *kvl__exchange_open(struct kvl__shared *s,
                                      struct MHD_Connection *connection, int file,
                                      const char *method, const char *path) {
  kvl_http_exchange *e = kvl__malloc(sizeof *e, "an exchange");
  if (!e) return NULL;
  *e = (kvl_http_exchange){.shared = s, .connection = connection, .file = file, .refs = 1};
  e->method = strdup(method);
  e->path = strdup(path);
  e->authorization = header_of(connection, MHD_HTTP_HEADER_AUTHORIZATION);
  e->host = header_of(connection, MHD_HTTP_HEADER_HOST);
  e->origin = header_of(connection, "Origin");
  if (!e->method || !e->path || !e->authorization || !e->host || !e->origin) {
    exchange_free(e);
    return NULL;
  }
  s->refs++;
  return e;
}

void kvl__shared_unlock(struct kvl__shared *s) {
  int refs = s->refs;
  pthread_mutex_unlock(&s->lock);
  if (refs == 0) free(s);
}

void kvl__exchange_unref(kvl_http_exchange *e) {
  if (--e->refs > 0) return;
  e->shared->refs--;
  exchange_free(e);
}

void kvl__exchange_resume(kvl_http_exchange *e) {
  if (!e->is_suspended || !e->connection) return;
  e->is_suspended = 0;
  kvl__mhd.MHD_resume_connection(e->connection);
}

int kvl_http_exchange_request(const kvl_http_exchange *exchange, kvl_http_request *out) {
  KVL__NEED(exchange);
  KVL__NEED(out);
  *out = (kvl_http_request){.method = exchange->method,
                            .path = exchange->path,
                            .authorization = exchange->authorization,
                            .host = exchange->host,
                            .origin = exchange->origin,
                            .body = exchange->body ? exchange->body : "",
                            .bytes_body = (int64_t)exchange->bytes_body};
  return KVL_OK;
}

int kvl_http_exchange_is_gone(kvl_http_exchange *exchange) {
  KVL__NEED(exchange);
  struct kvl__shared *s = exchange->shared;
  pthread_mutex_lock(&s->lock);
  int is_gone = 1;
  if (exchange->connection) {
    struct pollfd at = {.fd = exchange->file, .events = POLLRDHUP};
    is_gone = poll(&at, 1, 0) > 0 && at.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL);
  }
  pthread_mutex_unlock(&s->lock);
  return is_gone;
}

/* ---- answers --------------------------------------------------------------------------- */

/* Adds a header "Name: value". */
static int add_header(struct MHD_Response *response, const char *header) {
  const char *colon = strchr(header, ':');
  char name[64];
  if (!colon || colon - header >= (long)sizeof name) return 0;
  memcpy(name, header, (size_t)(colon - header));
  name[colon - header] = 0;
  return kvl__mhd.MHD_add_response_header(response, name,
                                          colon + 1 + strspn(colon + 1, " ")) == MHD_YES;
}

/* Gives the exchange its response, and lets libmicrohttpd send it. */
static int set_response(kvl_http_exchange *e, int status, struct MHD_Response *response,
                        const char *type, const char *header, int is_stream) {
  if (!response) return kvl__fail(KVL_ERR_NO_MEMORY, "http: no host memory for an answer");
  if (kvl__mhd.MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type) !=
          MHD_YES ||
      (header && !add_header(response, header))) {
    kvl__mhd.MHD_destroy_response(response);
    return kvl__fail(KVL_ERR_INVALID, "http: content type \"%s\" or header \"%s\" is none",
                     type, header ? header : "");
  }
  pthread_mutex_lock(&e->shared->lock);
  e->response = response;
  e->status = status, e->is_stream = is_stream, e->has_answer = 1;
  kvl__exchange_resume(e);
  pthread_mutex_unlock(&e->shared->lock);
  return KVL_OK;
}

/* Called by libmicrohttpd when it can write more of a stream. */
static ssize_t read_stream(void *context, uint64_t at, char *to, size_t most) {
  (void)at;
  kvl_http_exchange *e = context;
  struct kvl__shared *s = e->shared;
  ssize_t count = 0;
  pthread_mutex_lock(&s->lock);
  if (s->is_over || (s->is_closing && !e->is_ended)) {
    count = MHD_CONTENT_READER_END_WITH_ERROR;
  } else if (e->bytes_out > 0) {
    count = (ssize_t)(e->bytes_out < most ? e->bytes_out : most);
    memcpy(to, e->out + e->first_out, (size_t)count);
    e->first_out += (size_t)count, e->bytes_out -= (size_t)count;
  } else if (e->is_ended) {
    count = MHD_CONTENT_READER_END_OF_STREAM;
  } else {
    e->is_suspended = 1;
    kvl__mhd.MHD_suspend_connection(e->connection);
  }
  pthread_mutex_unlock(&s->lock);
  return count;
}

static int check_first(const kvl_http_exchange *e, const char *what) {
  if (!e->has_answer) return KVL_OK;
  return kvl__fail(KVL_ERR_INVALID, "%s: the exchange has an answer already", what);
}

int kvl_http_exchange_answer(kvl_http_exchange *exchange, int status, const char *type,
                             const char *header, const char *body, int64_t bytes) {
  KVL__NEED(exchange);
  KVL__NEED(type);
  KVL__NEED(body);
  if (status < 200 || status > 599 || bytes < 0)
    return kvl__fail(KVL_ERR_INVALID,
                     "kvl_http_exchange_answer: status is %d and bytes %lld, expected "
                     "200 ... 599 and 0 or more",
                     status, (long long)bytes);
  int problem = check_first(exchange, "kvl_http_exchange_answer");
  if (problem < 0) return problem;
  struct MHD_Response *response = kvl__mhd.MHD_create_response_from_buffer(
      (size_t)bytes, (void *)(uintptr_t)body, MHD_RESPMEM_MUST_COPY);
  return set_response(exchange, status, response, type, header, 0);
}

int kvl_http_exchange_begin(kvl_http_exchange *exchange, const char *type) {
  KVL__NEED(exchange);
  KVL__NEED(type);
  int problem = check_first(exchange, "kvl_http_exchange_begin");
  if (problem < 0) return problem;
  struct MHD_Response *response = kvl__mhd.MHD_create_response_from_callback(
      MHD_SIZE_UNKNOWN, BYTES_PART, read_stream, exchange, NULL);
  return set_response(exchange, 200, response, type, "Cache-Control: no-cache", 1);
}

/* Makes room for `count` more bytes of a stream. */
static int make_room(kvl_http_exchange *e, size_t count) {
  if (e->first_out + e->bytes_out + count <= e->room_out) return KVL_OK;
  if (e->bytes_out > 0 && e->first_out > 0)
    memmove(e->out, e->out + e->first_out, e->bytes_out);
  e->first_out = 0;
  size_t room = 2 * (e->bytes_out + count);
  if (room <= e->room_out) return KVL_OK;
  char *grown = kvl__realloc(e->out, room, "a stream of an answer");
  if (!grown) return KVL_ERR_NO_MEMORY;
  e->out = grown, e->room_out = room;
  return KVL_OK;
}

int kvl_http_exchange_send(kvl_http_exchange *exchange, const char *bytes, int64_t count) {
  KVL__NEED(exchange);
  KVL__NEED(bytes);
  kvl_http_exchange *e = exchange;
  if (!e->is_stream || count < 0)
    return kvl__fail(KVL_ERR_INVALID, "kvl_http_exchange_send: %s",
                     count < 0 ? "count is negative" : "no answer in parts was begun");
  pthread_mutex_lock(&e->shared->lock);
  int result = 0;
  if (e->connection) {
    result = make_room(e, (size_t)count);
    if (result >= 0) {
      memcpy(e->out + e->first_out + e->bytes_out, bytes, (size_t)count);
      e->bytes_out += (size_t)count;
      kvl__exchange_resume(e);
      result = e->bytes_out > INT32_MAX ? INT32_MAX : (int)e->bytes_out;
    }
  }
  pthread_mutex_unlock(&e->shared->lock);
  return result;
}

void kvl_http_exchange_close(kvl_http_exchange *exchange) {
  if (!exchange) return;
  struct kvl__shared *s = exchange->shared;
  pthread_mutex_lock(&s->lock);
  exchange->is_ended = 1;
  kvl__exchange_resume(exchange); /* without an answer, it is refused */
  kvl__exchange_unref(exchange);
  kvl__shared_unlock(s);
}
