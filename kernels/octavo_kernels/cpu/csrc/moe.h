// Mixtures of experts: what the operations on quantised rows and on rows of 16 or 32 bits share.
//
// A choice is a row and one of its k experts, number row * k + i. A plan, int32, has the choices sorted by expert and then by
// number, so that the rows of an expert lie together and its weights are read once for all of them:
//     number of experts that have rows; these experts [experts]; place of each expert's first choice [experts + 1]; choices.
// Choices of experts that are not held here (of another rank: their ids are below 0, or `experts` and above) are left out.
#pragma once
#include "moe_ops.h"
#include "rows.h"

struct plan {
    const int32_t *active, *experts, *first, *choices;
    int64_t most;  // experts that may have rows
};
static inline struct plan plan_of(const int32_t *plan, int64_t experts, int64_t choices) {
    return (struct plan){plan, plan + 1, plan + 1 + experts, plan + 2 + 2 * experts, MIN(experts, choices)};
}

static inline int is_held(int32_t id, int64_t experts) { return id >= 0 && id < experts; }

// Take an item: the number of an expert that has rows and one of `parts` parts of its work; 0 when none is left. The phase has
// most * parts items, the last ones empty (expert -1): a thread that comes late must not read how many have rows, as that memory
// may have another use by then.
static inline int take_expert(const struct plan *p, int64_t parts, struct team_member *m, int64_t *expert, int64_t *part) {
    const int64_t n = team_take_item(m, p->most * parts);
    if (n < 0) return 0;
    *expert = n / parts < *p->active ? p->experts[n / parts] : -1, *part = n % parts;
    return 1;
}

// activation(gate) * up
INLINE vf gated_product(vf gate, vf up, int activation, float limit, int dtype) {
    if (activation == SILU) return silu_mul(gate, up, dtype);
    if (activation == CLAMPED_SWIGLU) {
        const vf high = splat(limit), low = splat(-limit);
        gate = vselect_less(high, gate, high, gate);
        up = vselect_less(high, up, high, up);
        up = vselect_less(up, low, low, up) + splat(1.0f);
        return round_as(up * vsilu(gate * splat(1.702f), FLOAT32) * splat(1.0f / 1.702f), dtype);
    }
    return round_as(round_as(activate(gate, activation, dtype), dtype) * up, dtype);
}
