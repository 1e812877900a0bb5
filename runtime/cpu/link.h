/* Modelled time on the CPU device, while kvl_cpu_link emulates a link. Only the thread that
 * submits work calls these. */
#ifndef KVL_CPU_LINK_H
#define KVL_CPU_LINK_H

#include "core/backend.h"
#include "core/status.h"

/* A time on the device: modelled while the link is on, of kvl_clock_ns while it is off. Every
 * call of kvl_cpu_link begins an epoch, with a zero of its own. */
struct kvl__time { int64_t ns, epoch; };

int kvl__link_on(void);
int64_t kvl__link_epoch(void);
/* ", emulated link 55 GB/s + 10 us"; nothing when it is off. */
void kvl__link_describe(char *text, size_t size);

/* What follows is about a link that is on; times of an earlier epoch are in the past. `clock`
 * is a queue's own. */
struct kvl__time kvl__link_now(struct kvl__time *clock);
/* A job has run, which took `ns`: the clock advances by that, or by the time on the link of
 * the bytes that the job took over it. */
void kvl__link_advance(struct kvl__time *clock, int64_t ns, const struct kvl_cpu_job *job);
/* The queue waits for `time`. */
void kvl__link_wait(struct kvl__time *clock, struct kvl__time time);
/* The host waits for `time`: what it submits from now on begins no earlier. */
void kvl__link_host_wait(struct kvl__time time);

#endif
