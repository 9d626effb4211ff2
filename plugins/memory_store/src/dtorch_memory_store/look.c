/* What a thread does while it looks: see looking.py. Called without the GIL, which those who are awake need. */

#include <sched.h>
#include <time.h>

enum { WOKEN, TURN };  /* a seat's numbers */

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int is_set(const int *number) {
    return __atomic_load_n(number, __ATOMIC_ACQUIRE);
}

static void pause_a_little(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Give `next` its turn, if there is one. Then look at `seat` until it has its own, for `nanoseconds`; once it is woken,
 * for `more` from then on. Whether it was woken. */
int dtorch_look(int *next, const int *seat, long long nanoseconds, long long more) {
    if (next != 0)
        __atomic_store_n(next + TURN, 1, __ATOMIC_RELEASE);

    long long until = now() + nanoseconds;
    int woken = 0;
    for (;;) {
        for (int i = 0; i < 32; i++) {
            if (is_set(seat + TURN))
                return 1;

            pause_a_little();
        }

        if (!woken && is_set(seat + WOKEN)) {
            woken = 1;
            until = now() + more;
        }

        if (now() >= until)
            return woken;

        sched_yield();
    }
}
