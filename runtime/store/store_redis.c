/* redis:// and, over TLS, rediss://: records in a Redis server, by hiredis. The commands are SET, GET, EXISTS and
 * DEL, and a record's key is the string "kvlab:" followed by its name in hex. The server
 * evicts by itself, according to its maxmemory and its policy.
 *
 * A thread takes an idle connection or makes a new one, and puts it back afterwards. A
 * connection on which anything goes wrong is closed, because the next reply could belong
 * to an earlier command. The first failure begins an outage, which counts as one error:
 * all idle connections are closed, and until the outage is over every call misses at once.
 * From time to time, after waits that double, one thread tries to connect and to get an
 * answer to a PING; if it succeeds, the outage is over.
 *
 * Without TLS, commands are sent by sendmsg. It sends straight from the block, and it does
 * not raise SIGPIPE, as hiredis' own write does when the server has closed the connection. */
#include <ctype.h>
#include <errno.h>
#include <hiredis/hiredis.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>

#include "store/store.h"
#include "store/store_redis_tls.h"

enum {
  IDLE_MAX = 8,
  PORT = 6379,
  PARTS_MAX = 5,
  KEY_BYTES = 6 + 2 * 20,
  REPLY_MAX = 64 << 10, /* bytes of a reply beyond those of the record that it should have */
  FIRST_WAIT_MS = 100,
  LAST_WAIT_MS = 5000,
};

struct link {
  redisContext *context;
  int64_t outages; /* number of outages before it was made */
};

struct redis {
  char host[256], user[128], password[256];
  char words[288]; /* "redis store: host:port", for messages */
  int port, db;
  void *tls; /* NULL: none */
  pthread_mutex_t lock;
  struct link idle[IDLE_MAX];
  int idle_count, is_out, wait_ms;
  int64_t outages, retry_ns;
};

/* ---- url ------------------------------------------------------------------------------- */

/* Copies the n bytes at `from` and turns every %XX into a byte. Returns 1, or 0 if they do
 * not fit, XX is not hex or a byte is 0. */
static int unescape(const char *from, size_t n, char *to, size_t size) {
  size_t length = 0;
  for (size_t i = 0; i < n; i++) {
    char c = from[i];
    if (c == '%') {
      if (n - i < 3 || !isxdigit((unsigned char)from[i + 1]) ||
          !isxdigit((unsigned char)from[i + 2]))
        return 0;
      c = (char)strtol((char[]){from[i + 1], from[i + 2], 0}, NULL, 16);
      i += 2;
    }
    if (length + 1 >= size || !c) return 0;
    to[length++] = c;
  }
  to[length] = 0;
  return 1;
}

/* Reads a number of at most `max` that ends at `end`. Returns -1 if there is none. */
static int number(const char *text, const char *end, int max) {
  int n = 0;
  if (text == end || end - text > 9) return -1;
  for (; text < end; text++) {
    if (!isdigit((unsigned char)*text)) return -1;
    n = n * 10 + *text - '0';
  }
  return n <= max ? n : -1;
}

/* Parses //[user:password@]host[:port][/db], where host may be in brackets. Returns NULL,
 * or what was expected. */
static const char *parse(struct redis *r, const char *rest) {
  if (strncmp(rest, "//", 2)) return "// after redis:";
  const char *host = rest + 2, *end = host + strcspn(host, "/"), *at = NULL;
  for (const char *p = host; p < end; p++)
    if (*p == '@') at = p;
  if (at) {
    const char *colon = memchr(host, ':', (size_t)(at - host));
    const char *user_end = colon ? colon : at;
    if (!unescape(host, (size_t)(user_end - host), r->user, sizeof r->user) ||
        (colon &&
         !unescape(colon + 1, (size_t)(at - colon - 1), r->password, sizeof r->password)))
      return "user:password before @, with / @ and % in them as %2F, %40 and %25";
    host = at + 1;
  }
  const char *close = *host == '[' ? memchr(host, ']', (size_t)(end - host)) : NULL;
  const char *name_end = close ? close + 1 : memchr(host, ':', (size_t)(end - host));
  if (!name_end) name_end = end;
  size_t length = (size_t)(name_end - host) - (close ? 2 : 0);
  if (length == 0 || length >= sizeof r->host) return "a host";
  memcpy(r->host, host + (close ? 1 : 0), length);
  r->port = name_end == end ? PORT : *name_end == ':' ? number(name_end + 1, end, 65535) : -1;
  if (r->port < 1) return "a port of 1 ... 65535";
  r->db = *end && end[1] ? number(end + 1, strchr(end, 0), 1 << 20) : 0;
  return r->db < 0 ? "the number of a database after /" : NULL;
}

