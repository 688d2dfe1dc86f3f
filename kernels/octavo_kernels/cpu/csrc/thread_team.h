// A team of threads runs a program: a list of operations, each with one or more phases, each phase with a number of items.
//
// A phase ends when its items are done, not when every thread has arrived. A thread that the system has preempted therefore
// delays the others only if it was in the middle of an item. A step has about 300 short operations and shares a few cores
// with a server and its clients: with a barrier after each operation, every preemption would stall all threads.
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_TEAM 256
#define MAX_PHASES 3  // per operation

struct counter {
    _Alignas(64) atomic_uint value;
    atomic_uint waiting_for;  // the value that a sleeping thread waits for; 0: none sleeps
};

struct thread_team {
    int size;
    struct counter *counters;  // [phases][size + 1]: items taken from each thread's share, then items done
    void *shared;              // see team_workspace
    size_t shared_bytes;
    const int64_t *program;
    int64_t words;
};

struct team_member {
    struct thread_team *team;
    int rank, size;
    int shares_emptied;     // number of shares found empty in this phase
    struct counter *phase;  // the counters of this phase
};

// Take the next item of [0, count) of this phase; -1 when all are taken. A thread takes its own share first and in order, so
// that it can tell which memory it needs next, then items from the shares of others. Results never depend on who takes what.
static inline int64_t team_take_item(struct team_member *m, int64_t count) {
    for (; m->shares_emptied < m->size; m->shares_emptied++) {
        int owner = (m->rank + m->shares_emptied) % m->size;
        int64_t begin = count * owner / m->size, end = count * (owner + 1) / m->size;
        int64_t item = begin + (int64_t)atomic_fetch_add_explicit(&m->phase[owner].value, 1, memory_order_relaxed);
        if (item < end) return item;
    }
    return -1;
}
void team_wake_waiters(struct counter *done);
// Call this after each item that was taken.
static inline void team_item_done(struct team_member *m) {
    struct counter *done = &m->phase[m->size];
    unsigned now = atomic_fetch_add(&done->value, 1) + 1, waiting_for = atomic_load(&done->waiting_for);
    if (waiting_for && now >= waiting_for) team_wake_waiters(done);
}
// End a phase of `count` items: wait until all are done. Every operation ends each of its phases with this call.
void team_finish_phase(struct team_member *m, int64_t count);

// Take an item that is a range of rows [begin, end); 0 when none is left. The phase has team_row_items(m, rows) items.
static inline int64_t team_row_items(const struct team_member *m, int64_t rows) {
    return rows < 4 * m->size ? rows : 4 * m->size;
}
static inline int team_take_rows(struct team_member *m, int64_t rows, int64_t *begin, int64_t *end) {
    int64_t items = team_row_items(m, rows), item = team_take_item(m, items);
    if (item < 0) return 0;
    *begin = rows * item / items;
    *end = rows * (item + 1) / items;
    return 1;
}

// Memory for the whole team with undefined contents, valid until the next call in the program. This is a phase of its own.
void *team_workspace(struct team_member *m, size_t bytes);
// Memory for this thread alone, 64-byte aligned, with undefined contents, valid until the next call from this thread.
void *thread_scratch(size_t bytes);
