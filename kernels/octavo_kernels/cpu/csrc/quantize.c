// Quantises activations to int8, fused with what produces them: RMS norm (with residual) or SiLU times up.
#include "linear_ops.h"
#include "rows.h"

INLINE void load_float_row(const struct quantize_args *a, int64_t r, float *row, int dtype, int weight_dtype) {
    int64_t size = dtype == BFLOAT16 ? 2 : 4, width = a->width;
    const char *x = (const char *)a->x + r * width * size * (a->kind == 2 ? 2 : 1);
    if (a->kind == 2) {
        const char *up = x + width * size;
        for (int64_t i = 0; i < width; i += VW) {
            int64_t n = MIN(VW, width - i);
            vf g = n == VW ? load_as(x, i, dtype) : load_part(x, i, n, dtype);
            vf u = n == VW ? load_as(up, i, dtype) : load_part(up, i, n, dtype);
            vstore(row + i, silu_mul(g, u, dtype));
        }
    } else if (a->kind == 1) {
        const char *residual = a->residual ? (const char *)a->residual + r * width * size : NULL;
        char *total = a->residual ? (char *)a->residual_out + r * width * size : NULL;
        vf inverse = splat(inverse_rms(sum_of_squares(x, residual, total, width, dtype), width, (float)a->eps));
        const char *from = residual ? total : x;
        for (int64_t i = 0; i < width; i += VW) {
            int64_t n = MIN(VW, width - i);
            vf v = n == VW ? load_as(from, i, dtype) : load_part(from, i, n, dtype);
            vf w = n == VW ? load_as(a->norm_weight, i, weight_dtype) : load_part(a->norm_weight, i, n, weight_dtype);
            vstore(row + i, round_as(round_as(v * inverse, weight_dtype) * w, dtype));
        }
    } else {
        for (int64_t i = 0; i < width; i += VW) {
            int64_t n = MIN(VW, width - i);
            vstore(row + i, n == VW ? load_as(x, i, dtype) : load_part(x, i, n, dtype));
        }
    }
}

static void store_plain(const struct quantize_args *a, int64_t r, const float *row) {
    const int64_t at = r * a->width;
    int64_t i = 0;
    for (; i + VW <= a->width; i += VW) store_as(a->plain, at + i, vload(row + i), (int)a->dtype);
    if (i < a->width) store_part(a->plain, at + i, a->width - i, vload(row + i), (int)a->dtype);
}

void op_quantize(const struct quantize_args *a, struct team_member *m) {
    int64_t padded = a->groups * GROUP;
    float *row = thread_scratch((size_t)(padded + VW) * sizeof(float));
    memset(row, 0, (size_t)(padded + VW) * sizeof(float));  // padding columns are zeros
    for (int64_t r, end; team_take_rows(m, a->rows, &r, &end); team_item_done(m)) {
        for (; r < end; r++) {
            if (a->dtype == BFLOAT16 && a->weight_dtype == BFLOAT16) load_float_row(a, r, row, BFLOAT16, BFLOAT16);
            else if (a->dtype == BFLOAT16) load_float_row(a, r, row, BFLOAT16, FLOAT32);
            else load_float_row(a, r, row, FLOAT32, FLOAT32);
            if (a->plain) store_plain(a, r, row);
            if (a->terms == ROW_TERMS) {
                quantize_scaled_row(row, a->width, a->groups, scaled_row_at(a->values, r, a->groups));
                continue;
            }
            struct row_pair *first = a->values + r * a->terms * a->groups / 2;
            struct row_pair *second = a->terms == 2 ? first + a->groups / 2 : NULL;
            struct row_meta meta = row_meta_at(a->meta, r, a->groups);
            float row_max = 0.0f;
            if (second && a->kind == 1) {
                int32_t bits = max_abs_bits(row, padded);
                memcpy(&row_max, &bits, 4);
            }
            for (int64_t p = 0; p < a->groups / 2; p++) {
                int8_t q1[PAIR], q2[PAIR];
                for (int64_t n = 0; n < 2; n++) {
                    const int64_t g = 2 * p + n;
                    quantize_group(row + g * GROUP, g, q1 + n * GROUP, second ? q2 + n * GROUP : NULL, row_max, meta);
                }
                store_pair(first + p, q1, q1 + GROUP);
                if (second) store_pair(second + p, q2, q2 + GROUP);
            }
            finish_row_scales(first, a->terms, a->groups, meta);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}
