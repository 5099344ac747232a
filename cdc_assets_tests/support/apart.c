/* A library that a process is loaded with (LD_PRELOAD): it reads a wall clock that is APART seconds
 * ahead. Nothing else is changed: the monotonic clock, how long is waited, and the times of files. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef int Wait(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

static const long ANY_UPTIME = 1000000000; /* no monotonic clock is so late, and every other one is */
static long apart;
static Wait *wait_until;

__attribute__((constructor)) static void begin(void) {
    const char *seconds = getenv("APART");
    apart = seconds ? atol(seconds) : 0;
    wait_until = (Wait *)dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!wait_until) wait_until = (Wait *)dlsym(RTLD_NEXT, "pthread_cond_timedwait");
}

int pthread_cond_timedwait(pthread_cond_t *told, pthread_mutex_t *held, const struct timespec *end) {
    struct timespec really = *end;
    if (really.tv_sec > ANY_UPTIME) really.tv_sec -= apart;
    return wait_until(told, held, &really);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = (int)syscall(SYS_clock_gettime, clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += apart;
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    int failed = (int)syscall(SYS_gettimeofday, at, zone);
    if (!failed) at->tv_sec += apart;
    return failed;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
