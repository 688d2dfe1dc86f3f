// Norms, activations and the other operations on single elements or rows. See ops.h.
#pragma once
#include <stdint.h>

#include "thread_team.h"

// x, weight, out [rows, width]; residual and residual_out are NULL for a plain RMS norm. The normalised row is rounded to
// weight_dtype before the product: in `dtype` (Llama), or float32 (Gemma). So are those of rope_and_cache and quantize.
struct rms_norm_args {
    const void *x, *residual, *weight;
    void *out, *residual_out;
    int64_t rows, width, dtype, weight_dtype;
    double eps;
};

// x, out [rows, width]; residual, residual_out, weight and bias may be NULL
struct layer_norm_args {
    const void *x, *residual, *weight, *bias;
    void *out, *residual_out;
    int64_t rows, width, dtype;
    double eps;
};

// x [rows, 2 * width] -> out [rows, width]
struct silu_and_mul_args {
    const void *x;
    void *out;
    int64_t rows, width, dtype;
};

// f(x), times up unless that is NULL; rows of x are `stride` elements apart, those of up `up_stride`
// CLAMPED_SWIGLU: of experts alone
enum activation { RELU = 0, SILU = 1, GELU = 2, GELU_TANH = 3, CLAMPED_SWIGLU = 4, NONE = 5, SIGMOID_GATE = 6 };
struct activation_args {
    const void *x, *up;
    void *out;
    int64_t rows, width, kind, stride, up_stride, dtype;
};

// out = x + y, each of `rows` rows of `width` elements
struct add_args {
    const void *x, *y;
    void *out;
    int64_t rows, width, dtype;
};

// out = x * factor, then cap * tanh(out / cap) unless cap is 0
struct scale_args {
    const void *x;
    void *out;
    int64_t rows, width, dtype;
    double factor, cap;
};

// RMS norms in place, of `heads` times `width` columns of a tensor whose rows are `stride` elements apart
struct rms_norm_columns_args {
    void *x;
    const void *weight;
    int64_t rows, heads, width, stride, dtype, weight_dtype;
    double eps;
};

// out[:, i] = x[:, columns[i]], of elements of 2 or 4 bytes; x is [rows, width], out [rows, count].
struct take_columns_args {
    const void *x;
    const int32_t *columns;
    void *out;
    int64_t rows, width, count, size;
};

// Streams of hidden states, see octavo_kernels.mix_streams: `first` of x and `second` of y, in each row side by side, become
// `made` of them. constants [made, first + second], matrix [.., depth], given [rows, depth].
struct mix_streams_args {
    const void *x, *y;
    const float *constants, *matrix, *given;
    void *out;
    int64_t rows, first, second, made, width, depth, dtype;
};

// Each `width` of `heads * width` columns of x, in place, times what gives it the root mean square of the row of `like`
struct match_rms_args {
    void *x;
    const void *like;
    int64_t rows, heads, width, like_stride, dtype;
    double floor;
};

// max(0, x - mean - factor * standard deviation) of each row, in place
struct sparsify_args {
    void *x;
    int64_t rows, width, stride, dtype;
    double factor;
};

// For each row of x [rows, width] the lowest index of a largest element, and that element. A row with a NaN gives its first
// NaN. Rows are `stride` elements apart.
struct argmax_args {
    const float *x;
    int64_t *index;
    float *best;
    int64_t rows, width, stride;
};

void op_rms_norm(const struct rms_norm_args *a, struct team_member *m);
void op_layer_norm(const struct layer_norm_args *a, struct team_member *m);
void op_silu_and_mul(const struct silu_and_mul_args *a, struct team_member *m);
void op_activation(const struct activation_args *a, struct team_member *m);
void op_add(const struct add_args *a, struct team_member *m);
void op_scale(const struct scale_args *a, struct team_member *m);
void op_rms_norm_columns(const struct rms_norm_columns_args *a, struct team_member *m);
void op_take_columns(const struct take_columns_args *a, struct team_member *m);
void op_match_rms(const struct match_rms_args *a, struct team_member *m);
void op_sparsify(const struct sparsify_args *a, struct team_member *m);
void op_mix_streams(const struct mix_streams_args *a, struct team_member *m);
void op_argmax(const struct argmax_args *a, struct team_member *m);