/* Takes the password from $KVLAB_REDIS_PASSWORD, or from the first line of the file
 * $KVLAB_REDIS_PASSWORD_FILE. Both are ignored if the URL has a password. */
static int find_password(struct redis *r) {
  const char *given = getenv("KVLAB_REDIS_PASSWORD");
  const char *path = getenv("KVLAB_REDIS_PASSWORD_FILE");
  char line[sizeof r->password + 2] = "";
  if (*r->password) return KVL_OK;
  if (given && *given) {
    path = "$KVLAB_REDIS_PASSWORD";
  } else if (path && *path) {
    FILE *file = fopen(path, "re");
    if (!file || (!fgets(line, sizeof line, file) && ferror(file))) {
      int code = errno;
      if (file) fclose(file);
      return kvl__fail(KVL_ERR_IO, "redis store: KVLAB_REDIS_PASSWORD_FILE: %s: %s", path,
                       strerror(code));
    }
    fclose(file);
    line[strcspn(line, "\r\n")] = 0;
    if (!*line)
      return kvl__fail(KVL_ERR_INVALID,
                       "redis store: %s: the first line is empty, expected "
                       "a password",
                       path);
    given = line;
  } else {
    if (!*r->user) return KVL_OK;
    return kvl__fail(
        KVL_ERR_INVALID,
        "redis store: url has a user and no password, expected user:password before "
        "@, or a password in KVLAB_REDIS_PASSWORD or KVLAB_REDIS_PASSWORD_FILE");
  }
  if (strlen(given) >= sizeof r->password)
    return kvl__fail(KVL_ERR_INVALID, "redis store: %s: the password has more than %zu bytes",
                     path, sizeof r->password - 1);
  strcpy(r->password, given);
  return KVL_OK;
}

/* Replaces the password in a message by stars. Servers quote the command that they refuse. */
static void mask(const struct redis *r, char *text) {
  size_t n = strlen(r->password);
  for (char *at = text; n > 0 && (at = strstr(at, r->password)); at += n) memset(at, '*', n);
}

/* ---- one connection -------------------------------------------------------------------- */

/* Sends all bytes of the parts by the deadline, and changes the parts meanwhile. Returns 0
 * or an errno. */
static int send_parts(int fd, struct iovec *parts, int n, int64_t deadline) {
  while (n > 0) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n};
    ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN ? ETIMEDOUT : errno;
    for (; n > 0 && (size_t)sent >= parts->iov_len; parts++, n--)
      sent -= (ssize_t)parts->iov_len;
    if (n > 0) {
      parts->iov_base = (char *)parts->iov_base + sent;
      parts->iov_len -= (size_t)sent;
      if (kvl_clock_ns() > deadline) return ETIMEDOUT;
    }
  }
  return 0;
}

/* The same through TLS, by way of hiredis' buffer. */
static int send_by_tls(redisContext *c, const struct iovec *parts, int n, int64_t deadline) {
  int is_done = 0;
  for (int i = 0; i < n; i++)
    if (redisAppendFormattedCommand(c, parts[i].iov_base, parts[i].iov_len) != REDIS_OK)
      return ENOMEM;
  while (!is_done) {
    if (redisBufferWrite(c, &is_done) != REDIS_OK) return EPROTO;
    if (!is_done && kvl_clock_ns() > deadline) return ETIMEDOUT;
  }
  return 0;
}

static int send_all(const struct redis *r, redisContext *c, struct iovec *parts, int n,
                    int64_t deadline) {
  return r->tls ? send_by_tls(c, parts, n, deadline) : send_parts(c->fd, parts, n, deadline);
}

