// Preloaded library that shifts the time of a server by the number of seconds in the file
// $TIDEGATE_TEST_CLOCK.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    long seconds = 0;
    FILE *file = fopen(getenv("TIDEGATE_TEST_CLOCK"), "r");
    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
        fclose(file);
    }
    return seconds;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec real;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &real);
    now->tv_sec = real.tv_sec + shift();
    now->tv_usec = real.tv_nsec / 1000;
    return 0;
}
