// Norms, activation functions, sums, products with a number, embedding and argmax. A row stays in the first-level cache.
#include "elementwise_ops.h"
#include "linear_ops.h"
#include "rows.h"
#include "simd.h"

INLINE void rms_norm_row(const struct rms_norm_args *a, int64_t row, int dtype, int weight_dtype) {
    int64_t size = dtype == BFLOAT16 ? 2 : 4, skip = row * a->width * size, width = a->width;
    const char *x = (const char *)a->x + skip;
    const char *residual = a->residual ? (const char *)a->residual + skip : NULL;
    char *total = a->residual ? (char *)a->residual_out + skip : NULL, *out = (char *)a->out + skip;
    vf inverse = splat(inverse_rms(sum_of_squares(x, residual, total, width, dtype), width, (float)a->eps));
    const char *from = residual ? total : x;
    for (int64_t i = 0; i < width; i += VW) {
        int64_t n = MIN(VW, width - i);
        if (n == VW) {
            vf y = round_as(load_as(from, i, dtype) * inverse, weight_dtype);
            store_as(out, i, y * load_as(a->weight, i, weight_dtype), dtype);
        } else {
            vf y = round_as(load_part(from, i, n, dtype) * inverse, weight_dtype);
            store_part(out, i, n, y * load_part(a->weight, i, n, weight_dtype), dtype);
        }
    }
}

