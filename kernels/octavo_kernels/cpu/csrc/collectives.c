// What the processes that hold parts of one model exchange, through memory that all of them have mapped: a header (struct
// shared_group), then for each of two turns a slot of every rank's. A rank writes to its own slot, waits until all have, and
// reads those of all, in the order of ranks: every rank adds up in one order, whatever the number of rows. Turns alternate, so
// that a slot is written again only when all ranks have begun the turn after it, and so have read it.
#include <errno.h>
#include <limits.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "collectives_ops.h"
#include "simd.h"

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX()
#endif
#define NAP_NS 50000000  // a sleeping rank looks again after so long, whether it was woken or not
#define PART 2048        // elements of an item

struct shared_rank {
    _Alignas(64) atomic_uint turns;  // that this rank has come to; may wrap
    atomic_uint sleepers;            // who waits for it
};

struct shared_group {
    _Alignas(64) atomic_uint stopped;  // 0; 1: somebody waited too long; 2: told to stop. Nobody waits from then on.
    uint32_t spins;
    int64_t timeout_ns;
    struct shared_rank ranks[MAX_RANKS];
};
_Static_assert(sizeof(struct shared_group) <= SHARED_HEADER, "the slots begin behind the header");

static char *slot_of(const struct exchange *e, unsigned turn, int64_t rank) {
    return (char *)e->shared + SHARED_HEADER + ((turn & 1) * e->ranks + rank) * e->slot_bytes;
}

// The turn that this rank comes to next. Only between its phases is that a fixed number: a thread that is late may not use it
// unless it has taken an item.
static unsigned turn_of(const struct exchange *e) {
    return atomic_load_explicit(&((struct shared_group *)e->shared)->ranks[e->rank].turns, memory_order_relaxed);
}