/* Looks at the first line of the next reply, of which the reader has read nothing yet.
 * Returns 1 if the reply is one of a few kinds and has at most `most` bytes, 0 if the line
 * is not complete, or -1. */
static int check_head(const redisReader *reader, size_t most) {
  const char *text = reader->buf + reader->pos;
  size_t n = reader->len - reader->pos;
  if (n == 0) return 0;
  if (!strchr("+-:$", *text) || !*text) return -1;
  const char *end = memchr(text, '\r', n);
  if (!end) return n > REPLY_MAX ? -1 : 0;
  if (*text != '$') return end - text > REPLY_MAX ? -1 : 1;
  if (end - text == 3 && !memcmp(text, "$-1", 3)) return 1; /* no record */
  int bytes = number(text + 1, end, 999999999);
  return bytes >= 0 && (size_t)bytes <= most ? 1 : -1;
}

/* Receives the next reply, a text of at most `most` bytes, by the deadline. Returns 0, an
 * errno, EMSGSIZE for a longer reply, or EPROTO, which c->errstr explains. */
static int receive(redisContext *c, int64_t deadline, size_t most, redisReply **out) {
  void *reply = NULL;
  for (int is_fit = 0;;) {
    if (!is_fit && (is_fit = check_head(c->reader, most)) < 0) return EMSGSIZE;
    if (is_fit && redisGetReplyFromReader(c, &reply) != REDIS_OK) return EPROTO;
    if (reply) break;
    if (kvl_clock_ns() > deadline) return ETIMEDOUT;
    errno = 0;
    if (redisBufferRead(c) != REDIS_OK) return errno == EAGAIN ? ETIMEDOUT : EPROTO;
  }
  *out = reply;
  return 0;
}

/* Sends a command of n words and receives its reply. */
static int ask(const struct redis *r, redisContext *c, int64_t deadline, int n,
               const char **words, redisReply **out) {
  char *text;
  int length = redisFormatCommandArgv(&text, n, words, NULL);
  if (length < 0) return ENOMEM;
  int code = send_all(r, c, &(struct iovec){text, (size_t)length}, 1, deadline);
  redisFreeCommand(text);
  return code ? code : receive(c, deadline, REPLY_MAX, out);
}

static const char *words_of(redisContext *c, int code) {
  return code == ETIMEDOUT  ? "no answer in time"
         : code == EMSGSIZE ? "a reply that is none to a store, or is longer than the record"
         : code == ENOMSG   ? "a reply of another kind than the command has"
         : code == EPROTO   ? c->errstr
                            : strerror(code);
}

/* Sends a command on a new connection. Returns 1 if the reply is a status, or 0 with the
 * reason in `why`. */
static int greet(const struct redis *r, redisContext *c, int64_t deadline, int n,
                 const char **words, char *why, size_t size) {
  redisReply *reply = NULL;
  int code = ask(r, c, deadline, n, words, &reply);
  int good = !code && reply->type == REDIS_REPLY_STATUS;
  if (code) snprintf(why, size, "%s", words_of(c, code));
  else if (!good) snprintf(why, size, "%s: %s", words[0], reply->str ? reply->str : "?");
  if (!code) freeReplyObject(reply);
  return good;
}

/* Logs in, chooses the database, and waits for the answer to a PING. Returns 1, or 0 with
 * the reason in `why`. */
static int log_in(const struct redis *r, redisContext *c, int64_t deadline, char *why,
                  size_t size) {
  char db[16];
  snprintf(db, sizeof db, "%d", r->db);
  const char *full[] = {"AUTH", r->user, r->password}, *old[] = {"AUTH", r->password};
  const char *select[] = {"SELECT", db}, *ping[] = {"PING"};
  if (*r->password &&
      !greet(r, c, deadline, *r->user ? 3 : 2, *r->user ? full : old, why, size))
    return 0;
  if (r->db && !greet(r, c, deadline, 2, select, why, size)) return 0;
  return greet(r, c, deadline, 1, ping, why, size);
}

