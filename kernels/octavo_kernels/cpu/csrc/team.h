// A team of threads runs a program: a list of operations, all threads through each operation, a barrier between two.
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct team {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int phase;
    _Alignas(64) atomic_long next;  // the next work item of the running operation; 0 after every barrier
    int size;
    void *shared;  // workspace of the whole team, see team_workspace
    size_t shared_bytes;
    const int64_t *program;
    int64_t words;
};

struct member {
    struct team *team;
    int rank, size, phase;
};

void team_barrier(struct member *m);
// Memory for the whole team, undefined contents, valid until the next call; contains a barrier before and after.
void *team_workspace(struct member *m, size_t bytes);
// Memory for this thread alone, 64-byte aligned, undefined contents, valid until the next call from this thread.
void *scratch(size_t bytes);

// Hand out work items one by one: cheap balancing, results never depend on who takes which.
static inline int64_t team_next(struct member *m) {
    return atomic_fetch_add_explicit(&m->team->next, 1, memory_order_relaxed);
}
// An even share of [0, count) for this thread.
static inline void team_share(const struct member *m, int64_t count, int64_t *begin, int64_t *end) {
    *begin = count * m->rank / m->size;
    *end = count * (m->rank + 1) / m->size;
}
