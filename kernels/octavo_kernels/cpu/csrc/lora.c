// Low-rank adapters (LoRA): each row of a step has one of several, or none. A row's result depends on that row alone.
//
// Rows are taken in tiles of one slot, so that a matrix is read once for all of them. The order of each sum depends on widths
// and ranks alone, not on who else is in the tile. What is needed next is fetched ahead: rows of A and of blocks of B are too
// short for the processor to notice by itself, and adapters are read from memory in every step.
#include "lora_ops.h"
#include "simd.h"
#include "lora_tiles.h"

#define TILE 8          // rows
#define FEW_OUTPUTS 16  // that an item has where there are few tiles
#define FEW_COLUMNS 256

struct tile {
    int32_t slot, first, count;
};
INLINE const struct tile *tiles_of(const int32_t *tiles) { return (const struct tile *)(tiles + 1); }

void op_lora_tiles(const struct lora_tiles_args *a, struct team_member *m) {
    if (team_take_item(m, 1) == 0) {
        int32_t *ends = thread_scratch((size_t)(a->num_slots + 1) * 4), at = 0, count = 0;
        memset(ends, 0, (size_t)a->num_slots * 4);
        for (int64_t row = 0; row < a->count; row++)
            if (a->slots[row] >= 0) ends[a->slots[row]]++;
        struct tile *tiles = (struct tile *)(a->tiles + 1);
        for (int32_t slot = 0; slot < a->num_slots; slot++) {
            const int32_t first = at, last = at + ends[slot];
            for (; at < last; at += TILE) tiles[count++] = (struct tile){slot, at, MIN(TILE, last - at)};
            at = last;
            ends[slot] = first;
        }
        for (int64_t row = 0; row < a->count; row++)
            if (a->slots[row] >= 0) a->rows[ends[a->slots[row]]++] = (int32_t)row;
        a->tiles[0] = count;
        team_item_done(m);
    }
    team_finish_phase(m, 1);
}

// An item's part of a tile: columns [first, last). Few tiles are split by columns.
struct part {
    const struct tile *tile;
    int64_t first, last;
};
INLINE int64_t num_chunks(const struct team_member *m, int64_t tiles, int64_t columns, int64_t chunk) {
    return tiles < 4 * m->size ? MAX(1, CEIL_DIV(columns, chunk)) : 1;
}
INLINE int take_part(struct team_member *m, const int32_t *tiles, int64_t columns, int64_t chunk, struct part *part) {
    const int64_t chunks = num_chunks(m, *tiles, columns, chunk), item = team_take_item(m, *tiles * chunks);
    if (item < 0) return 0;
    part->tile = tiles_of(tiles) + item / chunks;
    part->first = chunks == 1 ? 0 : item % chunks * chunk;
    part->last = chunks == 1 ? columns : MIN(columns, part->first + chunk);
    return 1;
}
INLINE void finish_parts(struct team_member *m, const int32_t *tiles, int64_t columns, int64_t chunk) {
    team_finish_phase(m, *tiles * num_chunks(m, *tiles, columns, chunk));
}

// Products of `rows` rows with outputs [first, last), four at a time
INLINE void shrink_rows(const char *const *x, const char *w, float *const *out, int64_t first, int64_t last, int64_t width,
                        int rows, int dtype, int wdtype) {
    const int64_t size = wdtype == BFLOAT16 ? 2 : 4;
    for (int64_t j = first; j < last; j += 4) {
        const int64_t n = MIN(4, last - j);
        vf sums[4][4] = {0};
        const char *of[4];
        for (int64_t r = 0; r < 4; r++) of[r] = w + MIN(j + r, last - 1) * width * size;
        int64_t i = 0;
        for (; i + VW <= width; i += VW) {
            vf weight[4];
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                weight[r] = load_as(of[r], i, wdtype);
                __builtin_prefetch(of[r] + (4 * width + i) * size);  // of the next four
            }
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) {
                const vf v = load_as(x[row], i, dtype);
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++) sums[row][r] = vfma(v, weight[r], sums[row][r]);
            }
        }
        if (i < width) {
            for (int r = 0; r < 4; r++) {
                const vf weight = load_part(of[r], i, width - i, wdtype);
                for (int row = 0; row < rows; row++)
                    sums[row][r] = vfma(load_part(x[row], i, width - i, dtype), weight, sums[row][r]);
            }
        }
        for (int row = 0; row < rows; row++)
            for (int64_t r = 0; r < n; r++) out[row][j + r] = vsum(sums[row][r]);
    }
}

#define BY_DTYPES(a, function, ...)                                                                              \
    do {                                                                                                         \
        if ((a)->dtype == FLOAT32 && (a)->weight_dtype == FLOAT32) function(__VA_ARGS__, FLOAT32, FLOAT32);      \
        else if ((a)->dtype == FLOAT32) function(__VA_ARGS__, FLOAT32, BFLOAT16);                                \
        else if ((a)->weight_dtype == FLOAT32) function(__VA_ARGS__, BFLOAT16, FLOAT32);                         \
        else function(__VA_ARGS__, BFLOAT16, BFLOAT16);                                                          \
    } while (0)