/* Connects and logs in. Returns the connection, or NULL with the reason in `why`. */
static redisContext *dial(const kvl_store *store, char *why, size_t size) {
  const struct redis *r = store->state;
  struct timeval limit = {store->timeout_ms / 1000, store->timeout_ms % 1000 * 1000};
  int64_t deadline = kvl_clock_ns() + store->timeout_ms * (int64_t)1000000;
  sigset_t before;
  kvl__sigpipe_hold(&before);
  redisContext *c = redisConnectWithTimeout(r->host, r->port, limit);
  if (!c || c->err) {
    snprintf(why, size, "%s", c ? c->errstr : "out of memory");
  } else if (redisSetTimeout(c, limit) != REDIS_OK) {
    snprintf(why, size, "%s", c->errstr);
  } else if ((!r->tls || kvl__redis_tls_start(r->tls, c, r->host, why, size)) &&
             log_in(r, c, deadline, why, size)) {
    kvl__sigpipe_release(&before);
    return c;
  }
  if (c) redisFree(c);
  kvl__sigpipe_release(&before);
  mask(r, why);
  return NULL;
}

/* ---- all connections ------------------------------------------------------------------- */

/* Call this when a connection that was made after `outages` outages has failed, or when
 * none could be made. The first such call since that outage begins the next one. */
static void lost(kvl_store *store, int64_t outages, const char *why) {
  struct redis *r = store->state;
  struct link idle[IDLE_MAX];
  int count = 0;
  pthread_mutex_lock(&r->lock);
  int is_first = outages == r->outages && !r->is_out;
  if (is_first) {
    r->is_out = 1;
    r->outages++;
    r->wait_ms = FIRST_WAIT_MS;
    r->retry_ns = kvl_clock_ns() + r->wait_ms * (int64_t)1000000;
    count = r->idle_count;
    memcpy(idle, r->idle, sizeof idle);
    r->idle_count = 0;
  }
  pthread_mutex_unlock(&r->lock);
  for (int i = 0; i < count; i++) redisFree(idle[i].context);
  if (is_first) kvl__store_trouble(store, &store->errors, "%s: %s", r->words, why);
}

/* Takes an idle connection or makes a new one. Returns 1, or 0 if there is none, as during
 * an outage. */
static int take(kvl_store *store, struct link *out) {
  struct redis *r = store->state;
  char why[160];
  pthread_mutex_lock(&r->lock);
  int is_retry = r->is_out, may_try = !is_retry || kvl_clock_ns() >= r->retry_ns;
  struct link link = {NULL, r->outages};
  if (r->idle_count > 0) {
    link = r->idle[--r->idle_count];
  } else if (is_retry && may_try) { /* until retry_ns, all other threads miss */
    r->wait_ms = r->wait_ms * 2 < LAST_WAIT_MS ? r->wait_ms * 2 : LAST_WAIT_MS;
    r->retry_ns = kvl_clock_ns() + (r->wait_ms + store->timeout_ms) * (int64_t)1000000;
  }
  pthread_mutex_unlock(&r->lock);
  if (!link.context && may_try) {
    link.context = dial(store, why, sizeof why);
    pthread_mutex_lock(&r->lock);
    if (link.context) r->is_out = 0;
    else if (is_retry) r->retry_ns = kvl_clock_ns() + r->wait_ms * (int64_t)1000000;
    pthread_mutex_unlock(&r->lock);
    if (!link.context && is_retry) kvl__store_trouble(store, NULL, "%s: %s", r->words, why);
    else if (!link.context) lost(store, link.outages, why);
  }
  *out = link;
  return link.context != NULL;
}

static void give_back(kvl_store *store, struct link link) {
  struct redis *r = store->state;
  pthread_mutex_lock(&r->lock);
  int keep = link.outages == r->outages && r->idle_count < IDLE_MAX;
  if (keep) r->idle[r->idle_count++] = link;
  pthread_mutex_unlock(&r->lock);
  if (!keep) redisFree(link.context);
}

/* Sends the parts on a connection and passes each of the n replies, of at most `most` bytes,
 * to `each`: replies of `type`, errors, which are counted, and for a text that there is none.
 * Any other reply belongs to another command. Returns 1 if all of them came. */
