// Linears and embeddings, of quantised and of plain weights, and packing these. See ops.h.
#pragma once
#include <stdint.h>

#include "quant.h"
#include "thread_team.h"

// Quantise rows of activations to int8 (quant.h), after the operation before the linear. x, residual and residual_out are in
// `dtype`, norm_weight in weight_dtype. kind 0: x [rows, width] as it is; 1: RMS norm of x, plus residual unless that is NULL (the sum is
// written to residual_out); 2: silu(x[:, :width]) * x[:, width:] of x [rows, 2 * width]. The rows that are quantised are written
// to plain [rows, width], too, unless that is NULL.
struct quantize_args {
    const void *x, *residual, *norm_weight;
    void *residual_out, *plain;
    struct row_pair *values;
    void *meta;
    int64_t kind, rows, width, groups, terms, dtype, weight_dtype;
    double eps;
};

// out[:, offset : offset + channels] of [rows, out_stride] = quantised rows . packed weight^T + bias (float32, may be NULL).
// bits and flags are those of quant.h's kinds, here and below.
struct quantized_linear_args {
    const struct row_pair *values;
    const void *meta;
    const uint8_t *weight;
    const float *bias;
    void *out;
    int64_t rows, channels, groups, terms, bits, flags, out_stride, offset, dtype;
};

// The same for a language model's head: float32 [rows, channels] from rows with two terms. Blocks of channels without a value
// within `margin` of the row's largest use the first term only. index and best: for each row the lowest index of a largest
// element, or of the first NaN, and that element; may be NULL. maxima [rows, channels / BLOCK]: the largest element of each block,
// if the largest of all is a number; may be NULL. If wants_out is not NULL, `out` is written only where it is not 0.
struct quantized_head_args {
    const struct row_pair *values;
    const void *meta;
    const uint8_t *weight;
    const float *bias;
    float *out;
    const int64_t *wants_out;
    int64_t *index;
    float *best, *maxima;
    int64_t rows, channels, groups, bits, flags;
    double margin;
};

// Quantised rows . packed weight^T, whose first `inner` channels are gates, then silu(gate) * up, quantised to `out_terms`.
// Intermediate results are rounded to `dtype`. inner must be a multiple of BLOCK.
struct gated_linear_args {
    const struct row_pair *values;
    const void *meta;
    const uint8_t *weight;
    struct row_pair *out_values;
    void *out_meta;
    int64_t rows, inner, groups, terms, bits, flags, out_terms, dtype;
};

// out[:, offset : offset + channels] of [rows, out_stride] = x [rows, width] . weight^T (packed as dense_linear.c says) + bias
// (float32, may be NULL). weight_dtype may be FLOAT16, the others may not.
struct dense_linear_args {
    const void *x;
    const uint8_t *weight;
    const float *bias;
    void *out;
    int64_t rows, channels, width, out_stride, offset, x_dtype, weight_dtype, out_dtype;
};

// Packs rows [count, width] as channels `channel` ... of such a weight, whose padding channels are left alone
struct pack_dense_args {
    const uint8_t *rows;
    uint8_t *weight;
    int64_t count, channel, width, dtype;
};

// out [count, width] = rows `ids` of such a weight. The table's first row is that of id `from`, here and below: rows of ids
// that it does not hold are 0. from -1: it holds all ids.
struct dense_embedding_args {
    const int64_t *ids;
    const uint8_t *weight;
    void *out;
    int64_t count, channels, width, weight_dtype, dtype, from;
};

// out [count, width] = rows `ids` of a packed weight, dequantised
struct quantized_embedding_args {
    const int64_t *ids;
    const uint8_t *weight;
    void *out;
    int64_t count, channels, width, groups, bits, flags, dtype, from;
};

// out [count, row_bytes] = rows `ids` of table [rows, row_bytes]
struct embedding_args {
    const int64_t *ids;
    const void *table;
    void *out;
    int64_t count, rows, row_bytes, from;
};

// The row of a table of `rows` rows that holds `id`; -1: none
static inline int64_t table_row(int64_t id, int64_t from, int64_t rows) {
    if (from < 0) return id < 0 ? 0 : id < rows ? id : rows - 1;
    return id - from < 0 || id - from >= rows ? -1 : id - from;
}

// Packs rows of a GGUF tensor, [channels, groups / groups of a block * block bytes], into the blocks of quant.h. type: see
// packing.c; bits and flags: the kind that it becomes.
struct pack_gguf_args {
    const uint8_t *raw;
    uint8_t *out;
    int64_t channels, groups, type, bits, flags;
};

void op_quantize(const struct quantize_args *a, struct team_member *m);
void op_quantized_linear(const struct quantized_linear_args *a, struct team_member *m);
void op_quantized_head(const struct quantized_head_args *a, struct team_member *m);
void op_gated_linear(const struct gated_linear_args *a, struct team_member *m);
void op_dense_linear(const struct dense_linear_args *a, struct team_member *m);
void op_pack_dense(const struct pack_dense_args *a, struct team_member *m);
void op_dense_embedding(const struct dense_embedding_args *a, struct team_member *m);
void op_quantized_embedding(const struct quantized_embedding_args *a, struct team_member *m);
void op_embedding(const struct embedding_args *a, struct team_member *m);
void op_pack_gguf(const struct pack_gguf_args *a, struct team_member *m);
