// Several streams of hidden states a token, side by side in its row, and gates of which only the largest count (Gemma 3n).
#include "elementwise_ops.h"
#include "rows.h"
#include "simd.h"

INLINE void mix_row(const struct mix_streams_args *a, int64_t row, float *factors, int dtype) {
    const int64_t size = dtype == BFLOAT16 ? 2 : 4, width = a->width, streams = a->first + a->second;
    for (int64_t f = 0; f < a->made * streams; f++) {
        factors[f] = a->constants[f];
        for (int64_t d = 0; d < a->depth; d++) factors[f] += a->matrix[f * a->depth + d] * a->given[row * a->depth + d];
    }
    const char *x = (const char *)a->x + row * a->first * width * size;
    const char *y = a->second ? (const char *)a->y + row * a->second * width * size : NULL;
    char *out = (char *)a->out + row * a->made * width * size;
    for (int64_t i = 0; i < width; i += VW) {
        const int64_t n = MIN(VW, width - i);
        for (int64_t j = 0; j < a->made; j++) {
            vf sum = {0};
            for (int64_t s = 0; s < streams; s++) {
                const char *from = s < a->first ? x + s * width * size : y + (s - a->first) * width * size;
                const vf v = n == VW ? load_as(from, i, dtype) : load_part(from, i, n, dtype);
                sum = vfma(v, splat(factors[j * streams + s]), sum);
            }
            if (n == VW) store_as(out + j * width * size, i, sum, dtype);
            else store_part(out + j * width * size, i, n, sum, dtype);
        }
    }
}

void op_mix_streams(const struct mix_streams_args *a, struct team_member *m) {
    float *factors = thread_scratch((size_t)(a->made * (a->first + a->second)) * 4);
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            if (a->dtype == BFLOAT16) mix_row(a, row, factors, BFLOAT16);
            else mix_row(a, row, factors, FLOAT32);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

INLINE float mean_square(const void *x, int64_t width, int dtype) {
    return sum_of_squares(x, NULL, NULL, width, dtype) / (float)width;
}

void op_match_rms(const struct match_rms_args *a, struct team_member *m) {
    const int dtype = (int)a->dtype;
    const int64_t size = dtype == BFLOAT16 ? 2 : 4;
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            const float wanted = mean_square((const char *)a->like + row * a->like_stride * size, a->width, dtype);
            for (int64_t h = 0; h < a->heads; h++) {
                char *x = (char *)a->x + (row * a->heads + h) * a->width * size;
                const float found = mean_square(x, a->width, dtype);
                // Not a maximum of floats: a NaN stays one.
                const vf factor = splat(sqrtf(wanted) / sqrtf(found < (float)a->floor ? (float)a->floor : found));
                for (int64_t i = 0; i < a->width; i += VW) {
                    const int64_t n = MIN(VW, a->width - i);
                    if (n == VW) store_as(x, i, load_as(x, i, dtype) * factor, dtype);
                    else store_part(x, i, n, load_part(x, i, n, dtype) * factor, dtype);
                }
            }
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

INLINE void sparsify_row(char *x, int64_t width, float factor, int dtype) {
    vf sum = {0}, squares = {0};
    for (int64_t i = 0; i < width; i += VW) sum += load_part(x, i, MIN(VW, width - i), dtype);
    const vf mean = splat(vsum(sum) / (float)width);
    for (int64_t i = 0; i < width; i += VW) {
        const vf off = load_part(x, i, MIN(VW, width - i), dtype) - mean;
        const vf counted = vselect(lane_index() < splat_int((int32_t)MIN(VW, width - i)), off, splat(0.0f));
        squares = vfma(counted, counted, squares);
    }
    const vf cutoff = mean + splat(sqrtf(vsum(squares) / (float)width) * factor);
    for (int64_t i = 0; i < width; i += VW) {
        const int64_t n = MIN(VW, width - i);
        store_part(x, i, n, activate(load_part(x, i, n, dtype) - cutoff, RELU, dtype), dtype);
    }
}

void op_sparsify(const struct sparsify_args *a, struct team_member *m) {
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            char *x = (char *)a->x + row * a->stride * (a->dtype == BFLOAT16 ? 2 : 4);
            if (a->dtype == BFLOAT16) sparsify_row(x, a->width, (float)a->factor, BFLOAT16);
            else sparsify_row(x, a->width, (float)a->factor, FLOAT32);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}
