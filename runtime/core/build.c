/* Tells what the library was built from. It is a file of its own because sources.h changes
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

const char *kvl__build(void) { return CONFIG ", gcc " __VERSION__ ", sources " KVL_SOURCES; }
