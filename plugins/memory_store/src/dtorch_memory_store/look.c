/* What a thread does while it looks: see looking.py. Called without the GIL, which those who are awake need. */

#define _POSIX_C_SOURCE 200809L
#include <sched.h>
#include <time.h>

enum { WOKEN, TURN };                 /* a seat's numbers */
enum { WAS_WOKEN = 1, CROWDED = 2 };  /* what looking found, added up */

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int is_set(const int *number) {
    return __atomic_load_n(number, __ATOMIC_ACQUIRE);
}

static int take(int *cores) {
    if (__atomic_fetch_sub(cores, 1, __ATOMIC_ACQ_REL) > 0)
        return 1;

    __atomic_fetch_add(cores, 1, __ATOMIC_ACQ_REL);
    return 0;
}

static void give(int *cores) {
    __atomic_fetch_add(cores, 1, __ATOMIC_ACQ_REL);
}

static void pause_a_little(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Give `next` its turn, if there is one. Then, if one of `cores` is free, look at `seat` until it has its own turn, for
 * `nanoseconds`; once it is woken, for `more` from then on. Who is woken leaves its core to its waker, which may look
 * next. In between the core is offered to others, and if that takes more than `crowd` nanoseconds, that was all.
 * What was found. The name's number changes with the arguments. */
int dtorch_look_1(int *cores, int *next, const int *seat, long long nanoseconds, long long more, long long crowd) {
    if (next != 0)
        __atomic_store_n(next + TURN, 1, __ATOMIC_RELEASE);

    if (!take(cores))
        return 0;

    long long until = now() + nanoseconds;
    int found = 0, has_turn = 0;
    for (;;) {
        for (int i = 0; i < 32 && !has_turn; i++) {
            has_turn = is_set(seat + TURN);
            pause_a_little();
        }

        if (!(found & WAS_WOKEN) && is_set(seat + WOKEN)) {
            found |= WAS_WOKEN;
            give(cores);
            until = now() + more;
        }

        long long before = now();
        if (has_turn || before >= until)
            break;

        sched_yield();
        if (now() - before > crowd) {
            found |= CROWDED;
            break;
        }
    }

    if (!(found & WAS_WOKEN))
        give(cores);

    return found;
}