static int has_come(struct shared_rank *r, unsigned turns) { return (int)(atomic_load(&r->turns) - turns) >= 0; }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void wake(struct shared_rank *r) {
#if defined(__linux__)
    if (atomic_load(&r->sleepers)) syscall(SYS_futex, &r->turns, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#else
    (void)r;
#endif
}

static void nap(struct shared_rank *r, unsigned turns) {
#if defined(__linux__)
    const struct timespec most = {0, NAP_NS};
    atomic_fetch_add(&r->sleepers, 1);
    const unsigned seen = atomic_load(&r->turns);
    if ((int)(seen - turns) < 0) syscall(SYS_futex, &r->turns, FUTEX_WAIT, seen, &most, NULL, 0);
    atomic_fetch_sub(&r->sleepers, 1);
#else
    const struct timespec least = {0, 20000};
    (void)r, (void)turns;
    nanosleep(&least, NULL);
#endif
}

static void wait_for_others(const struct exchange *e) {
    struct shared_group *g = e->shared;
    const unsigned turns = turn_of(e) + 1;
    atomic_store(&g->ranks[e->rank].turns, turns);
    wake(g->ranks + e->rank);
    int64_t deadline = 0;
    for (int64_t r = 0; r < e->ranks; r++) {
        for (uint32_t spins = 0; !has_come(g->ranks + r, turns); spins++) {
            if (spins < g->spins) {
                RELAX();
                continue;
            }
            if (atomic_load(&g->stopped)) return;
            if (!deadline) deadline = now_ns() + g->timeout_ns;
            else if (now_ns() > deadline) {
                unsigned running = 0;
                atomic_compare_exchange_strong(&g->stopped, &running, 1);
                return;
            }
            nap(g->ranks + r, turns);
        }
    }
}

// One phase: this rank's slot is written, wait for the others'.
static void meet(const struct exchange *e, struct team_member *m) {
    if (team_take_item(m, 1) == 0) {
        wait_for_others(e);
        team_item_done(m);
    }
    team_finish_phase(m, 1);
}

INLINE void add_ranks(const struct all_reduce_args *a, int64_t begin, int64_t end, int dtype, int out_dtype) {
    const unsigned turn = turn_of(&a->exchange) - 1;
    for (int64_t i = begin; i < end; i += VW) {
        const int64_t n = MIN(VW, end - i);
        vf sum = load_part(slot_of(&a->exchange, turn, 0), i, n, dtype);
        for (int64_t r = 1; r < a->exchange.ranks; r++) sum += load_part(slot_of(&a->exchange, turn, r), i, n, dtype);
        store_part(a->out, a->first + i, n, sum, out_dtype);
    }
}

void op_all_reduce(const struct all_reduce_args *a, struct team_member *m) {
    const int64_t size = a->dtype == BFLOAT16 ? 2 : 4;
    const int64_t count = MIN(a->rows * a->width - a->first, a->exchange.slot_bytes / size), items = CEIL_DIV(count, PART);
    if (count <= 0) return;  // on every rank
    for (int64_t i; (i = team_take_item(m, items)) >= 0; team_item_done(m)) {
        const int64_t begin = i * PART, end = MIN(count, begin + PART);
        memcpy(slot_of(&a->exchange, turn_of(&a->exchange), a->exchange.rank) + begin * size,
               (const char *)a->x + (a->first + begin) * size, (size_t)((end - begin) * size));
    }
    team_finish_phase(m, items);
    meet(&a->exchange, m);
    for (int64_t i; (i = team_take_item(m, items)) >= 0; team_item_done(m)) {
        const int64_t begin = i * PART, end = MIN(count, begin + PART);
        if (a->dtype == BFLOAT16) add_ranks(a, begin, end, BFLOAT16, BFLOAT16);
        else if (a->out_dtype == BFLOAT16) add_ranks(a, begin, end, FLOAT32, BFLOAT16);
        else add_ranks(a, begin, end, FLOAT32, FLOAT32);
    }
    team_finish_phase(m, items);
}

// Columns of a rank: equally many, but for the last ones
static int64_t columns_of(const struct all_gather_args *a, int64_t rank) {
    const int64_t most = CEIL_DIV(a->total, a->exchange.ranks);
    return MAX(0, MIN(most, a->total - rank * most));
}

void op_all_gather(const struct all_gather_args *a, struct team_member *m) {
    const int64_t most = CEIL_DIV(a->total, a->exchange.ranks), size = a->size;
    const int64_t rows = MIN(a->rows - a->first, a->exchange.slot_bytes / (most * size));
    if (rows <= 0 || (a->wants && !*a->wants)) return;
    for (int64_t i; (i = team_take_item(m, rows)) >= 0; team_item_done(m))
        memcpy(slot_of(&a->exchange, turn_of(&a->exchange), a->exchange.rank) + i * most * size,
               (const char *)a->x + (a->first + i) * a->stride * size, (size_t)(columns_of(a, a->exchange.rank) * size));
    team_finish_phase(m, rows);
    meet(&a->exchange, m);
    for (int64_t i; (i = team_take_item(m, rows)) >= 0; team_item_done(m))
        for (int64_t r = 0; r < a->exchange.ranks; r++)
            memcpy((char *)a->out + ((a->first + i) * a->total + r * most) * size,
                   slot_of(&a->exchange, turn_of(&a->exchange) - 1, r) + i * most * size, (size_t)(columns_of(a, r) * size));
    team_finish_phase(m, rows);
}

struct best {
    int64_t index;
    float value;
};

// As argmax has it of all ranks' columns: the first of the largest, or the first NaN
static struct best best_of(const struct best_of_ranks_args *a, unsigned turn, int64_t row) {
    struct best found = {0, -INFINITY};
    for (int64_t r = 0; r < a->exchange.ranks; r++) {
        const struct best other = ((const struct best *)slot_of(&a->exchange, turn, r))[row];
        if (other.index < 0) continue;  // a rank without columns
        if (isnan(other.value)) return other;
        if (r == 0 || other.value > found.value) found = other;
    }
    return found;
}

void op_best_of_ranks(const struct best_of_ranks_args *a, struct team_member *m) {
    const int64_t rows = MIN(a->rows - a->first, a->exchange.slot_bytes / (int64_t)sizeof(struct best));
    if (rows <= 0) return;
    if (team_take_item(m, 1) == 0) {
        struct best *mine = (struct best *)slot_of(&a->exchange, turn_of(&a->exchange), a->exchange.rank);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t index = a->index ? a->index[a->first + i] + a->offset : -1;
            mine[i] = (struct best){index, a->index ? a->value[a->first + i] : 0};
        }
        team_item_done(m);
    }
    team_finish_phase(m, 1);
    meet(&a->exchange, m);
    if (team_take_item(m, 1) == 0) {
        for (int64_t i = 0; i < rows; i++) {
            const struct best found = best_of(a, turn_of(&a->exchange) - 1, i);
            a->out_index[a->first + i] = found.index;
            a->out_value[a->first + i] = found.value;
        }
        team_item_done(m);
    }
    team_finish_phase(m, 1);
}

