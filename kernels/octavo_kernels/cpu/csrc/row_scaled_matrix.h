// The products of row_scaled_tile.h by matrix tiles (amx.h), from so many rows on as make up for a tile's fixed time. Sums are the
// same integers, so nothing depends on which of the two makes them. Rows and weights are read as they lie: the 64 columns of a
// tile are a pair of groups.
#pragma once
#include "amx.h"

#define FEW_ROWS 8   // are multiplied in vectors
#define LONG_TILES 3  // of rows: with so many, the columns of a long block are taken in parts
#if HAS_AMX && UNSIGNED_CODES8
#define HAS_INT8_MATRIX 1

// Parts of a block of `count` pairs of groups: about 16 KB, 512 columns
INLINE int64_t long_block_parts(int64_t count) { return MAX(1, (count + 4) / 8); }

// Sums of a tile of rows: of 16 channels, then of the next 16
struct matrix_sums {
    _Alignas(64) int32_t half[2][AMX_ROWS][STRIP];
};

// c (+)= rows of int8, `stride` bytes apart, times `steps` pairs of groups of a block; a share of the lines to prefetch with each
INLINE void add_products(const uint8_t *codes, int64_t steps, const uint8_t *upper, int64_t stride, const uint8_t *prefetch,
                         int64_t lines, struct matrix_sums *c, int more, const int has_lower) {
    const uint8_t *lower = upper + HALF_ROWS * stride;
    if (more) {
        TILE_LOAD(4, c->half[0], TILE_ROW);
        TILE_LOAD(5, c->half[1], TILE_ROW);
    } else {
        TILE_ZERO(4);
        TILE_ZERO(5);
    }
    if (has_lower && more) {
        TILE_LOAD(6, c->half[0][HALF_ROWS], TILE_ROW);
        TILE_LOAD(7, c->half[1][HALF_ROWS], TILE_ROW);
    } else if (has_lower) {
        TILE_ZERO(6);
        TILE_ZERO(7);
    }
    for (int64_t k = 0; k < steps; k++, codes += B_STEPS * B_STRIDE, upper += TILE_ROW, lower += TILE_ROW) {
        for (int64_t line = 0; line < lines; line++, prefetch += 64) __builtin_prefetch(prefetch, 0, 3);
        TILE_LOAD(0, upper, stride);
        TILE_LOAD(2, codes, B_STRIDE);
        TILE_DOT_INT8(4, 0, 2);
        TILE_LOAD(3, codes + TILE_ROW, B_STRIDE);
        TILE_DOT_INT8(5, 0, 3);
        if (has_lower) {
            TILE_LOAD(1, lower, stride);
            TILE_DOT_INT8(6, 1, 2);
            TILE_DOT_INT8(7, 1, 3);
        }
    }
    TILE_STORE(4, c->half[0], TILE_ROW);
    TILE_STORE(5, c->half[1], TILE_ROW);
    if (has_lower) {
        TILE_STORE(6, c->half[0][HALF_ROWS], TILE_ROW);
        TILE_STORE(7, c->half[1][HALF_ROWS], TILE_ROW);
    }
}

INLINE void add_products_of_rows(const uint8_t *codes, int64_t steps, const uint8_t *values, int64_t stride, const uint8_t *prefetch,
                                 int64_t lines, struct matrix_sums *c, int more, int64_t rows) {
    amx_configure(MIN(rows, HALF_ROWS), MAX(0, rows - HALF_ROWS), HALF_ROWS);
    if (rows > HALF_ROWS) add_products(codes, steps, values, stride, prefetch, lines, c, more, 1);
    else add_products(codes, steps, values, stride, prefetch, lines, c, more, 0);
}

INLINE const uint8_t *row_values(const struct activations *x, int64_t row) {
    return scaled_row_at(x->pairs, row, x->groups)->data + scaled_row_steps(x->groups);
}

// Multiply all tiles of rows before their turns, a part of the columns after the other, where a block is too long for the
// first-level cache: dense_parts.h has the reason. `c`: of each tile; `first[n]`: its first row, and behind the last one the end.
static void __attribute__((noinline)) multiply_long_block(struct weight_block *b, const struct activations *x, int64_t tiles,
                                                          const int64_t *first, struct matrix_sums *c) {
    const int64_t parts = long_block_parts(b->count), stride = scaled_row_bytes(x->groups);
    for (int64_t part = 0; part < parts; part++) {
        const int64_t from = b->count * part / parts, steps = b->count * (part + 1) / parts - from,
                      lines = CEIL_DIV(B_STEPS * B_STRIDE / 64, tiles);
        const uint8_t *codes = b->pairs + from * B_STEPS * B_STRIDE, *ahead = codes + steps * B_STEPS * B_STRIDE;
        for (int64_t t = 0; t < tiles; t++)
            add_products_of_rows(codes, steps, row_values(x, first[t]) + from * TILE_ROW, stride, ahead + t * steps * lines * 64, lines,
                                 c + t, part > 0, first[t + 1] - first[t]);
    }
    b->products = c;
}

static void __attribute__((noinline)) matrix_by_row(const struct weight_block *b, const struct activations *x, int64_t row,
                                                    vf (*sums)[MAX_ROWS], int64_t rows) {
    const int64_t groups = x->groups, stride = scaled_row_bytes(groups);
    struct matrix_sums own;
    const struct matrix_sums *c = b->ready ? b->ready : &own;
    if (!b->ready) add_products_of_rows(b->pairs, b->count, row_values(x, row), stride, b->prefetch, b->lines, &own, 0, rows);
    for (int64_t i = 0; i < rows; i++) {
        const struct scaled_row *at = scaled_row_at(x->pairs, row + i, groups);
        for (int v = 0; v < BLOCK / VW; v += SCALED_ACROSS) {
            vi part[1][SCALED_ACROSS];
            for (int n = 0; n < SCALED_ACROSS; n++)
                part[0][n] = (vi)vload((const float *)c->half[(v + n) * VW / STRIP][i] + (v + n) * VW % STRIP);
            scaled_second(part, b->pairs + v * VW * 4, at->data, groups, stride, 1);
            for (int n = 0; n < SCALED_ACROSS; n++) {
                const vf scale = splat(at->scale) * vload((const float *)b->head + (v + n) * VW);
                sums[v + n][i] = __builtin_convertvector(part[0][n] - splat_int(at->sum * 128), vf) * scale;
            }
        }
    }
}
#else
#define HAS_INT8_MATRIX 0
#endif
