// Activations to int8, fused with what produces them: RMS norm (with residual) or SiLU times up.
#include "ops.h"
#include "rows.h"

INLINE vf vabs(vf x) { return (vf)((vi)x & splat_int(0x7fffffff)); }
INLINE vf round_even(vf x) {
    const vf magic = splat(12582912.0f);
    return x + magic - magic;
}

INLINE void store_int8(int8_t *p, vf x) {
    typedef int8_t vb __attribute__((vector_size(VW), aligned(1), may_alias));
    *(vb *)p = __builtin_convertvector(__builtin_convertvector(x, vi), vb);
}

// One group of a row: q1 [GROUP], and with two terms q2 [GROUP]
INLINE void quantize_group(const float *x, int8_t *q1, int8_t *q2, struct group_meta *meta) {
    vf top = {0}, taint = {0};
    for (int i = 0; i < GROUP; i += VW) {
        vf v = vload(x + i);
        top = vmax(top, vabs(v));
        taint += v * splat(0.0f);
    }
    float highest = vmax_all(top), scale = highest / 127.0f, inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    if (vsum(taint) != 0.0f) scale = NAN, inverse = 0.0f;  // an infinity or NaN spoils the row, visibly
    if (!(inverse < INFINITY)) inverse = 0.0f;             // denormal input
    vf sum = {0};
    for (int i = 0; i < GROUP; i += VW) {
        vf v = inverse > 0.0f ? vload(x + i) : splat(0.0f), scaled = v * splat(inverse), q = round_even(scaled);
        store_int8(q1 + i, q);
        if (q2) {
            vf rest = round_even((scaled - q) * splat(256.0f));
            rest = vselect_less(splat(127.0f), rest, splat(127.0f), rest);
            rest = vselect_less(rest, splat(-127.0f), splat(-127.0f), rest);  // -128 has no negative
            store_int8(q2 + i, rest);
            q = vfma(q, splat(256.0f), rest);
        }
        sum += q;
    }
    if (q2) scale *= 1.0f / 256.0f;
    meta->sum = (int32_t)vsum(sum);
    meta->scale = scale;
    meta->scale_sum = scale * (float)meta->sum;
    meta->unused = 0;
}

INLINE void load_float_row(const struct quantize_args *a, int64_t r, float *row, int dtype) {
    int64_t size = dtype == BFLOAT16 ? 2 : 4, width = a->width;
    const char *x = (const char *)a->x + r * width * size * (a->kind == 2 ? 2 : 1);
    if (a->kind == 2) {
        const char *up = x + width * size;
        for (int64_t i = 0; i < width; i += VW) {
            int64_t n = MIN(VW, width - i);
            vf g = n == VW ? load_as(x, i, dtype) : load_part(x, i, n, dtype);
            vf u = n == VW ? load_as(up, i, dtype) : load_part(up, i, n, dtype);
            vstore(row + i, round_as(round_as(vsilu(g), dtype) * u, dtype));
        }
    } else if (a->kind == 1) {
        const char *residual = a->residual ? (const char *)a->residual + r * width * size : NULL;
        char *total = a->residual ? (char *)a->residual_out + r * width * size : NULL;
        vf inverse = splat(inverse_rms(square_sum(x, residual, total, width, dtype), width, (float)a->eps));
        const char *from = residual ? total : x;
        for (int64_t i = 0; i < width; i += VW) {
            int64_t n = MIN(VW, width - i);
            vf v = n == VW ? load_as(from, i, dtype) : load_part(from, i, n, dtype);
            vf w = n == VW ? load_as(a->norm_weight, i, dtype) : load_part(a->norm_weight, i, n, dtype);
            vstore(row + i, round_as(round_as(v * inverse, dtype) * w, dtype));
        }
    } else {
        for (int64_t i = 0; i < width; i += VW) {
            int64_t n = MIN(VW, width - i);
            vstore(row + i, n == VW ? load_as(x, i, dtype) : load_part(x, i, n, dtype));
        }
    }
}

void op_quantize(const struct quantize_args *a, struct member *m) {
    int64_t padded = a->groups * GROUP;
    float *row = scratch((size_t)(padded + VW) * sizeof(float));
    memset(row, 0, (size_t)(padded + VW) * sizeof(float));  // columns past the width are zeros
    for (int64_t r, end; team_take_rows(m, a->rows, &r, &end); team_done(m)) {
        for (; r < end; r++) {
            if (a->dtype == BFLOAT16) load_float_row(a, r, row, BFLOAT16);
            else load_float_row(a, r, row, FLOAT32);
            int8_t *q1 = a->values + r * a->terms * padded, *q2 = a->terms == 2 ? q1 + padded : NULL;
            struct group_meta *meta = a->meta + r * a->groups;
            for (int64_t g = 0; g < a->groups; g++)
                quantize_group(row + g * GROUP, q1 + g * GROUP, q2 ? q2 + g * GROUP : NULL, meta + g);
        }
    }
    team_wait(m, team_row_items(m, a->rows));
}
