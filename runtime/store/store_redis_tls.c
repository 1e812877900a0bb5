/* TLS by libhiredis_ssl, which hiredis has since 1.0, and by OpenSSL, which libhiredis_ssl
 * needs. Both are opened together with the first store of a rediss: URL, so that nobody else
 * needs or loads them. hiredis' own way to start TLS does not compare the certificate with
 * the host's name, so this file prepares the connection by OpenSSL itself. */
#include "store/store_redis_tls.h"

#include <dlfcn.h>
#include <time.h>

#include "core/status.h"

#if __has_include(<hiredis/hiredis_ssl.h>)

#include <hiredis/hiredis_ssl.h>
#include <pthread.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

enum { /* of OpenSSL's headers, which a build does not need */
       VERIFY_PEER = 1,
       CTRL_SET_TLSEXT_HOSTNAME = 55,
       CTRL_SET_MIN_PROTO_VERSION = 123,
       TLS1_2 = 0x303,
};

/* The functions of libhiredis_ssl and OpenSSL that are used here. */
#define FUNCTIONS(X)                                 \
  X(int, redisInitiateSSL, (redisContext *, void *)) \
  X(const void *, TLS_client_method, (void))         \
  X(void *, SSL_CTX_new, (const void *))             \
  X(void, SSL_CTX_free, (void *))                    \
  X(long, SSL_CTX_ctrl, (void *, int, long, void *)) \
  X(int, SSL_CTX_set_default_verify_paths, (void *)) \
  X(void, SSL_CTX_set_verify, (void *, int, void *)) \
  X(void *, SSL_new, (void *))                       \
  X(void, SSL_free, (void *))                        \
  X(long, SSL_ctrl, (void *, int, long, void *))     \
  X(void *, SSL_get0_param, (void *))                \
  X(int, SSL_set1_host, (void *, const char *))      \
  X(int, X509_VERIFY_PARAM_set1_ip_asc, (void *, const char *))

static struct {
#define FIELD(result, name, arguments) result(*name) arguments;
  FUNCTIONS(FIELD)
#undef FIELD
} tls;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char problem[256]; /* why TLS cannot be used; empty if it can */

static void load(void) {
  static const char *const names[] = {"libhiredis_ssl.so." TEXT(HIREDIS_SONAME),
                                      "libhiredis_ssl.so." TEXT(HIREDIS_MAJOR),
                                      "libhiredis_ssl.so"};
  void *library = NULL;
  for (int i = 0; i < 3 && !library; i++) library = dlopen(names[i], RTLD_NOW);
  if (!library) {
    snprintf(problem, sizeof problem, "%s", dlerror());
    return;
  }
#define LOAD(result, name, arguments)          \
  *(void **)&tls.name = dlsym(library, #name); \
  if (!tls.name) snprintf(problem, sizeof problem, "libhiredis_ssl.so has no %s", #name);
  FUNCTIONS(LOAD)
#undef LOAD
}

int kvl__redis_tls_open(void **out) {
  pthread_once(&once, load);
  if (*problem)
    return kvl__fail(KVL_ERR_UNSUPPORTED, "redis store: rediss: needs libhiredis_ssl: %s",
                     problem);
  void *context = tls.SSL_CTX_new(tls.TLS_client_method());
  if (!context) return kvl__fail(KVL_ERR_NO_MEMORY, "no host memory for TLS");
  tls.SSL_CTX_ctrl(context, CTRL_SET_MIN_PROTO_VERSION, TLS1_2, NULL);
  tls.SSL_CTX_set_verify(context, VERIFY_PEER, NULL);
  if (!tls.SSL_CTX_set_default_verify_paths(context)) {
    tls.SSL_CTX_free(context);
    return kvl__fail(KVL_ERR_IO, "redis store: the trusted certificates cannot be read");
  }
  *out = context;
  return KVL_OK;
}

void kvl__redis_tls_close(void *context) {
  if (context) tls.SSL_CTX_free(context);
}

int kvl__redis_tls_start(void *context, redisContext *c, const char *host, char *why,
                         size_t size) {
  void *ssl = tls.SSL_new(context);
  if (!ssl) {
    snprintf(why, size, "out of memory");
    return 0;
  }
  int is_address = tls.X509_VERIFY_PARAM_set1_ip_asc(tls.SSL_get0_param(ssl), host);
  if (!is_address) tls.SSL_ctrl(ssl, CTRL_SET_TLSEXT_HOSTNAME, 0, (void *)host);
  if (!is_address && !tls.SSL_set1_host(ssl, host)) {
    snprintf(why, size, "TLS refuses the host's name");
    tls.SSL_free(ssl);
    return 0;
  }
  if (tls.redisInitiateSSL(c, ssl) == REDIS_OK) return 1; /* c frees ssl */
  snprintf(why, size, "TLS: %s", *c->errstr ? c->errstr : "no connection");
  if (!c->privctx) tls.SSL_free(ssl);
  return 0;
}

#else

int kvl__redis_tls_open(void **out) {
  (void)out;
  return kvl__fail(KVL_ERR_UNSUPPORTED,
                   "redis store: rediss: needs TLS, which hiredis has since 1.0; kvlab was "
                   "built with %d.%d.%d, without hiredis_ssl.h: use redis: over a tunnel "
                   "(ssh, stunnel)",
                   HIREDIS_MAJOR, HIREDIS_MINOR, HIREDIS_PATCH);
}

void kvl__redis_tls_close(void *context) { (void)context; }

int kvl__redis_tls_start(void *context, redisContext *c, const char *host, char *why,
                         size_t size) {
  (void)context, (void)c, (void)host;
  snprintf(why, size, "no TLS");
  return 0;
}

#endif

static sigset_t only_sigpipe(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  return set;
}

void kvl__sigpipe_hold(sigset_t *before) {
  sigset_t set = only_sigpipe();
  pthread_sigmask(SIG_BLOCK, &set, before);
}

void kvl__sigpipe_release(const sigset_t *before) {
  sigset_t set = only_sigpipe();
  if (sigismember(before, SIGPIPE)) return; /* whoever blocked it takes what came */
  while (sigtimedwait(&set, NULL, &(struct timespec){0, 0}) == SIGPIPE) continue;
  pthread_sigmask(SIG_SETMASK, before, NULL);
}