static int exchange(kvl_store *store, struct iovec *parts, int parts_count, int n, int type,
                    size_t most, void (*each)(void *to, int i, const redisReply *reply),
                    void *to) {
  struct redis *r = store->state;
  struct link link;
  sigset_t before;
  if (!take(store, &link)) return 0;
  int64_t deadline = kvl_clock_ns() + store->timeout_ms * (int64_t)1000000;
  if (r->tls) kvl__sigpipe_hold(&before);
  int code = send_all(r, link.context, parts, parts_count, deadline);
  for (int i = 0; !code && i < n; i++) {
    redisReply *reply;
    code = receive(link.context, deadline, most, &reply);
    if (code) break;
    if (reply->type == REDIS_REPLY_ERROR)
      kvl__store_trouble(store, &store->errors, "%s: %s", r->words, reply->str);
    else if (reply->type != type &&
             !(type == REDIS_REPLY_STRING && reply->type == REDIS_REPLY_NIL))
      code = ENOMSG;
    if (!code) each(to, i, reply);
    freeReplyObject(reply);
  }
  if (code) {
    lost(store, link.outages, words_of(link.context, code));
    redisFree(link.context);
  } else {
    give_back(store, link);
  }
  if (r->tls) kvl__sigpipe_release(&before);
  return !code;
}

/* ---- the backend ----------------------------------------------------------------------- */

static void key_of(const struct kvl__name *name, char out[KEY_BYTES + 1]) {
  strcpy(out, "kvlab:");
  for (size_t i = 0; i < sizeof name->bytes; i++)
    sprintf(out + 6 + 2 * i, "%02x", name->bytes[i]);
}

/* Writes the command "*2 $n VERB $46 kvlab:..." and returns its length. */
static int format(char *out, size_t size, const char *verb, const struct kvl__name *name) {
  char key[KEY_BYTES + 1];
  key_of(name, key);
  return snprintf(out, size, "*2\r\n$%zu\r\n%s\r\n$%d\r\n%s\r\n", strlen(verb), verb,
                  KEY_BYTES, key);
}

struct taken {
  kvl_store *store;
  const struct kvl__name *name;
  void *out;
  size_t n;
  int status;
};

static void take_status(void *to, int i, const redisReply *reply) {
  (void)i;
  *(int *)to = reply->type == REDIS_REPLY_STATUS;
}

static void take_integer(void *to, int i, const redisReply *reply) {
  ((uint8_t *)to)[i] = reply->type == REDIS_REPLY_INTEGER && reply->integer > 0;
}

static void take_count(void *to, int i, const redisReply *reply) {
  (void)i;
  if (reply->type == REDIS_REPLY_INTEGER) *(int64_t *)to = reply->integer;
}

static void take_record(void *to, int i, const redisReply *reply) {
  struct taken *t = to;
  (void)i;
  if (reply->type == REDIS_REPLY_STRING)
    t->status = kvl__store_accept(t->store, t->name, reply->str, (size_t)reply->len, t->out,
                                  t->n);
  else if (reply->type == REDIS_REPLY_ERROR && !strncmp(reply->str, "WRONGTYPE", 9))
    t->status = KVL__DAMAGED; /* a list, say */
}

static int redis_put(kvl_store *store, const struct kvl__name *name,
                     const struct kvl__head *head, const void *bytes) {
  char key[KEY_BYTES + 1], text[KEY_BYTES + 64];
  int status = 0;
  key_of(name, key);
  int length = snprintf(text, sizeof text, "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%llu\r\n",
                        KEY_BYTES, key, (unsigned long long)(sizeof *head + head->bytes));
  struct iovec parts[] = {{text, (size_t)length},
                          {(void *)head, sizeof *head},
                          {(void *)bytes, head->bytes},
                          {"\r\n", 2}};
  exchange(store, parts, 4, 1, REDIS_REPLY_STATUS, REPLY_MAX, take_status, &status);
  return status;
}

