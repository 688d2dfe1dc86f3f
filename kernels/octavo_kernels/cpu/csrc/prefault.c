// Touches the pages of a KV cache before they are needed, in idle time.
//
// The system provides a page of memory when it is first touched. On bare metal that takes a quarter of a microsecond; in a
// virtual machine whose host provides memory lazily it takes more than ten. A block of a small model has about a hundred pages,
// so a step would wait a millisecond for each new block. Blocks are handed out in order, so the next ones are known.
// Blocks that are needed before this thread has reached them are touched by the whole team (op_touch_blocks). Otherwise the
// cache write would touch them, and all threads would wait for the one that waits for the system.
//
// No working thread may wait for this one: it runs when a core is idle and may be preempted anywhere. It pauses every few
// pages, because a scheduler may otherwise leave it a core for tens of milliseconds.
#define _GNU_SOURCE
#include "attention_ops.h"

#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

// Adding 0 atomically keeps what a step may be writing there at the same time.
static void touch(char *at) { atomic_fetch_add_explicit((_Atomic char *)at, 0, memory_order_relaxed); }
static char *next_page(char *at) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    return (char *)(((uintptr_t)at / page + 1) * page);
}

void op_touch_blocks(const struct touch_blocks_args *a, struct team_member *m) {
    const int64_t count = a->end - a->first;
    for (int64_t i; (i = team_take_item(m, count)) >= 0; team_item_done(m)) {
        char *at = a->blocks + (a->first + i) * a->block_bytes;
        for (const char *end = at + a->block_bytes; at < end; at = next_page(at)) touch(at);
    }
    team_finish_phase(m, count);
}

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>

#define BLOCKS_PER_CHECK 4
#define PAGES_PER_PAUSE 32
#define STOP (~0u)

struct prefault {
    pthread_t thread;
    atomic_uint target;  // blocks [0, target) are to be touched, or STOP; a futex
    atomic_llong done;   // blocks [0, done) are ready
    char *blocks;
    int64_t num_blocks, block_bytes, touched;
};

static void touch_slowly(struct prefault *p, char *at, const char *end) {
    for (; at < end && atomic_load(&p->target) != STOP; at = next_page(at)) {
        touch(at);
        if (++p->touched % PAGES_PER_PAUSE == 0) usleep(100);
    }
}

static void *prefault_thread(void *data) {
    struct prefault *p = data;
    const struct sched_param none = {0};
    sched_setscheduler(0, SCHED_IDLE, &none);  // if that is refused, an ordinary thread does as well
    for (int64_t next = 0; next < p->num_blocks;) {
        unsigned target = atomic_load(&p->target);
        if (target == STOP) break;
        if (next >= (int64_t)target) {
            syscall(SYS_futex, &p->target, FUTEX_WAIT_PRIVATE, target, NULL, NULL, 0);
            continue;
        }
        int64_t end = next + BLOCKS_PER_CHECK < (int64_t)target ? next + BLOCKS_PER_CHECK : (int64_t)target;
        touch_slowly(p, p->blocks + next * p->block_bytes, p->blocks + end * p->block_bytes);
        next = end;
        atomic_store(&p->done, next);
    }
    return NULL;
}

static void set_target(struct prefault *p, unsigned blocks) {
    atomic_store(&p->target, blocks);
    syscall(SYS_futex, &p->target, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

// Returns NULL if no thread can be started.
EXPORT void *oct_prefault_start(void *blocks, int64_t num_blocks, int64_t block_bytes) {
    struct prefault *p = calloc(1, sizeof(struct prefault));
    if (!p) return NULL;
    p->blocks = blocks, p->num_blocks = num_blocks, p->block_bytes = block_bytes;
    if (pthread_create(&p->thread, NULL, prefault_thread, p)) {
        free(p);
        return NULL;
    }
    return p;
}

// Ask for blocks [0, blocks). Returns at once.
EXPORT void oct_prefault_until(void *prefault, int64_t blocks) {
    struct prefault *p = prefault;
    set_target(p, (unsigned)(blocks < p->num_blocks ? blocks : p->num_blocks));
}

// How many blocks, counted from the first, are ready
EXPORT int64_t oct_prefault_done(void *prefault) { return atomic_load(&((struct prefault *)prefault)->done); }

// End the thread and wait for it. The blocks may be freed afterwards.
EXPORT void oct_prefault_stop(void *prefault) {
    struct prefault *p = prefault;
    set_target(p, STOP);
    pthread_join(p->thread, NULL);
    free(p);
}
#else
EXPORT void *oct_prefault_start(void *blocks, int64_t num_blocks, int64_t block_bytes) {
    (void)blocks, (void)num_blocks, (void)block_bytes;
    return NULL;
}
EXPORT void oct_prefault_until(void *prefault, int64_t blocks) { (void)prefault, (void)blocks; }
EXPORT int64_t oct_prefault_done(void *prefault) {
    (void)prefault;
    return 0;
}
EXPORT void oct_prefault_stop(void *prefault) { (void)prefault; }
#endif
