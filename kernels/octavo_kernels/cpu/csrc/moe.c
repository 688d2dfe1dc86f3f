// Mixtures of experts: the choice of experts, its order, and the sum of their results. The products are in quantized_linear.c
// and dense_linear.c.
#include "moe.h"

// The largest of those that are not `out`, the first of them among equals; there is one
static int64_t largest(const float *values, const uint8_t *out, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!out[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

// Marks the members of all groups as `out` but of the best ones. A group's score is its best member's, or the sum of the two best.
static void leave_groups_out(const struct topk_route_args *a, const float *choice, float *scores, uint8_t *out) {
    const int64_t size = a->experts / a->groups;
    uint8_t *left = out + a->experts;
    for (int64_t g = 0; g < a->groups; g++) {
        float best = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            if (choice[e] > best) second = best, best = choice[e];
            else if (choice[e] > second) second = choice[e];
        }
        scores[g] = a->kind == SIGMOID && size > 1 ? best + second : best;
        left[g] = 0;
    }
    memset(out, 1, (size_t)a->experts);
    for (int64_t i = 0; i < a->kept_groups; i++) {
        const int64_t g = largest(scores, left, a->groups);
        left[g] = 1;
        memset(out + g * size, 0, (size_t)size);
    }
}

// scratch: 3 * padded floats, then 2 * experts bytes
static void route_row(const struct topk_route_args *a, int64_t row, float *scratch, int64_t padded) {
    const float *logits = a->logits + row * a->experts;
    float *scores = scratch, *choice = scratch + padded, *groups = scratch + 2 * padded, top = -INFINITY, sum = 0.0f;
    uint8_t *out = (uint8_t *)(scratch + 3 * padded);
    for (int64_t e = 0; e < a->experts; e++) top = MAX(top, logits[e]);
    for (int64_t e = 0; e < a->experts; e += VW) {
        const int64_t n = MIN(VW, a->experts - e);
        const vf x = n == VW ? vload(logits + e) : load_part(logits, e, n, FLOAT32);
        vstore(scores + e, a->kind == SIGMOID ? splat(1.0f) / (splat(1.0f) + vexp(-x)) : vexp(x - splat(top)));
    }
    if (a->kind == SOFTMAX) {
        for (int64_t e = 0; e < a->experts; e++) sum += scores[e];
        for (int64_t e = 0; e < a->experts; e++) scores[e] /= sum;
    }
    const int by_score = a->bias || a->groups;  // else by the logits, whose order is the same and which never are rounded to equals
    for (int64_t e = 0; e < a->experts; e++) choice[e] = by_score ? scores[e] + (a->bias ? a->bias[e] : 0.0f) : logits[e];
    memset(out, 0, (size_t)a->experts);
    if (a->groups) leave_groups_out(a, choice, groups, out);
    float total = 0.0f;
    for (int64_t i = 0; i < a->k; i++) {
        const int64_t e = largest(choice, out, a->experts);
        out[e] = 1;
        a->ids[row * a->k + i] = (int32_t)(e - a->first);
        a->weights[row * a->k + i] = scores[e];
        total += scores[e];
    }
    const float factor = (float)a->scale;
    for (int64_t i = 0; i < a->k; i++) {
        float *weight = a->weights + row * a->k + i;
        *weight = (a->renormalise ? *weight / (total + 1e-20f) : *weight) * factor;
        if (a->expert_scale) *weight *= a->expert_scale[a->ids[row * a->k + i] + a->first];
    }
}

void op_topk_route(const struct topk_route_args *a, struct team_member *m) {
    const int64_t padded = CEIL_DIV(a->experts, VW) * VW;
    float *scratch = thread_scratch((size_t)padded * 3 * sizeof(float) + (size_t)a->experts * 2);
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m))
        for (; row < end; row++) route_row(a, row, scratch, padded);
    team_finish_phase(m, team_row_items(m, a->rows));
}

void op_sort_choices(const struct sort_choices_args *a, struct team_member *m) {
    if (team_take_item(m, 1) == 0) {
        const int64_t count = a->rows * a->k;
        int32_t *active = a->plan, *experts = a->plan + 1, *first = experts + a->experts, *choices = first + a->experts + 1;
        memset(first, 0, (size_t)(a->experts + 1) * sizeof(*first));
        for (int64_t i = 0; i < count; i++)
            if (is_held(a->ids[i], a->experts)) first[a->ids[i]]++;
        *active = 0;
        int32_t before = 0;
        for (int64_t e = 0; e < a->experts; e++) {
            if (first[e]) experts[(*active)++] = (int32_t)e;
            before += first[e], first[e] = before - first[e];
        }
        for (int64_t i = 0; i < count; i++)
            if (is_held(a->ids[i], a->experts)) choices[first[a->ids[i]]++] = (int32_t)i;
        for (int64_t e = a->experts; e > 0; e--) first[e] = first[e - 1];  // each is where the next one begins by now
        first[0] = 0;
        team_item_done(m);
    }
    team_finish_phase(m, 1);
}

INLINE void add_row(const struct add_choices_args *a, int64_t row, int dtype, int out_dtype) {
    const int32_t *ids = a->ids + row * a->k;
    const float *results = a->results + row * a->k * a->width, *weights = a->weights ? a->weights + row * a->k : NULL;
    float gate = 1.0f;
    if (a->shared_gate) gate = 1.0f / (1.0f + exp_scalar(-a->shared_gate[row]));
    for (int64_t c = 0; c < a->width; c += VW) {
        const int64_t n = MIN(VW, a->width - c), at = row * a->width + c;
        vf sum = {0};
        for (int64_t i = 0; i < a->k; i++) {
            if (!is_held(ids[i], a->experts)) continue;
            const float *from = results + i * a->width;
            sum = vfma(splat(weights ? weights[i] : 1.0f), n == VW ? vload(from + c) : load_part(from, c, n, FLOAT32), sum);
        }
        if (a->shared) sum = vfma(splat(gate), n == VW ? load_as(a->shared, at, dtype) : load_part(a->shared, at, n, dtype), sum);
        if (n == VW) store_as(a->out, at, sum, out_dtype);
        else store_part(a->out, at, n, sum, out_dtype);
    }
}

void op_add_choices(const struct add_choices_args *a, struct team_member *m) {
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            if (a->dtype == FLOAT32) add_row(a, row, FLOAT32, FLOAT32);
            else if (a->out_dtype == FLOAT32) add_row(a, row, BFLOAT16, FLOAT32);
            else add_row(a, row, BFLOAT16, BFLOAT16);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}