void op_lora_shrink(const struct lora_shrink_args *a, struct team_member *m) {
    const int64_t size = a->dtype == BFLOAT16 ? 2 : 4;
    struct part p;
    for (; take_part(m, a->tiles, a->outputs, FEW_OUTPUTS, &p); team_item_done(m)) {
        const int64_t slot = p.tile->slot, last = MIN(p.last, a->parts * a->ranks[slot]);
        const char *w = (const char *)a->weights[slot], *x[TILE];
        float *out[TILE];
        for (int64_t i = 0; i < p.tile->count; i++) {
            const int64_t row = a->order[p.tile->first + i];
            x[i] = (const char *)a->x + row * a->stride * size, out[i] = a->out + row * a->outputs;
        }
#if HAS_AMX
        if (a->dtype == BFLOAT16 && a->weight_dtype == BFLOAT16) {
            if (p.first < last) shrink_by_tiles(x, w, out, p.first, last, a->width, p.tile->count);
            continue;
        }
#endif
        for (int64_t i = 0, n; i < p.tile->count && p.first < last; i += n) {
            const int64_t left = p.tile->count - i;
            n = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            if (n == 4) BY_DTYPES(a, shrink_rows, x + i, w, out + i, p.first, last, a->width, 4);
            else if (n == 2) BY_DTYPES(a, shrink_rows, x + i, w, out + i, p.first, last, a->width, 2);
            else BY_DTYPES(a, shrink_rows, x + i, w, out + i, p.first, last, a->width, 1);
        }
    }
    finish_parts(m, a->tiles, a->outputs, FEW_OUTPUTS);
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

// y [first, last) += h [rank] times w [rank, columns], of `rows` rows
INLINE void expand_rows(char *const *y, const float *const *h, const char *w, int64_t rank, int64_t first, int64_t last,
                        int64_t columns, int rows, int dtype, int wdtype) {
    const int64_t size = wdtype == BFLOAT16 ? 2 : 4;
    int64_t i = first;
    for (; i + NV * VW <= last; i += NV * VW) {
        vf sums[4][NV];
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) sums[row][n] = load_as(y[row], i + n * VW, dtype);
        for (int64_t j = 0; j < rank; j++) {
            vf weight[NV];
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) {
                weight[n] = load_as(w + j * columns * size, i + n * VW, wdtype);
                __builtin_prefetch(w + (j * columns + i + (NV + n) * VW) * size);  // the next columns
            }
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) {
                const vf factor = splat(h[row][j]);
#pragma GCC unroll 4
                for (int n = 0; n < NV; n++) sums[row][n] = vfma(factor, weight[n], sums[row][n]);
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) store_as(y[row], i + n * VW, sums[row][n], dtype);
    }
    for (; i < last; i += VW) {
        const int64_t n = MIN(VW, last - i);
        for (int row = 0; row < rows; row++) {
            vf sum = load_part(y[row], i, n, dtype);
            for (int64_t j = 0; j < rank; j++)
                sum = vfma(splat(h[row][j]), load_part(w + j * columns * size, i, n, wdtype), sum);
            store_part(y[row], i, n, sum, dtype);
        }
    }
}

void op_lora_expand(const struct lora_expand_args *a, struct team_member *m) {
    const int64_t size = a->dtype == BFLOAT16 ? 2 : 4, columns = a->offsets[a->parts];
    struct part p;
    for (; take_part(m, a->tiles, columns, FEW_COLUMNS, &p); team_item_done(m)) {
        const int64_t slot = p.tile->slot, rank = a->ranks[slot];
        const char *w = (const char *)a->weights[slot];
        for (int64_t part = 0; part < a->parts && rank; part++) {
            const int64_t first = MAX(p.first, a->offsets[part]), last = MIN(p.last, a->offsets[part + 1]);
            if (first >= last) continue;
            char *y[TILE];
            const float *h[TILE];
            for (int64_t i = 0; i < p.tile->count; i++) {
                const int64_t row = a->order[p.tile->first + i];
                y[i] = (char *)a->y + row * a->stride * size, h[i] = a->h + row * a->inputs + part * rank;
            }
            for (int64_t i = 0, n; i < p.tile->count; i += n) {
                const int64_t left = p.tile->count - i;
                n = left >= 4 ? 4 : left >= 2 ? 2 : 1;
                if (n == 4) BY_DTYPES(a, expand_rows, y + i, h + i, w, rank, first, last, columns, 4);
                else if (n == 2) BY_DTYPES(a, expand_rows, y + i, h + i, w, rank, first, last, columns, 2);
                else BY_DTYPES(a, expand_rows, y + i, h + i, w, rank, first, last, columns, 1);
            }
        }
    }
    finish_parts(m, a->tiles, columns, FEW_COLUMNS);
}
