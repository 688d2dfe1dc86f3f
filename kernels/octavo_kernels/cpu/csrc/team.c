#include "team.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "ops.h"

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX()
#endif
#define EXPORT __attribute__((visibility("default")))
#define SPINS 4000  // then give the core away: threads may share one

typedef void (*op_fn)(const void *args, struct member *m);
static const struct {
    op_fn run;
    size_t bytes;
} OPS[] = {
    {(op_fn)op_rms_norm, sizeof(struct rms_norm_args)},
    {(op_fn)op_silu_and_mul, sizeof(struct silu_and_mul_args)},
    {(op_fn)op_rope_and_cache, sizeof(struct rope_and_cache_args)},
    {(op_fn)op_paged_attention, sizeof(struct paged_attention_args)},
    {(op_fn)op_copy_blocks, sizeof(struct copy_blocks_args)},
    {(op_fn)op_quantize, sizeof(struct quantize_args)},
    {(op_fn)op_quantized_linear, sizeof(struct quantized_linear_args)},
    {(op_fn)op_quantized_embedding, sizeof(struct quantized_embedding_args)},
    {(op_fn)op_embedding, sizeof(struct embedding_args)},
    {(op_fn)op_read_memory, sizeof(struct read_memory_args)},
    {(op_fn)op_dot_products, sizeof(struct dot_products_args)},
};
#define NUM_OPS ((int64_t)(sizeof(OPS) / sizeof(OPS[0])))

// The OpenMP runtime that torch has loaded, so that its threads and ours are the same ones and never compete.
static void (*omp_parallel)(void (*fn)(void *), void *data, unsigned threads, unsigned flags);
static int (*omp_thread_num)(void);
static int (*omp_num_threads)(void);

EXPORT void oct_set_openmp(void *parallel, void *thread_num, void *num_threads) {
    omp_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    omp_thread_num = (int (*)(void))thread_num;
    omp_num_threads = (int (*)(void))num_threads;
}

static void reset_shares(struct team *t, int size) {
    for (int i = 0; i < size; i++) atomic_store_explicit(&t->shares[i].taken, 0, memory_order_relaxed);
}

void team_barrier(struct member *m) {
    struct team *t = m->team;
    m->robbed = 0;
    if (m->size == 1) {
        reset_shares(t, 1);
        return;
    }
    m->phase ^= 1;
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == m->size - 1) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        reset_shares(t, m->size);
        atomic_store_explicit(&t->phase, m->phase, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&t->phase, memory_order_acquire) != m->phase;) {
        if (++spins < SPINS) RELAX();
        else sched_yield();
    }
}

void *team_workspace(struct member *m, size_t bytes) {
    struct team *t = m->team;
    team_barrier(m);
    if (m->rank == 0 && t->shared_bytes < bytes) {
        free(t->shared);
        t->shared_bytes = (bytes + 4095) / 4096 * 4096;
        t->shared = aligned_alloc(64, t->shared_bytes);
        if (!t->shared) abort();
    }
    team_barrier(m);
    return t->shared;
}

void *scratch(size_t bytes) {
    static _Thread_local struct {
        void *memory;
        size_t bytes;
    } mine;
    if (mine.bytes < bytes) {
        free(mine.memory);
        mine.bytes = (bytes + 4095) / 4096 * 4096;
        mine.memory = aligned_alloc(64, mine.bytes);
        if (!mine.memory) abort();
    }
    return mine.memory;
}

static void run_member(struct team *t, int rank, int size) {
    struct member m = {t, rank, size, 0, 0};
    for (int64_t at = 0; at < t->words;) {
        const int64_t *op = t->program + at;
        OPS[op[0]].run(op + 2, &m);
        at += 2 + op[1];
        if (at < t->words) team_barrier(&m);
    }
}

static void run_team(void *data) {
    struct team *t = data;
    // The runtime may give fewer threads than asked for; all of them see the same number.
    run_member(t, omp_thread_num(), omp_num_threads());
}

// Run a program: operations one after the other, each as opcode, number of argument words, arguments.
// Returns 0, or 1 + the offset of the first operation that is malformed (nothing has run then).
EXPORT int64_t oct_run(const int64_t *program, int64_t words, int threads) {
    for (int64_t at = 0; at < words;) {
        int64_t code = program[at];
        if (at + 2 > words || code < 0 || code >= NUM_OPS || program[at + 1] * 8 != (int64_t)OPS[code].bytes) return at + 1;
        at += 2 + program[at + 1];
        if (at > words) return at + 1;
    }
    struct team t = {.program = program, .words = words};
    if (threads <= 1 || !omp_parallel) run_member(&t, 0, 1);
    else omp_parallel(run_team, &t, (unsigned)(threads < MAX_TEAM ? threads : MAX_TEAM), 0);
    free(t.shared);
    return 0;
}