// Of `counts` rows of a rank, those in this operation's part
static int64_t rows_from(int64_t count, int64_t first, int64_t most) { return MAX(0, MIN(count - first, most)); }

void op_gather_rows(const struct gather_rows_args *a, struct team_member *m) {
    const struct exchange *e = &a->exchange;
    const int64_t chosen = a->k * (int64_t)sizeof(int32_t), size = a->row_bytes + 2 * chosen, most = e->slot_bytes / size;
    int64_t largest = 0;
    for (int64_t r = 0; r < e->ranks; r++) largest = MAX(largest, a->counts[r]);
    if (largest <= a->first) return;  // on every rank
    const int64_t rows = rows_from(a->counts[e->rank], a->first, most);
    for (int64_t i; (i = team_take_item(m, rows)) >= 0; team_item_done(m)) {
        char *row = slot_of(e, turn_of(e), e->rank) + i * size;
        const int64_t at = a->first + i;
        memcpy(row, (const char *)a->x + at * a->row_bytes, (size_t)a->row_bytes);
        memcpy(row + a->row_bytes, a->ids + at * a->k, (size_t)chosen);
        memcpy(row + a->row_bytes + chosen, a->weights + at * a->k, (size_t)chosen);
    }
    team_finish_phase(m, rows);
    meet(e, m);
    for (int64_t r; (r = team_take_item(m, e->ranks)) >= 0; team_item_done(m)) {
        int64_t at = a->first;
        for (int64_t before = 0; before < r; before++) at += a->counts[before];
        const char *row = slot_of(e, turn_of(e) - 1, r);
        for (int64_t i = 0; i < rows_from(a->counts[r], a->first, most); i++, at++, row += size) {
            memcpy((char *)a->out_x + at * a->row_bytes, row, (size_t)a->row_bytes);
            memcpy(a->out_ids + at * a->k, row + a->row_bytes, (size_t)chosen);
            memcpy(a->out_weights + at * a->k, row + a->row_bytes + chosen, (size_t)chosen);
            for (int64_t c = 0; c < a->k; c++) a->out_ids[at * a->k + c] -= (int32_t)a->first_expert;
        }
    }
    team_finish_phase(m, e->ranks);
}

// Row `at` of all, which is row `own` of this rank's
INLINE void sum_row(const struct sum_rows_args *a, int64_t at, int64_t own, int dtype) {
    const struct exchange *e = &a->exchange;
    const float gate = a->shared_gate ? 1.0f / (1.0f + exp_scalar(-a->shared_gate[own])) : 1.0f;
    for (int64_t c = 0; c < a->width; c += VW) {
        const int64_t n = MIN(VW, a->width - c), from = (at - a->first) * a->width + c;
        vf sum = load_part(slot_of(e, turn_of(e) - 1, 0), from, n, FLOAT32);
        for (int64_t r = 1; r < e->ranks; r++) sum += load_part(slot_of(e, turn_of(e) - 1, r), from, n, FLOAT32);
        if (a->shared) sum = vfma(splat(gate), load_part(a->shared, own * a->width + c, n, dtype), sum);
        store_part(a->out, own * a->width + c, n, sum, dtype);
    }
}

void op_sum_rows(const struct sum_rows_args *a, struct team_member *m) {
    const struct exchange *e = &a->exchange;
    const int64_t size = a->width * (int64_t)sizeof(float);
    int64_t total = 0, start = 0;
    for (int64_t r = 0; r < e->ranks; r++) {
        if (r == e->rank) start = total;
        total += a->counts[r];
    }
    const int64_t rows = rows_from(total, a->first, e->slot_bytes / size);
    if (!rows) return;  // on every rank
    for (int64_t i; (i = team_take_item(m, rows)) >= 0; team_item_done(m))
        memcpy(slot_of(e, turn_of(e), e->rank) + i * size, a->parts + (a->first + i) * a->width, (size_t)size);
    team_finish_phase(m, rows);
    meet(e, m);
    const int64_t begin = MAX(start, a->first), end = MIN(start + a->counts[e->rank], a->first + rows), own = MAX(0, end - begin);
    for (int64_t i; (i = team_take_item(m, own)) >= 0; team_item_done(m)) {
        if (a->dtype == FLOAT32) sum_row(a, begin + i, begin + i - start, FLOAT32);
        else sum_row(a, begin + i, begin + i - start, BFLOAT16);
    }
    team_finish_phase(m, own);
}
