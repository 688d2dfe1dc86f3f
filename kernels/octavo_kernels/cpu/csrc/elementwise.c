// RMS norm (with or without residual), SiLU times up, embedding and argmax. A row stays in the first-level cache.
#include "ops.h"
#include "rows.h"
#include "simd.h"

INLINE void rms_norm_row(const struct rms_norm_args *a, int64_t row, int dtype) {
    int64_t size = dtype == BFLOAT16 ? 2 : 4, skip = row * a->width * size, width = a->width;
    const char *x = (const char *)a->x + skip;
    const char *residual = a->residual ? (const char *)a->residual + skip : NULL;
    char *total = a->residual ? (char *)a->residual_out + skip : NULL, *out = (char *)a->out + skip;
    vf inverse = splat(inverse_rms(sum_of_squares(x, residual, total, width, dtype), width, (float)a->eps));
    const char *from = residual ? total : x;
    for (int64_t i = 0; i < width; i += VW) {
        int64_t n = MIN(VW, width - i);
        if (n == VW) {
            vf y = round_as(load_as(from, i, dtype) * inverse, dtype);
            store_as(out, i, y * load_as(a->weight, i, dtype), dtype);
        } else {
            vf y = round_as(load_part(from, i, n, dtype) * inverse, dtype);
            store_part(out, i, n, y * load_part(a->weight, i, n, dtype), dtype);
        }
    }
}

void op_rms_norm(const struct rms_norm_args *a, struct team_member *m) {
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            if (a->dtype == BFLOAT16) rms_norm_row(a, row, BFLOAT16);
            else rms_norm_row(a, row, FLOAT32);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

INLINE void silu_row(const struct silu_and_mul_args *a, int64_t row, int dtype) {
    int64_t size = dtype == BFLOAT16 ? 2 : 4, width = a->width;
    const char *gate = (const char *)a->x + row * 2 * width * size, *up = gate + width * size;
    char *out = (char *)a->out + row * width * size;
    for (int64_t i = 0; i < width; i += VW) {
        int64_t n = MIN(VW, width - i);
        if (n == VW) {
            vf g = round_as(vsilu(load_as(gate, i, dtype), dtype), dtype);
            store_as(out, i, g * load_as(up, i, dtype), dtype);
        } else {
            vf g = round_as(vsilu(load_part(gate, i, n, dtype), dtype), dtype);
            store_part(out, i, n, g * load_part(up, i, n, dtype), dtype);
        }
    }
}

void op_silu_and_mul(const struct silu_and_mul_args *a, struct team_member *m) {
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            if (a->dtype == BFLOAT16) silu_row(a, row, BFLOAT16);
            else silu_row(a, row, FLOAT32);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

void op_embedding(const struct embedding_args *a, struct team_member *m) {
    for (int64_t i, end; team_take_rows(m, a->count, &i, &end); team_item_done(m)) {
        for (; i < end; i++) {
            int64_t id = MAX(0, MIN(a->ids[i], a->rows - 1));
            memcpy((char *)a->out + i * a->row_bytes, (const char *)a->table + id * a->row_bytes, (size_t)a->row_bytes);
        }
    }
    team_finish_phase(m, team_row_items(m, a->count));
}

// The first index from `begin` on that holds `wanted` (any NaN, if that is a NaN). There must be one.
static int64_t find_value(const float *x, int64_t begin, float wanted) {
    while (isnan(wanted) ? !isnan(x[begin]) : x[begin] != wanted) begin++;
    return begin;
}

// The maximum of each part of a row is computed first, so that only one part is searched element by element.
static void argmax_row(const float *x, int64_t width, int64_t *index, float *best) {
    enum { PART = 32 * VW };
    float highest = -INFINITY;
    int64_t at = 0;
    for (int64_t part = 0; part < width; part += PART) {
        int64_t i = part, end = MIN(width, part + PART);
        vf top = splat(-INFINITY);
        vi nan_lanes = {0};
        for (; i + VW <= end; i += VW) {
            vf v = vload(x + i);
            top = vmax(top, v);
            nan_lanes |= v != v;
        }
        float here = vmax_all(top);
        int32_t any = vmax_all_int(nan_lanes & 1);
        for (; i < end; i++) {
            here = MAX(here, x[i]);
            any |= isnan(x[i]);
        }
        if (any) {
            *index = find_value(x, part, NAN);
            *best = NAN;
            return;
        }
        if (here > highest) highest = here, at = part;
    }
    *index = find_value(x, at, highest);
    *best = highest;
}

void op_argmax(const struct argmax_args *a, struct team_member *m) {
    for (int64_t r; (r = team_take_item(m, a->rows)) >= 0; team_item_done(m))
        argmax_row(a->x + r * a->width, a->width, a->index + r, a->best + r);
    team_finish_phase(m, a->rows);
}
