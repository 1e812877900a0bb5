/* Eight threads use one store. store_faults_spec.lua compiles this with the thread
 * sanitizer:
 *   store_threads URL CAPACITY ROUNDS [PID]
 * A record repeats one byte, and its length depends on its key; every record that is read
 * must be like that. PID is the store's server, which is killed half-way: this must count as
 * one error for all threads together. Exits with 1 after printing what is wrong. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvlab.h"

enum { THREADS = 8, KEYS = 24, BYTES_MAX = 40000 };

static kvl_store *store;
static int rounds, server;

static kvl_key key_of(unsigned i) { return (kvl_key){i * 0x9e3779b97f4a7c15u, ~i}; }
static int64_t bytes_of(unsigned i) { return 1 + i * (BYTES_MAX / KEYS); }

static void fail(const char *what) {
  char words[320];
  kvl_store_problem(store, words, sizeof words);
  printf("%s: %s; %s\n", what, kvl_last_error(), words);
  exit(1);
}

/* Every byte equals the next one. (The sanitizer would look at each access of a loop.) */
static void check(const unsigned char *bytes, int64_t n) {
  if (memcmp(bytes, bytes + 1, (size_t)n - 1) != 0) fail("a torn record");
}

static void *work(void *seed) {
  unsigned state = (unsigned)(size_t)seed * 2654435761u + 1;
  unsigned char *bytes = malloc(BYTES_MAX);
  for (int round = 0; round < rounds; round++) {
    state = state * 1664525u + 1013904223u;
    unsigned i = (state >> 8) % KEYS, what = (state >> 20) % 16;
    kvl_key key = key_of(i), run[KEYS];
    kvl_store_stats stats;
    if (server && !seed && round == rounds / 2) kill(server, SIGKILL);
    if (what < 5) {
      memset(bytes, (int)(state >> 24), BYTES_MAX);
      if (kvl_store_put(store, &key, 3, bytes, bytes_of(i)) != 1 && !server) fail("put");
    } else if (what < 13) {
      int found = kvl_store_get(store, &key, 3, bytes, bytes_of(i));
      if (found < 0) fail("get");
      if (found) check(bytes, bytes_of(i));
    } else if (what == 13) {
      for (unsigned k = 0; k < KEYS; k++) run[k] = key_of(k);
      if (kvl_store_find(store, run, KEYS, 3, NULL) < 0) fail("find");
    } else if (what == 14) {
      if (kvl_store_remove(store, &key, 3) < 0) fail("remove");
    } else if (kvl_store_stats_get(store, &stats) < 0 || stats.damaged ||
               stats.errors > (server != 0)) {
      fail("stats");
    } else if (round % 8 == 0 && kvl_store_sync(store) < 0) {
      fail("sync");
    }
  }
  free(bytes);
  return NULL;
}

int main(int count, char **words) {
  pthread_t threads[THREADS];
  kvl_store_stats stats;
  if (count < 4 || kvl_store_open(words[1], atoll(words[2]), 5000, &store) < 0) {
    printf("open: %s\n", kvl_last_error());
    return 1;
  }
  rounds = atoi(words[3]);
  server = count > 4 ? atoi(words[4]) : 0;
  for (size_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  kvl_store_stats_get(store, &stats);
  if (stats.errors != (server != 0)) fail("errors");
  kvl_store_close(store);
  return 0;
}