void op_rms_norm(const struct rms_norm_args *a, struct team_member *m) {
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            if (a->dtype == BFLOAT16 && a->weight_dtype == BFLOAT16) rms_norm_row(a, row, BFLOAT16, BFLOAT16);
            else if (a->dtype == BFLOAT16) rms_norm_row(a, row, BFLOAT16, FLOAT32);
            else rms_norm_row(a, row, FLOAT32, FLOAT32);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

void op_rms_norm_columns(const struct rms_norm_columns_args *a, struct team_member *m) {
    const int64_t size = a->dtype == BFLOAT16 ? 2 : 4;
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            char *x = (char *)a->x + row * a->stride * size;
            // As rows of a tensor without gaps
            const struct rms_norm_args heads = {.x = x, .weight = a->weight, .out = x, .width = a->width, .eps = a->eps};
            for (int64_t h = 0; h < a->heads; h++) {
                if (a->dtype == BFLOAT16 && a->weight_dtype == BFLOAT16) rms_norm_row(&heads, h, BFLOAT16, BFLOAT16);
                else if (a->dtype == BFLOAT16) rms_norm_row(&heads, h, BFLOAT16, FLOAT32);
                else rms_norm_row(&heads, h, FLOAT32, FLOAT32);
            }
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

// A row as float32 in `scratch`, then its mean, its variance around that, and the result: each in an order that depends on the
// width alone.
INLINE void layer_norm_row(const struct layer_norm_args *a, int64_t row, float *scratch, int dtype) {
    const int64_t width = a->width, skip = row * width * (dtype == BFLOAT16 ? 2 : 4);
    const char *x = (const char *)a->x + skip, *residual = a->residual ? (const char *)a->residual + skip : NULL;
    char *total = a->residual ? (char *)a->residual_out + skip : NULL, *out = (char *)a->out + skip;
    vf sum = {0}, squares = {0};
    for (int64_t i = 0; i < width; i += VW) {
        const vf v = load_with_residual(x, residual, total, i, MIN(VW, width - i), dtype);
        vstore(scratch + i, v);
        sum += v;
    }
    const vf mean = splat(vsum(sum) / (float)width);
    for (int64_t i = 0; i < width; i += VW) {
        const vf off = vload(scratch + i) - mean;
        vstore(scratch + i, off);
        const vf counted = vselect(lane_index() < splat_int((int32_t)MIN(VW, width - i)), off, splat(0.0f));
        squares = vfma(counted, counted, squares);
    }
    const vf inverse = splat(1.0f / sqrtf(vsum(squares) / (float)width + (float)a->eps));
    for (int64_t i = 0; i < width; i += VW) {
        const int64_t n = MIN(VW, width - i);
        vf y = vload(scratch + i) * inverse;
        if (a->weight) y *= n == VW ? load_as(a->weight, i, dtype) : load_part(a->weight, i, n, dtype);
        if (a->bias) y += n == VW ? load_as(a->bias, i, dtype) : load_part(a->bias, i, n, dtype);
        if (n == VW) store_as(out, i, y, dtype);
        else store_part(out, i, n, y, dtype);
    }
}

void op_layer_norm(const struct layer_norm_args *a, struct team_member *m) {
    float *scratch = thread_scratch((size_t)(a->width + VW) * 4);
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            if (a->dtype == BFLOAT16) layer_norm_row(a, row, scratch, BFLOAT16);
            else layer_norm_row(a, row, scratch, FLOAT32);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

INLINE void activation_row(const struct activation_args *a, int64_t row, int kind, int dtype) {
    const int64_t size = dtype == BFLOAT16 ? 2 : 4, width = a->width;
    const char *x = (const char *)a->x + row * a->stride * size;
    const char *up = a->up ? (const char *)a->up + row * a->up_stride * size : NULL;
    char *out = (char *)a->out + row * width * size;
    for (int64_t i = 0; i < width; i += VW) {
        const int64_t n = MIN(VW, width - i);
        vf y = activate(n == VW ? load_as(x, i, dtype) : load_part(x, i, n, dtype), kind, dtype);
        if (up) y = round_as(y, dtype) * (n == VW ? load_as(up, i, dtype) : load_part(up, i, n, dtype));
        if (n == VW) store_as(out, i, y, dtype);
        else store_part(out, i, n, y, dtype);
    }
}

void op_activation(const struct activation_args *a, struct team_member *m) {
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            if (a->dtype == BFLOAT16) activation_row(a, row, (int)a->kind, BFLOAT16);
            else activation_row(a, row, (int)a->kind, FLOAT32);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

void op_add(const struct add_args *a, struct team_member *m) {
    const int dtype = (int)a->dtype;
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (int64_t i = row * a->width; i < end * a->width; i += VW) {
            const int64_t n = MIN(VW, end * a->width - i);
            if (n == VW) store_as(a->out, i, load_as(a->x, i, dtype) + load_as(a->y, i, dtype), dtype);
            else store_part(a->out, i, n, load_part(a->x, i, n, dtype) + load_part(a->y, i, n, dtype), dtype);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

INLINE vf scale_vector(vf x, vf factor, vf cap, int has_cap) {
    x *= factor;
    return has_cap ? cap * vtanh(x / cap) : x;
}

void op_scale(const struct scale_args *a, struct team_member *m) {
    const int dtype = (int)a->dtype, has_cap = a->cap > 0;
    const vf factor = splat((float)a->factor), cap = splat((float)a->cap);
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (int64_t i = row * a->width; i < end * a->width; i += VW) {
            const int64_t n = MIN(VW, end * a->width - i);
            if (n == VW) store_as(a->out, i, scale_vector(load_as(a->x, i, dtype), factor, cap, has_cap), dtype);
            else store_part(a->out, i, n, scale_vector(load_part(a->x, i, n, dtype), factor, cap, has_cap), dtype);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

void op_take_columns(const struct take_columns_args *a, struct team_member *m) {
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            const char *x = (const char *)a->x + row * a->width * a->size;
            char *out = (char *)a->out + row * a->count * a->size;
            if (a->size == 4) {
                for (int64_t i = 0; i < a->count; i++) ((int32_t *)out)[i] = ((const int32_t *)x)[a->columns[i]];
            } else {
                for (int64_t i = 0; i < a->count; i++) ((int16_t *)out)[i] = ((const int16_t *)x)[a->columns[i]];
            }
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
            const int64_t row = table_row(a->ids[i], a->from, a->rows);
            char *out = (char *)a->out + i * a->row_bytes;
            if (row < 0) memset(out, 0, (size_t)a->row_bytes);
            else memcpy(out, (const char *)a->table + row * a->row_bytes, (size_t)a->row_bytes);
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
        argmax_row(a->x + r * a->stride, a->width, a->index + r, a->best + r);
    team_finish_phase(m, a->rows);
}
