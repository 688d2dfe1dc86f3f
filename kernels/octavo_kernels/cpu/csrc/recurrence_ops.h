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

// out [rows, channels] = silu of the sums of the last `taps` inputs times weight [taps, channels]; rows of x are `stride`
// elements apart. pending [batch rows, most, channels]. A granule of a window is [taps - 1, piece], the first one `first`.
struct causal_conv_args {
    const void *x;
    const float *weight;
    float *out, *pending;
    struct state_args state;
    int64_t rows, channels, taps, stride, first, piece, dtype;
};

// qkv [rows, 2 key_heads key_size + value_heads value_size], whose queries and keys are scaled in place; rows of a and b are
// a_stride and b_stride elements apart; gates [rows, 2 value_heads + key_heads]: decay, beta, query . key; out [rows,
// value_heads value_size]. keys, updates and decays are pending. A granule of a matrix is [key_size, columns].
struct gated_delta_rule_args {
    float *qkv;
    const float *a, *b, *rate, *dt_bias;
    float *gates, *out, *keys, *updates, *decays;
    struct state_args state;
    int64_t rows, key_heads, value_heads, key_size, value_size, a_stride, b_stride, first, columns;
};

// out = RMS norm of each `width` of heads * width columns of x, times weight [width] and silu(gate); out and gate in dtype, rows of
// gate are `stride` elements apart
struct gated_norm_args {
    const float *x;
    const void *gate;
    const float *weight;
    void *out;
    int64_t rows, heads, width, stride, dtype;
    double eps;
};

void op_causal_conv(const struct causal_conv_args *a, struct team_member *m);
void op_gated_delta_rule(const struct gated_delta_rule_args *a, struct team_member *m);
void op_gated_norm(const struct gated_norm_args *a, struct team_member *m);
