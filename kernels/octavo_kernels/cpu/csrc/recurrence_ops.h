// Recurrent layers. See ops.h.
#pragma once
#include <stdint.h>

#include "thread_team.h"

// Where one layer's part of the states of a step's sequences lies (octavo_kernels/recurrence.py): granule g of
// a sequence is number g % per_block in block pages[g / per_block] of the pool. Of the rows of sequence s, `pending` ones and
// those from query_start_loc[s] on, all but the last num_kept[s] are committed, and the others are pending afterwards: `most` of
// each row of the batch.
struct state_args {
    char *pool;
    const int32_t *query_start_loc, *num_tokens, *num_pending, *num_kept, *num_before, *batch_rows, *read_pages, *write_pages,
        *snapshot_pages;
    int64_t sequences, page_stride, per_block, granule_bytes, block_bytes, most;
};

// out [rows, channels] = silu of the sums of the last `taps` inputs times weight [taps, channels], plus bias unless that is NULL;
// rows of x are `stride` elements apart. is_gated: x [rows, 3 channels] is factors of the inputs, factors of the sums and inputs,
// there is no silu, and out is in dtype instead of float32. pending [batch rows, most, channels]. A granule of a window is
// [taps - 1, piece], the first one `first`.
struct causal_conv_args {
    const void *x;
    const float *weight, *bias;
    void *out;
    float *pending;
    struct state_args state;
    int64_t rows, channels, taps, stride, first, piece, is_gated, dtype;
};

// Linear recurrences of a matrix for each value head. Gated delta rule: x [rows, queries, keys, values], whose queries and keys
// are scaled in place; b are betas before their sigmoid. State space: x [rows, values, keys, queries]; a are steps before their
// softplus, which are then held between `low` and `high`; skip [value_heads] are factors of values that are added to the result.
// Rows of a (in dtype) and b are a_stride and b_stride elements apart; gates [rows, 2 value_heads + key_heads]: decay, beta or
// step, query . key; out [rows, value_heads value_size]. keys, updates and decays are pending. A granule of a matrix is
// [key_size, columns].
struct recurrence_args {
    float *x;
    const void *a;
    const float *b, *rate, *dt_bias, *skip;
    float *gates, *out, *keys, *updates, *decays;
    struct state_args state;
    int64_t rows, key_heads, value_heads, key_size, value_size, a_stride, b_stride, first, columns, dtype;
    double low, high;
};

// out = RMS norm of each `width` of heads * width columns of x, times a weight and silu(gate): before the norm where gates_first.
// Heads' weights are weight_stride elements apart (0: all have the same). Without a weight there is no norm. out and gate are in
// dtype, rows of gate are `stride` elements apart.
struct gated_norm_args {
    const float *x;
    const void *gate;
    const float *weight;
    void *out;
    int64_t rows, heads, width, weight_stride, stride, gates_first, dtype;
    double eps;
};

void op_causal_conv(const struct causal_conv_args *a, struct team_member *m);
void op_gated_delta_rule(const struct recurrence_args *a, struct team_member *m);
void op_state_space_scan(const struct recurrence_args *a, struct team_member *m);
void op_gated_norm(const struct gated_norm_args *a, struct team_member *m);
