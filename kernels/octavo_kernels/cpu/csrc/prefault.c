// Touches the pages of a KV cache before they are needed, with time that nobody else wants.
//
// The system gives memory when it is first touched. On bare metal that takes a quarter of a microsecond a page; in a virtual
// machine whose host gives memory late it takes more than ten, and a block of a small model has a hundred pages: a step
// would wait a millisecond for each block that is new. Blocks are handed out in order, so the next ones are known.
// Blocks that it has not come to when they are wanted are touched by all threads of the team (op_touch_blocks): left to the
// cache write, one thread would wait for the system and all others for that thread.
//
// The thread may not be waited for by one that works: this one runs when a core is idle, and may be stopped anywhere. It
// pauses every few pages because a system that has let it run may leave it a core for tens of milliseconds.
#define _GNU_SOURCE
#include "ops.h"

#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

// Adding 0 keeps what a step may be writing there at the same time.
static void touch(char *at) { atomic_fetch_add_explicit((_Atomic char *)at, 0, memory_order_relaxed); }
static char *next_page(char *at) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    return (char *)(((uintptr_t)at / page + 1) * page);
}

void op_touch_blocks(const struct touch_blocks_args *a, struct member *m) {
    for (int64_t half; (half = team_take(m, 2 * a->count)) >= 0; team_done(m)) {
        char *base = (char *)a->caches[half / 2] + half % 2 * a->num_blocks * a->block_bytes, *at = base + a->first * a->block_bytes;
        for (; at < base + a->end * a->block_bytes; at = next_page(at)) touch(at);
    }
    team_wait(m, 2 * a->count);
}

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#define AT_A_TIME 4  // blocks
#define PAGES 32     // between two pauses
#define STOP (~0u)

struct prefault {
    pthread_t thread;
    atomic_uint wanted;  // blocks [0, wanted) shall be there, or STOP; a futex
    atomic_llong done;   // blocks [0, done) are
    int64_t count, num_blocks, block_bytes, touched;
    char *caches[];
};

static void touch_gently(struct prefault *p, char *at, const char *end) {
    for (; at < end && atomic_load(&p->wanted) != STOP; at = next_page(at)) {
        touch(at);
        if (++p->touched % PAGES == 0) usleep(100);
    }
}

static void *run(void *data) {
    struct prefault *p = data;
    const struct sched_param none = {0};
    sched_setscheduler(0, SCHED_IDLE, &none);  // if that is refused it is an ordinary thread, which is no harm
    for (int64_t next = 0; next < p->num_blocks;) {
        unsigned wanted = atomic_load(&p->wanted);
        if (wanted == STOP) break;
        if (next >= (int64_t)wanted) {
            syscall(SYS_futex, &p->wanted, FUTEX_WAIT_PRIVATE, wanted, NULL, NULL, 0);
            continue;
        }
        int64_t end = next + AT_A_TIME < (int64_t)wanted ? next + AT_A_TIME : (int64_t)wanted;
        for (int64_t half = 0; half < 2 * p->count; half++) {
            char *base = p->caches[half / 2] + half % 2 * p->num_blocks * p->block_bytes;
            touch_gently(p, base + next * p->block_bytes, base + end * p->block_bytes);
        }
        next = end;
        atomic_store(&p->done, next);
    }
    return NULL;
}

static void want(struct prefault *p, unsigned blocks) {
    atomic_store(&p->wanted, blocks);
    syscall(SYS_futex, &p->wanted, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

// caches: base addresses of `count` layers, each [2, num_blocks, block_bytes]. NULL when there is no thread to be had.
EXPORT void *oct_prefault_start(void *const *caches, int64_t count, int64_t num_blocks, int64_t block_bytes) {
    struct prefault *p = calloc(1, sizeof(struct prefault) + (size_t)count * sizeof(char *));
    if (!p) return NULL;
    p->count = count, p->num_blocks = num_blocks, p->block_bytes = block_bytes;
    memcpy(p->caches, caches, (size_t)count * sizeof(char *));
    if (pthread_create(&p->thread, NULL, run, p)) {
        free(p);
        return NULL;
    }
    return p;
}

// Blocks [0, blocks) are wanted. Returns at once.
EXPORT void oct_prefault_until(void *prefault, int64_t blocks) {
    struct prefault *p = prefault;
    want(p, (unsigned)(blocks < p->num_blocks ? blocks : p->num_blocks));
}

// How many blocks, from the first on, are there.
EXPORT int64_t oct_prefault_done(void *prefault) { return atomic_load(&((struct prefault *)prefault)->done); }

// Returns when the thread has ended: the caches may be freed then.
EXPORT void oct_prefault_stop(void *prefault) {
    struct prefault *p = prefault;
    want(p, STOP);
    pthread_join(p->thread, NULL);
    free(p);
}
#else
EXPORT void *oct_prefault_start(void *const *caches, int64_t count, int64_t num_blocks, int64_t block_bytes) {
    (void)caches, (void)count, (void)num_blocks, (void)block_bytes;
    return NULL;
}
EXPORT void oct_prefault_until(void *prefault, int64_t blocks) { (void)prefault, (void)blocks; }
EXPORT int64_t oct_prefault_done(void *prefault) {
    (void)prefault;
    return 0;
}
EXPORT void oct_prefault_stop(void *prefault) { (void)prefault; }
#endif
