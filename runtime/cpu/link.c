/* The emulated link between the CPU device's memory and pinned memory. It models time
 * instead of slowing copies down, because one thread copies at 5 to 10 GB/s and cannot stand
 * for a link of 55.
 *
 * Every queue has a clock. A job advances it by the wall time that the job took. A job that
 * moved bytes over the link ends instead at
 *   end = max(begin + latency, free[direction]) + bytes / rate;  free[direction] = end
 * Here free is the end of the last transfer in that direction. One transfer at a time has
 * the link, in the order of submission; latencies overlap, and the two directions are
 * independent. A queue that waits for a mark continues at the later of both clocks. The
 * host's own time does not count, but its waits do: work that is submitted after a wait
 * begins no earlier than the end of the wait. Otherwise a program that reads a result and
 * then asks for blocks would get them from the past.
 *
 * Every call of kvl_cpu_link starts all clocks from 0 in a new epoch. Times of different
 * epochs are never compared: kvl_event_elapsed_us refuses them. */
#include <math.h>

#include "cpu/link.h"

static struct {
  double gb_s, us; /* gb_s 0: off */
  int64_t epoch;
  int64_t host, free[2]; /* ns */
} state;

int kvl_cpu_link(double gb_s, double us) {
  /* Slower and later than these, int64 nanoseconds could overflow. */
  static const double gb_s_min = 1e-6, us_max = 1e9;
  if (!isfinite(gb_s) || (gb_s != 0 && gb_s < gb_s_min))
    return kvl__fail(KVL_ERR_INVALID, "link: gb_s is %g, expected 0 or %g and more", gb_s,
                     gb_s_min);
  if (!(us >= 0 && us <= us_max))
    return kvl__fail(KVL_ERR_INVALID, "link: us is %g, expected 0 ... %g", us, us_max);
  state.gb_s = gb_s;
  state.us = us;
  state.epoch++;
  state.host = state.free[0] = state.free[1] = 0;
  return KVL_OK;
}

int kvl__link_on(void) { return state.gb_s != 0; }
int64_t kvl__link_epoch(void) { return state.epoch; }

void kvl__link_describe(char *text, size_t size) {
  if (kvl__link_on())
    snprintf(text, size, ", emulated link %g GB/s + %g us", state.gb_s, state.us);
  else if (size > 0) text[0] = 0;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

struct kvl__time kvl__link_now(struct kvl__time *clock) {
  if (clock->epoch != state.epoch) *clock = (struct kvl__time){0, state.epoch};
  clock->ns = later(clock->ns, state.host);
  return *clock;
}

void kvl__link_advance(struct kvl__time *clock, int64_t ns, const struct kvl_cpu_job *job) {
  const int64_t begin = kvl__link_now(clock).ns, *bytes = job->bytes_link;
  int64_t end = bytes[0] || bytes[1] ? begin : begin + ns;
  for (int d = 0; d < 2; d++) {
    if (bytes[d] == 0) continue;
    state.free[d] = later(begin + llround(state.us * 1e3), state.free[d]) +
                    llround((double)bytes[d] / state.gb_s);
    end = later(end, state.free[d]);
  }
  clock->ns = end;
}

void kvl__link_wait(struct kvl__time *clock, struct kvl__time time) {
  kvl__link_now(clock);
  if (time.epoch == state.epoch) clock->ns = later(clock->ns, time.ns);
}

void kvl__link_host_wait(struct kvl__time time) {
  if (kvl__link_on() && time.epoch == state.epoch) state.host = later(state.host, time.ns);
}
