/* Opens libmicrohttpd. */
#include "http/microhttpd.h"

#include <dlfcn.h>
#include <pthread.h>

#include "core/status.h"

struct kvl__mhd kvl__mhd;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char problem[256]; /* why it cannot be used; empty if it can */

static void load(void) {
  void *library = dlopen("libmicrohttpd.so.12", RTLD_NOW);
  if (!library) {
    snprintf(problem, sizeof problem, "%s", dlerror());
    return;
  }
#define LOAD(name)                                  \
  *(void **)&kvl__mhd.name = dlsym(library, #name); \
  if (!kvl__mhd.name)                               \
    snprintf(problem, sizeof problem, "libmicrohttpd.so.12 has no %s", #name);
  KVL__MHD_FUNCTIONS(LOAD)
#undef LOAD
}

int kvl__mhd_load(void) {
  pthread_once(&once, load);
  if (!*problem) return KVL_OK;
  return kvl__fail(KVL_ERR_UNSUPPORTED,
                   "http: needs libmicrohttpd, the Debian package libmicrohttpd12: %s",
                   problem);
}
