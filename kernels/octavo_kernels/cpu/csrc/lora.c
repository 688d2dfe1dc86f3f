// Low-rank adapters (LoRA): each row of a step has one of several, or none. A row's result depends on that row alone.
#include "ops.h"
#include "simd.h"

#define FEW_OUTPUTS 8      // of a row, that an item has where there are few rows
#define FEW_COLUMNS 256

// An item's part of rows [begin, end) x columns [first, last): few rows are split by columns, many by rows.
struct part {
    int64_t begin, end, first, last;
};
INLINE int64_t num_chunks(const struct team_member *m, int64_t rows, int64_t columns, int64_t chunk) {
    return rows < 4 * m->size ? MAX(1, CEIL_DIV(columns, chunk)) : 1;
}
INLINE int take_part(struct team_member *m, int64_t rows, int64_t columns, int64_t chunk, struct part *part) {
    const int64_t ranges = team_row_items(m, rows), chunks = num_chunks(m, rows, columns, chunk);
    const int64_t item = team_take_item(m, ranges * chunks);
    if (item < 0) return 0;
    const int64_t range = item / chunks, number = item % chunks;
    part->begin = rows * range / ranges, part->end = rows * (range + 1) / ranges;
    part->first = chunks == 1 ? 0 : number * chunk;
    part->last = chunks == 1 ? columns : MIN(columns, part->first + chunk);
    return 1;
}
INLINE void finish_parts(struct team_member *m, int64_t rows, int64_t columns, int64_t chunk) {
    team_finish_phase(m, team_row_items(m, rows) * num_chunks(m, rows, columns, chunk));
}

// Products of one row with outputs [first, last), four at a time; the order of each sum depends on the width alone.
INLINE void shrink_row(const char *x, const char *w, float *out, int64_t first, int64_t last, int64_t width, int dtype,
                       int wdtype) {
    const int64_t size = wdtype == BFLOAT16 ? 2 : 4;
    for (int64_t j = first; j < last; j += 4) {
        const int64_t n = MIN(4, last - j);
        vf sums[4] = {0};
        const char *rows[4];
        for (int64_t r = 0; r < 4; r++) rows[r] = w + MIN(j + r, last - 1) * width * size;
        int64_t i = 0;
        for (; i + VW <= width; i += VW) {
            const vf v = load_as(x, i, dtype);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) sums[r] = vfma(v, load_as(rows[r], i, wdtype), sums[r]);
        }
        if (i < width) {
            const vf v = load_part(x, i, width - i, dtype);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) sums[r] = vfma(v, load_part(rows[r], i, width - i, wdtype), sums[r]);
        }
        for (int64_t r = 0; r < n; r++) out[j + r] = vsum(sums[r]);
    }
}

void op_lora_shrink(const struct lora_shrink_args *a, struct team_member *m) {
    const int64_t size = a->dtype == BFLOAT16 ? 2 : 4;
    struct part p;
    for (; take_part(m, a->rows, a->outputs, FEW_OUTPUTS, &p); team_item_done(m)) {
        for (int64_t row = p.begin; row < p.end; row++) {
            const int64_t slot = a->slots[row];
            if (slot < 0) continue;
            const int64_t last = MIN(p.last, a->parts * a->ranks[slot]);
            if (p.first >= last) continue;
            const char *x = (const char *)a->x + row * a->stride * size, *w = (const char *)a->weights[slot];
            float *out = a->out + row * a->outputs;
            if (a->dtype == FLOAT32 && a->weight_dtype == FLOAT32)
                shrink_row(x, w, out, p.first, last, a->width, FLOAT32, FLOAT32);
            else if (a->dtype == FLOAT32) shrink_row(x, w, out, p.first, last, a->width, FLOAT32, BFLOAT16);
            else if (a->weight_dtype == FLOAT32) shrink_row(x, w, out, p.first, last, a->width, BFLOAT16, FLOAT32);
            else shrink_row(x, w, out, p.first, last, a->width, BFLOAT16, BFLOAT16);
        }
    }
    finish_parts(m, a->rows, a->outputs, FEW_OUTPUTS);
}

void op_lora_gather(const struct lora_gather_args *a, struct team_member *m) {
    const int64_t size = a->weight_dtype == BFLOAT16 ? 2 : 4;
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            const int64_t slot = a->slots[row], rank = slot < 0 ? 0 : a->ranks[slot], id = a->ids[row] - a->first;
            float *out = a->out + row * a->outputs;
            const char *from = rank ? (const char *)a->weights[slot] + id * rank * size : NULL;
            for (int64_t j = 0; j < rank; j++) {
                vf v = {0};
                if (id >= 0 && id < a->count) v = load_part(from, j, 1, (int)a->weight_dtype);
                out[j] = v[0];
            }
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

// y [first, last) += h [rank] times w [rank, columns]
INLINE void expand_row(char *y, const float *h, const char *w, int64_t rank, int64_t first, int64_t last, int64_t columns,
                       int dtype, int wdtype) {
    const int64_t size = wdtype == BFLOAT16 ? 2 : 4;
    int64_t i = first;
    for (; i + NV * VW <= last; i += NV * VW) {
        vf sums[NV];
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) sums[n] = load_as(y, i + n * VW, dtype);
        for (int64_t j = 0; j < rank; j++) {
            const vf factor = splat(h[j]);
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) sums[n] = vfma(factor, load_as(w + j * columns * size, i + n * VW, wdtype), sums[n]);
        }
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) store_as(y, i + n * VW, sums[n], dtype);
    }
    for (; i < last; i += VW) {
        const int64_t n = MIN(VW, last - i);
        vf sum = load_part(y, i, n, dtype);
        for (int64_t j = 0; j < rank; j++)
            sum = vfma(splat(h[j]), load_part(w + j * columns * size, i, n, wdtype), sum);
        store_part(y, i, n, sum, dtype);
    }
}

void op_lora_expand(const struct lora_expand_args *a, struct team_member *m) {
    const int64_t size = a->dtype == BFLOAT16 ? 2 : 4, columns = a->offsets[a->parts];
    struct part p;
    for (; take_part(m, a->rows, columns, FEW_COLUMNS, &p); team_item_done(m)) {
        for (int64_t row = p.begin; row < p.end; row++) {
            const int64_t slot = a->slots[row], rank = slot < 0 ? 0 : a->ranks[slot];
            if (!rank) continue;
            char *y = (char *)a->y + row * a->stride * size;
            const char *w = (const char *)a->weights[slot];
            for (int64_t part = 0; part < a->parts; part++) {
                const int64_t first = MAX(p.first, a->offsets[part]), last = MIN(p.last, a->offsets[part + 1]);
                if (first >= last) continue;
                const float *h = a->h + row * a->inputs + part * rank;
                if (a->dtype == FLOAT32 && a->weight_dtype == FLOAT32)
                    expand_row(y, h, w, rank, first, last, columns, FLOAT32, FLOAT32);
                else if (a->dtype == FLOAT32) expand_row(y, h, w, rank, first, last, columns, FLOAT32, BFLOAT16);
                else if (a->weight_dtype == FLOAT32) expand_row(y, h, w, rank, first, last, columns, BFLOAT16, FLOAT32);
                else expand_row(y, h, w, rank, first, last, columns, BFLOAT16, BFLOAT16);
            }
        }
    }
    finish_parts(m, a->rows, columns, FEW_COLUMNS);
}
