// Exchange between the processes that hold parts of one model (collectives.c). See ops.h.
#pragma once
#include <stdint.h>

#include "thread_team.h"

// `ranks` slots of slot_bytes for each of two turns lie behind the header of `shared`. What does not fit into a slot from
// element, or row, `first` on is another operation's.
#define MAX_RANKS 48
#define SHARED_HEADER 4096
struct exchange {
    void *shared;
    int64_t rank, ranks, slot_bytes;
};

// out [rows, width] = the sum of every rank's x, which may be in the same place if it is of the same dtype
struct all_reduce_args {
    const void *x;
    void *out;
    struct exchange exchange;
    int64_t rows, width, first, dtype, out_dtype;
};

// out [rows, total] = every rank's columns side by side. Ranks have ceil(total / ranks) of them, the last ones fewer; rows of x
// are `stride` elements of `size` bytes apart. Nothing happens where `wants` is not NULL and 0, on every rank.
struct all_gather_args {
    const void *x;
    const int64_t *wants;
    void *out;
    struct exchange exchange;
    int64_t rows, stride, total, first, size;
};

// argmax of all ranks' columns from those of each; `offset`: this rank's first column; index NULL: it has none
struct best_of_ranks_args {
    const int64_t *index;
    const float *value;
    int64_t *out_index;
    float *out_value;
    struct exchange exchange;
    int64_t rows, offset, first;
};

// Rows that ranks compute apart, counts[rank] each and one rank's after another's: out_* [sum of counts], from x, of
// `row_bytes` a row, ids and weights [counts[rank], k]. Ids are counted from first_expert in out_ids.
struct gather_rows_args {
    const void *x;
    const int32_t *ids;
    const float *weights;
    void *out_x;
    int32_t *out_ids;
    float *out_weights;
    const int64_t *counts;
    struct exchange exchange;
    int64_t row_bytes, k, first_expert, first;
};

// out [counts[rank], width] = the sum of every rank's parts [sum of counts, width] of this rank's rows, and sigmoid(shared_gate)
// times shared; both of these may be NULL, and are of this rank alone
struct sum_rows_args {
    const float *parts;
    const void *shared;
    const float *shared_gate;
    void *out;
    const int64_t *counts;
    struct exchange exchange;
    int64_t width, first, dtype;
};

void op_all_reduce(const struct all_reduce_args *a, struct team_member *m);
void op_all_gather(const struct all_gather_args *a, struct team_member *m);
void op_best_of_ranks(const struct best_of_ranks_args *a, struct team_member *m);
void op_gather_rows(const struct gather_rows_args *a, struct team_member *m);
void op_sum_rows(const struct sum_rows_args *a, struct team_member *m);
