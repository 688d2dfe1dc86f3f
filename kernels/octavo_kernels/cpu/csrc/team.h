// A team of threads runs a program: a list of operations, all threads through each operation, a barrier between two.
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_TEAM 256

struct team {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int phase;
    struct {
        _Alignas(64) atomic_long taken;  // of this thread's share of the running operation; 0 after every barrier
    } shares[MAX_TEAM];
    int size;
    void *shared;  // workspace of the whole team, see team_workspace
    size_t shared_bytes;
    const int64_t *program;
    int64_t words;
};

struct member {
    struct team *team;
    int rank, size, phase, robbed;
};

void team_barrier(struct member *m);
// Memory for the whole team, undefined contents, valid until the next call; contains a barrier before and after.
void *team_workspace(struct member *m, size_t bytes);
// Memory for this thread alone, 64-byte aligned, undefined contents, valid until the next call from this thread.
void *scratch(size_t bytes);

// Hand out the items [0, count) of an operation one by one, -1 when there are none left: a thread's own share first, in order
// (so that it can guess which memory comes next), then what others have not got to. Results never depend on who takes which.
static inline int64_t team_take(struct member *m, int64_t count) {
    for (; m->robbed < m->size; m->robbed++) {
        int owner = (m->rank + m->robbed) % m->size;
        int64_t begin = count * owner / m->size, end = count * (owner + 1) / m->size;
        int64_t item = begin + atomic_fetch_add_explicit(&m->team->shares[owner].taken, 1, memory_order_relaxed);
        if (item < end) return item;
    }
    return -1;
}
// An even share of [0, count) for this thread.
static inline void team_share(const struct member *m, int64_t count, int64_t *begin, int64_t *end) {
    *begin = count * m->rank / m->size;
    *end = count * (m->rank + 1) / m->size;
}
