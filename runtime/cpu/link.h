/* Modelled time on the CPU device, while kvl_cpu_link emulates a link. Only the thread that
 * submits work calls these. */
#ifndef KVL_CPU_LINK_H
#define KVL_CPU_LINK_H

#include "core/backend.h"
#include "core/status.h"

/* A time on the device: modelled time while the link is on, kvl_clock_ns while it is off.
 * Every call of kvl_cpu_link begins an epoch, whose times start at zero. */
struct kvl__time {
  int64_t ns, epoch;
};

int kvl__link_on(void);
int64_t kvl__link_epoch(void);
/* ", emulated link 55 GB/s + 10 us"; nothing when it is off. */
void kvl__link_describe(char *text, size_t size);

/* The functions below expect that the link is on. Times of an earlier epoch are in the past.
 * `clock` is the clock of one queue. */
struct kvl__time kvl__link_now(struct kvl__time *clock);
/* Advances the clock after a job that took `ns`: by that time or, if the job moved bytes
 * over the link, by the time that the link needs for them. */
void kvl__link_advance(struct kvl__time *clock, int64_t ns, const struct kvl_cpu_job *job);
/* The queue waits for `time`. */
void kvl__link_wait(struct kvl__time *clock, struct kvl__time time);
/* Records that the host waits for `time`: work that it submits from now on begins no
 * earlier. */
void kvl__link_host_wait(struct kvl__time time);

#endif
