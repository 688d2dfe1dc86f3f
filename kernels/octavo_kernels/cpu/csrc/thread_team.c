#include "thread_team.h"

#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "amx.h"
#include "ops.h"

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX()
#endif
#define EXPORT __attribute__((visibility("default")))
#define SPINS 4000  // about 50 us, then sleep: the thread with the last item may need this core

typedef void (*op_fn)(const void *args, struct team_member *m);
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
    {(op_fn)op_gated_linear, sizeof(struct gated_linear_args)},
    {(op_fn)op_pack_gguf, sizeof(struct pack_gguf_args)},
    {(op_fn)op_touch_blocks, sizeof(struct touch_blocks_args)},
    {(op_fn)op_argmax, sizeof(struct argmax_args)},
    {(op_fn)op_decode_inputs, sizeof(struct decode_inputs_args)},
    {(op_fn)op_quantized_head, sizeof(struct quantized_head_args)},
    {(op_fn)op_dense_linear, sizeof(struct dense_linear_args)},
    {(op_fn)op_pack_dense, sizeof(struct pack_dense_args)},
    {(op_fn)op_dense_embedding, sizeof(struct dense_embedding_args)},
    {(op_fn)op_layer_norm, sizeof(struct layer_norm_args)},
    {(op_fn)op_activation, sizeof(struct activation_args)},
    {(op_fn)op_add, sizeof(struct add_args)},
    {(op_fn)op_take_columns, sizeof(struct take_columns_args)},
    {(op_fn)op_scale, sizeof(struct scale_args)},
    {(op_fn)op_rms_norm_columns, sizeof(struct rms_norm_columns_args)},
    {(op_fn)op_topk_route, sizeof(struct topk_route_args)},
    {(op_fn)op_sort_choices, sizeof(struct sort_choices_args)},
    {(op_fn)op_quantized_experts_gated, sizeof(struct quantized_experts_gated_args)},
    {(op_fn)op_quantized_experts_down, sizeof(struct quantized_experts_down_args)},
    {(op_fn)op_dense_experts_gated, sizeof(struct dense_experts_gated_args)},
    {(op_fn)op_dense_experts_down, sizeof(struct dense_experts_down_args)},
    {(op_fn)op_add_choices, sizeof(struct add_choices_args)},
    {(op_fn)op_latent_cache, sizeof(struct latent_cache_args)},
    {(op_fn)op_head_linear, sizeof(struct head_linear_args)},
    {(op_fn)op_varlen_attention, sizeof(struct varlen_attention_args)},
    {(op_fn)op_rope, sizeof(struct rope_args)},
    {(op_fn)op_mix_streams, sizeof(struct mix_streams_args)},
    {(op_fn)op_match_rms, sizeof(struct match_rms_args)},
    {(op_fn)op_sparsify, sizeof(struct sparsify_args)},
    {(op_fn)op_all_reduce, sizeof(struct all_reduce_args)},
    {(op_fn)op_all_gather, sizeof(struct all_gather_args)},
    {(op_fn)op_best_of_ranks, sizeof(struct best_of_ranks_args)},
    {(op_fn)op_lora_shrink, sizeof(struct lora_shrink_args)},
    {(op_fn)op_lora_gather, sizeof(struct lora_gather_args)},
    {(op_fn)op_lora_expand, sizeof(struct lora_expand_args)},
    {(op_fn)op_lora_tiles, sizeof(struct lora_tiles_args)},
    {(op_fn)op_gather_rows, sizeof(struct gather_rows_args)},
    {(op_fn)op_sum_rows, sizeof(struct sum_rows_args)},
    {(op_fn)op_draw, sizeof(struct draw_args)},
    {(op_fn)op_causal_conv, sizeof(struct causal_conv_args)},
    {(op_fn)op_gated_delta_rule, sizeof(struct recurrence_args)},
    {(op_fn)op_gated_norm, sizeof(struct gated_norm_args)},
    {(op_fn)op_state_space_scan, sizeof(struct recurrence_args)},
};
#define NUM_OPS ((int64_t)(sizeof(OPS) / sizeof(OPS[0])))

// The OpenMP runtime that torch has loaded: using the same threads as torch avoids that two pools compete for the cores.
static void (*omp_parallel)(void (*fn)(void *), void *data, unsigned threads, unsigned flags);
static int (*omp_thread_num)(void);
static int (*omp_num_threads)(void);

EXPORT void oct_set_openmp(void *parallel, void *thread_num, void *num_threads) {
    omp_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    omp_thread_num = (int (*)(void))thread_num;
    omp_num_threads = (int (*)(void))num_threads;
}