static int redis_get(kvl_store *store, const struct kvl__name *name, void *out, size_t n) {
  char text[KEY_BYTES + 64];
  struct taken taken = {store, name, out, n, 0};
  struct iovec part = {text, (size_t)format(text, sizeof text, "GET", name)};
  exchange(store, &part, 1, 1, REDIS_REPLY_STRING, sizeof(struct kvl__head) + n + REPLY_MAX,
           take_record, &taken);
  return taken.status;
}

static void redis_find(kvl_store *store, const struct kvl__name *names, int n,
                       uint8_t *found) {
  enum { AT_ONCE = 64 };
  char text[AT_ONCE * (KEY_BYTES + 64)];
  memset(found, 0, (size_t)n);
  for (int at = 0; at < n; at += AT_ONCE) {
    int count = n - at < AT_ONCE ? n - at : AT_ONCE;
    size_t length = 0;
    for (int i = 0; i < count; i++)
      length += (size_t)format(text + length, sizeof text - length, "EXISTS", &names[at + i]);
    struct iovec part = {text, length};
    if (!exchange(store, &part, 1, count, REDIS_REPLY_INTEGER, REPLY_MAX, take_integer,
                  found + at))
      return;
  }
}

static int redis_remove(kvl_store *store, const struct kvl__name *name) {
  char text[KEY_BYTES + 64];
  uint8_t removed = 0;
  struct iovec part = {text, (size_t)format(text, sizeof text, "DEL", name)};
  exchange(store, &part, 1, 1, REDIS_REPLY_INTEGER, REPLY_MAX, take_integer, &removed);
  return removed;
}

static void redis_held(kvl_store *store, kvl_store_stats *out) {
  struct iovec part = {"*1\r\n$6\r\nDBSIZE\r\n", 16};
  exchange(store, &part, 1, 1, REDIS_REPLY_INTEGER, REPLY_MAX, take_count, &out->records);
}

static void redis_close(kvl_store *store) {
  struct redis *r = store->state;
  for (int i = 0; i < r->idle_count; i++) redisFree(r->idle[i].context);
  kvl__redis_tls_close(r->tls);
  pthread_mutex_destroy(&r->lock);
  free(r);
}

static int open_with(kvl_store *store, const char *rest, int with_tls) {
  char why[160];
  struct link link = {NULL, 0};
  if (store->capacity)
    return kvl__fail(KVL_ERR_INVALID,
                     "redis store: capacity is %lld, expected 0: the "
                     "server's maxmemory sets the limit",
                     (long long)store->capacity);
  struct redis *r = kvl__malloc(sizeof *r, "a redis store");
  if (!r) return KVL_ERR_NO_MEMORY;
  memset(r, 0, sizeof *r);
  store->state = r;
  pthread_mutex_init(&r->lock, NULL);
  const char *wrong = parse(r, rest);
  int status = KVL_OK;
  if (wrong) {
    status = kvl__fail(KVL_ERR_INVALID, "redis store: url: expected %s", wrong);
  } else if ((status = find_password(r)) >= 0 &&
             (!with_tls || (status = kvl__redis_tls_open(&r->tls)) >= 0)) {
    snprintf(r->words, sizeof r->words, "%s store: %s:%d", store->backend->scheme, r->host,
             r->port);
    link.context = dial(store, why, sizeof why);
    if (!link.context) status = kvl__fail(KVL_ERR_IO, "%s: %s", r->words, why);
  }
  if (status < 0) redis_close(store);
  else give_back(store, link);
  return status;
}

static int redis_open(kvl_store *store, const char *rest) {
  return open_with(store, rest, 0);
}
static int rediss_open(kvl_store *store, const char *rest) {
  return open_with(store, rest, 1);
}

#define BACKEND(scheme_, open_)                                                 \
  {                                                                             \
    .scheme = scheme_, .form = scheme_ "://[user[:password]@]host[:port][/db]", \
    .open = open_, .close = redis_close, .put = redis_put, .get = redis_get,    \
    .find = redis_find, .remove = redis_remove, .held = redis_held,             \
  }

const struct kvl__store_backend kvl__store_redis = BACKEND("redis", redis_open);
const struct kvl__store_backend kvl__store_rediss = BACKEND("rediss", rediss_open);
