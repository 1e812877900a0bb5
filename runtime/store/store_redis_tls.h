/* TLS for store_redis.c. */
#ifndef KVL_STORE_REDIS_TLS_H
#define KVL_STORE_REDIS_TLS_H

#include <hiredis/hiredis.h>
#include <signal.h>
#include <stddef.h>

/* Gets ready to make TLS connections: *out holds the certificates that are trusted. Errors:
 * UNSUPPORTED if hiredis has no TLS here; IO. */
int kvl__redis_tls_open(void **out);
void kvl__redis_tls_close(void *tls);
/* Starts TLS on a new connection, and checks that the server's certificate is trusted and
 * is of this host. Returns 1, or 0 with the reason in `why`. */
int kvl__redis_tls_start(void *tls, redisContext *c, const char *host, char *why,
                         size_t size);

/* OpenSSL writes to a connection without MSG_NOSIGNAL. Between these two calls a thread
 * gets no SIGPIPE. */
void kvl__sigpipe_hold(sigset_t *before);
void kvl__sigpipe_release(const sigset_t *before);

#endif