// Sleep until `done` may have reached `count`.
static void sleep_until(struct counter *done, unsigned count) {
    amx_release();
    amx_must_be_released();
#if defined(__linux__)
    // No wake-up is lost: the thread that finishes the last item sees `waiting_for`, or this one sees the new value, or the
    // futex call compares once more and returns.
    atomic_store(&done->waiting_for, count);
    unsigned seen = atomic_load(&done->value);
    if (seen < count) syscall(SYS_futex, &done->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    (void)done, (void)count;
    sched_yield();
#endif
}

void team_wake_waiters(struct counter *done) {
#if defined(__linux__)
    syscall(SYS_futex, &done->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)done;
#endif
}

void team_finish_phase(struct team_member *m, int64_t count) {
    struct counter *done = &m->phase[m->size];
    for (int spins = 0; atomic_load_explicit(&done->value, memory_order_acquire) < (unsigned)count; spins++) {
        if (spins < SPINS) RELAX();
        else sleep_until(done, (unsigned)count);
    }
    m->phase += m->size + 1;
    m->shares_emptied = 0;
}

void *team_workspace(struct team_member *m, size_t bytes) {
    struct thread_team *t = m->team;
    if (team_take_item(m, 1) == 0) {
        if (t->shared_bytes < bytes) {
            free(t->shared);
            t->shared_bytes = (bytes + 4095) / 4096 * 4096;
            t->shared = aligned_alloc(64, t->shared_bytes);
            if (!t->shared) abort();
        }
        team_item_done(m);
    }
    team_finish_phase(m, 1);
    return t->shared;
}

void *thread_scratch(size_t bytes) {
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

static void run_member(struct thread_team *t, int rank, int size) {
    struct team_member m = {.team = t, .rank = rank, .size = size};
    struct counter *counters = t->counters;
    for (int64_t at = 0; at < t->words; at += 2 + t->program[at + 1]) {
        m.phase = counters;
        m.shares_emptied = 0;
        OPS[t->program[at]].run(t->program + at + 2, &m);
        counters += MAX_PHASES * (size + 1);
    }
    amx_release();
}

static void run_team(void *data) {
    struct thread_team *t = data;
    // The runtime may give fewer threads than requested; all of them see the same number.
    run_member(t, omp_thread_num(), omp_num_threads());
}

// Whether an operation's arguments keep it within its memory. rot_dim comes from a model's file.
static int arguments_in_bounds(op_fn run, const void *args) {
    if (run == (op_fn)op_rope) {
        const struct rope_args *turned = args;
        return turned->rot_dim >= 0 && turned->rot_dim % 2 == 0 && turned->rot_dim <= turned->head_size;
    }
    if (run != (op_fn)op_rope_and_cache) return 1;
    const struct rope_and_cache_args *rope = args;
    return rope->rot_dim >= 0 && rope->rot_dim % 2 == 0 && rope->rot_dim <= rope->head_size;
}

// Run a program: operations one after the other, each as opcode, number of argument words, arguments.
// Returns 0, or 1 + the offset of the first malformed operation; then nothing has run.
EXPORT int64_t oct_run(const int64_t *program, int64_t words, int threads) {
    int64_t operations = 0;
    for (int64_t at = 0; at < words; operations++) {
        int64_t code = program[at];
        if (at + 2 > words || code < 0 || code >= NUM_OPS || program[at + 1] * 8 != (int64_t)OPS[code].bytes) return at + 1;
        const int64_t *args = program + at + 2;
        at += 2 + program[at + 1];
        if (at > words) return at + 1;
        if (!arguments_in_bounds(OPS[code].run, args)) return (int64_t)(args - program) - 1;
    }
    if (threads > MAX_TEAM) threads = MAX_TEAM;
    if (threads < 1 || !omp_parallel) threads = 1;
    struct counter on_stack[MAX_PHASES * 16] = {0};  // avoids an allocation for one operation on a few threads
    size_t bytes = (size_t)operations * MAX_PHASES * (size_t)(threads + 1) * sizeof(struct counter);
    struct counter *counters = bytes <= sizeof(on_stack) ? on_stack : aligned_alloc(64, bytes);
    if (!counters) abort();
    if (counters != on_stack) memset(counters, 0, bytes);
    struct thread_team t = {.counters = counters, .program = program, .words = words};
    if (threads == 1) run_member(&t, 0, 1);
    else omp_parallel(run_team, &t, (unsigned)threads, 0);
    free(t.shared);
    if (counters != on_stack) free(counters);
    return 0;
}
