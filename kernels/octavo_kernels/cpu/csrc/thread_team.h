// A team of threads runs a program: a list of operations, each in one or more phases of items.
//
// A phase is over when its items are done, not when every thread has arrived: a thread that the system has taken off its core
// holds nobody up unless it was in the middle of an item, and catches up when it comes back. On a few cores that the engine
// shares with a server and its clients this is what keeps 300 short operations a step from waiting 300 times.
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_TEAM 256
#define MAX_PHASES 3  // of one operation

struct counter {
    _Alignas(64) atomic_uint value;
    atomic_uint awaited;  // the value that somebody sleeps for; 0: nobody does
};

struct team {
    int size;
    struct counter *counters;  // [phases][size + 1]: what is taken of each thread's share, and what is done
    void *shared;              // see team_workspace
    size_t shared_bytes;
    const int64_t *program;
    int64_t words;
};

struct member {
    struct team *team;
    int rank, size;
    int robbed;             // how many shares have been found empty in this phase
    struct counter *phase;  // the phase's counters
};

// Items [0, count) of the phase one by one, -1 when all are taken: a thread's own share first, in order (so that it can guess
// which memory comes next), then what others have not got to. Results never depend on who takes which.
static inline int64_t team_take(struct member *m, int64_t count) {
    for (; m->robbed < m->size; m->robbed++) {
        int owner = (m->rank + m->robbed) % m->size;
        int64_t begin = count * owner / m->size, end = count * (owner + 1) / m->size;
        int64_t item = begin + (int64_t)atomic_fetch_add_explicit(&m->phase[owner].value, 1, memory_order_relaxed);
        if (item < end) return item;
    }
    return -1;
}
void team_wake(struct counter *done);
// To be called after each item that was taken.
static inline void team_done(struct member *m) {
    struct counter *done = &m->phase[m->size];
    unsigned now = atomic_fetch_add(&done->value, 1) + 1, awaited = atomic_load(&done->awaited);
    if (awaited && now >= awaited) team_wake(done);
}
// End a phase of `count` items: wait until all are done. Every operation ends each of its phases with this.
void team_wait(struct member *m, int64_t count);

// Items that are a few rows each: true while there are any left. The phase has team_row_items(m, rows) items.
static inline int64_t team_row_items(const struct member *m, int64_t rows) { return rows < 4 * m->size ? rows : 4 * m->size; }
static inline int team_take_rows(struct member *m, int64_t rows, int64_t *begin, int64_t *end) {
    int64_t items = team_row_items(m, rows), item = team_take(m, items);
    if (item < 0) return 0;
    *begin = rows * item / items;
    *end = rows * (item + 1) / items;
    return 1;
}

// Memory for the whole team, undefined contents, valid until the next call in the program. A phase of its own.
void *team_workspace(struct member *m, size_t bytes);
// Memory for this thread alone, 64-byte aligned, undefined contents, valid until the next call from this thread.
void *scratch(size_t bytes);
