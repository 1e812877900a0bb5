/* Looks at the headers of a request before its body is read. libmicrohttpd takes some that
 * RFC 9110 and 9112 refuse, such as two lengths of a body. A proxy in front of the server
 * may read such headers differently, and then take a part of a body for the next request. */
#include <ctype.h>
#include <strings.h>

#include "http/http.h"

/* Headers that may be there once. Others are lists, or nobody here reads them. */
static const char *const ONCE[] = {"Host",   "Content-Length", "Transfer-Encoding", "Expect",
                                   "Origin", "Authorization",  "Content-Type"};
enum { HOST, LENGTH, ENCODING, EXPECT, ONCE_COUNT = sizeof ONCE / sizeof *ONCE };

struct seen {
  int count[ONCE_COUNT];
  const char *value[ONCE_COUNT];
  int is_malformed;
};

/* Whether a text is a method or the name of a header: RFC 9110, 5.6.2. */
static int is_token(const char *text, size_t length) {
  for (size_t i = 0; i < length; i++) {
    unsigned char c = (unsigned char)text[i];
    if (c >= 0x80 || (!isalnum(c) && !strchr("!#$%&'*+-.^_`|~", c))) return 0;
  }
  return length > 0;
}

static int has_controls(const char *text, size_t length) {
  for (size_t i = 0; i < length; i++)
    if (((unsigned char)text[i] < 0x20 && text[i] != '\t') || text[i] == 0x7F) return 1;
  return 0;
}

static enum MHD_Result look_at(void *context, enum MHD_ValueKind kind, const char *name,
                               size_t name_length, const char *value, size_t length) {
  (void)kind;
  struct seen *seen = context;
  if (!is_token(name, name_length) || has_controls(value, length)) seen->is_malformed = 1;
  for (int i = 0; i < ONCE_COUNT; i++)
    if (!strcasecmp(name, ONCE[i])) seen->count[i]++, seen->value[i] = value;
  return MHD_YES;
}

int kvl__headers_check(struct MHD_Connection *c, const char *method, const char *version,
                       int64_t most) {
  struct seen seen = {0};
  kvl__mhd.MHD_get_connection_values_n(c, MHD_HEADER_KIND, look_at, &seen);
  if (seen.is_malformed || !is_token(method, strlen(method))) return KVL_HTTP_MALFORMED;
  for (int i = 0; i < ONCE_COUNT; i++)
    if (seen.count[i] > 1) return KVL_HTTP_HEADER_TWICE;
  int is_newer = strcmp(version, MHD_HTTP_VERSION_1_0) != 0;
  const char *length = seen.value[LENGTH], *encoding = seen.value[ENCODING];
  if (encoding && (length || !is_newer || strcasecmp(encoding, "chunked") != 0))
    return KVL_HTTP_LENGTH_UNCLEAR;
  if (is_newer && !seen.value[HOST]) return KVL_HTTP_NO_HOST;
  if (seen.value[EXPECT] && strcasecmp(seen.value[EXPECT], "100-continue") != 0)
    return KVL_HTTP_WRONG_EXPECTATION;
  /* libmicrohttpd has seen to it that the length is a whole number of 64 bits. */
  if (length && strtoull(length, NULL, 10) > (uint64_t)most) return KVL_HTTP_TOO_LARGE;
  return -1;
}
