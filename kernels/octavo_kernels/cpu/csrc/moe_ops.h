// Mixtures of experts. See ops.h.
#pragma once
#include <stdint.h>

#include "quant.h"
#include "thread_team.h"

// For each row of logits [rows, experts] the k experts with the largest scores, and their weights; see
// octavo_kernels.topk_route. bias and expert_scale [experts] may be NULL. ids count from expert number `first` on.
enum routing { SOFTMAX = 0, SIGMOID = 1 };
struct topk_route_args {
    const float *logits, *bias, *expert_scale;
    int32_t *ids;
    float *weights;
    int64_t rows, experts, k, kind, groups, kept_groups, renormalise, first;
    double scale;
};

// The choices ids [rows, k], sorted by expert and then by row: plan (moe.h)
struct sort_choices_args {
    const int32_t *ids;
    int32_t *plan;
    int64_t rows, experts, k;
};

// What follows works on sorted choices. A table has the weights of all experts; biases are float32 and may be NULL.
struct expert_weight {
    const uint8_t *data;
    int64_t bits, flags;  // of quantised ones
};

// Ups of experts without gates are their gates, too: the same addresses, computed once.
// Quantised rows . gates and ups of their experts, bias [experts, 2 * inner], activation(gate) * up: quantised rows
// [rows * k], sorted. row_weights [rows, k] (NULL: none) multiply the products before the bias. sorted_values and
// sorted_meta: room for rows * k of the rows that are read.
struct quantized_experts_gated_args {
    const struct row_pair *values;
    const void *meta;
    const int32_t *plan;
    const struct expert_weight *gates, *ups;
    const float *bias, *row_weights;
    struct row_pair *sorted_values;
    void *sorted_meta;
    struct row_pair *out_values;
    void *out_meta;
    int64_t rows, experts, k, inner, groups, terms, out_terms, activation, dtype;
    double limit;
};

// Sorted quantised rows [rows * k] . weights of their experts [channels, width], bias [experts, channels]: out [rows, k,
// channels], in the order of the choices
struct quantized_experts_down_args {
    const struct row_pair *values;
    const void *meta;
    const int32_t *plan;
    const struct expert_weight *weights;
    const float *bias;
    float *out;
    int64_t rows, experts, k, channels, groups, terms;
};

// The same with weights of 16 or 32 bits, all of weight_dtype. x [rows, width]; out [rows * k, inner], sorted, in x_dtype.
// packed: room for rows * k of the rows that are read, padded to an even width, in float32.
struct dense_experts_gated_args {
    const void *x;
    const int32_t *plan;
    const struct expert_weight *gates, *ups;
    const float *bias, *row_weights;
    void *packed, *out;
    int64_t rows, experts, k, width, inner, activation, x_dtype, weight_dtype;
    double limit;
};
struct dense_experts_down_args {
    const void *x;
    const int32_t *plan;
    const struct expert_weight *weights;
    const float *bias;
    void *packed;
    float *out;
    int64_t rows, experts, k, channels, width, x_dtype, weight_dtype;
};

// out [rows, width] = results [rows, k, width] times weights [rows, k] (NULL: 1), added up, + shared [rows, width] times the
// sigmoid of shared_gate [rows]; both may be NULL. Results of choices, ids [rows, k], that are none of the experts are left out.
struct add_choices_args {
    const float *results, *weights;
    const int32_t *ids;
    const void *shared;
    const float *shared_gate;
    void *out;
    int64_t rows, k, experts, width, dtype, out_dtype;
};

void op_topk_route(const struct topk_route_args *a, struct team_member *m);
void op_sort_choices(const struct sort_choices_args *a, struct team_member *m);
void op_quantized_experts_gated(const struct quantized_experts_gated_args *a, struct team_member *m);
void op_quantized_experts_down(const struct quantized_experts_down_args *a, struct team_member *m);
void op_dense_experts_gated(const struct dense_experts_gated_args *a, struct team_member *m);
void op_dense_experts_down(const struct dense_experts_down_args *a, struct team_member *m);
void op_add_choices(const struct add_choices_args *a, struct team_member *m);
