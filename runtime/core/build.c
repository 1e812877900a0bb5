/* Tells what the library was built from, and what code at run time is compiled with. It is a file of its own because sources.h changes
 * with every change of a source. */
#include "core/status.h"
#include "sources.h"

#ifdef KVL_HOSTILE
#define CONFIG "hostile"
#elif defined KVL_DEBUG
#define CONFIG "debug"
#else
#define CONFIG "release"
#endif

const char *kvl_code_headers(void) { return KVL_HEADERS; }
const char *kvl__build(void) { return CONFIG ", gcc " __VERSION__ ", sources " KVL_SOURCES; }
