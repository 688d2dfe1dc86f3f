// The products of row_scaled_tile.h by matrix tiles (amx.h), from so many rows on as make up for a tile's fixed time. Sums are the
// same integers, so nothing depends on which of the two makes them. Rows and weights are read as they lie: the 64 columns of a
// tile are a pair of groups.
#pragma once
#include "amx.h"

#define FEW_ROWS 8  // are multiplied in vectors
#if HAS_AMX && UNSIGNED_CODES8
#define HAS_INT8_MATRIX 1

// c += rows of int8, `stride` bytes apart, times the codes of a block
INLINE void matrix_sums(const struct weight_block *b, const uint8_t *upper, int64_t stride, int32_t (*c)[BLOCK],
                        const int has_lower) {
    const uint8_t *lower = upper + HALF_ROWS * stride, *codes = b->pairs, *prefetch = b->prefetch;
    TILE_ZERO(4);
    TILE_ZERO(5);
    if (has_lower) {
        TILE_ZERO(6);
        TILE_ZERO(7);
    }
    for (int64_t k = 0; k < b->count; k++, codes += B_STEPS * B_STRIDE, upper += TILE_ROW, lower += TILE_ROW) {
        for (int64_t line = 0; line < b->lines; line++, prefetch += 64) __builtin_prefetch(prefetch, 0, 3);
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
    TILE_STORE(4, c, sizeof(*c));
    TILE_STORE(5, c[0] + STRIP, sizeof(*c));
    if (has_lower) {
        TILE_STORE(6, c + HALF_ROWS, sizeof(*c));
        TILE_STORE(7, c[HALF_ROWS] + STRIP, sizeof(*c));
    }
}

static void __attribute__((noinline)) matrix_by_row(const struct weight_block *b, const struct activations *x, int64_t row,
                                                    vf (*sums)[MAX_ROWS], int64_t rows) {
    const int64_t groups = x->groups, stride = scaled_row_bytes(groups);
    const struct scaled_row *first = scaled_row_at(x->pairs, row, groups);
    const uint8_t *values = first->data + scaled_row_steps(groups);
    _Alignas(64) int32_t c[AMX_ROWS][BLOCK];
    amx_configure(MIN(rows, HALF_ROWS), MAX(0, rows - HALF_ROWS), HALF_ROWS);
    if (rows > HALF_ROWS) matrix_sums(b, values, stride, c, 1);
    else matrix_sums(b, values, stride, c, 0);
    for (int64_t i = 0; i < rows; i++) {
        const struct scaled_row *at = scaled_row_at(x->pairs, row + i, groups);
        for (int v = 0; v < BLOCK / VW; v += SCALED_ACROSS) {
            vi part[1][SCALED_ACROSS];
            for (int n = 0; n < SCALED_ACROSS; n++) part[0][n] = (vi)vload((const float *)(c[i] + (v + n) * VW));
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
